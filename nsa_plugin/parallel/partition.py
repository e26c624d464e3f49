"""Partition a batch's rows over the ranks of the attention group: one contiguous range a rank.

`by_count` divides the number of rows, for batches whose kernels are captured in a CUDA graph and must not depend on
lengths. `by_cost` divides the work. A query row that sees s keys costs

    cost(s) = row + attention * min(s, topk) + indexer * s

and the i-th of a request's q query rows sees s = kv - q + i + 1 keys, so that the early rows of a prompt are cheap.
A request's costs are one or two arithmetic progressions (up to topk keys, and beyond), so a prefix of them has a closed
form and is inverted with an integer square root; no loop goes over rows. Everything is integers: every rank computes
the same bounds from the same lengths.

Balance. Let C be the cost of all rows, W the ranks and P(b) the cost of the rows before b. Bound r is the row
boundary with P nearest to r * C / W (the lower one of two), so P(b_r) = r * C / W + e_r with |e_r| at most half the
cost of the row that holds the target, and e_0 = e_W = 0. A rank's cost is C / W + e_{r+1} - e_r, and so differs from
the ideal by at most the mean of two rows' costs: never by more than the largest row. A `max_rows` that moves a bound
voids this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from nsa_plugin.errors import NsaPluginError

if TYPE_CHECKING:
    from nsa_plugin.kernels.topk import Request


class PartitionError(NsaPluginError, ValueError):
    """Bounds, lengths, weights or limits that belong to no partition."""


@dataclass(frozen=True)
class Partition:
    """Rank r takes the rows bounds[r] to bounds[r + 1] - 1; it may take none.

    Attributes:
        bounds: one more than there are ranks, ascending from 0 to the number of rows.

    Raises:
        PartitionError: the bounds do not ascend from 0.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds = self.bounds
        ascend = all(low <= high for low, high in pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or not ascend:
            raise PartitionError(f"bounds is {list(bounds)}; two or more numbers that ascend from 0")

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return self.bounds[-1]

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [high - low for low, high in pairwise(self.bounds)]

    @property
    def max_count(self) -> int:
        """Rows of the rank with the most."""
        return max(self.counts)

    def rows(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def chunk(self, rank: int, index: int, chunks: int) -> slice:
        """Part `index` of a rank's rows cut into `chunks` of equal counts as far as possible; rows of the batch."""
        first, end = self.bounds[rank], self.bounds[rank + 1]
        count = end - first
        return slice(first + index * count // chunks, first + (index + 1) * count // chunks)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The cost of a query row: whole numbers in any one unit, such as picoseconds of measured times.

    Attributes:
        row: fixed cost: the exchange between the ranks.
        attention: cost of each attended key, with all heads.
        indexer: cost of each key that the indexer scores.

    Raises:
        PartitionError: one is negative or not whole, or all are 0.
    """

    row: int
    attention: int
    indexer: int

    def __post_init__(self) -> None:
        given = (self.row, self.attention, self.indexer)
        if not all(isinstance(weight, int) and weight >= 0 for weight in given) or not any(given):
            raise PartitionError(f"weights are {given}; whole numbers of 0 or more, not all of them 0")


def by_count(rows: int, ranks: int) -> Partition:
    """Partition into counts that differ by at most 1. Depends only on the two numbers.

    Raises:
        PartitionError: rows is negative, or ranks is below 1.
    """
    _check_ranks(ranks)
    if rows < 0:
        raise PartitionError(f"rows is {rows}; 0 or more")
    return Partition(tuple(rank * rows // ranks for rank in range(ranks + 1)))


def by_cost(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    ranks: int,
    *,
    topk: int,
    weights: Weights,
    max_rows: int | None = None,
) -> Partition:
    """Partition into ranges of nearly equal cost; see the module.

    Args:
        q_lens: query rows of each request; the batch's rows are theirs, one request after the other.
        kv_lens: keys that the last row of each request sees; at least its query rows.
        ranks: of the attention group.
        topk: most keys that a row attends to.
        weights: of a row, of a key attended to and of a key scored.
        max_rows: capacity of a rank's buffers in rows; None: no limit.

    Raises:
        PartitionError: a length, topk or max_rows is out of range; the message says what is allowed.
    """
    _check_ranks(ranks)
    if topk < 1:
        raise PartitionError(f"topk is {topk}; at least 1")
    total, runs = _runs(q_lens, kv_lens, topk, weights)
    if max_rows is not None and total > ranks * max_rows:
        raise PartitionError(f"max_rows is {max_rows}; {total} rows are more than {ranks} ranks hold then")

    before = list(accumulate((run.cost(run.length) for run in runs), initial=0))
    whole = before[-1]
    bounds = [0]
    for rank in range(1, ranks):
        bound = _nearest(runs, before, rank * whole, ranks) if whole else rank * total // ranks
        if max_rows is not None:  # within this rank's capacity and that of the ranks after it
            bound = max(min(bound, bounds[-1] + max_rows), total - (ranks - rank) * max_rows)
        bounds.append(bound)
    return Partition((*bounds, total))


class _Run(NamedTuple):
    """Rows from `first` on whose costs are cost0, cost0 + step, ..."""

    first: int
    length: int
    cost0: int
    step: int

    def cost(self, rows: int) -> int:
        """The cost of the first `rows`."""
        return rows * self.cost0 + self.step * (rows * (rows - 1) // 2)

    def rows_within(self, cost: int) -> int:
        """The most rows that cost at most `cost`, however many the run has."""
        if self.step == 0:
            return cost // self.cost0
        # The larger root of step * n**2 + linear * n - 2 * cost; rounding the root down first changes no quotient.
        linear = 2 * self.cost0 - self.step
        return (isqrt(linear * linear + 8 * self.step * cost) - linear) // (2 * self.step)


def _runs(q_lens: Sequence[int], kv_lens: Sequence[int], topk: int, weights: Weights) -> tuple[int, list[_Run]]:
    """The number of rows and the runs of their costs, in the order of the requests."""
    if len(q_lens) != len(kv_lens):
        raise PartitionError(f"q_lens has {len(q_lens)} requests, kv_lens {len(kv_lens)}")
    near, far = weights.attention + weights.indexer, weights.indexer
    beyond = weights.row + weights.attention * topk
    row, runs = 0, []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        if not 0 <= q_len <= kv_len:
            raise PartitionError(f"a request has {q_len} query rows and {kv_len} keys; its rows are among its keys")
        seen = kv_len - q_len + 1
        short = min(max(topk + 1 - seen, 0), q_len)  # rows that see no more than topk keys
        if short:
            runs.append(_Run(row, short, weights.row + near * seen, near))
        if short < q_len:
            runs.append(_Run(row + short, q_len - short, beyond + far * (seen + short), far))
        row += q_len
    return row, runs


def _nearest(runs: Sequence[_Run], before: Sequence[int], numerator: int, denominator: int) -> int:
    """The row boundary with a cost before it nearest to numerator / denominator, which is below the whole."""
    target = numerator // denominator  # a whole cost is at most the fraction if and only if it is at most this
    position = bisect_right(before, target) - 1
    run = runs[position]
    rows = run.rows_within(target - before[position])
    missing = numerator - denominator * (before[position] + run.cost(rows))
    further = 2 * missing > denominator * (run.cost0 + run.step * rows)
    return run.first + rows + int(further)


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise PartitionError(f"ranks is {ranks}; at least 1")


@dataclass(frozen=True)
class PartitionPiece:
    """The part of one request in a range of rows; the indexer treats it as a request.

    Attributes:
        request: its number in the batch.
        first, end: its rows in the batch, `end` exclusive.
        context: keys that its last row sees; the row before sees one fewer, and so on.
    """

    request: int
    first: int
    end: int
    context: int

    @property
    def count(self) -> int:
        """Query rows."""
        return self.end - self.first


def pieces(rows: slice, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Iterator[PartitionPiece]:
    """The pieces of the requests in `rows` (`Partition.rows`, or a chunk of them), in order; none without rows.

    Padded rows after the requests belong to no piece.
    """
    ends = list(accumulate(q_lens))
    for request in range(bisect_right(ends, rows.start), len(ends)):
        start = ends[request] - q_lens[request]
        if start >= rows.stop:
            return
        first, end = max(start, rows.start), min(ends[request], rows.stop)
        if first < end:
            yield PartitionPiece(request, first, end, kv_lens[request] - (ends[request] - end))


def requests(rows: slice, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Request]:
    """The pieces as `nsa_plugin.kernels.topk.Request`s, for an indexer that is given only this rank's rows.

    Rows count from `rows.start`. Keys count in the batch's buffer, in the order of the requests; a request's keys end
    with those that its last row here sees. Selected positions count from the request's first key.
    """
    key_ends = list(accumulate(kv_lens))
    found = []
    for piece in pieces(rows, q_lens, kv_lens):
        first_key = key_ends[piece.request] - kv_lens[piece.request]
        found.append((piece.first - rows.start, piece.end - rows.start, first_key, first_key + piece.context))
    return found
