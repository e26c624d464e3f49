"""`topk_rows` in Triton, for any device that Triton compiles for; contract in `nsa_plugin.kernels.topk`.

One program a row. Four passes count the digits of an order-preserving integer key, 8 bits a pass from the
top, and narrow down the topk-th largest; a fifth writes the positions above it, and the first of those at
it. Exact for any data, and five times the traffic of the CUDA kernel.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.topk import check_topk_rows
from nsa_plugin.kernels.triton.tiles import STREAMS

BLOCK, NUM_WARPS = STREAMS["topk"].block, STREAMS["topk"].num_warps


def topk_rows(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, topk: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `nsa_plugin.kernels.topk.reference_topk_rows`; any strides.

    Ranges are clamped to the columns on the device. Does not wait for the device.
    """
    out = check_topk_rows(logits, starts, ends, topk, out)
    rows, columns = logits.shape
    if rows == 0:
        return out
    with torch.cuda.device_of(logits):
        _topk_rows[(rows,)](
            logits, starts, ends, out, columns, topk, *logits.stride(), starts.stride(0), ends.stride(0), *out.stride(),
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _keys(row_ptr, column_stride, base, length, BLOCK: tl.constexpr):
    """int32 keys in the order of the logits, and which of them are inside the range."""
    position = base + tl.arange(0, BLOCK)
    inside = position < length
    value = tl.load(row_ptr + position.to(tl.int64) * column_stride, mask=inside, other=0.0)
    # NaN and -inf count as the least finite value (a NaN fails the comparison), and both zeros as one.
    value = tl.where(value >= -3.4028234663852886e38, value, -3.4028234663852886e38)
    value = tl.where(value > 3.4028234663852886e38, 3.4028234663852886e38, value)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), inside, position


@triton.jit(
    # Logits are as wide as the batch's keys. A row is read from any of its columns on, so that a row stride known to be
    # a multiple of 16 would not make the loads wider.
    do_not_specialize=["columns", "topk", "row_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "ends_ptr"],  # they may be slices from any row on
)
def _topk_rows(
    logits_ptr, starts_ptr, ends_ptr, out_ptr, columns, topk, row_stride, column_stride, starts_stride, ends_stride,
    out_stride, out_column_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(starts_ptr + row * starts_stride).to(tl.int64), 0)
    end = tl.minimum(tl.load(ends_ptr + row * ends_stride).to(tl.int64), columns)
    length = tl.maximum(end - start, 0).to(tl.int32)
    row_ptr = logits_ptr + row * row_stride + start * column_stride
    # A row that is wanted whole has nothing to search.
    searched = tl.where(length > topk, length, 0)

    bins = tl.arange(0, 512)
    room = topk + 0
    found = 0  # the bits of the topk-th key that are known so far
    for digit_index in tl.static_range(4):
        counts = tl.zeros([512], tl.int32)
        for base in range(0, searched, BLOCK):
            key, inside, _ = _keys(row_ptr, column_stride, base, length, BLOCK)
            if digit_index == 0:
                digit = (key >> 24) + 128
            else:
                digit = (key >> (24 - 8 * digit_index)) & 255
                inside = inside & ((key >> (32 - 8 * digit_index)) == found)
            counts += tl.histogram(tl.where(inside, digit, 256), 512)
        counts = tl.where(bins < 256, counts, 0)
        from_here_up = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        reached = tl.sum(((from_here_up >= room) & (bins < 256)).to(tl.int32), 0) - 1
        room -= tl.sum(tl.where(bins > reached, counts, 0), 0)
        found = reached - 128 if digit_index == 0 else found * 256 + reached
    # Below every key there is: all are taken.
    threshold = tl.where(length > topk, found, -2147483648)
    room = tl.where(length > topk, room, 0)

    out_row = out_ptr + row * out_stride
    written = 0
    ties = 0
    for base in range(0, length, BLOCK):
        key, inside, position = _keys(row_ptr, column_stride, base, length, BLOCK)
        tied = ((key == threshold) & inside).to(tl.int32)
        chosen = ((key > threshold) & inside) | ((tied > 0) & (ties + tl.cumsum(tied, 0) <= room))
        count = chosen.to(tl.int32)
        slot = (written + tl.cumsum(count, 0) - 1).to(tl.int64)
        tl.store(out_row + slot * out_column_stride, position, mask=chosen)
        written += tl.sum(count, 0)
        ties += tl.sum(tied, 0)
    for base in range(0, topk, BLOCK):
        slot = base + tl.arange(0, BLOCK)
        unused = (slot >= tl.minimum(length, topk)) & (slot < topk)
        tl.store(out_row + slot.to(tl.int64) * out_column_stride, tl.full([BLOCK], -1, tl.int32), mask=unused)
