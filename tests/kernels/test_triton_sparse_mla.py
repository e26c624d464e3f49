"""The Triton kernels of sparse MLA against the references: every layout, index, length, sink and stride.

Interpreted on the CPU, where they compute in float32 and have to agree closely; on a GPU as compiled.
"""

import math

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, open_cache, reference_write
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.kernels.triton import sparse_mla
from nsa_plugin.kernels.triton.sparse_mla import decode, num_splits, prefill
from nsa_plugin.kernels.triton.sparse_mla_indices import masked_rows
from nsa_plugin.kernels.triton.tiles import sparse_tile

from .oracles import HEAD_COUNTS, INT_MAX, INT_MIN
from .sparse_mla_cases import (
    DEVICE,
    assert_same,
    decode_case,
    layouts_of,
    make_indices,
    make_rows,
    make_sink,
    prefill_case,
    randn,
    strided,
)

# Interpreted, only the order of float32 sums differs.
TOLERANCE = (2e-5, 1e-4) if DEVICE == "cpu" else None
V4_EXTRA = ("v4_fp8", 4 * 64, 45, 64)


def check_prefill(case, **options):
    expected = reference_prefill(**case, out_dtype=torch.float32)
    actual = prefill(**case, out_dtype=torch.float32, **options)
    assert_same(actual, expected, TOLERANCE)
    return actual


def check_decode(case, **options):
    expected = reference_decode(**case, out_dtype=torch.float32)
    actual = decode(**case, out_dtype=torch.float32, **options)
    assert_same(actual, expected, TOLERANCE)
    return actual


@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_any_number_of_heads(heads):
    check_prefill(prefill_case(tokens=2, heads=heads, slots=95, topk=40))


@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("dim", [576, 512])
def test_prefill_over_rows(dim, with_length, with_sink):
    case = prefill_case(tokens=3, heads=5, slots=130, topk=101, dim=dim, with_length=with_length, with_sink=with_sink)
    result = check_prefill(case)
    assert result.lse[0].isposinf().all()
    assert result.max_logits[0].isneginf().all()


@pytest.mark.parametrize(
    ("layout", "page_size"),
    [("bf16", 16), ("v32_fp8", 64), ("v32_fp8", 1), ("v4_fp8", 64), ("v4_fp8", 256), ("v4_fp8", 24)],
)
def test_prefill_straight_from_a_cache(layout, page_size):
    check_prefill(
        prefill_case(tokens=3, heads=3, layout=layout, slots=max(2, 96 // page_size) * page_size, topk=70,
                     page_size=page_size)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("rows", ("rows", 50, 45, 1)),
        ("rows", ("v32_fp8", 128, 45, 64)),
        ("v32_fp8", ("bf16", 64, 45, 16)),
        ("v4_fp8", V4_EXTRA),
        ("v4_fp8", ("bf16", 64, 45, 16)),
        ("bf16", V4_EXTRA),
    ],
)
def test_a_second_cache_of_any_layout(layout, extra):
    dim = 512 if "v4_fp8" in (layout, extra[0]) else 576
    case = prefill_case(tokens=3, heads=3, layout=layout, slots=128, topk=37, dim=dim, extra=extra)
    assert layouts_of(case) == {layout, extra[0]}
    check_prefill(case)


@pytest.mark.parametrize("per_query", [True, False])
@pytest.mark.parametrize(("batch", "s_q"), [(3, 1), (2, 3)])
@pytest.mark.parametrize(("layout", "extra"), [("v32_fp8", None), ("v4_fp8", V4_EXTRA), ("bf16", None)])
def test_decode(layout, extra, batch, s_q, per_query):
    case = decode_case(
        batch=batch, s_q=s_q, heads=3, layout=layout, slots=128, topk=75, length_per_query=per_query, extra=extra
    )
    result = check_decode(case)
    assert result.lse.shape == (batch, 3, s_q)


def test_a_split_row_is_put_together():
    case = decode_case(batch=2, s_q=1, heads=3, layout="v32_fp8", slots=512, topk=333, with_length=False)
    splits = num_splits(2, 3, 333, sparse_tile(0, 3), sparse_mla.INTERPRETER.sms)
    assert splits > 2
    check_decode(case)
    prefilled = prefill_case(tokens=2, heads=3, slots=300, topk=333)
    check_prefill(prefilled)


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_the_number_of_parts_does_not_change_the_result(monkeypatch, splits):
    monkeypatch.setattr(sparse_mla, "num_splits", lambda *_: splits)
    case = decode_case(batch=2, s_q=1, heads=2, layout="v4_fp8", slots=128, topk=100, extra=V4_EXTRA)
    check_decode(case)


def test_parts_follow_the_shapes():
    tile = sparse_tile(90, 16)
    assert num_splits(1, 16, 2048, tile, 132) == 32
    assert num_splits(128, 16, 2048, tile, 132) == 2
    assert num_splits(4096, 16, 2048, tile, 132) == 1
    assert num_splits(1, 16, 40, tile, 132) == 1


@pytest.mark.regression(14)
@pytest.mark.parametrize("layout", ["rows", "v32_fp8"])
def test_lengths_of_every_kind_and_int64(layout):
    lengths = torch.tensor([0, 1, 39, 40, 99, -5], dtype=torch.int64, device=DEVICE)
    indices = make_indices(6, 40, 128, 3, share=0.1).long()
    indices[3, :3] = torch.tensor([2**40, -(2**40), 2**32], device=DEVICE)
    case = prefill_case(tokens=6, heads=2, layout=layout, slots=128, topk=40, with_length=False, with_sink=False)
    used = torch.where(torch.arange(40, device=DEVICE) < lengths[:, None], indices, -1)
    if layout == "rows":
        case["kv"] = make_rows(128, 576, used, 5)
    else:
        reference_write(case["kv"], randn(128, 576, seed=7) / 4, torch.arange(128, device=DEVICE))
    result = check_prefill(case | {"indices": indices, "topk_length": lengths})
    assert result.lse[[0, 5]].isposinf().all()


@pytest.mark.parametrize("sink", [None, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("layout", ["rows", "v32_fp8", "v4_fp8"])
def test_rows_without_a_valid_key(layout, sink):
    case = prefill_case(tokens=3, heads=2, layout=layout, slots=64, topk=5, with_sink=False, with_length=False)
    bad = [INT_MIN, -123456, -1, 64, INT_MAX]
    indices = torch.tensor([[-1] * 5, bad, bad[::-1]], dtype=torch.int32, device=DEVICE)
    case |= {"indices": indices, "attn_sink": None if sink is None else torch.full((2,), sink, device=DEVICE)}
    result = prefill(**case)
    assert (result.out == 0).all()
    assert result.lse.isposinf().all()
    assert result.max_logits.isneginf().all()


def test_sinks_leave_the_statistics():
    case = prefill_case(tokens=3, heads=5, layout="v4_fp8", slots=64, topk=50, with_sink=False)
    without = check_prefill(case)
    with_sink = check_prefill(case | {"attn_sink": make_sink(5, 9)})
    assert torch.equal(with_sink.lse, without.lse)
    assert torch.equal(with_sink.max_logits, without.max_logits)
    assert (with_sink.out[:, 1] == 0).all()
    assert torch.equal(with_sink.out[:, 2], without.out[:, 2])


def test_rows_of_zeros_and_scales_far_apart():
    rows = torch.zeros(64, 576, device=DEVICE)
    exponents = torch.linspace(-26, -1, 20, device=DEVICE).round().unsqueeze(1)
    rows[20:40] = randn(20, 576, seed=1, dtype=torch.float32) * 2.0**exponents
    cache = allocate_cache("v32_fp8", 1, 64, device=DEVICE)
    reference_write(cache, rows, torch.arange(64, device=DEVICE))
    q = randn(2, 2, 576, seed=2)
    for first, last in ((0, 20), (0, 40), (20, 40)):
        indices = torch.arange(first, last, dtype=torch.int32, device=DEVICE).repeat(2, 1)
        check_prefill({"q": q, "kv": cache, "indices": indices, "scale": 1e-3})


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**60, 0.0])
def test_queries_beyond_the_range_of_float16(factor):
    case = prefill_case(tokens=2, heads=3, layout="v32_fp8", slots=64, topk=40)
    case["q"] = (case["q"].float() * factor).bfloat16()
    case["scale"] /= max(factor, 2.0**-100)
    check_prefill(case)


def test_noncontiguous_arguments_and_outputs():
    case = prefill_case(tokens=4, heads=3, slots=64, topk=33)
    dense = prefill(**case)
    spread = {name: strided(case[name]) for name in ("q", "kv", "indices", "topk_length", "attn_sink")}
    out = strided(torch.zeros_like(dense.out))
    result = prefill(**(case | spread), out=out)
    assert result.out is out
    torch.testing.assert_close(out, dense.out, atol=1e-3, rtol=1e-2)

    case = decode_case(batch=2, s_q=2, heads=3, layout="v32_fp8", slots=128, topk=33)
    wide = torch.zeros(2, 2, 3, 1024, dtype=torch.float64, device=DEVICE)
    result = decode(**(case | {"q": case["q"].transpose(0, 1).contiguous().transpose(0, 1)}), out=wide[..., ::2])
    expected = reference_decode(**case, out_dtype=torch.float64)
    torch.testing.assert_close(wide[..., ::2], expected.out, atol=2e-5 if DEVICE == "cpu" else 2e-3, rtol=1e-2)
    assert (wide[..., 1::2] == 0).all()
    assert result.out.data_ptr() == wide.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_float_types(dtype):
    case = prefill_case(tokens=2, heads=3, slots=64, topk=33)
    case |= {"q": case["q"].to(dtype), "kv": case["kv"].to(dtype)}
    assert prefill(**case).out.dtype == dtype
    check_prefill(case)


@pytest.mark.parametrize(("tokens", "slots", "topk"), [(0, 10, 5), (3, 0, 5), (3, 10, 0)])
def test_empty_inputs(tokens, slots, topk):
    indices = torch.zeros(tokens, topk, dtype=torch.int32, device=DEVICE)
    q = torch.ones(tokens, 4, 576, device=DEVICE, dtype=torch.bfloat16)
    result = prefill(q, torch.ones(slots, 576, device=DEVICE, dtype=torch.bfloat16), indices, scale=1.0)
    assert result.out.shape == (tokens, 4, 512)
    assert (result.out == 0).all()
    assert result.lse.isposinf().all()
    assert result.max_logits.isneginf().all()
    cache = allocate_cache("v4_fp8", slots, 1, device=DEVICE)
    decoded = decode(q[:, None, :, :512], cache, indices[:, None], scale=1.0)
    assert (decoded.out == 0).all()
    assert decoded.lse.shape == (tokens, 4, 1)


def test_reruns_are_identical():
    case = decode_case(batch=2, s_q=1, heads=3, layout="v4_fp8", slots=128, topk=140, extra=V4_EXTRA)
    first = decode(**case)
    for _ in range(2):
        again = decode(**case)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def misaligned(layout: str, page_bytes: int) -> PagedCache:
    return open_cache(torch.zeros(2, page_bytes, dtype=torch.uint8, device=DEVICE), layout, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 24)}, r"kv has shape \[64, 576\]; expected \[s_kv, 24\]"),
        ({"q": torch.zeros(2, 3, 24), "kv": torch.zeros(9, 24), "d_v": 16}, "d_v is 16; this kernel has 512"),
        ({"d_v": 600}, "d_v is 600"),
        ({"q": torch.zeros(2, 3, 640), "kv": torch.zeros(9, 640)}, "640 values a head; this kernel has 512 or 576"),
        ({"topk_length": torch.zeros(4, dtype=torch.int32)}, "topk_length has shape"),
        ({"attn_sink": torch.zeros(2)}, "attn_sink has shape"),
        ({"extra_kv": torch.zeros(9, 576)}, "extra_indices is missing"),
        ({"extra_indices": torch.zeros(2, 5, dtype=torch.int32)}, "extra_indices is given without extra_kv"),
        ({"out": torch.zeros(2, 3, 16)}, "out has shape"),
        ({"kv": misaligned("v32_fp8", 657)}, "the page stride is 657"),
        ({"q": torch.zeros(2, 3, 512), "kv": misaligned("v4_fp8", 588)}, "multiples of 8 bytes"),
    ],
)
def test_a_wrong_argument_is_named(changes, message):
    case = prefill_case(tokens=2, heads=3, slots=64, topk=5)
    changes = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in changes.items()}
    with pytest.raises(KernelArgumentError, match=message):
        prefill(**(case | changes))


@pytest.mark.regression(14)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_length", [True, False])
def test_masked_rows(dtype, with_length):
    indices = make_indices(4, 37, 100, 1).to(dtype).view(2, 2, 37)
    lengths = torch.tensor([[40, 0], [-3, 11]], device=DEVICE) if with_length else None
    rows, clamped = masked_rows(strided(indices), 100, lengths, 64)
    valid = (indices >= 0) & (indices < 100)
    if lengths is None:
        assert clamped is None
    else:
        assert clamped is not None
        assert clamped.tolist() == [[37, 0], [0, 11]]
        valid &= torch.arange(37, device=DEVICE) < lengths[..., None]
    assert rows.dtype == torch.int32
    assert torch.equal(rows[..., :37], torch.where(valid, indices, -1).int())
    assert (rows[..., 37:] == -1).all()
