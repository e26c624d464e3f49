"""vLLM on a GPU from the configuration to the start-up report, with a fake ledger and fake workers."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from nsa_plugin import settings
from nsa_plugin.backends.common import warm
from nsa_plugin.backends.vllm.startup import activation, serving
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import BACKEND
from nsa_plugin.errors import LeftToStockError, NoProviderError, PatchError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.patches.vllm import BOOTSTRAP
from nsa_plugin.telemetry import StartupReport
from nsa_plugin.tools.compare.measured import Run
from nsa_plugin.tools.compare.verdict import shares_cache
from tests.backends.counted import Counted
from tests.backends.fake_vllm.start import (
    ANOTHER,
    DEVICE_KIND,
    FILE,
    PATCHES,
    V4_PATCH,
    Engine,
    Here,
    configured,
    engine_config,
    load_model,
    warm_up,
    worker_of,
)

pytestmark = pytest.mark.usefixtures("process", "reports")


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
    assert process.counters == "a folder", "/metrics says what is left to vLLM"
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


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"'trace' is .*which cannot be written"):
        engine_config(configured(trace=str(tmp_path / "absent" / "t.jsonl")))


LEFT = [
    (lambda c: setattr(c.cache_config, "cache_dtype", "nvfp4"), "--kv-cache-dtype is nvfp4"),
    (
        lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        "supports --decode-context-parallel-size 2 in vLLM >=0.29,<0.34; this is 0.24.0",
    ),
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


def sharing(**given: Any) -> Any:
    """A configuration with the KV cache shared between two ranks."""
    vllm_config = configured(**given)
    vars(vllm_config.parallel_config).update(decode_context_parallel_size=2, cp_kv_cache_interleave_size=1)
    return vllm_config


@pytest.mark.parametrize("version", ["0.29.0", "0.33.0"])
def test_decode_context_parallelism_is_served(process: VllmProcess, reports: list[StartupReport], version: str):
    process.ledger.version = Version(version)
    vllm_config = sharing(strict="full")
    assert engine_config(vllm_config) is vllm_config
    worker = worker_of(vllm_config)
    load_model(worker)
    warm_up(worker)
    (report,) = reports
    assert report.active
    assert report.left == []
    assert "2 ranks share each request's KV cache" in report.text()
    assert "with 8 heads" in report.text()
    # `nsa-plugin compare` reads it in the report.
    run = Run(role="plugin", report=json.loads(json.dumps(report.as_dict())), routes={"decode/sparse_decode/cuda": 1})
    assert shares_cache(run, 2).holds
    assert not shares_cache(run, 4).holds


def test_decode_context_parallelism_is_left_to_vllm_where_ranks_could_differ(process: VllmProcess):
    process.ledger.version = Version("0.33.0")
    with pytest.raises(LeftToStockError, match="would keep the others waiting"):
        activation.check_here(sharing(), settings.resolve(config={"enabled": True, "strict": False}, environ={}))
    assert worker_of(sharing(strict=False)).rank == 0
    assert process.serving is None


def test_decode_context_parallelism_is_not_on_the_portable_path(process: VllmProcess, monkeypatch: pytest.MonkeyPatch):
    process.ledger.version = Version("0.33.0")
    with pytest.raises(SettingsError, match="portable is on and cannot work with --decode-context-parallel-size 2"):
        engine_config(sharing(portable="on"))
    monkeypatch.setattr(Here, "device", synthetic(86, libraries=("triton",)))
    with pytest.raises(LeftToStockError, match="portable path does not support --decode-context-parallel-size 2"):
        engine_config(sharing(strict="full"))


@pytest.mark.regression(27)
def test_a_target_that_the_files_do_not_have(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({FILE: "class Engine: ..."}.get))
    with pytest.raises(PatchError, match=r"vllm.gpu-something to vllm 0.24.0.*Engine.serve"):
        engine_config(configured())


@pytest.mark.parametrize("strict", [True, "full"])
def test_a_strict_worker_does_not_read_the_files_again(
    process: VllmProcess, monkeypatch: pytest.MonkeyPatch, strict: Any
):
    """Reading them took 0.2 s of each worker's start."""
    read: list[tuple[Any, ...]] = []
    monkeypatch.setattr(static, "check_installed", lambda ledger, *needs, live: read.append(needs))
    engine_config(configured(strict=strict))
    assert read == [(Need.GPU,)]
    worker_of(configured(strict=strict))
    assert (read, Engine.serve()) == ([(Need.GPU,)], "the plugin's")


@pytest.mark.parametrize("strict", [True, "full"])
def test_a_target_that_the_worker_does_not_have_ends_its_start(
    process: VllmProcess, monkeypatch: pytest.MonkeyPatch, strict: Any
):
    """Installing a patch checks the live engine, whatever the files say."""
    process.ledger.patches = (*PATCHES, replace(V4_PATCH, name="vllm.gpu-more", need=Need.GPU))
    with monkeypatch.context() as changed:
        changed.delattr(Engine, "serve_v4")
        assert engine_config(configured(strict=strict)) is not None, "the files have it"
        with pytest.raises(PatchError, match=r"vllm.gpu-more to vllm 0.24.0.*'serve_v4' of .* is not there"):
            worker_of(configured(strict=strict))
    assert (process.serving, Engine.serve()) == (None, "vLLM's")


@pytest.mark.parametrize("strict", [True, "full"])
def test_a_target_of_a_loaded_module_is_looked_up_live(
    process: VllmProcess, monkeypatch: pytest.MonkeyPatch, strict: Any
):
    """Parsing the files of loaded modules took 0.1 s of a start."""
    monkeypatch.setattr(static, "is_loaded", lambda module: module in sys.modules)
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({}.get))
    assert engine_config(configured(strict=strict)) is not None, "no file was read"
    assert Engine.serve() == "vLLM's"
    with monkeypatch.context() as changed:
        changed.delattr(Engine, "serve")
        with pytest.raises(PatchError, match=r"vllm.gpu-something to vllm 0.24.0.*'serve' of .* is not there"):
            engine_config(configured(strict=strict))


@pytest.mark.parametrize("loaded", [False, True])
def test_with_strict_off_a_worker_reads_the_files_too(
    process: VllmProcess, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch, loaded: bool
):
    """What the process before it left to vLLM for its files is not served by a worker whose live engine has it.

    Whatever each has loaded: both must find the same.
    """
    monkeypatch.setattr(static, "is_loaded", lambda module: loaded and module in sys.modules)
    monkeypatch.setattr(static, "installed", lambda package: SourceTree({FILE: "class Engine: ..."}.get))
    engine_config(configured(strict=False))
    worker_of(configured(strict=False))
    assert (process.serving, Engine.serve()) == (None, "vLLM's")
    (report,) = reports
    assert not report.active


def test_the_second_model_runner_has_no_batch_and_names_requests_by_their_places(process: VllmProcess):
    states = SimpleNamespace(index_to_req_id={0: "a", 3: "b"})
    worker = SimpleNamespace(model_runner=SimpleNamespace(req_states=states))
    found = serving.VllmServing(resolved=None, trace=None, worker=lambda: worker)  # type: ignore[arg-type]
    assert found.request_ids(SimpleNamespace(req_idx=np.array([3, 0, 7]))) == ["b", "a", ""]
    assert found.request_ids(SimpleNamespace(req_idx=None)) == found.request_ids(SimpleNamespace()) == []
    assert found.request_ids() == []


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
    assert found.warm_seconds > 0
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


def test_the_warm_up_waits_until_triton_has_hashed_its_files(
    process: VllmProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(warm, "hash_triton", lambda: SimpleNamespace(join=lambda: order.append("hashed")))
    monkeypatch.setattr(Here, "run_kernels", lambda *_: order.append("kernels"))
    worker = worker_of(configured())
    assert order == []
    load_model(worker)
    assert order == ["hashed", "kernels"]


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
def test_the_users_backend_stays_and_is_in_the_report(process: VllmProcess, reports: list[StartupReport]):
    worker = worker_of(configured(backend=ANOTHER))
    load_model(worker)
    # Its layers read the selection of the indexer, whose builder vLLM makes next: it must select for every request.
    assert (process.serving, gpu_patches.planning()) == (None, None)
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


@pytest.mark.parametrize("off", [False, True])
def test_another_engine_of_the_process_is_not_taken_for_one_that_was_shut_down(
    process: VllmProcess, reports: list[StartupReport], off: bool
):
    """A second `LLM` of an in-process engine, without sparse attention or with the plugin off."""
    earlier = configured(strict="full")
    serves = worker_of(earlier)
    load_model(serves)
    assert process.serving is not None
    dense = configured(enabled=False)
    del dense.model_config.hf_text_config.index_topk
    worker_of(dense)
    assert process.serving is not None, "the first one still serves"
    earlier.compilation_config.static_forward_context.clear()  # as vLLM does when it shuts down
    other = configured(enabled=False) if off else configured(backend="FLASH_ATTN", strict="full")
    if not off:
        del other.model_config.hf_text_config.index_topk
    worker = worker_of(other)
    assert process.serving is None
    load_model(worker)
    warm_up(worker)
    assert (gpu_patches.planning(), reports) == (None, [])


@pytest.mark.parametrize("enabled", [True, False])
def test_two_engines_with_sparse_attention_cannot_share_a_process(process: VllmProcess, enabled: bool):
    """The patches are of the process: the second one's layers would be planned for the first."""
    serves = worker_of(configured(strict="full"))
    load_model(serves)
    with pytest.raises(PatchError, match="another engine in this process"):
        worker_of(configured(enabled=enabled))
    assert process.serving is not None
    del serves  # nobody refers to the first one any more
    worker_of(configured(enabled=enabled))
    assert (process.serving is not None) == enabled


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
    command = [sys.executable, "-c", SWITCHED_OFF]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nsa-plugin is off: NSA_PLUGIN_ENABLED=0") == 1


@pytest.mark.parametrize("key", ["nsa-plugin", "NSA_PLUGIN", "nsa_plugins"])
def test_a_misspelt_key_of_the_configuration_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key '{key}' in --additional-config. Did you mean 'nsa_plugin'"):
        activation.settings_of(SimpleNamespace(additional_config={key: {"enabled": True}}))


def test_other_keys_of_the_configuration_are_left_alone() -> None:
    read = activation.settings_of(SimpleNamespace(additional_config={"ascend_scheduler_config": {}, "nsa": 1}))
    assert not read.settings.enabled
