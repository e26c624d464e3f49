"""Read a model's shape from vLLM's configuration, and check which configurations the plugin supports.

Nothing here uses the device or imports vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nsa_plugin.backends.common.shape import V4_ROW, architectures, check_shape
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import LeftToStockError

# vLLM's --kv-cache-dtype -> the layout of the cache. On a CPU the plugin's backend keeps the model's dtype; on a GPU
# vLLM's FlashMLA-sparse backend makes fp8 fp8_ds_mla, and does not take fp8_e4m3.
CPU_LAYOUTS = {"auto": "bf16", "bfloat16": "bf16", "float16": "bf16"}
GPU_LAYOUTS = {"auto": "bf16", "bfloat16": "bf16", "fp8_ds_mla": "v32_fp8", "fp8": "v32_fp8"}
V4_LAYOUTS = dict.fromkeys(("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"), "v4_fp8")
"""For DeepSeek-V4 on a GPU: vLLM's FlashMLA layers support no other cache."""

INDEXER_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""Values of vLLM's `indexer_kv_dtype` that keep the indexer's cache of fp8 records."""

BACKEND_MAJORS = (9, 10)
"""GPUs on which vLLM supports FlashMLA, by major SM version (its `supports_compute_capability`)."""
PORTABLE_FROM = 80
"""The oldest GPU of the portable path."""

PORTABLE_V4_MAJORS = (12,)
"""GPUs of the portable path on which vLLM has all kernels that DeepSeek-V4 needs besides attention."""

DCP_FLAG = "--decode-context-parallel-size"

V32_MODULES = ("vllm.models.deepseek_v32", "vllm.model_executor.models.deepseek_v2")
"""vLLM modules with the model code that the ledger changes: DeepSeek-V3.2, GLM-5 and other models that use it."""
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
"""vLLM's variable for its experimental graphs that break at the indexer."""
V4_ARCHITECTURES = ("DeepseekV4ForCausalLM",)
V4_RATIOS = frozenset({0, 1, 4, 128})


def is_portable(sm: int) -> bool:
    """Whether the portable path serves a GPU of SM version `sm`: FlashMLA has no kernels for it, the plugin has."""
    return sm >= PORTABLE_FROM and sm // 10 not in BACKEND_MAJORS


def check_portable_v4(sm: int) -> None:
    """Check that vLLM has the kernels that DeepSeek-V4 needs besides attention and its indexer on a GPU.

    Raises:
        LeftToStockError: it does not (0.33); the message has the kernels.
    """
    if sm // 10 not in PORTABLE_V4_MAJORS:
        raise LeftToStockError(
            f"vLLM cannot run DeepSeek-V4 on SM{sm}, whatever attends: its first mHC layer (tf32_hc_prenorm_gemm) and "
            "its output projection (fp8_einsum) call DeepGEMM, which has kernels for SM90, SM100 and SM120 only "
            "(docs/older-gpus.md)"
        )


def is_sparse(vllm_config: Any) -> bool:
    return _has_indexer(vllm_config.model_config)


def draft_is_sparse(vllm_config: Any) -> bool | None:
    """Whether the draft model of --speculative-config has sparse attention; None without a draft model."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return None if draft is None else _has_indexer(draft)


def drafts_share_selection(vllm_config: Any) -> bool:
    """Whether later draft steps read the selection of the first (GLM-5's index_share_for_mtp_iteration)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(getattr(speculative, "draft_model_config", None), "hf_config", None)
    return bool(getattr(draft, "index_share_for_mtp_iteration", False))


def _has_indexer(model_config: Any) -> bool:
    return model_config is not None and hasattr(model_config.hf_text_config, "index_topk")


def family_of(vllm_config: Any) -> str:
    """Return the family of a model with sparse attention, one of `shapes.FAMILIES`."""
    named = any(name.lower().startswith("deepseekv4") for name in _architectures(vllm_config))
    ratios = getattr(vllm_config.model_config.hf_text_config, "compress_ratios", None)
    return "v4" if named or ratios is not None else "v3.2"


def _architectures(vllm_config: Any) -> list[str]:
    return architectures(vllm_config.model_config.hf_config)


def v4_shape(vllm_config: Any) -> ModelShape:
    """Return the shape of a DeepSeek-V4 model on one tensor-parallel rank.

    Raises:
        LeftToStockError: the plugin does not support the cache's format.
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
    """Return the shape of the model on one tensor-parallel rank.

    Args:
        layouts: {--kv-cache-dtype: layout}, CPU_LAYOUTS or GPU_LAYOUTS.

    Raises:
        LeftToStockError: the plugin does not support the cache's format.
    """
    return ModelShape.from_config(
        vllm_config.model_config.hf_text_config,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        dcp_size=decode_context_parallel_size(vllm_config),
        kv_layout=_layout(vllm_config, layouts),
    )


def decode_context_parallel_size(vllm_config: Any) -> int:
    """Return how many ranks share each request's KV cache: --decode-context-parallel-size."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def _layout(vllm_config: Any, layouts: Mapping[str, str]) -> str:
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in layouts:
        raise LeftToStockError(
            f"--kv-cache-dtype is {cache_dtype}; nsa-plugin supports {', '.join(sorted(layouts))} here"
        )
    return layouts[cache_dtype]


def step_tokens(vllm_config: Any) -> int:
    """Return the most query tokens per request in a decode or verify step: 1 plus the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def check_on_cpu(vllm_config: Any) -> None:
    """Check that the plugin supports a configuration of vLLM on a CPU.

    Raises:
        LeftToStockError: it does not; the message has the flag or the model.
    """
    if family_of(vllm_config) == "v4":
        raise LeftToStockError("nsa-plugin does not support DeepSeek-V4 under vLLM on a CPU")
    _check_v32(vllm_config)
    if vllm_config.speculative_config is not None:
        raise LeftToStockError("nsa-plugin does not support --speculative-config on a CPU")
    _layout(vllm_config, CPU_LAYOUTS)
    _check_prefill_context_parallel(vllm_config)
    if (size := decode_context_parallel_size(vllm_config)) > 1:
        raise LeftToStockError(f"nsa-plugin does not support {DCP_FLAG} {size} on a CPU")


def check_on_gpu(vllm_config: Any) -> None:
    """Check that the plugin supports a configuration of vLLM on a GPU.

    Raises:
        LeftToStockError: it does not; the message has the flag or the model.
    """
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise LeftToStockError(
            "VLLM_BATCH_INVARIANT is set, but nsa-plugin picks kernels by batch size, so results depend on it"
        )
    # vLLM then counts more query tokens per request in a step than 1 plus the speculated ones.
    if getattr(vllm_config.speculative_config, "parallel_drafting", False):
        raise LeftToStockError(
            "nsa-plugin does not support parallel_drafting of --speculative-config, which the method dflash sets"
        )
    # vLLM then trims drafts on the device, and the plugin reads the query tokens of each request on the host.
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        raise LeftToStockError(
            "nsa-plugin does not support enable_adaptive_verification of --speculative-config, with which only the "
            "device knows the query tokens of each request"
        )
    _check_prefill_context_parallel(vllm_config)
    parallel = vllm_config.parallel_config
    if getattr(parallel, "enable_dbo", False):
        raise LeftToStockError("nsa-plugin does not support --enable-dbo, which splits a batch between two streams")
    if (parts := getattr(parallel, "ubatch_size", 0)) > 1:
        raise LeftToStockError(
            f"nsa-plugin does not support --ubatch-size {parts}, which splits a batch between streams"
        )
    attention = getattr(vllm_config, "attention_config", None)
    for name, what in (("use_fp4_indexer_cache", "an fp4 indexer cache"), ("hisparse_config", "hisparse")):
        if getattr(attention, name, None):
            raise LeftToStockError(f"nsa-plugin does not support {what} (attention_config.{name})")
    # Since vLLM 0.28; "auto" is the model's own.
    if (dtype := getattr(attention, "indexer_kv_dtype", "auto")) not in INDEXER_DTYPES:
        raise LeftToStockError(
            f"nsa-plugin does not support an indexer cache of {dtype} (attention_config.indexer_kv_dtype)"
        )
    if family_of(vllm_config) == "v4":
        _check_v4(vllm_config)
    else:
        _check_v32(vllm_config)
        model_shape(vllm_config, GPU_LAYOUTS)
        _check_one_layout(vllm_config)
    _check_decode_context_parallel(vllm_config)


def _check_one_layout(vllm_config: Any) -> None:
    """Check that all layers with sparse attention have the cache layout of --kv-cache-dtype: plans are for one."""
    layout, given = _layout(vllm_config, GPU_LAYOUTS), f"--kv-cache-dtype {vllm_config.cache_config.cache_dtype}"
    # vLLM also takes names of attention types there, which its MLA layers do not look at.
    skipped = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    layers = [name for name in skipped if name.isdecimal()]
    if layers and GPU_LAYOUTS["auto"] != layout:
        raise LeftToStockError(
            f"--kv-cache-dtype-skip-layers {' '.join(layers)} gives these layers a bf16 cache, and nsa-plugin serves "
            f"all layers with one format, here that of {given}"
        )
    draft = getattr(vllm_config.speculative_config, "kv_cache_dtype", None)
    if draft is not None and draft_is_sparse(vllm_config) and GPU_LAYOUTS.get(str(draft)) != layout:
        raise LeftToStockError(
            f"kv_cache_dtype of --speculative-config is {draft}, and nsa-plugin serves the draft's layers with the "
            f"format of {given} only"
        )


def _check_prefill_context_parallel(vllm_config: Any) -> None:
    if (size := getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)) > 1:
        raise LeftToStockError(f"nsa-plugin does not support --prefill-context-parallel-size {size}")


def _check_decode_context_parallel(vllm_config: Any) -> None:
    """Check that the plugin serves the configuration with the KV cache shared between ranks."""
    size = decode_context_parallel_size(vllm_config)
    if size == 1:
        return
    given = f"{DCP_FLAG} {size}"
    if family_of(vllm_config) == "v4":
        raise LeftToStockError(f"nsa-plugin does not support {given} for DeepSeek-V4")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if GPU_LAYOUTS[cache_dtype] != "v32_fp8":
        raise LeftToStockError(
            f"with {given} vLLM's FlashMLA layers read an fp8 cache only, and --kv-cache-dtype is {cache_dtype}"
        )
    if vllm_config.speculative_config is None:
        return
    interleave = int(getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1))
    # Under a KV connector vLLM sets the interleave later, to the size of a page.
    connector = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector", None)
    if interleave > 1 or connector:
        by = f"--cp-kv-cache-interleave-size {interleave}" if interleave > 1 else f"the KV connector {connector}"
        raise LeftToStockError(f"with {given} and {by} vLLM sorts verify steps among the prefills")


def _check_v32(vllm_config: Any) -> None:
    """Check that a model has V3.2's attention, by its shape and by vLLM's model code for it."""
    config = vllm_config.model_config.hf_text_config
    name = ", ".join(_architectures(vllm_config)) or "the model"
    modules = _modules(vllm_config)
    if others := [module for module in modules if module not in V32_MODULES]:
        raise LeftToStockError(
            f"vLLM runs {name} with {others[0]}; nsa-plugin supports the model code of {' and '.join(V32_MODULES)}"
        )
    if V32_MODULES[1] in modules and os.environ.get(BREAKABLE) == "1":
        # A replay calls vLLM's own indexer between two graphs, not what the plugin put in front of it.
        raise LeftToStockError(f"nsa-plugin does not support {BREAKABLE}=1 with the model code of {V32_MODULES[1]}")
    check_shape(config, "v3.2", name)
    if (pooled := getattr(config, "index_kpool", 1)) not in (None, 1):
        raise LeftToStockError(f"index_kpool of {name} is {pooled}: its indexer selects pools of tokens, not tokens")


def _modules(vllm_config: Any) -> list[str]:
    """Return the model code modules in vLLM's registry for the model's architectures."""
    models = vllm_config.model_config.registry.models
    entries = [models.get(name) for name in _architectures(vllm_config)]
    return [str(getattr(entry, "module_name", "code that its registry does not name")) for entry in entries]


def _check_v4(vllm_config: Any) -> None:
    config = vllm_config.model_config.hf_text_config
    if others := [name for name in _architectures(vllm_config) if name not in V4_ARCHITECTURES]:
        raise LeftToStockError(f"nsa-plugin supports {', '.join(V4_ARCHITECTURES)} here, not {others[0]}")
    ratios = set(getattr(config, "compress_ratios", None) or ())
    if unknown := ratios - V4_RATIOS:
        raise LeftToStockError(
            f"compress_ratios of the model has {', '.join(map(str, sorted(unknown)))}; nsa-plugin supports "
            f"{', '.join(map(str, sorted(V4_RATIOS)))}"
        )
    check_shape(config, "v4", V4_ARCHITECTURES[0])
    v4_shape(vllm_config)
