"""How a V4 backend of the plugin begins: SGLang is asked, kernels run, or every batch falls back to the stock path."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.paths import DECODE_KERNEL
from nsa_plugin.backends.sglang.startup import backend as startup_backend
from nsa_plugin.backends.sglang.startup import samples, serving
from nsa_plugin.backends.sglang.startup.serving import SglangServing
from nsa_plugin.backends.sglang.v4.attention import with_v4_plans
from nsa_plugin.errors import NoProviderError
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.fake_sglang.v4 import H200, MODEL, Engine, batch, envs

pytestmark = pytest.mark.usefixtures("nothing_measured")


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's two modules that are asked, and no run of kernels that need a GPU."""
    for name, attribute, value in (("sglang.srt.environ", "envs", envs), ("sglang.version", "__version__", "0.5.14")):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    for package in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(serving, "_warm_selection", lambda *arguments: None)
    monkeypatch.setattr(serving, "v4_shape", lambda runner: MODEL)
    monkeypatch.setattr(serving, "free_device_memory", lambda: 64 << 30)
    monkeypatch.setattr(samples, "describe", lambda route: route)
    monkeypatch.delenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", raising=False)


def begin(
    of: Any, original: type = Engine, warmed: bool = False, **settings: Any
) -> tuple[Any, list[str], dict[str, Any]]:
    backend = with_v4_plans(original)(of)
    backend.device = "cpu"
    made = SglangServing(ResolvedSettings(Settings(**settings), {}), MODEL, H200, Trace(), None)
    if warmed:
        made._warmed.add(MODEL)
    made.adopt(backend, SimpleNamespace(server_args=SimpleNamespace()))
    return backend, made.notes, made.routes


def test_a_backend_starts_with_routes_and_stock_notes():
    backend, notes, routes = begin(batch((9, 300)), prefill_backend="reference")
    assert backend.nsa_plugin.own_heads_first
    assert backend.nsa_plugin.planner.asked == frozenset()
    assert "V4 prefill, 1024 of 4096 tokens" in routes
    assert "decode, verify and draft steps" in notes[0]


def test_the_longest_context_is_the_servers_where_the_backend_has_it():
    class Later(Engine):
        """The backend from 0.5.16 on."""

        def __init__(self, of: Any) -> None:
            super().__init__(of)
            self.max_context_len = 2048

    assert "V4 prefill, 2048 of 2048 tokens" in begin(batch((9, 300)), Later, prefill_backend="reference")[2]


def test_an_older_version_has_its_heads_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.5.13")
    monkeypatch.setattr(
        serving, "v4_shape", lambda runner: replace(MODEL, num_heads=4 * MODEL.num_heads, attn_tp_size=4)
    )
    backend, *_ = begin(batch((9, 300)), prefill_backend="reference")
    assert not backend.nsa_plugin.own_heads_first
    # A layer attends all heads there, so plans are for all of them.
    assert backend.nsa_plugin.planner.model.heads_per_rank == 4 * MODEL.num_heads
    monkeypatch.setattr(sys.modules["sglang.version"], "__version__", "0.5.14")
    backend, *_ = begin(batch((9, 300)), prefill_backend="reference")
    assert backend.nsa_plugin.planner.model.heads_per_rank == MODEL.num_heads


def test_sglangs_variable_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", "0")
    backend, _, routes = begin(batch((9, 300)))
    assert backend.nsa_plugin.planner.asked == {DECODE_KERNEL}
    assert {route.path for route in routes.values()} == {DECODE_KERNEL}


@pytest.mark.parametrize("value", ["0", "1"])
def test_whether_sglang_makes_rows_is_asked(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL", value)
    backend, *_ = begin(batch((9, 300)), prefill_backend="reference")
    assert backend.nsa_plugin.planner.engine_makes_rows is (value == "1")


def test_an_unsupported_feature_gives_no_routes():
    class Hisparse(Engine):
        def __init__(self, of: Any) -> None:
            super().__init__(of)
            self.hisparse_coordinator = object()

    backend, notes, routes = begin(batch((9, 300)), Hisparse)
    assert backend.nsa_plugin is None
    assert not routes
    assert "hisparse" in notes[0]


def test_kernels_run_before_serving_unless_they_have_for_another_backend(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any) -> None:
        raise NoProviderError("does not run here")

    monkeypatch.setattr(serving, "warm_v4", refuse)
    with pytest.raises(NoProviderError, match="does not run here"):
        begin(batch((9, 300)), prefill_backend="reference")
    backend, *_ = begin(batch((9, 300)), prefill_backend="reference", warmed=True)
    assert backend.nsa_plugin is not None


def test_the_class_keeps_the_engines_signature_and_refuses_a_cpu():
    class Built(Engine):
        def __init__(self, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0) -> None:
            super().__init__(model_runner.batch)

    made = startup_backend.make_v4(Built)
    assert made.__name__ == "NsaPluginBuilt"
    assert made.nsa_plugin_replaces is Built
    assert issubclass(made, Built)
    with pytest.raises(NoProviderError, match="needs a GPU"):
        made(SimpleNamespace(device=torch.device("cpu")))
