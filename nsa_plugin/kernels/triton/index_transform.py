"""Triton kernels from logical positions to cache slots; contracts in `nsa_plugin.kernels.index_transform`.

Each function has the signature of its reference, launches one kernel and does not wait for the device. Any strides,
expanded tensors included. Values are not checked: a row whose `row_to_request` is beyond the page table is a padded
row.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.index_transform import check_paged, check_ragged
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

# Entries a program at most.
MAX_BLOCK = STREAMS["index_transform"].block

# `do_not_specialize` below: counts change from batch to batch and must not compile a kernel anew.


def paged(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    row_to_request: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of logical positions; see `reference_paged`."""
    slots = check_paged(topk_indices, page_table, page_size, row_to_request, lengths, out)
    rows, topk = slots.shape
    if slots.numel():
        block = min(power_of_2(topk), MAX_BLOCK)
        with torch.cuda.device_of(slots):
            _paged[(rows, ceil_div(topk, block))](
                slots, topk_indices, page_table, row_to_request, lengths, topk, *page_table.shape,
                *topk_indices.stride(), *page_table.stride(), _stride(row_to_request), _stride(lengths),
                PAGE_SIZE=page_size, BLOCK=block,
            )  # fmt: skip
    return slots


def ragged(topk_indices: torch.Tensor, offsets: torch.Tensor, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of a ragged key buffer of logical positions; see `reference_ragged`."""
    check_ragged(topk_indices, offsets, lengths)
    rows, topk = topk_indices.shape
    moved = torch.empty((rows, topk), dtype=torch.int32, device=topk_indices.device)
    if moved.numel():
        block = min(power_of_2(topk), MAX_BLOCK)
        with torch.cuda.device_of(moved):
            _ragged[(rows, ceil_div(topk, block))](
                moved, topk_indices, offsets, lengths, topk,
                *topk_indices.stride(), offsets.stride(0), _stride(lengths), BLOCK=block,
            )  # fmt: skip
    return moved


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


@triton.jit(
    do_not_specialize=["requests", "pages", "table_stride"],  # a table is as wide as the batch needs
    do_not_specialize_on_alignment=["request_ptr", "lengths_ptr"],  # they may be slices from any row on
)
def _paged(
    slots_ptr,  # int32 [rows, topk]
    indices_ptr,
    table_ptr,
    request_ptr,  # or None: row i of the table is for row i
    lengths_ptr,  # or None
    topk, requests, pages,
    indices_stride, indices_entry_stride, table_stride, table_page_stride, request_stride, lengths_stride,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request = row
    if request_ptr is not None:
        request = tl.load(request_ptr + row * request_stride).to(tl.int64)
    limit = tl.full([], PAGE_SIZE, tl.int64) * pages
    if lengths_ptr is not None:
        limit = tl.minimum(limit, tl.load(lengths_ptr + row * lengths_stride).to(tl.int64))
    # As widths, not as conditions: Triton's interpreter does not broadcast a condition of one value.
    width = tl.where((request >= 0) & (request < requests), topk, 0)
    pointers = indices_ptr + row * indices_stride + column.to(tl.int64) * indices_entry_stride
    position = tl.load(pointers, mask=column < width, other=-1).to(tl.int64)
    valid = (position >= 0) & (position < limit)
    position = tl.where(valid, position, 0)
    pointers = table_ptr + request * table_stride + (position // PAGE_SIZE) * table_page_stride
    page = tl.load(pointers, mask=valid, other=-1).to(tl.int64)
    slot = tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots_ptr + row * topk + column, slot.to(tl.int32), mask=column < topk)


@triton.jit(do_not_specialize_on_alignment=["offsets_ptr", "lengths_ptr"])
def _ragged(
    moved_ptr,  # int32 [rows, topk]
    indices_ptr,
    offsets_ptr,
    lengths_ptr,  # or None
    topk, indices_stride, indices_entry_stride, offsets_stride, lengths_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(offsets_ptr + row * offsets_stride).to(tl.int64)
    pointers = indices_ptr + row * indices_stride + column.to(tl.int64) * indices_entry_stride
    position = tl.load(pointers, mask=column < topk, other=-1).to(tl.int64)
    valid = position >= 0
    if lengths_ptr is not None:
        valid = valid & (position < tl.load(lengths_ptr + row * lengths_stride).to(tl.int64))
    moved = tl.where(valid, position + offset, -1)
    tl.store(moved_ptr + row * topk + column, moved.to(tl.int32), mask=column < topk)
