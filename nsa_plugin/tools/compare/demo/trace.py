"""Read the plugin's trace: the route of each request in each step, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa_plugin.errors import NsaPluginError

_KEYS = ("step", "rank", "requests", "plans")


class TraceError(NsaPluginError):
    """The trace cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RouteSummary:
    """Batches in which a request took the same route.

    Attributes:
        phase, attention, provider, reason: from the request's plan in the first of the batches.
        steps: number of batches.
        q_tokens: query tokens of the request in these batches.
    """

    phase: str
    attention: str
    provider: str
    reason: str
    steps: int
    q_tokens: int


@dataclass(frozen=True)
class RequestTrace:
    """All batches of a run, as the first rank saw them.

    Attributes:
        steps: by request, one summary per batch.
        mixed_batches: batches with both prefill and decode.
    """

    steps: Mapping[str, Sequence[RouteSummary]]
    mixed_batches: int

    def routes(self, name: str) -> list[RouteSummary]:
        """The routes that request `name` took, in the order of their first step."""
        routes: dict[tuple[str, str, str], RouteSummary] = {}
        for step in self.steps.get(name, ()):
            route = (step.phase, step.attention, step.provider)
            before = routes.get(route, replace(step, steps=0, q_tokens=0))
            routes[route] = replace(before, steps=before.steps + 1, q_tokens=before.q_tokens + step.q_tokens)
        return list(routes.values())

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
            entry = json.loads(line)
            entries.append({key: entry[key] for key in _KEYS})
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    return build_trace(entries, names)


def build_trace(entries: Iterable[Mapping[str, Any]], names: Iterable[str]) -> RequestTrace:
    """The trace from its parsed lines. The server's request ids contain the names."""
    steps: dict[str, list[RouteSummary]] = {name: [] for name in names}
    mixed = 0
    for entry in entries:
        if entry["rank"] != 0:
            continue  # all tensor-parallel ranks see the same batches
        phases = set()
        for part in entry["requests"]:
            plan = entry["plans"][part["plan"]]
            phases.add(plan["phase"])
            # The engine's warm-up requests have other names.
            for name in [name for name in steps if name in part["request_id"]][:1]:
                route = {key: plan[key] for key in ("phase", "attention", "provider")}
                reason = plan["reasons"].get("attention", "")
                steps[name].append(RouteSummary(**route, reason=reason, steps=1, q_tokens=part["q_tokens"]))
        mixed += {"extend", "decode"} <= phases
    return RequestTrace(steps, mixed)
