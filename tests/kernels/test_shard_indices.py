"""One rank's slots of a selection: the reference, the Triton kernel, and all ranks together."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.shard_indices import KvShard, reference_shard
from nsa_plugin.kernels.triton.shard_indices import shard as triton_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, REQUESTS, PAGES = 8, 3, 6
SHARDS = pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2), (4, 8)])


def selection(rows: int, topk: int, longest: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rows)
    found = torch.stack([torch.randperm(longest, generator=random)[:topk] for _ in range(rows)]).int()
    found[0] = -1
    found[1, ::3] = -1
    return found


@SHARDS
@pytest.mark.parametrize("topk", [5, 32])
@pytest.mark.parametrize("op", [reference_shard, triton_shard])
def test_the_ranks_have_every_selected_token_once(op, ranks: int, interleave: int, topk: int):
    longest = ranks * PAGE * PAGES
    chosen = selection(7, topk, longest)
    owners = torch.tensor([0, 0, 1, 2, -1, 1, REQUESTS], dtype=torch.int32)
    tables = torch.randperm(100, generator=torch.Generator().manual_seed(1))[: REQUESTS * PAGES].view(REQUESTS, PAGES)
    tables = tables.int().to(DEVICE)
    seen: list[set[int]] = [set() for _ in range(7)]
    for rank in range(ranks):
        part = KvShard(ranks, rank, interleave)
        found = op(chosen.to(DEVICE), tables, part, page_size=PAGE, row_to_request=owners.to(DEVICE))
        assert found.slots.dtype == found.counts.dtype == torch.int32
        for row, owner in enumerate(owners.tolist()):
            # Written out token by token: the ranks take turns of `interleave` tokens.
            held = [p for p in range(longest) if p // interleave % ranks == rank]
            wanted = []
            for position in chosen[row].tolist() if 0 <= owner < REQUESTS else []:
                if position >= 0 and position in held:
                    local = held.index(position)
                    wanted.append(int(tables[owner, local // PAGE]) * PAGE + local % PAGE)
                    seen[row].add(position)
            count = int(found.counts[row])
            assert found.slots[row, :count].tolist() == wanted
            assert found.slots[row, count:].tolist() == [-1] * (topk - count)
    for row, owner in enumerate(owners.tolist()):
        assert seen[row] == ({p for p in chosen[row].tolist() if p >= 0} if 0 <= owner < REQUESTS else set())


@pytest.mark.parametrize("op", [reference_shard, triton_shard])
def test_positions_off_the_table_and_on_unassigned_pages_are_left_out(op):
    chosen = torch.tensor([[0, 2, 16, 4, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[-1, 3]], dtype=torch.int32, device=DEVICE)
    owners = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = op(chosen, table, KvShard(2, 0), page_size=8, row_to_request=owners)
    assert found.slots.tolist() == [[24, -1, -1, -1, -1]]  # 16 is this rank's ninth token
    assert found.counts.tolist() == [1]


@pytest.mark.parametrize("op", [reference_shard, triton_shard])
def test_no_rows(op):
    empty = torch.empty((0, 4), dtype=torch.int32, device=DEVICE)
    owners = torch.empty(0, dtype=torch.int32, device=DEVICE)
    table = torch.zeros((1, 2), dtype=torch.int32, device=DEVICE)
    found = op(empty, table, KvShard(2, 1), page_size=8, row_to_request=owners)
    assert found.slots.shape == (0, 4)
    assert found.counts.shape == (0,)


@SHARDS
def test_the_ranks_tokens_add_up(ranks: int, interleave: int):
    lengths = torch.arange(3 * ranks * interleave + 1)
    parts = [KvShard(ranks, rank, interleave) for rank in range(ranks)]
    assert torch.equal(sum(part.lengths(lengths) for part in parts), lengths)
    for part in parts:
        counted = [sum(p // interleave % ranks == part.rank for p in range(n)) for n in lengths.tolist()]
        assert part.lengths(lengths).tolist() == [part.length(n) for n in lengths.tolist()] == counted
    assert all(parts[0].length(n) >= part.length(n) for n in lengths.tolist() for part in parts)


@pytest.mark.parametrize("given", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0)])
def test_a_shard_that_cannot_be_is_refused(given: tuple[int, int, int]):
    with pytest.raises(KernelArgumentError, match="index_transform_shard"):
        KvShard(*given)


def test_the_table_has_a_row_for_each_query_token():
    chosen = torch.zeros((3, 4), dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="row_to_request"):
        reference_shard(chosen, chosen, KvShard(2, 0), page_size=8, row_to_request=torch.zeros(2, dtype=torch.int32))
