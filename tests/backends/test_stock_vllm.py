"""Configurations left to vLLM run vLLM's code: after the start nothing of the plugin's attends, selects or writes.

Rows of `ci.support.CONFIGURATIONS` that are left whole, each started as the command line and a worker do, on a vLLM
written from the ledger. What the ledger changes is either the stock object itself or passes every argument and result
on; the classes that vLLM asks for are vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from ci.support import CONFIGURATIONS, Configuration, Handling
from nsa_plugin.backends.common import warm
from nsa_plugin.backends.common.paths import VLLM
from nsa_plugin.backends.vllm.startup import activation, counters
from nsa_plugin.backends.vllm.startup.activation import VllmProcess
from nsa_plugin.backends.vllm.v4 import serving as v4_serving
from nsa_plugin.backends.vllm.v32 import patches
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.backends.vllm.v32.choice import BF16_BACKEND, SM120_BACKEND
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import static
from nsa_plugin.patches import vllm as data
from nsa_plugin.patches.ledger import Ledger, Need
from nsa_plugin.telemetry import StartupReport
from tests.backends.fake_vllm import v4_config
from tests.backends.fake_vllm.config import config, drafting, layer
from tests.backends.live import changes, raw, replaced
from tests.ledger_engine import live

ATTENTION = (Need.GPU, Need.PORTABLE, Need.GPU_V4)
SPARSE, V4_SPARSE = "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_DSV4"
WORKER, REGISTRY = "vllm.v1.worker.gpu_worker", "vllm.v1.attention.backends.registry"


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row of the table is given.

    Attributes:
        changed: values of parts of vLLM's configuration, by part; "model" is the checkpoint's.
        sm: the GPU; 0: another platform.
        layers: vLLM's attention backend of the layers, if the row is left once they are built.
        packed: whether vLLM packs the scales of the indexer's cache.
        worker: the needs whose patches a worker has applied before it is left; none if it is left before.
    """

    sm: int = 90
    version: str = "0.33.0"
    v4: bool = False
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    layers: str = ""
    packed: bool = False
    worker: frozenset[Need] = frozenset()


def parallel(**changed: Any) -> dict[str, dict[str, Any]]:
    return {"parallel_config": changed}


def speculative(**changed: Any) -> dict[str, dict[str, Any]]:
    return {"speculative_config": {"num_speculative_tokens": 2} | changed}


SHARED = parallel(decode_context_parallel_size=2)
GPU, PORTABLE, V4_PORTABLE = (
    frozenset(needs) for needs in ((Need.GPU,), (Need.GPU, Need.PORTABLE), (Need.GPU, Need.GPU_V4, Need.PORTABLE))
)
ROWS = {
    "decode context parallelism in an older vLLM": Row(changed=SHARED, version="0.28.0"),
    "decode context parallelism over a bf16 cache": Row(changed=SHARED | {"cache_config": {"cache_dtype": "bfloat16"}}),
    "decode context parallelism of DeepSeek-V4": Row(changed=SHARED, v4=True),
    "decode context parallelism on a GPU of the portable path": Row(changed=SHARED, sm=80),
    "decode context parallelism with `strict` off": Row(changed=SHARED, settings={"strict": False}),
    "verify steps with decode context parallelism and an interleave": Row(
        changed=parallel(decode_context_parallel_size=2, cp_kv_cache_interleave_size=64) | speculative()
    ),
    "prefill context parallelism": Row(changed=parallel(prefill_context_parallel_size=2)),
    "two batches at once": Row(changed=parallel(enable_dbo=True)),
    "microbatches": Row(changed=parallel(enable_dbo=False, ubatch_size=2)),
    "an fp4 indexer cache": Row(changed={"attention_config": {"use_fp4_indexer_cache": True}}),
    "an fp4 indexer cache, since vLLM 0.28": Row(changed={"attention_config": {"indexer_kv_dtype": "mxfp4"}}),
    "HiSparse": Row(changed={"attention_config": {"hisparse_config": object()}}),
    "parallel drafting": Row(changed=speculative(parallel_drafting=True)),
    "adaptive verification": Row(changed=speculative(enable_adaptive_verification=True)),
    "batch invariance": Row(environ={"VLLM_BATCH_INVARIANT": "1"}),
    "another KV-cache format": Row(changed={"cache_config": {"cache_dtype": "nvfp4"}}),
    "another fp8 cache of DeepSeek-V3.2 and GLM-5": Row(changed={"cache_config": {"cache_dtype": "fp8_e4m3"}}),
    "graphs that break at the indexer": Row(
        environ={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, changed={"model": {"architectures": ["DeepseekV3ForCausalLM"]}}
    ),
    "a model whose attention has another shape": Row(changed={"model": {"kv_lora_rank": 256}}),
    "pooled indexer keys": Row(changed={"model": {"index_kpool": 4}}),
    "a model with other model code": Row(changed={"model": {"architectures": ["HYV4ForCausalLM"]}}),
    "DeepSeek-V4.1": Row(changed={"model": {"architectures": ["DeepseekV41ForCausalLM"]}}, v4=True),
    "a GPU before SM80": Row(sm=75, worker=GPU),
    "DeepSeek-V4 on SM80, SM86 and SM89": Row(sm=89, v4=True),
    "DeepSeek-V4 on SM120": Row(sm=120, v4=True, layers=V4_SPARSE, worker=V4_PORTABLE),
    "DeepSeek-V4 on SM120 in an older vLLM": Row(sm=120, v4=True, version="0.32.0"),
    "DeepSeek-V3.2 on SM120 over an fp8 cache": Row(
        sm=120, layers=SM120_BACKEND, worker=PORTABLE, changed={"model": {"index_topk": 2048}}
    ),
    "another attention backend": Row(layers=SPARSE, worker=GPU, changed={"attention_config": {"backend": SPARSE}}),
    "vLLM's default backend on SM100": Row(sm=100, layers=SPARSE, worker=GPU),
    "a bf16 cache on SM90": Row(layers=BF16_BACKEND, worker=GPU, changed={"cache_config": {"cache_dtype": "auto"}}),
    "a draft model without sparse attention": Row(
        layers=BF16_BACKEND,
        worker=GPU,
        settings={"prefill_backend": "triton"},
        changed={"cache_config": {"cache_dtype": "auto"}, "speculative_config": vars(drafting(sparse=False))},
    ),
    "some layers with a cache of another format": Row(changed={"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}}),
    "a draft's layers with a cache of another format": Row(
        changed={"speculative_config": vars(drafting(sparse=True, kv_cache_dtype="auto"))}
    ),
    "packed indexer scales": Row(sm=100, packed=True, worker=GPU),
    "another platform": Row(sm=0),
}
LEFT = [one for one in CONFIGURATIONS if one.engine == VLLM and one.outcome is Handling.STOCK]


def test_every_configuration_that_is_left_whole_is_started_here() -> None:
    assert {one.what for one in LEFT} == ROWS.keys()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[StartupReport]:
    published: list[StartupReport] = []
    monkeypatch.setattr(StartupReport, "publish", lambda report: published.append(report))
    return published


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels to run, no file of an engine to read, and no operator to replace."""
    for module in (gpu_serving, v4_serving):
        for name in vars(module):
            if name == "warm" or name.startswith("warm_"):
                monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(gpu_serving, "tried", lambda device, *_: device)
    monkeypatch.setattr(gpu_serving, "dense_workspace_tokens", lambda vllm_config: 4096)
    monkeypatch.setattr(warm, "hash_triton", lambda: None)
    monkeypatch.setattr(static, "check_installed", lambda ledger, *needs, live: None)
    monkeypatch.setattr(activation, "use_engine_log", lambda: None)
    monkeypatch.setattr(counters, "collect_here", lambda: "a folder")
    monkeypatch.setattr(counters, "show", lambda *_: None)
    monkeypatch.setattr("torch.library.Library", lambda *_: SimpleNamespace(impl=lambda *_, **__: None))


def engine(row: Row, monkeypatch: pytest.MonkeyPatch) -> tuple[VllmProcess, dict[str, ModuleType]]:
    """A process of vLLM and its modules."""
    version = Version(row.version)
    process = VllmProcess(Ledger(engine="vllm", version=version, supported=data.SUPPORTED, patches=data.PATCHES))
    targets = [target for patch in data.PATCHES if (target := patch.target(version)) is not None]
    modules = live(targets, monkeypatch)
    # vLLM's function has two more parameters than the ledger looks at, and this one is of the class.
    ops = modules["vllm._custom_ops"]
    exec(
        "def top_k_per_row_prefill(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, "
        "topk_tokens): return __answered__(dict(locals()))",
        vars(ops),
    )
    backend = modules["vllm.v1.attention.backends.mla.flashmla_sparse"].FlashMLASparseBackend
    if "supports_compute_capability" in vars(backend):
        exec("def supports(cls, capability): return __answered__(dict(locals()))", found := dict(vars(ops)))
        backend.supports_compute_capability = classmethod(found["supports"])
    names = modules[REGISTRY].AttentionBackendEnum
    names.FLASH_ATTN_MLA_SPARSE, names.FLASHINFER_MLA_SPARSE_SM120 = BF16_BACKEND, SM120_BACKEND
    for name in ("vllm", "vllm.platforms", "vllm.utils", "vllm.utils.deep_gemm"):
        if name not in modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm.platforms"])["current_platform"] = SimpleNamespace(dispatch_key="CPU")
    vars(sys.modules["vllm.utils"])["deep_gemm"] = sys.modules["vllm.utils.deep_gemm"]
    if row.packed:
        vars(sys.modules["vllm.utils.deep_gemm"])["mqa_logits_use_mx_scales"] = lambda: True
    for module in (activation, patches):
        monkeypatch.setattr(module, "process", lambda: process)
    monkeypatch.setattr(activation, "device_kind", lambda: "cuda" if row.sm else "RocmPlatform")
    monkeypatch.setattr(activation, "device_sm", lambda: row.sm)
    libraries = {"libraries": ("triton",)} if row.sm in (80, 89, 120) else {}
    for module, name in ((gpu_serving, "GpuServing"), (v4_serving, "V4Serving")):
        monkeypatch.setattr(module, name, on(getattr(module, name), lambda: synthetic(row.sm, **libraries)))
    return process, modules


def on(serving: type, device_profile: Callable[[], Any]) -> type:
    """A worker's state on another GPU than the one that is here."""

    class Here(serving):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, device_profile=device_profile)

    return Here


def configured(row: Row) -> Any:
    made = v4_config.config() if row.v4 else config()
    made.additional_config = {"nsa_plugin": {"enabled": True} | row.settings}
    made.model_config.model, made.model_config.served_model_name = "checkpoint", "model"
    for part, values in row.changed.items():
        of = made.model_config.hf_config if part == "model" else getattr(made, part)
        if of is None:
            setattr(made, part, SimpleNamespace(**values))
        else:
            vars(of).update(values)
    if row.layers:
        built = v4_config.layer(row.layers) if row.v4 else layer(False, row.layers)
        made.compilation_config.static_forward_context["attn"] = built
    return made


@pytest.mark.parametrize("one", LEFT, ids=lambda one: one.what)
def test_what_is_left_to_vllm_runs_its_code(
    one: Configuration, reports: list[StartupReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[one.what]
    for name, value in row.environ.items():
        monkeypatch.setenv(name, value)
    process, modules = engine(row, monkeypatch)
    stock = {patch.name: raw(target) for patch, target in changes(process.ledger, *ATTENTION)}
    given, worker_class = configured(row), modules[WORKER].Worker

    activation.wrap_create_engine_config(lambda: given)()
    worker = worker_class.__new__(worker_class)
    worker.device, worker.rank, worker.vllm_config = "cpu", 0, given
    activation.wrap_worker_init(lambda worker, vllm_config: None)(worker, given)
    worker.load_model()
    worker.compile_or_warm_up_model()

    (report,) = reports
    assert any(one.says in reason for reason in report.left), report.left
    assert (report.active, process.serving, patches.planning()) == (False, None, None)
    selecting = {"q": (object(), None)}  # a tuple of queries and scales
    touched = set()
    for patch, target in changes(process.ledger, *ATTENTION):
        if (now := raw(target)) is stock[patch.name]:
            continue
        touched.add(patch.name)
        arguments = selecting if patch.name == "vllm.gpu-prefill-logits" else {}
        assert replaced(now, stock[patch.name], arguments) == "", patch.name
    assert touched == {patch.name for patch, _ in changes(process.ledger, *row.worker)}
    process.ledger.undo()
    assert {patch.name: raw(target) for patch, target in changes(process.ledger, *ATTENTION)} == stock
