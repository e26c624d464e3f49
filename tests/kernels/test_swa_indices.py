"""DeepSeek-V4's sliding windows against a plain loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.index_transform import reference_paged, rows_to_requests
from nsa_plugin.kernels.swa_indices import reference_window

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


def test_window_slots_through_the_page_table():
    cu_seqlens, seq_lens = int32([0, 2, 3]), int32([5, 1])
    window = reference_window(cu_seqlens, seq_lens, 3, num_tokens=3)
    table = int32([[7, 2, 5], [4, -1, -1]])
    slots = reference_paged(window.indices, table, page_size=2, row_to_request=rows_to_requests(cu_seqlens, 3))
    # request 0: positions 1..3 and 2..4 in pages 7, 2, 5; request 1: position 0 in page 4
    assert slots.tolist() == [[15, 4, 5], [4, 5, 10], [8, -1, -1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference_window(int32([0, 2]), int32([2, 2]), 3, num_tokens=2), "seq_lens has shape"),
        (lambda: reference_window(int32([0, 3]), int32([2]), 3, num_tokens=3), "request has more queries"),
        (lambda: reference_window(int32([0, 2]), int32([2]), 0, num_tokens=2), "window is 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
