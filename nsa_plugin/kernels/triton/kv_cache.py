"""Triton kernels that write and read paged KV caches; contracts in `nsa_plugin.kernels.kv_cache`.

Each function has the signature of its reference, launches one kernel, does not wait for the device and allocates only
its results (see `read`). Slots are not checked on the host: one beyond the cache counts as negative, so `write` skips
it and the readers give zeros.

Codes and scales equal the reference's on the CPU bit for bit: the scale is a true division by 448, a
ue8m0 exponent comes from the scale's bits, and both roundings are to nearest even. (The reference on a
GPU multiplies by 1 / 448 there, so that its float32 scales may differ in the last bit.)
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.triton.device import facts_of
from nsa_plugin.kernels.triton.kv_cache_kernels import (
    read_codes_kernel,
    read_plain_kernel,
    read_records_kernel,
    write_plain_kernel,
    write_records_kernel,
)
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS
from nsa_plugin.layouts import Fp8Layout, ScaleFormat

# Rows a program. Few rows (decode) are spread over more programs.
ROWS_PER_PROGRAM, ROWS_PER_PROGRAM_FEW = STREAMS["kv_cache_records"].rows, STREAMS["kv_cache_few_records"].rows
FEW_ROWS = 1024
# Block of the plain layout: rows x values.
PLAIN_ROWS, PLAIN_VALUES = STREAMS["kv_cache_plain"].rows, STREAMS["kv_cache_plain"].block


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
            grid = (ceil_div(count, PLAIN_ROWS), ceil_div(cache.dim, PLAIN_VALUES))
            write_plain_kernel[grid](
                cache.data, *sources, *cache.data.stride(), *strides,
                PAGE_SIZE=cache.page_size, DIM=cache.dim, SPLIT=cache.dim - rope_dim, ROWS=PLAIN_ROWS,
                VALUES=PLAIN_VALUES, INTERPRETED=not rows.is_cuda,
            )  # fmt: skip
            return
        rows_per_program = _rows_per_program(count)
        write_records_kernel[(ceil_div(count, rows_per_program),)](
            cache.data, *sources, cache.data.stride(0), *strides,
            **_record_constants(op, cache, cache.layout), AMAX_FLOOR_BITS=_float_bits(cache.layout.amax_floor),
            POWER_OF_TWO=power_of_two_scales or cache.layout.scale_format is ScaleFormat.UE8M0,
            INTERPRETED=not rows.is_cuda, ROWS=rows_per_program,
        )  # fmt: skip


def read(
    cache: PagedCache, slots: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
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
    cache: PagedCache, pages: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
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
            read_codes_kernel[(ceil_div(count, rows_per_program),)](
                codes, scales, cache.data, slots, count, cache.num_slots, cache.data.stride(0), slots.stride(0),
                **_record_constants(op, cache, layout), ROWS=rows_per_program,
            )  # fmt: skip
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
            grid = (ceil_div(count, PLAIN_ROWS), ceil_div(cache.dim, PLAIN_VALUES))
            read_plain_kernel[grid](
                rows, cache.data, addresses, count, available, *cache.data.stride(), addresses.stride(0),
                *rows.stride(),
                PAGE_SIZE=cache.page_size, DIM=cache.dim, ROWS=PLAIN_ROWS, VALUES=PLAIN_VALUES, **constants,
            )  # fmt: skip
            return out
        rows_per_program = _rows_per_program(count)
        read_records_kernel[(ceil_div(count, rows_per_program),)](
            rows, cache.data, addresses, count, available, cache.data.stride(0), addresses.stride(0), *rows.stride(),
            **_record_constants(op, cache, cache.layout), **constants, ROWS=rows_per_program,
        )  # fmt: skip
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
    """Compile-time constants of an fp8 layout."""
    is_exponent = layout.scale_format is ScaleFormat.UE8M0
    # Tails are read as bfloat16, scales as float32: a GPU faults on such a load at an odd address.
    alignment = 2 if is_exponent else 4
    aligned = cache.data.data_ptr() % alignment == 0 and cache.data.stride(0) % alignment == 0
    if not aligned:
        where = f"address {cache.data.data_ptr()} with {cache.data.stride(0)} bytes between pages"
        raise KernelArgumentError(f"{op}: cache is at {where}; layout {layout.name} needs multiples of {alignment}")
    return _layout_constants(layout, cache.page_size) | {"NATIVE_FP8": facts_of(cache.device).native_fp8}


@lru_cache
def _layout_constants(layout: Fp8Layout, page_size: int) -> dict[str, Any]:
    is_exponent, in_rows = layout.scale_format is ScaleFormat.UE8M0, not layout.scales_after_page
    return {
        "PAGE_SIZE": page_size,
        "TILE": layout.tile,
        "TILES": layout.num_scales,
        "TILES_POWER": power_of_2(layout.num_scales),
        "TAIL_DIM": layout.bf16_dim,
        "TAIL_START": layout.tail_start,
        "ROW_BYTES": layout.data_stride,
        "SCALES_START": layout.fp8_dim if in_rows else page_size * layout.data_stride,
        "SCALES_STRIDE": layout.data_stride if in_rows else layout.scale_slot_bytes,
        "IS_EXPONENT": is_exponent,
    }
