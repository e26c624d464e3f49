"""A V4 configuration as vLLM passes it to a worker, and the attention layer it builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def config(cache_dtype: str = "fp8", **more: Any) -> Any:
    hf = SimpleNamespace(
        architectures=["DeepseekV4ForCausalLM"],
        num_attention_heads=8,
        head_dim=512,
        qk_rope_head_dim=64,
        index_topk=128,
        index_n_heads=32,
        index_head_dim=128,
        sliding_window=128,
        compress_ratios=[0, 4, 128],
    )
    fields = {
        "model_config": SimpleNamespace(hf_config=hf, hf_text_config=hf, max_model_len=1024, model="checkpoint"),
        "cache_config": SimpleNamespace(cache_dtype=cache_dtype),
        "parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8),
        "speculative_config": None,
        "attention_config": SimpleNamespace(use_fp4_indexer_cache=False, backend=None),
        "compilation_config": SimpleNamespace(static_forward_context={}),
    }
    return SimpleNamespace(**(fields | more))


def layer(backend: str) -> Any:
    return SimpleNamespace(swa_cache_layer=object(), get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
