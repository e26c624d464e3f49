"""From a Plan to what SGLang runs: the name of its kernel path, and whether the plugin's own kernel runs at its end.

SGLang routes a batch by two strings of its backend, `{nsa,dsa}_prefill_impl` and `{nsa,dsa}_decode_impl`, which also
say how the indexer's selection is handed on: as slots of the paged cache, or, for flashmla_sparse over an fp8 cache, as
rows of a copy. `CARRIERS` is the whole of that knowledge. A library that is not in it for a layout is taken out of the
device's profile before a decision, so that no Plan names what could not be run here.

What stays SGLang's own, chosen by nobody here: the trtllm paths and flashmla_sparse_q8, tilelang, aiter, flashinfer,
triton_sparse_mla, intel_xpu (where a flag or a default of SGLang's names them); hisparse; context parallelism; pooled
indexer keys; KV shards; deterministic inference; the modes of PD multiplexing and diffusion models; a mixed batch over
an fp8 cache. The dense kernel call itself (FA3 on SM90, trtllm on SM100), the copy of an fp8 prefix to bf16, the cache
writes, the fused top-k of decode steps and its transform are SGLang's too, under a Plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError, NsaPluginError
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.partition import Partition
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import Trace


@dataclass(frozen=True)
class Carrier:
    """How SGLang carries a route.

    Attributes:
        impl: SGLang's name of the path.
        own: the plugin's provider runs in place of the kernel at its end.
        why: the reason for this path.
    """

    impl: str
    own: bool
    why: str


_IN_PLACE = "this path alone hands over slots and the fp8 pages themselves"
_ROWS = "this path hands over slots and the bf16 rows, and needs no scheduling metadata"
_Key = tuple[str, Attention, str, bool]

# (layout of the cache, shape of the kernel, library, after dequantisation).
CARRIERS: dict[_Key, Carrier] = {
    **{
        ("v32_fp8", shape, library, False): Carrier("flashmla_kv", True, _IN_PLACE)
        for shape in (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)
        for library in ("cuda", "triton", "reference")
    },
    ("v32_fp8", Attention.SPARSE_DECODE, "flash_mla", False): Carrier(
        "flashmla_kv", False, "SGLang's own call of FlashMLA, whose schedule it keeps for all layers and in graphs"
    ),
    ("v32_fp8", Attention.SPARSE_PREFILL, "flash_mla", True): Carrier(
        "flashmla_sparse", False, "SGLang gathers and dequantises what the batch's requests hold, then calls FlashMLA"
    ),
    **{
        ("bf16", shape, library, False): Carrier("flashmla_sparse", True, _ROWS)
        for shape in (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE)
        for library in ("triton", "reference")
    },
    ("bf16", Attention.SPARSE_PREFILL, "flash_mla", False): Carrier(
        "flashmla_sparse", False, "SGLang's own call of FlashMLA, heads padded"
    ),
    ("bf16", Attention.SPARSE_DECODE, "fa3", False): Carrier("fa3", False, "SGLang's own call of FA3"),
}

# SGLang's paths that a Plan may take the place of, by layout and whether it is a prefill; where it runs another, by a
# flag or by default, that phase is SGLang's. A decode path may only change among those that need the same buffers,
# which SGLang allocates before it captures: flashmla_kv has some of its own.
PLANNED = {
    ("v32_fp8", True): frozenset({"flashmla_kv", "flashmla_sparse", "flashmla_auto"}),
    ("v32_fp8", False): frozenset({"flashmla_kv"}),
    ("bf16", True): frozenset({"flashmla_sparse", "flashmla_auto"}),
    ("bf16", False): frozenset({"fa3", "flashmla_sparse"}),
}

BF16_BYTES = 2
MAX_PREFILLS = 1024
"""Prefills of different lengths whose routes are kept: a decision is a part of what a short prefill takes."""

_SPARSE = {Op.SPARSE_MLA_PREFILL: Attention.SPARSE_PREFILL, Op.SPARSE_MLA_DECODE: Attention.SPARSE_DECODE}
# Whose kernel SGLang calls for dense attention.
_DENSE = {"fa3", "trtllm"}


def runnable(device: DeviceProfile, layout: str) -> DeviceProfile:
    """The profile without the kernels that no path of SGLang carries for a cache of `layout`."""

    def carried(library: str, capability: Capability) -> bool:
        if capability.op is Op.MHA_ONE_SHOT:
            return library in _DENSE
        shape = _SPARSE.get(capability.op)
        return shape is None or (layout, shape, library, _copies(capability, layout)) in CARRIERS

    return device.keeping(carried, _no_path)


def _no_path(library: str, capability: Capability) -> str:
    """Why `runnable` removes a kernel."""
    if library == "trtllm":
        # On SM100 SGLang may also pick TRT-LLM by itself; the plugin leaves that choice alone.
        phase = "decode" if capability.op is Op.SPARSE_MLA_DECODE else "prefill"
        return f"SGLang runs it only with --dsa-{phase}-backend trtllm (or --nsa-{phase}-backend), {phase}_backend auto"
    return f"the plugin has no SGLang execution path for {library}'s {capability.op}"


def in_place(device: DeviceProfile, layout: str) -> DeviceProfile:
    """The profile without the kernels that read a bf16 copy of a cache of `layout`."""
    return device.keeping(lambda library, capability: capability.op not in _SPARSE or not _copies(capability, layout))


def _copies(capability: Capability, layout: str) -> bool:
    return layout != "bf16" and "bf16" in capability.layouts and layout not in capability.layouts


@dataclass(frozen=True)
class Route:
    """A Plan on its way through SGLang.

    Attributes:
        plan: the decision.
        impl: SGLang's name of the path; None where the plan has none (dense attention, no rows).
        own: the plugin's provider runs in place of the kernel at its end.
        selects: the plan's selection takes the place of the engine's where it may; V4's, which may be told not to.
    """

    plan: Plan
    impl: str | None = None
    own: bool = False
    selects: bool = True

    @property
    def dense(self) -> bool:
        return self.plan.attention is Attention.MHA_ONE_SHOT

    @property
    def op(self) -> str:
        """The registry's name of the sparse kernel."""
        return "sparse_mla_prefill" if self.plan.attention is Attention.SPARSE_PREFILL else "sparse_mla_decode"


def route_of(plan: Plan, layout: str) -> Route:
    """How SGLang carries a plan.

    Raises:
        NoProviderError: it cannot; `runnable` keeps such a plan from being made.
    """
    if plan.attention not in (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE):
        return Route(plan)
    carrier = CARRIERS.get((layout, plan.attention, plan.provider, plan.dequantize_kv))
    if carrier is None:
        after = " after dequantisation" if plan.dequantize_kv else ""
        raise NoProviderError(f"SGLang has no path for {plan.provider}'s {plan.attention}{after} over a {layout} cache")
    return Route(plan, carrier.impl, carrier.own)


@dataclass
class Planner:
    """The decisions of one attention backend.

    Attributes:
        model, settings: what is decided from.
        device: as probed; only what SGLang can run counts.
        trace: where plans are recorded; backends of a process may share one.
        count: called with the plan of every batch, for the metrics.
        free_memory: reads the device's free bytes at the next prefill, and is forgotten then: a reading waits for the
            device. Set again, it is read again.
        exchange_rows: query rows that heads are traded for at most (`token_shard`).
        no_exchange: why they are traded for none; "" where they may be.
    """

    model: ModelShape
    device: DeviceProfile
    settings: Settings
    trace: Trace = field(default_factory=Trace)
    count: Callable[[Plan], None] | None = None
    free_memory: Callable[[], int] | None = None
    exchange_rows: int = 0
    no_exchange: str = "this backend has no exchange"
    _steps: dict[tuple[Phase, int, int], Route] = field(default_factory=dict)
    _prefills: dict[tuple[BatchShape, bool, bool, bool, int], Route | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = runnable(self.device, self.model.kv_layout)

    def prefill(self, batch: Batch, *, dense_allowed: bool) -> Route | None:
        """The route of a prefill, or None where it is SGLang's.

        Args:
            dense_allowed: SGLang's own rules allow dense attention for the batch. They know of its flags, and of graphs
                that have no dense attention in them; a plan may say less than they do, never more.
        """
        if self.free_memory is not None:
            self.device, self.free_memory = replace(self.device, memory_free=self.free_memory()), None
        route = self.prefill_route(batch, dense_allowed=dense_allowed)
        return None if route is None else self._recorded(route, batch)

    def prefill_route(self, batch: Batch, *, dense_allowed: bool) -> Route | None:
        """As `prefill`, of a batch that does not come to be: nothing is recorded."""
        key = batch.shape, batch.mixed, batch.in_graph, dense_allowed, self.device.memory_free
        if key not in self._prefills:
            if len(self._prefills) >= MAX_PREFILLS:
                self._prefills.clear()
            self._prefills[key] = self._prefill_route(batch, dense_allowed)
        return self._prefills[key]

    def _prefill_route(self, batch: Batch, dense_allowed: bool) -> Route | None:
        # Over an fp8 cache SGLang makes its copy for whole prefills only, and the paths differ in what they are given.
        if batch.shape.context_parallel or (batch.mixed and self.model.fp8_cache):
            return None
        keeps = self._keeps_heads(batch)
        plan = decide(self.model, batch.shape, self.device, self.settings, keeps_heads=keeps)
        settings = replace(self.settings, mha_max_kv=0)  # for a batch that is not dense
        if plan.attention is Attention.MHA_ONE_SHOT and not dense_allowed:
            plan = decide(self.model, batch.shape, self.device, settings, keeps_heads=keeps)
            said = plan.reasons["attention"].replace("mha_max_kv is 0", "SGLang's own rules have none for this batch")
            plan = replace(plan, reasons={**plan.reasons, "attention": said})
        if plan.dequantize_kv and not self._copy_fits(plan, batch):
            device = in_place(self.device, self.model.kv_layout)
            # Nothing else may take so many rows: then it is copied as SGLang would.
            with suppress(NsaPluginError):
                plan = decide(self.model, batch.shape, device, settings, keeps_heads=keeps)
                said = f"{plan.reasons['dequantize_kv']}; a bf16 copy would take over a quarter of the free memory"
                plan = replace(plan, reasons={**plan.reasons, "dequantize_kv": said})
        return route_of(plan, self.model.kv_layout)

    def _keeps_heads(self, batch: Batch) -> str:
        """Why a batch's ranks do not trade heads for tokens, whatever else speaks for it; "" if they may."""
        if self.no_exchange:
            return self.no_exchange
        if batch.in_graph:
            return "SGLang captures or replays this prefill in pieces, around attention over fixed rows"
        if (rows := batch.shape.num_tokens) > self.exchange_rows:
            return f"{rows} query rows exceed the {self.exchange_rows} that the exchange's buffers hold"
        return ""

    def shares(self, plan: Plan, batch: Batch, held: int) -> Partition:
        """Whose rows of a batch are whose; see `sharding.shares`, and of a later step `sharding.step_shares`."""
        if plan.phase is not Phase.EXTEND:
            return sharding.step_shares(self.model, batch.shape.num_tokens)
        q_lens, kv_lens = [rows for _, rows, _ in batch.requests], [context for *_, context in batch.requests]
        return sharding.shares(self.model, self.device, plan, q_lens, kv_lens, held)

    def _copy_fits(self, plan: Plan, batch: Batch) -> bool:
        """Whether the bf16 copy of all contexts, which SGLang makes for sparse attention, fits the free memory.

        The copy for dense attention is bounded by SGLang itself, to the tokens of its chunks.
        """
        if plan.attention is Attention.MHA_ONE_SHOT:
            return True
        d_qk, _ = self.model.row_dims
        return batch.shape.total_kv_len * d_qk * BF16_BYTES <= self.device.memory_free // 4

    def step(self, batch: Batch) -> Route:
        """The route of a decode, verify or draft step: the same whenever the phase and the rows are."""
        return self._recorded(self.step_route(batch), batch)

    def step_route(self, batch: Batch) -> Route:
        """As `step`, of a batch that does not come to be: nothing is recorded."""
        shape = batch.shape
        key = (shape.phase, shape.num_requests, shape.num_tokens)
        route = self._steps.get(key)
        if route is None:
            route = self._step_by(shape, self._keeps_heads(batch))
            if route.plan.token_shard and route.impl == "fa3":
                route = self._step_by(shape, "SGLang's path fa3 attends the rows of the whole batch")
            self._steps[key] = route
        return route

    def _step_by(self, shape: BatchShape, keeps: str) -> Route:
        plan = decide(self.model, shape, self.device, self.settings, keeps_heads=keeps)
        return route_of(plan, self.model.kv_layout)

    def _recorded(self, route: Route, batch: Batch) -> Route:
        self.trace.record([(route.plan, batch.requests)])
        if self.count is not None:
            self.count(route.plan)
        return route


def sglangs_own(backend: Any, server_args: Any) -> str | None:
    """The feature of this server whose batches the plugin leaves to SGLang altogether, or None."""
    if getattr(backend, "hisparse_coordinator", None) is not None or getattr(server_args, "enable_hisparse", False):
        return "hisparse"
    flags = (
        "enable_nsa_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
        "enable_prefill_context_parallel",
        "enable_prefill_cp",
    )
    if any(getattr(server_args, flag, False) for flag in flags):
        return "context-parallel prefill"
    if getattr(backend, "dcp_size", 1) > 1:
        return "context-parallel decode"
    if getattr(backend, "dsa_index_kpool", 1) > 1:
        return "pooled indexer keys"
    if getattr(backend, "_kv_shard_pool", None) is not None:
        return "a sharded KV cache"
    # Its promise is that a batch's size changes nothing; here the size chooses the kernel, and how it splits its work.
    if getattr(server_args, "enable_deterministic_inference", False):
        return "deterministic inference"
    return None
