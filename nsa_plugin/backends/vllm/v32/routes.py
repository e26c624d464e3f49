"""vLLM's batches on a GPU, split into parts with a Plan each, and who carries a part.

A batch of vLLM is [steps][prefills]: the runner sorts requests with few rows (one, or one and the speculated ones)
to the front. `Planner.split` decides for the steps by their phase and number of rows alone, because they may be
captured, and for the prefills request by request (`dispatch.partition`), so that one long prompt does not take dense
attention from the short ones. Attention and indexer builders ask the same planner about the same batch, so that what
one leaves out the other never reads (vllm #52512).

`CARRIERS` is all that is known of vLLM's own FlashMLA calls: the plugin has no FlashMLA of its own beside vLLM, and
lets vLLM's run for the rows of a part whose Plan names it. Everything else a Plan may name is the plugin's provider.

Where a Plan trades heads for tokens, the rows of a part are dealt out here, once for attention and indexer; see
`gpu_token_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from nsa_plugin.backends.common.token_shard import Exchange
from nsa_plugin.backends.vllm.v32.token_shard import Dealt, dealt
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.dispatch import Part, decide, partition
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import MIB, DeviceProfile
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import Trace


class Carrier(StrEnum):
    """Who runs a part's sparse attention.

    PROVIDER is the plugin's, over the cache in place. STOCK is vLLM's FlashMLA call in the form vLLM would choose;
    MIXED and SEPARATE name the form for a prefill over an fp8 cache: the fp8 decode kernel for all rows, or a bf16
    copy of the requests' contexts and the prefill kernel.
    """

    PROVIDER = "provider"
    STOCK = "stock"
    MIXED = "mixed"
    SEPARATE = "separate"


# (layout of the cache, whether it is a prefill, shape of the kernel, after dequantisation) of vLLM's FlashMLA calls.
CARRIERS: dict[tuple[str, bool, Attention, bool], Carrier] = {
    ("v32_fp8", True, Attention.SPARSE_DECODE, False): Carrier.MIXED,
    ("v32_fp8", True, Attention.SPARSE_PREFILL, True): Carrier.SEPARATE,
    ("v32_fp8", False, Attention.SPARSE_DECODE, False): Carrier.STOCK,
    ("bf16", True, Attention.SPARSE_PREFILL, False): Carrier.STOCK,
    ("bf16", False, Attention.SPARSE_PREFILL, False): Carrier.STOCK,
}
STOCK_LIBRARY = "flash_mla"

_SPARSE = {Op.SPARSE_MLA_PREFILL: Attention.SPARSE_PREFILL, Op.SPARSE_MLA_DECODE: Attention.SPARSE_DECODE}


def carrier_of(plan: Plan, layout: str) -> Carrier:
    """Who runs a plan that attends to selected tokens.

    Raises:
        NoProviderError: the plan names a FlashMLA kernel that vLLM does not call; `runnable` keeps it from being made.
    """
    if plan.provider != STOCK_LIBRARY:
        return Carrier.PROVIDER
    carrier = CARRIERS.get((layout, plan.phase is Phase.EXTEND, plan.attention, plan.dequantize_kv))
    if carrier is None:
        after = " after dequantisation" if plan.dequantize_kv else ""
        what = f"{plan.attention}{after} for {plan.phase} over a {layout} cache"
        raise NoProviderError(f"vLLM makes no call of FlashMLA's {what}")
    return carrier


def runnable(device: DeviceProfile, layout: str, *, prefill: bool) -> DeviceProfile:
    """The profile without what nobody carries here: FlashMLA calls that vLLM does not make."""

    def carried(library: str, capability: Capability) -> bool:
        shape = _SPARSE.get(capability.op)
        if library != STOCK_LIBRARY or shape is None:
            return True
        copies = layout not in capability.layouts
        return (layout, prefill, shape, copies) in CARRIERS

    return device.keeping(carried)


@dataclass(frozen=True)
class DensePart:
    """Requests that attend densely, in one call.

    Attributes:
        requests: their places in the batch.
        q_lens, kv_lens: rows and context of each, in tokens, this step's included.
    """

    plan: Plan
    requests: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def has_prefix(self) -> bool:
        return self.kv_lens != self.q_lens


@dataclass(frozen=True)
class Split:
    """A batch in parts.

    Attributes:
        starts: first row of each request and the end of the last, as the host knows them.
        num_rows: rows of the batch, those that only pad it for a CUDA graph included.
        num_steps: requests at the front that are steps; padded ones, which have no rows, included.
        step_rows: their rows; of a batch without prefills all rows.
        steps: their plan; None without any.
        sparse: the plan of all prefills that select; None without any.
        sparse_requests: their places, ascending.
        dense: the parts of those that do not.
        steps_dealt, head_dealt, tail_dealt: whose rows are whose, of the steps, of `head_requests` and of
            `tail_requests`; None where each rank keeps its heads.
    """

    starts: tuple[int, ...]
    num_rows: int
    num_steps: int
    step_rows: int
    steps: Plan | None
    sparse: Plan | None
    sparse_requests: tuple[int, ...]
    dense: tuple[DensePart, ...]
    steps_dealt: Dealt | None = None
    head_dealt: Dealt | None = None
    tail_dealt: Dealt | None = None

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def dense_requests(self) -> frozenset[int]:
        return frozenset(request for part in self.dense for request in part.requests)

    @property
    def mha_request(self) -> int:
        """The first dense request: it and all behind it are handed to `forward_mha`. The end where none is dense."""
        return min(self.dense_requests, default=self.num_requests)

    @property
    def mha_row(self) -> int:
        """The first row of `forward_mha`; every row before it goes to `forward_mqa`."""
        return self.starts[self.mha_request] if self.dense else self.num_rows

    @property
    def head_requests(self) -> tuple[int, ...]:
        """The prefills that select and are attended by `forward_mqa`; their rows lie together."""
        return tuple(request for request in self.sparse_requests if request < self.mha_request)

    @property
    def tail_requests(self) -> tuple[int, ...]:
        """The prefills that select and lie behind the first dense one."""
        return tuple(request for request in self.sparse_requests if request > self.mha_request)


@dataclass
class Planner:
    """The decisions of one worker process.

    Attributes:
        model, settings: what is decided from.
        device: as probed.
        max_model_len: most tokens of a request that the server allows; what the context of every step counts as.
        step_tokens: most rows of a request that count as a step: 1 and the speculated ones.
        workspace_tokens: most context tokens that one dense part may hold keys and values of; 0: no limit.
        trace: where plans are recorded.
        count: called with every plan, for metrics.
        request_ids: ids of the running batch's requests, for the trace.
        free_memory: reads the device's free bytes at the next prefill, and is forgotten then: a reading may wait for
            the device. Set again, it is read again.
        exchange: of heads for tokens; None where no batch trades them (`trade`).
        no_exchange: why there is none; "" where there may be.
        exchange_rows: query rows of a batch that heads are traded for at most.
        current: the last batch that was split, for the indexer's hooks that see no batch of their own.
    """

    model: ModelShape
    device: DeviceProfile
    settings: Settings
    max_model_len: int
    step_tokens: int = 1
    workspace_tokens: int = 0
    trace: Trace = field(default_factory=Trace)
    count: Callable[[Plan], None] | None = None
    request_ids: Callable[[], Sequence[str]] = tuple
    free_memory: Callable[[], int] | None = None
    exchange: Exchange | None = None
    no_exchange: str = "this worker has no exchange"
    exchange_rows: int = 0
    current: Split | None = None
    _steps: dict[tuple[Phase, int, int], Plan] = field(default_factory=dict)
    _seen: tuple[torch.Tensor, tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        layout = self.model.kv_layout
        self.prefill_device = runnable(self.device, layout, prefill=True)
        self.step_device = runnable(self.device, layout, prefill=False)

    @property
    def logits_budget(self) -> int:
        """Bytes that the indexer's float32 logits may take at once."""
        return min(self.settings.logits_budget_mb * MIB, self.prefill_device.memory_free // 4)

    def trade(self, exchange: Exchange | None, keeps: str) -> None:
        """What came of the exchange of heads for tokens, before any batch.

        With one, every rank has to call this: ranks that trade have to plan alike, and a plan may turn on what is free.

        Args:
            keeps: why there is none.
        """
        self.exchange, self.no_exchange = exchange, keeps
        self._steps.clear()
        if exchange is not None:
            self.exchange_rows = exchange.shard.max_tokens
            free = exchange.least(self.device.memory_free)
            self.prefill_device = replace(self.prefill_device, memory_free=free)
            self.step_device = replace(self.step_device, memory_free=free)

    def split(self, common: Any) -> Split:
        """The parts of a batch, from vLLM's CommonAttentionMetadata; the same for every builder that asks.

        Reads what the host has: query_start_loc_cpu, and for prefills seq_lens_cpu_upper_bound, which is exact for
        them. Only where vLLM gives no such bound are the lengths copied from the device.
        """
        starts = tuple(common.query_start_loc_cpu.tolist())
        q_lens = [end - start for start, end in pairwise(starts)]
        num_steps = next((place for place, rows in enumerate(q_lens) if rows > self.step_tokens), len(q_lens))
        kv_lens = host_lengths(common)[num_steps:] if num_steps < len(q_lens) else []
        key = (starts, tuple(kv_lens), int(common.num_actual_tokens))
        # The copies of a step's metadata share the tensor: one batch is decided, and recorded, once.
        if self._seen is not None and self._seen[0] is common.query_start_loc_cpu and self._seen[1] == key:
            assert self.current is not None
            return self.current
        self._seen = (common.query_start_loc_cpu, key)
        self.current = self._split(starts, q_lens, kv_lens, num_steps, key[2])
        self._record(self.current, q_lens, kv_lens)
        return self.current

    def _split(
        self, starts: tuple[int, ...], q_lens: list[int], kv_lens: list[int], num_steps: int, num_rows: int
    ) -> Split:
        step_rows = num_rows if num_steps == len(q_lens) else starts[num_steps]
        steps = self.step_plan(num_steps, step_rows, max(q_lens[:num_steps], default=0)) if step_rows else None
        sparse: Plan | None = None
        sparse_requests: tuple[int, ...] = ()
        dense: list[DensePart] = []
        rows = q_lens[num_steps:]
        if any(rows):
            self._read_free_memory()
            for part in self._parts(rows, kv_lens, self.workspace_tokens):
                requests = tuple(num_steps + request for request in part.requests)
                if part.plan.attention is Attention.MHA_ONE_SHOT:
                    q, kv = (tuple(lens[request] for request in part.requests) for lens in (rows, kv_lens))
                    dense.append(DensePart(part.plan, requests, q, kv))
                elif part.plan.attention is not Attention.NONE:
                    sparse, sparse_requests = part.plan, requests
        split = Split(starts, num_rows, num_steps, step_rows, steps, sparse, sparse_requests, tuple(dense))
        return split if self.exchange is None else self._dealt_out(split, q_lens, kv_lens, self.exchange)

    def _parts(self, q_lens: list[int], kv_lens: list[int], workspace_tokens: int = 0) -> tuple[Part, ...]:
        """The parts of a prefill."""
        return partition(
            self.model,
            q_lens,
            kv_lens,
            Phase.EXTEND,
            self.prefill_device,
            self.settings,
            attention_workspace_tokens=workspace_tokens,
            keeps_heads=self._keeps_heads(sum(q_lens)),
        )

    def _keeps_heads(self, rows: int) -> str:
        """Why a batch's ranks do not trade heads for tokens, whatever else speaks for it; "" if they may."""
        if self.no_exchange:
            return self.no_exchange
        if rows > self.exchange_rows:
            return f"{rows} query rows exceed the {self.exchange_rows} that the exchange's buffers hold"
        return ""

    def _dealt_out(self, split: Split, q_lens: list[int], kv_lens: list[int], exchange: Exchange) -> Split:
        """The split with the rows of its parts that trade dealt out: the same on every rank.

        Args:
            q_lens: of every request. kv_lens: of those that are no steps.
        """
        if split.steps is not None and split.steps.token_shard:
            split = replace(split, steps_dealt=Dealt(sharding.step_shares(self.model, split.step_rows)))
        if split.sparse is None or not split.sparse.token_shard:
            return split
        found: list[Dealt | None] = []
        for requests in (split.head_requests, split.tail_requests):
            if not requests:
                found.append(None)
                continue
            q = [q_lens[request] for request in requests]
            kv = [kv_lens[request - split.num_steps] for request in requests]
            shard = exchange.shard
            shares = sharding.shares(self.model, self.prefill_device, split.sparse, q, kv, shard.max_rows)
            found.append(dealt(shares, shard.rank, requests, q, kv))
        return replace(split, head_dealt=found[0], tail_dealt=found[1])

    def step_plan(self, requests: int, rows: int, rows_each: int) -> Plan:
        """The plan of a decode or verify step: the same whenever the phase, the requests and the rows are."""
        phase = Phase.DECODE if rows_each <= 1 else Phase.TARGET_VERIFY
        requests = max(1, min(requests, rows))
        key = (phase, requests, rows)
        if key not in self._steps:
            longest = max(self.max_model_len, -(-rows // requests))
            shape = BatchShape(
                phase=phase,
                num_requests=requests,
                num_tokens=rows,
                max_kv_len=longest,
                total_kv_len=requests * longest,
                has_prefix=True,
                cuda_graph=True,
            )
            keeps = self._keeps_heads(rows)
            self._steps[key] = decide(self.model, shape, self.step_device, self.settings, keeps_heads=keeps)
        return self._steps[key]

    def prefill_plan(self, rows: int, context: int) -> Plan:
        """The plan of a prefill of one request that does not come to be: nothing is recorded."""
        (part,) = self._parts([rows], [context])
        return part.plan

    def _read_free_memory(self) -> None:
        if self.free_memory is not None:
            self.prefill_device = replace(self.prefill_device, memory_free=self.free_memory())
            self.free_memory = None

    def _record(self, split: Split, q_lens: list[int], kv_lens: list[int]) -> None:
        names = list(self.request_ids())

        def entry(request: int, kv_len: int) -> tuple[str, int, int]:
            return names[request] if request < len(names) else "", q_lens[request], kv_len

        parts: list[tuple[Plan, list[tuple[str, int, int]]]] = []
        if split.steps is not None:
            live = [request for request in range(split.num_steps) if q_lens[request]]
            parts.append((split.steps, [entry(request, self.max_model_len) for request in live]))
        parts += [
            (part.plan, [entry(request, kv) for request, kv in zip(part.requests, part.kv_lens, strict=True)])
            for part in split.dense
        ]
        if split.sparse is not None:
            rows = [entry(request, kv_lens[request - split.num_steps]) for request in split.sparse_requests]
            parts.append((split.sparse, rows))
        self.trace.record(parts)
        if self.count is not None:
            for plan, _ in parts:
                self.count(plan)


def host_lengths(common: Any) -> list[int]:
    """Context of each request, in tokens, this step's included; an upper bound for steps."""
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bound is None:
        bound = common.seq_lens.cpu()
    return [int(length) for length in bound[: common.num_reqs].tolist()]
