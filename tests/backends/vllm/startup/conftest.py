"""A vLLM on a GPU, as it starts with the plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from packaging.version import Version

from nsa_plugin.backends.common import warm
from nsa_plugin.backends.vllm.startup import activation, counters
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import BACKEND
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Ledger
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.telemetry import StartupReport
from tests.backends.fake_vllm.start import FILE, PATCHES, SOURCE, Engine, Here


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmProcess]:
    """A process of a vLLM on a GPU."""
    ledger = Ledger(engine="vllm", version=Version("0.24.0"), supported=">=0.20,<0.34", patches=PATCHES)
    this = VllmProcess(ledger)
    for module in (activation, gpu_patches):
        monkeypatch.setattr(module, "process", lambda: this)
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = {BACKEND: BACKEND}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(activation, "device_kind", lambda: "cuda")
    monkeypatch.setattr(activation, "device_sm", lambda: Here.device.sm)
    monkeypatch.setattr(counters, "collect_here", lambda: "a folder")
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({FILE: SOURCE}.get))
    monkeypatch.setattr(static, "is_loaded", lambda module: False)
    monkeypatch.setattr(gpu_serving, "GpuServing", Here)
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)
    monkeypatch.setattr(gpu_serving, "warm", lambda *_: None)
    for name in ("warm_selection", "warm_reading", "warm_indexer", "warm_inputs", "warm_shard"):
        monkeypatch.setattr(gpu_serving, name, lambda *_, **__: None)
    monkeypatch.setattr(warm, "hash_triton", lambda: None)
    monkeypatch.setattr(activation, "use_engine_log", lambda: None)
    yield this
    ledger.undo()
    assert (Engine.serve(), Engine.serve_v4(), Engine.serve_portable()) == ("vLLM's",) * 3


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StartupReport]:
    published: list[StartupReport] = []
    monkeypatch.setattr(StartupReport, "publish", lambda report: published.append(report))
    return published
