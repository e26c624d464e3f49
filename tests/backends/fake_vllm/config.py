"""A V3.2 configuration as vLLM passes it to a worker, and the attention layer it builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nsa_plugin.backends.vllm.v32.choice import BACKEND
from tests.backends.fake_vllm.v32 import MAX_LEN, NOPE, ROPE

REGISTRY = SimpleNamespace(
    models={
        "DeepseekV32ForCausalLM": SimpleNamespace(module_name="vllm.models.deepseek_v32"),
        "GlmMoeDsaForCausalLM": SimpleNamespace(module_name="vllm.models.deepseek_v32"),
        "DeepseekV3ForCausalLM": SimpleNamespace(module_name="vllm.model_executor.models.deepseek_v2"),
        "HYV4ForCausalLM": SimpleNamespace(module_name="vllm.models.hy_v4"),
        "Plugged": SimpleNamespace(),
    }
)
"""vLLM's registry of models: the module of each architecture's model code."""


def config(cache_dtype: str = "fp8_ds_mla", **more: Any) -> Any:
    hf = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"],
        num_attention_heads=8,
        kv_lora_rank=512,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
        index_topk=64,
        index_n_heads=32,
        index_head_dim=128,
    )
    fields = {
        "model_config": SimpleNamespace(hf_config=hf, hf_text_config=hf, max_model_len=MAX_LEN, registry=REGISTRY),
        "cache_config": SimpleNamespace(cache_dtype=cache_dtype),
        "parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        "speculative_config": None,
        "attention_config": SimpleNamespace(use_fp4_indexer_cache=False, backend=None),
        "compilation_config": SimpleNamespace(static_forward_context={}),
    }
    return SimpleNamespace(**(fields | more))


def drafting(*, sparse: bool, **given: Any) -> Any:
    """--speculative-config with a draft model: an MTP layer of the checkpoint, or one without sparse attention."""
    hf = SimpleNamespace(**({"index_topk": 64} if sparse else {}))
    fields = {"method": "mtp" if sparse else "eagle3", "num_speculative_tokens": 1, "attention_backend": None}
    return SimpleNamespace(**(fields | {"draft_model_config": SimpleNamespace(hf_text_config=hf)} | given))


def layer(planned: bool, backend: str = BACKEND) -> Any:
    """vLLM's MLA layer after it has been built."""
    impl = SimpleNamespace(nsa_plugin=object() if planned else None)
    return SimpleNamespace(use_sparse=True, impl=impl, attn_backend=SimpleNamespace(get_name=lambda: backend))
