"""Heads for tokens under vLLM on a GPU: its group, what has no part in it, own rows, and FlashMLA over them.

`nsa_plugin.backends.common.token_shard` has what both engines need. The group is vLLM's tensor-parallel one; under
data-parallel attention each replica has its own. All of its ranks have the same batches, padded rows and what the host
knows of the lengths included: one scheduler hands them out.

    indexer    of a prefill: vLLM's chunks cover this rank's rows alone; all others stay -1, as vLLM clears them.
               Of a step it is vLLM's own, for all rows
    attention  absorbed q [T, h, 576] -> exchange -> a kernel over own rows with all heads -> exchange

The kernel over own rows is the plugin's provider, or vLLM's FlashMLA (`flash_mla`): called here rather than by way of
vLLM's `forward_mqa`, whose buffers and metadata have a rank's own heads and all rows. What that call is given depends
on the rows and on no lengths, so that steps may be captured; the bf16 copy of an fp8 cache, which depends on lengths,
is a prefill's alone, and none of those is captured. A prefill's rows may come in pieces, each of which is given what
belongs to its rows; a copy is made once a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common import token_shard
from nsa_plugin.backends.common.token_shard import SINKS, Exchange, checked_group, has_sinks
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.partition import Partition, PartitionPiece, pieces
from nsa_plugin.settings import Settings

GROUP = "vllm.distributed.parallel_state", "get_tp_group"
"""What gives vLLM's coordinator of the tensor-parallel ranks."""
FLASH_MLA = "vllm.v1.attention.backends.mla.flashmla_sparse"
"""The module that calls FlashMLA for vLLM's own layers: the functions are those that it has imported."""


class OwnRows(PartitionPiece):
    """What this rank has of one request: its place in the batch, and rows counted from the request's first one."""


@dataclass(frozen=True)
class Dealt:
    """The rows of one call, dealt out.

    Attributes:
        partition: whose rows are whose, counted from the call's first row.
        own: this rank's, in order; of a step, whose rows are dealt out by their number alone, nothing.
    """

    partition: Partition
    own: tuple[OwnRows, ...] = ()


def dealt(
    partition: Partition, rank: int, requests: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]
) -> Dealt:
    """The rows of a prefill's call.

    Args:
        requests: their places in the batch.
        q_lens, kv_lens: query rows and context of each.
    """
    firsts = [sum(q_lens[:place]) for place in range(len(q_lens))]
    own = [
        OwnRows(
            requests[piece.request],
            piece.first - firsts[piece.request],
            piece.end - firsts[piece.request],
            piece.context,
        )
        for piece in pieces(partition.rows(rank), q_lens, kv_lens)
    ]
    return Dealt(partition, tuple(own))


@dataclass(frozen=True)
class Copied:
    """Own rows that are attended over one bf16 copy of their contexts.

    Attributes:
        rows: counted from this rank's first.
        slots: int64 [context tokens], where the copied tokens lie in the cache.
        offsets: int32 [rows], where the context of each row's request begins in the copy.
    """

    rows: slice
    slots: torch.Tensor
    offsets: torch.Tensor


# ---------------------------------------------------------------------------------------------------
# Start-up


def impossible(vllm_config: Any) -> str | None:
    """What of this server has no part in trading heads for tokens, or None."""
    parallel, speculative = vllm_config.parallel_config, getattr(vllm_config, "speculative_config", None)
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        return "batches are split in two (--enable-dbo, --ubatch-size), and two are attended at once"
    if has_sinks(vllm_config.model_config.hf_text_config):
        return SINKS
    if speculative is None:
        return None
    ranks = getattr(speculative, "draft_tensor_parallel_size", None)
    if ranks is not None and ranks != parallel.tensor_parallel_size:
        return f"the draft model has {ranks} of the {parallel.tensor_parallel_size} ranks, and other heads on each"
    draft = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    if getattr(draft, "index_share_for_mtp_iteration", False):
        return (
            "the draft model's later steps read what its first one has selected (index_share_for_mtp_iteration), and a "
            "rank has its own rows of that only"
        )
    return None


def open_exchange(
    vllm_config: Any, model: ModelShape, device: DeviceProfile, settings: Settings, where: torch.device
) -> tuple[Exchange | None, str]:
    """(the exchange of this worker or None, why there is none); see `token_shard.open_exchange`.

    Args:
        where: the worker's device.

    Raises: as that.
    """
    return token_shard.open_exchange(
        model,
        device,
        settings,
        where,
        group=lambda: checked_group("vLLM", GROUP, model),
        impossible=lambda: impossible(vllm_config),
        max_tokens=lambda: max_tokens(vllm_config),
        made=Exchange,
    )


def max_tokens(vllm_config: Any) -> int:
    """Most query rows of a batch that the buffers hold; captured sizes above it keep their heads."""
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


# ---------------------------------------------------------------------------------------------------
# vLLM's FlashMLA over own rows


def flash_mla(
    q: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    schedule: Callable[[Callable[[], Any]], Any] = lambda make: make(),
) -> torch.Tensor:
    """[n, H, kv_lora_rank] of own rows with all heads.

    Args:
        q: bfloat16 [n, H, 576].
        cache: of bf16 rows for FlashMLA's prefill kernel, of fp8 pages for its decode kernel.
        slots: int32 [n, topk], -1 behind the last.
        plan: names the kernel, and the heads that it takes.
        schedule: gives what it is given to make, or what was made for a layer before; for the decode kernel.
    """
    library = import_module(FLASH_MLA)
    heads = q.shape[1]
    if plan.head_padding > heads:
        q = F.pad(q, (0, 0, 0, plan.head_padding - heads))
    if plan.attention is Attention.SPARSE_PREFILL:
        rows, entries = _flat_rows(cache, slots)
        # As vLLM does: what lies behind the last valid entry is not read.
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
    """(the rows of a plain cache as [rows, 1, dim], a view; the slots as rows of it).

    Pages may lie further apart than their tokens take, by whole rows: those between belong to other layers.
    """
    data, size = cache.data, cache.page_size
    apart, row = data.stride(0) // data.stride(1), data.stride(1)
    if data.stride(0) % row:
        raise NsaPluginError(f"FlashMLA reads rows at one stride, and the cache's pages have strides {data.stride()}")
    count = (cache.num_pages - 1) * apart + size
    rows = data.as_strided((count, 1, data.shape[-1]), (row, row, 1), data.storage_offset())
    if apart == size:
        return rows, slots
    moved = torch.div(slots, size, rounding_mode="floor") * apart + slots % size
    return rows, torch.where(slots < 0, slots, moved).int()
