"""Triton kernel for DeepSeek-V4's sliding windows; contract in `nsa_plugin.kernels.swa_indices`.

One launch, no wait for the device, any strides. Values are not checked: a query before the first token of its context
has an empty window.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.swa_indices import IndexRows, check_window
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

# Query rows and window entries of a program.
WINDOW_ROWS, MAX_BLOCK = STREAMS["swa_indices"].rows, STREAMS["swa_indices"].block


def window(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, window: int, *, num_tokens: int) -> IndexRows:
    """Positions of each query's sliding window; see `reference_window`."""
    requests, device = check_window(cu_seqlens_q, seq_lens, window), cu_seqlens_q.device
    indices = torch.empty((num_tokens, window), dtype=torch.int32, device=device)
    lengths = torch.empty((num_tokens,), dtype=torch.int32, device=device)
    if num_tokens:
        block = min(power_of_2(window), MAX_BLOCK)
        with torch.cuda.device_of(indices):
            _window[(ceil_div(num_tokens, WINDOW_ROWS), ceil_div(window, block))](
                indices, lengths, cu_seqlens_q, seq_lens, num_tokens, requests, window,
                cu_seqlens_q.stride(0), seq_lens.stride(0),
                SEARCH_STEPS=requests.bit_length(), ROWS=WINDOW_ROWS, BLOCK=block,
            )  # fmt: skip
    return IndexRows(indices, lengths)


# Counts change from batch to batch and must not compile the kernel anew.
@triton.jit(
    do_not_specialize=["num_tokens", "requests"], do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr"]
)
def _window(
    indices_ptr,  # int32 [num_tokens, window]
    lengths_ptr,  # int32 [num_tokens]
    cu_seqlens_ptr, seq_lens_ptr, num_tokens, requests, window, cu_seqlens_stride, seq_lens_stride,
    SEARCH_STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # The row's request is the first that ends after it: a binary search in cu_seqlens_q[1:].
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
    target = indices_ptr + row[:, None] * window + column[None, :]
    stored = (row < num_tokens)[:, None] & (column < window)[None, :]
    tl.store(target, tl.where(valid, index, -1).to(tl.int32), mask=stored)
