"""Plans for SGLang's V3.2 batches: which phases the plugin plans for, and the planner of one backend.

SGLang routes a batch by two strings of its backend, `{nsa,dsa}_prefill_impl` and `{nsa,dsa}_decode_impl`. They also
select the form of the indexer's selection: slots of the paged cache, or, for flashmla_sparse over an fp8 cache, rows of
a copy. `backends.common.paths` says which of them executes a plan.

Left to the stock path: trtllm and flashmla_sparse_q8, tilelang, aiter, flashinfer, triton_sparse_mla, intel_xpu (if a
flag or a default of SGLang's names them); hisparse; context parallelism; pooled indexer keys; KV shards; deterministic
inference; the modes of PD multiplexing and diffusion models. With a plan, SGLang still calls the dense kernel (FA3 on
SM90, trtllm on SM100), copies an fp8 prefix to bf16, writes the cache, and runs the fused top-k of decode steps and its
transform.

A mixed batch (`--enable-mixed-chunk`) has a plan as a prefill in which each decode step is a request with one query
token. Over an fp8 cache it gets a kernel that reads the cache in place: in mode MIXED SGLang selects slots of the cache
and makes no copy. From 0.5.19 on SGLang's eager runner turns the mode into EXTEND before it prepares the batch, and a
copy is possible again; a prefill graph still prepares MIXED and runs its layers as EXTEND.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nsa_plugin.backends.common.paths import FA3, FLASHMLA_KV, FLASHMLA_SPARSE, MHA, SGLANG
from nsa_plugin.backends.common.planner import KERNEL_OPS, Execution, Planner
from nsa_plugin.backends.sglang.startup.model import (
    argument_of,
    impls_of,
    selection_is_broadcast,
    stock_feature,
    variable_of,
)
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import BatchPart
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, Route
from nsa_plugin.decision.shapes import ModelShape, Phase
from nsa_plugin.parallel.partition import Partition
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import MIXED

# SGLang's paths that a plan may replace, by layout and whether it is a prefill. If a flag or a default names another
# path, that phase is left to the stock path. Decode paths in one set need the same buffers, which SGLang allocates
# before it captures; flashmla_kv needs others.
PLANNED = {
    ("v32_fp8", True): frozenset({"flashmla_kv", "flashmla_sparse", "flashmla_auto"}),
    ("v32_fp8", False): frozenset({"flashmla_kv"}),
    ("bf16", True): frozenset({"flashmla_sparse", "flashmla_auto"}),
    ("bf16", False): frozenset({"fa3", "flashmla_sparse"}),
}

BF16_BYTES = 2
# The routes of SGLang's paths for prefills over an fp8 cache. With flashmla_auto either may run.
FP8_PREFILLS = {FLASHMLA_KV: FLASH_MLA_DECODE, FLASHMLA_SPARSE: BF16_COPY}

IN_PLACE = frozenset({FLASHMLA_KV, MHA})
"""SGLang's paths over an fp8 cache that do not read a copy of the selected tokens."""
NO_COPY = "in a prefill with decode steps SGLang selects slots of the cache and makes no copy"

MAX_PREFILLS = 1024
"""Prefills of different lengths whose plans are cached: deciding anew would slow short prefills down."""
NO_DENSE = "SGLang's rules exclude it for this batch"
NO_DENSE_BESIDE_DRAFTS = "the draft model reads the selection of every prompt"
COPY_BUDGET = "a quarter of the free memory"


DENSE_VARIABLE = "SGLANG_{}_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
"""Up to how many tokens of context SGLang attends prefills densely; named by the backend's prefix (`prefix_of`)."""
SEEDS = "prepare_mtp_seed_indices"
"""The method that makes slots of a selection for draft steps, from SGLang 0.5.23 on."""

SPLIT_TOKENS = 512
"""Fewest query tokens of short prompts that are split off; for fewer, the second attention call is estimated to take
longer than it saves."""


@dataclass(frozen=True)
class SplitExecution(Execution):
    """How to execute a prefill whose short prompts attend densely: plan and path are those of the others.

    Attributes:
        requests: places of the requests that select, ascending.
        dense_parts: the requests that attend densely.
    """

    requests: tuple[int, ...] = ()
    dense_parts: tuple[BatchPart, ...] = ()


@dataclass
class SglangPlanner(Planner):
    """The decisions of one SGLang attention backend; see `Planner`.

    Attributes:
        sinks: whether the model has attention sinks.
        stock_prefill: SGLang's route for prefills over an fp8 cache, by its flag or default; None = its usual one.
        asked_by: SGLang's flag and its value, by the backend setting that it set.
        whole: why no prefill is split (`split.why_whole`); "" = one may be.
        mixes: whether the server puts decode steps into prefills (`--enable-mixed-chunk`).
        no_copy: why no prefill makes a bf16 copy of an fp8 cache (`why_no_copy`); "" = one may.
        dense_up_to: context tokens, more than index_topk, up to which SGLang attends prefills densely because a user
            asked for it (`dense_beyond`); they fall back to the stock path. 0 = none do.
        has_half: whether the backend attends half of another one's batches, which are counted there (`attends_half`).
    """

    engine: ClassVar[str] = SGLANG

    sinks: bool = False
    stock_prefill: Route | None = None
    asked_by: Mapping[str, str] = field(default_factory=dict)
    whole: str = "this backend attends every batch as a whole"
    mixes: bool = False
    no_copy: str = ""
    dense_up_to: int = 0
    has_half: Callable[[], bool] = lambda: False
    _prefills: dict[Hashable, Execution | None] = field(default_factory=dict)

    def prefill(self, batch: Batch, *, no_dense: str = NO_DENSE, no_split: str = NO_DENSE) -> Execution | None:
        """Return how to execute a prefill, or None if it is left to the stock path.

        Args:
            no_dense: why SGLang's rules exclude dense attention of the batch; "" = they allow it. They know its flags
                and graphs; a plan may use dense attention less than they allow, never more.
            no_split: why the batch is not split (`no_split_of`, and SGLang's rules); "" = it may be.
        """
        started = time.perf_counter()
        self.read_free_memory()
        execution = self.prefill_execution(batch, no_dense=no_dense, no_split=no_split)
        if execution is None or not self._counts(batch):
            return execution
        return self._recorded(execution, batch, started)

    def prefill_execution(
        self, batch: Batch, *, no_dense: str = NO_DENSE, no_split: str = NO_DENSE
    ) -> Execution | None:
        """As `prefill`, for a batch that is never scheduled: nothing is recorded."""
        key = *self._prefill_key(batch, no_split), no_dense, self.device.memory_free
        if key not in self._prefills:
            if len(self._prefills) >= MAX_PREFILLS:
                self._prefills.clear()
            self._prefills[key] = self._prefill_execution(batch, no_dense, no_split)
        return self._prefills[key]

    @property
    def short_limit(self) -> int:
        """Most tokens of a context that may attend densely; a plan may have a lower limit."""
        return self.model.index_topk if self.settings.mha_max_kv < 0 else self.settings.mha_max_kv

    def describe_split(self) -> str:
        """Say for the start-up report how short prompts attend in a prefill with long ones."""
        if self.whole:
            return f"attend as the long ones: {self.whole}"
        return f"attend densely, from {SPLIT_TOKENS} query tokens on"

    def no_split_of(self, batch: Batch) -> str:
        """Return why the short prompts of a batch do not attend densely next to its long ones; "" if they may."""
        if self.whole:
            return self.whole
        if batch.shape.max_kv_len <= self.short_limit:
            return "no context is longer"
        short = sum(rows for _, rows, context in batch.requests if rows > 1 and context <= self.short_limit)
        return "" if short >= SPLIT_TOKENS else f"fewer than {SPLIT_TOKENS} query tokens are in short contexts"

    def _prefill_key(self, batch: Batch, no_split: str) -> tuple[Hashable, ...]:
        """Return the batch properties that a prefill's plan depends on."""
        lengths = () if no_split else (batch.q_lens, batch.kv_lens)
        return batch.shape, batch.mixed, batch.in_graph, no_split, lengths

    def _prefill_execution(self, batch: Batch, no_dense: str, no_split: str) -> Execution | None:
        if batch.shape.context_parallel:
            return None
        if not no_dense and self.model.index_topk < batch.shape.max_kv_len <= self.dense_up_to:
            return None
        if not no_split:
            return self._split_execution(batch)
        constraints = self.prefill_constraints(batch, no_dense, no_split)
        return self.execution(self.decider.decide(batch.shape, constraints))

    def _split_execution(self, batch: Batch) -> Execution:
        """Decide for each part of a batch; one with a single part is executed as a whole."""
        parts = self.decider.partition(
            batch.q_lens,
            batch.kv_lens,
            Phase.EXTEND,
            attention_workspace_tokens=batch.shape.attention_workspace_tokens,
            # To attend densely, a decode step would project all keys of its context for one query token.
            selecting=[place for place, rows in enumerate(batch.q_lens) if rows == 1],
            constraints=self.prefill_constraints(batch),
        )
        dense = tuple(part for part in parts if part.plan.attention is Attention.MHA_ONE_SHOT)
        (sparse,) = (part for part in parts if part.plan.attention in KERNEL_OPS)
        execution = self.execution(sparse.plan)
        return (
            SplitExecution(sparse.plan, execution.path, execution.own, sparse.requests, dense) if dense else execution
        )

    def prefill_constraints(self, batch: Batch, no_dense: str = "", no_split: str = "") -> Constraints:
        """Return the constraints of a prefill, or of its parts."""
        rows, (d_qk, _) = batch.shape.num_tokens, self.model.row_dims
        more: dict[str, Any] = {"no_dense": no_dense, "no_split": no_split}
        if batch.in_graph and not self.no_exchange:
            more["keep_heads"] = "SGLang captures or replays this prefill in pieces, around attention over fixed tokens"
        copy_bytes: int | None = batch.shape.total_kv_len * d_qk * BF16_BYTES
        if "prefill_backend" in self.asked_by and self.stock_prefill is not None:
            # The user chose this very path. SGLang copies all contexts for sparse attention without a limit.
            more |= {"preferred": frozenset({self.stock_prefill}), "preferred_by": self.asked_by["prefill_backend"]}
            copy_bytes = None if self.stock_prefill == BF16_COPY else copy_bytes
        no_copy = NO_COPY if batch.mixed else self.no_copy
        if no_copy and self.model.fp8_cache:
            more["paths"] = self.routes(prefill=True, only=IN_PLACE)
            more["no_path"] = {BF16_COPY: no_copy}
        return self.constraints(
            prefill=True,
            rows=rows,
            stock_prefill=self.stock_prefill,
            copy_bytes=copy_bytes,
            copy_budget=self.device.memory_free // 4,
            copy_budget_from=COPY_BUDGET,
            **more,
        )

    def constraints(self, *, prefill: bool, rows: int = 0, **more: Any) -> Constraints:
        phase = "prefill" if prefill else "decode"
        more.setdefault("asked_by", self.asked_by.get(f"{phase}_backend", ""))
        # On SM100 SGLang may also pick TRT-LLM by itself; the plugin leaves that choice alone.
        flag = f"--dsa-{phase}-backend trtllm (or --nsa-{phase}-backend)"
        where = ", over a cache without scales that it lays out for it" if self.model.fp8_cache else ""
        trtllm = f"SGLang runs it only with {flag}{where}, {phase}_backend auto"
        more["no_path"] = {"trtllm": trtllm, **more.get("no_path", {})}
        if not prefill:
            more["keep_heads_on"] = {
                route: "SGLang's path fa3 attends the query tokens of the whole batch"
                for route in self.routes(prefill=False, only=frozenset({FA3}))
            }
        return super().constraints(prefill=prefill, rows=rows, **more)

    def shares(self, plan: Plan, batch: Batch, held: int) -> Partition:
        """Return each rank's share of a batch; see `shares` of `decision.token_shard`, and `step_shares` for steps."""
        if plan.phase is not Phase.EXTEND:
            return sharding.step_shares(self.model, batch.shape.num_tokens)
        return sharding.shares(self.model, self.device, plan, batch.q_lens, batch.kv_lens, held)

    def step(self, batch: Batch) -> Execution:
        """Return how to execute a decode, verify or draft step; it depends on the phase and the query tokens alone."""
        if not self._counts(batch):
            return self.step_execution(batch)
        if (again := self.step_again(batch.shape)) is not None:
            return again
        started = time.perf_counter()
        return self._recorded(self.step_execution(batch), batch, started)

    def step_execution(self, batch: Batch) -> Execution:
        """As `step`, for a batch that is never scheduled: nothing is recorded."""
        return self.step_execution_of(batch.shape)

    def _counts(self, batch: Batch) -> bool:
        return not (batch.made_up or self.has_half())

    def _recorded(self, execution: Execution, batch: Batch, started: float) -> Execution:
        if isinstance(execution, SplitExecution):
            places = [(execution.plan, execution.requests)]
            places += [(part.plan, part.requests) for part in execution.dense_parts]
            self.record([(plan, [batch.requests[place] for place in some]) for plan, some in places], started)
        else:
            # The requests of a step have no names, and so are not listed, in some versions of SGLang.
            self.record([(execution.plan, batch.requests)], started, [batch.shape.num_tokens])
        if self.mixes and self.metrics is not None and batch.has_steps:
            self.metrics.combined(MIXED)
        return execution


def v32_stock_feature(backend: Any, server_args: Any) -> str | None:
    """As `stock_feature`, with the features of V3.2's backend."""
    if getattr(backend, "dcp_size", 1) > 1:
        return "context-parallel decode"
    if getattr(backend, "dsa_index_kpool", 1) > 1:
        return "pooled indexer keys"
    if getattr(backend, "_kv_shard_pool", None) is not None:
        return "a sharded KV cache"
    return stock_feature(backend, server_args)


def dense_beyond(prefix: str, model: ModelShape, settings: Settings, *, portable: bool) -> int:
    """Return the context tokens, more than index_topk, up to which the user has SGLang attend prefills densely, or 0.

    `mha_max_kv` goes before SGLang's variable, and the portable path attends in place of SGLang's kernels.

    Args:
        prefix: see `prefix_of`.
    """
    asked = variable_of(DENSE_VARIABLE.format(prefix.upper())) or 0
    return 0 if portable or settings.mha_max_kv >= 0 or asked <= model.index_topk else asked


def why_no_copy(backend: Any, model_runner: Any) -> str:
    """Return why no prefill makes a bf16 copy of an fp8 cache; "" if one may.

    With a copy, the indexer selects rows of the copy and not slots of the cache. That stays inside attention unless
    something else reads the selection. A user who chose flashmla_sparse has rows without the plugin, too.
    """
    (_, prefill), _ = impls_of(backend).items()
    if prefill == FLASHMLA_SPARSE:
        return ""
    if argument_of(model_runner.server_args, "enable_return_indexer_topk"):
        return "the selection is returned to users, as slots of the cache"
    if selection_is_broadcast():
        return "SGLANG_DSA_TOPK_BROADCAST sends the first rank's selection to all, whose free memory may differ"
    shares = getattr(model_runner.model_config.hf_config, "index_share_for_mtp_iteration", False)
    if shares and getattr(model_runner, "is_draft_worker", False) and not hasattr(backend, SEEDS):
        return "draft steps read the selection of a draft's prefill, as slots of the cache"
    return ""
