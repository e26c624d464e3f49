"""The planner of both engines: one call of `Decider.decide` per plan, with what the adapter knows as `Constraints`.

An engine's planner reads that engine's batch and adds what only it knows. It never edits a plan or decides twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from nsa_plugin.backends.common.paths import path_of, routes_of
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import Decider
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import GIB, MIB, DeviceProfile
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import SPLIT, Metrics, Trace

KERNEL_OPS = {Attention.SPARSE_PREFILL: "sparse_mla_prefill", Attention.SPARSE_DECODE: "sparse_mla_decode"}
"""The registry's op of a plan's sparse kernel."""

READ_EVERY = 64
"""Prefills from one reading of the free memory to the next, which may wait for the driver."""

SAMPLE_ROWS = tuple(1 << power for power in range(16))
"""Query tokens of the batches whose kernels are warmed up: the choice may depend on their number."""

MAX_STEPS = 4096
"""Sizes of steps whose plans are kept. Those that graphs capture come first, before the engine serves."""

TracedRequest = tuple[str, int, int]
"""(id, query tokens, context in tokens) of a request, for the trace."""


def step_shape(phase: Phase, requests: int, rows: int, max_context: int) -> BatchShape:
    """Return the shape of a decode, verify or draft step, which may be captured: contexts as long as allowed.

    Args:
        requests: number of requests, padded ones included.
        rows: query tokens of all requests, at least 1.
        max_context: most tokens of a request that the server allows.
    """
    longest = max(max_context, -(-rows // requests))
    return BatchShape(
        phase=phase,
        num_requests=min(requests, rows),
        num_tokens=rows,
        max_kv_len=longest,
        total_kv_len=requests * longest,
        has_prefix=True,
        cuda_graph=True,
    )


StepKey = tuple[Phase, int, int, frozenset[Route]]


def _step_key(shape: BatchShape, preferred: frozenset[Route] = frozenset()) -> StepKey:
    """Return what a step's plan depends on."""
    return shape.phase, shape.num_requests, shape.num_tokens, preferred


@dataclass(frozen=True)
class Execution:
    """A plan and the engine's execution path for it.

    Attributes:
        plan: the decision.
        path: the execution path; None without sparse attention (dense attention, or no query tokens).
        own: whether the plugin runs the attention kernel.
    """

    plan: Plan
    path: str | None = None
    own: bool = False

    @property
    def dense(self) -> bool:
        return self.plan.attention is Attention.MHA_ONE_SHOT

    @property
    def op(self) -> str:
        """The registry's op of the sparse kernel."""
        return KERNEL_OPS[self.plan.attention]


def execution_of(engine: str, layout: str, plan: Plan) -> Execution:
    """Return how an engine executes a plan; only sparse attention has an entry in the path table.

    Raises:
        NoProviderError: see `path_of`.
    """
    if plan.attention not in KERNEL_OPS:
        return Execution(plan)
    entry = path_of(engine, layout, plan)
    return Execution(plan, entry.path, entry.own and not plan.stock_attention)


@dataclass
class Planner:
    """The decisions of one attention backend or worker process.

    Attributes:
        model, device, settings: the inputs of every decision; the device as probed, its free memory as last read.
        trace: where plans are recorded; several backends of a process may share one.
        metrics: of this process; None if nothing collects them.
        free_memory: reads the device's free bytes; see `read_free_memory`.
        exchange_rows: most query tokens of a batch that reshards (`token_shard`).
        no_exchange: why no batch reshards; "" = batches may.
        selects_prefills: whether the plan's library may select for prefills; else the engine's code always does.
        portable: whether the engine's own libraries do not support the GPU, so that the plugin's kernels do all.
    """

    engine: ClassVar[str] = ""

    model: ModelShape
    device: DeviceProfile
    settings: Settings
    trace: Trace = field(default_factory=Trace)
    metrics: Metrics | None = None
    free_memory: Callable[[], int] | None = None
    exchange_rows: int = 0
    no_exchange: str = "this backend has no exchange"
    selects_prefills: bool = True
    portable: bool = False
    _steps: dict[StepKey, Execution] = field(default_factory=dict)
    _read_with: Callable[[], int] | None = None
    _decider: Decider | None = None
    _prefills_until_reading: int = 0

    @property
    def decider(self) -> Decider:
        """Decides for the model, the device and the settings as they are now."""
        known, inputs = self._decider, (self.model, self.device, self.settings)
        if known is None or any(had is not has for had, has in zip(known.inputs, inputs, strict=True)):
            known = self._decider = Decider(*inputs)
        return known

    def constraints(self, *, prefill: bool, rows: int = 0, **more: Any) -> Constraints:
        """Return the constraints of a batch of `rows` query tokens: paths, why heads stay local, and `more`."""
        named = {
            "paths": self.routes(prefill=prefill),
            "engine": self.engine,
            "keep_heads": self.keep_heads(rows),
        } | more
        return Constraints(stock_selects_prefills=not self.selects_prefills, **named)

    def routes(self, *, prefill: bool, only: frozenset[str] = frozenset()) -> frozenset[Route]:
        """Return the routes that the engine can execute here; see `routes_of`."""
        return routes_of(self.engine, self.model.kv_layout, prefill=prefill, only=only, portable=self.portable)

    def keep_heads(self, rows: int) -> str:
        """Return why a batch of `rows` query tokens cannot reshard, whatever the times; "" if it can."""
        if self.no_exchange:
            return self.no_exchange
        if rows > self.exchange_rows:
            return f"{rows} query tokens exceed the {self.exchange_rows} that the exchange's buffers hold"
        return ""

    def step_execution_of(
        self, shape: BatchShape, *, preferred: frozenset[Route] = frozenset(), preferred_by: str = ""
    ) -> Execution:
        """Return how to execute a decode, verify or draft step; it depends on phase, requests and tokens alone.

        A plan that was kept stays, as a graph may have captured it: beyond MAX_STEPS sizes a step is decided each time.

        Args:
            preferred, preferred_by: see `Constraints`; a step with and one without them are different steps.
        """
        key = _step_key(shape, preferred)
        execution = self._steps.get(key)
        if execution is None:
            more: dict[str, Any] = {"preferred": preferred, "preferred_by": preferred_by} if preferred else {}
            constraints = self.constraints(prefill=False, rows=shape.num_tokens, **more)
            execution = self.execution(self.decider.decide(shape, constraints))
            if len(self._steps) < MAX_STEPS:
                self._steps[key] = execution
        return execution

    def step_again(self, shape: BatchShape) -> Execution | None:
        """Return how to execute a step of a size seen before, and record it; None for another.

        Every decode step comes here, and a small model's GPU time does not hide what the host does. So the step is only
        counted; for a trace file, which lists the requests, this returns None.
        """
        execution = self._steps.get(_step_key(shape))
        if execution is None or self.trace.is_file:
            return None
        self.count(execution.plan, shape.num_tokens)
        return execution

    def count(self, plan: Plan, tokens: int) -> None:
        """Record a batch of one plan that was made before, without its requests."""
        self.trace.count(plan)
        if self.metrics is not None:
            self.metrics.batch(plan, tokens)

    def execution(self, plan: Plan) -> Execution:
        """Return how the engine executes a plan."""
        return execution_of(self.engine, self.model.kv_layout, plan)

    def measure(self, free_memory: Callable[[], int]) -> None:
        """Read the device's free memory at the next batch."""
        self.free_memory, self._read_with = free_memory, None

    @property
    def memory_unread(self) -> bool:
        """Whether `free_memory` was set and has not been read since."""
        return self.free_memory is not None and self.free_memory is not self._read_with

    def read_free_memory(self) -> None:
        """Take the device's free memory as it is now: as soon as `free_memory` is set, then every READ_EVERY prefills.

        Ranks that reshard have the same batches, so they read at the same one. Budgets above 1 GiB are rounded down to
        four binary digits: a small change of what is free makes no new plans.
        """
        if self.free_memory is None:
            return
        if self.memory_unread or self._prefills_until_reading == 0:
            free = self.free_memory()
            step = 1 << max(0, free.bit_length() - 4)
            rounded = free // step * step if free > GIB else free
            if rounded != self.device.memory_free:
                self.device = replace(self.device, memory_free=rounded)
            self._read_with, self._prefills_until_reading = self.free_memory, READ_EVERY
        self._prefills_until_reading -= 1

    @property
    def logits_budget(self) -> int:
        """Bytes that the indexer's float32 logits may take at once."""
        return logits_budget(self.settings, self.device)

    def record(self, parts: list[tuple[Plan, list[TracedRequest]]], started: float, tokens: Sequence[int] = ()) -> None:
        """Record the plans of a batch in the trace and the metrics.

        Args:
            started: `time.perf_counter` when the search for the plans began.
            tokens: query tokens of each part; empty: those of its requests.
        """
        seconds = time.perf_counter() - started
        self.trace.record(parts)
        if self.metrics is not None:
            self.metrics.decided(seconds, self.logits_budget)
            counts = tokens or [sum(rows for _, rows, _ in requests) for _, requests in parts]
            for (plan, _), count in zip(parts, counts, strict=True):
                self.metrics.batch(plan, count)
            if len(parts) > 1 and _is_split(plan for plan, _ in parts):
                self.metrics.combined(SPLIT)


def _is_split(plans: Iterable[Plan]) -> bool:
    """Whether the plans of one batch attend some of its prompts densely and select for others."""
    used = {plan.attention for plan in plans if plan.phase is Phase.EXTEND}
    return Attention.MHA_ONE_SHOT in used and not used.isdisjoint(KERNEL_OPS)


def logits_budget(settings: Settings, device: DeviceProfile) -> int:
    """Return the bytes that the indexer's float32 logits may take at once."""
    return min(settings.logits_budget_mb * MIB, device.memory_free // 4)
