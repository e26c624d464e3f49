"""What vLLM's entry point imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nsa_plugin.backends.vllm import RAY_PREFIXES, register

PROGRAM = """
import sys, types
from types import SimpleNamespace

class EngineArgs:
    def create_engine_config(self, usage_context, headless): ...

class WorkerBase:
    def __init__(self, vllm_config, local_rank, rank, distributed_init_method): ...

class CpuPlatform:
    @classmethod
    def check_and_update_config(cls, vllm_config): ...

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)

for name in ("engine", "v1", "v1.worker"):
    module("vllm." + name)
module("vllm", __version__="0.33.0")
module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: True))
module("vllm.engine.arg_utils", EngineArgs=EngineArgs)
module("vllm.v1.worker.worker_base", WorkerBase=WorkerBase)
module("vllm.platforms.cpu", CpuPlatform=CpuPlatform)
from nsa_plugin.backends.vllm import register
register()
heavy = ("numpy", "pydantic", "rich", "torch", "transformers", "triton", "sglang")
print(hasattr(WorkerBase.__init__, "__nsa_plugin_patch__"))
print(*sorted(name for name in sys.modules if name.startswith(("nsa_plugin", *heavy))))
"""
KILLED = ["nsa_plugin", "nsa_plugin.backends", "nsa_plugin.backends.vllm", "nsa_plugin.switch"]
ENTERED = sorted(
    [
        *KILLED,
        "nsa_plugin.backends.vllm.startup",
        "nsa_plugin.backends.vllm.startup.activation",
        "nsa_plugin.errors",
        "nsa_plugin.patches",
        "nsa_plugin.patches.ledger",
        "nsa_plugin.patches.section",
        "nsa_plugin.patches.vllm",
        "nsa_plugin.patches.vllm_gpu",
        "nsa_plugin.patches.vllm_portable",
        "nsa_plugin.patches.vllm_v4",
    ]
)


@pytest.mark.parametrize(
    ("environ", "patched", "modules"),
    [
        ({"NSA_PLUGIN_ENABLED": "0"}, "False", KILLED),
        ({}, "True", ENTERED),
        ({"NSA_PLUGIN_ENABLED": "1"}, "True", ENTERED),
    ],
    ids=["switched off", "not enabled", "enabled"],
)
def test_it_imports_what_its_first_patches_need_and_nothing_heavy(environ, patched, modules):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NSA_PLUGIN_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environ, capture_output=True, text=True, timeout=300, check=True
    )
    marked, names = done.stdout.splitlines()
    assert (marked, names.split()) == (patched, modules)


@pytest.mark.parametrize(
    ("given", "then"),
    [(None, "NSA_PLUGIN_"), ("", "NSA_PLUGIN_"), ("MY_,NSA_PLUGIN_", "MY_,NSA_PLUGIN_"), ("MY_", "MY_,NSA_PLUGIN_")],
)
def test_vllm_copies_the_settings_to_what_ray_starts(
    given: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also `NSA_PLUGIN_ENABLED=0`: a worker must not serve what this process was told to leave."""
    monkeypatch.setenv("NSA_PLUGIN_ENABLED", "0")
    monkeypatch.delenv(RAY_PREFIXES, raising=False)
    if given is not None:
        monkeypatch.setenv(RAY_PREFIXES, given)
    register()
    assert os.environ[RAY_PREFIXES] == then
