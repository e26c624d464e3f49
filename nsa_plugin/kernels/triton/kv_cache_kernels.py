"""Device code of the cache writers and readers; `kv_cache` launches it.

A program handles whole rows: the fp8 tiles of ROWS rows as a [ROWS * tiles, tile] block, so that each line has one
scale, and their bfloat16 tails as a second block. GPUs before SM89 have no fp8 conversion; there, and interpreted, the
bits are converted with integers.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# `do_not_specialize` below: counts change from batch to batch and must not compile a kernel anew.


@triton.jit
def round_to(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values in another float type, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Triton's interpreter cuts the low bits off instead of rounding.
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(values == values, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit
def encode_fp8(values, NATIVE_FP8: tl.constexpr):
    """e4m3 bytes of float32 values of at most 448, up to rounding; NaN stays NaN."""
    if NATIVE_FP8:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Round 20 mantissa bits away, to nearest even; the exponent's bias changes from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2 ** -6 the step is 2 ** -9, which is the last mantissa bit of 2 ** 14: the addition rounds to it.
        stepped = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, stepped, tl.minimum(normal, 0x7E))
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_fp8(codes, NATIVE_FP8: tl.constexpr):
    """float32 values of e4m3 bytes."""
    if NATIVE_FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint16)
        magnitude = wide & 0x7F
        # The same exponent and mantissa as a float16, whose bias is 15 instead of 7: too small by 2 ** 8.
        half = (((wide & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
        return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


# Of two codes, bytes of $2 that PICK moves to the upper halves of a register.
_DECODE_TWO = """
        prmt.b32 wide, $2, 0, PICK;
        shr.b32 sum, wide, 1;
        and.b32 sum, sum, 0x3f803f80;
        lop3.b32 OUT, wide, 0x80008000, sum, 0xEA;
        add.u32 sum, sum, 0x00800080;
        lop3.b32 OUT, sum, 0x40004000, OUT, 0xEA;
        mul.rn.f16x2 OUT, OUT, factor;"""
_LOWER, _UPPER = (
    _DECODE_TWO.replace("PICK", pick).replace("OUT", out) for pick, out in (("0x1404", "$0"), ("0x3424", "$1"))
)
DECODE_FOUR = tl.constexpr(
    f"""
        {{
        .reg .b32 wide, sum, factor;
        mov.b32 factor, 0x5C005C00;{_LOWER}{_UPPER}
        }}
        """
)


@triton.jit
def decode_fp8_packed(codes):
    """float16 values of e4m3 bytes, exact, on a GPU alone: four at a time, in a quarter of `decode_fp8`'s instructions.

    As there, a code's bits are those of a float16 that is too small by 2 ** 8. Adding 0x80 to such a magnitude carries
    into bit 14 for NaN's code alone, and that bit makes its exponent all ones: a NaN that the product keeps.
    """
    return tl.inline_asm_elementwise(
        DECODE_FOUR,
        "=&r,=&r,r",
        [codes],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def scale_of_exponent(exponent):
    """float32 `2 ** (exponent - 127)` of int32 exponents 0 to 255; 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def locate(addresses_ptr, row, num_rows, available, stride, PAGE_SIZE: tl.constexpr, BY_PAGE: tl.constexpr):
    """Page and position of each row's slot, and whether it is in the cache; 0 and 0 if not."""
    entry = row // PAGE_SIZE if BY_PAGE else row
    address = tl.load(addresses_ptr + entry * stride, mask=row < num_rows, other=-1).to(tl.int64)
    inside = (address >= 0) & (address < available)
    address = tl.where(inside, address, 0)
    if BY_PAGE:
        return address, row % PAGE_SIZE, inside
    else:
        return address // PAGE_SIZE, address % PAGE_SIZE, inside


@triton.jit
def locate_tiles(
    cache_ptr, addresses_ptr, first, num_rows, available, page_stride, addresses_stride,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr,
    BY_PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The tiles of ROWS rows, as [ROWS * tiles]: row, tile, whether it is in the cache, its values' columns
    [ROWS * tiles, TILE] and their codes' addresses, and the address of the row's scales."""
    line = tl.arange(0, ROWS * TILES_POWER)
    row, tile = first + line // TILES_POWER, line % TILES_POWER
    page, position, inside = locate(addresses_ptr, row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE)
    column = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    page_ptr = cache_ptr + page * page_stride
    codes = (page_ptr + position * ROW_BYTES)[:, None] + column
    return row, tile, inside & (tile < TILES), column, codes, page_ptr + SCALES_START + position * SCALES_STRIDE


@triton.jit
def locate_tails(
    cache_ptr, addresses_ptr, row, num_rows, available, page_stride, addresses_stride,
    PAGE_SIZE: tl.constexpr, TAIL_START: tl.constexpr, ROW_BYTES: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """The addresses of rows' bfloat16 tails, and whether each row is in the cache."""
    page, position, inside = locate(addresses_ptr, row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE)
    return cache_ptr + page * page_stride + position * ROW_BYTES + TAIL_START, inside


@triton.jit
def load_scales(scales, tile, inside, IS_EXPONENT: tl.constexpr):
    """float32 scales of tiles."""
    if IS_EXPONENT:
        return scale_of_exponent(tl.load(scales + tile, mask=inside, other=0).to(tl.int32))
    else:
        return tl.load((scales + tile * 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["slots_ptr"])
def write_records_kernel(
    cache_ptr,  # uint8, pages page_stride bytes apart
    rows_ptr,
    rope_ptr,  # or None: the tail follows the rows' other values
    slots_ptr,
    num_rows, num_slots, page_stride,
    rows_stride, rows_value_stride, rope_stride, rope_value_stride, slots_stride,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr, TAIL_START: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_EXPONENT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    AMAX_FLOOR_BITS: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, tile, inside, column, targets, scales = locate_tiles(
        cache_ptr, slots_ptr, first, num_rows, num_slots, page_stride, slots_stride,
        PAGE_SIZE, TILE, TILES, TILES_POWER, ROW_BYTES, SCALES_START, SCALES_STRIDE, False, ROWS,
    )  # fmt: skip
    pointers = rows_ptr + row[:, None] * rows_stride + column.to(tl.int64) * rows_value_stride
    values = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)

    # The magnitudes' order is their bits' order, in which NaN is the largest: a tile with one has scale NaN.
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = tl.maximum(magnitude, AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full([ROWS * TILES_POWER], 448.0, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = scale_of_exponent(exponent)
    tl.store(targets, encode_fp8(tl.div_rn(values, scale[:, None]), NATIVE_FP8), mask=inside[:, None])
    if IS_EXPONENT:
        tl.store(scales + tile, exponent.to(tl.uint8), mask=inside)
    else:
        tl.store((scales + tile * 4).to(tl.pointer_type(tl.float32)), scale, mask=inside)

    if TAIL_DIM > 0:
        row = first + tl.arange(0, ROWS)
        target, inside = locate_tails(
            cache_ptr, slots_ptr, row, num_rows, num_slots, page_stride, slots_stride,
            PAGE_SIZE, TAIL_START, ROW_BYTES, False,
        )  # fmt: skip
        column = tl.arange(0, TAIL_DIM)
        if rope_ptr is None:
            pointers = rows_ptr + row[:, None] * rows_stride
            pointers += (TILES * TILE + column).to(tl.int64)[None, :] * rows_value_stride
        else:
            pointers = rope_ptr + row[:, None] * rope_stride + column.to(tl.int64)[None, :] * rope_value_stride
        tail = tl.load(pointers, mask=inside[:, None], other=0.0).to(tl.float32)
        if rope_ptr is not None:  # the contract's rows have one dtype
            tail = round_to(tail, rows_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
        target = target.to(tl.pointer_type(tl.bfloat16))
        tl.store(target[:, None] + column[None, :], round_to(tail, tl.bfloat16, INTERPRETED), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows", "available"])
def read_records_kernel(
    out_ptr,
    cache_ptr,  # uint8, pages page_stride bytes apart
    addresses_ptr,  # slots, or pages with BY_PAGE
    num_rows,
    available,  # slots or pages of the cache
    page_stride, addresses_stride, out_stride, out_value_stride,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr, TAIL_START: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_EXPONENT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    BY_PAGE: tl.constexpr, INTERPRETED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, tile, inside, column, sources, scales = locate_tiles(
        cache_ptr, addresses_ptr, first, num_rows, available, page_stride, addresses_stride,
        PAGE_SIZE, TILE, TILES, TILES_POWER, ROW_BYTES, SCALES_START, SCALES_STRIDE, BY_PAGE, ROWS,
    )  # fmt: skip
    codes = tl.load(sources, mask=inside[:, None], other=0)
    scale = load_scales(scales, tile, inside, IS_EXPONENT)

    tail_row = first + tl.arange(0, ROWS)
    tail_column = tl.arange(0, TAIL_DIM if TAIL_DIM > 0 else 1)
    if TAIL_DIM > 0:
        source, tail_inside = locate_tails(
            cache_ptr, addresses_ptr, tail_row, num_rows, available, page_stride, addresses_stride,
            PAGE_SIZE, TAIL_START, ROW_BYTES, BY_PAGE,
        )  # fmt: skip
        source = source.to(tl.pointer_type(tl.uint16))
        tail = tl.load(source[:, None] + tail_column[None, :], mask=tail_inside[:, None], other=0)
        # A bfloat16 is the upper half of a float32.
        tail = (tail.to(tl.uint32) << 16).to(tl.float32, bitcast=True)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values = round_to(decode_fp8(codes, NATIVE_FP8) * scale[:, None], dtype, INTERPRETED)
    pointers = out_ptr + row[:, None] * out_stride + column.to(tl.int64) * out_value_stride
    tl.store(pointers, values, mask=((row < num_rows) & (tile < TILES))[:, None])
    if TAIL_DIM > 0:
        pointers = out_ptr + tail_row[:, None] * out_stride
        pointers += (TILES * TILE + tail_column).to(tl.int64)[None, :] * out_value_stride
        tl.store(pointers, round_to(tail, dtype, INTERPRETED), mask=(tail_row < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["slots_ptr"])
def read_codes_kernel(
    codes_ptr,  # uint8 [num_rows, TILES * TILE]
    scales_ptr,  # float32 [num_rows, TILES]
    cache_ptr, slots_ptr, num_rows, num_slots, page_stride, slots_stride,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr,
    TAIL_DIM: tl.constexpr, TAIL_START: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr, IS_EXPONENT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row, tile, inside, column, sources, scales = locate_tiles(
        cache_ptr, slots_ptr, tl.program_id(0).to(tl.int64) * ROWS, num_rows, num_slots, page_stride, slots_stride,
        PAGE_SIZE, TILE, TILES, TILES_POWER, ROW_BYTES, SCALES_START, SCALES_STRIDE, False, ROWS,
    )  # fmt: skip
    stored = (row < num_rows) & (tile < TILES)
    codes = tl.load(sources, mask=inside[:, None], other=0)
    tl.store(codes_ptr + row[:, None] * (TILES * TILE) + column, codes, mask=stored[:, None])
    scale = load_scales(scales, tile, inside, IS_EXPONENT)
    tl.store(scales_ptr + row * TILES + tile, tl.where(inside, scale, 0.0), mask=stored)


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["slots_ptr"])
def write_plain_kernel(
    cache_ptr,
    rows_ptr,
    rope_ptr,  # or None
    slots_ptr,
    num_rows, num_slots, page_stride, position_stride, value_stride,
    rows_stride, rows_value_stride, rope_stride, rope_value_stride, slots_stride,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
    SPLIT: tl.constexpr,  # values that come from rows; the others come from rope
    ROWS: tl.constexpr, VALUES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    page, position, inside = locate(slots_ptr, row, num_rows, num_slots, slots_stride, PAGE_SIZE, False)
    pointers = rows_ptr + row[:, None] * rows_stride + column[None, :] * rows_value_stride
    values = tl.load(pointers, mask=inside[:, None] & (column < SPLIT)[None, :], other=0.0)
    if rope_ptr is not None:
        pointers = rope_ptr + row[:, None] * rope_stride + (column - SPLIT)[None, :] * rope_value_stride
        behind = ((column >= SPLIT) & (column < DIM))[None, :]
        rope = tl.load(pointers, mask=inside[:, None] & behind, other=0.0)
        if rope.dtype != values.dtype and values.dtype != tl.float64:
            rope = round_to(rope.to(tl.float32), values.dtype, INTERPRETED)
        values = tl.where(behind, rope, values)
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float64:
        values = values.to(tl.float64)
    elif values.dtype != dtype:
        values = round_to(values.to(tl.float32), dtype, INTERPRETED)
    target = cache_ptr + (page * page_stride + position * position_stride)[:, None] + column[None, :] * value_stride
    tl.store(target, values, mask=inside[:, None] & (column < DIM)[None, :])


@triton.jit(do_not_specialize=["num_rows", "available"])
def read_plain_kernel(
    out_ptr,
    cache_ptr,
    addresses_ptr,  # slots, or pages with BY_PAGE
    num_rows,
    available,  # slots or pages of the cache
    page_stride, position_stride, value_stride, addresses_stride, out_stride, out_value_stride,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
    BY_PAGE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    page, position, inside = locate(addresses_ptr, row, num_rows, available, addresses_stride, PAGE_SIZE, BY_PAGE)
    source = cache_ptr + (page * page_stride + position * position_stride)[:, None] + column[None, :] * value_stride
    values = tl.load(source, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if values.dtype != dtype or dtype == tl.float64:
        values = round_to(values.to(tl.float32), dtype, INTERPRETED)
    target = out_ptr + row[:, None] * out_stride + column[None, :] * out_value_stride
    tl.store(target, values, mask=(row < num_rows)[:, None] & (column < DIM)[None, :])
