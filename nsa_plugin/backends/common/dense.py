"""Requests of a batch that attend densely, in one call, while others of the batch select."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from nsa_plugin.decision.plan import Plan
from nsa_plugin.kernels.shard_indices import KvShard


@dataclass(frozen=True)
class DensePiece:
    """Query tokens that attend densely, in one call.

    Attributes:
        plan: the decision.
        rows: the query tokens in the batch: a slice, or int64 [num_rows].
        cu_seqlens_q, cu_seqlens_k: int32 [requests + 1], query and context tokens, cumulative; on the device.
        q_lens, kv_lens: query and context tokens of each request, on the host.
        slots: int64 [context tokens], cache slots of the contexts; None if no request has a prefix, so that the batch
            has all keys.
        fresh: int64 [num_rows], which context tokens are new in this batch; None as `slots`.
        order: int64 [context tokens], where each token lies in the rows that `slots` name on every rank, one rank after
            the other; None unless ranks share the contexts, each of which has slots for its own part then.
    """

    plan: Plan
    rows: slice | torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    slots: torch.Tensor | None = None
    fresh: torch.Tensor | None = None
    order: torch.Tensor | None = None


def dense_piece(
    plan: Plan,
    requests: Sequence[int],
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    rows: slice | torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    shard: KvShard | None = None,
) -> DensePiece:
    """Make the piece of some requests, with tensors on the block table's device; nothing is read back.

    Args:
        requests: their places in the batch.
        q_lens, kv_lens: query and context tokens of each.
        rows: their query tokens; see `rows_of`.
        block_table: int [requests of the batch, pages].
        shard: this rank's part of every context, if ranks share it.
    """

    def bounds(lens: Iterable[int]) -> torch.Tensor:
        return to_device(torch.tensor([0, *accumulate(lens)], dtype=torch.int32), block_table)

    piece = DensePiece(plan, rows, bounds(q_lens), bounds(kv_lens), q_lens, kv_lens)
    if kv_lens == q_lens:
        return piece
    firsts = accumulate(kv_lens[:-1], initial=0)
    fresh = torch.cat(
        [
            torch.arange(start + kv_len - q_len, start + kv_len)
            for start, q_len, kv_len in zip(firsts, q_lens, kv_lens, strict=True)
        ]
    )
    order, held = None, kv_lens
    if shard is not None:
        held, order = _shared(kv_lens, shard)
        order = to_device(order, block_table)
    slots = context_slots(requests, held, block_table, page_size)
    return replace(piece, slots=slots, fresh=to_device(fresh, block_table), order=order)


def keys_and_values(
    piece: DensePiece,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    *,
    read: Callable[[torch.Tensor], torch.Tensor],
    kv_b_proj: Callable[..., Any],
    heads: int,
    nope: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's k [context tokens, heads, nope + rope] and v [context tokens, heads, d_v] of a piece.

    New tokens are used unrounded, not as an fp8 cache stores them, as in vLLM's dense prefill.

    Args:
        kv_c, k_pe: of the piece's query tokens: normalised latents [n, kv_lora_rank], rotated keys [n, rope].
        read: returns bf16 cache rows [context tokens, kv_lora_rank + rope] of slots, those of all ranks.
        kv_b_proj: the engine's projection of latents to every head's k and v; its first result is used.
        nope: elements of a head's key without RoPE.
    """
    if piece.slots is not None:
        context = read(piece.slots)
        context[piece.fresh] = torch.cat([kv_c, k_pe], dim=-1)
        kv_c, k_pe = context.split([kv_c.shape[-1], k_pe.shape[-1]], dim=-1)
    kv = kv_b_proj(kv_c.contiguous())[0].view(len(k_pe), heads, -1)
    k = kv.new_empty(len(k_pe), heads, nope + k_pe.shape[-1])
    k[..., :nope] = kv[..., :nope]
    k[..., nope:] = k_pe.unsqueeze(1)
    return k, kv[..., nope:]


def rows_of(starts: Sequence[int], requests: Sequence[int], like: torch.Tensor) -> slice | torch.Tensor:
    """Return the query tokens of requests: a slice if contiguous, else int64 on `like`'s device.

    Args:
        starts: first query token of each request of the batch, and the end of the last.
        requests: their places, ascending.
    """
    if requests[-1] - requests[0] + 1 == len(requests):
        return slice(starts[requests[0]], starts[requests[-1] + 1])
    return to_device(torch.cat([torch.arange(starts[one], starts[one + 1]) for one in requests]), like)


def context_slots(
    requests: Sequence[int], kv_lens: Sequence[int], block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Return int64 [context tokens] on the block table's device: cache slots of the first tokens of requests."""
    lens = np.asarray(kv_lens, dtype=np.int64)
    first = np.cumsum(lens) - lens
    request = to_device(torch.from_numpy(np.repeat(np.asarray(requests, dtype=np.int64), lens)), block_table)
    position = to_device(torch.from_numpy(np.arange(lens.sum()) - np.repeat(first, lens)), block_table)
    pages = block_table[request, position // page_size].long()
    return pages * page_size + position % page_size


def _shared(kv_lens: Sequence[int], shard: KvShard) -> tuple[tuple[int, ...], torch.Tensor]:
    """(rows of each context that every rank reads, `DensePiece.order`).

    The first rank holds the most tokens of a context. The others read as many rows, and the last are not used.
    """
    most = replace(shard, rank=0)
    held = tuple(most.length(tokens) for tokens in kv_lens)
    lens = np.asarray(kv_lens, dtype=np.int64)
    position = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    first = np.repeat(np.cumsum(held) - held, lens)
    turn, within = position // shard.interleave, position % shard.interleave
    order = turn % shard.ranks * sum(held) + first + turn // shard.ranks * shard.interleave + within
    return held, torch.from_numpy(order)


def to_device(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy host values to `like`'s device without waiting for it."""
    if not like.is_cuda:
        return values
    return values.pin_memory().to(like.device, non_blocking=True)
