"""DeepSeek-V4's window and extra indices against plain loops, and the attention that they stand for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.index_transform import reference_paged, rows_to_requests
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.kernels.swa_indices import (
    IndexRows,
    reference_combine,
    reference_window,
)

requests_strategy = st.lists(
    st.integers(0, 6).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(rows, rows + 20))), max_size=4
)


def cumulative(counts):
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@settings(deadline=None)
@given(requests_strategy, st.integers(1, 9), st.integers(0, 2))
def test_window_positions_against_a_loop(requests, window, padding):
    expected = []
    for rows, context in requests:
        for position in range(context - rows, context):
            seen = list(range(max(0, position - window + 1), position + 1))
            expected.append((seen + [-1] * (window - len(seen)), len(seen)))
    expected += [([-1] * window, 0)] * padding
    cu_seqlens, seq_lens = cumulative([r for r, _ in requests]), int32([c for _, c in requests])
    result = reference_window(cu_seqlens, seq_lens, window, num_tokens=len(expected))
    assert result.indices.tolist() == [row for row, _ in expected]
    assert result.lengths.tolist() == [length for _, length in expected]
    assert result.indices.dtype == result.lengths.dtype == torch.int32


@settings(deadline=None)
@given(requests_strategy, st.integers(1, 9), st.integers(0, 50), st.integers(0, 3))
def test_window_rows_of_a_gathered_buffer_against_a_loop(requests, window, base, surplus):
    gathered = [min(context, rows + window - 1 + surplus) for rows, context in requests]
    bases = [base + sum(gathered[:i]) for i in range(len(gathered))]
    expected = []
    for (rows, context), held, first_row in zip(requests, gathered, bases, strict=True):
        for position in range(context - rows, context):
            seen = range(max(0, position - window + 1), position + 1)
            expected.append([first_row + p - (context - held) for p in seen] + [-1] * (window - len(seen)))
    result = reference_window(
        cumulative([r for r, _ in requests]),
        int32([c for _, c in requests]),
        window,
        num_tokens=len(expected),
        bases=int32(bases),
        gather_lens=int32(gathered),
    )
    assert result.indices.tolist() == expected


def test_window_slots_through_the_page_table():
    cu_seqlens, seq_lens = int32([0, 2, 3]), int32([5, 1])
    window = reference_window(cu_seqlens, seq_lens, 3, num_tokens=3)
    table = int32([[7, 2, 5], [4, -1, -1]])
    slots = reference_paged(window.indices, table, page_size=2, row_to_request=rows_to_requests(cu_seqlens, 3))
    # request 0: positions 1..3 and 2..4 in pages 7, 2, 5; request 1: position 0 in page 4
    assert slots.tolist() == [[15, 4, 5], [4, 5, 10], [8, -1, -1]]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_combining_against_a_loop(data):
    draw = data.draw
    tokens, width, extra_width = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 6))
    alignment = draw(st.sampled_from([1, 8, 128]))
    index = st.integers(-2, 40)
    swa = [[draw(index) for _ in range(width)] for _ in range(tokens)]
    extra = [[draw(index) for _ in range(extra_width)] for _ in range(tokens)]
    swa_lengths = [draw(st.integers(-1, width + 1)) for _ in range(tokens)]
    extra_lengths = [draw(st.integers(-1, extra_width + 1)) for _ in range(tokens)]
    offsets = draw(st.one_of(st.integers(0, 99), st.lists(st.integers(0, 99), min_size=tokens, max_size=tokens)))

    total = math.ceil((width + extra_width) / alignment) * alignment
    expected, lengths = [], []
    for row in range(tokens):
        offset = offsets if isinstance(offsets, int) else offsets[row]
        first = [max(i, -1) for i in swa[row][: max(0, swa_lengths[row])]]
        second = [i + offset if i >= 0 else -1 for i in extra[row][: max(0, extra_lengths[row])]]
        expected.append(first + second + [-1] * (total - len(first) - len(second)))
        lengths.append(len(first) + len(second))
    out = torch.full((tokens, total), 12345, dtype=torch.int32)
    result = reference_combine(
        IndexRows(int32(swa).reshape(tokens, width), int32(swa_lengths)),
        IndexRows(int32(extra).reshape(tokens, extra_width), int32(extra_lengths)),
        extra_offset=offsets if isinstance(offsets, int) else int32(offsets),
        alignment=alignment,
        out=out,
    )
    assert result.indices is out
    assert out.tolist() == expected
    assert result.lengths.tolist() == lengths


def test_combined_indices_attend_the_same_as_two_caches():
    made = torch.Generator().manual_seed(0)
    swa_kv, extra_kv, q = (torch.randn(*shape, generator=made) for shape in ((20, 24), (30, 24), (4, 2, 24)))
    swa = IndexRows(torch.randint(0, 20, (4, 6), dtype=torch.int32, generator=made), int32([6, 1, 0, 3]))
    extra = IndexRows(torch.randint(0, 30, (4, 9), dtype=torch.int32, generator=made), int32([9, 0, 0, 5]))
    combined = reference_combine(swa, extra, extra_offset=20)
    assert combined.indices.shape == (4, 128)
    one = reference_prefill(
        q, torch.cat([swa_kv, extra_kv]), combined.indices, scale=0.3, d_v=24, topk_length=combined.lengths
    )
    two = reference_prefill(
        q,
        swa_kv,
        swa.indices,
        scale=0.3,
        d_v=24,
        topk_length=swa.lengths,
        extra_kv=extra_kv,
        extra_indices=extra.indices,
        extra_topk_length=extra.lengths,
    )
    assert torch.allclose(one.out, two.out, atol=1e-6)
    assert torch.allclose(one.lse, two.lse, atol=1e-6)


ROWS = IndexRows(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference_window(int32([0, 2]), int32([2, 2]), 3, num_tokens=2), "seq_lens has shape"),
        (lambda: reference_window(int32([0, 3]), int32([2]), 3, num_tokens=3), "request has more queries"),
        (lambda: reference_window(int32([0, 2]), int32([2]), 0, num_tokens=2), "window is 0"),
        (
            lambda: reference_window(int32([0, 1]), int32([9]), 4, num_tokens=1, bases=int32([0])),
            "bases and gather_lens go together",
        ),
        (
            lambda: reference_window(
                int32([0, 1]), int32([9]), 4, num_tokens=1, bases=int32([0]), gather_lens=int32([3])
            ),
            r"gather_lens is \[3\]; the windows need \[4\]",
        ),
        (
            lambda: reference_combine(ROWS, IndexRows(ROWS.indices[:1], ROWS.lengths), extra_offset=0),
            "extra.indices",
        ),
        (
            lambda: reference_combine(IndexRows(ROWS.indices, ROWS.lengths[:1]), ROWS, extra_offset=0),
            "swa.lengths",
        ),
        (lambda: reference_combine(ROWS, ROWS, extra_offset=0, alignment=0), "alignment is 0"),
        (lambda: reference_combine(ROWS, ROWS, extra_offset=0, out=torch.zeros(2, 6)), "out has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
