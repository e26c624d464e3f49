"""Resharding of heads to tokens under vLLM on a GPU: the group, unsupported features, FlashMLA.

`nsa_plugin.backends.common.token_shard` has what both engines need. The group is vLLM's tensor-parallel group, one per
replica with data-parallel attention. Its ranks get the same batches from one scheduler, padding and host lengths
included.

    indexer    prefill: vLLM's chunks cover this rank's query tokens; the selection of all others stays -1, as vLLM
               clears it. Decode and verify steps: left to vLLM, which selects for all query tokens
    attention  absorbed q [T, h, 576] -> exchange -> a kernel, this rank's query tokens, all heads -> exchange

The kernel is the plugin's provider or vLLM's FlashMLA. `flash_mla` calls the latter directly, because the buffers and
metadata of vLLM's `forward_mqa` are for this rank's heads and all query tokens. Its arguments depend on the number of
query tokens and on no lengths, so steps may be captured. Only prefills, which are not captured, use the bf16 copy of an
fp8 cache, which depends on lengths. A prefill's query tokens may come in pieces; each layer makes a copy once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common import token_shard
from nsa_plugin.backends.common.token_shard import SINKS, Exchange, checked_group, has_sinks
from nsa_plugin.backends.vllm.startup.model import drafts_share_selection
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.partition import Partition, PartitionPiece, pieces
from nsa_plugin.settings import Settings

GROUP = "vllm.distributed.parallel_state", "get_tp_group"
"""The function that returns vLLM's coordinator of the tensor-parallel ranks."""
FLASH_MLA = "vllm.v1.attention.backends.mla.flashmla_sparse"
"""vLLM's module that imports FlashMLA's functions for its layers."""


class OwnRows(PartitionPiece):
    """This rank's query tokens of one request: its place in the batch, tokens counted from the request's first."""


@dataclass(frozen=True)
class Assigned:
    """The query tokens of one attention call, assigned to ranks.

    Attributes:
        partition: the query tokens of each rank, counted from the call's first.
        own: this rank's, in order; empty for a step, which is partitioned by its number of query tokens alone.
    """

    partition: Partition
    own: tuple[OwnRows, ...] = ()


def assign(
    partition: Partition, rank: int, requests: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]
) -> Assigned:
    """Return the query tokens of a prefill's call, assigned to ranks.

    Args:
        requests: their places in the batch.
        q_lens, kv_lens: query tokens and context of each.
    """
    starts = [0, *accumulate(q_lens)]
    own = []
    for piece in pieces(partition.rows(rank), q_lens, kv_lens):
        start = starts[piece.request]
        own.append(OwnRows(requests[piece.request], piece.first - start, piece.end - start, piece.context))
    return Assigned(partition, tuple(own))


@dataclass(frozen=True)
class Copied:
    """Query tokens of this rank that attend over one bf16 copy of their contexts.

    Attributes:
        rows: the query tokens, counted from this rank's first.
        slots: int64 [context tokens], cache slots of the copied tokens.
        offsets: int32 [query tokens], where the context of each token's request starts in the copy.
    """

    rows: slice
    slots: torch.Tensor
    offsets: torch.Tensor


# ---------------------------------------------------------------------------------------------------
# Start-up


def impossible(vllm_config: Any) -> str | None:
    """Return why this server does not support resharding, or None."""
    parallel, speculative = vllm_config.parallel_config, getattr(vllm_config, "speculative_config", None)
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        return "batches are split in two (--enable-dbo, --ubatch-size) and attend at the same time"
    if has_sinks(vllm_config.model_config.hf_text_config):
        return SINKS
    if speculative is None:
        return None
    ranks = getattr(speculative, "draft_tensor_parallel_size", None)
    if ranks is not None and ranks != parallel.tensor_parallel_size:
        return f"the draft model has {ranks} of the {parallel.tensor_parallel_size} ranks, with other heads on each"
    if drafts_share_selection(vllm_config):
        return (
            "later draft steps read the selection of the first (index_share_for_mtp_iteration), which each rank has "
            "for some query tokens only"
        )
    return None


def open_exchange(
    vllm_config: Any, model: ModelShape, device: DeviceProfile, settings: Settings, where: torch.device
) -> tuple[Exchange | None, str]:
    """(the exchange of this worker or None, why there is none); see `token_shard.open_exchange`.

    Args:
        where: the worker's device.
    """
    return token_shard.open_exchange(
        model,
        device,
        settings,
        where,
        group=lambda: checked_group("vLLM", GROUP, model),
        impossible=lambda: impossible(vllm_config),
        # Larger captured sizes keep heads local.
        max_tokens=lambda: int(vllm_config.scheduler_config.max_num_batched_tokens),
        max_context=lambda: int(vllm_config.model_config.max_model_len),
        made=Exchange,
    )


# ---------------------------------------------------------------------------------------------------
# vLLM's FlashMLA over this rank's query tokens


def flash_mla(
    q: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    schedule: Callable[[Callable[[], Any]], Any] = lambda make: make(),
) -> torch.Tensor:
    """Attend this rank's query tokens with all heads: [n, H, kv_lora_rank].

    Args:
        q: bfloat16 [n, H, 576].
        cache: bf16 for FlashMLA's prefill kernel, fp8 pages for its decode kernel.
        slots: int32 [n, topk], padded with -1.
        plan: has the kernel and its head padding.
        schedule: makes the decode kernel's schedule with the given function, or returns an earlier layer's.
    """
    library = import_module(FLASH_MLA)
    heads = q.shape[1]
    if plan.head_padding > heads:
        q = F.pad(q, (0, 0, 0, plan.head_padding - heads))
    if plan.attention is Attention.SPARSE_PREFILL:
        rows, entries = _flat_rows(cache, slots)
        # As vLLM does: entries behind the last valid one are not read.
        valid = (entries >= 0).sum(-1, dtype=torch.int32)
        out: torch.Tensor = library.flash_mla_sparse_fwd(q, rows, entries.unsqueeze(1), scale, topk_length=valid)[0]
        return out[:, :heads]
    out, _ = library.flash_mla_with_kvcache(
        q=q.unsqueeze(0),
        k_cache=cache.as_records(),
        block_table=None,
        head_dim_v=512,
        cache_seqlens=None,
        tile_scheduler_metadata=schedule(lambda: library.get_mla_metadata()[0]),
        is_fp8_kvcache=True,
        indices=slots.unsqueeze(0),
        softmax_scale=scale,
    )
    return out.squeeze(0)[:, :heads]


def _flat_rows(cache: PagedCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a plain cache as [rows, 1, dim], a view; the slots as rows of it).

    Pages may be further apart than their size, by whole rows that belong to other layers.
    """
    data, size = cache.data, cache.page_size
    apart, row = data.stride(0) // data.stride(1), data.stride(1)
    if data.stride(0) % row:
        raise NsaPluginError(f"FlashMLA reads rows at one stride, but the cache's pages have strides {data.stride()}")
    count = (cache.num_pages - 1) * apart + size
    rows = data.as_strided((count, 1, data.shape[-1]), (row, row, 1), data.storage_offset())
    if apart == size:
        return rows, slots
    moved = torch.div(slots, size, rounding_mode="floor") * apart + slots % size
    return rows, torch.where(slots < 0, slots, moved).int()
