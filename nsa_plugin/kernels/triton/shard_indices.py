"""Triton kernel from logical positions to one rank's cache slots; contract in `nsa_plugin.kernels.shard_indices`.

One program takes one row, in chunks, and keeps the entries' order. It launches one kernel and does not wait for the
device, so it may be captured. Any strides.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.shard_indices import KvShard, ShardSlots, check_shard
from nsa_plugin.kernels.triton.sizes import power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

CHUNK = STREAMS["compact"].block


def shard(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    shard: KvShard,
    *,
    page_size: int,
    row_to_request: torch.Tensor,
) -> ShardSlots:
    """This rank's slots of logical positions; see `reference_shard`."""
    check_shard(topk_indices, page_table, page_size, row_to_request)
    rows, topk = topk_indices.shape
    slots = torch.empty((rows, topk), dtype=torch.int32, device=topk_indices.device)
    counts = torch.empty(rows, dtype=torch.int32, device=topk_indices.device)
    if rows:
        with torch.cuda.device_of(slots):
            _shard[(rows,)](
                slots, counts, topk_indices, page_table, row_to_request, topk, *page_table.shape,
                *topk_indices.stride(), *page_table.stride(), row_to_request.stride(0),
                shard.rank, RANKS=shard.ranks, INTERLEAVE=shard.interleave, PAGE_SIZE=page_size,
                BLOCK=min(CHUNK, max(16, power_of_2(topk))),
            )  # fmt: skip
    return ShardSlots(slots, counts)


@triton.jit(
    do_not_specialize=["topk", "requests", "pages", "table_stride", "rank"],  # a table is as wide as the batch needs
    do_not_specialize_on_alignment=["request_ptr", "indices_ptr"],  # they may be slices from any row on
)
def _shard(
    slots_ptr,  # int32 [rows, topk]
    counts_ptr,  # int32 [rows]
    indices_ptr, table_ptr, request_ptr,
    topk, requests, pages,
    indices_stride, indices_entry_stride, table_stride, table_page_stride, request_stride,
    rank,
    RANKS: tl.constexpr, INTERLEAVE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + row * request_stride).to(tl.int64)
    # As a width, not as a condition: Triton's interpreter does not broadcast a condition of one value.
    width = tl.where((request >= 0) & (request < requests), topk, 0)
    limit = tl.full([], PAGE_SIZE, tl.int64) * pages
    target = slots_ptr + row * topk
    found = tl.zeros([], dtype=tl.int32)
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        pointers = indices_ptr + row * indices_stride + entry.to(tl.int64) * indices_entry_stride
        position = tl.load(pointers, mask=entry < width, other=-1).to(tl.int64)
        valid = position >= 0
        position = tl.where(valid, position, 0)
        valid = valid & ((position // INTERLEAVE) % RANKS == rank)
        local = position // (RANKS * INTERLEAVE) * INTERLEAVE + position % INTERLEAVE
        valid = valid & (local < limit)
        pointers = table_ptr + request * table_stride + (local // PAGE_SIZE) * table_page_stride
        page = tl.load(pointers, mask=valid, other=-1).to(tl.int64)
        valid = valid & (page >= 0)
        slot = page * PAGE_SIZE + local % PAGE_SIZE
        kept = valid.to(tl.int32)
        tl.store(target + found + tl.cumsum(kept, 0) - 1, slot.to(tl.int32), mask=valid)
        found += tl.sum(kept, 0)
    tl.store(counts_ptr + row, found)
    for start in range(0, topk, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(target + entry, tl.full([BLOCK], -1, tl.int32), mask=(entry >= found) & (entry < topk))
