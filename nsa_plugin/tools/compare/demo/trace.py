"""Read the plugin's trace: the route of each request in each step, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_plugin.errors import NsaPluginError


class TraceError(NsaPluginError):
    """The trace cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RouteStep:
    """One request in one scheduled batch.

    Attributes:
        step: number of the batch.
        phase, attention, provider, reason: from the request's plan.
        q_tokens: query tokens of the request in this batch.
        kv_tokens: the request's context after the batch, in tokens.
    """

    step: int
    phase: str
    attention: str
    provider: str
    reason: str
    q_tokens: int
    kv_tokens: int


@dataclass(frozen=True, kw_only=True)
class RouteSummary:
    """Steps of a request that took the same route."""

    phase: str
    attention: str
    provider: str
    reason: str
    steps: int
    q_tokens: int


@dataclass(frozen=True)
class RequestTrace:
    """All batches of a run, as the first rank saw them."""

    steps: Mapping[str, Sequence[RouteStep]]
    mixed_batches: int

    def routes(self, name: str) -> list[RouteSummary]:
        """The routes that request `name` took, in the order of their first step."""
        grouped: dict[tuple[str, str, str], list[RouteStep]] = {}
        for step in self.steps.get(name, ()):
            grouped.setdefault((step.phase, step.attention, step.provider), []).append(step)
        return [
            RouteSummary(
                phase=phase,
                attention=attention,
                provider=provider,
                reason=steps[0].reason,
                steps=len(steps),
                q_tokens=sum(step.q_tokens for step in steps),
            )
            for (phase, attention, provider), steps in grouped.items()
        ]

    def prefill_chunks(self, name: str) -> int:
        """Batches with tokens of request `name`'s prompt."""
        return sum(step.phase != "decode" for step in self.steps.get(name, ()))

    def attention_counts(self) -> Counter[str]:
        """Request steps by attention path."""
        return Counter(step.attention for steps in self.steps.values() for step in steps)


def read_trace(path: Path, names: Iterable[str]) -> RequestTrace:
    """The trace file at `path`, for the requests called `names`.

    Raises:
        TraceError: there is no such file, or a line of it is not as expected.
    """
    if not path.exists():
        raise TraceError(f"the plugin wrote no trace to {path}; is it enabled in the server?")
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entries.append(_check(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return build_trace(entries, names)


def build_trace(entries: Iterable[Mapping[str, Any]], names: Iterable[str]) -> RequestTrace:
    """The trace from its parsed lines. The server's request ids contain the names."""
    steps: dict[str, list[RouteStep]] = {name: [] for name in names}
    mixed = 0
    for entry in entries:
        if entry["rank"] != 0:
            continue  # all tensor-parallel ranks see the same batches
        phases = set()
        for part in entry["requests"]:
            plan = entry["plans"][part["plan"]]
            phases.add(plan["phase"])
            name = next((name for name in steps if name in part["request_id"]), None)
            if name is None:
                continue  # a warm-up request of the engine
            steps[name].append(
                RouteStep(
                    step=entry["step"],
                    phase=plan["phase"],
                    attention=plan["attention"],
                    provider=plan["provider"],
                    reason=plan["reasons"].get("attention", ""),
                    q_tokens=part["q_tokens"],
                    kv_tokens=part["kv_tokens"],
                )
            )
        mixed += {"extend", "decode"} <= phases
    return RequestTrace(steps, mixed)


def _check(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise TypeError(f"expected an object, got {entry!r}")
    for key in ("step", "rank", "requests", "plans"):
        entry[key]
    return entry
