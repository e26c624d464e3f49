"""The fused indexer without a GPU: how it cuts a batch, and a model of its threshold, cut and second pass."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import indexer
from nsa_plugin.kernels.topk import reference_topk_rows
from tests.kernels.indexer_cases import hard_rows, indexer_inputs

MIB = 2**20
SMS = 132
LARGEST = torch.finfo(torch.float32).max


@given(
    rows=st.integers(1, 20_000),
    keys=st.integers(1, 2_000_000),
    topk=st.sampled_from([1, 512, 2048, 4096]),
    mib=st.one_of(st.none(), st.integers(1, 2048)),
    step=st.sampled_from([16, 32, 96]),
    block=st.sampled_from([8, 16]),
)
def test_chunks_cover_the_rows_within_the_limit(rows, keys, topk, mib, step, block):
    limit = None if mib is None else mib * MIB
    chunks = indexer.plan(rows, keys, topk, SMS, limit, step, block)
    assert [first for first, _, _ in chunks] == [0] + [end for _, end, _ in chunks[:-1]]
    assert chunks[-1][1] == rows
    for first, end, buffers in chunks:
        assert end > first
        assert limit is None or end - first <= block or (end - first) * buffers.row_bytes <= limit
        # A buffer that was cut back has room until the next look.
        whole = indexer.LISTS * buffers.capacity
        assert whole >= topk + 2 * indexer.SLACK
        # The sampled logits are where the entries are later.
        assert 4 * buffers.row_words >= max(4 * buffers.samples, buffers.parts * whole * indexer.ENTRY_BYTES)
        assert buffers.samples <= indexer.MAX_SAMPLES
        assert buffers.samples == len(range(buffers.offset, keys, buffers.step)) or keys <= whole


def test_the_last_rows_are_cut_into_parts():
    """8192 query tokens are 7.76 waves of blocks; the last 0.76 in five parts take 0.8 of a wave."""
    chunks = indexer.plan(8192, 131072, 2048, SMS, 256 * MIB)
    assert [(end - first, buffers.parts) for first, end, buffers in chunks] == [(4224, 1), (3168, 1), (800, 5)]


def test_the_memory_is_that_of_logits_as_wide_as_the_longest_request():
    """Eight requests of 64 Ki keys: the planner's rows of 256 KiB each are what fits its budget, not rows of 2 MiB."""
    keys = 65536
    requests = [(1024 * place, 1024 * (place + 1), keys * place, keys * (place + 1)) for place in range(8)]
    assert indexer.memory_limit(8 * keys, 256, requests) == 64 * MIB
    assert indexer.memory_limit(8 * keys, 256, [*requests, (8192, 8192, 0, 8 * keys)]) == 64 * MIB
    assert indexer.memory_limit(8 * keys, 256, None) == 8 * 64 * MIB
    assert indexer.memory_limit(8 * keys, None, requests) is None
    assert indexer.memory_limit(8 * keys, 256, []) == 0
    chunks = indexer.plan(8192, 8 * keys, 2048, SMS, indexer.memory_limit(8 * keys, 256, requests))
    assert all((end - first) * buffers.row_bytes <= 64 * MIB for first, end, buffers in chunks)


def test_arguments_have_the_kernels_layout():
    """Nine pointers and eight ints, without holes."""
    assert ctypes.sizeof(indexer.Arguments) == 9 * 8 + 8 * 4
    assert indexer.Arguments.rows.offset == 9 * 8


def test_refuses_what_the_kernel_does_not_take():
    ks = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="16 heads"):
        indexer.topk(*indexer_inputs(4, 100, 16), ks, ks + 100, 64)
    with pytest.raises(KernelArgumentError, match="at most 4096"):
        indexer.topk(*indexer_inputs(4, 100, 64), ks, ks + 100, 5000)
    with pytest.raises(KernelArgumentError, match="cpu"):
        indexer.topk(*indexer_inputs(4, 100, 64), ks, ks + 100, 64)


class Model:
    """The selection of one row as the kernels make it, in small: what happened is in the counters.

    Attributes:
        capacity: entries of a list; a row has four.
        tile: keys of a product, a quarter of them for each list.
        look: keys between two looks at the lists' room, where a row is scored again.
    """

    def __init__(self, topk: int, capacity: int, tile: int, look: int, step: int) -> None:
        self.topk, self.capacity, self.tile, self.look, self.step = topk, capacity, tile, look, step
        self.cuts = self.redone = 0

    def threshold(self, values: torch.Tensor) -> float:
        room = 4 * self.capacity - self.look
        if len(values) <= room:
            return -LARGEST
        sample = values[self.step // 2 :: self.step]
        share = len(sample) / len(values)
        root = 0.5 * (5.5 + math.sqrt(5.5**2 + 4 * self.topk * share))
        rank = int(min(root**2, 0.5 * (self.topk + room) * share)) + 1
        return float(sample.sort(descending=True).values[min(rank, len(sample)) - 1])

    def best(self, entries: list[tuple[float, int]]) -> list[tuple[float, int]]:
        return sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: self.topk]

    def scan(self, values: torch.Tensor, first: int, end: int, threshold: float) -> list[list[tuple[float, int]]]:
        lists: list[list[tuple[float, int]]] = [[], [], [], []]
        for position in range(first, end):
            if float(values[position]) >= threshold:
                lists[(position - first) % self.tile * 4 // self.tile].append((float(values[position]), position))
        return lists

    def again(self, values: torch.Tensor, first: int, end: int, threshold: float) -> list[tuple[float, int]]:
        entries: list[tuple[float, int]] = []
        strict = False
        for base in range(first, end, self.look):
            if len(entries) + self.look > 4 * self.capacity:
                entries, strict = self.best(entries), True
                threshold = entries[-1][0]
                self.cuts += 1
            for position in range(base, min(base + self.look, end)):
                value = float(values[position])
                if value > threshold or (value == threshold and not strict):
                    entries.append((value, position))
            assert len(entries) <= 4 * self.capacity
        return entries

    def select(self, row: torch.Tensor, parts: int) -> list[int]:
        values = row.nan_to_num(nan=-LARGEST, neginf=-LARGEST, posinf=LARGEST)
        edges = [len(values) * part // parts for part in range(parts + 1)]
        spans = list(itertools.pairwise(edges))
        threshold = self.threshold(values)
        lists = [one for first, end in spans for one in self.scan(values, first, end, threshold)]
        counts = [len(one) for one in lists]
        entries = [entry for one in lists for entry in one]
        if sum(counts) < self.topk or max(counts) > self.capacity:
            self.redone += 1
            low = -LARGEST if sum(counts) < self.topk else threshold
            entries = [entry for first, end in spans for entry in self.again(values, first, end, low)]
        return sorted(position for _, position in self.best(entries))


def selected(row: torch.Tensor, topk: int) -> list[int]:
    ends = torch.tensor([len(row)]).int()
    found: list[int] = reference_topk_rows(row[None], torch.zeros(1).int(), ends, topk)[0].tolist()
    return found


# Ties of more members than the lists hold.
TIED = {"all +inf", "all -inf", "all NaN", "equal", "mixed", "one huge"}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", sorted(hard_rows(8)))
def test_the_method_is_exact(name, parts):
    row = hard_rows(3000)[name]
    model = Model(topk=64, capacity=64, tile=16, look=32, step=8)
    assert model.select(row, parts) == selected(row, 64)
    assert model.redone == (name in TIED)
    if name == "equal":
        assert model.cuts  # everything reaches the threshold


@pytest.mark.parametrize("factor", [100.0, 0.001])
def test_the_method_is_exact_where_the_sample_misleads(factor):
    row = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    row[4::8] *= factor
    row[4::8][40:] /= factor if factor > 1 else 1.0  # fewer than topk are high
    model = Model(topk=64, capacity=64, tile=16, look=32, step=8)
    assert model.select(row, 1) == selected(row, 64)
    assert model.redone == 1
    assert model.cuts


def test_the_method_is_exact_where_one_list_gets_everything():
    row = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    row[torch.arange(3000) % 16 >= 4] *= 0.01
    model = Model(topk=64, capacity=64, tile=16, look=32, step=8)
    assert model.select(row, 1) == selected(row, 64)
    assert model.redone == 1
