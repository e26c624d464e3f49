"""The start under vLLM with a DeepSeek-V4 model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from packaging.version import Version

from nsa_plugin.backends.vllm.startup import activation
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v4.serving import V4Serving
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.errors import LeftToStockError, PatchError
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
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

    device: ClassVar[DeviceProfile] = H200

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, device_profile=lambda: self.device)


@pytest.fixture
def v4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration of a V4 model."""
    monkeypatch.setattr(v4_serving, "V4Serving", V4Here)
    for name in ("warm_v4", "warm_selection", "warm_slots", "warm_indexer"):
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


def served(vllm_config: Any, backend: str) -> Any:
    """Start a worker whose V4 layers have a backend, up to the report."""
    worker = worker_of(vllm_config)
    vllm_config.compilation_config.static_forward_context["v4"] = v4_layer(backend)
    load_model(worker)
    warm_up(worker)
    return worker


def test_the_portable_path_serves_v4_on_sm120_with_vllms_flashmla_layers(
    v4: Any, process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    """vLLM builds them only if the user asks for them: FlashInfer's are its choice."""
    monkeypatch.setattr(V4Here, "device", synthetic(120, libraries=("triton",)))
    monkeypatch.setattr(activation, "device_sm", lambda: 120)
    process.ledger.version = Version("0.33.0")
    served(v4, "FLASHMLA_SPARSE_DSV4")
    assert (Engine.serve_v4(), Engine.serve_portable()) == ("the plugin's", "the plugin's")
    planner = gpu_patches.planning()
    assert planner is not None
    assert (planner.portable, planner.device.sm) == (True, 120)
    (report,) = reports
    assert report.active
    assert report.left == []
    assert report.facts["decode, 64 requests"].startswith("direct by triton; ")


@pytest.mark.parametrize("asked", [None, "FLASHINFER_MLA_SPARSE_DSV4"])
def test_flashinfers_layers_on_sm120_are_left_to_vllm(
    v4: Any, process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch, asked: str | None
):
    monkeypatch.setattr(V4Here, "device", synthetic(120, libraries=("triton",)))
    monkeypatch.setattr(activation, "device_sm", lambda: 120)
    process.ledger.version = Version("0.33.0")
    v4.attention_config.backend = asked
    served(v4, "FLASHINFER_MLA_SPARSE_DSV4")
    assert process.serving is None
    said = reports[0].text()
    assert "vLLM chose FLASHINFER_MLA_SPARSE_DSV4, on SM120" in said
    assert "Select it with --attention-backend FLASHMLA_SPARSE_DSV4" in said


@pytest.mark.parametrize("sm", [80, 86, 89, 110])
@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_other_gpus_of_the_portable_path_read_which_kernels_vllm_lacks(
    v4: Any, process: VllmProcess, monkeypatch: pytest.MonkeyPatch, sm: int, start: Any
):
    monkeypatch.setattr(activation, "device_sm", lambda: sm)
    process.ledger.version = Version("0.33.0")
    v4.additional_config["nsa_plugin"]["strict"] = "full"
    with pytest.raises(LeftToStockError, match=rf"vLLM cannot run DeepSeek-V4 on SM{sm}, .*tf32_hc_prenorm_gemm"):
        start(v4)
    assert (process.serving, Engine.serve_v4()) == (None, "vLLM's")


@pytest.mark.parametrize(
    ("sm", "version", "words"),
    [
        (80, "0.33.0", "its output projection (fp8_einsum) call DeepGEMM"),
        (120, "0.32.0", "portable path for DeepSeek-V4 supports vLLM >=0.33,<0.34; this is 0.32.0"),
    ],
)
def test_stock_vllm_starts_there_and_the_report_has_the_reason(
    v4: Any,
    process: VllmProcess,
    reports: list[StartupReport],
    monkeypatch: pytest.MonkeyPatch,
    sm: int,
    version: str,
    words: str,
):
    monkeypatch.setattr(activation, "device_sm", lambda: sm)
    process.ledger.version = Version(version)
    worker_of(v4)
    assert process.serving is None
    assert words in reports[0].text()


def test_portable_on_emulates_an_older_gpu_for_v4(
    v4: Any, process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    """The model's other kernels are the real GPU's."""
    emulated: list[int] = []
    monkeypatch.setattr("nsa_plugin.kernels.triton.device.emulate", emulated.append)
    monkeypatch.setattr(V4Here, "device", synthetic(90))
    process.ledger.version = Version("0.33.0")
    v4.additional_config["nsa_plugin"]["portable"] = "on"
    served(v4, "FLASHMLA_SPARSE_DSV4")
    planner = gpu_patches.planning()
    assert planner is not None
    assert (planner.portable, planner.device.sm, emulated) == (True, 86, [86])
    plans = planner.prefill_plan(60, 60), planner.step_plan(1, 1, 1)
    assert {plan.provider for plan in plans} <= {"cuda", "triton"}
    assert {plan.indexer.provider for plan in plans} <= {"triton", ""}
    (report,) = reports
    assert (report.active, report.left) == (True, [])
    names = [status.patch.name for status in report.statuses]
    assert names == ["vllm.gpu-something", "vllm.portable-something", "vllm.v4-something"]


def test_a_v4_worker_on_another_gpu_than_vllm_reported_does_not_serve(
    v4: Any, process: VllmProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(V4Here, "device", synthetic(120, libraries=("triton",)))
    monkeypatch.setattr(activation, "device_sm", lambda: 90)
    process.ledger.version = Version("0.33.0")
    with pytest.raises(PatchError, match=r"vLLM did not report SM120.*NSA_PLUGIN_ENABLED=0"):
        load_model(worker_of(v4))
