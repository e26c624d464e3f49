"""vLLM's batches on a GPU, split into parts with a plan each, and the planner of one worker.

A batch of vLLM is [steps][prefills]: the runner sorts requests with few query tokens (one, or one and the speculated
ones) to the front. `VllmPlanner.split` decides for the steps by their phase and number of query tokens alone, because
they may be captured, and for the prefills request by request (`decision.partition`), so that short prompts
stay dense in a batch with a long one. The builders of attention and of the indexer share the planner, so attention
never reads a selection that the indexer skipped (vllm #52512).

`backends.common.paths` says how a part is executed: by the plugin's kernel or by vLLM's FlashMLA call.

Where a plan reshards, the query tokens of a part are assigned to the ranks here, once for attention and indexer; see
`token_shard`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from nsa_plugin.backends.common.paths import MIXED, SEPARATE, STOCK, VLLM, path_of
from nsa_plugin.backends.common.planner import Planner, step_shape
from nsa_plugin.backends.common.token_shard import Exchange
from nsa_plugin.backends.vllm.v32.dcp import DcpGroup
from nsa_plugin.backends.vllm.v32.token_shard import Assigned, assign
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.constraints import SHARED_CONTEXT, Constraints
from nsa_plugin.decision.dispatch import BatchPart
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, Route
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.layouts import V32_FP8
from nsa_plugin.patches.ledger import TURN_OFF

COPYING_HEADS = 32
"""From this many heads of a rank on, vLLM copies the fp8 cache to bf16 for a prefill."""
VLLM_CALLS = frozenset({STOCK, MIXED, SEPARATE})
"""The execution paths on which vLLM's FlashMLA call attends."""
COPIED_ROWS = 1024
"""From this many query tokens of a prefill on, one call for it and for the steps of its batch is worth more than the
faster kernel for the steps: the results of two calls are copied, [query tokens, heads, kv_lora_rank] in each layer."""
BESIDE = "one call of vLLM for the prefill of this batch and its steps"
TRTLLM_OVER_FP8 = (
    "vLLM runs it over a cache without scales with --attention-backend FLASHINFER_MLA_SPARSE, where the plugin leaves "
    "attention to vLLM, prefill_backend and decode_backend auto"
)


@dataclass(frozen=True)
class DensePart:
    """Requests that attend densely, in one call.

    Attributes:
        requests: their places in the batch.
        q_lens, kv_lens: query tokens and context of each, the query tokens included.
    """

    plan: Plan
    requests: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A batch in parts.

    Attributes:
        starts: first query token of each request and the end of the last, as the host knows them.
        num_rows: query tokens of the batch, padding for a CUDA graph included.
        num_steps: decode or verify requests at the front; padded ones, without query tokens, included.
        step_rows: their query tokens; all query tokens of a batch without prefills.
        steps: their plan; None without any.
        sparse: the plan of all prefills that select; None without any.
        sparse_requests: their places, ascending.
        dense: the parts of prefills that attend densely.
        steps_assigned, head_assigned, tail_assigned: query tokens of each rank, of the steps, of `head_requests` and of
            `tail_requests`; None if heads stay local.
    """

    starts: tuple[int, ...]
    num_rows: int
    num_steps: int
    step_rows: int
    steps: Plan | None
    sparse: Plan | None
    sparse_requests: tuple[int, ...]
    dense: tuple[DensePart, ...]
    steps_assigned: Assigned | None = None
    head_assigned: Assigned | None = None
    tail_assigned: Assigned | None = None

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def only_steps(self) -> bool:
        """Whether the batch has query tokens of steps and of nothing else."""
        return self.steps is not None and self.num_steps == self.num_requests

    @property
    def dense_requests(self) -> frozenset[int]:
        return frozenset(request for part in self.dense for request in part.requests)

    @property
    def mha_request(self) -> int:
        """The first dense request, from which vLLM calls `forward_mha`; the number of requests if none is dense."""
        return min(self.dense_requests, default=self.num_requests)

    @property
    def mha_row(self) -> int:
        """The first query token of `forward_mha`; all before it go to `forward_mqa`."""
        return self.starts[self.mha_request] if self.dense else self.num_rows

    @property
    def head_requests(self) -> tuple[int, ...]:
        """The prefills that select and go to `forward_mqa`; they are contiguous."""
        return tuple(request for request in self.sparse_requests if request < self.mha_request)

    @property
    def tail_requests(self) -> tuple[int, ...]:
        """The prefills that select and follow the first dense one."""
        return tuple(request for request in self.sparse_requests if request > self.mha_request)


@dataclass
class VllmPlanner(Planner):
    """The decisions of one vLLM worker process; see `Planner`.

    Attributes:
        selects_prefills: whether prefills may be selected for without logits (`prefill_selection`); with another
            library of the plan, vLLM's code selects.
        max_model_len: most tokens of a request that the server allows; taken as the context of every step.
        step_tokens: most query tokens of a decode or verify request: 1 plus the speculated ones.
        no_dense: why no prompt attends densely; "" = they may.
        scores_dense: whether the indexer selects for prompts that attend densely, too, as later draft steps read it.
        workspace_tokens: most context tokens of a dense part; 0: no limit.
        split_selection_rows: from this many query tokens of a prefill on, vLLM's ranks each select for a share of them
            (0.32 on); 0: never.
        request_ids: returns the ids of the requests of a batch, by its CommonAttentionMetadata; for the trace.
        exchange: for resharding; None if no batch reshards (`set_exchange`).
        dcp: the ranks that share the KV caches; None without context parallelism (`set_dcp`).
        current: the last batch that was split, for the indexer's hooks, which get no batch.
    """

    engine: ClassVar[str] = VLLM

    no_exchange: str = "this worker has no exchange"
    selects_prefills: bool = False
    max_model_len: int = 1
    step_tokens: int = 1
    no_dense: str = ""
    scores_dense: bool = False
    workspace_tokens: int = 0
    split_selection_rows: int = 0
    request_ids: Callable[[Any], Sequence[str]] = lambda common: ()
    exchange: Exchange | None = None
    dcp: DcpGroup | None = None
    current: Split | None = None
    _seen: tuple[torch.Tensor, tuple[Any, ...]] | None = None

    def forget_steps(self) -> None:
        """Plan decode and verify steps anew. Not once graphs are captured: a replay executes its capture's plan."""
        self._steps.clear()
        self.current = None

    def set_exchange(self, exchange: Exchange | None, why_none: str) -> None:
        """Take the exchange, or the reason why there is none, before any batch.

        With an exchange every rank must call this: all need the same plans, which may depend on the free memory.
        """
        self.exchange, self.no_exchange = exchange, why_none
        self.forget_steps()
        if exchange is not None:
            self.exchange_rows = exchange.shard.max_tokens
            self.device = replace(self.device, memory_free=exchange.least(self.device.memory_free))

    def set_dcp(self, dcp: DcpGroup) -> None:
        """Take the ranks that share the KV caches, before any batch; every rank must call this, as `set_exchange`."""
        self.dcp = dcp
        self.forget_steps()
        self.device = replace(self.device, memory_free=dcp.least(self.device.memory_free))

    @property
    def shard(self) -> KvShard | None:
        """This rank's part of the KV caches, if ranks share them.

        Raises:
            PatchError: they do, and the plugin has not found the others.
        """
        if self.model.dcp_size == 1:
            return None
        if self.dcp is None:
            raise PatchError(
                f"a batch came before the plugin found the ranks that share the KV cache with this one. {TURN_OFF}"
            )
        return self.dcp.shard

    def split(self, common: Any) -> Split:
        """Split a batch, from vLLM's CommonAttentionMetadata; the same for every builder.

        Reads host values: query_start_loc_cpu, and for prefills `host_lengths`, which are exact for them.
        """
        starts = tuple(common.query_start_loc_cpu.tolist())
        last, num_rows = self.current, int(common.num_actual_tokens)
        # Steps alone depend on nothing but their query tokens. A trace file lists the requests, which may be others.
        looked_at = self.memory_unread or self.trace.is_file
        same = last is not None and last.starts == starts and last.num_rows == num_rows
        if last is not None and same and last.only_steps and not looked_at:
            if self._seen is None or self._seen[0] is not common.query_start_loc_cpu:
                assert last.steps is not None
                self._seen = (common.query_start_loc_cpu, (starts, (), num_rows))
                self.count(last.steps, starts[-1])
            return last
        q_lens = [end - start for start, end in pairwise(starts)]
        num_steps = len(q_lens)
        if max(q_lens, default=0) > self.step_tokens:
            num_steps = next(place for place, rows in enumerate(q_lens) if rows > self.step_tokens)
        kv_lens = host_lengths(common)[num_steps:] if num_steps < len(q_lens) else []
        key = (starts, tuple(kv_lens), num_rows)
        # Copies of a batch's metadata share the tensor, so one batch is decided and recorded once.
        if self._seen is not None and self._seen[0] is common.query_start_loc_cpu and self._seen[1] == key:
            assert self.current is not None
            return self.current
        started = time.perf_counter()
        self._seen = (common.query_start_loc_cpu, key)
        self.current = self._split(starts, q_lens, kv_lens, num_steps, key[2])
        # vLLM's second model runner looks every id up, which only a trace file needs.
        names = self.request_ids(common) if self.trace.is_file else ()
        self._record(self.current, names, q_lens, kv_lens, started)
        return self.current

    def _split(
        self, starts: tuple[int, ...], q_lens: list[int], kv_lens: list[int], num_steps: int, num_rows: int
    ) -> Split:
        step_rows = num_rows if num_steps == len(q_lens) else starts[num_steps]
        if num_steps < len(q_lens) or self.memory_unread:
            self.read_free_memory()
        sparse: Plan | None = None
        sparse_requests: tuple[int, ...] = ()
        dense: list[DensePart] = []
        rows = q_lens[num_steps:]
        if any(rows):
            for part in self._parts(rows, kv_lens, self.workspace_tokens):
                requests = tuple(num_steps + request for request in part.requests)
                if part.plan.attention is Attention.MHA_ONE_SHOT:
                    q, kv = (tuple(lens[request] for request in part.requests) for lens in (rows, kv_lens))
                    dense.append(DensePart(part.plan, requests, q, kv))
                elif part.plan.attention is not Attention.NONE:
                    sparse, sparse_requests = part.plan, requests
        steps: Plan | None = None
        if step_rows:
            selecting = sum(q_lens[request] for request in sparse_requests)
            alone = self.exchange is None and self.model.dcp_size == 1
            beside = alone and selecting >= COPIED_ROWS and sparse is not None and self.calls_vllm(sparse)
            steps = self.step_plan(num_steps, step_rows, max(q_lens[:num_steps], default=0), beside=beside)
        split = Split(starts, num_rows, num_steps, step_rows, steps, sparse, sparse_requests, tuple(dense))
        return split if self.exchange is None else self._assigned_split(split, q_lens, kv_lens, self.exchange)

    def _parts(self, q_lens: list[int], kv_lens: list[int], workspace_tokens: int = 0) -> tuple[BatchPart, ...]:
        """Return the parts of a prefill."""
        return self.decider.partition(
            q_lens,
            kv_lens,
            Phase.EXTEND,
            attention_workspace_tokens=workspace_tokens,
            constraints=self.constraints(
                prefill=True, rows=sum(q_lens), no_dense=self.no_dense, stock_prefill=self.stock_prefill
            ),
        )

    @property
    def stock_prefill(self) -> Route | None:
        """vLLM's route for prefills of V3.2 over an fp8 cache (its MIN_HEADS_FOR_BF16_PREFILL); None for others."""
        if self.model.kv_layout != V32_FP8.name:
            return None
        few = self.model.dcp_size > 1 or self.model.heads_per_rank < COPYING_HEADS
        return FLASH_MLA_DECODE if few else BF16_COPY

    def constraints(self, *, prefill: bool, rows: int = 0, **more: Any) -> Constraints:
        if self.model.kv_layout == V32_FP8.name:
            more["no_path"] = {"trtllm": TRTLLM_OVER_FP8}
        if self.model.dcp_size > 1:
            more["no_copy"] = SHARED_CONTEXT
        if prefill and 0 < self.split_selection_rows <= rows:
            more["selection_split"] = (
                f"vLLM's ranks share the selection from {self.split_selection_rows} query tokens on"
            )
        return super().constraints(prefill=prefill, rows=rows, **more)

    def _assigned_split(self, split: Split, q_lens: list[int], kv_lens: list[int], exchange: Exchange) -> Split:
        """Assign the query tokens of parts that reshard to ranks; the result is the same on every rank.

        Args:
            q_lens: of every request.
            kv_lens: of the prefills.
        """
        if split.steps is not None and split.steps.token_shard:
            split = replace(split, steps_assigned=Assigned(sharding.step_shares(self.model, split.step_rows)))
        if split.sparse is None or not split.sparse.token_shard:
            return split
        plan, shard = split.sparse, exchange.shard

        def assigned(requests: Sequence[int]) -> Assigned | None:
            if not requests:
                return None
            q = [q_lens[request] for request in requests]
            kv = [kv_lens[request - split.num_steps] for request in requests]
            shares = sharding.shares(self.model, self.device, plan, q, kv, shard.max_rows)
            return assign(shares, shard.rank, requests, q, kv)

        return replace(split, head_assigned=assigned(split.head_requests), tail_assigned=assigned(split.tail_requests))

    def calls_vllm(self, plan: Plan) -> bool:
        """Whether vLLM's FlashMLA call attends by a sparse plan."""
        return path_of(VLLM, self.model.kv_layout, plan).path in VLLM_CALLS

    def step_plan(self, requests: int, rows: int, rows_each: int, *, beside: bool = False) -> Plan:
        """Return the plan of a decode or verify step; it depends on phase, requests and query tokens alone.

        Args:
            beside: whether the batch has a prefill that vLLM's call attends, which is then preferred for the step.
        """
        phase = Phase.DECODE if rows_each <= 1 else Phase.TARGET_VERIFY
        requests = max(1, min(requests, rows))
        shape = step_shape(phase, requests, rows, self.max_model_len)
        calls = self.routes(prefill=False, only=VLLM_CALLS) if beside else frozenset()
        return self.step_execution_of(shape, preferred=calls, preferred_by=BESIDE).plan

    def prefill_plan(self, rows: int, context: int) -> Plan:
        """Return the plan of a one-request prefill that is never scheduled: nothing is recorded."""
        (part,) = self._parts([rows], [context])
        return part.plan

    def _record(
        self, split: Split, names: Sequence[str], q_lens: list[int], kv_lens: list[int], started: float
    ) -> None:
        parts: list[tuple[Plan, Sequence[int], int]] = []  # with the query tokens of all its requests
        if split.steps is not None:
            parts.append((split.steps, range(split.num_steps), split.starts[split.num_steps]))
        parts += [(part.plan, part.requests, sum(part.q_lens)) for part in split.dense]
        if split.sparse is not None:
            rows = sum(q_lens[request] for request in split.sparse_requests)
            parts.append((split.sparse, split.sparse_requests, rows))

        def entry(request: int) -> tuple[str, int, int]:
            context = self.max_model_len if request < split.num_steps else kv_lens[request - split.num_steps]
            return names[request] if request < len(names) else "", q_lens[request], context

        # Only a trace file has the requests, and every decode step comes here.
        listed = self.trace.is_file
        recorded = [(plan, [entry(one) for one in some if q_lens[one]] if listed else []) for plan, some, _ in parts]
        self.record(recorded, started, [rows for _, _, rows in parts])


def host_lengths(common: Any) -> list[int]:
    """Return the context of each request in tokens, new ones included; an upper bound for decode and verify steps.

    Copies the lengths from the device if vLLM has no bound on the host.
    """
    bound = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bound is None:
        bound = common.seq_lens.cpu()
    return [int(length) for length in bound[: common.num_reqs].tolist()]
