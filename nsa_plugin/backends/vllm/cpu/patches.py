"""Replacements of the CPU entries of vLLM's ledger, which has the reason for each."""

from __future__ import annotations

from typing import Any

import torch

from nsa_plugin.kernels.indexer import quantize
from nsa_plugin.patches.ledger import replacement

BACKEND_PATH = "nsa_plugin.backends.vllm.cpu.backend.CpuSparseMLABackend"


@replacement
def attention_backend(
    original: Any, cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
) -> str:
    if attn_selector_config.use_sparse:
        return BACKEND_PATH
    return str(original(cls, selected_backend, attn_selector_config, *args, **kwargs))


@replacement
def indexer_cache_backend(original: Any, cache: Any) -> type:
    from nsa_plugin.backends.vllm.cpu.indexer import CpuIndexerBackend

    return CpuIndexerBackend


# A custom operator, so that torch.compile does not trace the argument checks.
@torch.library.custom_op("nsa_plugin::quantize_groups", mutates_args=())
def quantize_groups(x: torch.Tensor, group_size: int, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize(x, group_size, ue8m0=ue8m0, amax_floor=1e-10)


@quantize_groups.register_fake
def _(x: torch.Tensor, group_size: int, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.new_empty((*x.shape[:-1], x.shape[-1] // group_size), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


@replacement
def per_token_group_quant_fp8(
    original: Any, x: torch.Tensor, group_size: int, *args: Any, use_ue8m0: bool = False, **kwargs: Any
) -> Any:
    return quantize_groups(x, group_size, use_ue8m0)


@replacement
def indexer_forward(
    original: Any, op: Any, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    from nsa_plugin.backends.vllm.cpu import indexer as cpu_indexer  # registers the operator

    buffer: torch.Tensor = op.topk_indices_buffer
    cpu_indexer.sparse_attn_indexer(q_quant, k, weights, buffer, op.k_cache.prefix)
    return buffer


@replacement
def attention_forward(original: Any, layer: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if layer.use_sparse and torch.compiler.is_compiling():
        q = after_selection(q, layer.impl.topk_indices_buffer, layer.layer_name)
    return original(layer, q, *args, **kwargs)


@torch.library.custom_op("nsa_plugin::after_selection", mutates_args=())
def after_selection(q: torch.Tensor, topk_indices_buffer: torch.Tensor, layer_name: str) -> torch.Tensor:
    """Return a copy of q for attention, so that a compiled graph makes the selection first.

    A compiled graph orders operators by their tensors alone and may write the selection to a copy of the buffer, but
    does not see that attention reads the buffer.
    """
    from vllm.forward_context import get_forward_context

    buffer = get_forward_context().no_compile_layers[layer_name].impl.topk_indices_buffer
    if buffer.data_ptr() != topk_indices_buffer.data_ptr():
        buffer[: q.shape[0]] = topk_indices_buffer[: q.shape[0]]
    return q.clone()


@after_selection.register_fake
def _(q: torch.Tensor, topk_indices_buffer: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(q)


@replacement
def rotary_forward(original: Any, rotary: Any, *args: Any, **kwargs: Any) -> Any:
    return rotary.forward_native(*args, **kwargs)


@replacement
def keep_kv_b_proj(original: Any, layer: Any, remove_weight: bool) -> None:
    keep = str(getattr(layer, "prefix", "")).endswith(".kv_b_proj")
    original(layer, remove_weight and not keep)
