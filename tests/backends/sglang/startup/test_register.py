"""What SGLang's entry point imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nsa_plugin import switch
from tests.backends.sglang.startup.light import ENTERED

PROGRAM = """
import multiprocessing, os, sys, types
HEAVY = {heavy}

class ServerArgs:
    @staticmethod
    def add_cli_args(parser): ...
    @classmethod
    def from_cli_args(cls, args): ...
    def resolve_once(self): ...

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)

def child(loaded):
    for name in ("sglang", "sglang.srt", loaded or "none"):
        module(name)
    module("sglang.version", __version__="0.5.23")
    module("sglang.srt.server_args", ServerArgs=ServerArgs)
    from nsa_plugin.backends.sglang import register
    register()
    print(*sorted(name for name in sys.modules if name.startswith(("nsa_plugin", *HEAVY))))

if sys.argv[1] == "child":
    process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join()
else:
    child(sys.argv[2])
"""
HEAVY = ("numpy", "pydantic", "rich", "torch", "transformers", "triton", "vllm")
LIGHT = ["nsa_plugin", "nsa_plugin.backends", "nsa_plugin.backends.sglang", "nsa_plugin.switch"]


def imported(where: str, loaded: str, environ: dict[str, str]) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NSA_PLUGIN_")}
    clean.pop(switch.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{heavy}", repr(HEAVY)), where, loaded],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=300,
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
    [
        ("main", {"NSA_PLUGIN_ENABLED": "0"}),
        ("child", {"NSA_PLUGIN_ENABLED": "0"}),
        ("main", {}),
        ("child", {switch.VARIABLE: "{}"}),
    ],
    ids=[
        "switched off, reads its flags",
        "switched off, a child that may read flags",
        "not enabled",
        "a server's child",
    ],
)
def test_elsewhere_it_imports_what_its_first_patches_need_and_nothing_heavy(where, environ):
    """Also tests/sglang, with a real SGLang."""
    assert imported(where, "", environ) == ENTERED
