"""What SGLang's entry point imports while the kill switch is set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nsa_plugin import switch

PROGRAM = """
import multiprocessing, os, sys, types

def child(loaded):
    if loaded:
        sys.modules[loaded] = types.ModuleType(loaded)
    from nsa_plugin.backends.sglang import register
    try:
        register()
    except Exception:
        pass  # SGLang is not installed: the activation was imported, which is what counts
    print(*sorted(name for name in sys.modules if name.startswith("nsa_plugin")))

if sys.argv[1] == "child":
    process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join()
else:
    child(sys.argv[2])
"""
LIGHT = ["nsa_plugin", "nsa_plugin.backends", "nsa_plugin.backends.sglang", "nsa_plugin.switch"]
ACTIVATION = "nsa_plugin.backends.sglang.startup.activation"


def imported(where: str, loaded: str, environ: dict[str, str]) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NSA_PLUGIN_")}
    clean.pop(switch.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, where, loaded],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("loaded", "environ"),
    [(switch.SCHEDULER_MODULE, {}), ("", {switch.VARIABLE: "{}"})],
    ids=["a scheduler", "a process of a server that read its flags"],
)
def test_a_process_that_sglang_starts_imports_no_adapter_when_switched_off(loaded, environ):
    assert imported("child", loaded, environ | {"NSA_PLUGIN_ENABLED": "0"}) == LIGHT


@pytest.mark.parametrize(
    ("where", "environ"),
    [("main", {"NSA_PLUGIN_ENABLED": "0"}), ("child", {"NSA_PLUGIN_ENABLED": "0"}), ("child", {switch.VARIABLE: "{}"})],
    ids=["switched off, reads its flags", "switched off, a child that may read flags", "not switched off"],
)
def test_elsewhere_the_activation_is_loaded(where, environ):
    assert ACTIVATION in imported(where, "", environ)


def test_the_process_that_reads_flags_imports_no_decision_and_no_telemetry():
    loaded = imported("main", "", {"NSA_PLUGIN_ENABLED": "0"})
    late = {"nsa_plugin.decision.dispatch", "nsa_plugin.telemetry", "nsa_plugin.patches.static", "nsa_plugin.kernels"}
    assert not late & set(loaded)
