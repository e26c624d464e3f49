"""vLLM's V3.2 indexer in miniature: its metadata builder, its rule for prefill chunks, and one layer's call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.kernels.indexer import quantize
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, reference_write
from tests.backends.fake_vllm.v32 import MAX_LEN, TRITON, planner

MIB = 1 << 20


HEADS, DIM, PAGE, TOPK = 4, 128, 8, 5


def split_indexer_prefill_chunks(
    seq_lens_cpu: torch.Tensor,
    query_lens_cpu: torch.Tensor,
    workspace_size: int,
    max_logits_bytes: int,
    request_offset: int = 0,
) -> list[tuple[slice, slice]]:
    """vLLM's rule: requests while keys fit the workspace and rows x keys the budget; else rows of one request."""
    chunks: list[tuple[slice, slice]] = []
    most, end = max_logits_bytes // 4, 0
    while end < len(seq_lens_cpu):
        start, rows, keys = end, 0, 0
        while end < len(seq_lens_cpu):
            more_rows, more_keys = rows + int(query_lens_cpu[end]), keys + int(seq_lens_cpu[end])
            if end > start and (more_keys > workspace_size or more_rows * more_keys > most):
                break
            rows, keys, end = more_rows, more_keys, end + 1
        step = max(1, most // keys)
        for first in range(0, rows, step):
            some = slice(start + request_offset, end + request_offset)
            chunks.append((some, slice(first, min(first + step, rows))))
    return chunks


MIXED = [(1, 40), (1, 9), (6, 6), (30, 60), (20, 20), (5, 70), (4, 96), (4, 21), (0, 12)]


@dataclass
class IndexerMetadata:
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Any = None
    prefill: Any = None


class StockIndexerBuilder:
    """DeepseekV32IndexerMetadataBuilder: requests with as many rows as the first are steps, up to a threshold."""

    threshold = 4
    compress_ratio = 1

    def __init__(self, *_: Any) -> None: ...

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
        common = common_attn_metadata
        lens = common.query_start_loc_cpu.diff().tolist()
        same = [0 < rows <= self.threshold and rows in (lens[0], 0) for rows in lens]
        padded = all(rows in (lens[0], 0) for rows in lens)
        decodes = len(lens) if padded else (same.index(False) if False in same else len(lens))
        rows = common.num_actual_tokens if decodes == len(lens) else sum(lens[:decodes])
        return IndexerMetadata(decodes, rows, len(lens) - decodes, decode="vLLM's", prefill="vLLM's")


def small_budget(step_tokens: int, rows: int = 4) -> VllmPlanner:
    """Free memory for the logits of `rows` query tokens at once."""
    device = replace(TRITON, memory_free=4 * 4 * MAX_LEN * rows)
    return planner(device=device, step_tokens=step_tokens)


@dataclass
class Call:
    """The arguments with which vLLM's model calls its indexer."""

    cache: PagedCache
    q: torch.Tensor
    weights: torch.Tensor
    buffer: torch.Tensor


def a_call(rows: int) -> Call:
    random = torch.Generator().manual_seed(5)
    cache = allocate_cache("indexer_fp8", 160, PAGE)
    keys = torch.randn(cache.num_slots, DIM, generator=random)
    reference_write(cache, keys, torch.arange(cache.num_slots), power_of_two_scales=True)
    q, _ = quantize(torch.randn(rows, HEADS, DIM, generator=random))
    weights = torch.rand(rows, HEADS, generator=random)
    return Call(cache, q, weights, torch.full((rows + 3, TOPK), 9, dtype=torch.int32))


seen: list[str] = []


def stock_indexer(
    hidden_states: torch.Tensor,
    k_cache_prefix: str,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    weights: torch.Tensor,
    topk_tokens: int,
    max_model_len: int,
    topk_indices_buffer: torch.Tensor,
    dense_mha_metadata_layer_name: str = "mla",
) -> torch.Tensor:
    """vLLM's: clears the rows, and here selects nothing."""
    topk_indices_buffer[: hidden_states.shape[0]] = -1
    seen.append(dense_mha_metadata_layer_name)
    return topk_indices_buffer
