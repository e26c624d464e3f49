"""From the indexer's positions to the cache slots of one rank, where ranks share each request's KV cache.

Op `index_transform_shard`, and the arithmetic of the sharing. With decode context parallelism the tokens of a request
go to the ranks in turns of `interleave` tokens:

    owner of position p          (p // interleave) % ranks
    its position on the owner    p // (ranks * interleave) * interleave + p % interleave

A rank's page table has its own tokens only, so a position on the owner becomes a slot as in
`kernels.index_transform`: `page_table[request, local // page_size] * page_size + local % page_size`.

The op keeps the entries of one rank, moves them to the front in their order, and counts them. Attention then reads
`counts` entries of a row and none of the other ranks' tokens. A row may keep none. Entries below 0, of other ranks,
beyond the page table or on an unassigned page (negative table entry) are left out, and so is every entry of a padded
row.

Source: vLLM `v1/attention/backends/mla/sparse_utils.py` (`triton_filter_and_convert_dcp_index`) and
`v1/attention/backends/utils.py` (`get_dcp_local_seq_lens`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import INDEX_DTYPES, check_tensor, require

SHARD = "index_transform_shard"


@dataclass(frozen=True)
class KvShard:
    """One rank's part of every request's KV cache.

    Attributes:
        ranks: number of ranks that share it.
        rank: this one, from 0.
        interleave: neighbouring tokens that one rank holds.
    """

    ranks: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        require(self.ranks > 0 and self.interleave > 0, SHARD, f"{self.ranks} ranks, interleave {self.interleave}")
        require(0 <= self.rank < self.ranks, SHARD, f"rank is {self.rank} of {self.ranks}")

    def lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many of the first `lengths` tokens of a request this rank holds; any shape, int, 0 or more."""
        turn = self.interleave * self.ranks
        rest = lengths % turn - self.rank * self.interleave
        return torch.div(lengths, turn, rounding_mode="floor") * self.interleave + rest.clamp(0, self.interleave)

    def length(self, tokens: int) -> int:
        """As `lengths`, of one number."""
        whole, rest = divmod(tokens, self.interleave * self.ranks)
        return whole * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)


class ShardSlots(NamedTuple):
    """slots [rows, topk] int32: a row's slots on this rank, then -1; counts [rows] int32: how many there are."""

    slots: torch.Tensor
    counts: torch.Tensor


def reference_shard(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    shard: KvShard,
    *,
    page_size: int,
    row_to_request: torch.Tensor,
) -> ShardSlots:
    """This rank's slots of logical positions, at the front of each row. Contract: see the module.

    Args:
        topk_indices: [rows, topk] int32 or int64, positions within the row's request, in all ranks' tokens.
        page_table: [requests, pages] int32 or int64: this rank's pages of each request, in order.
        shard: this rank's part.
        page_size: tokens a page.
        row_to_request: [rows] int: the table row of each query row; negative or beyond the table for a padded row.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    check_shard(topk_indices, page_table, page_size, row_to_request)
    position, turn = topk_indices.long(), shard.ranks * shard.interleave
    own = (position >= 0) & (torch.div(position, shard.interleave, rounding_mode="floor") % shard.ranks == shard.rank)
    local = torch.div(position, turn, rounding_mode="floor") * shard.interleave + position % shard.interleave
    request = row_to_request.long()
    live = (request >= 0) & (request < page_table.shape[0])
    valid = own & live.unsqueeze(1) & (local < page_table.shape[1] * page_size)
    slots = torch.full_like(topk_indices, -1, dtype=torch.int32)
    counts = torch.zeros(len(slots), dtype=torch.int32, device=slots.device)
    if not bool(valid.any()):
        return ShardSlots(slots, counts)
    local = torch.where(valid, local, 0)
    page = page_table[torch.where(live, request, 0).unsqueeze(1), local // page_size].long()
    valid &= page >= 0
    found = torch.where(valid, page * page_size + local % page_size, -1)
    order = (~valid).to(torch.int8).sort(dim=1, stable=True).indices
    return ShardSlots(found.gather(1, order).int(), valid.sum(1, dtype=torch.int32))


def check_shard(
    topk_indices: torch.Tensor, page_table: torch.Tensor, page_size: int, row_to_request: torch.Tensor
) -> None:
    """Check all that needs no value of a tensor."""
    check_tensor(SHARD, "topk_indices", topk_indices, ("rows", "topk"), dtypes=INDEX_DTYPES)
    rows, device = topk_indices.shape[0], topk_indices.device
    check_tensor(SHARD, "page_table", page_table, ("requests", "pages"), dtypes=INDEX_DTYPES, device=device)
    check_tensor(SHARD, "row_to_request", row_to_request, (rows,), dtypes=INDEX_DTYPES, device=device)
    require(page_size > 0, SHARD, f"page_size is {page_size}; a page holds at least 1 token")
