"""Triton kernels from logical positions to cache slots; contracts in `nsa_plugin.kernels.index_transform`.

Each function has the signature of the reference of its name, launches one kernel and waits for nothing.
Any strides, expanded tensors included. What the reference checks by reading values cannot be checked
without waiting for the device: a row whose `row_to_request` is beyond the page table counts as padded.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.checks import INDEX_DTYPES, check_tensor, require
from nsa_plugin.kernels.index_transform import check_output
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2

# Entries a program; a row of 2048 is one program.
MAX_BLOCK = 2048

# `do_not_specialize` below: counts change from batch to batch and must not compile a kernel anew.


def paged(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    row_to_request: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    num_rows: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of logical positions; see `reference_paged`."""
    op = "index_transform_paged"
    rows, topk = _check_indices(op, topk_indices)
    device = topk_indices.device
    check_tensor(op, "page_table", page_table, ("requests", "pages"), dtypes=INDEX_DTYPES, device=device)
    require(page_size > 0, op, f"page_size is {page_size}; a page holds at least 1 token")
    requests, pages = page_table.shape
    if row_to_request is None:
        require(requests >= rows, op, f"page_table has {requests} rows for {rows} rows of topk_indices")
    else:
        check_tensor(op, "row_to_request", row_to_request, (rows,), dtypes=INDEX_DTYPES, device=device)
    if lengths is not None:
        check_tensor(op, "lengths", lengths, (rows,), dtypes=INDEX_DTYPES, device=device)
    slots = _new_rows(op, topk_indices, num_rows, torch.int32, out)
    if slots.numel() == 0:
        return slots
    block = _block(topk)
    with torch.cuda.device_of(slots):
        _paged[(slots.shape[0], ceil_div(topk, block))](
            slots,
            topk_indices,
            page_table,
            row_to_request,
            lengths,
            rows,
            topk,
            requests,
            pages,
            *topk_indices.stride(),
            *page_table.stride(),
            0 if row_to_request is None else row_to_request.stride(0),
            0 if lengths is None else lengths.stride(0),
            PAGE_SIZE=page_size,
            BLOCK=block,
        )
    return slots


def ragged(
    topk_indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    num_rows: int | None = None,
) -> torch.Tensor:
    """Rows of a ragged key buffer of logical positions; see `reference_ragged`."""
    op = "index_transform_ragged"
    rows, topk = _check_indices(op, topk_indices)
    check_tensor(op, "offsets", offsets, (rows,), dtypes=INDEX_DTYPES, device=topk_indices.device)
    if lengths is not None:
        check_tensor(op, "lengths", lengths, (rows,), dtypes=INDEX_DTYPES, device=topk_indices.device)
    moved = _new_rows(op, topk_indices, num_rows, torch.int32)
    if moved.numel() == 0:
        return moved
    block = _block(topk)
    with torch.cuda.device_of(moved):
        _ragged[(moved.shape[0], ceil_div(topk, block))](
            moved,
            topk_indices,
            offsets,
            lengths,
            rows,
            topk,
            *topk_indices.stride(),
            offsets.stride(0),
            0 if lengths is None else lengths.stride(0),
            BLOCK=block,
        )
    return moved


def pad_rows(topk_indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of -1 added up to `num_rows`; see `reference_pad_rows`. The argument itself if none are missing."""
    op = "pad_topk_rows"
    rows, topk = _check_indices(op, topk_indices)
    if num_rows == rows:
        return topk_indices
    padded = _new_rows(op, topk_indices, num_rows, topk_indices.dtype)
    if padded.numel() == 0:
        return padded
    block = _block(topk)
    with torch.cuda.device_of(padded):
        _pad_rows[(padded.shape[0], ceil_div(topk, block))](
            padded, topk_indices, rows, topk, *topk_indices.stride(), BLOCK=block
        )
    return padded


def _check_indices(op: str, topk_indices: torch.Tensor) -> tuple[int, int]:
    check_tensor(op, "topk_indices", topk_indices, ("rows", "topk"), dtypes=INDEX_DTYPES)
    rows, topk = topk_indices.shape
    return rows, topk


def _new_rows(
    op: str, topk_indices: torch.Tensor, num_rows: int | None, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    rows, topk = topk_indices.shape
    require(num_rows is None or num_rows >= rows, op, f"num_rows is {num_rows}; topk_indices has {rows} rows")
    shape = (rows if num_rows is None else num_rows, topk)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=topk_indices.device)
    check_output(op, topk_indices, shape[0], out)
    return out


def _block(topk: int) -> int:
    return min(power_of_2(topk), MAX_BLOCK)


@triton.jit(
    do_not_specialize=["rows", "requests", "pages", "table_stride"],  # a table is as wide as the batch needs
    do_not_specialize_on_alignment=["request_ptr", "lengths_ptr"],  # they may be slices from any row on
)
def _paged(
    slots_ptr,  # int32 [programs, topk]
    indices_ptr,
    table_ptr,
    request_ptr,  # or None: row i of the table is for row i
    lengths_ptr,  # or None
    rows,
    topk,
    requests,
    pages,
    indices_stride,
    indices_entry_stride,
    table_stride,
    table_page_stride,
    request_stride,
    lengths_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    if request_ptr is not None:
        request = tl.load(request_ptr + row * request_stride, mask=real, other=-1).to(tl.int64)
    else:
        request = row
    limit = tl.full([], PAGE_SIZE, tl.int64) * pages
    if lengths_ptr is not None:
        limit = tl.minimum(limit, tl.load(lengths_ptr + row * lengths_stride, mask=real, other=0).to(tl.int64))
    # As widths, not as conditions: Triton's interpreter does not broadcast a condition of one value.
    width = tl.where(real & (request >= 0) & (request < requests), topk, 0)
    pointers = indices_ptr + row * indices_stride + column.to(tl.int64) * indices_entry_stride
    position = tl.load(pointers, mask=column < width, other=-1).to(tl.int64)
    valid = (position >= 0) & (position < limit)
    position = tl.where(valid, position, 0)
    pointers = table_ptr + request * table_stride + (position // PAGE_SIZE) * table_page_stride
    page = tl.load(pointers, mask=valid, other=-1).to(tl.int64)
    slot = tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots_ptr + row * topk + column, slot.to(tl.int32), mask=column < topk)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["offsets_ptr", "lengths_ptr"])
def _ragged(
    moved_ptr,  # int32 [programs, topk]
    indices_ptr,
    offsets_ptr,
    lengths_ptr,  # or None
    rows,
    topk,
    indices_stride,
    indices_entry_stride,
    offsets_stride,
    lengths_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    offset = tl.load(offsets_ptr + row * offsets_stride, mask=real, other=0).to(tl.int64)
    pointers = indices_ptr + row * indices_stride + column.to(tl.int64) * indices_entry_stride
    position = tl.load(pointers, mask=column < tl.where(real, topk, 0), other=-1).to(tl.int64)
    valid = position >= 0
    if lengths_ptr is not None:
        valid = valid & (position < tl.load(lengths_ptr + row * lengths_stride, mask=real, other=0).to(tl.int64))
    moved = tl.where(valid, position + offset, -1)
    tl.store(moved_ptr + row * topk + column, moved.to(tl.int32), mask=column < topk)


@triton.jit(do_not_specialize=["rows"])
def _pad_rows(padded_ptr, indices_ptr, rows, topk, indices_stride, indices_entry_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = indices_ptr + row * indices_stride + column.to(tl.int64) * indices_entry_stride
    index = tl.load(pointers, mask=column < tl.where(row < rows, topk, 0), other=-1)
    tl.store(padded_ptr + row * topk + column, index, mask=column < topk)
