"""What vLLM's configuration says of a model, in the plugin's terms, and what of it the plugin does not carry.

Nothing here asks the device or imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa_plugin.errors import SettingsError, ShapeError
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.shapes import ModelShape

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
_CONTEXT_PARALLEL = ("decode_context_parallel_size", "prefill_context_parallel_size")


def is_sparse(vllm_config: Any) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and hasattr(model_config.hf_text_config, "index_topk")


def model_shape(vllm_config: Any, layouts: Mapping[str, str]) -> ModelShape:
    """The model as one rank of the tensor-parallel group sees it.

    Args:
        layouts: of the cache, by vLLM's name of its dtype: CPU_LAYOUTS or GPU_LAYOUTS.

    Raises:
        ShapeError: the cache's format is none that the plugin reads.
    """
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in layouts:
        raise ShapeError(
            f"--kv-cache-dtype is {cache_dtype}; nsa-plugin reads {', '.join(sorted(layouts))} here. {TURN_OFF}"
        )
    return ModelShape.from_config(
        vllm_config.model_config.hf_text_config,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_layout=layouts[cache_dtype],
    )


def step_tokens(vllm_config: Any) -> int:
    """Most rows of a request in a decode or verify step: 1 and the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def refuse_on_cpu(vllm_config: Any) -> None:
    """Raise what keeps the plugin from serving a configuration of vLLM on a CPU.

    Raises:
        SettingsError: names the flag.
    """
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
    architectures: list[str] = getattr(vllm_config.model_config.hf_config, "architectures", None) or []
    if others := [name for name in architectures if "V4" in name]:
        raise SettingsError(f"nsa-plugin serves DeepSeek-V3.2's attention here, not {others[0]}'s. {TURN_OFF}")
    parallel = vllm_config.parallel_config
    for name in _CONTEXT_PARALLEL:
        if getattr(parallel, name, 1) > 1:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"nsa-plugin does not carry {flag} {getattr(parallel, name)}. {TURN_OFF}")
    attention = getattr(vllm_config, "attention_config", None)
    for name, what in (("use_fp4_indexer_cache", "an fp4 indexer cache"), ("hisparse_config", "hisparse")):
        if getattr(attention, name, None):
            raise SettingsError(f"nsa-plugin does not carry {what}. {TURN_OFF}")
    model_shape(vllm_config, GPU_LAYOUTS)
