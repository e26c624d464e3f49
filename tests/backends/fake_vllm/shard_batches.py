"""Bodies of the tests of resharding under vLLM: batches through the adapter's indexer and attention.

A rank's worlds are `shard_engine`'s; what it does at start-up is in `shard_start`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.backends.common.paths import PROVIDER
from nsa_plugin.backends.common.token_shard import Exchange
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.parallel.partition import by_count
from tests.backends.common.shard_times import quickest_in
from tests.backends.fake_vllm.shard_engine import (
    MAX_TOKENS,
    TOPK,
    WAYS,
    Way,
    environment,
    exchange_of,
    select,
    world_of,
)
from tests.backends.fake_vllm.shard_kernels import get_mla_metadata, schedules
from tests.backends.fake_vllm.shard_start import starting
from tests.backends.fake_vllm.v32 import HEADS, MAX_ROWS, World

# (rows, context) of each request. Contexts up to MHA_MAX_KV attend densely.
BATCHES: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([(1, 40), (1, 9), (6, 6), (30, 60), (20, 20), (5, 70), (4, 21)], 0),
    ([(30, 60), (5, 70)], 0),
    ([(1, 40), (1, 7), (1, 80), (1, 30), (1, 31), (1, 96), (1, 1)], 0),
    ([(1, 50)], 0),
    ([(2, 90)], 0),
    ([(1, 40), (6, 6), (3, 80)], 0),
    ([(1, 40), (0, 12), (9, 33), (6, 6), (9, 80), (7, 7), (2, 40), (0, 50), (11, 95)], 0),
    ([(70, 90), (40, 60)], 0),
    ([(96, 96), (90, 92), (30, 50)], 0),  # more than the buffers hold
    ([(1, 50), (1, 90), (1, 3)], 5),
    ([(1, 50), (1, 90), (1, 3), (1, 12), (1, 60)], 3),
    ([(12, 12), (5, 5)], 0),
)
VERIFY: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([(3, 50), (3, 8), (1, 33), (9, 40), (4, 7), (20, 90)], 0),
    ([(3, 50), (3, 8), (3, 96)], 0),
    ([(3, 50), (3, 8)], 2),
    ([(3, 60)], 0),
)


def poison(exchange: Exchange) -> None:
    for buffer in vars(exchange.shard).values():
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(float("nan"))


def equal_to_local(way: Way, batches: Any, step_tokens: int, chunks: int = 1) -> int:
    """Batch after batch through the same buffers, each with two layers; how many parts of them were sharded.

    Args:
        chunks: pieces of a prefill that has the rows.
    """
    ranks = dist.get_world_size()
    exchange = exchange_of()
    sharded, kept = world_of(way, exchange, step_tokens), world_of(way, None, step_tokens)
    reshards, cut, empty, read = 0, 0, 0, reads_of(sharded)
    for lengths, padding in batches:
        steps = sum(rows <= step_tokens for rows, _ in lengths)
        # To vLLM's indexer steps of other rows than the first one's are prefills.
        uniform = next((place for place, (rows, _) in enumerate(lengths) if rows != lengths[0][0]), len(lengths))
        found = []
        for world in (sharded, kept):
            step = world.step(lengths, padded_rows=padding * step_tokens, padded_requests=padding)
            select(world, step, step.common.num_reqs if padding else min(steps, uniform))
            found.append(step)
        step, local = found
        wanted = local.run()
        split = step.split
        for plan, rows in (
            (split.steps, split.step_rows),
            (split.sparse, sum(lengths[request][0] for request in split.sparse_requests)),
        ):
            if plan is not None:
                everything = rows if plan is split.steps else sum(rows for rows, _ in lengths[split.num_steps :])
                assert plan.token_shard == (ranks <= rows and everything <= MAX_TOKENS), plan.reasons["token_shard"]
                reshards += plan.token_shard
                pieces = chunks if plan is split.sparse and plan.token_shard and rows >= ranks * chunks else 1
                assert plan.token_shard_chunks == pieces, plan.reasons["token_shard_chunks"]
                cut += pieces > 1
        parts = [*step.metadata.mqa] + ([step.metadata.tail] if step.metadata.tail is not None else [])
        for piece in parts:
            assert (piece.share is not None) == piece.plan.token_shard
            assert piece.share is None or piece.stock is None
            assert piece.share is None or piece.share.chunks == piece.plan.token_shard_chunks
            empty += piece.share is not None and 0 < rows_of(piece) < piece.share.chunks
            if piece.plan is split.sparse:
                assert {piece.path} == way.paths
                assert bool(piece.copied) == (way.copied and piece.plan.token_shard and rows_of(piece) > 0)
        assert split.steps_assigned is None or split.steps_assigned.partition == by_count(split.step_rows, ranks)
        # vLLM's own call, which attends for those that keep their heads, is float32 here.
        exact = all(piece.share is not None or piece.path == PROVIDER for piece in parts)
        for _ in range(2):  # two layers
            poison(exchange)
            read.clear()
            out = step.run()
            copies = [part.slots for piece in parts for part in piece.copied]
            copies += [dense.slots for dense in step.metadata.mha if dense.slots is not None]
            assert sorted(map(id, read)) == sorted(map(id, copies)), "each copy is made once per layer"
            if exact:
                assert torch.equal(out, wanted), (lengths, padding)
            else:
                torch.testing.assert_close(out, wanted, atol=0.03, rtol=0.03)
        assert bool(out[: step.num_rows].isfinite().all())
        assert float(out[: step.num_rows].abs().max()) > 0.01
    assert (cut > 0) == (chunks > 1)
    found_empty = torch.tensor(empty)
    dist.all_reduce(found_empty)
    assert bool(found_empty) or chunks < 4, "a rank without rows of some piece"
    return reshards


def reads_of(world: World) -> list[torch.Tensor]:
    """The slots of every reading of rows from a world's cache, from now on."""
    found: list[torch.Tensor] = []
    providers = world.impl.nsa_plugin_providers
    helper = providers.helper

    def noted(name: str) -> Callable[..., Any]:
        def read(cache: PagedCache, slots: torch.Tensor, **named: Any) -> Any:
            found.append(slots)
            return helper(name)(cache, slots, **named)

        return read if name == "kv_cache_read" else helper(name)

    providers.helper = noted
    return found


def rows_of(piece: Any) -> int:
    return int(piece.share.rows.stop - piece.share.rows.start)


def schedules_are_made_once_a_step() -> None:
    """The first layer makes the schedule, and makes it again on its next call, so a graph contains it."""
    ranks = dist.get_world_size()
    world = world_of(WAYS[3], exchange_of())
    step = world.step([(1, 50)] * (3 * ranks))
    schedules.clear()
    share = step.metadata.mqa[0].share
    first = step.run().clone()
    for another in (1, 2):
        assert share.scheduled(another, share.rows, get_mla_metadata) is schedules[0]
    assert len(schedules) == 1
    assert torch.equal(step.run(), first)
    assert len(schedules) == 2


def controls() -> None:
    """The comparison notices an exchange that is wrong, and rows of others are not read."""
    way, exchange = WAYS[0], exchange_of()
    world = world_of(way, exchange)
    step = world.step([(30, 60), (11, 70)])
    select(world, step, 0)
    right = step.run().clone()
    assert bool((right.abs().amax((1, 2)) > 0).all())
    fetch = exchange.shard._fetch
    exchange.shard._fetch = lambda *given: fetch(*given).flip(1)  # type: ignore[method-assign]
    assert not torch.equal(step.run(), right)
    exchange.shard._fetch = fetch  # type: ignore[method-assign]
    own = step.metadata.mqa[0].share.rows
    others = torch.ones(MAX_ROWS, dtype=torch.bool)
    others[own] = False
    assert bool((world.buffer[:41][others[:41]] == -1).all())
    world.buffer[others] = 2
    assert torch.equal(step.run(), right)


def captured_batches_share_alike() -> None:
    """A replay exchanges the same query tokens as its capture, for any lengths."""
    world = world_of(WAYS[1], exchange_of())
    capture = world.step([(1, 1)] * 12).metadata.mqa[0]
    replay = world.step([(1, 50), (1, 90), (1, 3)], padded_rows=9, padded_requests=9).metadata.mqa[0]
    assert capture.plan is replay.plan
    assert capture.plan.token_shard
    assert capture.share.partition == replay.share.partition
    assert capture.request_of_row.data_ptr() == replay.request_of_row.data_ptr()


def the_fault_shows() -> None:
    lengths = [(1, 60), (1, 50), (1, 40), (1, 30), (40, 90)]
    for way in (WAYS[0], WAYS[4]):
        out = []
        for fault in ("none", "shift_indices"):
            step = world_of(way, exchange_of(), fault=fault).step(lengths)
            out.append(step.run().clone())
        assert not torch.equal(out[0][:4], out[1][:4])
        assert not torch.equal(out[0][4:], out[1][4:])


def ranks_with_other_rows() -> None:
    """If ranks compare rows before each exchange, different batches raise an error instead of a hang."""
    world = world_of(WAYS[1], exchange_of(check_rows=True))
    step = world.step([(40, 90)] if dist.get_rank() else [(39, 89)])
    with pytest.raises(MismatchError, match=r"rank 0: T 39, .* rank 1: T 40"):
        step.run()


def pieces_on_ranks(device: torch.device, way: int, chunks: int) -> None:
    environment()
    quickest_in(chunks, dist.get_world_size(), HEADS, TOPK)
    # And a tail behind a dense request that has fewer rows than a rank has pieces.
    short_tail = [(1, 40), (14, 60), (20, 20), (3, 70)], 0
    one_copy = [(12, 30), (12, 32), (8, 30)], 0  # of several requests, and cut within it
    equal_to_local(WAYS[way], (*BATCHES, short_tail, one_copy), 1, chunks)
    the_fault_shows()
    if WAYS[way].prefill == "flash_mla" and not WAYS[way].copied:
        schedules_are_of_a_piece(WAYS[way], chunks)


def schedules_are_of_a_piece(way: Way, chunks: int) -> None:
    """Each layer's pieces have one each, which the layers share."""
    world = world_of(way, exchange_of())
    step = world.step([(60, 90)])
    schedules.clear()
    first = step.run().clone()
    share = step.metadata.mqa[0].share
    in_place = way.layout == "v32_fp8"
    assert len(schedules) == len(share.schedules) == chunks * in_place
    assert torch.equal(step.run(), first)
    assert len(schedules) == 2 * chunks * in_place


def batches_on_ranks(device: torch.device, way: int) -> None:
    environment()
    reshards = equal_to_local(WAYS[way], BATCHES, 1)
    assert reshards >= (10 if dist.get_world_size() == 2 else 7), reshards
    assert equal_to_local(WAYS[way], VERIFY, 3) >= 4


def others_on_ranks(device: torch.device) -> None:
    environment()
    for body in (
        schedules_are_made_once_a_step,
        controls,
        captured_batches_share_alike,
        the_fault_shows,
        ranks_with_other_rows,
        starting,
    ):
        body()
