"""How long a kernel takes, from measurements: what a decision compares where several carry the batch.

The numbers are `measurements.MEASUREMENTS`, which `python -m ci.measured` makes from the records of
`nsa-plugin bench`. A label is a route in words, as `candidates.Route` has them. What a time depends on:

- rows: linear between measured points, proportional beyond the last, and below the first the first's own,
  because a launch costs that much. The rows of a decode are all its query rows, batch * s_q.
- heads: the next measured count that is not below, because a kernel pads to it or runs another group of heads.
- the selection and the window are those of `SELECTIONS`; for others there is no estimate.
- the context only where it is copied (see `candidates.estimate_us`); of two measured contexts the longer counts.

Pure: no torch, no engine, no I/O.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping

from nsa_plugin.decision.measurements import MEASUREMENTS
from nsa_plugin.layouts import LAYOUTS

# (selected tokens, tokens of the window) of the measurements of each layout: the released models'.
SELECTIONS: Mapping[str, tuple[int, int]] = {
    name: (2048, 0) if "v3.2" in layout.families else (512, 128) for name, layout in LAYOUTS.items()
}
# Longest context, in tokens, that was copied within a measured time.
COPIED_CONTEXT = 65536

Points = tuple[tuple[int, float], ...]


def points(sm: int, op: str, layout: str, heads: int, label: str) -> Points:
    """(rows, microseconds) of one call, by rows; empty where no head count that fits was measured."""
    by_heads = MEASUREMENTS.get((sm, op, layout), {}).get(label, {})
    if heads in by_heads:
        return by_heads[heads]
    fitting = [count for count in by_heads if count >= heads]
    return by_heads[min(fitting)] if fitting else ()


def estimate_us(sm: int, op: str, layout: str, heads: int, rows: int, label: str) -> float | None:
    """Microseconds of one call, or None where nothing that fits was measured.

    Args:
        sm: SM version.
        op: what the batch needs: "sparse_mla_prefill", "sparse_mla_decode" or "mha_one_shot".
        layout: of the KV cache, whatever layout the kernel itself reads.
        heads, rows: given to the call; rows of "mha_one_shot" are the tokens of one request without a prefix.
        label: the route in words.
    """
    found = points(sm, op, layout, heads, label)
    return _between(found, rows) if found else None


def dense_limit(sm: int, layout: str, heads: int, dense: str, sparse: tuple[str, ...]) -> int | None:
    """Longest measured prompt, in tokens, for which dense attention takes no longer than sparse attention.

    None where that is the longest one measured, or where either was not measured; 0 where it is none. Each time
    has with it the projection that only this attention needs; the indexer, which only sparse attention needs,
    is not counted.

    Args:
        dense, sparse: labels; of the sparse ones the quickest counts.
    """
    known, *rivals = (points(sm, "mha_one_shot", layout, heads, label) for label in (dense, *sparse))
    return _crossover(known, tuple(rivals))


@functools.cache  # a decision asks for it each time, and short prefills wait for it
def _crossover(dense: Points, sparse: tuple[Points, ...]) -> int | None:
    """`dense_limit` of what was measured of each route."""
    for tokens, time in reversed(dense):
        if not any(_between(rival, tokens) < time for rival in sparse if rival):
            return None if tokens == dense[-1][0] else tokens
    return 0 if dense else None


def _between(known: Points, rows: int) -> float:
    """The time at `rows` on the line through the points."""
    first, last = known[0], known[-1]
    if rows <= first[0]:
        return first[1]
    if rows >= last[0]:
        return last[1] * rows / last[0]
    above = bisect_left(known, rows, key=lambda point: point[0])
    (low, before), (high, after) = known[above - 1], known[above]
    return before + (after - before) * (rows - low) / (high - low)
