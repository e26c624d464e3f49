"""The indexer of DeepSeek sparse attention for vLLM on a CPU.

Stores the new keys, then selects the tokens that attention reads for each query token, as positions in its request. The
plan in the attention layer's metadata says which requests need a selection, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

from nsa_plugin.backends.vllm.cpu.backend import CpuSparseMLAMetadata, Group
from nsa_plugin.backends.vllm.startup.activation import process
from nsa_plugin.backends.vllm.startup.arrival import arrival_of
from nsa_plugin.decision.plan import IndexerMode, IndexerPlan
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels import index_transform, indexer
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_read_codes, reference_write


@dataclass
class CpuIndexerMetadata:
    """Places of the new indexer keys.

    Attributes:
        slot_mapping: [num_tokens] int64; negative: nothing to store.
        block_table: [num_requests, max_pages] int32, pages of the indexer's cache.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor


class CpuIndexerBackend(DeepseekV32IndexerBackend):
    @staticmethod
    def get_name() -> str:
        return "NSA_PLUGIN_CPU_INDEXER"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[CpuIndexerMetadataBuilder]:
        return CpuIndexerMetadataBuilder


class CpuIndexerMetadataBuilder(AttentionMetadataBuilder[CpuIndexerMetadata]):
    _cudagraph_support: ClassVar = AttentionCGSupport.NEVER
    # The attention builder orders the batch.
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        self.serving = process().serving
        self.arrival = None if self.serving is None else arrival_of(vllm_config, layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CpuIndexerMetadata:
        if self.arrival is not None and self.serving is not None:
            starts, kv_lens = common_attn_metadata.query_start_loc_cpu.tolist(), common_attn_metadata.seq_lens.tolist
            self.arrival.batch(self.serving.request_ids, starts, kv_lens, common_attn_metadata.block_table_tensor)
        return CpuIndexerMetadata(common_attn_metadata.slot_mapping, common_attn_metadata.block_table_tensor)


def attention_layer(cache_prefix: str) -> str:
    """Return the name of the attention layer that reads the selection of the indexer with this key cache.

    Raises:
        PatchError: the cache's name does not follow DeepSeek-V3.2's layers.
    """
    layer, suffix, rest = cache_prefix.rpartition(".indexer.k_cache")
    if not suffix or rest:
        raise PatchError(f"nsa-plugin does not know the attention layer of the indexer cache {cache_prefix!r}")
    return f"{layer}.attn"


@torch.library.custom_op("nsa_plugin::sparse_attn_indexer", mutates_args=("topk_indices_buffer",))
def sparse_attn_indexer(
    q_fp8: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk_indices_buffer: torch.Tensor, cache_prefix: str
) -> None:
    """Store the new keys and write the selection of each query token into the buffer.

    A custom operator, because torch.compile must not trace it: it depends on the batch.

    Args:
        q_fp8: [num_tokens, index_n_heads, index_head_dim] float8_e4m3fn, its scale folded into `weights`.
        k: [num_tokens, index_head_dim], float.
        weights: [num_tokens, index_n_heads], float.
        topk_indices_buffer: [max_tokens, index_topk] int32; -1 without a selection.
        cache_prefix: name of the layer's key cache in the forward context.
    """
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):  # the profiling run has no batch
        return
    metadata: CpuIndexerMetadata = context.attn_metadata[cache_prefix]
    attention: CpuSparseMLAMetadata = context.attn_metadata[attention_layer(cache_prefix)]
    cache = open_cache(context.no_compile_layers[cache_prefix].kv_cache, "indexer_fp8")
    slots = metadata.slot_mapping.flatten()
    reference_write(cache, k, slots, power_of_two_scales=True)
    topk_indices_buffer[: q_fp8.shape[0]] = -1
    topk = topk_indices_buffer.shape[1]
    for group in attention.groups:
        if group.plan.indexer.mode is IndexerMode.TOPK:
            for request in requests_of(group):
                selected = select(request, cache, metadata.block_table, q_fp8, weights, group.plan.indexer, topk)
                if attention.settings.fault == "shift_indices":
                    selected = shifted(selected, request.limits)
                topk_indices_buffer[request.rows] = selected


@dataclass
class _Request:
    """One request's query tokens in a batch.

    Attributes:
        place: in the batch.
        rows: [q_len] int64, its query tokens in the batch.
        limits: [q_len] int64, number of tokens that each query token sees, itself included.
    """

    place: int
    rows: torch.Tensor
    limits: torch.Tensor


def requests_of(group: Group) -> Iterator[_Request]:
    first = 0
    for place, q_len, kv_len in zip(group.requests, group.q_lens, group.kv_lens, strict=True):
        if q_len:  # a request may have no query tokens if all its tokens were transferred
            yield _Request(place, group.rows[first : first + q_len], torch.arange(kv_len - q_len, kv_len) + 1)
        first += q_len


def select(
    request: _Request,
    cache: PagedCache,
    block_table: torch.Tensor,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    plan: IndexerPlan,
    topk: int,
) -> torch.Tensor:
    """Return [q_len, topk] int32 positions in the request.

    One request at a time, so only the logits of one chunk over one request's keys are in memory.
    """
    kv_len = int(request.limits[-1])
    slots, _ = index_transform.request_slots(
        block_table[request.place : request.place + 1], torch.tensor([kv_len]), cache.page_size
    )
    k, k_scale = reference_read_codes(cache, slots)
    return indexer.reference_topk(
        q_fp8[request.rows],
        k,
        k_scale.squeeze(-1),
        weights[request.rows].float(),
        torch.zeros_like(request.limits),
        request.limits,
        topk,
        rows_per_chunk=plan.rows_per_chunk,
    )


def shifted(selected: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Apply the deliberate fault: each query token attends to other tokens, half its context away."""
    moved = (selected + limits.unsqueeze(1) // 2) % limits.unsqueeze(1)
    return torch.where(selected >= 0, moved, selected).to(selected.dtype)


@sparse_attn_indexer.register_fake
def _(
    q_fp8: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk_indices_buffer: torch.Tensor, cache_prefix: str
) -> None: ...
