"""The largest logits of each row of a buffer, and how a batch is cut into such buffers.

Op `topk_rows`. For row i with columns starts[i] <= c < ends[i] of a float32 buffer, the result is the *set*
of the `min(topk, ends - starts)` columns with the largest logits, as positions relative to starts[i],
then -1. It follows the rules of `nsa_plugin.kernels.indexer`: which members of a tie are taken is free, a NaN
or -inf counts as the least finite value, +inf as the largest, no position reaches past the range, and an
empty range gives -1 alone. Columns outside the range have no influence.

Every implementation here takes the lowest positions of a tie and returns them in ascending order, so that
the same logits give the same bits; callers may rely on the set alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nsa_plugin.kernels.checks import INDEX_DTYPES, check_tensor, require

OP = "topk_rows"

# Capacity of the CUDA kernel's buffer in shared memory.
CUDA_MAX_TOPK = 4096

Selector = Callable[..., torch.Tensor]
"""A `topk_rows`: (logits, starts, ends, topk, out=None)."""

Request = tuple[int, int, int, int]
"""(first row, end row, first key, end key): rows of a request in the batch and its keys in the key buffer."""


def reference_topk_rows(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, topk: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [rows, topk] positions relative to `starts`, -1 behind them. Contract: see the module.

    Args:
        logits: [rows, columns] float32; any row stride.
        starts, ends: [rows] int32 or int64, 0 <= starts and ends <= columns.
        topk: positions a row.
        out: [rows, topk] int32, where to put the result; overwritten whole.

    Raises:
        KernelArgumentError: a shape, dtype, range or count is wrong.
    """
    out = check_topk_rows(logits, starts, ends, topk, out)
    rows, columns = logits.shape
    if rows:
        low, high = int(starts.min()), int(ends.max())
        require(low >= 0, OP, f"starts has {low}; ranges start at 0 or later")
        require(high <= columns, OP, f"ends has {high}; there are {columns} columns")
    return out.copy_(select(logits.clone(), starts, ends, 0, topk))


def check_topk_rows(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, topk: int, out: torch.Tensor | None
) -> torch.Tensor:
    """Check what does not need a device's values; return `out` or a new, uninitialised one."""
    check_tensor(OP, "logits", logits, ("rows", "columns"), dtypes=(torch.float32,))
    rows, device = logits.shape[0], logits.device
    for name, bound in (("starts", starts), ("ends", ends)):
        check_tensor(OP, name, bound, (rows,), dtypes=INDEX_DTYPES, device=device)
    return new_output(OP, rows, topk, out, device)


def new_output(op: str, rows: int, topk: int, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`out` after a check, or a new int32 [rows, topk]. Uninitialised: for kernels that write every row whole."""
    require(topk > 0, op, f"topk is {topk}; it is at least 1")
    if out is None:
        return torch.empty((rows, topk), dtype=torch.int32, device=device)
    check_tensor(op, "out", out, (rows, topk), dtypes=(torch.int32,), device=device)
    return out


def select(logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, first: int, topk: int) -> torch.Tensor:
    """int32 [rows, topk]: ascending positions, relative to ks, of the largest logits in range; -1 behind.

    Column j of `logits`, which is overwritten, is key `first + j`.
    """
    rows, keys = logits.shape
    result = torch.full((rows, topk), -1, dtype=torch.int32, device=logits.device)
    count = min(topk, keys)
    if count == 0:
        return result
    inside = in_range(ks, ke, first, keys)
    least = torch.finfo(torch.float32).min
    logits = logits.nan_to_num_(nan=least, neginf=least).masked_fill_(~inside, float("-inf"))
    threshold = logits.topk(count, dim=1).values[:, -1:]
    above = logits > threshold
    tied = (logits == threshold) & inside
    room = count - above.sum(1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(1, dtype=torch.int32) <= room))
    row, column = chosen.nonzero(as_tuple=True)
    rank = chosen.cumsum(1, dtype=torch.int32)[row, column] - 1
    result[row, rank.long()] = (column + first - ks[row]).int()
    return result


def in_range(ks: torch.Tensor, ke: torch.Tensor, first: int, keys: int) -> torch.Tensor:
    """bool [rows, keys]: whether key first + column lies in the row's range."""
    key = torch.arange(first, first + keys, device=ks.device)
    return (key >= ks.unsqueeze(1)) & (key < ke.unsqueeze(1))


@dataclass(frozen=True)
class RowChunk:
    """Query rows whose logits are computed at once: a buffer of [rows, span].

    Attributes:
        rows: the rows.
        keys: first and end key that a row of the chunk may see.
        span: most keys that one row may see; the columns that the buffer needs if they count from the row's ks.
    """

    rows: slice
    keys: slice
    span: int

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def shares_keys(self) -> bool:
        """Whether every row may see all the keys: the columns may then count from the chunk's first key."""
        return bool(self.span == self.keys.stop - self.keys.start)


def row_chunks(
    rows: int, keys: int, *, rows_per_chunk: int | None, requests: Sequence[Request] | None = None
) -> Iterator[RowChunk]:
    """Chunks of at most `rows_per_chunk` rows. With `requests`, a chunk's buffer is as wide as its longest
    request, and short requests share one; rows of no request, or of one without keys, are in no chunk.

    Raises:
        KernelArgumentError: requests overlap, are out of order, or reach past the rows or keys.
    """
    op = "row_chunks"
    step = rows if rows_per_chunk is None else rows_per_chunk
    pending: list[Request] = []
    row = 0
    for first, end, key_first, key_end in [(0, rows, 0, keys)] if requests is None else requests:
        request = (first, end, key_first, key_end)
        require(row <= first <= end <= rows, op, f"requests has {request}; rows ascend, and there are {rows}")
        require(0 <= key_first <= key_end <= keys, op, f"requests has {request}; there are {keys} keys")
        row = end
        if first == end or key_first == key_end:
            continue
        if pending and (pending[-1][1] != first or end - pending[0][0] > step):
            yield _merged(pending)
            pending = []
        if end - first <= step:
            pending.append(request)
            continue
        for start in range(first, end, step):
            yield RowChunk(slice(start, min(start + step, end)), slice(key_first, key_end), key_end - key_first)
    if pending:
        yield _merged(pending)


def uncovered_rows(chunks: Sequence[RowChunk], rows: int) -> Iterator[slice]:
    """The rows before, between and after chunks in ascending order."""
    row = 0
    for chunk in chunks:
        if row < chunk.rows.start:
            yield slice(row, chunk.rows.start)
        row = chunk.rows.stop
    if row < rows:
        yield slice(row, rows)


def _merged(requests: Sequence[Request]) -> RowChunk:
    keys = slice(min(first for _, _, first, _ in requests), max(end for *_, end in requests))
    span = max(end - first for _, _, first, end in requests)
    return RowChunk(slice(requests[0][0], requests[-1][1]), keys, span)
