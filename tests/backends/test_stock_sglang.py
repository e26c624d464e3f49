"""Configurations left to SGLang run SGLang's code: after the start nothing of the plugin's attends, selects or writes.

Rows of `ci.support.CONFIGURATIONS` that are left whole, each started as a scheduler does, on an SGLang written from the
ledger. What the ledger changes is either the stock object itself or passes every argument and result on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from ci.support import CONFIGURATIONS, Configuration, Handling
from nsa_plugin.backends.common.paths import SGLANG
from nsa_plugin.backends.sglang.startup import backend as plugin_backend
from nsa_plugin.backends.sglang.startup import hooks, model, serving
from nsa_plugin.backends.sglang.startup.activation import SglangProcess
from nsa_plugin.backends.sglang.startup.flags import VARIABLE, PassedFlags
from nsa_plugin.backends.sglang.v32 import patches
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Ledger, Need
from tests.backends.fake_sglang.scheduler import HF_CONFIG, V4_CONFIG, StockBackend, runner, scheduler
from tests.backends.live import changes, raw, replaced
from tests.ledger_engine import live

ATTENTION = (Need.ENABLED, Need.GPU, Need.PORTABLE, Need.GPU_V4)
DSA, DSV4 = "sglang.srt.layers.attention.dsa_backend", "sglang.srt.layers.attention.deepseek_v4_backend"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
SMS = 84


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row of the table is given.

    Attributes:
        sm: the GPU; 0: PyTorch is for ROCm.
        backend: attributes of SGLang's attention backend; None: another one is built, which the plugin does not know.
        runner: arguments of the model runner, those of the server among them.
        touched: names of ledger entries whose objects are the plugin's, which then pass everything on. Others are the
            stock objects.
    """

    sm: int = 90
    version: str = "0.5.23"
    v4: bool = False
    backend: dict[str, Any] | None = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    runner: dict[str, Any] = field(default_factory=dict)
    touched: frozenset[str] = frozenset()


def names(*needs: Need) -> frozenset[str]:
    return frozenset(patch.name for patch, _ in changes(ledger("0.5.23"), *needs))


def ledger(version: str) -> Ledger:
    return Ledger(engine="sglang", version=Version(version), supported=data.SUPPORTED, patches=data.PATCHES)


ON_A_GPU = names(Need.ENABLED, Need.GPU)
V4_BUILT = ON_A_GPU | names(Need.GPU_V4)


def served(*, sm: int = 90, touched: frozenset[str] = ON_A_GPU, **more: Any) -> Row:
    """A row that is left once SGLang has built the backend, whose class is the plugin's by then."""
    return Row(sm=sm, touched=touched, **more)


ROWS = {
    "HiSparse": served(runner={"enable_hisparse": True}),
    "prefill context parallelism": served(runner={"enable_prefill_cp": True}),
    "decode context parallelism": served(backend={"dcp_size": 2}),
    "a model whose attention has another shape": served(config={"kv_lora_rank": 256}),
    "pooled indexer keys": served(backend={"dsa_index_kpool": 4}),
    "a sharded KV cache": served(backend={"_kv_shard_pool": object()}),
    "deterministic inference": served(runner={"enable_deterministic_inference": True}),
    "another platform": Row(sm=0),
    "a cache without scales": served(
        sm=100,
        backend={"dsa_prefill_impl": "trtllm", "dsa_decode_impl": "trtllm", "dsa_kv_cache_store_fp8": False},
        runner={"scaled_fp8": False, "dtype": "torch.float8_e4m3fn"},
    ),
    "another attention backend": served(backend=None),
    "DeepSeek-V4.1": served(v4=True, touched=V4_BUILT, backend={"is_dsv41": True}),
    "DeepSeek-V4 on a GPU of the portable path": served(v4=True, sm=80, touched=ON_A_GPU | names(Need.PORTABLE)),
    "an older SGLang on a GPU of the portable path": Row(sm=80, version="0.5.15"),
    "a GPU before SM80": Row(sm=75),
    "an older SGLang on SM120": Row(sm=120, version="0.5.22"),
    "SM110": Row(sm=110),
}
NOT_STARTED = {
    "Ray actors": "SGLang loads no plugin in the actor, and the process that reads the arguments changes no attention",
}
PORTABLE = ON_A_GPU | names(Need.PORTABLE)
ON_SM80, ON_SM120 = (
    {
        what: replace(row, sm=sm, touched=PORTABLE)
        for what, row in ROWS.items()
        if (row.sm, row.touched) in ((90, ON_A_GPU), (80, PORTABLE))
    }
    for sm in (80, 120)
)
"""The rows of any GPU again, on those of the portable path."""
LEFT = [one for one in CONFIGURATIONS if one.engine == SGLANG and one.outcome is Handling.STOCK]


def test_every_configuration_that_is_left_whole_is_started_here() -> None:
    assert {one.what for one in LEFT} == ROWS.keys() | NOT_STARTED.keys()
    assert not ROWS.keys() & NOT_STARTED.keys()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels to run, and a GPU to ask for its SMs."""
    monkeypatch.setenv(VARIABLE, "")
    for name in ("warm", "_warm_selection", "warm_portable"):
        monkeypatch.setattr(serving, name, lambda *arguments: None)
    monkeypatch.setattr(serving, "free_device_memory", lambda: 64 << 30)
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *device: properties)


def engine(row: Row, monkeypatch: pytest.MonkeyPatch) -> tuple[SglangProcess, dict[str, ModuleType]]:
    """A scheduler's process and its SGLang, whose backends take their attributes from the runner."""
    process = SglangProcess(ledger=ledger(row.version), child=True)
    targets = [target for patch in data.PATCHES if (target := patch.target(process.ledger.version)) is not None]
    modules = live(targets, monkeypatch)
    for name, attribute, value in (
        ("sglang.srt.environ", "envs", object()),
        ("sglang.version", "__version__", row.version),
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)
    for package in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))

    def init(self: Any, model_runner: Any) -> None:
        StockBackend.__init__(self, model_runner)
        vars(self).update(model_runner.attributes)

    modules[DSA].DeepseekSparseAttnBackend.__init__ = init
    modules[DSV4].DeepseekV4AttnBackend.__init__ = init
    inherited = vars(modules[INDEXER].C4IndexerBackendMixin).items()
    for name, method in inherited:
        if not name.startswith("__"):
            setattr(modules[DSV4].DeepseekV4AttnBackend, name, method)
    for module in (plugin_backend, hooks, patches):
        monkeypatch.setattr(module, "process", lambda: process)
    if row.sm:
        monkeypatch.setattr(model, "device_sm", lambda: row.sm)
        libraries = {"libraries": ("triton",)} if row.sm in (80, 120) else {}
        monkeypatch.setattr("nsa_plugin.libraries.probe.probe", lambda: synthetic(row.sm, **libraries))
    else:
        monkeypatch.setattr("torch.version.hip", "7.0")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return process, modules


def build(row: Row, modules: dict[str, ModuleType], model_runner: Any) -> Any:
    """SGLang's attention backend, built through its registry as far as the plugin is concerned."""
    if not row.v4:
        return modules[DSA].DeepseekSparseAttnBackend(model_runner)
    registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
    registry.ATTENTION_BACKENDS["dsv4"](model_runner)
    return modules[DSV4].DeepseekV4AttnBackend(model_runner)


STARTED = [(one, rows[one.what]) for rows in (ROWS, ON_SM80, ON_SM120) for one in LEFT if one.what in rows]
FLASHINFER = {"dsa_prefill_impl": "flashinfer_sparse_mla", "dsa_decode_impl": "flashinfer_sparse_mla"}
GLM_ON_SM120 = next(one for one in CONFIGURATIONS if "flashinfer_sparse_mla" in one.given)
STARTED.append((GLM_ON_SM120, served(sm=120, touched=PORTABLE, backend=FLASHINFER)))


@pytest.mark.parametrize(("one", "row"), STARTED, ids=[f"{one.what}, SM{row.sm}" for one, row in STARTED])
def test_what_is_left_to_sglang_runs_its_code(one: Configuration, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    PassedFlags({"enabled": "true"}, {}).write()
    process, modules = engine(row, monkeypatch)
    stock = {patch.name: raw(target) for patch, target in changes(process.ledger, *ATTENTION)}
    config = SimpleNamespace(**vars(V4_CONFIG if row.v4 else HF_CONFIG) | row.config)
    model_runner = runner(**{"scaled_fp8": True, "config": config} | row.runner)
    model_runner.attributes, model_runner.attn_tp_size, model_runner.pp_rank = row.backend or {}, 1, 0

    process.enter_scheduler()
    built = None if row.backend is None else build(row, modules, model_runner)
    process.leave_scheduler(scheduler(config))

    assert any(one.says in reason for reason in process.left), process.left
    assert process.serving is None or not process.serving.active
    if built is not None:
        assert getattr(built, "nsa_plugin", None) is None
        impls = {name: value for name, value in vars(built).items() if name.endswith("_impl")}
        assert impls.items() >= {name: value for name, value in (row.backend or {}).items() if name in impls}.items()
    # The graph's runner looks at the backend.
    given = {"sglang.prefill-graph": {"self": SimpleNamespace(model_runner=SimpleNamespace(attn_backend=built))}}
    touched = set()
    for patch, target in changes(process.ledger, *ATTENTION):
        if (now := raw(target)) is stock[patch.name]:
            continue
        touched.add(patch.name)
        if patch.name.startswith("sglang.portable-sm-count"):
            assert now() == SMS  # SGLang asks before the plugin knows whether it serves, for what the device has
            continue
        if patch.name == "sglang.v4-registered" and not row.v4:
            continue  # builds the backend of another family
        arguments = given.get(patch.name, {})
        if isinstance(now, type):
            arguments = {"self": built if isinstance(built, now) else object.__new__(now)}
        assert replaced(now, stock[patch.name], arguments) == "", patch.name
    assert touched == row.touched
    process.ledger.undo()
    assert {patch.name: raw(target) for patch, target in changes(process.ledger, *ATTENTION)} == stock
