"""Partitions against a loop over rows, and the bounds stated by their module."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.parallel.partition import Partition, PartitionError, Weights, by_cost, by_count, pieces, requests

ONES = Weights(row=1, attention=1, indexer=1)


@st.composite
def lengths(draw: st.DrawFn, longest: int = 60) -> tuple[list[int], list[int]]:
    q_lens = draw(st.lists(st.integers(0, longest), max_size=8))
    return q_lens, [q_len + draw(st.integers(0, 3 * longest)) for q_len in q_lens]


weights = (
    st.tuples(*[st.one_of(st.just(0), st.integers(0, 10**6))] * 3)
    .filter(any)
    .map(lambda w: Weights(row=w[0], attention=w[1], indexer=w[2]))
)


def row_costs(q_lens: list[int], kv_lens: list[int], topk: int, weight: Weights) -> list[int]:
    seen = [kv_len - q_len + row + 1 for q_len, kv_len in zip(q_lens, kv_lens, strict=True) for row in range(q_len)]
    return [weight.row + weight.attention * min(keys, topk) + weight.indexer * keys for keys in seen]


@given(rows=st.integers(0, 10**6), ranks=st.integers(1, 64))
def test_counts_differ_by_one_at_most(rows: int, ranks: int) -> None:
    partition = by_count(rows, ranks)
    assert partition.ranks == ranks
    assert sum(partition.counts) == partition.total == rows
    assert max(partition.counts) - min(partition.counts) <= 1
    assert partition.max_count == -(-rows // ranks)


@settings(max_examples=300)
@given(batch=lengths(), ranks=st.integers(1, 9), topk=st.integers(1, 80), weight=weights)
def test_a_ranks_cost_differs_from_the_ideal_by_at_most_one_row(
    batch: tuple[list[int], list[int]], ranks: int, topk: int, weight: Weights
) -> None:
    q_lens, kv_lens = batch
    costs = row_costs(q_lens, kv_lens, topk, weight)
    partition = by_cost(q_lens, kv_lens, ranks, topk=topk, weights=weight)
    assert partition.ranks == ranks
    assert partition.total == len(costs)
    assert all(low <= high for low, high in pairwise(partition.bounds))
    whole = sum(costs)
    for rank, bound in enumerate(partition.bounds):
        # The nearest boundary is off by at most half the cost of an adjacent row.
        off = abs(sum(costs[:bound]) - Fraction(rank * whole, ranks))
        assert 2 * off <= max(costs[max(0, bound - 1) : bound + 1], default=0)
    for rank in range(ranks):
        own = sum(costs[partition.rows(rank)])
        assert abs(own - Fraction(whole, ranks)) <= max(costs, default=0)


def test_bounds_are_the_nearest_boundaries() -> None:
    generated = by_cost([40, 7, 1], [90, 7, 300], 5, topk=16, weights=Weights(row=3, attention=5, indexer=2))
    costs = row_costs([40, 7, 1], [90, 7, 300], 16, Weights(row=3, attention=5, indexer=2))
    whole = sum(costs)
    nearest = [
        min(range(len(costs) + 1), key=lambda bound: abs(5 * sum(costs[:bound]) - rank * whole)) for rank in range(6)
    ]
    assert generated.bounds == tuple(nearest)


def test_early_rows_are_cheap_and_decode_rows_alike() -> None:
    prompt = by_cost([100_000], [100_000], 8, topk=2048, weights=ONES).counts
    assert prompt == sorted(prompt, reverse=True)
    assert prompt[0] > 2 * prompt[-1]
    assert by_cost([1] * 64, [5000] * 64, 8, topk=2048, weights=ONES).counts == [8] * 8
    # One long request among short ones takes most of the ranks.
    assert by_cost([1, 4000, 1], [9, 100_000, 9], 4, topk=2048, weights=ONES).counts[1:3] == pytest.approx(
        [1000, 1000], abs=20
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_rows_and_fewer_rows_than_ranks(ranks: int) -> None:
    assert by_cost([], [], ranks, topk=4, weights=ONES) == by_count(0, ranks)
    assert by_cost([0, 0], [0, 70], ranks, topk=4, weights=ONES) == by_count(0, ranks)
    one = by_cost([1], [1000], ranks, topk=4, weights=ONES)
    assert sorted(one.counts) == [0] * (ranks - 1) + [1]


@settings(max_examples=200)
@given(batch=lengths(), ranks=st.integers(1, 9), spare=st.integers(0, 20))
def test_max_rows_is_kept_and_moves_bounds_only_if_it_must(
    batch: tuple[list[int], list[int]], ranks: int, spare: int
) -> None:
    q_lens, kv_lens = batch
    limit = -(-sum(q_lens) // ranks) + spare
    free = by_cost(q_lens, kv_lens, ranks, topk=8, weights=ONES)
    held = by_cost(q_lens, kv_lens, ranks, topk=8, weights=ONES, max_rows=limit)
    assert held.total == free.total
    assert held.max_count <= limit
    if free.max_count <= limit:
        assert held == free
    if sum(q_lens):
        with pytest.raises(PartitionError, match="max_rows is"):
            by_cost(q_lens, kv_lens, ranks, topk=8, weights=ONES, max_rows=(sum(q_lens) - 1) // ranks)


@settings(max_examples=200)
@given(batch=lengths(), ranks=st.integers(1, 6), chunks=st.integers(1, 3), padding=st.integers(0, 5))
def test_pieces_cover_the_rows_and_each_sees_its_keys(
    batch: tuple[list[int], list[int]], ranks: int, chunks: int, padding: int
) -> None:
    q_lens, kv_lens = batch
    total = sum(q_lens)
    wanted = [
        (request, kv_len - q_len + row + 1)
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True))
        for row in range(q_len)
    ]
    partition = by_cost(q_lens, kv_lens, ranks, topk=8, weights=ONES)
    if padding:
        partition = by_count(total + padding, ranks)
    found, last = [], 0
    for rank in range(ranks):
        for index in range(chunks):
            rows = partition.chunk(rank, index, chunks)
            assert rows.start == last
            last = rows.stop
            cut = list(pieces(rows, q_lens, kv_lens))
            for piece in cut:
                assert rows.start <= piece.first < piece.end <= rows.stop
                assert piece.first == len(found)
                found += [(piece.request, piece.context - piece.count + row + 1) for row in range(piece.count)]
            key_starts = [sum(kv_lens[: piece.request]) for piece in cut]
            assert requests(rows, q_lens, kv_lens) == [
                (piece.first - rows.start, piece.end - rows.start, start, start + piece.context)
                for piece, start in zip(cut, key_starts, strict=True)
            ]
    assert last == total + padding
    assert found == wanted


def test_pieces_of_a_batch_with_lengths_in_it() -> None:
    rows = slice(4, 13)
    assert requests(rows, [5, 0, 6, 9], [5, 3, 16, 9]) == [(0, 1, 0, 5), (1, 7, 8, 24), (7, 9, 24, 26)]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: Partition((0,)), "two or more"),
        (lambda: Partition((1, 2)), "ascend from 0"),
        (lambda: Partition((0, 3, 2)), "ascend from 0"),
        (lambda: by_count(-1, 2), "rows is -1"),
        (lambda: by_count(1, 0), "ranks is 0"),
        (lambda: Weights(row=0, attention=0, indexer=0), "not all of them 0"),
        (lambda: Weights(row=0, attention=-1, indexer=2), "0 or more"),
        (lambda: Weights(row=0, attention=1.5, indexer=2), "whole numbers"),  # type: ignore[arg-type]
        (lambda: by_cost([3], [2], 2, topk=4, weights=ONES), "3 query rows and 2 keys"),
        (lambda: by_cost([-1], [2], 2, topk=4, weights=ONES), "-1 query rows"),
        (lambda: by_cost([1, 1], [2], 2, topk=4, weights=ONES), "q_lens has 2"),
        (lambda: by_cost([1], [2], 2, topk=0, weights=ONES), "topk is 0"),
    ],
)
def test_errors_name_the_wrong_argument(call, reason: str) -> None:
    with pytest.raises(PartitionError, match=reason):
        call()
