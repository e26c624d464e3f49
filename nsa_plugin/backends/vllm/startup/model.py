"""What vLLM's configuration says of a model, in the plugin's terms, and what of it the plugin does not carry.

Nothing here asks the device or imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import SettingsError, ShapeError
from nsa_plugin.patches.ledger import TURN_OFF

# vLLM's --kv-cache-dtype, by the layout that the cache has then. On a CPU the plugin's backend keeps the model's dtype;
# on a GPU vLLM's FlashMLA-sparse backend makes any fp8 fp8_ds_mla.
CPU_LAYOUTS = {"auto": "bf16", "bfloat16": "bf16", "float16": "bf16"}
GPU_LAYOUTS = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "fp8_ds_mla": "v32_fp8",
    "fp8": "v32_fp8",
    "fp8_e4m3": "v32_fp8",
}
V4_LAYOUTS = dict.fromkeys(("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"), "v4_fp8")
"""Of DeepSeek-V4 on a GPU: vLLM's FlashMLA layers have no other cache."""

_CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")

V32_ARCHITECTURES = ("DeepseekV32ForCausalLM",)
"""Of those with V3.2's attention, what is served on a GPU. Others share selections between layers, or have other heads,
and none of them has been compared there."""
V4_ARCHITECTURES = ("DeepseekV4ForCausalLM",)
V4_RATIOS = frozenset({0, 1, 4, 128})
V4_ROW = 512
"""Values of a cache row of V4, and of a query."""


def is_sparse(vllm_config: Any) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and hasattr(model_config.hf_text_config, "index_topk")


def family_of(vllm_config: Any) -> str:
    """The family of a model with sparse attention, one of `shapes.FAMILIES`."""
    named = any("V4" in name for name in _architectures(vllm_config))
    ratios = getattr(vllm_config.model_config.hf_text_config, "compress_ratios", None)
    return "v4" if named or ratios is not None else "v3.2"


def _architectures(vllm_config: Any) -> list[str]:
    return getattr(vllm_config.model_config.hf_config, "architectures", None) or []


def v4_shape(vllm_config: Any) -> ModelShape:
    """A DeepSeek-V4 model as one rank of the tensor-parallel group sees it.

    Raises:
        ShapeError: the cache's format is none that the plugin reads.
    """
    config = vllm_config.model_config.hf_text_config
    return ModelShape(
        family="v4",
        num_heads=config.num_attention_heads,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_lora_rank=V4_ROW,
        qk_nope_head_dim=V4_ROW - config.qk_rope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=V4_ROW,
        index_topk=config.index_topk,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        kv_layout=_layout(vllm_config, V4_LAYOUTS),
        sliding_window=config.sliding_window,
    )


def model_shape(vllm_config: Any, layouts: Mapping[str, str]) -> ModelShape:
    """The model as one rank of the tensor-parallel group sees it.

    Args:
        layouts: of the cache, by vLLM's name of its dtype: CPU_LAYOUTS or GPU_LAYOUTS.

    Raises:
        ShapeError: the cache's format is none that the plugin reads.
    """
    return ModelShape.from_config(
        vllm_config.model_config.hf_text_config,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_layout=_layout(vllm_config, layouts),
    )


def _layout(vllm_config: Any, layouts: Mapping[str, str]) -> str:
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in layouts:
        raise ShapeError(
            f"--kv-cache-dtype is {cache_dtype}; nsa-plugin reads {', '.join(sorted(layouts))} here. {TURN_OFF}"
        )
    return layouts[cache_dtype]


def step_tokens(vllm_config: Any) -> int:
    """Most rows of a request in a decode or verify step: 1 and the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def refuse_on_cpu(vllm_config: Any) -> None:
    """Raise what keeps the plugin from serving a configuration of vLLM on a CPU.

    Raises:
        SettingsError: names the flag.
    """
    if family_of(vllm_config) == "v4":
        raise SettingsError(f"nsa-plugin has no DeepSeek-V4 for vLLM on a CPU. {TURN_OFF}")
    if vllm_config.speculative_config is not None:
        raise SettingsError(
            f"nsa-plugin does not carry speculative decoding on a CPU: drop --speculative-config. {TURN_OFF}"
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in CPU_LAYOUTS:
        raise SettingsError(
            f"nsa-plugin on a CPU keeps the KV cache in the model's dtype; --kv-cache-dtype is {cache_dtype}, "
            f"allowed: {', '.join(CPU_LAYOUTS)}. {TURN_OFF}"
        )
    if any(getattr(vllm_config.parallel_config, name, 1) > 1 for name in _CONTEXT_PARALLEL):
        raise SettingsError(f"nsa-plugin does not carry context parallelism on a CPU. {TURN_OFF}")


def refuse_on_gpu(vllm_config: Any) -> None:
    """Raise what keeps the plugin from serving a configuration of vLLM on a GPU.

    Raises:
        SettingsError: names the flag.
        ShapeError: see `model_shape`.
    """
    family = family_of(vllm_config)
    # vLLM counts more rows of a request as a step there than 1 and the speculated ones.
    if getattr(vllm_config.speculative_config, "parallel_drafting", False):
        raise SettingsError(
            "nsa-plugin does not carry parallel_drafting of --speculative-config, which the method dflash sets. "
            f"{TURN_OFF}"
        )
    parallel = vllm_config.parallel_config
    for name in _CONTEXT_PARALLEL:
        if getattr(parallel, name, 1) > 1:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"nsa-plugin does not carry {flag} {getattr(parallel, name)}. {TURN_OFF}")
    attention = getattr(vllm_config, "attention_config", None)
    for name, what in (("use_fp4_indexer_cache", "an fp4 indexer cache"), ("hisparse_config", "hisparse")):
        if getattr(attention, name, None):
            raise SettingsError(f"nsa-plugin does not carry {what}. {TURN_OFF}")
    if family == "v4":
        _refuse_v4(vllm_config)
    else:
        _refuse_architectures(vllm_config, V32_ARCHITECTURES)
        model_shape(vllm_config, GPU_LAYOUTS)


def _refuse_architectures(vllm_config: Any, carried: tuple[str, ...]) -> None:
    if others := [name for name in _architectures(vllm_config) if name not in carried]:
        raise SettingsError(f"nsa-plugin carries {', '.join(carried)} here, not {others[0]}. {TURN_OFF}")


def _refuse_v4(vllm_config: Any) -> None:
    """As `refuse_on_gpu`, for what only DeepSeek-V4 has."""
    config = vllm_config.model_config.hf_text_config
    _refuse_architectures(vllm_config, V4_ARCHITECTURES)
    ratios = set(getattr(config, "compress_ratios", None) or ())
    if unknown := ratios - V4_RATIOS:
        raise SettingsError(
            f"compress_ratios of the model has {', '.join(map(str, sorted(unknown)))}; nsa-plugin knows "
            f"{', '.join(map(str, sorted(V4_RATIOS)))}. {TURN_OFF}"
        )
    if (head_dim := getattr(config, "head_dim", None)) != V4_ROW:
        raise SettingsError(f"head_dim of the model is {head_dim}; nsa-plugin knows {V4_ROW}. {TURN_OFF}")
    v4_shape(vllm_config)
