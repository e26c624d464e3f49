"""Index transforms against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.index_transform import reference_paged, reference_ragged, request_slots, rows_to_requests

from .oracles import INT_MAX, INT_MIN, noncontiguous

BAD = [INT_MIN, -123456, -1, INT_MAX]


def loop_paged(topk, table, page_size, row_to_request, lengths):
    result = []
    for row, positions in enumerate(topk.tolist()):
        request = row if row_to_request is None else int(row_to_request[row])
        slots = []
        for position in positions:
            limit = len(table[0]) * page_size
            if lengths is not None:
                limit = min(limit, int(lengths[row]))
            page = -1
            if request >= 0 and 0 <= position < limit:
                page = int(table[request][position // page_size])
            slots.append(page * page_size + position % page_size if page >= 0 else -1)
        result.append(slots)
    return result


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_paged_against_a_loop(data):
    draw = data.draw
    requests, pages = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    page_size = draw(st.sampled_from([1, 2, 64]))
    rows, topk = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    position = st.one_of(st.integers(-3, pages * page_size + 3), st.sampled_from(BAD))
    indices = torch.tensor([[draw(position) for _ in range(topk)] for _ in range(rows)])
    indices = indices.reshape(rows, topk).to(draw(st.sampled_from([torch.int32, torch.int64])))
    entry = st.integers(-1, 1000)
    table = [[draw(entry) for _ in range(pages)] for _ in range(max(requests, rows))]
    of_row = draw(st.one_of(st.none(), st.lists(st.integers(-1, requests - 1), min_size=rows, max_size=rows)))
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(-2, 400), min_size=rows, max_size=rows)))
    result = reference_paged(
        indices,
        torch.tensor(table, dtype=torch.int32),
        page_size=page_size,
        row_to_request=None if of_row is None else torch.tensor(of_row, dtype=torch.int32),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
    )
    assert result.dtype == torch.int32
    expected = loop_paged(indices, table, page_size, of_row, lengths)
    assert result.tolist() == expected


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_ragged_against_a_loop(data):
    draw = data.draw
    rows, topk = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    position = st.one_of(st.integers(-3, 50), st.sampled_from(BAD[:3]))
    indices = torch.tensor([[draw(position) for _ in range(topk)] for _ in range(rows)], dtype=torch.int32)
    indices = indices.reshape(rows, topk)
    offsets = [draw(st.integers(0, 1000)) for _ in range(rows)]
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(-2, 60), min_size=rows, max_size=rows)))
    result = reference_ragged(
        indices,
        torch.tensor(offsets, dtype=torch.int32),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int64),
    )
    expected = [
        [p + offsets[row] if p >= 0 and (lengths is None or p < lengths[row]) else -1 for p in positions]
        for row, positions in enumerate(indices.tolist())
    ]
    assert result.tolist() == expected
    assert result.dtype == torch.int32


def test_rows_of_a_request_share_its_table_row_and_verify_rows_have_their_own():
    topk = torch.tensor([[0, 3], [2, -1], [1, 0]])
    table = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    of_row = rows_to_requests(torch.tensor([0, 2, 3]), 3)
    shared = reference_paged(topk, table, page_size=1, row_to_request=of_row)
    assert shared.tolist() == [[10, 13], [12, -1], [21, 20]]
    expanded = reference_paged(topk, table[of_row.long()], page_size=1)
    assert torch.equal(expanded, shared)


@pytest.mark.regression(13, "unassigned pages")
def test_positions_on_an_unassigned_page_have_no_slot():
    table = torch.tensor([[3, -1, 5]], dtype=torch.int32)
    slots = reference_paged(torch.arange(6).unsqueeze(0), table, page_size=2)
    assert slots.tolist() == [[6, 7, -1, -1, 10, 11]]


@pytest.mark.regression(15)
def test_a_large_int64_table_does_not_wrap():
    pages = torch.tensor([[2**31 // 64 - 1]])
    assert reference_paged(torch.tensor([[63]]), pages, page_size=64).item() == 2**31 - 1


def test_noncontiguous_tables_and_indices():
    topk, table = torch.tensor([[0, 3, 5], [2, -1, 7]]), torch.tensor([[1, 5, 2, 9], [4, 0, 7, 3]])
    dense = reference_paged(topk, table, page_size=2)
    assert torch.equal(reference_paged(noncontiguous(topk), noncontiguous(table), page_size=2), dense)


def test_slots_are_written_where_they_are_wanted():
    topk, table = torch.tensor([[0, 3, 5], [2, -1, 7]]), torch.tensor([[1, 5, 2, 9], [4, 0, 7, 3]])
    out = torch.full((2, 3), 77, dtype=torch.int32)
    given = {"page_size": 2, "lengths": torch.tensor([4, 8])}
    assert reference_paged(topk, table, **given, out=out) is out
    assert torch.equal(out, reference_paged(topk, table, **given))


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 3))
def test_rows_to_requests_against_a_loop(counts, padding):
    cu_seqlens = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    expected = [request for request, count in enumerate(counts) for _ in range(count)] + [-1] * padding
    result = rows_to_requests(cu_seqlens, len(expected))
    assert result.tolist() == expected
    assert result.dtype == torch.int32


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5), st.sampled_from([1, 4, 12]))
def test_request_slots_against_a_loop(lengths, page_size):
    table = torch.randperm(len(lengths) * 12, generator=torch.Generator().manual_seed(0)).view(len(lengths), 12)
    slots, cu_seqlens = request_slots(table, torch.tensor(lengths, dtype=torch.int32), page_size)
    expected = [
        int(table[request, p // page_size]) * page_size + p % page_size
        for request, length in enumerate(lengths)
        for p in range(length)
    ]
    assert slots.tolist() == expected
    assert cu_seqlens.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]


TOPK, TABLE = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference_paged(TOPK[0], TABLE, page_size=1), "topk_indices has shape"),
        (lambda: reference_paged(TOPK.float(), TABLE, page_size=1), "topk_indices has dtype float32"),
        (lambda: reference_paged(TOPK, TABLE[0], page_size=1), "page_table has shape"),
        (lambda: reference_paged(TOPK, TABLE, page_size=0), "page_size is 0"),
        (lambda: reference_paged(TOPK, TABLE, page_size=1), "page_table has 2 rows for 3 rows"),
        (lambda: reference_paged(TOPK, TABLE, page_size=1, row_to_request=torch.tensor([0, 1, 2])), "has 2; page_t"),
        (lambda: reference_paged(TOPK, TABLE, page_size=1, row_to_request=torch.tensor([0])), "row_to_request has"),
        (lambda: reference_paged(TOPK[:2], TABLE, page_size=1, lengths=torch.zeros(2)), "lengths has dtype"),
        (lambda: reference_paged(TOPK[:2], TABLE, page_size=1, out=TOPK), r"out has shape \[3, 4\]"),
        (lambda: reference_paged(TOPK[:2], TABLE, page_size=1, out=TOPK[:2].long()), "out has dtype int64"),
        (lambda: reference_paged(TOPK[:2], TABLE, page_size=1, out=TOPK.new_zeros(4, 2).t()), "out has strides"),
        (lambda: reference_ragged(TOPK, torch.zeros(2, dtype=torch.int32)), "offsets has shape"),
        (lambda: request_slots(TABLE, torch.tensor([5, 11]), 2), "seq_lens has 11 tokens; page_table holds 10"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
