"""Rows of indices as libraries take them: int32, padded, and -1 for whatever does not count."""

# mypy: disable-error-code="no-untyped-def"
# What Triton compiles has no Python types.

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.triton.sizes import ceil_div
from nsa_plugin.kernels.triton.tiles import STREAMS

BLOCK = STREAMS["sparse_mla_indices"].block


def masked_rows(
    indices: torch.Tensor, num_slots: int, length: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy rows of indices, and put -1 where an entry is invalid or lies behind its row's length.

    Args:
        indices: [batch, s_q, topk] int32 or int64, any strides.
        num_slots: valid indices are 0 to num_slots - 1.
        length: [batch, s_q], int, any strides, or None: every entry counts.
        width: entries of a new row, at least topk; those behind topk are -1.

    Returns:
        [batch, s_q, width] int32, and the lengths clamped to [0, topk], [batch, s_q] int32, if given.
    """
    batch, s_q, topk = indices.shape
    out = torch.empty((batch, s_q, width), dtype=torch.int32, device=indices.device)
    lengths = None if length is None else torch.empty((batch, s_q), dtype=torch.int32, device=indices.device)
    if out.numel():
        with torch.cuda.device(indices.device) if indices.is_cuda else nullcontext():
            _masked_rows_kernel[(batch * s_q, ceil_div(width, BLOCK))](
                indices, *indices.stride(), length, *((0, 0) if length is None else length.stride()), out, lengths,
                num_slots, s_q, topk, width,
                BLOCK=BLOCK,
            )  # fmt: skip
    return out, lengths


@triton.jit(do_not_specialize=["num_slots", "s_q", "topk", "width"])
def _masked_rows_kernel(
    indices, stride_b, stride_s, stride_k, length, length_stride_b, length_stride_s, out, lengths, num_slots, s_q, topk,
    width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, s = row // s_q, row % s_q
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counted = topk
    if length is not None:
        stored = tl.load(length + b * length_stride_b + s * length_stride_s)
        counted = tl.minimum(tl.maximum(stored, 0), topk).to(tl.int32)
        if tl.program_id(1) == 0:
            tl.store(lengths + row, counted)
    at = indices + b * stride_b + s * stride_s + entry.to(tl.int64) * stride_k
    index = tl.load(at, entry < counted, other=-1)
    index = tl.where((index >= 0) & (index < num_slots), index, -1).to(tl.int32)
    tl.store(out + row * width + entry, index, entry < width)
