"""Rows of indices with their valid entries moved to the front: what libraries take that know no holes.

FlashAttention-3 and the trtllm kernels attend the first so many entries of a row; the contracts here let
an invalid entry stand anywhere. One program takes one row, in chunks, and keeps the entries' order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.triton.sizes import power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

CHUNK = STREAMS["compact"].block


class CompactRows(NamedTuple):
    """indices [rows, width] int32: a row's valid entries, then `fill`; counts [rows] int32: how many are valid."""

    indices: torch.Tensor
    counts: torch.Tensor


@triton.jit(do_not_specialize=["s_q", "topk", "width", "num_slots", "fill", "empty_index"])
def _compact_kernel(
    indices, lengths, packed, counts,
    s_q, topk, width, num_slots, fill, empty_index,
    batch_stride, row_stride, entry_stride, length_batch_stride, length_row_stride,
    HAS_LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // s_q, row % s_q
    end = topk.to(tl.int64)
    if HAS_LENGTH:
        length = tl.load(lengths + batch * length_batch_stride + query * length_row_stride).to(tl.int64)
        end = tl.minimum(tl.maximum(length, 0), end)
    source = indices + batch * batch_stride + query * row_stride
    target = packed + row * width
    found = tl.zeros([], dtype=tl.int32)
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        index = tl.load(source + entry.to(tl.int64) * entry_stride, mask=entry < end, other=-1).to(tl.int64)
        valid = (index >= 0) & (index < num_slots)
        position = found + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(target + position, index.to(tl.int32), mask=valid)
        found += tl.sum(valid.to(tl.int32), 0)
    tl.store(counts + row, found)
    for start in range(0, width, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        filler = tl.where((entry == 0) & (found == 0), empty_index, fill)
        tl.store(target + entry, filler, mask=(entry >= found) & (entry < width))


def compact(
    indices: torch.Tensor,
    length: torch.Tensor | None,
    num_slots: int,
    *,
    fill: int = -1,
    empty_index: int | None = None,
    multiple: int = 1,
) -> CompactRows:
    """Move the valid entries of each row to the front. Reads no value on the host.

    Args:
        indices: [batch, s_q, topk] int32 or int64, any strides; valid from 0 to num_slots - 1.
        length: [batch, s_q] int, or None: only the first so many entries of a row count.
        num_slots: below 2**31.
        fill: what follows the valid entries.
        empty_index: the first entry of a row without a valid one, default `fill`; its count stays 0.
        multiple: the result's width is topk rounded up to a multiple of this.
    """
    batch, s_q, topk = indices.shape
    width = -(-topk // multiple) * multiple
    packed = torch.empty((batch * s_q, width), dtype=torch.int32, device=indices.device)
    counts = torch.empty(batch * s_q, dtype=torch.int32, device=indices.device)
    if batch * s_q:
        with torch.cuda.device_of(indices):
            _compact_kernel[(batch * s_q,)](
                indices, indices if length is None else length, packed, counts,
                s_q, topk, width, num_slots, fill, fill if empty_index is None else empty_index,
                *indices.stride(), *((0, 0) if length is None else length.stride()),
                HAS_LENGTH=length is not None, BLOCK=min(CHUNK, max(16, power_of_2(topk))),
            )  # fmt: skip
    return CompactRows(packed, counts)
