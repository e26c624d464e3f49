"""What the CPU entries of the vLLM ledger put in place; each function makes the new object from the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nsa_plugin.kernels.indexer import quantize
from nsa_plugin.patches.ledger import wrap

BACKEND_PATH = "nsa_plugin.backends.vllm.cpu_backend.CpuSparseMLABackend"


def attention_backend(original: Any) -> Any:
    function = original.__func__

    @functools.wraps(function)
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if attn_selector_config.use_sparse:
            return BACKEND_PATH
        return str(function(cls, selected_backend, attn_selector_config, *args, **kwargs))

    return classmethod(get_attn_backend_cls)


def indexer_cache_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_attn_backend(original: Callable[..., Any], cache: Any) -> type:
        from nsa_plugin.backends.vllm.cpu_indexer import CpuIndexerBackend

        return CpuIndexerBackend

    return wrap(original, get_attn_backend)


def per_token_group_quant_fp8(original: Callable[..., Any]) -> Callable[..., Any]:
    def quantise(
        original: Callable[..., Any],
        x: torch.Tensor,
        group_size: int,
        *args: Any,
        use_ue8m0: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(x, group_size, ue8m0=use_ue8m0, amax_floor=1e-10)

    return wrap(original, quantise)


def indexer_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        original: Callable[..., Any],
        op: Any,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor,
        k: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        from nsa_plugin.backends.vllm import cpu_indexer  # registers the operator

        buffer: torch.Tensor = op.topk_indices_buffer
        cpu_indexer.sparse_attn_indexer(q_quant, k, weights, buffer, op.k_cache.prefix)
        return buffer

    return wrap(original, forward)


def rotary_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cpu(original: Callable[..., Any], rotary: Any, *args: Any, **kwargs: Any) -> Any:
        return rotary.forward_native(*args, **kwargs)

    return wrap(original, forward_cpu)


def keep_kv_b_proj(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(original: Callable[..., Any], layer: Any, remove_weight: bool) -> None:
        keep = str(getattr(layer, "prefix", "")).endswith(".kv_b_proj")
        original(layer, remove_weight and not keep)

    return wrap(original, dispatch)
