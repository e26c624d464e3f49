"""The indexer's logits and top-k against a float64 oracle and a full sort."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels import indexer
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.indexer import (
    fold_weights,
    quantize,
    reference_logits,
    reference_paged_logits,
    reference_paged_topk,
    reference_topk,
)
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache, reference_read_codes, reference_write
from nsa_plugin.layouts import INDEXER_FP8

from .oracles import index_logits, noncontiguous, to_numpy, topk_by_full_sort


def case(rows, keys, heads, seed=0, dim=128):
    """fp8 queries and keys with folded weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    q, q_scale = quantize(torch.randn(rows, heads, dim, generator=generator), dim)
    k, k_scale = quantize(torch.randn(keys, dim, generator=generator), dim)
    weights = fold_weights(torch.randn(rows, heads, generator=generator), q_scale, dim**-0.5)
    return q, k, k_scale.squeeze(1), weights


def ranges(rows, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, keys + 1, (2, rows), generator=generator).sort(0).values.int()
    return bounds[0], bounds[1]


def oracle(q, k, k_scale, weights):
    scale = np.ones(len(k)) if k_scale is None else to_numpy(k_scale)
    return index_logits(to_numpy(q), to_numpy(k), scale, to_numpy(weights))


def oracle_topk(q, k, k_scale, weights, ks, ke, topk):
    # Ranked in float32, the precision of the contract's logits, so that ties are the same ones.
    logits = oracle(q, k, k_scale, weights).astype(np.float32)
    return [
        topk_by_full_sort(row, int(start), int(end), topk)
        for row, start, end in zip(logits, ks.tolist(), ke.tolist(), strict=True)
    ]


def as_lists(result):
    """Each row's positions; checks that -1 fills the rest."""
    rows = []
    for row in result.tolist():
        length = row.index(-1) if -1 in row else len(row)
        assert row[length:] == [-1] * (len(row) - length)
        rows.append(row[:length])
    return rows


@pytest.mark.parametrize("heads", [1, 4, 32, 64])
def test_logits_and_their_range(heads):
    q, k, k_scale, weights = case(7, 53, heads)
    ks, ke = ranges(7, 53)
    ke[3] = ks[3] - 1 if ks[3] else 0
    logits = reference_logits(q, k, k_scale, weights, ks, ke)
    assert logits.dtype == torch.float32
    expected = oracle(q, k, k_scale, weights)
    for row in range(7):
        outside = np.ones(53, bool)
        outside[int(ks[row]) : max(int(ks[row]), int(ke[row]))] = False
        expected[row, outside] = -math.inf
    np.testing.assert_allclose(to_numpy(logits), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantised_queries_and_keys(dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 8, 32, generator=generator).to(dtype)
    k = torch.randn(40, 32, generator=generator).to(dtype)
    weights = torch.randn(5, 8, generator=generator)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 40, dtype=torch.int32)
    logits = reference_logits(q, k, None, weights, ks, ke)
    np.testing.assert_allclose(to_numpy(logits), oracle(q, k, None, weights), rtol=1e-6, atol=1e-6)
    assert as_lists(reference_topk(q, k, None, weights, ks, ke, 9)) == oracle_topk(q, k, None, weights, ks, ke, 9)


def test_blocks_of_rows_and_keys_do_not_change_the_logits(monkeypatch):
    q, k, k_scale, weights = case(9, 70, 4)
    ks, ke = torch.zeros(9, dtype=torch.int32), torch.full((9,), 70, dtype=torch.int32)
    whole = reference_logits(q, k, k_scale, weights, ks, ke)
    monkeypatch.setattr(indexer, "SCRATCH_ROWS", 2)
    monkeypatch.setattr(indexer, "SCRATCH_ELEMENTS", 2 * 4 * 11)
    assert torch.equal(reference_logits(q, k, k_scale, weights, ks, ke), whole)


@pytest.mark.parametrize("topk", [1, 8, 64, 100])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 3, 4, 1000])
def test_topk_is_the_full_sort_s_for_any_chunk(topk, rows_per_chunk):
    q, k, k_scale, weights = case(11, 90, 16, seed=topk)
    ks, ke = ranges(11, 90, seed=topk)
    ks[0], ke[0] = 0, 90
    ke[5] = ks[5]
    result = reference_topk(q, k, k_scale, weights, ks, ke, topk, rows_per_chunk=rows_per_chunk)
    assert result.dtype == torch.int32
    assert result.shape == (11, topk)
    assert as_lists(result) == oracle_topk(q, k, k_scale, weights, ks, ke, topk)


def test_the_logits_buffer_is_no_larger_than_the_given_rows_and_seen_keys(monkeypatch):
    sizes = []
    scores = indexer._scores

    def record(*args):
        logits = scores(*args)
        sizes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(indexer, "_scores", record)
    q, k, k_scale, weights = case(10, 60, 2)
    ks = torch.tensor([0] * 5 + [20] * 3 + [0, 20], dtype=torch.int32)
    ke = torch.tensor([1, 2, 3, 4, 5, 56, 57, 58, 0, 60], dtype=torch.int32)  # row 8 sees none
    reference_topk(q, k, k_scale, weights, ks, ke, 4, rows_per_chunk=4)
    assert sizes == [(4, 4), (4, 58), (2, 40)]


def test_ties_go_to_the_lowest_positions_whatever_the_chunk():
    # One head and non-positive products: after the relu most logits are exactly 0.
    q = torch.ones(6, 1, 128).to(torch.float8_e4m3fn)
    k = -torch.ones(50, 128)
    k[[7, 30, 31]] = 1.0
    k = k.to(torch.float8_e4m3fn)
    weights = torch.ones(6, 1)
    ks = torch.tensor([0, 5, 8, 29, 32, 40], dtype=torch.int32)
    ke = torch.full((6,), 50, dtype=torch.int32)
    expected = [[0, 1, 7, 30, 31], [0, 1, 2, 25, 26], [0, 1, 2, 22, 23], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    for chunk in (1, 2, None):
        result = reference_topk(q, k, None, weights, ks, ke, 5, rows_per_chunk=chunk)
        assert as_lists(result) == [*expected, [0, 1, 2, 3, 4]]


def test_negative_weights_rank_unseen_keys_nowhere():
    # Every logit in range is below the 0 that an unmasked key would have.
    q, k, k_scale, weights = case(3, 30, 4)
    ks, ke = torch.tensor([10, 0, 29], dtype=torch.int32), torch.tensor([14, 3, 30], dtype=torch.int32)
    result = reference_topk(q, k, k_scale, -weights.abs(), ks, ke, 8)
    assert as_lists(result) == [[0, 1, 2, 3], [0, 1, 2], [0]]


def test_poisoned_keys_outside_the_range_have_no_influence():
    q, k, k_scale, weights = case(4, 40, 8)
    ks = torch.full((4,), 10, dtype=torch.int32)
    ke = torch.tensor([20, 25, 30, 10], dtype=torch.int32)
    clean = reference_topk(q, k, k_scale, weights, ks, ke, 6)
    outside = [*range(10), *range(30, 40)]
    k.view(torch.uint8)[outside] = 0x7F
    k_scale[outside] = math.nan
    assert torch.equal(reference_topk(q, k, k_scale, weights, ks, ke, 6), clean)
    assert torch.equal(reference_topk(q, k, k_scale, weights, ks, ke, 6, rows_per_chunk=1), clean)


def test_nan_logits_are_the_last_choice_and_still_inside_the_range():
    q, k, k_scale, weights = case(1, 20, 8)
    k_scale[[3, 4]] = math.nan
    ks, ke = torch.tensor([2], dtype=torch.int32), torch.tensor([12], dtype=torch.int32)
    assert as_lists(reference_topk(q, k, k_scale, weights, ks, ke, 8)) == [[0, 3, 4, 5, 6, 7, 8, 9]]
    assert as_lists(reference_topk(q, k, k_scale, weights, ks, ke, 16)) == [list(range(10))]


def test_output_buffer_is_overwritten_and_strides_are_accepted():
    q, k, k_scale, weights = case(5, 40, 4)
    ks, ke = ranges(5, 40)
    out = torch.full((5, 12), 999, dtype=torch.int32)
    result = reference_topk(
        noncontiguous(q.float()),
        noncontiguous(k.float()),
        noncontiguous(k_scale),
        noncontiguous(weights),
        noncontiguous(ks),
        noncontiguous(ke),
        12,
        out=out,
    )
    assert result is out
    assert torch.equal(out, reference_topk(q, k, k_scale, weights, ks, ke, 12))


@pytest.mark.parametrize(("rows", "keys"), [(0, 10), (3, 0), (0, 0)])
def test_empty_inputs(rows, keys):
    q, k, k_scale, weights = case(rows, keys, 4)
    zeros = torch.zeros(rows, dtype=torch.int32)
    assert reference_logits(q, k, k_scale, weights, zeros, zeros).shape == (rows, keys)
    assert reference_topk(q, k, k_scale, weights, zeros, zeros, 5).tolist() == [[-1] * 5] * rows


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 50), st.integers(1, 7), st.integers(0, 999))
def test_topk_properties(rows, keys, topk, chunk, seed):
    q, k, k_scale, weights = case(rows, keys, 2, seed=seed)
    ks, ke = ranges(rows, keys, seed=seed)
    result = reference_topk(q, k, k_scale, weights, ks, ke, topk, rows_per_chunk=chunk)
    logits = oracle(q, k, k_scale, weights)
    for row, chosen in enumerate(as_lists(result)):
        length = int(ke[row] - ks[row])
        assert len(chosen) == min(topk, length)
        assert chosen == sorted(set(chosen))
        assert all(0 <= position < length for position in chosen)
        seen = logits[row, int(ks[row]) : int(ke[row])]
        left_out = np.delete(seen, chosen)
        if len(left_out) and chosen:
            assert seen[chosen].min() >= left_out.max() - 1e-6


def paged_case(lengths, next_n, heads, page_size=64, seed=0):
    """A cache with NaN everywhere but in the requests' tokens, and those tokens' keys by request."""
    generator = torch.Generator().manual_seed(seed)
    pages = max(1, max(-(-length // page_size) for length in lengths)) + 1
    order = torch.randperm(len(lengths) * pages, generator=generator)
    table = order.view(len(lengths), pages).int()
    memory = torch.full((len(order), INDEXER_FP8.page_bytes(page_size)), 0x7F, dtype=torch.uint8)
    cache = open_cache(memory, INDEXER_FP8, page_size)
    keys = []
    for request, length in enumerate(lengths):
        position = torch.arange(max(0, length))
        slots = table[request, position // page_size].long() * page_size + position % page_size
        reference_write(cache, torch.randn(len(slots), 128, generator=generator), slots, power_of_two_scales=True)
        keys.append(reference_read_codes(cache, slots))
        table[request, -(-max(0, length) // page_size) :] = -1  # pages behind a request are not assigned
    q, q_scale = quantize(torch.randn(len(lengths), next_n, heads, 128, generator=generator))
    gates = torch.randn(len(lengths) * next_n, heads, generator=generator)
    return q, cache, fold_weights(gates, q_scale.flatten(0, 1), 0.01), table, keys


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("rows_per_chunk", [None, 1, 2])
@pytest.mark.parametrize("explicit", [False, True])
def test_paged_topk(next_n, rows_per_chunk, explicit):
    lengths = [130, 0, 2, 64, -1]
    q, cache, weights, table, keys = paged_case(lengths, next_n, heads=8)
    limits = [[max(0, length - next_n + j + 1) for j in range(next_n)] for length in lengths]
    seq_lens = torch.tensor(limits if explicit else lengths, dtype=torch.int32)
    result = reference_paged_topk(q, cache, weights, seq_lens, table, 33, rows_per_chunk=rows_per_chunk)
    logits = reference_paged_logits(q, cache, weights, seq_lens, table, max_len=140)
    assert result.shape == (5 * next_n, 33)
    assert logits.shape == (5 * next_n, 140)
    for request in range(5):
        k, k_scale = keys[request]
        rows = slice(request * next_n, (request + 1) * next_n)
        ke = torch.tensor(limits[request])
        expected = oracle_topk(q[request], k, k_scale.squeeze(1), weights[rows], torch.zeros_like(ke), ke, 33)
        assert as_lists(result[rows]) == expected
        scores = oracle(q[request], k, k_scale.squeeze(1), weights[rows])
        for row, limit in enumerate(limits[request]):
            got = to_numpy(logits[rows][row])
            np.testing.assert_allclose(got[:limit], scores[row, :limit], rtol=1e-6, atol=1e-7)
            assert (got[limit:] == -math.inf).all()


def test_paged_topk_into_a_buffer_and_with_no_requests():
    q, cache, weights, table, _ = paged_case([70, 5], 1, heads=4)
    out = torch.full((2, 9), 5, dtype=torch.int32)
    seq_lens = torch.tensor([70, 0])
    assert reference_paged_topk(q, cache, weights, seq_lens, table, 9, out=out) is out
    assert torch.equal(out, reference_paged_topk(q, cache, weights, seq_lens, table, 9))
    assert (out[1] == -1).all()
    none = reference_paged_topk(q[:0], cache, weights[:0], seq_lens[:0], table[:0], 9)
    assert none.shape == (0, 9)


def test_quantised_values_and_power_of_two_scales():
    values = torch.randn(4, 3, 256, generator=torch.Generator().manual_seed(0)) * 7
    for ue8m0 in (True, False):
        codes, scales = quantize(values, ue8m0=ue8m0)
        assert codes.shape == values.shape
        assert codes.dtype == torch.float8_e4m3fn
        assert scales.shape == (4, 3, 2)
        amax = values.view(4, 3, 2, 128).abs().amax(-1)
        least = amax / 448
        if ue8m0:
            assert torch.equal(scales, torch.exp2(scales.log2().round()))
            assert ((scales >= least) & (scales < 2 * least)).all()
        else:
            assert torch.equal(scales, least)
        error = (codes.float().view(4, 3, 2, 128) * scales.unsqueeze(-1) - values.view(4, 3, 2, 128)).abs()
        assert (error <= values.view(4, 3, 2, 128).abs() / 16 + scales.unsqueeze(-1) * 2.0**-10).all()


def test_folded_weights():
    weights, scale = torch.tensor([[2.0, -3.0]], dtype=torch.bfloat16), torch.tensor([[0.5, 4.0]])
    assert fold_weights(weights, scale, 0.25).tolist() == [[0.25, -3.0]]
    assert fold_weights(weights, scale.unsqueeze(-1), 0.25).dtype == torch.float32


def ragged(**changes):
    q, k, k_scale, weights = case(3, 9, 2)
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    arguments = {"q": q, "k": k, "k_scale": k_scale, "weights": weights, "ks": bounds, "ke": bounds + 3, "topk": 4}
    return reference_topk(**(arguments | changes))


def paged(**changes):
    q, cache, weights, table, _ = paged_case([9, 5], 1, heads=2)
    arguments = {
        "q": q,
        "cache": cache,
        "weights": weights,
        "seq_lens": torch.tensor([9, 5]),
        "page_table": table,
        "topk": 4,
    }
    return reference_paged_topk(**(arguments | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ragged(q=torch.zeros(3, 128)), "indexer_topk: q has shape"),
        (lambda: ragged(q=torch.zeros(3, 2, 128, dtype=torch.int8)), "q has dtype int8; allowed: float8_e4m3fn"),
        (lambda: ragged(k=torch.zeros(9, 64)), "k has shape"),
        (lambda: ragged(k_scale=torch.zeros(9, 1)), "k_scale has shape"),
        (lambda: ragged(weights=torch.zeros(3, 2, dtype=torch.bfloat16)), "weights has dtype bfloat16"),
        (lambda: ragged(ks=torch.tensor([0, -1, 0])), "ks has -1"),
        (lambda: ragged(ke=torch.tensor([3, 10, 3])), "ke has 10; there are 9 keys"),
        (lambda: ragged(ke=torch.tensor([3, 3])), "ke has shape"),
        (lambda: ragged(topk=0), "topk is 0"),
        (lambda: ragged(rows_per_chunk=0), "rows_per_chunk is 0"),
        (lambda: ragged(out=torch.zeros(3, 4)), "out has dtype"),
        (lambda: paged(q=torch.zeros(2, 1, 2, 64)), "q has 64 values a head; the cache's keys have 128"),
        (lambda: paged(cache=allocate_cache("v32_fp8", 1, 64)), "cache has layout v32_fp8; expected indexer_fp8"),
        (lambda: paged(weights=torch.zeros(3, 2)), "weights has shape"),
        (lambda: paged(seq_lens=torch.tensor([9, 129])), "seq_lens has a row of 129 keys; page_table holds 128"),
        (lambda: paged(seq_lens=torch.tensor([[9, 5]])), "seq_lens has shape"),
        (lambda: paged(page_table=torch.zeros(2, 1)), "page_table has dtype"),
        (lambda: paged(rows_per_chunk=-1), "rows_per_chunk is -1"),
        (lambda: quantize(torch.zeros(3, 100)), "values has 100 in a row; block is 128"),
        (lambda: fold_weights(torch.zeros(3, 2), torch.zeros(3, 3), 1.0), "q_scale has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()


def test_paged_logits_need_room_for_every_row():
    q, cache, weights, table, _ = paged_case([9, 5], 1, heads=2)
    with pytest.raises(KernelArgumentError, match="max_len is 8; a row sees 9 keys"):
        reference_paged_logits(q, cache, weights, torch.tensor([9, 5]), table, max_len=8)
