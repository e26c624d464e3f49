"""`topk_rows`: the reference against a full sort, Triton against the reference, and the chunks of a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels import selector
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda.topk import topk_rows as cuda_topk_rows
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.kernels.topk import RowChunk, reference_topk_rows, row_chunks, uncovered_rows
from nsa_plugin.kernels.triton import topk as triton_topk

from .indexer_cases import assert_selected, hard_rows, ranked
from .oracles import noncontiguous

COLUMNS = 300


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks a row, though rows are short enough for the interpreter."""
    monkeypatch.setattr(triton_topk, "BLOCK", 128)


def hard_case(columns=COLUMNS):
    """[rows, columns] logits with ranges of many lengths and alignments; poison outside the ranges."""
    rows = torch.stack(list(hard_rows(columns).values()))
    starts = torch.arange(len(rows), dtype=torch.int32) % 5
    ends = torch.full_like(starts, columns)
    ends[1], ends[4] = starts[1], starts[4] + 1
    ends[9] = starts[9] - 2  # none: empty, as if it ended where it starts
    ends[8] -= 3
    position = torch.arange(columns)
    outside = (position < starts.unsqueeze(1)) | (position >= ends.unsqueeze(1))
    return rows.masked_fill(outside, torch.inf), starts, ends.clamp(min=0)


@pytest.mark.parametrize("topk", [1, 7, 64, 299, 300, 512])
def test_reference_is_the_full_sort_s(topk):
    logits, starts, ends = hard_case()
    result = reference_topk_rows(logits, starts, ends, topk)
    assert_selected(result, logits, starts, ends, topk)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        order = ranked(logits[row, start:end]).sort(descending=True, stable=True).indices[:topk]
        assert result[row, : len(order)].tolist() == order.sort().values.tolist()


@pytest.mark.parametrize("topk", [1, 7, 64, 299, 512])
def test_triton_is_the_reference(topk):
    logits, starts, ends = hard_case()
    expected = reference_topk_rows(logits, starts, ends, topk)
    assert torch.equal(triton_topk.topk_rows(logits, starts, ends, topk), expected)


@pytest.mark.parametrize("length", [0, 1, 19, 20, 21, 127, 128, 129])
def test_triton_at_every_length(length):
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(3, 140, generator=generator)
    starts = torch.tensor([0, 3, 10])
    ends = starts + length
    result = triton_topk.topk_rows(logits, starts, ends, 20)
    assert torch.equal(result, reference_topk_rows(logits, starts, ends, 20))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 999), st.integers(1, 9))
def test_triton_on_rows_with_ties(columns, topk, seed, values):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (2, columns), generator=generator).float()
    bounds = torch.randint(0, columns + 1, (2, 2), generator=generator).sort(0).values.int()
    result = triton_topk.topk_rows(logits, bounds[0], bounds[1], topk)
    assert torch.equal(result, reference_topk_rows(logits, bounds[0], bounds[1], topk))


@pytest.mark.parametrize("select", [reference_topk_rows, triton_topk.topk_rows])
def test_strides_and_an_output_buffer(select):
    logits, starts, ends = hard_case()
    wide = torch.full((len(logits), 9 + COLUMNS), torch.nan)
    wide[:, 9:] = logits
    expected = reference_topk_rows(logits, starts, ends, 33)
    out = torch.full((len(logits), 66), 999, dtype=torch.int32)
    result = select(wide[:, 9:], noncontiguous(starts), noncontiguous(ends), 33, out=out[:, ::2])
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, ::2], expected)
    assert bool((out[:, 1::2] == 999).all())
    assert torch.equal(select(noncontiguous(logits), starts.long(), ends.long(), 33), expected)


@pytest.mark.regression(19)
def test_ranges_that_the_device_cannot_check_are_clamped():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    starts, ends = torch.tensor([-7, 60, 45, 3]), torch.tensor([20, 70, 99, -(2**31)])
    clamped = reference_topk_rows(logits, starts.clamp(min=0), ends.clamp(0, 50), 8)
    assert torch.equal(triton_topk.topk_rows(logits, starts, ends, 8), clamped)


@pytest.mark.parametrize("select", [reference_topk_rows, triton_topk.topk_rows])
@pytest.mark.parametrize(("rows", "columns"), [(0, 10), (3, 0), (0, 0)])
def test_empty_inputs(select, rows, columns):
    zeros = torch.zeros(rows, dtype=torch.int32)
    assert select(torch.zeros(rows, columns), zeros, zeros, 5).tolist() == [[-1] * 5] * rows


def test_logits_are_left_as_they_are():
    logits, starts, ends = hard_case()
    before = logits.clone()
    reference_topk_rows(logits, starts, ends, 9)
    triton_topk.topk_rows(logits, starts, ends, 9)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def call(select, **changes):
    arguments = {
        "logits": torch.zeros(3, 9),
        "starts": torch.zeros(3, dtype=torch.int32),
        "ends": torch.full((3,), 9, dtype=torch.int32),
        "topk": 4,
    }
    return select(**(arguments | changes))


@pytest.mark.parametrize("select", [reference_topk_rows, triton_topk.topk_rows, cuda_topk_rows])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(9)}, "topk_rows: logits has shape"),
        ({"logits": torch.zeros(3, 9, dtype=torch.bfloat16)}, "logits has dtype bfloat16"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts has shape"),
        ({"ends": torch.zeros(3)}, "ends has dtype"),
        ({"topk": 0}, "topk is 0; it is at least 1"),
        ({"out": torch.zeros(3, 5, dtype=torch.int32)}, "out has shape"),
        ({"out": torch.zeros(3, 4)}, "out has dtype"),
    ],
)
def test_wrong_arguments_are_named(select, changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        call(select, **changes)


def test_what_the_reference_reads_and_what_cuda_takes():
    with pytest.raises(KernelArgumentError, match="starts has -1"):
        call(reference_topk_rows, starts=torch.tensor([0, -1, 0]))
    with pytest.raises(KernelArgumentError, match="ends has 10; there are 9 columns"):
        call(reference_topk_rows, ends=torch.tensor([0, 10, 0]))
    with pytest.raises(KernelArgumentError, match="topk is 4097; the CUDA kernel selects at most 4096"):
        call(cuda_topk_rows, topk=4097)
    with pytest.raises(KernelArgumentError, match="logits is on cpu"):
        call(cuda_topk_rows)


@pytest.mark.parametrize("missing", ["cuda.bindings", "cuda.pathfinder"])
def test_the_selector_of_a_device(missing, monkeypatch):
    installed = {"cuda.bindings", "cuda.pathfinder", "triton"}
    monkeypatch.setattr(selector, "_installed", lambda module: module in installed)
    gpu = torch.device("cuda", 0)
    assert default_selector(gpu, 2048) is cuda_topk_rows
    assert default_selector(gpu, 4097) is triton_topk.topk_rows
    assert default_selector(torch.device("cpu"), 8) is triton_topk.topk_rows
    installed.remove(missing)
    assert default_selector(gpu, 2048) is triton_topk.topk_rows
    installed.clear()
    assert default_selector(gpu, 2048) is reference_topk_rows


def chunks(rows, keys, rows_per_chunk=None, requests=None):
    return [
        (c.rows.start, c.rows.stop, c.keys.start, c.keys.stop, c.span)
        for c in row_chunks(rows, keys, rows_per_chunk=rows_per_chunk, requests=requests)
    ]


def test_chunks_of_one_range():
    assert chunks(10, 7) == [(0, 10, 0, 7, 7)]
    assert chunks(10, 7, 4) == [(0, 4, 0, 7, 7), (4, 8, 0, 7, 7), (8, 10, 0, 7, 7)]
    assert chunks(0, 7) == chunks(7, 0) == []


def test_chunks_of_requests():
    requests = [(0, 2, 0, 5), (2, 3, 5, 15), (3, 3, 15, 20), (4, 12, 20, 40), (12, 13, 40, 40), (13, 14, 40, 43)]
    assert chunks(16, 50, None, requests) == [(0, 3, 0, 15, 10), (4, 12, 20, 40, 20), (13, 14, 40, 43, 3)]
    assert chunks(16, 50, 2, requests) == [
        (0, 2, 0, 5, 5),
        (2, 3, 5, 15, 10),
        *((row, row + 2, 20, 40, 20) for row in range(4, 12, 2)),
        (13, 14, 40, 43, 3),
    ]
    parts = list(row_chunks(16, 50, rows_per_chunk=2, requests=requests))
    assert [(part.start, part.stop) for part in uncovered_rows(parts, 16)] == [(3, 4), (12, 13), (14, 16)]
    assert RowChunk(slice(0, 2), slice(3, 8), 5).shares_keys
    assert not RowChunk(slice(0, 2), slice(3, 8), 4).shares_keys


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=8), st.integers(1, 7))
def test_chunks_cover_every_row_with_keys_once(lengths, rows_per_chunk):
    requests, row, key = [], 0, 0
    for queries, keys in lengths:
        requests.append((row, row + queries, key, key + keys))
        row, key = row + queries, key + keys
    parts = list(row_chunks(row, key, rows_per_chunk=rows_per_chunk, requests=requests))
    seen = [r for part in parts for r in range(part.rows.start, part.rows.stop)]
    assert seen == [r for first, end, low, high in requests if low < high for r in range(first, end)]
    for part in parts:
        inside = [
            r for r in requests if r[0] < r[1] and r[2] < r[3] and r[0] < part.rows.stop and part.rows.start < r[1]
        ]
        assert part.num_rows <= rows_per_chunk
        assert part.span == max(high - low for _, _, low, high in inside)
        assert part.keys.start <= min(r[2] for r in inside)
        assert part.keys.stop >= max(r[3] for r in inside)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([(0, 2, 0, 5), (1, 3, 5, 6)], "rows ascend"),
        ([(0, 17, 0, 5)], "there are 16"),
        ([(3, 2, 0, 5)], "rows ascend"),
        ([(0, 2, 0, 51)], "there are 50 keys"),
        ([(0, 2, 5, 4)], "there are 50 keys"),
    ],
)
def test_wrong_requests_are_named(requests, message):
    with pytest.raises(KernelArgumentError, match=message):
        chunks(16, 50, None, requests)
