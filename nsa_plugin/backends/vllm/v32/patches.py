"""Replacements of vLLM's ledger for a GPU (`patches.vllm_gpu`); each makes the new object from the original."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.startup.activation import process
from nsa_plugin.backends.vllm.v32.attention import planned_impl, rebased
from nsa_plugin.backends.vllm.v32.indexer import planned_indexer_builder, wrap_indexer
from nsa_plugin.backends.vllm.v32.indexer import prefill_chunks as chunks_under_plans
from nsa_plugin.backends.vllm.v32.metadata import planned_builder
from nsa_plugin.backends.vllm.v32.portable import norm_rope, queries
from nsa_plugin.backends.vllm.v32.prefill_selection import prefill_logits as logits_if_needed
from nsa_plugin.backends.vllm.v32.prefill_selection import prefill_topk as topk_by_plugin
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.errors import NsaPluginError, PatchError
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8
from nsa_plugin.patches.ledger import MARK, replacement, wrap

T = TypeVar("T")
OPERATOR = "sparse_attn_indexer"


def serving() -> GpuServing | None:
    """Return the plugin's state in this worker; None while stock vLLM serves."""
    found: Any = process().serving
    return found if isinstance(found, GpuServing) else None


def _or_stock(do: Callable[[GpuServing], T]) -> T | None:
    """Return the result of `do`, or None while stock vLLM serves: after the first error, unless it ends the start.

    Raises:
        NsaPluginError: (strict) the model, the configuration or the machine does not fit.
    """
    found = serving()
    if found is None:
        return None
    try:
        return do(found)
    except NsaPluginError as error:
        if found.resolved.settings.ends_start(error):
            raise
        process().give_up(error, found.resolved, report=found.first)
        return None


def planning() -> VllmPlanner | None:
    """Return the planner of this worker, which has its GPU.

    Raises:
        NsaPluginError: (strict) see `_or_stock`.
    """
    return _or_stock(lambda found: found.planning())


def building() -> VllmPlanner | None:
    """As `planning`, for a layer that is being built.

    Raises:
        NsaPluginError: (strict) see `_or_stock`.
    """
    return _or_stock(lambda found: found.building())


def providers() -> Providers:
    found = serving()
    if found is None:
        raise PatchError("a layer needs a kernel of nsa-plugin, but the plugin does not serve")
    return found.loaded()


def impl_class(original: Any) -> Any:
    """For `FlashMLASparseBackend.get_impl_cls`; the backend and its name do not change."""

    @functools.cache
    def planned(stock: type) -> type:
        from vllm.forward_context import get_forward_context
        from vllm.v1.attention import backend

        base = rebased(stock, getattr(backend, "SparseMLAAttentionImpl", None), backend.MLAAttentionImpl)
        return planned_impl(base, planning, providers, lambda: get_forward_context().no_compile_layers)

    # vLLM calls this when it builds a layer, so errors come before the class is chosen.
    return planned_class(original, planned, building)


def builder_class(original: Any) -> Any:
    """For `FlashMLASparseBackend.get_builder_cls`."""
    return planned_class(original, functools.cache(lambda stock: planned_builder(stock, planning)))


def indexer_builder_class(original: Any) -> Any:
    """For `get_builder_cls` of `DeepseekV32IndexerBackend` and of `DeepseekV4IndexerBackend`, which inherits it."""
    return planned_class(original, functools.cache(lambda stock: planned_indexer_builder(stock, planning)))


def planned_class(
    original: Any, planned: Callable[[type], type], planner: Callable[[], VllmPlanner | None] | None = None
) -> Any:
    """Make vLLM's static method return the plugin's class if there is a planner.

    Args:
        planner: returns the planner; None: `planning`.
    """
    function = getattr(original, "__func__", original)  # an inherited method comes as a function

    @functools.wraps(function)
    def get_cls() -> type:
        stock: type = function()
        # Without a planner return vLLM's class, not a subclass: vLLM's layers check its bases.
        return stock if (planner or planning)() is None else planned(stock)

    return staticmethod(get_cls)


def prefill_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `split_indexer_prefill_chunks`."""
    return chunks_under_plans(original, planning)


def prefill_topk(original: Callable[..., None]) -> Callable[..., None]:
    """For `top_k_per_row_prefill`."""
    return topk_by_plugin(original, lambda: serving() is not None, providers)


def prefill_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `fp8_fp4_mqa_logits` of vLLM's indexer."""
    return logits_if_needed(original)


@replacement
def worker_load(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """For `Worker.load_model`: the worker has its GPU before it, and all layers after it."""
    _or_stock(lambda found: found.prepare(torch.device(worker.device)))
    result = original(worker, *args, **kwargs)
    _or_stock(lambda found: found.check_layers())
    return result


@replacement
def worker_warm_up(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """For `Worker.compile_or_warm_up_model`, which captures graphs; the cache is allocated before it."""
    _or_stock(lambda found: found.measure())
    result = original(worker, *args, **kwargs)
    _or_stock(lambda found: found.settle())
    if (found := serving()) is not None:
        process().report_gpu(found)
    return result


@replacement
def supports_compute_capability(original: Callable[..., bool], cls: type, capability: Any) -> bool:
    """For `FlashMLASparseBackend.supports_compute_capability`: also on GPUs of the portable path."""
    return bool(original(cls, capability)) or _portable()


@replacement
def has_deep_gemm(original: Callable[[], bool]) -> bool:
    """For `has_deep_gemm` of vLLM's indexer: DeepGEMM has no kernels for GPUs of the portable path."""
    return original() and not _portable()


def fused_norm_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `fused_norm_rope` of vLLM's model code."""
    return _without_fp8(original, norm_rope)


def fused_q(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `fused_q` of vLLM's model code."""
    return _without_fp8(original, queries)


@replacement
def pack_warmup_keys(original: Callable[..., list[Any]], kernel: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """For `PackSeqTritonKernel.get_warmup_keys` (0.30 on): nothing to compile for fp8 values the GPU cannot convert."""
    found = serving()
    fp8 = torch.float8_e4m3fn in (*args, *kwargs.values())
    if found is None or not fp8 or found.planning().device.sm >= FIRST_WITH_FP8:
        return original(kernel, *args, **kwargs)
    return []


def _without_fp8(original: Callable[..., Any], ours: Callable[[dict[str, Any], Providers], Any]) -> Callable[..., Any]:
    """Call `ours` with the arguments by name if the plugin serves on a GPU without fp8 instructions."""
    signature = inspect.signature(original)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = serving()
        if found is None or found.planning().device.sm >= FIRST_WITH_FP8:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return ours(bound.arguments, found.loaded())

    return wrap(original, around)


def _portable() -> bool:
    """Whether the plugin serves by the portable path."""
    planner = planning()
    return planner is not None and planner.portable


def indexer_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function `sparse_attn_indexer`, called directly by a model (`vllm.models.deepseek_v32`, 0.27 on).

    A model's module loaded after the function was replaced already has the replacement, which is not wrapped again.
    """
    stock = original.__wrapped__ if MARK in vars(original) else original  # type: ignore[attr-defined]
    return wrap_indexer(stock, _batch, providers, _portable)


def indexer_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the same function as the implementation of an operator, at whose name graphs are split.

    The operator keeps its name and schema; its kernel for vLLM's device becomes the new function, which calls vLLM's
    if there is no planner.
    """
    from vllm.platforms import current_platform

    selecting = wrap_indexer(original, _batch, providers, _portable)
    library = torch.library.Library("vllm", "IMPL")
    library.impl(OPERATOR, selecting, current_platform.dispatch_key, allow_override=True)
    # The kernel lives as long as its library does.
    selecting.__dict__["library"] = library
    return selecting


def _batch() -> Any:
    from vllm.forward_context import get_forward_context

    # Without a planner nothing was skipped, and vLLM's function needs no change.
    return None if serving() is None else get_forward_context().attn_metadata
