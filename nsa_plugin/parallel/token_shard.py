"""Head/token all-to-all (Ulysses-style): sparse MLA of a tensor-parallel group without padded heads.

Under pure tensor parallelism each of W ranks has h of the H = W * h query heads, of all T rows, and the whole KV cache.
Kernels that compute 64 or 128 heads waste what they pad. So the ranks reshard:

    q [T, h, d_qk]  --all-to-all-->  q of my n rows [n, H, d_qk]  --attention-->  out of my n rows [n, H, d_v]
                                                                                     |
    out [T, h, d_v]  <------------------------all-to-all-----------------------------+

A rank's rows are one contiguous range (`nsa_plugin.parallel.partition`), so q is sent from its place and the output is
received in its place; only the n rows are transposed, after they arrive and before they leave. One kernel attends all
heads of a row, and the values are those of that kernel without resharding. `nsa_plugin.parallel.partition.requests`
gives the rows that the indexer has to score.

Memory. `TokenShard(...)` allocates all buffers. `attend` allocates nothing else on the device (with chunks it keeps
what `attend_rows` returns), does not wait for the device and reads no value from it. So it can be captured in a CUDA
graph after a call that has compiled the transpose; a replay exchanges the rows of the captured partition, so use
`by_count`, which depends only on T and W. A padded row affects only its own output. A batch, or a chunk, without rows
on any rank is not exchanged. The result is a view of a buffer, valid until the next `attend` on the caller's stream;
the caller orders calls from several streams.

Failures. Both exchanges are collectives of the group. If a rank has died or does not call, gloo raises on the others
after the group's timeout (at once if a connection broke); under NCCL the kernel waits on the device, and the process
group's watchdog ends the process after the timeout (TORCH_NCCL_ASYNC_ERROR_HANDLING at its default). Ranks that call
with different rows hang or compute wrong rows: `check_rows` detects this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from nsa_plugin.kernels.checks import KernelArgumentError, check_tensor, require
from nsa_plugin.parallel.exchange import SideStream, all_to_all, require_agreement
from nsa_plugin.parallel.partition import Partition
from nsa_plugin.parallel.transpose import swap_leading

OP = "token_shard"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

AttendRows = Callable[[torch.Tensor, slice], torch.Tensor]
"""(q [n, H, d_qk], the rows of the batch that these are) -> out [n, H, d_v]."""


def default_max_rows(max_tokens: int, ranks: int) -> int:
    """Most rows of a rank by default: twice its equal share, for partitions by cost."""
    return min(max_tokens, 2 * -(-max_tokens // ranks))


def buffer_bytes(max_tokens: int, ranks: int, heads: int, d_qk: int, d_v: int, dtype: torch.dtype) -> int:
    """Bytes of a rank's buffers. Args as of `TokenShard`, with the default of max_rows."""
    rows = default_max_rows(max_tokens, ranks)
    return (rows * ranks * heads * (d_qk + max(d_qk, d_v)) + max_tokens * heads * d_v) * dtype.itemsize


class TokenShard:
    """The two exchanges of one group and one shape of heads, with their buffers; see the module.

    One object serves all layers in turn. Per rank it allocates max_rows * H * (d_qk + max(d_qk, d_v)) +
    max_tokens * h * d_v values.

    Args:
        group: the attention group; its size is W. None: the default group.
        heads: query heads of a rank, h; the same on every rank.
        d_qk, d_v: values of a query row and of an output row.
        dtype: of q and of the output.
        device: of the tensors; the backend of the group has to serve it.
        max_tokens: most rows of a batch.
        max_rows: most rows of one rank; None: twice its share (`default_max_rows`). `by_cost` takes it too.
        check_rows: for debugging: before each call the ranks compare T, the bounds and the chunks, at the cost of a
            small collective and a wait for the device. If they differ, all ranks raise `MismatchError`. Calls that a
            CUDA graph captures are not compared: a replay could not raise.

    Attributes:
        ranks, rank: the group's size and this process's place in it.
        max_tokens, max_rows: see above.

    Raises:
        KernelArgumentError: a size is below 1, the dtype is not in `DTYPES`, or max_rows is too small for max_tokens.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        heads: int,
        d_qk: int,
        d_v: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_tokens: int,
        max_rows: int | None = None,
        check_rows: bool = False,
    ):
        self._group: dist.ProcessGroup = dist.group.WORLD if group is None else group
        self.ranks = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)
        for name, size in (("heads", heads), ("d_qk", d_qk), ("d_v", d_v), ("max_tokens", max_tokens)):
            require(size > 0, OP, f"{name} is {size}; at least 1")
        require(dtype in DTYPES, OP, f"dtype is {dtype}; allowed: {', '.join(map(str, DTYPES))}")
        self.max_tokens = max_tokens
        self.max_rows = default_max_rows(max_tokens, self.ranks) if max_rows is None else max_rows
        needed = -(-max_tokens // self.ranks)
        require(self.max_rows >= needed, OP, f"max_rows is {max_rows}; a rank's share of {max_tokens} rows is {needed}")
        self._heads, self._d_qk, self._d_v, self._dtype = heads, d_qk, d_v, dtype
        self._check_rows = check_rows

        def allocate(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=dtype, device=device)

        all_heads = self.ranks * heads
        self._q_rows = allocate(self.max_rows * all_heads * d_qk)
        # Rows that have arrived and are not yet transposed, then rows that are transposed and not yet sent.
        self._staging = allocate(self.max_rows * all_heads * max(d_qk, d_v))
        self._result = allocate(max_tokens * heads * d_v)
        self._device = self._result.device
        self._side = SideStream(self._device)

    def attend(
        self, q: torch.Tensor, partition: Partition, attend_rows: AttendRows, *, chunks: int = 1
    ) -> torch.Tensor:
        """Attention of all rows, for this rank's heads: [T, h, d_v]. A view of a buffer; see the module.

        With several chunks, every rank's rows are cut into as many. While one chunk is attended on the caller's stream,
        a second stream receives the next one and sends the previous one back. The caller's stream waits for the second
        stream before this returns.

        Args:
            q: [T, h, d_qk] contiguous: this rank's heads of all rows.
            partition: the rows of each rank; the same on every rank.
            attend_rows: attends this rank's rows, chunk after chunk in ascending order, on the caller's stream; not
                called for a chunk without rows. A later call of it must not overwrite what it returned.
            chunks: the same on every rank.

        Raises:
            KernelArgumentError: q or the partition does not fit this object.
            MismatchError: with `check_rows`, the ranks' rows differ.
            Whatever `attend_rows` raises; the other ranks then wait for this one, see the module.
        """
        require(chunks >= 1, OP, f"chunks is {chunks}; at least 1")
        self._check_ranks_agree(q.shape[0], partition, chunks)
        self._check(q, partition)
        if chunks > 1:
            self._overlapped(q, partition, attend_rows, chunks)
        else:
            q_rows = self._fetch(q, partition, 0, 1)
            out = attend_rows(q_rows, partition.rows(self.rank)) if len(q_rows) else None
            self._send_back(out, partition, 0, 1)
        return self._result_of(partition)

    def _overlapped(self, q: torch.Tensor, partition: Partition, attend_rows: AttendRows, chunks: int) -> None:
        side = self._side
        outs: list[torch.Tensor | None] = []  # kept until the caller's stream waits for the side, which reads them
        try:
            with side.after_caller():  # and so after the last reader of the buffers
                q_rows, arrived = self._fetch(q, partition, 0, chunks), side.mark()
            for index in range(chunks):
                current, here = q_rows, arrived
                if index + 1 < chunks:
                    with side.aside():
                        q_rows, arrived = self._fetch(q, partition, index + 1, chunks), side.mark()
                side.caller_waits(here)
                rows = partition.chunk(self.rank, index, chunks)
                outs.append(attend_rows(current, rows) if len(current) else None)
                with side.after_caller():
                    self._send_back(outs[-1], partition, index, chunks)
        finally:  # also if attend_rows raises: the side reads q, which is the caller's
            side.caller_waits(side.mark())

    def _fetch(self, q: torch.Tensor, partition: Partition, index: int, chunks: int) -> torch.Tensor:
        """Exchange a chunk of q and transpose it: [rows of the chunk, H, d_qk]."""
        rows = partition.chunk(self.rank, index, chunks)
        count = rows.stop - rows.start
        received = self._staged(rows, partition, self._d_qk)
        if chunks == 1:
            self._exchange(received, q, [count] * self.ranks, partition.counts)
        else:
            sent = [q[partition.chunk(rank, index, chunks)] for rank in range(self.ranks)]
            all_to_all(self._group, received.unbind(0), sent)
        first = self._own(rows, partition)
        row = self.ranks * self._heads * self._d_qk
        arranged = self._q_rows[first * row : (first + count) * row].view(count, self.ranks, self._heads, self._d_qk)
        swap_leading(received, arranged)
        return arranged.view(count, self.ranks * self._heads, self._d_qk)

    def _send_back(self, out: torch.Tensor | None, partition: Partition, index: int, chunks: int) -> None:
        """Transpose a chunk's output and exchange it into the result."""
        rows = partition.chunk(self.rank, index, chunks)
        count = rows.stop - rows.start
        sent = self._staged(rows, partition, self._d_v)
        if count:
            self._arrange(out, sent)
        result = self._result_of(partition)
        if chunks == 1:
            self._exchange(result, sent, partition.counts, [count] * self.ranks)
        else:
            received = [result[partition.chunk(rank, index, chunks)] for rank in range(self.ranks)]
            all_to_all(self._group, received, sent.unbind(0))

    def _arrange(self, out: torch.Tensor | None, sent: torch.Tensor) -> None:
        """Transpose out [n, H, d_v] into the order in which it is sent."""
        ranks, count, heads, dim = sent.shape
        if out is None:
            raise KernelArgumentError(f"{OP}: attend_rows returned nothing for {count} rows")
        check_tensor(OP, "out", out, (count, ranks * heads, dim), dtypes=(self._dtype,), device=self._device)
        swap_leading(out.unflatten(1, (ranks, heads)), sent)

    def _exchange(self, into: torch.Tensor, given: torch.Tensor, into_rows: list[int], given_rows: list[int]) -> None:
        """all_to_all_single over the rows of contiguous tensors, whatever their dimensions."""
        if not into.numel() and not given.numel():  # no rank has rows
            return
        width = self._heads * into.shape[-1]
        dist.all_to_all_single(into.view(-1, width), given.view(-1, width), into_rows, given_rows, group=self._group)

    def _own(self, rows: slice, partition: Partition) -> int:
        """The first of these rows, relative to this rank's first."""
        return int(rows.start - partition.bounds[self.rank])

    def _staged(self, rows: slice, partition: Partition, dim: int) -> torch.Tensor:
        """[W, rows, h, dim] of the staging buffer; the chunks of a batch do not overlap."""
        count, first = rows.stop - rows.start, self._own(rows, partition)
        width = self.ranks * self._heads
        start = first * width * max(self._d_qk, self._d_v)
        return self._staging[start : start + count * width * dim].view(self.ranks, count, self._heads, dim)

    def _result_of(self, partition: Partition) -> torch.Tensor:
        total, row = partition.total, self._heads * self._d_v
        return self._result[: total * row].view(total, self._heads, self._d_v)

    def _check_ranks_agree(self, tokens: int, partition: Partition, chunks: int) -> None:
        """With `check_rows`; before any check that could fail on one rank alone."""
        if not self._check_rows:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        bounds = [*partition.bounds[: self.ranks + 1], *[-1] * (self.ranks + 1 - len(partition.bounds))]
        names = ("T", "chunks", "ranks", *(f"bounds[{position}]" for position in range(len(bounds))))
        require_agreement(self._group, self._device, names, (tokens, chunks, partition.ranks, *bounds))

    def _check(self, q: torch.Tensor, partition: Partition) -> None:
        require(partition.ranks == self.ranks, OP, f"partition is for {partition.ranks} ranks; there are {self.ranks}")
        total, most = partition.total, partition.max_count
        require(total <= self.max_tokens, OP, f"partition has {total} rows; max_tokens is {self.max_tokens}")
        require(most <= self.max_rows, OP, f"partition gives a rank {most} rows; max_rows is {self.max_rows}")
        shape = (partition.total, self._heads, self._d_qk)
        check_tensor(OP, "q", q, shape, dtypes=(self._dtype,), device=self._device)
        require(
            q.is_contiguous(),
            OP,
            f"q has strides {q.stride()}; it must be contiguous, because it is sent from its place",
        )
