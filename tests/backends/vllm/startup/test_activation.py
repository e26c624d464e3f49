"""vLLM on a GPU from the configuration to the start-up report, with a fake ledger and fake workers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from packaging.version import Version

from nsa_plugin.backends.vllm.startup import activation, serving
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v4.serving import V4Serving
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.serving import BACKEND, GpuServing
from nsa_plugin.errors import LeftToStockError, NoProviderError, PatchError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Ledger, Need, Patch, Target
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.patches.vllm import BOOTSTRAP
from nsa_plugin.telemetry import StartupReport
from tests.backends.counted import Counted
from tests.backends.fake_vllm.config import config, layer
from tests.backends.fake_vllm.v4 import H200
from tests.backends.fake_vllm.v4_config import config as v4_config
from tests.backends.fake_vllm.v4_config import layer as v4_layer
from tests.backends.fake_vllm.v32 import TRITON

ANOTHER = "FLASH_ATTN_MLA_SPARSE"


class Engine:
    """The functions that the ledger of these tests changes."""

    @staticmethod
    def serve() -> str:
        return "vLLM's"

    @staticmethod
    def serve_v4() -> str:
        return "vLLM's"

    @staticmethod
    def serve_portable() -> str:
        return "vLLM's"


def replacement(original: Any) -> Any:
    return staticmethod(lambda: "the plugin's")


PATCH = Patch(
    name="vllm.gpu-something",
    engine="vllm",
    need=Need.GPU,
    targets=(Target(path=f"{__name__}:Engine.serve", versions=">=0.20"),),
    replacement=f"{__name__}:replacement",
    why="stands in for the others",
)
V4_PATCH = replace(
    PATCH,
    name="vllm.v4-something",
    need=Need.GPU_V4,
    targets=(Target(path=f"{__name__}:Engine.serve_v4", versions=">=0.20"),),
)
PORTABLE_PATCH = replace(
    PATCH,
    name="vllm.portable-something",
    need=Need.PORTABLE,
    targets=(Target(path=f"{__name__}:Engine.serve_portable", versions=">=0.28"),),
)
DEVICE_KIND = activation.device_kind  # a fixture takes it away
FILE = f"{__name__.replace('.', '/')}.py"


SOURCE = "class Engine:\n def serve(): 0\n def serve_v4(): 0\n def serve_portable(): 0"


PATCHES = (PATCH, PORTABLE_PATCH, V4_PATCH)


class Worker:
    """vLLM's worker: built, given its GPU, then it loads its model and warms up."""

    def __init__(self, vllm_config: Any, rank: int = 0) -> None:
        self.vllm_config, self.rank, self.device = vllm_config, rank, "cpu"
        self.model_runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
        self.loaded = False

    def load_model(self) -> None:
        self.loaded = True
        backend = self.vllm_config.attention_config.backend or ANOTHER
        planned = backend == BACKEND and gpu_patches.planning() is not None
        self.vllm_config.compilation_config.static_forward_context["attn"] = layer(planned, backend)

    def compile_or_warm_up_model(self) -> float:
        return 1.5


class Here(GpuServing):
    """Replace the probed device by the one of these tests."""

    device: ClassVar[DeviceProfile] = TRITON

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, device_profile=lambda: self.device)


init_worker = activation.wrap_worker_init(Worker.__init__)
load_model = gpu_patches.worker_load(Worker.load_model)
warm_up = gpu_patches.worker_warm_up(Worker.compile_or_warm_up_model)


def engine_config(vllm_config: Any) -> Any:
    """Start as the process that reads the command line."""
    return activation.wrap_create_engine_config(lambda: vllm_config)()


def worker_of(vllm_config: Any, rank: int = 0) -> Worker:
    worker = Worker.__new__(Worker)
    init_worker(worker, vllm_config, rank)
    return worker


def configured(*, backend: str | None = None, cache_dtype: str = "fp8", **settings: Any) -> Any:
    vllm_config = config(
        cache_dtype,
        additional_config={"nsa_plugin": {"enabled": True} | settings},
        attention_config=SimpleNamespace(backend=backend),
    )
    vllm_config.model_config.model = "checkpoint"
    vllm_config.model_config.served_model_name = "model"
    return vllm_config


@pytest.fixture(autouse=True)
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
    monkeypatch.setattr(activation.counters, "collect_here", lambda: "a folder")
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({FILE: SOURCE}.get))
    monkeypatch.setattr(gpu_serving, "GpuServing", Here)
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)
    monkeypatch.setattr(gpu_serving, "warm", lambda *_: None)
    for name in ("warm_selection", "warm_reading", "warm_indexer", "warm_inputs"):
        monkeypatch.setattr(gpu_serving, name, lambda *_, **__: None)
    monkeypatch.setattr(activation, "use_engine_log", lambda: None)
    yield this
    ledger.undo()
    assert (Engine.serve(), Engine.serve_v4(), Engine.serve_portable()) == ("vLLM's",) * 3


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StartupReport]:
    published: list[StartupReport] = []
    monkeypatch.setattr(StartupReport, "publish", lambda report: published.append(report))
    return published


# ---------------------------------------------------------------------------------------------------
# What is refused wherever it is asked for


@pytest.mark.regression(28)
@pytest.mark.parametrize("version", ["0.19.1", "0.34.0"])
@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_another_version_is_refused_with_one_error(start: Any, process: VllmProcess, version: str):
    process.ledger.version = Version(version)
    with pytest.raises(PatchError, match=rf"vllm {version} is installed.*NSA_PLUGIN_ENABLED=0"):
        start(configured())
    assert (process.serving, process.counters, Engine.serve()) == (None, None, "vLLM's")


@pytest.mark.parametrize("version", ["0.9.2", "0.19.1", "0.34.0", "1.0"])
def test_every_version_has_the_hooks_that_refuse_it(version: str):
    hooks = {patch.name for patch in BOOTSTRAP if patch.target(Version(version))}
    assert hooks >= {"vllm.engine-config", "vllm.worker"}


def test_strict_off_leaves_another_version_to_vllm(
    process: VllmProcess, reports: list[StartupReport], caplog: pytest.LogCaptureFixture
):
    process.ledger.version = Version("0.19.1")
    vllm_config = configured(strict=False)
    with caplog.at_level(logging.WARNING, logger="nsa_plugin"):
        assert engine_config(vllm_config) is vllm_config
    assert "the stock engine serves" in caplog.text
    worker = worker_of(vllm_config)
    load_model(worker)
    assert warm_up(worker) == 1.5
    assert (worker.loaded, process.serving, Engine.serve()) == (True, None, "vLLM's")
    (report,) = reports
    assert not report.active
    assert "vllm 0.19.1 is installed" in report.text()


class Platform:
    """A platform of vLLM with the name of its devices."""

    def __init__(self, name: str, *, cpu: bool = False, cuda: bool = False) -> None:
        self.device_name, self.cpu, self.cuda = name, cpu, cuda

    def is_cpu(self) -> bool:
        return self.cpu

    def is_cuda(self) -> bool:
        return self.cuda


class RocmPlatform(Platform):
    """Torch calls its devices "cuda" too."""


def on_platform(monkeypatch: pytest.MonkeyPatch, platform: Platform) -> None:
    module = ModuleType("vllm.platforms")
    module.current_platform = platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(activation, "device_kind", DEVICE_KIND)


@pytest.mark.parametrize("name", ["rocm", "cuda", "cpu", ""])
@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_another_platform_with_cpu_or_cuda_devices_has_no_backend(
    start: Any, monkeypatch: pytest.MonkeyPatch, name: str
):
    on_platform(monkeypatch, RocmPlatform(name))
    with pytest.raises(LeftToStockError, match=r"does not support vLLM's platform RocmPlatform"):
        start(configured(strict="full"))
    assert start(configured()) is not None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_device_kind_of_cpus_and_nvidia_gpus(monkeypatch: pytest.MonkeyPatch, kind: str):
    on_platform(monkeypatch, Platform("", **{kind: True}))
    assert activation.device_kind() == kind


def test_nothing_is_refused_while_the_plugin_is_off(process: VllmProcess):
    vllm_config = configured(enabled=False)
    assert engine_config(vllm_config) is vllm_config
    assert worker_of(vllm_config).rank == 0
    assert process.serving is None


# ---------------------------------------------------------------------------------------------------
# On a GPU


def test_everything_is_checked_before_anything_is_started(process: VllmProcess):
    vllm_config = configured()
    assert engine_config(vllm_config) is vllm_config
    assert process.counters == "a folder"
    assert Engine.serve() == "vLLM's", "nothing is changed in the process that starts the workers"
    assert process.serving is None


LEFT = [
    (lambda c: setattr(c.cache_config, "cache_dtype", "nvfp4"), "--kv-cache-dtype is nvfp4"),
    (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "--decode-context-parallel-size 2"),
    (
        lambda c: setattr(c.model_config.hf_config, "architectures", ["DeepseekV41ForCausalLM"]),
        "supports DeepseekV4ForCausalLM here, not DeepseekV41ForCausalLM",
    ),
    (
        lambda c: setattr(c.model_config.hf_config, "architectures", ["HYV4ForCausalLM"]),
        "vLLM runs HYV4ForCausalLM with vllm.models.hy_v4",
    ),
]


@pytest.mark.parametrize(("change", "words"), LEFT)
@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_an_unsupported_configuration_ends_the_start_only_with_strict_full(start: Any, change: Any, words: str):
    vllm_config = configured(strict="full")
    change(vllm_config)
    with pytest.raises(LeftToStockError, match=words):
        start(vllm_config)


@pytest.mark.parametrize(("change", "words"), LEFT)
def test_an_unsupported_configuration_is_left_to_stock_vllm(
    process: VllmProcess, reports: list[StartupReport], caplog: pytest.LogCaptureFixture, change: Any, words: str
):
    vllm_config = configured()
    change(vllm_config)
    with caplog.at_level(logging.WARNING, logger="nsa_plugin"):
        assert engine_config(vllm_config) is vllm_config
    assert "left to the stock engine: " in caplog.text
    assert re.search(words, caplog.text)
    worker = worker_of(vllm_config)
    load_model(worker)
    warm_up(worker)
    assert (process.serving, worker.loaded, Engine.serve()) == (None, True, "vLLM's")
    (report,) = reports
    assert not report.active
    assert re.search(f"left to the stock engine: .*{words}", report.text())


@pytest.mark.regression(27)
def test_a_target_that_the_files_do_not_have(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({FILE: "class Engine: ..."}.get))
    with pytest.raises(PatchError, match=r"vllm.gpu-something to vllm 0.24.0.*Engine.serve"):
        engine_config(configured())


def test_a_worker_from_its_start_to_the_report(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    counted = Counted()
    labels: list[Any] = []
    monkeypatch.setattr(serving, "metrics_of", lambda given: labels.append(given) or counted)
    vllm_config = configured()
    worker = worker_of(vllm_config)
    assert Engine.serve() == "the plugin's"
    found = gpu_patches.serving()
    assert found is not None
    assert found.planner is None, "the worker has no GPU yet"
    assert found.request_ids() == ["a", "b"]
    assert labels == [{"model_name": "model", "engine": "0"}]

    load_model(worker)
    assert worker.loaded
    assert found.warmed
    assert vllm_config.attention_config.backend == BACKEND
    planner = gpu_patches.planning()
    assert planner is not None
    assert planner.metrics is counted
    assert planner.request_ids() == ["a", "b"]
    assert reports == [], "not before the worker is ready"

    monkeypatch.setattr(gpu_serving, "free_device_memory", lambda: 12345)
    assert warm_up(worker) == 1.5
    assert planner.free_memory is not None
    assert planner.free_memory() == 12345
    (report,) = reports
    assert report.active
    assert [status.state for status in report.statuses] == ["applied"]
    assert report.facts["attention"] == "1 layers on vLLM's FLASHMLA_SPARSE, the plugin's choice"
    assert "decode, 1 request" in report.facts
    assert report.all_notes() == []
    assert process.serving is found


def test_a_kv_connector_is_named_in_the_report(process: VllmProcess, reports: list[StartupReport]) -> None:
    vllm_config = configured()
    vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="SomeConnector")
    worker = worker_of(vllm_config)
    load_model(worker)
    warm_up(worker)
    (note,) = reports[0].all_notes()
    assert note.startswith("KV connector SomeConnector: vLLM does not report")


def test_only_the_first_rank_reports_and_counts(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "metrics_of", lambda labels: pytest.fail("only the first counts"))
    worker = worker_of(configured(trace="log"), 1)
    load_model(worker)
    warm_up(worker)
    found = gpu_patches.serving()
    assert found is not None
    assert (found.trace.mode, found.trace.rank, found.metrics, reports) == ("off", 1, None, [])


@pytest.mark.regression(28)
def test_the_users_backend_stays_and_is_in_the_report(reports: list[StartupReport]):
    worker = worker_of(configured(backend=ANOTHER))
    load_model(worker)
    warm_up(worker)
    assert worker.vllm_config.attention_config.backend == ANOTHER
    (report,) = reports
    assert not report.active
    assert f"layers on vLLM's backend {ANOTHER} are left to vLLM" in report.text()


FOREIGN = [
    (synthetic(70), "needs an SM80 or later GPU.* is SM70"),
    (synthetic(75), "needs an SM80 or later GPU.* is SM75"),
    (synthetic(0), "torch sees no NVIDIA GPU"),  # a ROCm build of torch under a platform that says it is CUDA
]


@pytest.mark.parametrize(("device", "words"), FOREIGN)
def test_with_strict_full_a_device_without_planned_layers_ends_the_start_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, device: DeviceProfile, words: str
):
    monkeypatch.setattr(Here, "device", device)
    worker = worker_of(configured(strict="full"))
    with pytest.raises(LeftToStockError, match=words):
        load_model(worker)
    assert not worker.loaded


def test_a_device_without_kernels_ends_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Here, "device", synthetic(90, libraries=()))
    worker = worker_of(configured())
    with pytest.raises(NoProviderError, match="no installed kernel library supports"):
        load_model(worker)
    assert not worker.loaded


@pytest.mark.parametrize(("device", "words"), FOREIGN)
def test_stock_vllm_serves_on_such_a_device(
    process: VllmProcess,
    reports: list[StartupReport],
    monkeypatch: pytest.MonkeyPatch,
    device: DeviceProfile,
    words: str,
):
    monkeypatch.setattr(Here, "device", device)
    worker = worker_of(configured())
    load_model(worker)
    warm_up(worker)
    assert (worker.loaded, worker.vllm_config.attention_config.backend) == (True, None)
    assert (process.serving, gpu_patches.planning()) == (None, None)
    (report,) = reports
    assert not report.active
    assert re.search(words, report.text())


BLACKWELL = synthetic(100, libraries=("triton", "deep_gemm"))


def test_with_strict_full_layers_on_another_backend_of_vllms_choice_end_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Here, "device", BLACKWELL)
    worker = worker_of(configured(strict="full"))
    words = f"no layer of the model attends by vLLM's {BACKEND}.*vLLM chose {ANOTHER}, on SM100.*--attention-backend"
    with pytest.raises(LeftToStockError, match=words):
        load_model(worker)


@pytest.mark.regression(28)
def test_layers_that_vllm_gives_another_backend_are_left_to_stock_vllm(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
):
    """On SM100 vLLM chooses the backend, and the report does not count its layers as the plugin's."""
    monkeypatch.setattr(Here, "device", BLACKWELL)
    worker = worker_of(configured())
    load_model(worker)
    warm_up(worker)
    assert (process.serving, gpu_patches.planning()) == (None, None)
    (report,) = reports
    assert not report.active
    assert f"vLLM chose {ANOTHER}" in report.text()


def test_on_sm100_the_users_backend_is_planned_for(reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Here, "device", BLACKWELL)
    worker = worker_of(configured(backend=BACKEND))
    load_model(worker)
    warm_up(worker)
    (report,) = reports
    assert report.active
    assert report.facts["attention"] == f"1 layers on vLLM's {BACKEND}"


def _fails(*_: Any) -> None:
    raise NoProviderError("a kernel does not run")


@pytest.mark.regression(18)
def test_a_kernel_that_does_not_run_ends_the_start_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_serving, "warm", _fails)
    worker = worker_of(configured())
    with pytest.raises(NoProviderError, match="a kernel does not run"):
        load_model(worker)
    assert not worker.loaded


@pytest.mark.parametrize("rank", [0, 1])
def test_with_strict_off_vllm_serves_instead(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch, rank: int
):
    monkeypatch.setattr(gpu_serving, "warm", _fails)
    worker = worker_of(configured(strict=False), rank)
    load_model(worker)
    warm_up(worker)
    assert (worker.loaded, worker.vllm_config.attention_config.backend) == (True, None)
    assert (process.serving, gpu_patches.planning()) == (None, None)
    assert [report.active for report in reports] == [False] * (rank == 0)
    assert all("a kernel does not run" in report.text() for report in reports)


def test_the_settings_are_read_once(monkeypatch: pytest.MonkeyPatch):
    reads: list[Any] = []
    read = activation.settings_of
    monkeypatch.setattr(activation, "settings_of", lambda vllm_config: reads.append(vllm_config) or read(vllm_config))
    vllm_config = configured()
    engine_config(vllm_config)
    worker_of(vllm_config)
    assert len(reads) == 1
    another = configured(mha_max_kv=0)
    engine_config(another)
    assert [entry is another for entry in reads] == [False, True]


# ---------------------------------------------------------------------------------------------------
# The portable path


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
    with pytest.raises(SettingsError, match="portable is on and cannot work for DeepSeek-V4; allowed here: auto"):
        worker_of(_enabled(v4_config(), portable="on"))
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
    enum = {BACKEND: BACKEND, gpu_serving.SM120_BACKEND: gpu_serving.SM120_BACKEND}
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


# ---------------------------------------------------------------------------------------------------
# DeepSeek-V4


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
    return _enabled(v4_config())


def _enabled(vllm_config: Any, **settings: Any) -> Any:
    vllm_config.additional_config = {"nsa_plugin": {"enabled": True} | settings}
    vllm_config.model_config.served_model_name = "model"
    return vllm_config


@pytest.mark.parametrize("start", [engine_config, worker_of])
def test_with_strict_full_an_unsupported_v4_configuration_is_one_error(start: Any, process: VllmProcess):
    with pytest.raises(LeftToStockError, match=r"does not support parallel_drafting"):
        start(_enabled(v4_config(speculative_config=PARALLEL), strict="full"))
    assert (process.serving, Engine.serve(), Engine.serve_v4()) == (None, "vLLM's", "vLLM's")


def test_stock_vllm_serves_unsupported_v4(process: VllmProcess, reports: list[StartupReport]):
    vllm_config = _enabled(v4_config(speculative_config=PARALLEL))
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


SWITCHED_OFF = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from nsa_plugin.backends.vllm import register
register()
register()
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"vllm", "torch", "triton", "numpy"}, loaded
assert "nsa_plugin.backends.vllm.startup.activation" not in sys.modules
"""


def test_with_the_kill_switch_the_entry_point_loads_nothing():
    environ = os.environ | {"NSA_PLUGIN_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", SWITCHED_OFF], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nsa-plugin is off: NSA_PLUGIN_ENABLED=0") == 1


@pytest.mark.parametrize("key", ["nsa-plugin", "NSA_PLUGIN", "nsa_plugins"])
def test_a_misspelt_key_of_the_configuration_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key '{key}' in --additional-config. Did you mean 'nsa_plugin'"):
        activation.settings_of(SimpleNamespace(additional_config={key: {"enabled": True}}))


def test_other_keys_of_the_configuration_are_left_alone() -> None:
    read = activation.settings_of(SimpleNamespace(additional_config={"ascend_scheduler_config": {}, "nsa": 1}))
    assert not read.settings.enabled
