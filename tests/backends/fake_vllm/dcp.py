"""Decode context parallelism of vLLM in miniature: ranks as threads, their coordinator, and the merge by the lse."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError, Lock
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from nsa_plugin.backends.vllm.v32.dcp import DcpGroup
from nsa_plugin.kernels.shard_indices import KvShard
from tests.backends.fake_vllm.v32 import Step, World, planner

T = TypeVar("T")
WAIT = 60
"""Seconds after which a rank that waits for another fails."""


class Ranks:
    """Ranks of a group as threads of this process; `calls` has the shapes of what rank 0 gathered.

    One runs until it waits for the others: Triton's interpreter runs one kernel at a time.
    """

    def __init__(self, count: int) -> None:
        self.count, self.barrier, self.turn = count, Barrier(count), Lock()
        self.given: list[Any] = [None] * count
        self.calls: list[tuple[int, ...]] = []

    def run(self, of_rank: Callable[[int], T]) -> list[T]:
        """Run every rank; the error of one breaks the others' exchanges."""

        def guarded(rank: int) -> T:
            with self.turn:
                try:
                    return of_rank(rank)
                except BaseException:
                    self.barrier.abort()
                    raise

        with ThreadPoolExecutor(self.count) as pool:
            started = [pool.submit(guarded, rank) for rank in range(self.count)]
        errors = [error for one in started if (error := one.exception()) is not None]
        # The first of the others: a rank whose exchange broke only says so.
        if errors:
            raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
        return [one.result() for one in started]

    def exchanged(self, rank: int, given: Any) -> list[Any]:
        self.given[rank] = given
        self._wait()
        found = list(self.given)
        self._wait()
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait(WAIT)
        finally:
            self.turn.acquire()


@dataclass
class Coordinator:
    """vLLM's GroupCoordinator."""

    ranks: Ranks
    rank_in_group: int

    @property
    def world_size(self) -> int:
        return self.ranks.count

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.rank_in_group == 0:
            self.ranks.calls.append(tuple(tensor.shape))
        found = self.ranks.exchanged(self.rank_in_group, tensor.clone())
        assert len({tuple(one.shape) for one in found}) == 1, "ranks gather tensors of different shapes"
        return torch.cat(found, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        total = torch.stack(self.ranks.exchanged(self.rank_in_group, tensor.clone())).sum(0)
        return total.chunk(self.world_size, dim=dim)[self.rank_in_group]


@dataclass
class Manager:
    """MLADCPManager with `cp_lse_ag_out_rs`, and its mask of rows without a key."""

    group: Coordinator
    merged: list[torch.Tensor] = field(default_factory=list)

    def query_gather(self, query: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(query, dim=1)

    def combine(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out.shape[:2] == lse.shape
        assert lse.dtype == torch.float32
        lse = lse.contiguous()
        self.merged.append(lse.clone())
        if seq_lens is not None and query_start_loc is not None:
            assert len(query_start_loc) == len(seq_lens) + 1
            row = torch.arange(len(lse))
            owner = torch.searchsorted(query_start_loc[1:].long(), row, right=True).clamp_max(len(seq_lens) - 1)
            lse.masked_fill_(((row >= query_start_loc[-1]) | (seq_lens[owner] == 0))[:, None], -torch.inf)
        lses = torch.stack(self.group.all_gather(lse, dim=0).chunk(self.group.world_size))
        total = torch.where(lses.isnan() | lses.isposinf(), -torch.inf, lses).logsumexp(0)
        factor = (lse - total).nan_to_num(nan=-torch.inf, posinf=-torch.inf).exp().unsqueeze(-1)
        part = torch.where(factor == 0, 0.0, out.float() * factor)
        return self.group.reduce_scatter(part, dim=1).to(out.dtype)


@dataclass
class Shared:
    """Worlds of ranks that share the KV caches, and for each rank one with its heads and the undivided cache."""

    ranks: Ranks
    parts: list[World]
    whole: list[World]

    def run(
        self, lengths: list[tuple[int, int]], change: Callable[[Step], None] = lambda _: None, **padding: int
    ) -> Any:
        """Attend a batch on every rank: (steps, outputs [rows, heads, v]), and compare each with its undivided one."""
        steps: list[Step] = []
        for world in self.parts:
            steps.append(world.step(lengths, **padding))
            change(steps[-1])
        outputs = self.ranks.run(lambda rank: steps[rank].run())
        for step, world, out in zip(steps, self.whole, outputs, strict=True):
            undivided = world.step(lengths, **padding)
            change(undivided)
            assert step.split.dense_requests == undivided.split.dense_requests
            torch.testing.assert_close(out.float(), undivided.expected(), atol=0.03, rtol=0.03)
        return steps, outputs


def shared(ranks: int = 2, interleave: int = 1, **given: Any) -> Shared:
    """Make the worlds of ranks that share an fp8 cache; `given` as `planner`'s."""
    group = Ranks(ranks)
    parts, whole = [], []
    for rank in range(ranks):
        coordinator = Coordinator(group, rank)
        shard = KvShard(ranks, rank, interleave)
        deciding = planner("v32_fp8", dcp=ranks, **given)
        deciding.dcp = DcpGroup(shard, coordinator)
        world = World(deciding, later=True, rank=rank, shard=shard)
        world.layer.dcp_manager = Manager(coordinator)
        parts.append(world)
        whole.append(World(planner("v32_fp8", **given), later=True, rank=rank))
    return Shared(group, parts, whole)


def parallel(size: int = 2, interleave: int = 1, **more: Any) -> Any:
    """vLLM's ParallelConfig of a server whose ranks share the KV cache."""
    fields = {"decode_context_parallel_size": size, "cp_kv_cache_interleave_size": interleave}
    return SimpleNamespace(tensor_parallel_size=size, **fields, **more)
