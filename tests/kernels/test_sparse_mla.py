"""Sparse MLA against a float64 loop over rows, heads and keys, on every kind of cache and index."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_plugin.kernels import sparse_mla
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache, reference_read, reference_write
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.layouts import Fp8Layout, get_layout

from .oracles import HEAD_COUNTS, INT_MAX, INT_MIN, noncontiguous, sparse_attention, to_numpy

INVALID = [INT_MIN, -123456, -1, "s_kv", INT_MAX]


def make_q(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_indices(rows, topk, s_kv, seed=0, invalid=0.3):
    """Distinct rows in random order, a part of them replaced by every kind of invalid index."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, max(topk, s_kv), generator=generator).argsort(1)[:, :topk]
    candidates = torch.tensor([s_kv if value == "s_kv" else value for value in INVALID])
    bad = candidates[torch.randint(len(candidates), (rows, topk), generator=generator)]
    drop = torch.rand(rows, topk, generator=generator) < invalid
    return torch.where(drop | (order >= s_kv), bad, order).int()


def poison_unused(kv, *index_lists):
    """NaN in every row that no valid entry names."""
    used = {int(i) for rows in index_lists for row in rows for i in row if 0 <= int(i) < len(kv)}
    kv[[row for row in range(len(kv)) if row not in used]] = math.nan
    return kv


def cut(indices, lengths):
    return [row[: max(0, int(length))] for row, length in zip(indices.tolist(), lengths, strict=True)]


def check(result, expected, atol=2e-5):
    out, max_logits, lse = expected
    np.testing.assert_allclose(to_numpy(result.out), out, atol=atol, rtol=1e-4)
    np.testing.assert_allclose(to_numpy(result.lse), lse, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(to_numpy(result.max_logits), max_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize(("tokens", "s_kv", "topk"), [(3, 95, 70), (1, 9, 13)])
def test_prefill_over_rows(heads, tokens, s_kv, topk):
    q, kv = make_q(tokens, heads, 24), make_q(s_kv, 24, seed=1)
    indices = make_indices(tokens, topk, s_kv)
    poison_unused(kv, indices.tolist())
    result = reference_prefill(q, kv, indices, scale=0.3, d_v=16)
    assert result.out.dtype == q.dtype
    check(result, sparse_attention(to_numpy(q), [(to_numpy(kv), indices.tolist())], 0.3, 16))


@pytest.mark.parametrize("d_qk", [576, 512])
def test_prefill_at_the_real_widths_in_bfloat16(d_qk):
    q, kv = make_q(4, 8, d_qk, dtype=torch.bfloat16), make_q(130, d_qk, seed=1, dtype=torch.bfloat16)
    indices = make_indices(4, 128, 130)
    poison_unused(kv, indices.tolist())
    result = reference_prefill(q, kv, indices, scale=d_qk**-0.5, out_dtype=torch.float32)
    check(result, sparse_attention(to_numpy(q), [(to_numpy(kv), indices.tolist())], d_qk**-0.5, 512))
    rounded = reference_prefill(q, kv, indices, scale=d_qk**-0.5)
    assert rounded.out.dtype == torch.bfloat16
    assert torch.equal(rounded.out, result.out.bfloat16())
    assert rounded.lse.dtype == rounded.max_logits.dtype == torch.float32


def test_units_on_one_key_and_on_equal_keys():
    q, kv = torch.full((1, 1, 4), 2.0), torch.full((3, 4), 0.5)
    one = reference_prefill(q, kv, torch.tensor([[1, -1]]), scale=0.25, d_v=4)
    assert one.max_logits.item() == one.lse.item() == 1.0  # 0.25 * 4 * 2 * 0.5, natural log of one weight
    assert torch.equal(one.out[0, 0], kv[0])
    three = reference_prefill(q, kv, torch.tensor([[0, 1, 2]]), scale=0.25, d_v=4)
    assert three.max_logits.item() == 1.0
    assert three.lse.item() == pytest.approx(1.0 + math.log(3.0), abs=1e-6)
    twice = reference_prefill(q, kv, torch.tensor([[1, 1]]), scale=0.25, d_v=4)
    assert twice.lse.item() == pytest.approx(1.0 + math.log(2.0), abs=1e-6)


def test_attention_sinks_scale_the_output_and_leave_the_statistics():
    heads = 6
    q, kv = make_q(5, heads, 24), make_q(40, 24, seed=1)
    indices = make_indices(5, 30, 40)
    indices[2] = -1  # an empty row, beside sinks of both infinities
    sink = torch.tensor([math.inf, -math.inf, 0.0, 3.0, -2.0, 80.0])
    result = reference_prefill(q, kv, indices, scale=0.3, d_v=16, attn_sink=sink)
    without = reference_prefill(q, kv, indices, scale=0.3, d_v=16)
    expected = sparse_attention(to_numpy(q), [(to_numpy(kv), indices.tolist())], 0.3, 16, to_numpy(sink))
    check(result, expected)
    assert torch.equal(result.lse, without.lse)
    assert torch.equal(result.max_logits, without.max_logits)
    assert (result.out[:, 0] == 0).all()
    assert torch.equal(result.out[:, 1], without.out[:, 1])


@pytest.mark.parametrize("sink", [None, math.inf, -math.inf, 1.0])
def test_rows_without_a_valid_key(sink):
    q, kv = make_q(3, 2, 24), torch.full((8, 24), math.nan)
    bad = [8 if value == "s_kv" else value for value in INVALID]
    indices = torch.tensor([[-1] * 5, bad, bad[::-1]], dtype=torch.int32)
    sinks = None if sink is None else torch.full((2,), sink)
    result = reference_prefill(q, kv, indices, scale=1.0, d_v=16, attn_sink=sinks)
    assert (result.out == 0).all()
    assert (result.lse == math.inf).all()
    assert (result.max_logits == -math.inf).all()


@pytest.mark.regression(14)
def test_lengths_cut_a_row_even_where_valid_indices_follow():
    lengths = [0, 1, 30, 13, 99, -5]
    q, kv = make_q(6, 3, 24), make_q(64, 24, seed=1)
    indices = make_indices(6, 30, 64, invalid=0.1)
    counted = cut(indices, lengths)
    poison_unused(kv, counted)
    topk_length = torch.tensor(lengths, dtype=torch.int32)
    result = reference_prefill(q, kv, indices, scale=0.3, d_v=16, topk_length=topk_length)
    check(result, sparse_attention(to_numpy(q), [(to_numpy(kv), counted)], 0.3, 16))
    assert not result.out.isnan().any()
    assert (result.lse[[0, 5]] == math.inf).all()


@pytest.mark.parametrize("sink", [False, True])
def test_an_extra_cache_is_attended_with_the_first(sink):
    q = make_q(4, 3, 24)
    kv, extra = make_q(20, 24, seed=1), make_q(33, 24, seed=2)
    indices, extra_indices = make_indices(4, 9, 20), make_indices(4, 21, 33, seed=5)
    lengths, extra_lengths = [9, 0, 4, 0], [21, 7, 0, 0]
    main, second = cut(indices, lengths), cut(extra_indices, extra_lengths)
    poison_unused(kv, main)
    poison_unused(extra, second)
    sinks = make_q(3, seed=7) if sink else None
    result = reference_prefill(
        q,
        kv,
        indices,
        scale=0.3,
        d_v=16,
        topk_length=torch.tensor(lengths),
        attn_sink=sinks,
        extra_kv=extra,
        extra_indices=extra_indices,
        extra_topk_length=torch.tensor(extra_lengths),
    )
    scopes = [(to_numpy(kv), main), (to_numpy(extra), second)]
    check(result, sparse_attention(to_numpy(q), scopes, 0.3, 16, None if sinks is None else to_numpy(sinks)))


def filled_cache(layout, num_pages, page_size, used_slots, seed):
    """A cache whose every byte is NaN but for the used slots; and its rows as they read back."""
    spec = get_layout(layout)
    if isinstance(spec, Fp8Layout):
        memory = torch.full((num_pages, spec.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
        cache = open_cache(memory, layout, page_size)
    else:
        cache = open_cache(torch.full((num_pages, page_size, 576), math.nan, dtype=torch.bfloat16), layout)
    slots = torch.tensor(sorted(used_slots), dtype=torch.int64)
    reference_write(cache, make_q(len(slots), cache.dim, seed=seed), slots)
    return cache, reference_read(cache, torch.arange(cache.num_slots), dtype=torch.float64).numpy()


def named(indices, num_slots):
    return {int(i) for row in indices for i in row if 0 <= int(i) < num_slots}


@pytest.mark.parametrize("heads", [1, 7, 16])
@pytest.mark.parametrize(
    ("layout", "page_size"), [("bf16", 16), ("v32_fp8", 64), ("v32_fp8", 1), ("v4_fp8", 64), ("v4_fp8", 256)]
)
def test_prefill_straight_from_a_paged_cache(layout, page_size, heads):
    num_pages = max(2, 96 // page_size)
    num_slots = num_pages * page_size
    indices = make_indices(3, 37, num_slots)
    cache, rows = filled_cache(layout, num_pages, page_size, named(indices.tolist(), num_slots), seed=1)
    q = make_q(3, heads, cache.dim, dtype=torch.bfloat16)
    scale = cache.dim**-0.5
    result = reference_prefill(q, cache, indices, scale=scale, out_dtype=torch.float32)
    check(result, sparse_attention(to_numpy(q), [(rows, indices.tolist())], scale, 512))


@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("per_query", [False, True])
def test_v4_decode_with_window_compressed_cache_lengths_and_sink(heads, s_q, per_query):
    batch = 2
    window = make_indices(batch * s_q, 32, 2 * 256)
    selected = make_indices(batch * s_q, 51, 6 * 64, seed=4)
    shape = (batch, s_q) if per_query else (batch, 1)
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(0, 33, shape, generator=generator)
    extra_lengths = torch.randint(0, 52, shape, generator=generator)
    lengths[0, 0] = extra_lengths[0, 0] = 0
    main = cut(window, lengths.expand(batch, s_q).flatten().tolist())
    second = cut(selected, extra_lengths.expand(batch, s_q).flatten().tolist())
    cache, rows = filled_cache("v4_fp8", 2, 256, named(main, 512), seed=1)
    extra_cache, extra_rows = filled_cache("v4_fp8", 6, 64, named(second, 384), seed=2)
    q, sink = make_q(batch, s_q, heads, 512), make_q(heads, seed=9)
    sink[0] = math.inf

    result = reference_decode(
        q,
        cache,
        window.view(batch, s_q, -1),
        scale=0.05,
        attn_sink=sink,
        extra_cache=extra_cache,
        topk_length=(lengths if per_query else lengths[:, 0]).int(),
        extra_indices=selected.view(batch, s_q, -1),
        extra_topk_length=(extra_lengths if per_query else extra_lengths[:, 0]).int(),
    )
    flat_q = to_numpy(q).reshape(batch * s_q, heads, 512)
    out, _, lse = sparse_attention(flat_q, [(rows, main), (extra_rows, second)], 0.05, 512, to_numpy(sink))
    assert result.out.shape == (batch, s_q, heads, 512)
    assert result.lse.shape == (batch, heads, s_q)
    np.testing.assert_allclose(to_numpy(result.out).reshape(out.shape), out, atol=2e-5, rtol=1e-4)
    lse = lse.reshape(batch, s_q, heads).transpose(0, 2, 1)
    np.testing.assert_allclose(to_numpy(result.lse), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
def test_decode_is_prefill_of_the_same_rows(layout):
    indices = make_indices(6, 40, 128)
    cache, _ = filled_cache(layout, 2, 64, named(indices.tolist(), 128), seed=1)
    q = make_q(6, 20, 576)
    prefill = reference_prefill(q, cache, indices, scale=0.04)
    decode = reference_decode(q.view(2, 3, 20, 576), cache, indices.view(2, 3, 40), scale=0.04)
    assert torch.equal(decode.out.view(6, 20, 512), prefill.out)
    assert torch.equal(decode.lse.transpose(1, 2).reshape(6, 20), prefill.lse)


def test_rows_with_a_head_dimension_and_indices_with_one():
    q, kv, indices = make_q(3, 2, 24), make_q(30, 24, seed=1), make_indices(3, 10, 30)
    flat = reference_prefill(q, kv, indices, scale=0.3, d_v=16)
    headed = reference_prefill(q, kv.unsqueeze(1), indices.unsqueeze(1).long(), scale=0.3, d_v=16)
    assert torch.equal(flat.out, headed.out)


def test_noncontiguous_inputs_and_outputs():
    q, kv, indices = make_q(4, 3, 24), make_q(30, 24, seed=1), make_indices(4, 10, 30)
    lengths, sink = torch.tensor([10, 3, 0, 7]), make_q(3, seed=3)
    dense = reference_prefill(q, kv, indices, scale=0.3, d_v=16, topk_length=lengths, attn_sink=sink)
    out = noncontiguous(torch.zeros(4, 3, 16))
    strided = reference_prefill(
        noncontiguous(q),
        noncontiguous(kv),
        noncontiguous(indices),
        scale=0.3,
        d_v=16,
        topk_length=noncontiguous(lengths),
        attn_sink=noncontiguous(sink),
        out=out,
    )
    assert strided.out is out
    assert torch.allclose(out, dense.out, atol=1e-6)
    assert torch.allclose(strided.lse, dense.lse, atol=1e-6)

    cache, _ = filled_cache("bf16", 2, 16, range(32), seed=1)
    q = make_q(2, 2, 3, 576)
    indices = make_indices(4, 10, 32).view(2, 2, 10)
    dense = reference_decode(q, cache, indices, scale=0.05)
    out = noncontiguous(torch.zeros(2, 2, 3, 512))
    strided = reference_decode(noncontiguous(q), cache, noncontiguous(indices), scale=0.05, out=out)
    assert strided.out is out
    assert torch.allclose(out, dense.out, atol=1e-6)


def test_the_chunk_size_does_not_change_the_result(monkeypatch):
    q, kv, indices = make_q(9, 3, 24), make_q(50, 24, seed=1), make_indices(9, 20, 50)
    indices[4] = -1
    whole = reference_prefill(q, kv, indices, scale=0.3, d_v=16)
    for rows in (1, 2, 5):
        monkeypatch.setattr(sparse_mla, "GATHER_BYTES", 4 * 24 * 20 * rows)
        chunked = reference_prefill(q, kv, indices, scale=0.3, d_v=16)
        assert torch.allclose(chunked.out, whole.out, atol=1e-6)
        assert torch.allclose(chunked.lse, whole.lse, atol=1e-6)
        assert torch.equal(chunked.out[4], torch.zeros(3, 16))


def test_large_logits_do_not_overflow():
    q, kv = torch.full((1, 2, 8), 100.0), torch.full((4, 8), 100.0)
    kv[2] = -100.0
    result = reference_prefill(q, kv, torch.tensor([[0, 1, 2]]), scale=1.0, d_v=8)
    assert result.lse[0, 0].item() == pytest.approx(80000.0 + math.log(2.0), rel=1e-6)
    assert torch.allclose(result.out, torch.full((1, 2, 8), 100.0))


@pytest.mark.parametrize(
    ("tokens", "heads", "s_kv", "topk"), [(0, 4, 10, 5), (3, 4, 0, 5), (3, 4, 10, 0), (0, 4, 0, 0), (3, 0, 10, 5)]
)
def test_empty_inputs(tokens, heads, s_kv, topk):
    indices = torch.zeros(tokens, topk, dtype=torch.int32)
    result = reference_prefill(torch.ones(tokens, heads, 24), torch.ones(s_kv, 24), indices, scale=1.0, d_v=16)
    assert result.out.shape == (tokens, heads, 16)
    assert (result.out == 0).all()
    assert (result.lse == math.inf).all()
    assert (result.max_logits == -math.inf).all()


@pytest.mark.parametrize(("batch", "s_q"), [(0, 1), (2, 0)])
def test_empty_decode(batch, s_q):
    q, indices = torch.ones(batch, s_q, 4, 576), torch.zeros(batch, s_q, 8, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    result = reference_decode(q, allocate_cache("v32_fp8", 1, 64), indices, scale=1.0, topk_length=lengths)
    assert result.out.shape == (batch, s_q, 4, 512)
    assert result.lse.shape == (batch, 4, s_q)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from(HEAD_COUNTS),
    tokens=st.integers(1, 4),
    s_kv=st.integers(1, 40),
    topk=st.integers(1, 50),
    split=st.integers(0, 50),
    seed=st.integers(0, 999),
)
def test_order_split_and_heads_do_not_matter(heads, tokens, s_kv, topk, split, seed):
    q, kv = make_q(tokens, heads, 12, seed=seed), make_q(s_kv, 12, seed=seed + 1)
    indices = make_indices(tokens, topk, s_kv, seed=seed)
    base = reference_prefill(q, kv, indices, scale=0.3, d_v=8)
    shuffled = reference_prefill(q, kv, indices.flip(1), scale=0.3, d_v=8)
    halves = reference_prefill(
        q, kv, indices[:, :split], scale=0.3, d_v=8, extra_kv=kv, extra_indices=indices[:, split:]
    )
    last_head = reference_prefill(q[:, -1:], kv, indices, scale=0.3, d_v=8)
    for other, expected in ((shuffled.out, base.out), (halves.out, base.out), (last_head.out, base.out[:, -1:])):
        assert torch.allclose(other, expected, atol=1e-5)
    assert torch.allclose(halves.lse, base.lse, atol=1e-5)


def prefill(**changes):
    arguments = {
        "q": torch.zeros(3, 2, 24),
        "kv": torch.zeros(9, 24),
        "indices": torch.zeros(3, 5, dtype=torch.int32),
        "scale": 1.0,
        "d_v": 16,
    }
    return reference_prefill(**(arguments | changes))


def decode(**changes):
    arguments = {
        "q": torch.zeros(2, 1, 2, 576),
        "cache": allocate_cache("v32_fp8", 1, 4),
        "indices": torch.zeros(2, 1, 5, dtype=torch.int32),
        "scale": 1.0,
    }
    return reference_decode(**(arguments | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prefill(q=torch.zeros(3, 24)), "sparse_mla_prefill: q has shape"),
        (lambda: prefill(q=torch.zeros(3, 2, 24, dtype=torch.int32)), "q has dtype int32"),
        (lambda: prefill(kv=torch.zeros(9, 25)), r"kv has shape \[9, 25\]; expected \[s_kv, 24\]"),
        (lambda: prefill(kv=torch.zeros(9, 2, 24)), "kv has shape"),
        (lambda: prefill(kv=torch.zeros(9, 24, dtype=torch.uint8)), "kv has dtype uint8"),
        (lambda: prefill(kv=allocate_cache("bf16", 1, 4)), "kv has rows of 576 values; q has 24"),
        (lambda: prefill(indices=torch.zeros(4, 5, dtype=torch.int32)), "indices has shape"),
        (lambda: prefill(indices=torch.zeros(3, 5)), "indices has dtype float32"),
        (lambda: prefill(topk_length=torch.zeros(4, dtype=torch.int32)), "topk_length has shape"),
        (lambda: prefill(attn_sink=torch.zeros(3)), "attn_sink has shape"),
        (lambda: prefill(attn_sink=torch.zeros(2, dtype=torch.bfloat16)), "attn_sink has dtype bfloat16"),
        (lambda: prefill(d_v=25), "d_v is 25"),
        (lambda: prefill(d_v=0), "d_v is 0"),
        (lambda: prefill(out=torch.zeros(3, 2, 24)), "out has shape"),
        (lambda: prefill(out=torch.zeros(3, 2, 16), out_dtype=torch.bfloat16), "out_dtype"),
        (lambda: prefill(extra_kv=torch.zeros(9, 24)), "extra_indices is missing"),
        (lambda: prefill(extra_indices=torch.zeros(3, 5, dtype=torch.int32)), "extra_indices is given without"),
        (lambda: prefill(extra_topk_length=torch.zeros(3)), "extra_topk_length is given without extra_kv"),
        (lambda: prefill(kv=torch.zeros(9, 24, device="meta")), "kv is on meta; expected cpu"),
        (lambda: decode(q=torch.zeros(2, 2, 576)), "sparse_mla_decode: q has shape"),
        (lambda: decode(q=torch.zeros(2, 1, 2, 512)), "cache has rows of 576 values; q has 512"),
        (lambda: decode(indices=torch.zeros(2, 5, dtype=torch.int32)), "indices has shape"),
        (lambda: decode(extra_cache=allocate_cache("v4_fp8", 1, 4)), "extra_indices is missing beside extra_cache"),
        (
            lambda: decode(
                extra_cache=allocate_cache("v4_fp8", 1, 4), extra_indices=torch.zeros(2, 1, 5, dtype=torch.int32)
            ),
            "extra_cache has rows of 512 values; q has 576",
        ),
        (lambda: decode(topk_length=torch.zeros(3, dtype=torch.int32)), "topk_length has shape"),
        (lambda: decode(topk_length=torch.zeros(2, 2, dtype=torch.int32)), "topk_length has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
