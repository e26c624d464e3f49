"""Bodies of the tests of `TokenShard`, run on every rank: resharded against local attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.parallel.partition import Partition, Weights, by_cost, by_count
from nsa_plugin.parallel.token_shard import TokenShard

HEADS, D_QK, D_V = 2, 72, 64
KEYS, TOPK = 60, 12
MAX_TOKENS = 200

# Operations that allocate nothing and wait for nothing: views, copies into given memory, the collectives.
HARMLESS = re.compile(
    r"aten\.(view|_unsafe_view|slice|select|transpose|permute|unbind|split\w*|as_strided|alias|copy_|unflatten|detach)\.|"
    r"c10d\.(alltoall_base_|alltoall_)\."
)


class Batch:
    """T rows of q with all heads, the same on every rank, and the attention of all of them in one piece.

    A matrix product may add in another order for fewer rows. So on a CPU the reference attends row by row; on a GPU
    attention is elementwise and slow, so that an exchange that does not wait for it is detected.
    """

    def __init__(self, rows: int, device: torch.device, ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16):
        made = torch.Generator().manual_seed(seed)
        self.device, self.rows, self.dtype = device, rows, dtype
        self.all_q = torch.randn(rows, ranks * HEADS, D_QK, generator=made).to(dtype).to(device)
        self.kv = torch.randn(KEYS, D_QK, generator=made).to(dtype).to(device)
        indices = torch.randint(-2, KEYS + 2, (rows, TOPK), generator=made, dtype=torch.int32)
        self.indices = indices.to(device)
        self.seen: list[slice] = []

    def q(self, rank: int) -> torch.Tensor:
        return self.all_q[:, rank * HEADS : (rank + 1) * HEADS].contiguous()

    def attend(self, q_rows: torch.Tensor, rows: slice) -> torch.Tensor:
        self.seen.append(rows)
        assert q_rows.shape[0] == rows.stop - rows.start
        if self.device.type == "cpu":
            one_by_one = zip(q_rows.split(1), self.indices[rows].split(1), strict=True)
            parts = [reference_prefill(q, self.kv, chosen, scale=0.1, d_v=D_V).out for q, chosen in one_by_one]
            return torch.cat(parts)
        torch.cuda._sleep(200_000)
        factor = self.indices[rows, :1, None].float()
        return (q_rows[..., :D_V].float() * factor + q_rows[..., -1:].float()).to(self.dtype)

    def expected(self, rank: int) -> torch.Tensor:
        if not self.rows:
            return torch.empty(0, HEADS, D_V, dtype=self.dtype, device=self.device)
        whole = self.attend(self.all_q, slice(0, self.rows))
        self.seen.clear()
        return whole[:, rank * HEADS : (rank + 1) * HEADS]


def make_shard(device: torch.device, group: dist.ProcessGroup | None = None, **changed: Any) -> TokenShard:
    sizes = {"heads": HEADS, "d_qk": D_QK, "d_v": D_V, "max_tokens": MAX_TOKENS, "max_rows": MAX_TOKENS} | changed
    return TokenShard(group, dtype=sizes.pop("dtype", torch.bfloat16), device=device, **sizes)


def buffers(shard: TokenShard) -> list[torch.Tensor]:
    return [value for value in vars(shard).values() if isinstance(value, torch.Tensor)]


def poison(shard: TokenShard) -> None:
    for buffer in buffers(shard):
        buffer.fill_(float("nan"))


def partitions(rows: int, ranks: int, seed: int) -> list[Partition]:
    """Partitions by count, by cost, at random, and with ranks without rows."""
    made = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, rows + 1, (ranks - 1,), generator=made).sort().values.tolist()
    first = rows // 3
    costs = Weights(row=2, attention=3, indexer=1)
    return [
        by_count(rows, ranks),
        by_cost([first, rows - first], [first + 5, rows - first], ranks, topk=TOPK, weights=costs),
        Partition((0, *cuts, rows)),
        Partition((0, *[0] * (ranks - 1), rows)),
        Partition((0, *[rows] * ranks)),
    ]


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)  # also fails on NaN


def equal_to_unsharded(device: torch.device) -> None:
    """Calls with different rows share the buffers; nothing is left of the previous call."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard = make_shard(device)
    for seed, rows in enumerate((200, 0, 1, ranks - 1, ranks, 37, 200)):
        batch = Batch(rows, device, ranks, seed)
        expected = batch.expected(rank)
        for number, partition in enumerate(partitions(rows, ranks, seed)):
            for chunks in (1, 2, 3) if rows == 37 else (1 + (number + seed) % 3,):
                poison(shard)
                same(shard.attend(batch.q(rank), partition, batch.attend, chunks=chunks), expected)
                own = partition.rows(rank)
                every_chunk = [partition.chunk(rank, index, chunks) for index in range(chunks)]
                assert batch.seen == [part for part in every_chunk if part.start < part.stop]
                assert sum(part.stop - part.start for part in batch.seen) == own.stop - own.start
                batch.seen.clear()


def other_dtypes(device: torch.device) -> None:
    """Wider values, and an output with gaps between its rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float16, torch.float32):
        shard, batch = make_shard(device, dtype=dtype), Batch(37, device, ranks, 5, dtype)
        expected = batch.expected(rank)

        def attend(q_rows: torch.Tensor, rows: slice, batch: Batch = batch) -> torch.Tensor:
            same(q_rows, batch.all_q[rows])
            padded = torch.full((len(q_rows), ranks * HEADS + 3, D_V), float("nan"), dtype=batch.dtype, device=device)
            return padded[:, : ranks * HEADS].copy_(batch.attend(q_rows, rows))

        for partition in partitions(37, ranks, 5):
            poison(shard)
            same(shard.attend(batch.q(rank), partition, attend), expected)


def padded_rows(device: torch.device) -> None:
    """Padded rows do not affect the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard, batch = make_shard(device), Batch(40, device, ranks, 7)
    expected = batch.expected(rank)[:33].clone()
    batch.all_q[33:] = float("nan")
    batch.indices[35:] = 2**31 - 1
    for partition in partitions(40, ranks, 7):
        for chunks in (1, 2):
            poison(shard)
            same(shard.attend(batch.q(rank), partition, batch.attend, chunks=chunks)[:33], expected)


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def nothing_is_allocated(device: torch.device) -> None:
    """The requirements of a CUDA graph: fixed memory, no allocation and no wait for the device's values."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard = make_shard(device, max_rows=None)
    owned, all_heads = 2 * -(-MAX_TOKENS // ranks), ranks * HEADS
    values = owned * all_heads * (D_QK + max(D_QK, D_V)) + MAX_TOKENS * HEADS * D_V
    assert sum(buffer.numel() for buffer in buffers(shard)) == values
    places = set()
    for rows in (37, 64):
        batch, partition = Batch(rows, device, ranks, rows), by_count(rows, ranks)
        q, out = batch.q(rank), torch.zeros(partition.counts[rank], ranks * HEADS, D_V, dtype=torch.bfloat16)
        with Recorded() as recorded:
            result = shard.attend(q, partition, lambda q_rows, rows, out=out: places.add(q_rows.data_ptr()) or out)
        assert sum("alltoall" in op for op in recorded.ops) == 2
        assert not [op for op in recorded.ops if not HARMLESS.match(op)]
        places.add(result.data_ptr())
    assert len(places) == 2  # of the received rows and of the result


def mismatches(device: torch.device) -> None:
    """Ranks that differ all raise the same error; the object stays usable."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard, odd = make_shard(device, check_rows=True), rank == 1
    batch, other = Batch(20, device, ranks, 1), Batch(21, device, ranks, 1)
    usual, moved = by_count(20, ranks), Partition((0, *[19] * (ranks - 1), 20))

    def attend(mine: Batch, partition: Partition, chunks: int = 1) -> Callable[[], object]:
        return lambda: shard.attend(mine.q(rank), partition, mine.attend, chunks=chunks)

    cases: list[tuple[Callable[[], object], str, str]] = [
        (attend(other, by_count(21, ranks)) if odd else attend(batch, usual), "T", "rank 1: T 21"),
        (attend(other, usual) if odd else attend(batch, usual), "T", "rank 0: T 20"),
        (attend(batch, moved) if odd else attend(batch, usual), r"bounds\[1\]", r"bounds\[1\] 19"),
        (attend(batch, usual, 2) if odd else attend(batch, usual), "chunks", "chunks 2"),
        (attend(batch, by_count(20, ranks + 1) if odd else usual), "ranks", f"ranks {ranks + 1}"),
    ]
    for call, differs, listed in cases:
        with pytest.raises(
            MismatchError, match=f"the ranks differ in .*{differs}.*rank 0: .*rank {ranks - 1}: "
        ) as error:
            call()
        assert re.search(listed, str(error.value))
        told: list[str] = [""] * ranks
        dist.all_gather_object(told, str(error.value))
        assert len(set(told)) == 1
    same(attend(batch, usual, 2)(), batch.expected(rank))


def refusals(device: torch.device) -> None:
    """Wrong arguments on every rank raise an error that names them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard, batch = make_shard(device, max_rows=100), Batch(20, device, ranks, 1)
    q, usual = batch.q(rank), by_count(20, ranks)
    heads_last = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.zeros(1 + usual.counts[rank], ranks * HEADS, D_V, dtype=q.dtype, device=device)

    def attend(q: torch.Tensor, partition: Partition) -> Callable[[], object]:
        return lambda: shard.attend(q, partition, batch.attend)

    wrong: list[tuple[Callable[[], object], str]] = [
        (attend(q[:19], usual), "q has shape"),
        (attend(q.float(), usual), "q has dtype"),
        (attend(heads_last, usual), "contiguous"),
        (attend(q, by_count(20, ranks + 1)), f"partition is for {ranks + 1} ranks"),
        (attend(q, by_count(MAX_TOKENS + 1, ranks)), "max_tokens is 200"),
        (attend(q, Partition((0, *[101] * ranks))), "max_rows is 100"),
        (lambda: shard.attend(q, usual, lambda q_rows, rows: out), "out has shape"),
        (lambda: shard.attend(q, usual, batch.attend, chunks=0), "chunks is 0"),
        (lambda: shard.attend(q, usual, lambda q_rows, rows: None), "attend_rows returned nothing"),  # type: ignore[arg-type, return-value]
        (lambda: make_shard(device, heads=0), "heads is 0"),
        (lambda: make_shard(device, dtype=torch.int32), "dtype is torch.int32"),
        (lambda: make_shard(device, max_rows=-(-MAX_TOKENS // ranks) - 1), "max_rows is"),
    ]
    for call, reason in wrong:
        with pytest.raises(KernelArgumentError, match=reason):
            call()

    def broken(q_rows: torch.Tensor, rows: slice) -> torch.Tensor:
        if rows.start > usual.rows(rank).start:
            raise ArithmeticError("in the second chunk")
        return batch.attend(q_rows, rows)

    with pytest.raises(ArithmeticError):
        shard.attend(q, usual, broken, chunks=2)
    same(shard.attend(q, usual, batch.attend, chunks=2), batch.expected(rank))


def groups_apart(device: torch.device) -> None:
    """Two attention groups in one world, with different rows."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    members = [list(range(half)), list(range(half, 2 * half))]
    groups = [dist.new_group(ranks) for ranks in members]
    number = rank // half
    shard = make_shard(device, groups[number])
    assert (shard.ranks, shard.rank) == (half, rank % half)
    for step in range(3):
        batch = Batch(30 + 11 * number + step, device, half, 10 * number + step)
        partition = by_count(batch.rows, half)
        result = shard.attend(batch.q(shard.rank), partition, batch.attend, chunks=1 + step)
        same(result, batch.expected(shard.rank))


def a_rank_that_stays_away(device: torch.device) -> None:
    """The other ranks get the group's error after its timeout."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Connecting the ranks has the same limit, also on a busy machine.
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=5))
    shard, batch = make_shard(device, group), Batch(20, device, ranks, 1)
    if rank != 0:
        with pytest.raises(RuntimeError):
            shard.attend(batch.q(rank), by_count(20, ranks), batch.attend)
    dist.barrier()  # keep rank 0 alive until the others have their error


def in_cuda_graphs(device: torch.device) -> None:
    """Captured on the caller's stream, replayed with other values."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard, stream = make_shard(device), torch.cuda.Stream()
    for rows, chunks in ((64, 1), (ranks - 1, 1), (64, 2), (37, 3)):
        first, second = Batch(rows, device, ranks, 1), Batch(rows, device, ranks, 2)
        second.indices = first.indices
        wanted = [batch.expected(rank) for batch in (first, second)]
        # Copied: with a single row it would be a view of the batch, which is overwritten.
        q, partition = first.q(rank).clone(), by_count(rows, ranks)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            shard.attend(q, partition, first.attend, chunks=chunks)
            stream.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = shard.attend(q, partition, first.attend, chunks=chunks)
            for batch, expected in zip((second, first, second), (wanted[1], wanted[0], wanted[1]), strict=True):
                poison(shard)
                q.copy_(batch.q(rank))
                graph.replay()
                stream.synchronize()
                same(result, expected)


def on_a_stream_of_the_callers(device: torch.device) -> None:
    """q is written on the stream just before, the result is read just after, and the memory of both is reused at
    once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard = make_shard(device)
    batches = [Batch(rows, device, ranks, rows) for rows in (37, 200, 150)]
    wanted = [batch.expected(rank) for batch in batches]
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(12):
            batch = batches[step % 3]
            torch.cuda._sleep(500_000)
            q = batch.q(rank)
            result = shard.attend(q, by_count(batch.rows, ranks), batch.attend, chunks=1 + step % 4).clone()
            q.fill_(float("nan"))
            del q
            results.append(result)
    torch.cuda.synchronize()
    for step, result in enumerate(results):
        same(result, wanted[step % 3])


ANYWHERE = (equal_to_unsharded, other_dtypes, padded_rows, mismatches, refusals)


def anywhere(device: torch.device) -> None:
    for body in ANYWHERE:
        body(device)


def on_cpus(device: torch.device) -> None:
    anywhere(device)
    nothing_is_allocated(device)
    if dist.get_world_size() % 2 == 0:
        groups_apart(device)
    a_rank_that_stays_away(device)  # last: the group is not usable afterwards


def on_gpus(device: torch.device) -> None:
    anywhere(device)
    on_a_stream_of_the_callers(device)
    in_cuda_graphs(device)
