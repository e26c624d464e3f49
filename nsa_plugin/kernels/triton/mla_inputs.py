"""Norms, RoPE and the indexer's fp8 queries in Triton, without fp8 instructions; contract in `kernels.mla_inputs`.

Each function launches one kernel and does not wait for the device. Queries of the indexer are quantised in integers on
every GPU: the loads hide the cost, there is one code path, and the codes equal the reference's bit for bit.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels import mla_inputs as contract
from nsa_plugin.kernels.checks import FP8_DTYPE, require
from nsa_plugin.kernels.triton.kv_cache_kernels import encode_fp8, round_to, scale_of_exponent
from nsa_plugin.kernels.triton.sizes import power_of_2

# As `indexer.quantize`: the least magnitude that a head is taken to have.
AMAX_FLOOR = 1e-4


def norm_rope(
    q_c: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    *,
    q_eps: float,
    kv_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference_norm_rope`."""
    contract.check_norm_rope(q_c, kv_c, k_pe, positions, cos_sin, q_weight, kv_weight)
    positions, q_weight, kv_weight = positions.contiguous(), q_weight.contiguous(), kv_weight.contiguous()
    rows, q_dim = q_c.shape
    queries = torch.empty((rows, q_dim), dtype=q_c.dtype, device=q_c.device)
    latents = torch.empty((rows, kv_c.shape[1]), dtype=torch.float32, device=q_c.device)
    keys = torch.empty((rows, k_pe.shape[1]), dtype=torch.float32, device=q_c.device)
    if rows:
        with torch.cuda.device_of(q_c):
            norm_rope_kernel[(rows, 2)](
                q_c, *q_c.stride(), q_weight, q_eps, queries,
                kv_c, *kv_c.stride(), kv_weight, kv_eps, latents,
                k_pe, *k_pe.stride(), keys, positions, cos_sin, *cos_sin.stride(),
                Q_DIM=q_dim, Q_POWER=power_of_2(q_dim), KV_DIM=kv_c.shape[1], KV_POWER=power_of_2(kv_c.shape[1]),
                HALF=k_pe.shape[1] // 2, HALF_POWER=power_of_2(k_pe.shape[1] // 2), INTERPRETED=not q_c.is_cuda,
            )  # fmt: skip
    return queries, latents, keys


def indexer_keys(
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """See `reference_indexer_keys`."""
    contract.check_indexer_keys(k, positions, cos_sin, weight, bias)
    positions, weight, bias = positions.contiguous(), weight.contiguous(), bias.contiguous()
    rows, dim = k.shape
    out = torch.empty((rows, dim), dtype=torch.float32, device=k.device)
    if rows:
        with torch.cuda.device_of(k):
            indexer_keys_kernel[(rows,)](
                k, *k.stride(), weight, bias, eps, out, positions, cos_sin, *cos_sin.stride(),
                INTERLEAVED=interleaved, **_widths(dim, cos_sin),
            )  # fmt: skip
    return out


def indexer_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    scale: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference_indexer_queries`."""
    contract.check_indexer_queries(q, weights, positions, cos_sin)
    positions = positions.contiguous()
    rows, heads, dim = q.shape
    codes = torch.empty((rows, heads, dim), dtype=torch.uint8, device=q.device)
    folded = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    if rows and heads:
        with torch.cuda.device_of(q):
            indexer_queries_kernel[(rows, heads)](
                q, *q.stride(), weights, *weights.stride(), scale, codes, folded, heads, positions, cos_sin,
                *cos_sin.stride(),
                INTERLEAVED=interleaved, **_widths(dim, cos_sin), FLOOR=AMAX_FLOOR,
            )  # fmt: skip
    return codes.view(FP8_DTYPE), folded


def rope(q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See `reference_rope`."""
    contract.check_rope(q, positions, cos_sin)
    positions = positions.contiguous()
    rows, heads, width = q.shape
    require(width == power_of_2(width), "rope", f"rope_dim is {width}; this kernel takes powers of two")
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    if rows and heads:
        with torch.cuda.device_of(q):
            rope_kernel[(rows, heads)](
                q, *q.stride(), out, heads, positions, cos_sin, *cos_sin.stride(),
                HALF=width // 2, INTERPRETED=not q.is_cuda,
            )  # fmt: skip
    return out


def _widths(dim: int, cos_sin: torch.Tensor) -> dict[str, int]:
    """Values of a head of `dim`: half of the rotated ones, and the rest."""
    rotated = cos_sin.shape[1]
    powers = {"HALF_POWER": power_of_2(rotated // 2), "REST_POWER": power_of_2(max(1, dim - rotated))}
    return {"DIM": dim, "HALF": rotated // 2, **powers}


@triton.jit
def _rotate(
    first, second, position, cos_sin_ptr, row_stride, value_stride, HALF: tl.constexpr, HALF_POWER: tl.constexpr
):
    """Pairs of float32 values rotated by the angles of a position."""
    column = tl.arange(0, HALF_POWER)
    inside = column < HALF
    pointers = cos_sin_ptr + position * row_stride + column * value_stride
    cos = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(pointers + HALF * value_stride, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _pairs(HALF: tl.constexpr, HALF_POWER: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of a pair's values."""
    column = tl.arange(0, HALF_POWER)
    if INTERLEAVED:
        return 2 * column, 2 * column + 1
    else:
        return column, column + HALF


@triton.jit
def _places(
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_POWER: tl.constexpr, REST_POWER: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Columns of the pairs' values and of the values after them, and which are inside the row."""
    one, other = _pairs(HALF, HALF_POWER, INTERLEAVED)
    behind = 2 * HALF + tl.arange(0, REST_POWER)
    return one, other, behind, tl.arange(0, HALF_POWER) < HALF, behind < DIM


@triton.jit
def _load(source, places, stride, inside):
    return tl.load(source + places * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_normed(
    source, value_stride, weight_ptr, eps, target, DIM: tl.constexpr, POWER: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Store the RMS norm of a row of DIM values."""
    column = tl.arange(0, POWER)
    inside = column < DIM
    values = tl.load(source + column * value_stride, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / DIM + eps)
    tl.store(target + column, round_to(values * factor * weight, target.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def norm_rope_kernel(
    q_ptr, q_row_stride, q_value_stride, q_weight_ptr, q_eps,
    q_out_ptr,  # [rows, Q_DIM]
    kv_ptr, kv_row_stride, kv_value_stride, kv_weight_ptr, kv_eps,
    kv_out_ptr,  # float32 [rows, KV_DIM]
    k_pe_ptr, k_pe_row_stride, k_pe_value_stride,
    k_pe_out_ptr,  # float32 [rows, 2 * HALF]
    positions_ptr, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride,
    Q_DIM: tl.constexpr, Q_POWER: tl.constexpr, KV_DIM: tl.constexpr, KV_POWER: tl.constexpr, HALF: tl.constexpr,
    HALF_POWER: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        queries = q_ptr + row * q_row_stride
        _store_normed(
            queries, q_value_stride, q_weight_ptr, q_eps, q_out_ptr + row * Q_DIM, Q_DIM, Q_POWER, INTERPRETED
        )
    else:
        latents = kv_ptr + row * kv_row_stride
        _store_normed(
            latents, kv_value_stride, kv_weight_ptr, kv_eps, kv_out_ptr + row * KV_DIM, KV_DIM, KV_POWER, INTERPRETED
        )
        even, odd = _pairs(HALF, HALF_POWER, True)
        inside = even < 2 * HALF
        keys = k_pe_ptr + row * k_pe_row_stride
        first, second = _load(keys, even, k_pe_value_stride, inside), _load(keys, odd, k_pe_value_stride, inside)
        position = tl.load(positions_ptr + row)
        first, second = _rotate(
            first, second, position, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride, HALF, HALF_POWER
        )
        rotated = k_pe_out_ptr + row * (2 * HALF)
        tl.store(rotated + even, first, mask=inside)
        tl.store(rotated + odd, second, mask=inside)


@triton.jit
def indexer_keys_kernel(
    k_ptr, row_stride, value_stride, weight_ptr, bias_ptr, eps,
    out_ptr,  # float32 [rows, DIM]
    positions_ptr, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_POWER: tl.constexpr, REST_POWER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source, target = k_ptr + row * row_stride, out_ptr + row * DIM
    one, other, behind, paired, left = _places(DIM, HALF, HALF_POWER, REST_POWER, INTERLEAVED)
    first, second = _load(source, one, value_stride, paired), _load(source, other, value_stride, paired)
    rest = _load(source, behind, value_stride, left)

    mean = (tl.sum(first + second, axis=0) + tl.sum(rest, axis=0)) / DIM
    first = tl.where(paired, first - mean, 0.0)
    second = tl.where(paired, second - mean, 0.0)
    rest = tl.where(left, rest - mean, 0.0)
    variance = (tl.sum(first * first + second * second, axis=0) + tl.sum(rest * rest, axis=0)) / DIM
    factor = tl.rsqrt(variance + eps)

    first = _affine(first * factor, weight_ptr, bias_ptr, one, paired)
    second = _affine(second * factor, weight_ptr, bias_ptr, other, paired)
    position = tl.load(positions_ptr + row)
    first, second = _rotate(
        first, second, position, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride, HALF, HALF_POWER
    )
    tl.store(target + one, first, mask=paired)
    tl.store(target + other, second, mask=paired)
    tl.store(target + behind, _affine(rest * factor, weight_ptr, bias_ptr, behind, left), mask=left)


@triton.jit
def _affine(values, weight_ptr, bias_ptr, column, inside):
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return values * weight + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["heads"])
def indexer_queries_kernel(
    q_ptr, row_stride, head_stride, value_stride, weights_ptr, weights_row_stride, weights_head_stride, scale,
    codes_ptr,  # uint8 [rows, heads, DIM]
    folded_ptr,  # float32 [rows, heads]
    heads, positions_ptr, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_POWER: tl.constexpr, REST_POWER: tl.constexpr,
    INTERLEAVED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, place = q_ptr + row * row_stride + head * head_stride, row * heads + head
    one, other, behind, paired, left = _places(DIM, HALF, HALF_POWER, REST_POWER, INTERLEAVED)
    first, second = _load(source, one, value_stride, paired), _load(source, other, value_stride, paired)
    rest = _load(source, behind, value_stride, left)
    position = tl.load(positions_ptr + row)
    first, second = _rotate(
        first, second, position, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride, HALF, HALF_POWER
    )

    largest = tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(second), axis=0))
    largest = tl.maximum(tl.maximum(largest, tl.max(tl.abs(rest), axis=0)), FLOOR)
    bits = tl.div_rn(largest, 448.0).to(tl.int32, bitcast=True)
    # The next power of two, from the bits.
    factor = scale_of_exponent(tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255))
    codes = codes_ptr + place * DIM
    tl.store(codes + one, encode_fp8(first / factor, False), mask=paired)
    tl.store(codes + other, encode_fp8(second / factor, False), mask=paired)
    tl.store(codes + behind, encode_fp8(rest / factor, False), mask=left)
    gate = tl.load(weights_ptr + row * weights_row_stride + head * weights_head_stride).to(tl.float32)
    tl.store(folded_ptr + place, gate * factor * scale)


@triton.jit(do_not_specialize=["heads"])
def rope_kernel(
    q_ptr, row_stride, head_stride, value_stride,
    out_ptr,  # [rows, heads, 2 * HALF]
    heads, positions_ptr, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride,
    HALF: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = q_ptr + row * row_stride + head * head_stride
    even, odd = _pairs(HALF, HALF, True)
    first = tl.load(source + even * value_stride).to(tl.float32)
    second = tl.load(source + odd * value_stride).to(tl.float32)
    position = tl.load(positions_ptr + row)
    first, second = _rotate(first, second, position, cos_sin_ptr, cos_sin_row_stride, cos_sin_value_stride, HALF, HALF)
    target = out_ptr + (row * heads + head) * (2 * HALF)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(target + even, round_to(first, dtype, INTERPRETED))
    tl.store(target + odd, round_to(second, dtype, INTERPRETED))
