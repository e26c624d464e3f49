"""Triton kernels for DeepSeek-V4's window and combined indices; contracts in `nsa_plugin.kernels.swa_indices`.

Each function has the signature of its reference, launches one kernel and does not wait for the device. Any strides.
What the reference checks by reading values is not checked here: a query before the first token of its context has an
empty window, and window tokens that a gathered buffer lacks are -1.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.checks import INDEX_DTYPES, check_tensor, require
from nsa_plugin.kernels.swa_indices import IndexRows
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2

# Query rows and entries of a window that a program handles.
WINDOW_ROWS = 8
MAX_BLOCK = 1024

# `do_not_specialize` below: counts change from batch to batch and must not compile a kernel anew.


def window(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    *,
    num_tokens: int,
    bases: torch.Tensor | None = None,
    gather_lens: torch.Tensor | None = None,
) -> IndexRows:
    """Indices of each query's sliding window; see `reference_window`."""
    op = "swa_window_indices"
    check_tensor(op, "cu_seqlens_q", cu_seqlens_q, ("requests + 1",), dtypes=INDEX_DTYPES)
    device, requests = cu_seqlens_q.device, int(cu_seqlens_q.shape[0]) - 1
    require(requests >= 0, op, "cu_seqlens_q is empty; it starts with 0")
    check_tensor(op, "seq_lens", seq_lens, (requests,), dtypes=INDEX_DTYPES, device=device)
    require(window > 0, op, f"window is {window}; it is at least 1")
    require((bases is None) == (gather_lens is None), op, "bases and gather_lens go together")
    for name, tensor in (("bases", bases), ("gather_lens", gather_lens)):
        if tensor is not None:
            check_tensor(op, name, tensor, (requests,), dtypes=INDEX_DTYPES, device=device)
    indices = torch.empty((num_tokens, window), dtype=torch.int32, device=device)
    lengths = torch.empty((num_tokens,), dtype=torch.int32, device=device)
    if num_tokens == 0:
        return IndexRows(indices, lengths)
    block = min(power_of_2(window), MAX_BLOCK)
    with torch.cuda.device_of(indices):
        _window[(ceil_div(num_tokens, WINDOW_ROWS), ceil_div(window, block))](
            indices,
            lengths,
            cu_seqlens_q,
            seq_lens,
            bases,
            gather_lens,
            num_tokens,
            requests,
            window,
            cu_seqlens_q.stride(0),
            seq_lens.stride(0),
            0 if bases is None else bases.stride(0),
            0 if gather_lens is None else gather_lens.stride(0),
            SEARCH_STEPS=requests.bit_length(),
            ROWS=WINDOW_ROWS,
            BLOCK=block,
        )
    return IndexRows(indices, lengths)


def combine(
    swa: IndexRows,
    extra: IndexRows,
    *,
    extra_offset: int | torch.Tensor,
    alignment: int = 128,
    out: torch.Tensor | None = None,
) -> IndexRows:
    """One row of indices from both halves; see `reference_combine`."""
    op = "swa_combine_indices"
    check_tensor(op, "swa.indices", swa.indices, ("tokens", "w"), dtypes=INDEX_DTYPES)
    (tokens, swa_width), device = swa.indices.shape, swa.indices.device
    check_tensor(op, "extra.indices", extra.indices, (tokens, "k"), dtypes=INDEX_DTYPES, device=device)
    for name, tensor in (("swa.lengths", swa.lengths), ("extra.lengths", extra.lengths)):
        check_tensor(op, name, tensor, (tokens,), dtypes=INDEX_DTYPES, device=device)
    offset, offset_stride = extra_offset, 0
    if isinstance(offset, torch.Tensor):
        each = offset.expand(tokens) if offset.dim() == 0 or offset.shape == (1,) else offset
        check_tensor(op, "extra_offset", each, (tokens,), dtypes=INDEX_DTYPES, device=device)
        offset, offset_stride = each, each.stride(0)
    require(alignment > 0, op, f"alignment is {alignment}; it is at least 1")
    extra_width = int(extra.indices.shape[1])
    width = -(-(swa_width + extra_width) // alignment) * alignment
    if out is None:
        out = torch.empty((tokens, width), dtype=torch.int32, device=device)
    check_tensor(op, "out", out, (tokens, width), dtypes=(torch.int32,), device=device)
    lengths = torch.empty((tokens,), dtype=torch.int32, device=device)
    if tokens == 0:
        return IndexRows(out, lengths)
    block = min(power_of_2(max(width, 1)), MAX_BLOCK)
    with torch.cuda.device_of(out):
        _combine[(tokens, max(1, ceil_div(width, block)))](
            out,
            lengths,
            swa.indices,
            swa.lengths,
            extra.indices,
            extra.lengths,
            offset,
            width,
            swa_width,
            extra_width,
            *out.stride(),
            *swa.indices.stride(),
            swa.lengths.stride(0),
            *extra.indices.stride(),
            extra.lengths.stride(0),
            offset_stride,
            OFFSET_EACH=isinstance(offset, torch.Tensor),
            BLOCK=block,
        )
    return IndexRows(out, lengths)


@triton.jit(
    do_not_specialize=["num_tokens", "requests"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "bases_ptr", "gather_lens_ptr"],
)
def _window(
    indices_ptr,  # int32 [num_tokens, window]
    lengths_ptr,  # int32 [num_tokens]
    cu_seqlens_ptr,
    seq_lens_ptr,
    bases_ptr,  # or None, with gather_lens
    gather_lens_ptr,
    num_tokens,
    requests,
    window,
    cu_seqlens_stride,
    seq_lens_stride,
    bases_stride,
    gather_lens_stride,
    SEARCH_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # The row's request is the first that ends behind it: a binary search in cu_seqlens_q[1:].
    request = tl.zeros([ROWS], tl.int64)
    end = request + requests
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (request + end) // 2
        searching = request < end
        stop = tl.load(cu_seqlens_ptr + (middle + 1) * cu_seqlens_stride, mask=searching, other=0).to(tl.int64)
        request = tl.where(searching & (stop <= row), middle + 1, request)
        end = tl.where(searching & (stop > row), middle, end)
    real = request < requests
    stop = tl.load(cu_seqlens_ptr + (request + 1) * cu_seqlens_stride, mask=real, other=0).to(tl.int64)
    context = tl.load(seq_lens_ptr + request * seq_lens_stride, mask=real, other=0).to(tl.int64)
    # The last row of a request is at its last position.
    position = tl.where(real, context - (stop - row), -1)
    length = tl.maximum(tl.minimum(position + 1, window), 0)
    tl.store(lengths_ptr + row, length.to(tl.int32), mask=row < tl.where(tl.program_id(1) == 0, num_tokens, 0))

    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = (position - length + 1)[:, None] + column[None, :]
    valid = column[None, :] < length[:, None]
    if bases_ptr is not None:
        base = tl.load(bases_ptr + request * bases_stride, mask=real, other=0).to(tl.int64)
        held = tl.load(gather_lens_ptr + request * gather_lens_stride, mask=real, other=0).to(tl.int64)
        dropped = context - held
        valid = valid & (index >= dropped[:, None])
        index += (base - dropped)[:, None]
    target = indices_ptr + row[:, None] * window + column[None, :]
    stored = (row < num_tokens)[:, None] & (column < window)[None, :]
    tl.store(target, tl.where(valid, index, -1).to(tl.int32), mask=stored)


@triton.jit(do_not_specialize=["offset"])
def _combine(
    out_ptr,  # int32 [tokens, width]
    lengths_ptr,  # int32 [tokens]
    swa_ptr,
    swa_lengths_ptr,
    extra_ptr,
    extra_lengths_ptr,
    offset,  # a number, or with OFFSET_EACH a pointer to one a row
    width,
    swa_width,
    extra_width,
    out_stride,
    out_entry_stride,
    swa_stride,
    swa_entry_stride,
    swa_lengths_stride,
    extra_stride,
    extra_entry_stride,
    extra_lengths_stride,
    offset_stride,
    OFFSET_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    swa_length = tl.load(swa_lengths_ptr + row * swa_lengths_stride).to(tl.int64)
    swa_length = tl.maximum(tl.minimum(swa_length, swa_width), 0)
    extra_length = tl.load(extra_lengths_ptr + row * extra_lengths_stride).to(tl.int64)
    extra_length = tl.maximum(tl.minimum(extra_length, extra_width), 0)
    tl.store(lengths_ptr + row, (swa_length + extra_length).to(tl.int32), mask=tl.program_id(1) == 0)

    from_swa = column < swa_length
    behind = column - swa_length
    from_extra = (behind >= 0) & (behind < extra_length)
    swa = tl.load(swa_ptr + row * swa_stride + column * swa_entry_stride, mask=from_swa, other=-1).to(tl.int64)
    extra = tl.load(extra_ptr + row * extra_stride + behind * extra_entry_stride, mask=from_extra, other=-1)
    extra = extra.to(tl.int64)
    shift = tl.load(offset + row * offset_stride).to(tl.int64) if OFFSET_EACH else offset
    index = tl.where(from_swa, tl.maximum(swa, -1), tl.where(extra >= 0, extra + shift, -1))
    tl.store(out_ptr + row * out_stride + column * out_entry_stride, index.to(tl.int32), mask=column < width)
