"""Triton kernels of the V4 prefill route: from indices of two paged caches to rows of one workspace.

`nsa_plugin.kernels.v4_prefill` checks the arguments and states the contract. Each function launches
one kernel and does not wait for the device.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.swa_indices import IndexRows
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

MAX_BLOCK = STREAMS["v4_prefill"].block
MAP_BLOCK = STREAMS["v4_page_map"].block


class RowsPart(NamedTuple):
    """One cache's share of the workspace.

    indices [tokens, topk] int: slots of the cache with `page_map`, rows of the share without;
    lengths [tokens] int or None; pages [n] int: the pages of the cache in the order of the workspace;
    page_map [num_pages] int32 or None: the place of a page in `pages`, undefined for pages not in it;
    num_pages and page_size of the cache.
    """

    indices: torch.Tensor
    lengths: torch.Tensor | None
    pages: torch.Tensor
    page_map: torch.Tensor | None
    num_pages: int
    page_size: int


def map_pages(pages: torch.Tensor, page_map: torch.Tensor) -> None:
    """page_map[pages[i]] = i for every page in the map; the other entries keep their values.

    The map needs no clearing: a reader checks its entry against `pages`. A page listed twice gets either place; both
    have the same rows.
    """
    if len(pages) and len(page_map):
        with torch.cuda.device_of(pages):
            _map_pages[(ceil_div(len(pages), MAP_BLOCK),)](
                page_map, pages, len(pages), len(page_map), page_map.stride(0), pages.stride(0),
                BLOCK=MAP_BLOCK,
            )  # fmt: skip


def combine_rows(window: RowsPart, extra: RowsPart | None, out: torch.Tensor) -> IndexRows:
    """Workspace rows of both halves, left-compact: the window's, then the extra ones, then -1.

    Args:
        window: its rows are the workspace's first.
        extra: its rows follow those of the window's pages.
        out: [tokens, width] int32, width at least the sum of both; overwritten whole.

    Returns:
        `out` and new lengths [tokens] int32. An index outside its cache or outside the
        listed pages becomes -1.
    """
    tokens, width = out.shape
    lengths = torch.empty((tokens,), dtype=torch.int32, device=out.device)
    if tokens == 0:
        return IndexRows(out, lengths)
    second = window if extra is None else extra
    block = min(power_of_2(max(width, 1)), MAX_BLOCK)
    with torch.cuda.device_of(out):
        _combine_rows[(tokens, max(1, ceil_div(width, block)))](
            out, lengths, *_pointers(window), *_pointers(second),
            width, len(window.pages), window.num_pages, len(second.pages), second.num_pages,
            *out.stride(), *_strides(window), *_strides(second),
            0 if extra is None else int(extra.indices.shape[1]),
            HAS_EXTRA=extra is not None, WINDOW_WIDTH=int(window.indices.shape[1]), WINDOW_PAGE=window.page_size,
            EXTRA_PAGE=second.page_size, BLOCK=block,
        )  # fmt: skip
    return IndexRows(out, lengths)


def _pointers(part: RowsPart) -> tuple[torch.Tensor | None, ...]:
    return part.indices, part.lengths, part.pages, part.page_map


def _strides(part: RowsPart) -> tuple[int, ...]:
    optional = (0 if tensor is None else tensor.stride(0) for tensor in (part.lengths, part.pages, part.page_map))
    return (*part.indices.stride(), *optional)


@triton.jit(do_not_specialize=["num_listed", "num_pages"])
def _map_pages(map_ptr, pages_ptr, num_listed, num_pages, map_stride, pages_stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + place * pages_stride, mask=place < num_listed, other=-1).to(tl.int64)
    tl.store(map_ptr + page * map_stride, place.to(tl.int32), mask=(page >= 0) & (page < num_pages))


@triton.jit
def _length(lengths_ptr, row, stride, width):
    if lengths_ptr is None:
        return tl.full([], 1, tl.int64) * width
    else:
        return tl.maximum(tl.minimum(tl.load(lengths_ptr + row * stride).to(tl.int64), width), 0)


@triton.jit
def _place(index, valid, pages_ptr, map_ptr, num_listed, num_pages, pages_stride, map_stride, PAGE_SIZE: tl.constexpr):
    """The row that an index names within its cache's share of the workspace, and whether it names one."""
    valid = valid & (index >= 0)
    page = index // PAGE_SIZE
    if map_ptr is None:
        place = page
        valid = valid & (place < num_listed)
        held = tl.load(pages_ptr + place * pages_stride, mask=valid, other=-1).to(tl.int64)
        valid = valid & (held >= 0) & (held < num_pages)
    else:
        valid = valid & (page < num_pages)
        place = tl.load(map_ptr + page * map_stride, mask=valid, other=-1).to(tl.int64)
        valid = valid & (place >= 0) & (place < num_listed)
        # The map's entry for a page that is not listed is undefined, or left by an earlier batch.
        held = tl.load(pages_ptr + place * pages_stride, mask=valid, other=-1).to(tl.int64)
        valid = valid & (held == page)
    return place * PAGE_SIZE + index % PAGE_SIZE, valid


# With a compress ratio of 128 the extra width grows with the context, and must not compile the kernel anew.
@triton.jit(do_not_specialize=["window_listed", "window_pages", "extra_listed", "extra_pages", "extra_width"])
def _combine_rows(
    out_ptr,  # int32 [tokens, width]
    lengths_ptr,  # int32 [tokens]
    window_ptr,
    window_lengths_ptr,  # or None: all of the window's width
    window_pages_ptr,
    window_map_ptr,  # or None: the indices are rows of the share
    extra_ptr, extra_lengths_ptr, extra_pages_ptr, extra_map_ptr,
    width, window_listed, window_pages, extra_listed, extra_pages, out_stride, out_entry_stride,
    window_stride, window_entry_stride, window_lengths_stride, window_pages_stride, window_map_stride,
    extra_stride, extra_entry_stride, extra_lengths_stride, extra_pages_stride, extra_map_stride, extra_width,
    HAS_EXTRA: tl.constexpr, WINDOW_WIDTH: tl.constexpr, WINDOW_PAGE: tl.constexpr, EXTRA_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    window_length = _length(window_lengths_ptr, row, window_lengths_stride, WINDOW_WIDTH)
    length = window_length
    from_window = column < window_length
    index = tl.load(window_ptr + row * window_stride + column * window_entry_stride, mask=from_window, other=-1)
    place, valid = _place(
        index.to(tl.int64), from_window, window_pages_ptr, window_map_ptr, window_listed, window_pages,
        window_pages_stride, window_map_stride, WINDOW_PAGE,
    )  # fmt: skip
    combined = tl.where(valid, place, -1)
    if HAS_EXTRA:
        extra_length = _length(extra_lengths_ptr, row, extra_lengths_stride, extra_width)
        length += extra_length
        behind = column - window_length
        from_extra = (behind >= 0) & (behind < extra_length)
        index = tl.load(extra_ptr + row * extra_stride + behind * extra_entry_stride, mask=from_extra, other=-1)
        place, valid = _place(
            index.to(tl.int64), from_extra, extra_pages_ptr, extra_map_ptr, extra_listed, extra_pages,
            extra_pages_stride, extra_map_stride, EXTRA_PAGE,
        )  # fmt: skip
        first = tl.full([], WINDOW_PAGE, tl.int64) * window_listed
        combined = tl.where(valid, place + first, combined)
    tl.store(out_ptr + row * out_stride + column * out_entry_stride, combined.to(tl.int32), mask=column < width)
    tl.store(lengths_ptr + row, length.to(tl.int32), mask=tl.program_id(1) == 0)
