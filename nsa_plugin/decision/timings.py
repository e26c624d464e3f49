"""How long a kernel takes, from measured times: what a decision compares where several routes support a batch.

The times are `timings.json`, which `python -m ci.measured` makes from the records of `nsa-plugin bench`. They are filed
by SM version, op, KV layout, route in words, and head count. A time depends on:

- query tokens: linear between measured points, proportional beyond the last, and below the first the first's own,
  because a launch costs that much. A decode's are all of its query tokens, batch * s_q.
- heads: the next measured count that is not smaller, because a kernel pads to it or runs another group of heads.
- the selection and the window are those of `SELECTIONS` and `MORE_SELECTIONS`; for others there is no estimate.
- the context only where it is copied (see `sparse.estimate`); of two measured contexts the longer counts.

The indexer's times are filed by what it selects in place of the layout, and by its own heads. They depend on the query
tokens and on the keys that each sees. No time between is made up: the nearest smaller case that was measured decides.

Pure: no torch, no engine; reads one packaged file, once.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from nsa_plugin.layouts import FAMILY_LAYOUTS, LAYOUTS

SELECTIONS: Mapping[str, tuple[int, int]] = {
    name: (2048, 0) if "v3.2" in layout.families else (512, 128) for name, layout in LAYOUTS.items()
}
"""(selected tokens, window tokens) that the times of each KV layout were measured with: the released models'."""
MORE_SELECTIONS: Mapping[str, tuple[str, tuple[int, int]]] = {"v4_fp8, 1024 selected": ("v4_fp8", (1024, 128))}
"""What stands for the layout in the times of other selections of the same layout, as DeepSeek-V4-Pro's; see `filed`."""
MHA_DIMS = (192, 128)
"""(query, value) elements of a head that dense attention was measured with: V3.2's."""
COPIED_CONTEXT = 65536
"""Longest context, in tokens, that was copied within a measured time."""

Points = tuple[tuple[int, float], ...]
TimingKey = tuple[int, str, str]
"""(SM version, op, KV layout or what stands for it)."""
Timings = dict[TimingKey, dict[str, dict[int, Points]]]
"""{key: {route in words: {heads: ((query tokens, microseconds), ...)}}}, points by query tokens."""


@dataclass(frozen=True)
class TimeEstimate:
    """The time of one call, and where it comes from.

    Attributes:
        us: microseconds.
        rows, heads: query tokens and heads of the call.
        from_rows: the measured numbers of query tokens that it comes from: one, or the two around `rows`.
        from_heads: the measured head count.
        copied: what a longer context's copy adds is in it, by the memory's rate.
        selection_us: the part of `us` that an indexer takes, itself an estimate; 0 where none is counted.
    """

    us: float
    rows: int
    heads: int
    from_rows: tuple[int, ...]
    from_heads: int
    copied: bool = False
    selection_us: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether this very point was measured."""
        whole = not self.copied and not self.selection_us
        return whole and self.from_rows == (self.rows,) and self.from_heads == self.heads

    def source(self, gpu: str) -> str:
        """Where the time comes from: "measured on H200, 16 heads, 4096 query tokens", or the points it is made of."""
        heads = f"{self.from_heads} heads" + ("" if self.from_heads == self.heads else f" for {self.heads}")
        more = ", copy of a longer context added" if self.copied else ""
        if self.selection_us:
            more += f", {self.selection_us / 1e3:.2f} ms of the indexer's selection added"
        if self.from_rows == (self.rows,):
            verb = "measured" if self.measured else "estimated from measurements"
            return f"{verb} on {gpu}, {heads}, {_tokens(self.rows)}{more}"
        if len(self.from_rows) == 2:
            low, high = self.from_rows
            return f"interpolated between {low} and {_tokens(high)}, measured on {gpu}, {heads}{more}"
        return f"estimated from {_tokens(self.from_rows[0])}, measured on {gpu}, {heads}{more}"

    def plus(self, us: float) -> TimeEstimate:
        """With the time of a longer context's copy."""
        return replace(self, us=self.us + us, copied=True) if us else self

    def with_selection(self, us: float) -> TimeEstimate:
        """With the time of the indexer's selection."""
        return replace(self, us=self.us + us, selection_us=us) if us else self


def _tokens(count: int) -> str:
    return f"{count} query token" + ("" if count == 1 else "s")


def from_json(data: dict[str, Any]) -> Timings:
    """Parse a timings file."""
    table: Timings = {}
    for row in data["times"]:
        by_route = table.setdefault((row["sm"], row["op"], row["layout"]), {})
        by_route.setdefault(row["route"], {})[row["heads"]] = tuple((count, us) for count, us in row["points"])
    return table


_PACKAGED: dict[str, Any] = json.loads(
    resources.files("nsa_plugin.decision").joinpath("timings.json").read_text(encoding="utf-8")
)
TIMINGS: Timings = from_json(_PACKAGED)
GPUS: dict[int, str] = {int(sm): gpu for sm, gpu in _PACKAGED["gpus"].items()}
"""The GPU that the times of an SM version were measured on."""
STAND_INS: dict[TimingKey, str] = {
    (row["sm"], row["op"], row["layout"]): row["gpu"] for row in _PACKAGED["times"] if "gpu" in row
}
"""The GPU of those times that were measured on another one of that version."""


def filed(layout: str, selection: tuple[int, int]) -> str:
    """What stands for a KV layout in the times of a (selected, window) tokens: mostly itself; "" if nothing does."""
    if selection == SELECTIONS.get(layout):
        return layout
    return next((name for name, one in MORE_SELECTIONS.items() if one == (layout, selection)), "")


def filed_for(name: str) -> tuple[str, tuple[int, int]]:
    """The (layout, (selected, window) tokens) that `filed` gives this name."""
    return MORE_SELECTIONS.get(name) or (name, SELECTIONS[name])


def selected_from(topk: int, keys: int) -> str:
    """What stands for the layout in the indexer's times."""
    return f"{topk} of {keys}"


@dataclass(frozen=True)
class SelectionTimes:
    """Measured times of the indexer's kernels for one case.

    Attributes:
        keys: keys that a query token sees.
        rows: query tokens.
        us: microseconds by kernel library.
    """

    keys: int
    rows: int
    us: Mapping[str, float]


def selections(sm: int, op: str, heads: int, topk: int) -> tuple[SelectionTimes, ...]:
    """The measured cases of an indexer, by keys and query tokens.

    Args:
        op: "indexer_topk".
        heads: the indexer's heads.
        topk: tokens that it selects.
    """
    found: dict[tuple[int, int], dict[str, float]] = {}
    for (measured_sm, measured_op, layout), by_route in TIMINGS.items():
        if (measured_sm, measured_op) != (sm, op):
            continue
        keys = int(layout.split()[-1])
        if layout != selected_from(topk, keys):
            continue
        for route, by_heads in by_route.items():
            for rows, us in by_heads.get(heads, ()):
                found.setdefault((keys, rows), {})[route] = us
    return tuple(SelectionTimes(keys, rows, us) for (keys, rows), us in sorted(found.items()))


def gpu_of(sm: int, op: str = "", layout: str = "") -> str:
    """The GPU whose times stand for an SM version: "H200"; "SM100" where none was measured.

    Args:
        op, layout: of the times, as they are filed.
    """
    return STAND_INS.get((sm, op, layout)) or GPUS.get(sm, f"SM{sm}")


def points(sm: int, op: str, layout: str, heads: int, route: str) -> Points:
    """(query tokens, microseconds) of one call, by query tokens; empty where no head count that fits was measured."""
    return fitting(sm, op, layout, heads, route)[1]


def fitting(sm: int, op: str, layout: str, heads: int, route: str) -> tuple[int, Points]:
    """(the measured head count that `heads` run as, `points`)."""
    by_heads = TIMINGS.get((sm, op, layout), {}).get(route, {})
    found = min((count for count in by_heads if count >= heads), default=0)
    return found, by_heads.get(found, ())


def measured(sm: int, op: str, layout: str, heads: int) -> bool:
    """Whether some route of an op has a time that fits."""
    return any(fitting(sm, op, layout, heads, route)[1] for route in TIMINGS.get((sm, op, layout), {}))


def nearest(sm: int, op: str, family: str, name: str, heads: int) -> tuple[int, str, int] | None:
    """The measured (SM version, name, heads) of an op that are nearest to those given; None without any.

    The name counts first, then its layout, then the SM version, then the heads; only layouts of the model's family
    count.

    Args:
        name: what `filed` gives, or a layout that nothing is filed for.
    """

    def layout(of: str) -> str:
        return MORE_SELECTIONS[of][0] if of in MORE_SELECTIONS else of

    known = (
        (measured_sm, measured_name, count)
        for (measured_sm, measured_op, measured_name), by_route in TIMINGS.items()
        if measured_op == op and layout(measured_name) in FAMILY_LAYOUTS[family]
        for count in {count for by_heads in by_route.values() for count in by_heads}
    )
    wanted = layout(name)
    return min(
        known,
        key=lambda one: (one[1] != name, layout(one[1]) != wanted, abs(one[0] - sm), abs(one[2] - heads), one),
        default=None,
    )


def estimate(sm: int, op: str, layout: str, heads: int, rows: int, route: str) -> TimeEstimate | None:
    """The time of one call, or None where nothing that fits was measured.

    Args:
        sm: SM version.
        op: what the batch needs: "sparse_mla_prefill", "sparse_mla_decode" or "mha_one_shot".
        layout: of the KV cache, whatever layout the kernel itself reads.
        heads, rows: heads and query tokens of the call; for "mha_one_shot" the tokens of one request without a prefix.
        route: in words, as `str(Route)` gives it.
    """
    return estimate_from(*fitting(sm, op, layout, heads, route), rows, heads)


def estimate_from(from_heads: int, found: Points, rows: int, heads: int) -> TimeEstimate | None:
    """As `estimate`, from what `fitting` returned."""
    if not found:
        return None
    us, used = between(found, rows)
    return TimeEstimate(us, rows, heads, used, from_heads)


def dense_limit(
    sm: int, layout: str, heads: int, dense: str, sparse: tuple[str, ...], dims: tuple[int, int] = MHA_DIMS
) -> int | None:
    """Longest measured prompt, in tokens, for which dense attention takes no longer than sparse attention.

    None where that is the longest one measured, or where either was not measured; 0 where it is none. Each time
    has with it the projection that only this attention needs; the indexer, which only sparse attention needs,
    is not counted.

    Args:
        dense, sparse: routes in words; of the sparse ones the quickest counts.
        dims: (query, value) elements of a head of dense attention. For others than `MHA_DIMS` its measured times are
            taken in proportion to the elements, as its operations are.
    """
    known, *rivals = (points(sm, "mha_one_shot", layout, heads, route) for route in (dense, *sparse))
    return _crossover(known, tuple(rivals), sum(dims) / sum(MHA_DIMS))


@functools.cache  # every decision asks for it, and short prefills wait for the decision
def _crossover(dense: Points, sparse: tuple[Points, ...], scale: float) -> int | None:
    """`dense_limit` from the measured points of each route; the dense ones take `scale` as long."""
    for tokens, time in reversed(dense):
        if not any(between(rival, tokens)[0] < time * scale for rival in sparse if rival):
            return None if tokens == dense[-1][0] else tokens
    return 0 if dense else None


def between(known: Points, rows: int) -> tuple[float, tuple[int, ...]]:
    """(the time at `rows` on the line through the points, the points' query tokens that it comes from)."""
    above = bisect_left(known, (rows,))
    if above == len(known):
        used: tuple[int, ...] = (known[-1][0],)
    elif above == 0 or known[above][0] == rows:
        used = (known[above][0],)
    else:
        used = (known[above - 1][0], known[above][0])
    return time_at(known, rows), used


def time_at(known: Points, rows: int) -> float:
    """The time at `rows` on the line through the points."""
    above = bisect_left(known, (rows,))
    if above == 0:
        return known[0][1]
    low, before = known[above - 1]
    if above == len(known):
        return before * rows / low
    high, after = known[above]
    return after if rows == high else before + (after - before) * (rows - low) / (high - low)
