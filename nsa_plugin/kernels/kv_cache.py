"""Paged KV caches: a handle on one, and writing and reading its rows in any layout.

Ops `kv_cache_write` and `kv_cache_read`.

A cache is handled as a `PagedCache`: the engine's own tensor, its layout and its page size. Rows are
addressed by slot, `page * page_size + position`; all addressing is 64-bit. The accepted tensors are

    bf16         [num_pages, page_size, dim] or [num_pages, page_size, 1, dim], any float dtype
    fp8 layouts  [num_pages, page_size, row_bytes] or [num_pages, page_size, 1, row_bytes], or
                 [num_pages, bytes >= page_size * row_bytes] with the page size given;
                 uint8, int8 or float8_e4m3fn; the bytes of a page contiguous, any stride between pages

`kv_cache_write` quantises rows and stores them; a negative slot skips its row, and of two rows with
one slot either may win. Bytes that belong to no row (padding of a page, of the V4 scales) are left
alone. `kv_cache_read` dequantises a set of slots into float rows, in chunks, into the caller's
workspace if given; a negative slot gives a row of zeros. The codes of two correct writers may
differ by one step where `value / scale` and `value * (1 / scale)` round differently.

Sources: see `nsa_plugin.layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.fp8 import ceil_exponents, dequantize_tiles, exponents_to_scales, quantize_tiles
from nsa_plugin.layouts import CacheLayout, Fp8Layout, PlainLayout, ScaleFormat, get_layout

BYTE_DTYPES = (torch.uint8, torch.int8, FP8_DTYPE)

# Rows that one pass of a reader converts to float32: 2048 rows of 576 values are 4.5 MiB.
READ_CHUNK_ROWS = 2048


@dataclass(frozen=True)
class PagedCache:
    """An engine's cache tensor with what is needed to address it. Made by `open_cache` or `allocate_cache`.

    Attributes:
        data: plain layouts: [num_pages, page_size, dim], the engine's float dtype;
            fp8 layouts: uint8 [num_pages, page_size * row_bytes]. A view of the engine's memory.
        layout: the byte layout.
        page_size: tokens a page.
    """

    data: torch.Tensor
    layout: CacheLayout
    page_size: int

    @property
    def num_pages(self) -> int:
        return int(self.data.shape[0])

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def dim(self) -> int:
        """Values of a row after dequantisation."""
        return self.layout.dim if isinstance(self.layout, Fp8Layout) else int(self.data.shape[-1])

    @property
    def device(self) -> torch.device:
        return self.data.device

    def as_records(self) -> torch.Tensor:
        """[num_pages, page_size, 1, row_bytes or dim], as FlashMLA and DeepGEMM take a cache. A view."""
        if isinstance(self.layout, PlainLayout):
            return self.data.unsqueeze(2)
        row = self.layout.row_bytes
        return self.data.as_strided(
            (self.num_pages, self.page_size, 1, row), (self.data.stride(0), row, row, 1), self.data.storage_offset()
        )


def open_cache(data: torch.Tensor, layout: str | CacheLayout, page_size: int | None = None) -> PagedCache:
    """Take an engine's cache tensor as a `PagedCache`, without a copy.

    Args:
        data: see the module's table.
        layout: a layout or its name.
        page_size: tokens a page; needed for 2-D tensors, otherwise checked against the tensor.

    Raises:
        KernelArgumentError: the tensor does not fit the layout.
        LayoutError: unknown layout name.
    """
    op = "open_cache"
    layout = get_layout(layout) if isinstance(layout, str) else layout
    if data.dim() == 4:
        require(data.shape[2] == 1, op, f"data has shape {list(data.shape)}; dimension 2 must be 1 KV head")
        data = data.squeeze(2)
    require(data.dim() in (2, 3), op, f"data has shape {list(data.shape)}; expected 2, 3 or 4 dimensions")
    if data.dim() == 3:
        require(
            page_size in (None, data.shape[1]), op, f"page_size is {page_size} but data has {data.shape[1]} rows a page"
        )
        page_size = data.shape[1]
    if page_size is None or page_size < 1:
        raise KernelArgumentError(f"{op}: page_size is {page_size}; it is at least 1, and 2-D data needs it")
    if isinstance(layout, PlainLayout):
        check_tensor(op, "data", data, ("num_pages", page_size, "dim"), dtypes=FLOAT_DTYPES)
        return PagedCache(data, layout, page_size)

    row, used = layout.row_bytes, layout.row_bytes * page_size
    if data.dim() == 3:
        check_tensor(op, "data", data, ("num_pages", page_size, row), dtypes=BYTE_DTYPES)
        contiguous = page_size == 1 or data.stride(1) == row
    else:
        check_tensor(op, "data", data, ("num_pages", "page_bytes"), dtypes=BYTE_DTYPES)
        fits = data.shape[1] >= used
        require(fits, op, f"data has {data.shape[1]} bytes a page; {layout.name} needs {used}")
        contiguous = True
    contiguous = contiguous and data.stride(-1) == 1
    require(contiguous, op, f"data has strides {data.stride()}; the bytes of a page must be contiguous")
    pages = data.view(torch.uint8).as_strided((data.shape[0], used), (data.stride(0), 1), data.storage_offset())
    return PagedCache(pages, layout, page_size)


def allocate_cache(
    layout: str | CacheLayout,
    num_pages: int,
    page_size: int,
    *,
    dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> PagedCache:
    """A new cache of zeros with the layout's page padding.

    Args:
        dim: values a row; plain layouts only, default their first.
        dtype: float dtype of a plain layout's values.
    """
    layout = get_layout(layout) if isinstance(layout, str) else layout
    if isinstance(layout, PlainLayout):
        shape = (num_pages, page_size, layout.dims[0] if dim is None else dim)
        return open_cache(torch.zeros(shape, dtype=dtype, device=device), layout)
    fits = dim in (None, layout.dim)
    require(fits, "allocate_cache", f"dim is {dim}; layout {layout.name} has {layout.dim}")
    pages = torch.zeros((num_pages, layout.page_bytes(page_size)), dtype=torch.uint8, device=device)
    return open_cache(pages, layout, page_size)


def reference_write(
    cache: PagedCache,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rope: torch.Tensor | None = None,
    power_of_two_scales: bool = False,
) -> None:
    """Quantise rows into the cache, or copy them into a plain one. Contract: see the module.

    Args:
        cache: the cache; changed in place.
        rows: [num_rows, cache.dim], float; with `rope`, their first cache.dim - rope_dim values.
        slot_mapping: [n] int32 or int64, n <= num_rows; the first n rows are written. Negative: skip.
        rope: [num_rows, rope_dim] or [num_rows, 1, rope_dim]: the rows' last values, if given apart.
        power_of_two_scales: round float32 scales up to powers of two (ue8m0 scales always are).

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or a slot is beyond the cache.
    """
    op = "kv_cache_write"
    if rope is not None:
        rope = rope.squeeze(1) if rope.dim() == 3 else rope
        check_tensor(op, "rope", rope, (rows.shape[0], "rope_dim"), dtypes=FLOAT_DTYPES, device=rows.device)
        rows = torch.cat([rows, rope.to(rows.dtype)], dim=-1)
    check_tensor(op, "rows", rows, ("num_rows", cache.dim), dtypes=FLOAT_DTYPES, device=cache.device)
    check_tensor(op, "slot_mapping", slot_mapping, ("n",), dtypes=INDEX_DTYPES, device=cache.device)
    require(len(slot_mapping) <= len(rows), op, f"slot_mapping has {len(slot_mapping)} slots for {len(rows)} rows")
    _check_slots(op, "slot_mapping", slot_mapping, cache)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    if not len(slots):
        return
    rows = rows[: len(slot_mapping)][written]
    if isinstance(cache.layout, PlainLayout):
        cache.data[slots // cache.page_size, slots % cache.page_size] = rows.to(cache.data.dtype)
        return
    _write_records(cache, cache.layout, rows, slots, power_of_two_scales)


def reference_read(
    cache: PagedCache, slots: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Dequantise a set of slots into float rows. Contract: see the module.

    Args:
        slots: int32 or int64, any shape. Negative: a row of zeros.
        out: [*slots.shape, cache.dim], the caller's workspace; its dtype counts then.
        dtype: dtype of a new result.

    Returns:
        `out`, or a new tensor [*slots.shape, cache.dim].

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or a slot is beyond the cache.
    """
    op = "kv_cache_read"
    shape = (*slots.shape, cache.dim)
    check_tensor(op, "slots", slots, slots.shape, dtypes=INDEX_DTYPES, device=cache.device)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=cache.device)
    check_tensor(op, "out", out, shape, dtypes=FLOAT_DTYPES, device=cache.device)
    _check_slots(op, "slots", slots, cache)
    flat = slots.reshape(-1)
    rows = out.view(-1, cache.dim) if out.is_contiguous() else torch.empty_like(out).view(-1, cache.dim)
    for start in range(0, len(flat), READ_CHUNK_ROWS):
        chunk = slice(start, start + READ_CHUNK_ROWS)
        rows[chunk] = gather_rows(cache, flat[chunk]).to(out.dtype)
    if not out.is_contiguous():
        out.copy_(rows.view(shape))
    return out


def reference_read_codes(cache: PagedCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored fp8 codes and scales of slots, without dequantising: what fp8 indexer logits take.

    Args:
        cache: a cache of an fp8 layout.
        slots: [n] int32 or int64, all in the cache.

    Returns:
        codes [n, fp8_dim] float8_e4m3fn and scales [n, num_scales] float32.
    """
    op = "kv_cache_read"
    if not isinstance(cache.layout, Fp8Layout):
        raise KernelArgumentError(f"{op}: layout {cache.layout.name} stores no fp8 codes")
    check_tensor(op, "slots", slots, ("n",), dtypes=INDEX_DTYPES, device=cache.device)
    _check_slots(op, "slots", slots, cache)
    require(not bool((slots < 0).any()), op, "slots has negative entries; codes have no value for them")
    codes, scales, _ = _gather_records(cache, cache.layout, slots.long())
    return codes, scales


def gather_rows(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """float32 rows [*slots.shape, cache.dim] of slots in the cache; zeros where a slot is negative.

    Unchecked and in one piece: for the references, which already work in chunks.
    """
    if cache.num_slots == 0:
        return torch.zeros((*slots.shape, cache.dim), device=cache.device)
    valid = slots >= 0
    safe = torch.where(valid, slots, 0).long()
    if isinstance(cache.layout, PlainLayout):
        rows = cache.data[safe // cache.page_size, safe % cache.page_size].float()
    else:
        codes, scales, tail = _gather_records(cache, cache.layout, safe)
        rows = torch.cat([dequantize_tiles(codes, scales), tail.float()], dim=-1)
    # Memory at an invalid slot may be NaN, which a product with 0 would keep.
    return rows.masked_fill_(~valid.unsqueeze(-1), 0.0)


def _gather_records(
    cache: PagedCache, layout: Fp8Layout, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [..., fp8_dim] float8, scales [..., num_scales] float32, tail [..., bf16_dim] bfloat16."""
    data, scale_slots = _record_views(cache, layout)
    page, position = slots // cache.page_size, slots % cache.page_size
    record = data[page, position]
    codes = record[..., : layout.fp8_dim].contiguous().view(FP8_DTYPE)
    tail = record[..., layout.tail_start : layout.tail_start + 2 * layout.bf16_dim]
    tail = tail.contiguous().view(torch.bfloat16)
    stored = scale_slots[page, position][..., : layout.num_scales * layout.scale_bytes].contiguous()
    if layout.scale_format is ScaleFormat.UE8M0:
        return codes, exponents_to_scales(stored), tail
    return codes, stored.view(torch.float32), tail


def _write_records(
    cache: PagedCache, layout: Fp8Layout, rows: torch.Tensor, slots: torch.Tensor, power_of_two_scales: bool
) -> None:
    is_exponent = layout.scale_format is ScaleFormat.UE8M0
    codes, scales = quantize_tiles(
        rows[:, : layout.fp8_dim],
        layout.tile,
        amax_floor=layout.amax_floor,
        power_of_two=is_exponent or power_of_two_scales,
    )
    stored = ceil_exponents(scales) if is_exponent else scales.contiguous().view(torch.uint8)
    tail = rows[:, layout.fp8_dim :].to(torch.bfloat16).contiguous().view(torch.uint8)
    data, scale_slots = _record_views(cache, layout)
    page, position = slots // cache.page_size, slots % cache.page_size
    data[..., : layout.fp8_dim][page, position] = codes.view(torch.uint8)
    data[..., layout.tail_start : layout.tail_start + 2 * layout.bf16_dim][page, position] = tail
    scale_slots[..., : stored.shape[-1]][page, position] = stored


def _record_views(cache: PagedCache, layout: Fp8Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The two byte arrays of a cache, [pages, page_size, bytes] each: its rows and its scales.

    In a layout that keeps scales inside the rows, the second is a slice of the first.
    """
    split = cache.page_size * layout.data_stride
    data = cache.data[:, :split].unflatten(1, (cache.page_size, layout.data_stride))
    if not layout.scales_after_page:
        return data, data[..., layout.fp8_dim : layout.tail_start]
    return data, cache.data[:, split:].unflatten(1, (cache.page_size, layout.scale_slot_bytes))


def _check_slots(op: str, name: str, slots: torch.Tensor, cache: PagedCache) -> None:
    largest = int(slots.max()) if slots.numel() else -1
    slots_end = cache.num_slots
    require(largest < slots_end, op, f"{name} has slot {largest}; the cache has {slots_end} slots")
