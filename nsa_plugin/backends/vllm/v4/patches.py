"""What vLLM's ledger for DeepSeek-V4 (`patches.vllm_v4`) puts in place; each makes the new object from the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nsa_plugin.backends.vllm.v4 import attention as v4_attention
from nsa_plugin.backends.vllm.v4.batch import planned_swa_builder
from nsa_plugin.backends.vllm.v4.indexer import planned_v4_indexer_builder
from nsa_plugin.backends.vllm.v32.patches import planning, providers


def prefill(original: Any) -> Any:
    """For `_forward_prefill` of vLLM's FlashMLA layer."""
    return v4_attention.prefill(original, _flash_mla)


def decode(original: Any) -> Any:
    """For `_forward_decode` of vLLM's FlashMLA layer."""
    return v4_attention.decode(original)


def swa_builder_class(original: Any) -> Any:
    """For `DeepseekSparseSWABackend.get_builder_cls`."""
    return _static(original, functools.cache(lambda stock: planned_swa_builder(stock, planning, providers)))


def indexer_builder_class(original: Any) -> Any:
    """For `DeepseekV4IndexerBackend.get_builder_cls`, which it inherits from V3.2's backend."""
    return _static(original, functools.cache(lambda stock: planned_v4_indexer_builder(stock, planning)))


def _static(original: Any, planned: Callable[[type], type]) -> Any:
    function = getattr(original, "__func__", original)

    @functools.wraps(function)
    def get_cls() -> type:
        stock: type = function()
        return stock if planning() is None else planned(stock)

    return staticmethod(get_cls)


def _flash_mla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    return flash_mla_with_kvcache, get_mla_metadata
