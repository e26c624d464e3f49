"""vLLM's batches on a GPU, split into parts with a Plan each, and who carries a part.

A batch of vLLM is [steps][prefills]: the runner sorts requests with few rows (one, or one and the speculated ones)
to the front. `Planner.split` decides for the steps by their phase and number of rows alone, because they may be
captured, and for the prefills request by request (`dispatch.partition`), so that one long prompt does not take dense
attention from the short ones. Attention and indexer builders ask the same planner about the same batch, so that what
one leaves out the other never reads (vllm #52512).

`CARRIERS` is all that is known of vLLM's own FlashMLA calls: the plugin has no FlashMLA of its own beside vLLM, and
lets vLLM's run for the rows of a part whose Plan names it. Everything else a Plan may name is the plugin's provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from nsa_plugin.capabilities import Capability, Op
from nsa_plugin.devices import MIB, DeviceProfile
from nsa_plugin.dispatch import decide, partition
from nsa_plugin.errors import NoProviderError
from nsa_plugin.plan import Attention, Plan
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import BatchShape, ModelShape, Phase
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
    """The profile without what nobody carries here: FlashMLA calls that vLLM does not make, and token shards."""

    def carried(library: str, capability: Capability) -> bool:
        if capability.op is Op.TOKEN_SHARD:
            return False
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
    """

    starts: tuple[int, ...]
    num_rows: int
    num_steps: int
    step_rows: int
    steps: Plan | None
    sparse: Plan | None
    sparse_requests: tuple[int, ...]
    dense: tuple[DensePart, ...]

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
            for part in partition(
                self.model,
                rows,
                kv_lens,
                Phase.EXTEND,
                self.prefill_device,
                self.settings,
                attention_workspace_tokens=self.workspace_tokens,
            ):
                requests = tuple(num_steps + request for request in part.requests)
                if part.plan.attention is Attention.MHA_ONE_SHOT:
                    q, kv = (tuple(lens[request] for request in part.requests) for lens in (rows, kv_lens))
                    dense.append(DensePart(part.plan, requests, q, kv))
                elif part.plan.attention is not Attention.NONE:
                    sparse, sparse_requests = part.plan, requests
        return Split(starts, num_rows, num_steps, step_rows, steps, sparse, sparse_requests, tuple(dense))

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
            self._steps[key] = decide(self.model, shape, self.step_device, self.settings)
        return self._steps[key]

    def prefill_plan(self, rows: int, context: int) -> Plan:
        """The plan of a prefill of one request that does not come to be: nothing is recorded."""
        (part,) = partition(self.model, [rows], [context], Phase.EXTEND, self.prefill_device, self.settings)
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
