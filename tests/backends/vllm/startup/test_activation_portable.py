"""The start under vLLM on GPUs that only the portable path serves, or that it emulates."""

from __future__ import annotations

import sys

import pytest
from packaging.version import Version

from nsa_plugin.backends.vllm.startup import activation
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32.choice import BACKEND, SM120_BACKEND
from nsa_plugin.errors import PatchError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.telemetry import StartupReport
from tests.backends.fake_vllm.start import Engine, Here, configured, load_model, warm_up, worker_of

pytestmark = pytest.mark.usefixtures("process", "reports")


@pytest.mark.parametrize("sm", [80, 86, 89, 110, 120])
def test_the_portable_path_serves_gpus_without_kernels_of_flashmla(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch, sm: int
):
    monkeypatch.setattr(Here, "device", synthetic(sm, libraries=("triton",)))
    process.ledger.version = Version("0.28.0")
    worker = worker_of(configured())
    assert (Engine.serve(), Engine.serve_portable()) == ("the plugin's", "the plugin's")
    load_model(worker)
    warm_up(worker)
    assert worker.vllm_config.attention_config.backend == BACKEND
    planner = gpu_patches.planning()
    assert planner is not None
    assert (planner.portable, planner.device.sm) == (True, sm)
    (report,) = reports
    assert report.active


def test_other_gpus_are_served_without_its_changes(process: VllmProcess):
    process.ledger.version = Version("0.28.0")
    load_model(worker_of(configured()))
    planner = gpu_patches.planning()
    assert planner is not None
    assert (planner.portable, Engine.serve_portable()) == (False, "vLLM's")


def test_an_older_vllm_has_no_portable_path(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Here, "device", synthetic(86, libraries=("triton",)))
    process.ledger.version = Version("0.27.1")
    load_model(worker_of(configured()))
    assert process.serving is None
    assert "portable path supports vLLM >=0.28" in reports[0].text()


def test_portable_on_emulates_an_older_gpu(process: VllmProcess, monkeypatch: pytest.MonkeyPatch):
    emulated: list[int] = []
    monkeypatch.setattr("nsa_plugin.kernels.triton.device.emulate", emulated.append)
    monkeypatch.setattr(Here, "device", synthetic(90))
    process.ledger.version = Version("0.33.0")
    load_model(worker_of(configured(portable="on")))
    planner = gpu_patches.planning()
    assert planner is not None
    assert (planner.portable, planner.device.sm, emulated) == (True, 86, [86])
    assert planner.device.smem_per_block == 99 << 10
    assert {plan.provider for plan in (planner.prefill_plan(60, 60), planner.step_plan(1, 1, 1))} <= {"cuda", "triton"}
    assert Engine.serve_portable() == "the plugin's"


def test_portable_on_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activation, "device_kind", lambda: "cpu")
    with pytest.raises(SettingsError, match="portable is on and cannot work on a CPU"):
        worker_of(configured(portable="on"))


def test_a_worker_on_another_gpu_than_vllm_reported_does_not_serve(
    process: VllmProcess, monkeypatch: pytest.MonkeyPatch
):
    """The ledger's entries are chosen before the worker has its GPU."""
    monkeypatch.setattr(Here, "device", synthetic(86, libraries=("triton",)))
    monkeypatch.setattr(activation, "device_sm", lambda: 90)
    process.ledger.version = Version("0.33.0")
    with pytest.raises(PatchError, match=r"vLLM did not report SM86.*NSA_PLUGIN_ENABLED=0"):
        load_model(worker_of(configured()))


@pytest.mark.parametrize("backend", [None, "FLASHINFER_MLA_SPARSE_SM120"])
@pytest.mark.parametrize("cache_dtype", ["fp8", "bfloat16"])
def test_vllms_backend_for_sm120_is_kept(
    process: VllmProcess,
    reports: list[StartupReport],
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    cache_dtype: str,
):
    enum = {BACKEND: BACKEND, SM120_BACKEND: SM120_BACKEND}
    names = type("Names", (dict,), {name: name for name in enum})(enum)
    monkeypatch.setattr(sys.modules["vllm.v1.attention.backends.registry"], "AttentionBackendEnum", names)
    monkeypatch.setattr(Here, "device", synthetic(120, libraries=("triton",)))
    process.ledger.version = Version("0.33.0")
    vllm_config = configured(backend=backend, cache_dtype=cache_dtype)
    vllm_config.model_config.hf_text_config.index_topk = 2048
    load_model(worker_of(vllm_config))
    kept = backend is not None or cache_dtype == "fp8"
    assert (vllm_config.attention_config.backend == BACKEND) is not kept
    assert (process.serving is None) is kept
    assert not kept or "Select it with --attention-backend FLASHMLA_SPARSE" in reports[0].text()
