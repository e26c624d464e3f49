"""Triton kernels that write and read paged KV caches; contracts in `nsa_plugin.kernels.kv_cache`.

Each function has the signature of the reference of its name, launches one kernel, waits for nothing
and allocates only its results (see `read`). What the reference checks by reading slots cannot be
checked without waiting for the device; there a slot beyond the cache counts as a negative one: `write`
skips it, the readers give zeros for it.

Codes and scales equal the reference's on the CPU bit for bit: the scale is a true division by 448, a
ue8m0 exponent comes from the scale's bits, and both roundings are to nearest even. (The reference on a
GPU multiplies by 1 / 448 there, so that its float32 scales may differ in the last bit.)

A program handles whole rows: the fp8 tiles of `ROWS` rows as a [ROWS * tiles, tile] block, which makes
a tile's scale a value a line, and their bfloat16 tails as a second block. GPUs before SM89 have no fp8
conversion; there, and interpreted, the bits are converted with integers.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.layouts import Fp8Layout, ScaleFormat

# Rows a program: 16 rows of 512 values are 64 values a thread, enough loads in flight to reach HBM speed.
# Few rows (decode) are spread over more programs.
ROWS_PER_PROGRAM = 16
FEW_ROWS = 1024
ROWS_PER_PROGRAM_FEW = 2
# Block of the plain layout: rows x values.
PLAIN_ROWS, PLAIN_VALUES = 32, 64


def write(
    cache: PagedCache,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rope: torch.Tensor | None = None,
    power_of_two_scales: bool = False,
) -> None:
    """Quantise rows into the cache, or copy them into a plain one; see `reference_write`.

    Any strides. With `rope` of another width than the layout's bfloat16 tail the two parts are joined
    first, which allocates. Of two rows with one slot either may win, or a part of each.

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or the cache's memory is not aligned.
    """
    op = "kv_cache_write"
    check_tensor(op, "rows", rows, ("num_rows", "dim"), dtypes=FLOAT_DTYPES, device=cache.device)
    tail = cache.layout.bf16_dim if isinstance(cache.layout, Fp8Layout) else None
    if rope is not None:
        rope = rope.squeeze(1) if rope.dim() == 3 else rope
        check_tensor(op, "rope", rope, (rows.shape[0], "rope_dim"), dtypes=FLOAT_DTYPES, device=rows.device)
        if tail is not None and rope.shape[1] != tail:
            rows, rope = torch.cat([rows, rope.to(rows.dtype)], dim=-1), None
    rope_dim = 0 if rope is None else int(rope.shape[1])
    check_tensor(op, "rows", rows, ("num_rows", cache.dim - rope_dim), dtypes=FLOAT_DTYPES, device=cache.device)
    check_tensor(op, "slot_mapping", slot_mapping, ("n",), dtypes=INDEX_DTYPES, device=cache.device)
    count = len(slot_mapping)
    require(count <= len(rows), op, f"slot_mapping has {count} slots for {len(rows)} rows")
    if count == 0 or cache.num_slots == 0:
        return
    rope_strides = (0, 0) if rope is None else rope.stride()
    sources = (rows, rope, slot_mapping, count, cache.num_slots)
    strides = (*rows.stride(), *rope_strides, slot_mapping.stride(0))
    with torch.cuda.device_of(rows):
        if not isinstance(cache.layout, Fp8Layout):
            grid = (triton.cdiv(count, PLAIN_ROWS), triton.cdiv(cache.dim, PLAIN_VALUES))
            _write_plain[grid](
                cache.data,
                *sources,
                *cache.data.stride(),
                *strides,
                PAGE_SIZE=cache.page_size,
                DIM=cache.dim,
                SPLIT=cache.dim - rope_dim,
                ROWS=PLAIN_ROWS,
                VALUES=PLAIN_VALUES,
                INTERPRETED=not rows.is_cuda,
            )
            return
        rows_per_program = _rows_per_program(count)
        _write_records[(triton.cdiv(count, rows_per_program),)](
            cache.data,
            *sources,
            cache.data.stride(0),
            *strides,
            **_record_constants(op, cache, cache.layout),
            AMAX_FLOOR_BITS=_float_bits(cache.layout.amax_floor),
            POWER_OF_TWO=power_of_two_scales or cache.layout.scale_format is ScaleFormat.UE8M0,
            INTERPRETED=not rows.is_cuda,
            ROWS=rows_per_program,
        )


def read(
    cache: PagedCache,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Dequantise a set of slots into float rows; see `reference_read`. A slot beyond the cache: zeros.

    Nothing but a missing `out` is allocated, unless slots or out have strides that no single row
    stride describes: slots of more than one dimension that are not contiguous, or such rows of out.

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or the cache's memory is not aligned.
    """
    check_tensor("kv_cache_read", "slots", slots, slots.shape, dtypes=INDEX_DTYPES, device=cache.device)
    return _read(cache, slots, slots.shape, out, dtype, by_page=False)


def read_pages(
    cache: PagedCache,
    pages: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Dequantise whole pages: pages [n] -> [n, page_size, cache.dim]. Else as `read`."""
    check_tensor("kv_cache_read", "pages", pages, ("n",), dtypes=INDEX_DTYPES, device=cache.device)
    return _read(cache, pages, (len(pages), cache.page_size), out, dtype, by_page=True)


def read_codes(cache: PagedCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored fp8 codes and scales of slots; see `reference_read_codes`.

    A slot that is not in the cache gives codes and scales of 0.
    """
    op = "kv_cache_read"
    layout = cache.layout
    if not isinstance(layout, Fp8Layout):
        raise KernelArgumentError(f"{op}: layout {layout.name} stores no fp8 codes")
    check_tensor(op, "slots", slots, ("n",), dtypes=INDEX_DTYPES, device=cache.device)
    count = len(slots)
    codes = torch.empty((count, layout.fp8_dim), dtype=torch.uint8, device=cache.device)
    scales = torch.empty((count, layout.num_scales), dtype=torch.float32, device=cache.device)
    if count:
        rows_per_program = _rows_per_program(count)
        with torch.cuda.device_of(slots):
            _read_codes[(triton.cdiv(count, rows_per_program),)](
                codes,
                scales,
                cache.data,
                slots,
                count,
                cache.num_slots,
                cache.data.stride(0),
                slots.stride(0),
                **_record_constants(op, cache, layout),
                ROWS=rows_per_program,
            )
    return codes.view(FP8_DTYPE), scales


def _read(
    cache: PagedCache,
    addresses: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    by_page: bool,
) -> torch.Tensor:
    """Rows [*shape, cache.dim] of the slots, or of the whole pages, in `addresses`."""
    op = "kv_cache_read"
    if out is None:
        require(dtype in FLOAT_DTYPES, op, f"dtype is {dtype}; it is a float type")
        out = torch.empty((*shape, cache.dim), dtype=dtype, device=cache.device)
    check_tensor(op, "out", out, (*shape, cache.dim), dtypes=FLOAT_DTYPES, device=cache.device)
    if out.numel() == 0:
        return out
    rows = _as_rows(out)
    if rows is None:
        out.copy_(_read(cache, addresses, shape, None, out.dtype, by_page=by_page))
        return out
    addresses = addresses.reshape(-1)
    count, available = len(rows), cache.num_pages if by_page else cache.num_slots
    constants: dict[str, Any] = {"BY_PAGE": by_page, "INTERPRETED": not out.is_cuda}
    with torch.cuda.device_of(out):
        if not isinstance(cache.layout, Fp8Layout):
            grid = (triton.cdiv(count, PLAIN_ROWS), triton.cdiv(cache.dim, PLAIN_VALUES))
            _read_plain[grid](
                rows,
                cache.data,
                addresses,
                count,
                available,
                *cache.data.stride(),
                addresses.stride(0),
                *rows.stride(),
                PAGE_SIZE=cache.page_size,
                DIM=cache.dim,
                ROWS=PLAIN_ROWS,
                VALUES=PLAIN_VALUES,
                **constants,
            )
            return out
        rows_per_program = _rows_per_program(count)
        _read_records[(triton.cdiv(count, rows_per_program),)](
            rows,
            cache.data,
            addresses,
            count,
            available,
            cache.data.stride(0),
            addresses.stride(0),
            *rows.stride(),
            **_record_constants(op, cache, cache.layout),
            **constants,
            ROWS=rows_per_program,
        )
    return out


def _as_rows(out: torch.Tensor) -> torch.Tensor | None:
    """`out` as [rows, dim] without a copy, or None if its strides have no such view."""
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError:
        return None


def _rows_per_program(count: int) -> int:
    return ROWS_PER_PROGRAM if count > FEW_ROWS else ROWS_PER_PROGRAM_FEW


def _float_bits(value: float) -> int:
    """The bits of a float32, as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _record_constants(op: str, cache: PagedCache, layout: Fp8Layout) -> dict[str, Any]:
    """What the kernels know of an fp8 layout at compile time."""
    is_exponent = layout.scale_format is ScaleFormat.UE8M0
    # Tails are read as bfloat16, scales as float32: a GPU faults on such a load at an odd address.
    alignment = 2 if is_exponent else 4
    aligned = cache.data.data_ptr() % alignment == 0 and cache.data.stride(0) % alignment == 0
    where = f"address {cache.data.data_ptr()} with {cache.data.stride(0)} bytes between pages"
    require(aligned, op, f"cache is at {where}; layout {layout.name} needs multiples of {alignment}")
    in_rows = not layout.scales_after_page
    return {
        "PAGE_SIZE": cache.page_size,
        "TILE": layout.tile,
        "TILES": layout.num_scales,
        "TILES_POWER": triton.next_power_of_2(layout.num_scales),
        "TAIL_DIM": layout.bf16_dim,
        "TAIL_START": layout.tail_start,
        "ROW_BYTES": layout.data_stride,
        "SCALES_START": layout.fp8_dim if in_rows else cache.page_size * layout.data_stride,
        "SCALES_STRIDE": layout.data_stride if in_rows else layout.scale_slot_bytes,
        "IS_EXPONENT": is_exponent,
        "NATIVE_FP8": _has_fp8_conversion(cache.device),
    }


@lru_cache
def _has_fp8_conversion(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _round_to(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values in another float type, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Triton's interpreter cuts the low bits off instead of rounding.
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(values == values, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit
def _encode_fp8(values, NATIVE_FP8: tl.constexpr):
    """e4m3 bytes of float32 values no larger than 448 but for a rounding; NaN stays NaN."""
    if NATIVE_FP8:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # 20 mantissa bits go, to nearest even; the exponent's bias changes from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2 ** -6 the step is 2 ** -9, which is the last mantissa bit of 2 ** 14: the addition rounds to it.
        stepped = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, stepped, tl.minimum(normal, 0x7E))
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode_fp8(codes, NATIVE_FP8: tl.constexpr):
    """float32 values of e4m3 bytes."""
    if NATIVE_FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # The same exponent and mantissa as a float16, whose bias is 15 instead of 7: too small by 2 ** 8.
        half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
        return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _scale_of_exponent(exponent):
    """float32 `2 ** (exponent - 127)` of int32 exponents 0 to 255; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _locate(addresses_ptr, row, num_rows, available, stride, PAGE_SIZE: tl.constexpr, BY_PAGE: tl.constexpr):
    """Page and position of the slot that row `row` names, and whether it is in the cache; 0 and 0 if not."""
    entry = row // PAGE_SIZE if BY_PAGE else row
    address = tl.load(addresses_ptr + entry * stride, mask=row < num_rows, other=-1).to(tl.int64)
    inside = (address >= 0) & (address < available)
    address = tl.where(inside, address, 0)
    if BY_PAGE:
        return address, row % PAGE_SIZE, inside
    else:
        return address // PAGE_SIZE, address % PAGE_SIZE, inside


@triton.jit
def _write_records(
    cache_ptr,  # uint8, pages page_stride bytes apart
    rows_ptr,
    rope_ptr,  # or None: the tail follows the rows' other values
    slots_ptr,
    num_rows,
    num_slots,
    page_stride,
    rows_stride,
    rows_value_stride,
    rope_stride,
    rope_value_stride,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_START: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    IS_EXPONENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    AMAX_FLOOR_BITS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    line = tl.arange(0, ROWS * TILES_POWER)
    row, tile = first + line // TILES_POWER, line % TILES_POWER
    page, position, inside = _locate(slots_ptr, row, num_rows, num_slots, slots_stride, PAGE_SIZE, False)
    inside = inside & (tile < TILES)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    pointers = rows_ptr + row[:, None] * rows_stride + column.to(tl.int64) * rows_value_stride
    values = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)

    # The magnitudes' order is their bits' order, in which NaN is the largest: a tile with one has scale NaN.
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.maximum(magnitude, AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full([ROWS * TILES_POWER], 448.0, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = _scale_of_exponent(exponent)
    codes = _encode_fp8(tl.div_rn(values, scale[:, None]), NATIVE_FP8)

    page_ptr = cache_ptr + page * page_stride
    record = page_ptr + position * ROW_BYTES
    tl.store(record[:, None] + column, codes, mask=inside[:, None])
    scales = page_ptr + SCALES_START + position * SCALES_STRIDE
    if IS_EXPONENT:
        tl.store(scales + tile, exponent.to(tl.uint8), mask=inside)
    else:
        tl.store((scales + tile * 4).to(tl.pointer_type(tl.float32)), scale, mask=inside)

    if TAIL_DIM > 0:
        row = first + tl.arange(0, ROWS)
        page, position, inside = _locate(slots_ptr, row, num_rows, num_slots, slots_stride, PAGE_SIZE, False)
        column = tl.arange(0, TAIL_DIM)
        if rope_ptr is None:
            pointers = rows_ptr + row[:, None] * rows_stride
            pointers += (TILES * TILE + column).to(tl.int64)[None, :] * rows_value_stride
            tail = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)
        else:
            pointers = rope_ptr + row[:, None] * rope_stride + column.to(tl.int64)[None, :] * rope_value_stride
            tail = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)
            # The contract's rows have one dtype.
            tail = _round_to(tail, rows_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
        target = (cache_ptr + page * page_stride + position * ROW_BYTES + TAIL_START).to(tl.pointer_type(tl.bfloat16))
        tl.store(target[:, None] + column[None, :], _round_to(tail, tl.bfloat16, INTERPRETED), mask=inside[:, None])


@triton.jit
def _read_records(
    out_ptr,
    cache_ptr,  # uint8, pages page_stride bytes apart
    addresses_ptr,  # slots, or pages with BY_PAGE
    num_rows,
    available,  # slots or pages of the cache
    page_stride,
    addresses_stride,
    out_stride,
    out_value_stride,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_START: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    IS_EXPONENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BY_PAGE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    line = tl.arange(0, ROWS * TILES_POWER)
    row, tile = first + line // TILES_POWER, line % TILES_POWER
    page, position, inside = _locate(addresses_ptr, row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE)
    inside = inside & (tile < TILES)
    page_ptr = cache_ptr + page * page_stride
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    codes = tl.load((page_ptr + position * ROW_BYTES)[:, None] + column, mask=inside[:, None], other=0)
    scales = page_ptr + SCALES_START + position * SCALES_STRIDE
    if IS_EXPONENT:
        scale = _scale_of_exponent(tl.load(scales + tile, mask=inside, other=0).to(tl.int32))
    else:
        scale = tl.load((scales + tile * 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)

    tail_row = first + tl.arange(0, ROWS)
    tail_column = tl.arange(0, TAIL_DIM if TAIL_DIM > 0 else 1)
    if TAIL_DIM > 0:
        page, position, tail_inside = _locate(
            addresses_ptr, tail_row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE
        )
        source = (cache_ptr + page * page_stride + position * ROW_BYTES + TAIL_START).to(tl.pointer_type(tl.bfloat16))
        tail = tl.load(source[:, None] + tail_column[None, :], mask=tail_inside[:, None], other=0.0).to(tl.float32)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = _round_to(_decode_fp8(codes, NATIVE_FP8) * scale[:, None], dtype, INTERPRETED)
    pointers = out_ptr + row[:, None] * out_stride + column.to(tl.int64) * out_value_stride
    tl.store(pointers, values, mask=((row < num_rows) & (tile < TILES))[:, None])
    if TAIL_DIM > 0:
        pointers = out_ptr + tail_row[:, None] * out_stride
        pointers += (TILES * TILE + tail_column).to(tl.int64)[None, :] * out_value_stride
        tl.store(pointers, _round_to(tail, dtype, INTERPRETED), mask=(tail_row < num_rows)[:, None])


@triton.jit
def _read_codes(
    codes_ptr,  # uint8 [num_rows, TILES * TILE]
    scales_ptr,  # float32 [num_rows, TILES]
    cache_ptr,
    slots_ptr,
    num_rows,
    num_slots,
    page_stride,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    TAIL_START: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    IS_EXPONENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
):
    line = tl.arange(0, ROWS * TILES_POWER)
    row, tile = tl.program_id(0).to(tl.int64) * ROWS + line // TILES_POWER, line % TILES_POWER
    page, position, inside = _locate(slots_ptr, row, num_rows, num_slots, slots_stride, PAGE_SIZE, False)
    inside = inside & (tile < TILES)
    stored = (row < num_rows) & (tile < TILES)
    page_ptr = cache_ptr + page * page_stride
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    codes = tl.load((page_ptr + position * ROW_BYTES)[:, None] + column, mask=inside[:, None], other=0)
    tl.store(codes_ptr + row[:, None] * (TILES * TILE) + column, codes, mask=stored[:, None])
    scales = page_ptr + SCALES_START + position * SCALES_STRIDE
    if IS_EXPONENT:
        scale = _scale_of_exponent(tl.load(scales + tile, mask=inside, other=0).to(tl.int32))
        scale = tl.where(inside, scale, 0.0)
    else:
        scale = tl.load((scales + tile * 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)
    tl.store(scales_ptr + row * TILES + tile, scale, mask=stored)


@triton.jit
def _write_plain(
    cache_ptr,
    rows_ptr,
    rope_ptr,  # or None
    slots_ptr,
    num_rows,
    num_slots,
    page_stride,
    position_stride,
    value_stride,
    rows_stride,
    rows_value_stride,
    rope_stride,
    rope_value_stride,
    slots_stride,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,  # values that come from rows; the others from rope
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    page, position, inside = _locate(slots_ptr, row, num_rows, num_slots, slots_stride, PAGE_SIZE, False)
    pointers = rows_ptr + row[:, None] * rows_stride + column[None, :] * rows_value_stride
    values = tl.load(pointers, mask=inside[:, None] & (column < SPLIT)[None, :], other=0.0)
    if rope_ptr is not None:
        pointers = rope_ptr + row[:, None] * rope_stride + (column - SPLIT)[None, :] * rope_value_stride
        behind = ((column >= SPLIT) & (column < DIM))[None, :]
        rope = tl.load(pointers, mask=inside[:, None] & behind, other=0.0)
        if rope.dtype != values.dtype and values.dtype != tl.float64:
            rope = _round_to(rope.to(tl.float32), values.dtype, INTERPRETED)
        values = tl.where(behind, rope, values)
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float64:
        values = values.to(tl.float64)
    elif values.dtype != dtype:
        values = _round_to(values.to(tl.float32), dtype, INTERPRETED)
    target = cache_ptr + (page * page_stride + position * position_stride)[:, None] + column[None, :] * value_stride
    tl.store(target, values, mask=inside[:, None] & (column < DIM)[None, :])


@triton.jit
def _read_plain(
    out_ptr,
    cache_ptr,
    addresses_ptr,  # slots, or pages with BY_PAGE
    num_rows,
    available,  # slots or pages of the cache
    page_stride,
    position_stride,
    value_stride,
    addresses_stride,
    out_stride,
    out_value_stride,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_PAGE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    page, position, inside = _locate(addresses_ptr, row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE)
    source = cache_ptr + (page * page_stride + position * position_stride)[:, None] + column[None, :] * value_stride
    values = tl.load(source, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if values.dtype != dtype or dtype == tl.float64:
        values = _round_to(values.to(tl.float32), dtype, INTERPRETED)
    target = out_ptr + row[:, None] * out_stride + column[None, :] * out_value_stride
    tl.store(target, values, mask=(row < num_rows)[:, None] & (column < DIM)[None, :])
