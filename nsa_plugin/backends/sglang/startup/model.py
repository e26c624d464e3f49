"""Read a model's shape and cache layout from SGLang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import LeftToStockError, NoProviderError, PatchError, SettingsError
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8, is_sm120, name_of
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import BACKEND_OPS, ResolvedSettings

BACKEND_MAJORS = (9, 10)
"""The GPUs, by SM major version, whose kernels of SGLang's own backends the plugin knows."""

_JOINED = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa")
"""The projections of attention that SGLang joins into one, and its name for that."""

NEEDS_GPU = (
    "DeepSeek sparse attention under SGLang needs a GPU, and this engine is to run on a CPU, where SGLang has neither "
    "kernels nor a paged cache for it. Use SGLang on a GPU or vLLM on the CPU. Turning the plugin off does not help: "
    "stock SGLang does not support it on a CPU either"
)


def has_sparse_attention(config: Any) -> bool:
    """Whether a Hugging Face configuration (an object or a dict) has an indexer."""
    get = config.get if isinstance(config, dict) else lambda name: getattr(config, name, None)
    text = get("text_config")
    return get("index_topk") is not None or (text is not None and has_sparse_attention(text))


def configured_for_cpu(server_args: Any) -> bool:
    """Whether the engine is to run on a CPU, by its raw arguments."""
    import torch

    device = getattr(server_args, "device", None)
    return device == "cpu" or (device is None and not torch.cuda.is_available())


def on_rocm() -> bool:
    """Whether PyTorch is built for AMD GPUs, whose versions look like NVIDIA's."""
    import torch

    return torch.version.hip is not None


def device_sm() -> int:
    """Return the SM version of the NVIDIA GPU that PyTorch names first; 0 without one. The rank has no GPU yet."""
    import torch

    if on_rocm() or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def is_portable(sm: int) -> bool:
    """Whether the portable path serves a GPU of SM version `sm`."""
    return 80 <= sm < 90 or is_sm120(sm)


def is_left(sm: int) -> bool:
    """Whether everything is left to SGLang on a GPU of SM version `sm`; False without a GPU."""
    return bool(sm) and not is_portable(sm) and sm // 10 not in BACKEND_MAJORS


def check_gpu(sm: int, resolved: ResolvedSettings) -> None:
    """Check that the plugin serves a model with sparse attention on a GPU of SM version `sm`.

    SGLang follows its own flags there, so only the plugin's settings ask for what cannot work.

    Raises:
        SettingsError: it does not, and a setting names what should serve there.
        LeftToStockError: it does not.
    """
    if not is_left(sm):
        return
    for name in (*BACKEND_OPS, "portable", "token_shard"):
        value = getattr(resolved.settings, name)
        if value not in ("auto", "off") and name not in resolved.engine_paths:
            raise SettingsError(
                f"{name} is {value} and cannot work on {name_of(sm)}, which is left to SGLang; allowed here: auto"
            )
    raise LeftToStockError(
        f"under SGLang nsa-plugin serves SM80 to SM89, SM90, SM100 and SM120 GPUs, and this one is {name_of(sm)}"
    )


def config_of(server_args: Any) -> dict[str, Any]:
    """Return the model's configuration by raw arguments.

    Empty if it cannot be read here. It is left to SGLang, which reports it.
    """
    from transformers import PretrainedConfig

    revision = getattr(server_args, "revision", None)
    try:
        config, _ = PretrainedConfig.get_config_dict(str(server_args.model_path), revision=revision)
    except (OSError, ValueError):
        return {}
    return dict(config)


def is_sparse(server_args: Any) -> bool:
    """Whether the model of raw arguments has sparse attention."""
    return has_sparse_attention(config_of(server_args))


def unserved_weights(server_args: Any, sm: int) -> str:
    """Return which weights of a model with sparse attention SGLang cannot load or run, which it says later and less
    clearly. Or ""."""
    config = config_of(server_args)
    if not has_sparse_attention(config):
        return ""
    stored = config.get("quantization_config") or {}
    method = stored.get("quant_method")
    if method == "fp8" and config.get("n_routed_experts") and 80 <= sm < FIRST_WITH_FP8:
        return (
            f"the checkpoint has fp8 experts, for which SGLang has no kernels on {name_of(sm)} (sglang #12887): give "
            "it one with INT4 experts"
        )
    # DeepSeek-V4 has other projections.
    if (
        method == "awq"
        and config.get("kv_lora_rank")
        and _keeps_attention(config, stored.get("modules_to_not_convert") or ())
    ):
        return (
            "the checkpoint is AWQ with attention left unquantised, which SGLang 0.5.23 cannot load: it joins q_a_proj "
            "and kv_a_proj_with_mqa along the wrong dimension (sglang #28305). Give it one in compressed-tensors"
        )
    if (
        method == "gptq"
        and config.get("n_routed_experts")
        and _activations(server_args, config) == "bfloat16"
        and getattr(server_args, "quantization", None) != "moe_wna16"  # other kernels, whose scales are in bfloat16
    ):
        return (
            "the checkpoint's experts are in GPTQ, which do not run in bfloat16 under SGLang 0.5.23: it holds their "
            "scales in float16, and its kernel requires the activations' dtype (sglang #20599). Give it one in "
            "compressed-tensors"
        )
    return ""


def _activations(server_args: Any, config: Mapping[str, Any]) -> str | None:
    """The dtype that raw arguments ask for, or that of the checkpoint; None if neither names one."""
    given = getattr(server_args, "dtype", "auto")
    return given if given != "auto" else config.get("dtype") or config.get("torch_dtype")


def _keeps_attention(config: Mapping[str, Any], kept: Iterable[str]) -> bool:
    """Whether the projections of some layer that SGLang joins are among the modules that are not quantised.

    Args:
        kept: parts of modules' names.
    """
    layers = range(int(config.get("num_hidden_layers") or 0))
    joined = [f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in _JOINED]
    return any(str(part) in module for part in kept for module in joined)


def refuse_model(server_args: Any) -> None:
    """Raise NoProviderError for a model with sparse attention on a CPU, before anything is started or loaded."""
    if configured_for_cpu(server_args) and is_sparse(server_args):
        raise NoProviderError(f"{server_args.model_path}: {NEEDS_GPU}")


def model_shape(backend: Any, model_runner: Any) -> ModelShape:
    """Return the shape of the model on one rank of its attention group.

    Args:
        backend: SGLang's attention backend, fully built; it knows the rank's heads and the cache's format.
        model_runner: the runner that the backend was built for.

    Raises:
        LeftToStockError: the plugin does not support the cache's byte layout.
    """
    config = model_runner.model_config.hf_text_config
    layout = kv_layout(backend, model_runner)
    if layout is None:
        raise LeftToStockError(
            f"the KV cache holds {model_runner.kv_cache_dtype} without scales; the plugin supports --kv-cache-dtype "
            "bfloat16, and fp8_e4m3 in the format of the FlashMLA kernels"
        )
    return ModelShape.from_config(
        config, attn_tp_size=config.num_attention_heads // backend.num_q_heads, kv_layout=layout
    )


def argument_of(server_args: Any, name: str) -> Any:
    """Return one of SGLang's arguments as SGLang resolved it; None if this version has none of that name.

    Where SGLang keeps its decisions apart (`resolution_result`), the attribute is what the user gave.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:  # this version writes them to the attribute
        return getattr(server_args, name, None)
    return resolution_result(server_args, name)


def variable_of(name: str) -> Any:
    """Return the value of one of SGLang's environment variables; None if this version has none of that name."""
    from sglang.srt.environ import envs

    variable = getattr(envs, name, None)
    return None if variable is None else variable.get()


def selection_is_broadcast() -> bool:
    """Whether every rank takes the indexer's selection of the first (`SGLANG_DSA_TOPK_BROADCAST`)."""
    return bool(variable_of("SGLANG_DSA_TOPK_BROADCAST"))


def attends_half(backend: Any, model_runner: Any) -> bool:
    """Whether a backend attends half of the batches of another, as two have under `--enable-two-batch-overlap`."""
    whole = getattr(model_runner, "attn_backend", None)  # set once all three are built
    return any(half is backend for half in getattr(whole, "children", ()))


def prefix_of(backend: Any) -> str:
    """Return the prefix of a V3.2 backend's attributes and flags: "dsa", or "nsa" before 0.5.13."""
    return "dsa" if hasattr(backend, "dsa_prefill_impl") else "nsa"


def impls_of(backend: Any) -> dict[str, str]:
    """Return the paths of SGLang's V3.2 backend by flag: of prefills, then of decode, verify and draft steps.

    Raises:
        PatchError: the backend lacks the attributes.
    """
    x = prefix_of(backend)
    names = {f"--{x}-{what}-backend": f"{x}_{what}_impl" for what in ("prefill", "decode")}
    if lacks := [name for name in names.values() if not hasattr(backend, name)]:
        raise PatchError(f"SGLang's {type(backend).__name__} has no {', '.join(lacks)}. {TURN_OFF}")
    return {flag: str(getattr(backend, name)) for flag, name in names.items()}


def parallel_of(model_runner: Any, name: str) -> Any:
    """Return the object with the rank or size `name`: the runner, its `ps` (0.5.16 on), or SGLang's context (later).

    Raises:
        ImportError: it is in none of them.
    """
    for holder in (model_runner, getattr(model_runner, "ps", None)):
        if getattr(holder, name, None) is not None:
            return holder
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def ranks(model_runner: Any) -> dict[str, int]:
    """Return tp_rank, pp_rank and, under data parallelism, dp_rank of this process, as in SGLang's metrics."""
    holder = parallel_of(model_runner, "tp_rank")
    found = {name: getattr(holder, name, None) for name in ("tp_rank", "pp_rank", "dp_rank")}
    return {name: int(rank) for name, rank in found.items() if rank is not None}


def attention_ranks(model_runner: Any) -> int:
    """Return the attention TP size."""
    try:
        return int(parallel_of(model_runner, "attn_tp_size").attn_tp_size)
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_tp_size

        return int(get_attention_tp_size())


def stock_feature(backend: Any, server_args: Any) -> str | None:
    """Return a feature of this server that leaves every batch to the stock path, for either model family, or None."""
    # Some of these names exist only in some versions.
    if getattr(backend, "hisparse_coordinator", None) is not None or argument_of(server_args, "enable_hisparse"):
        return "hisparse"
    flags = (
        "enable_nsa_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
        "enable_prefill_context_parallel",
        "enable_prefill_cp",
    )
    if any(argument_of(server_args, flag) for flag in flags):
        return "context-parallel prefill"
    # It promises results that do not depend on the batch size, which selects the plugin's kernels and their splits.
    return "deterministic inference" if argument_of(server_args, "enable_deterministic_inference") else None


def kv_layout(backend: Any, model_runner: Any) -> str | None:
    """Return the plugin's name of the cache's layout, or None if it does not support it."""
    scaled_fp8 = getattr(backend, "dsa_kv_cache_store_fp8", None)
    if scaled_fp8 is None:
        scaled_fp8 = backend.nsa_kv_cache_store_fp8
    if scaled_fp8:
        return "v32_fp8"
    return "bf16" if str(model_runner.kv_cache_dtype) == "torch.bfloat16" else None
