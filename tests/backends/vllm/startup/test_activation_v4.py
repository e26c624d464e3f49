"""The start under vLLM with a DeepSeek-V4 model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v4.serving import V4Serving
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.errors import LeftToStockError, PatchError
from nsa_plugin.patches import static
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.telemetry import StartupReport
from tests.backends.fake_vllm.start import (
    FILE,
    Engine,
    configured,
    enabled_v4,
    engine_config,
    load_model,
    warm_up,
    worker_of,
)
from tests.backends.fake_vllm.v4 import H200
from tests.backends.fake_vllm.v4_config import config as v4_config
from tests.backends.fake_vllm.v4_config import layer as v4_layer

pytestmark = pytest.mark.usefixtures("process", "reports")


PARALLEL = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=True)


class V4Here(V4Serving):
    """Replace the probed device by the one of these tests."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, device_profile=lambda: H200)


@pytest.fixture
def v4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration of a V4 model."""
    monkeypatch.setattr(v4_serving, "V4Serving", V4Here)
    for name in ("warm_v4", "warm_selection", "warm_slots"):
        monkeypatch.setattr(v4_serving, name, lambda *_, **__: None)
    return enabled_v4(v4_config())


@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_with_strict_full_an_unsupported_v4_configuration_is_one_error(start: Any, process: VllmProcess):
    with pytest.raises(LeftToStockError, match=r"does not support parallel_drafting"):
        start(enabled_v4(v4_config(speculative_config=PARALLEL), strict="full"))
    assert (process.serving, Engine.serve(), Engine.serve_v4()) == (None, "vLLM's", "vLLM's")


def test_stock_vllm_serves_unsupported_v4(process: VllmProcess, reports: list[StartupReport]):
    vllm_config = enabled_v4(v4_config(speculative_config=PARALLEL))
    assert engine_config(vllm_config) is vllm_config
    worker_of(vllm_config)
    assert (process.serving, Engine.serve_v4()) == (None, "vLLM's")
    assert "does not support parallel_drafting" in reports[0].text()


def test_a_v4_worker_from_its_start_to_the_report(v4: Any, process: VllmProcess, reports: list[StartupReport]):
    engine_config(v4)
    assert Engine.serve_v4() == "vLLM's", "nothing is changed in the process that starts the workers"
    worker = worker_of(v4)
    assert (Engine.serve(), Engine.serve_v4()) == ("the plugin's", "the plugin's")
    assert isinstance(process.serving, V4Serving)
    v4.compilation_config.static_forward_context["v4"] = v4_layer("FLASHMLA_SPARSE_DSV4")
    load_model(worker)
    assert v4.attention_config.backend is None
    assert gpu_patches.planning() is process.serving.planner
    warm_up(worker)
    (report,) = reports
    assert report.active
    assert [status.patch.name for status in report.statuses] == ["vllm.gpu-something", "vllm.v4-something"]
    assert report.facts["attention"] == "1 layers on vLLM's FLASHMLA_SPARSE_DSV4"


def test_v4s_patches_are_not_applied_for_another_model():
    worker_of(configured())
    assert (Engine.serve(), Engine.serve_v4()) == ("the plugin's", "vLLM's")


def test_a_target_of_v4_that_the_files_do_not_have(v4: Any, monkeypatch: pytest.MonkeyPatch):
    source = SourceTree({FILE: "class Engine:\n def serve(): 0"}.get)
    monkeypatch.setattr(static, "installed", lambda package: source)
    with pytest.raises(PatchError, match=r"vllm.v4-something to vllm 0.24.0.*Engine.serve_v4"):
        engine_config(v4)
    engine_config(configured())
