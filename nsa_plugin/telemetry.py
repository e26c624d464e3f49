"""What a user can see: the start-up report, the trace of decisions, and the metrics.

Nothing here is on a kernel's path or waits for the device: unless a trace is written to a file, a batch costs a few
increments, and a look-up where its plan is not the last one's.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from nsa_plugin import __version__
from nsa_plugin.decision.plan import IndexerMode, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import SettingsError
from nsa_plugin.settings import LEFT, ResolvedSettings, Settings

logger = logging.getLogger("nsa_plugin")

_NO_FILE = ("off", "log")


class ReportedPatch(Protocol):
    """A patch as a report lists it."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...


class PatchOutcome(Protocol):
    """The state of one patch; the ledger's `PatchStatus`."""

    @property
    def patch(self) -> ReportedPatch: ...

    @property
    def state(self) -> str: ...

    @property
    def detail(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class StartupReport:
    """What is on, from which source, with which patches and providers, and why.

    Attributes:
        engine, engine_version: the engine that the plugin runs in.
        active: whether the plugin serves this model.
        resolved: the settings and where each came from.
        statuses: the state of each patch.
        facts: anything else a user needs, as label and text: the model's shape, the device, providers.
        left: what the stock engine serves although the plugin is on, and why.
        notes: sentences that need attention: ignored sources, strict off, a fault injected.
    """

    engine: str
    engine_version: str
    active: bool
    resolved: ResolvedSettings
    statuses: Sequence[PatchOutcome] = ()
    facts: dict[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()
    notes: Sequence[str] = ()

    def all_notes(self) -> list[str]:
        notes = [*self.resolved.notes, *self.notes]
        if self.resolved.settings.fault != "none":
            notes.append(
                f"fault={self.resolved.settings.fault}: the attended tokens are deliberately wrong; "
                "this is for tests only and the output is worthless"
            )
        return notes

    def text(self) -> str:
        """The report as lines for a log."""
        state = "serves DeepSeek sparse attention" if self.active else "stays out"
        lines = [f"nsa-plugin {__version__} on {self.engine} {self.engine_version}: {state}"]
        lines += [f"  {label}: {value}" for label, value in self.facts.items()]
        chosen = [
            f"{name}={getattr(self.resolved.settings, name)!r} ({source})"
            for name, source in self.resolved.sources.items()
            if source != "default"
        ]
        lines.append("  settings: " + ("; ".join(chosen) or "all at their defaults"))
        for state, label in (
            ("applied", "patches applied"),
            ("not_needed", "not needed"),
            ("unused", "not in this version"),
        ):
            if named := [s for s in self.statuses if s.state == state]:
                lines.append(f"  {label}: " + ", ".join(s.patch.name for s in named))
        if checked := sum(s.state == "required" for s in self.statuses):
            lines.append(f"  checked: {checked} more objects of {self.engine}, all as the plugin expects them")
        lines += [f"  {LEFT}: {what}" for what in self.left]
        lines += [f"  note: {note}" for note in self.all_notes()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "version": __version__,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "active": self.active,
            "pid": os.getpid(),
            "settings": asdict(self.resolved.settings),
            "sources": dict(self.resolved.sources),
            "patches": [
                {"name": s.patch.name, "state": s.state, "detail": s.detail, "why": s.patch.why} for s in self.statuses
            ],
            "facts": self.facts,
            "left_to_stock": list(self.left),
            "notes": self.all_notes(),
            "text": self.text(),
        }

    def publish(self) -> None:
        """Log the report, and write it where the `report` setting says.

        Raises:
            SettingsError: the file cannot be written.
        """
        level = logging.WARNING if self.left or self.all_notes() else logging.INFO
        logger.log(level, "%s", self.text())
        if path := self.resolved.settings.report:
            # Through a temporary name: a reader never sees half a report.
            temporary = Path(f"{path}.{os.getpid()}")
            try:
                temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
                temporary.replace(path)
            except OSError as error:
                raise _unwritable("report", path, error) from error


def check_files(settings: Settings) -> None:
    """Raise SettingsError if the report or the trace cannot be written where the settings say. Writes nothing."""
    paths = {"report": settings.report, "trace": "" if settings.trace in _NO_FILE else settings.trace}
    for name, path in paths.items():
        if not path:
            continue
        folder = Path(path).parent
        if not folder.is_dir():
            raise _unwritable(name, path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        # The report is written under another name first; a trace goes on where it ends.
        if not os.access(path if name == "trace" and Path(path).exists() else folder, os.W_OK):
            raise _unwritable(name, path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _unwritable(name: str, path: str, error: OSError) -> SettingsError:
    """The error of a setting whose file cannot be written."""
    return SettingsError(
        f"nsa-plugin setting {name!r} is {path!r}, which cannot be written: {error.strerror}. Allowed: a path in an "
        "existing directory in which this user may write"
    )


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric in the engine's /metrics.

    Attributes:
        name: after the engine's name and a colon.
        labels: besides the labels of the process, such as tp_rank.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def of(self, engine: str) -> str:
        """The whole name."""
        return f"{engine}:{self.name}"


_ROUTE = ("phase", "attention", "provider")
BATCHES = Metric(
    name="nsa_plugin_batches_total",
    kind=MetricKind.COUNTER,
    text="Batches that nsa-plugin planned, by phase, attention and kernel library.",
    labels=_ROUTE,
)
QUERY_TOKENS = Metric(
    name="nsa_plugin_query_tokens_total",
    kind=MetricKind.COUNTER,
    text="Query tokens of the batches that nsa-plugin planned, by phase, attention and kernel library.",
    labels=_ROUTE,
)
PREFILL_CHUNKS = Metric(
    name="nsa_plugin_prefill_chunks_total",
    kind=MetricKind.COUNTER,
    text="Pieces in which the plans of sparse prefills make the indexer's logits.",
)
SPLIT, MIXED = "split", "mixed"
SHORT_WITH_LONG = "short prompts batched with long ones"
"""The fact in SGLang's start-up report that says how they attend."""
COMBINED_PREFILLS = Metric(
    name="nsa_plugin_combined_prefills_total",
    kind=MetricKind.COUNTER,
    text=(
        "Prefills with requests of two kinds, by kind: split (short prompts attended densely next to long ones) or "
        "mixed (SGLang's decode steps in the plan of a prefill)."
    ),
    labels=("kind",),
)
RESHARDED_TOKENS = Metric(
    name="nsa_plugin_resharded_query_tokens_total",
    kind=MetricKind.COUNTER,
    text="Query tokens of the batches whose heads are resharded to query tokens over the ranks, by phase.",
    labels=("phase",),
)
DECISION_SECONDS = Metric(
    name="nsa_plugin_decision_seconds",
    kind=MetricKind.HISTOGRAM,
    text="Seconds to find the plans of a batch; steps of a size seen before reuse theirs and are not counted.",
    buckets=(5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2),
)
LOGITS_BUDGET = Metric(
    name="nsa_plugin_logits_budget_bytes",
    kind=MetricKind.GAUGE,
    text="Bytes that the indexer's float32 logits may take at once.",
)
LEFT_TO_STOCK = Metric(
    name="nsa_plugin_left_to_stock",
    kind=MetricKind.GAUGE,
    text="What nsa-plugin leaves to the stock engine, and why.",
    labels=("reason",),
)
BUILD_INFO = Metric(
    name="nsa_plugin_build_info",
    kind=MetricKind.GAUGE,
    text="Always 1; the labels have the versions of nsa-plugin and of the engine.",
    labels=("version", "engine_version"),
)
METRICS = (
    BATCHES,
    QUERY_TOKENS,
    PREFILL_CHUNKS,
    COMBINED_PREFILLS,
    RESHARDED_TOKENS,
    DECISION_SECONDS,
    LOGITS_BUDGET,
    LEFT_TO_STOCK,
    BUILD_INFO,
)

Write = Callable[[float], None]
"""Adds to a counter, sets a gauge or observes in a histogram."""
MetricWriter = Callable[[Metric, Mapping[str, str]], Write]
"""Makes the function that writes a metric with these labels to an engine's /metrics."""


class Metrics:
    """The metrics of one process that plans batches.

    Args:
        write: of the engine.
    """

    def __init__(self, write: MetricWriter):
        self._write = write
        self._chunks, self._seconds, self._budget = (
            write(metric, {}) for metric in (PREFILL_CHUNKS, DECISION_SECONDS, LOGITS_BUDGET)
        )
        self._routes: dict[str, tuple[Write, Write]] = {}
        self._labelled: dict[tuple[str, str], Write] = {}
        self._last_budget = -1

    def batch(self, plan: Plan, tokens: int) -> None:
        """Count a batch, or a part of one, of `tokens` query tokens."""
        found = self._routes.get(plan.route)
        if found is None:
            labels = dict(zip(_ROUTE, (str(plan.phase), str(plan.attention), plan.provider or "none"), strict=True))
            found = self._routes[plan.route] = (self._write(BATCHES, labels), self._write(QUERY_TOKENS, labels))
        batches, query_tokens = found
        batches(1)
        query_tokens(tokens)
        if plan.phase is Phase.EXTEND and plan.indexer.mode is IndexerMode.TOPK and plan.indexer.rows_per_chunk:
            self._chunks(-(-tokens // plan.indexer.rows_per_chunk))
        if plan.token_shard:
            self._add(RESHARDED_TOKENS, plan.phase, tokens)

    def combined(self, kind: str) -> None:
        """Count a prefill with requests of two kinds, `SPLIT` or `MIXED`."""
        self._add(COMBINED_PREFILLS, kind, 1)

    def _add(self, metric: Metric, value: str, amount: int) -> None:
        """Add to a counter with one label."""
        write = self._labelled.get((metric.name, value))
        if write is None:
            (label,) = metric.labels
            write = self._labelled[metric.name, value] = self._write(metric, {label: str(value)})
        write(amount)

    def decided(self, seconds: float, budget: int) -> None:
        """Observe the time that a batch's plans took, and show the budget of the indexer's logits in bytes."""
        self._seconds(seconds)
        if budget != self._last_budget:
            self._budget(budget)
            self._last_budget = budget


def show_start(write: MetricWriter, engine_version: str, left: Sequence[str]) -> None:
    """Show the versions, and what is left to the stock engine: one sample of 1 for each reason."""
    write(BUILD_INFO, {"version": __version__, "engine_version": engine_version})(1)
    for reason in left:
        write(LEFT_TO_STOCK, {"reason": reason})(1)


@dataclass
class Trace:
    """Counts plans by route; logs each kind of plan once, or writes every batch, as the setting says.

    What is kept does not grow with the batches: plans of a kind differ in the query tokens of a batch alone.

    Attributes:
        mode: "off", "log", or a path that ends in .jsonl.
        rank: this process's rank in its tensor-parallel group.
    """

    mode: str = "off"
    rank: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _logged: dict[Plan, None] = field(default_factory=dict)
    _last: Plan | None = None
    _step: int = 0

    @property
    def is_file(self) -> bool:
        """Whether every batch is written, with its requests."""
        return self.mode not in _NO_FILE

    def __post_init__(self) -> None:
        if not self.is_file:
            return
        try:
            open(self.mode, "ab").close()
        except OSError as error:
            # Now, at start-up, rather than in the middle of a batch.
            raise _unwritable("trace", self.mode, error) from error

    def record(self, parts: Iterable[tuple[Plan, Sequence[tuple[str, int, int]]]]) -> None:
        """Record one batch.

        Args:
            parts: each plan with its requests as (request id, query tokens, context in tokens after this step).
        """
        if not self.is_file:
            for plan, _ in parts:
                self.count(plan)
            return
        self._step += 1
        requests: list[dict[str, Any]] = []
        names: dict[Plan, str] = {}
        for plan, rows in parts:
            self.counts[plan.route] += 1
            name = names.setdefault(plan, f"plan-{len(names)}")
            requests += [
                {"request_id": request_id, "q_tokens": q_len, "kv_tokens": kv_len, "plan": name}
                for request_id, q_len, kv_len in rows
            ]
        if requests:
            said = {name: plan.as_dict() for plan, name in names.items()}
            entry = {"step": self._step, "pid": os.getpid(), "rank": self.rank, "requests": requests, "plans": said}
            # One unbuffered write of one line: lines of several processes do not mix (O_APPEND).
            with open(self.mode, "ab", buffering=0) as file:
                file.write(json.dumps(entry).encode() + b"\n")

    def count(self, plan: Plan) -> None:
        """Record a batch, or a part of one, without its requests: only a trace file has those."""
        self.counts[plan.route] += 1
        # Thousands of decode steps share one plan, and a look-up hashes the whole plan.
        if self.mode == "log" and plan is not self._last:
            self._log(plan)
            self._last = plan

    def _log(self, plan: Plan) -> None:
        # A chunk that holds all query tokens has another size in every batch; the reasons hold the batch.
        size = 1 << plan.indexer.rows_per_chunk.bit_length()
        kind = replace(plan, indexer=replace(plan.indexer, rows_per_chunk=size), reasons={})
        if kind not in self._logged:
            name = f"plan-{len(self._logged)}"
            self._logged[kind] = None
            reasons = "\n".join(f"  {key}: {sentence}" for key, sentence in plan.reasons.items())
            logger.info("new plan %s: %s/%s on %s\n%s", name, plan.phase, plan.attention, plan.provider, reasons)
