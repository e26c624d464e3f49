"""The Triton indexer, interpreted, against the float64 references; DeepGEMM's schedule against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from nsa_plugin.kernels.checks import FP8_DTYPE, KernelArgumentError
from nsa_plugin.kernels.indexer import reference_logits, reference_paged_logits, reference_paged_topk, reference_topk
from nsa_plugin.kernels.kv_cache import allocate_cache, open_cache
from nsa_plugin.kernels.topk import reference_topk_rows
from nsa_plugin.kernels.triton import indexer as triton_indexer
from nsa_plugin.kernels.triton.indexer import paged_metadata, paged_topk, topk
from nsa_plugin.kernels.triton.tiles import tiles_of
from nsa_plugin.layouts import INDEXER_FP8

from .indexer_cases import assert_selected, indexer_inputs, paged_keys, ragged_requests, schedule_oracle
from .oracles import noncontiguous

TOLERANCE = 1e-3


def ranges(rows, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, keys + 1, (2, rows), generator=generator).sort(0).values.int()
    bounds[0, 0], bounds[1, 0] = 0, keys
    bounds[1, rows // 2] = bounds[0, rows // 2]
    return bounds[0], bounds[1]


def within_columns(logits, starts, ends, count, out=None):
    """The reference with the clamp that selectors on a device have."""
    return reference_topk_rows(logits, starts, ends.clamp(0, logits.shape[1]), count, out)


def check(result, q, k, k_scale, weights, ks, ke, count):
    logits = reference_logits(q, k, k_scale, weights, ks, ke)
    assert_selected(result, logits, ks, ke, count, TOLERANCE)


@pytest.mark.parametrize("heads", [1, 3, 32, 64, 130])
def test_topk(heads):
    inputs = indexer_inputs(7, 300, heads, seed=heads)
    bounds = ranges(7, 300)
    check(topk(*inputs, *bounds, 25), *inputs, *bounds, 25)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 4, 100])
def test_chunks_do_not_change_the_result(rows_per_chunk):
    inputs, bounds = indexer_inputs(9, 150, 16), ranges(9, 150)
    whole = topk(*inputs, *bounds, 20)
    assert torch.equal(topk(*inputs, *bounds, 20, rows_per_chunk=rows_per_chunk), whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN behind the keys
@pytest.mark.parametrize(("most_keys", "most_rows"), [(300, 2), (128, 100), (70, 3)])
@pytest.mark.parametrize("rows_per_chunk", [None, 3])
def test_converted_piece_by_piece_nothing_changes(monkeypatch, most_keys, most_rows, rows_per_chunk):
    requests, ks, ke = ragged_requests([(4, 90), (0, 9), (3, 140), (2, 33)])
    inputs = indexer_inputs(len(ks), 300, 8)
    arguments = {"requests": requests, "rows_per_chunk": rows_per_chunk}
    whole = topk(*inputs, ks, ke, 16, **arguments)
    pieces = []

    def converted(keys, multiple):
        pieces.append(len(keys))
        room = convert(keys, multiple)
        assert len(room) % multiple == 0
        room[len(keys) :] = math.nan  # what is read behind the last key has no influence
        return room

    convert = triton_indexer._converted
    monkeypatch.setattr(triton_indexer, "_converted", converted)
    monkeypatch.setattr(triton_indexer, "CONVERTED_KEYS", most_keys)
    monkeypatch.setattr(triton_indexer, "CONVERTED_ROWS", most_rows)
    assert torch.equal(topk(*inputs, ks, ke, 16, **arguments), whole)
    assert max(pieces) <= most_keys
    if rows_per_chunk is None:
        assert sum(pieces) == 90 + 9 + 140 + 33


@pytest.mark.parametrize("most_keys", [128, 1000])
@pytest.mark.parametrize("begin", [0, 1, 31, 127, 200])
def test_nothing_is_read_behind_the_memory_of_converted_keys(monkeypatch, begin, most_keys):
    """Wherever the rows' ranges begin: a GPU ends the process where there is no memory."""
    inputs, (ks, ke) = indexer_inputs(5, 300, 8), ranges(5, 300)
    ks = ks.clamp(min=begin)
    rooms = []

    def converted(keys, multiple):
        room = convert(keys, multiple)
        rooms.append(torch.cat([room, torch.full_like(room[:1], math.nan)])[:-1])  # a key behind it is nobody's
        return rooms[-1]

    def load(builder, pointers, mask, *rest):
        read = pointers.data[mask.data].astype("int64")
        for room in rooms:
            end = room.data_ptr() + room.numel() * 2
            assert not ((read >= end) & (read < end + 256)).any()
        return load_masked(builder, pointers, mask, *rest)

    convert, load_masked = triton_indexer._converted, InterpreterBuilder.create_masked_load
    monkeypatch.setattr(triton_indexer, "_converted", converted)
    monkeypatch.setattr(triton_indexer, "CONVERTED_KEYS", most_keys)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
    check(topk(*inputs, ks, ke, 25), *inputs, ks, ke, 25)
    assert [len(room) for room in rooms] == ([128] * 3 if most_keys == 128 else [384])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN behind the keys
@pytest.mark.parametrize("dim", [40, 96])
def test_converted_keys_of_a_dimension_that_is_padded(monkeypatch, dim):
    """Blocks are as wide as the next power of two: what lies between the dimension and that is the next key's."""
    q, k, k_scale, weights = indexer_inputs(5, 300, 8)
    inputs, bounds = (q[..., :dim].contiguous(), k[:, :dim].contiguous(), k_scale, weights), ranges(5, 300)

    def converted(keys, multiple):
        room = convert(keys, multiple)
        assert room.shape[1] == dim
        room[len(keys) :] = math.nan
        return room

    convert = triton_indexer._converted
    monkeypatch.setattr(triton_indexer, "_converted", converted)
    check(topk(*inputs, *bounds, 25), *inputs, *bounds, 25)


@pytest.mark.parametrize(("q_dtype", "k_dtype"), [(torch.bfloat16, torch.bfloat16), (FP8_DTYPE, torch.bfloat16)])
def test_values_that_float16_does_not_have_are_not_converted_to_it(q_dtype, k_dtype):
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(*shape, generator=generator) for shape in ((5, 8, 128), (200, 128)))
    q, k = (
        (values * (1e5 if dtype is not FP8_DTYPE else 1)).to(dtype) for values, dtype in ((q, q_dtype), (k, k_dtype))
    )
    weights = torch.rand(5, 8, generator=generator)
    logits = reference_logits(q, k, None, weights, *ranges(5, 200))
    found = topk(q, k, None, weights, *ranges(5, 200), 25)
    assert_selected(found, logits, *ranges(5, 200), 25, TOLERANCE * float(logits[logits.isfinite()].abs().max()))


@pytest.mark.regression(16)
@pytest.mark.parametrize("rows_per_chunk", [None, 2, 5])
def test_requests_are_scored_against_their_own_keys(rows_per_chunk):
    sizes = []

    def select(logits, *arguments, **keywords):
        sizes.append(tuple(logits.shape))
        return within_columns(logits, *arguments, **keywords)

    requests, ks, ke = ragged_requests([(4, 60), (0, 9), (1, 140), (3, 3), (2, 0), (2, 33)])
    rows, keys = len(ks) + 2, 300
    ks, ke = (torch.cat([bound, bound.new_zeros(2)]) for bound in (ks, ke))  # two padded rows
    inputs = indexer_inputs(rows, keys, 8)
    out = torch.full((rows, 16), 7, dtype=torch.int32)
    result = topk(*inputs, ks, ke, 16, requests=requests, rows_per_chunk=rows_per_chunk, out=out, selector=select)
    assert result is out
    check(result, *inputs, ks, ke, 16)
    assert torch.equal(result, topk(*inputs, ks, ke, 16))
    # Σq x Σk would be 12 x 245.
    assert max(width for _, width in sizes) == 140
    assert sizes[-1][1] <= 140
    if rows_per_chunk == 2:
        assert sizes == [(2, 60), (2, 60), (1, 140), (2, 3), (1, 3), (2, 33)]


def test_a_bound_on_the_keys_of_a_row_bounds_the_buffer():
    inputs, (ks, ke) = indexer_inputs(6, 200, 4), ranges(6, 200)
    ke = torch.minimum(ke, ks + 50)
    widths = []

    def select(logits, *arguments, **keywords):
        widths.append(logits.shape[1])
        return within_columns(logits, *arguments, **keywords)

    result = topk(*inputs, ks, ke, 12, max_key_span=50, selector=select)
    assert widths == [50]
    assert torch.equal(result, topk(*inputs, ks, ke, 12))
    cut_off = topk(*inputs, ks, ke, 12, max_key_span=20)
    assert torch.equal(cut_off, topk(*inputs, ks, torch.minimum(ke, ks + 20), 12))


def test_poisoned_keys_outside_the_ranges_have_no_influence():
    q, k, k_scale, weights = indexer_inputs(5, 200, 8)
    ks = torch.full((5,), 10, dtype=torch.int32)
    ke = torch.tensor([20, 25, 150, 10, 11], dtype=torch.int32)
    clean = topk(q, k, k_scale, weights, ks, ke, 6)
    outside = [*range(10), *range(150, 200)]
    k.view(torch.uint8)[outside] = 0x7F
    k_scale[outside] = math.nan
    assert torch.equal(topk(q, k, k_scale, weights, ks, ke, 6), clean)


def test_nan_keys_are_the_last_choice():
    q, k, k_scale, weights = indexer_inputs(1, 20, 8)
    k_scale[3] = math.nan
    k.view(torch.uint8)[4, 17] = 0x7F
    ks, ke = torch.tensor([2]), torch.tensor([12])
    assert topk(q, k, k_scale, weights, ks, ke, 8).tolist() == [[0, 3, 4, 5, 6, 7, 8, 9]]
    assert topk(q, k, k_scale, weights, ks, ke, 16).tolist() == [[*range(10), *[-1] * 6]]


@pytest.mark.regression(19)
def test_ranges_beyond_the_keys_are_clamped():
    inputs = indexer_inputs(3, 40, 4)
    ks, ke = torch.tensor([-5, 30, 60]), torch.tensor([10, 90, 70])
    result = topk(*inputs, ks, ke, 6)
    assert torch.equal(result, topk(*inputs, ks.clamp(min=0), ke.clamp(max=40), 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantised_queries_and_keys(dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 8, 40, generator=generator).to(dtype)
    k = torch.randn(60, 40, generator=generator).to(dtype)
    weights = torch.randn(5, 8, generator=generator)
    bounds = ranges(5, 60)
    result = topk(noncontiguous(q), noncontiguous(k), None, noncontiguous(weights), *bounds, 9)
    check(result, q, k, None, weights, *bounds, 9)


@pytest.mark.parametrize(("rows", "keys"), [(0, 10), (3, 0), (0, 0)])
def test_empty_inputs(rows, keys):
    zeros = torch.zeros(rows, dtype=torch.int32)
    assert topk(*indexer_inputs(rows, keys, 4), zeros, zeros, 5).tolist() == [[-1] * 5] * rows


LENGTHS = [130, 0, 2, 64, -1, 300]


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("explicit", [False, True])
def test_paged_topk(next_n, explicit):
    cache, table = paged_keys(LENGTHS, 6)
    q, _, _, weights = indexer_inputs(len(LENGTHS) * next_n, 1, 5)
    q = q.view(len(LENGTHS), next_n, 5, 128)
    limits = torch.tensor([[max(0, length - next_n + j + 1) for j in range(next_n)] for length in LENGTHS]).int()
    seq_lens = limits if explicit else torch.tensor(LENGTHS)
    whole = paged_topk(q, cache, weights, seq_lens, table, 40)
    logits = reference_paged_logits(q, cache, weights, seq_lens, table, max_len=300)
    flat = limits.flatten()
    assert_selected(whole, logits, torch.zeros_like(flat), flat, 40, TOLERANCE)
    for rows_per_chunk in (1, 4):
        out = torch.empty_like(whole)
        chunked = paged_topk(q, cache, weights, seq_lens, table, 40, rows_per_chunk=rows_per_chunk, out=out)
        assert chunked is out
        assert torch.equal(chunked, whole)
    assert torch.equal(paged_topk(q, cache, weights, seq_lens, table, 40, max_len=300), whole)


def test_paged_topk_over_pages_at_any_byte_and_with_missing_pages():
    cache, table = paged_keys([200, 90], 4)
    q, _, _, weights = indexer_inputs(2, 1, 4)
    q, lens = q.view(2, 1, 4, 128), torch.tensor([200, 90])
    expected = reference_paged_topk(q, cache, weights, lens, table, 30)
    page_bytes = INDEXER_FP8.page_bytes(64)
    memory = torch.full((cache.num_pages * (page_bytes + 5) + 3,), 0xFF, dtype=torch.uint8)
    apart = memory[3:].as_strided((cache.num_pages, page_bytes), (page_bytes + 5, 1))
    apart.copy_(cache.data)
    moved = open_cache(apart, INDEXER_FP8, 64)
    assert torch.equal(paged_topk(q, moved, weights, lens, table.long(), 30), expected)
    # What the reference refuses: seen keys on pages that are not there come last.
    table[0, 1], table[1, 1] = -1, 10_000
    result = paged_topk(q, cache, weights, lens, table, 140)
    assert set(range(64)) | set(range(128, 200)) <= set(result[0].tolist())
    assert result[1, :90].tolist() == list(range(90))


def test_paged_topk_without_requests_or_pages():
    cache, table = paged_keys([5], 1)
    q, _, _, weights = indexer_inputs(1, 1, 4)
    none = torch.zeros(0, dtype=torch.int32)
    assert paged_topk(q[:0].view(0, 1, 4, 128), cache, weights[:0], none, table[:0], 3).shape == (0, 3)
    result = paged_topk(q.view(1, 1, 4, 128), cache, weights, torch.tensor([0]), table[:, :0], 3)
    assert result.tolist() == [[-1] * 3]


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("num_sms", [1, 7, 132])
@pytest.mark.parametrize("requests", [1, 5, 150])
def test_paged_metadata(requests, num_sms, next_n):
    generator = torch.Generator().manual_seed(requests)
    lens = torch.randint(1, 3000, (requests, next_n), generator=generator).int()
    expected = schedule_oracle(lens[:, -1].tolist(), next_n, num_sms)
    assert paged_metadata(lens, num_sms).tolist() == expected
    if next_n == 1:
        assert paged_metadata(lens[:, 0], num_sms).tolist() == expected


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=90), st.integers(1, 40))
def test_paged_metadata_is_the_definition_s(lens, num_sms):
    assert paged_metadata(torch.tensor(lens), num_sms).tolist() == schedule_oracle(lens, 1, num_sms)


def ragged(**changes):
    q, k, k_scale, weights = indexer_inputs(3, 9, 2)
    bounds = {"ks": torch.zeros(3, dtype=torch.int32), "ke": torch.full((3,), 9)}
    return topk(**({"q": q, "k": k, "k_scale": k_scale, "weights": weights, **bounds, "topk": 4} | changes))


def paged(**changes):
    cache, table = paged_keys([9, 5], 2)
    q, _, _, weights = indexer_inputs(2, 1, 2)
    arguments = {"q": q.view(2, 1, 2, 128), "cache": cache, "weights": weights, "page_table": table, "topk": 4}
    return paged_topk(**(arguments | {"seq_lens": torch.tensor([9, 5])} | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ragged(q=torch.zeros(3, 128)), "indexer_topk: q has shape"),
        (lambda: ragged(k=torch.zeros(9, 64)), "k has shape"),
        (lambda: ragged(k_scale=torch.zeros(9, 1)), "k_scale has shape"),
        (lambda: ragged(weights=torch.zeros(3, 2).bfloat16()), "weights has dtype bfloat16"),
        (lambda: ragged(ke=torch.tensor([3, 3])), "ke has shape"),
        (lambda: ragged(topk=0), "topk is 0"),
        (lambda: ragged(rows_per_chunk=0), "rows_per_chunk is 0"),
        (lambda: ragged(max_key_span=0), "max_key_span is 0"),
        (lambda: ragged(requests=[(0, 9, 0, 9)]), "requests has"),
        (lambda: ragged(out=torch.zeros(3, 4)), "out has dtype"),
        (lambda: paged(q=torch.zeros(2, 1, 2, 64)), "q has 64 values a head"),
        (lambda: paged(cache=allocate_cache("v32_fp8", 1, 64)), "cache has layout v32_fp8; expected indexer_fp8"),
        (lambda: paged(seq_lens=torch.tensor([[9, 5]])), "seq_lens has shape"),
        (lambda: paged(page_table=torch.zeros(2, 1)), "page_table has dtype"),
        (lambda: paged(rows_per_chunk=-1), "rows_per_chunk is -1"),
        (lambda: paged(max_len=0), "max_len is 0"),
        (lambda: paged_metadata(torch.zeros(3), 4), "indexer_metadata: context_lens has dtype"),
        (lambda: paged_metadata(torch.ones(3, dtype=torch.int32), 0), "num_sms is 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()


def test_a_program_s_block_of_rows():
    tile = tiles_of(90).logits
    assert triton_indexer._row_block(tile, 64) == 2
    assert triton_indexer._row_block(tile, 64, 1) == 1
    assert triton_indexer._row_block(tile, 5, 1) == 2
    assert triton_indexer._row_block(tile, 130) == 1


def test_equal_logits_tie_to_the_lowest_positions():
    q = torch.ones(2, 1, 128).to(torch.float8_e4m3fn)
    k = -torch.ones(150, 128)
    k[[7, 130]] = 1.0
    ks, ke = torch.tensor([0, 8]), torch.tensor([150, 150])
    arguments = (q, k.to(torch.float8_e4m3fn), None, torch.ones(2, 1), ks, ke, 4)
    assert torch.equal(topk(*arguments), reference_topk(*arguments))
