"""What vLLM's ledger for a GPU (`patches.vllm_gpu`) puts in place; each makes the new object from the original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.startup.activation import process
from nsa_plugin.backends.vllm.v32.attention import planned_impl, rebased
from nsa_plugin.backends.vllm.v32.indexer import planned_indexer_builder, wrap_indexer
from nsa_plugin.backends.vllm.v32.indexer import prefill_chunks as chunks_under_plans
from nsa_plugin.backends.vllm.v32.indexer import prefill_topk as topk_by_plugin
from nsa_plugin.backends.vllm.v32.metadata import planned_builder
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.errors import NsaPluginError, PatchError
from nsa_plugin.patches.ledger import MARK, wrap

T = TypeVar("T")
OPERATOR = "sparse_attn_indexer"


def serving() -> GpuServing | None:
    """What this worker works with; None while vLLM serves by itself."""
    found: Any = process().serving
    return found if isinstance(found, GpuServing) else None


def _or_stock(do: Callable[[GpuServing], T]) -> T | None:
    """What `do` gives; None while vLLM serves by itself, and from the first error on that does not end the start.

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
    """The planner of this worker, which has chosen its GPU.

    Raises:
        NsaPluginError: (strict) see `_or_stock`.
    """
    return _or_stock(lambda found: found.planning())


def building() -> VllmPlanner | None:
    """As `planning`, for a layer of the model that is being built.

    Raises:
        NsaPluginError: (strict) see `_or_stock`.
    """
    return _or_stock(lambda found: found.building())


def providers() -> Providers:
    found = serving()
    if found is None:
        raise PatchError("a kernel of nsa-plugin was asked for, but the plugin does not serve")
    return found.loaded()


def impl_class(original: Any) -> Any:
    """For `FlashMLASparseBackend.get_impl_cls`; the backend and its name stay vLLM's."""

    @functools.cache
    def planned(stock: type) -> type:
        from vllm.forward_context import get_forward_context
        from vllm.v1.attention import backend

        base = rebased(stock, getattr(backend, "SparseMLAAttentionImpl", None), backend.MLAAttentionImpl)
        return planned_impl(base, planning, providers, lambda: get_forward_context().no_compile_layers)

    # vLLM asks where it builds a layer: whatever fails then fails before the class is chosen.
    return _static(original, planned, building)


def builder_class(original: Any) -> Any:
    """For `FlashMLASparseBackend.get_builder_cls`."""
    return _static(original, functools.cache(lambda stock: planned_builder(stock, planning)))


def indexer_builder_class(original: Any) -> Any:
    """For `DeepseekV32IndexerBackend.get_builder_cls`."""
    return _static(original, functools.cache(lambda stock: planned_indexer_builder(stock, planning)))


def _static(original: Any, planned: Callable[[type], type], ask: Callable[[], VllmPlanner | None] | None = None) -> Any:
    """vLLM's static method, with the plugin's class wherever there is a planner.

    Args:
        ask: gives it; None: `planning`.
    """
    function = original.__func__

    @functools.wraps(function)
    def get_cls() -> type:
        stock: type = function()
        # Without a planner vLLM's class, and not one that does as it does: its layers ask what it derives from.
        return stock if (ask or planning)() is None else planned(stock)

    return staticmethod(get_cls)


def prefill_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `split_indexer_prefill_chunks`."""
    return chunks_under_plans(original, planning)


def prefill_topk(original: Callable[..., None]) -> Callable[..., None]:
    """For `top_k_per_row_prefill`."""
    return topk_by_plugin(original, lambda: serving() is not None)


def worker_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `Worker.load_model`, before which vLLM has chosen its GPU and built no layer, and after which all of them."""

    def around(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        _or_stock(lambda found: found.prepare(torch.device(worker.device)))
        result = original(worker, *args, **kwargs)
        _or_stock(lambda found: found.check_layers())
        return result

    return wrap(original, around)


def worker_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `Worker.compile_or_warm_up_model`: the cache is allocated before it, and graphs are captured in it."""

    def around(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
        _or_stock(lambda found: found.measure())
        result = original(worker, *args, **kwargs)
        _or_stock(lambda found: found.settle())
        if (found := serving()) is not None:
            process().report_gpu(found)
        return result

    return wrap(original, around)


def indexer_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function `sparse_attn_indexer` where a model calls it as one (`vllm.models.deepseek_v32`, 0.27 on).

    A model's module that was loaded after the function was replaced has the replacement, which is not wrapped again.
    """
    own = original.__wrapped__ if MARK in vars(original) else original  # type: ignore[attr-defined]
    return wrap_indexer(own, _batch, providers)


def indexer_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the same function where it is the implementation of an operator, whose name graphs are split at.

    The operator keeps its name and its schema; its kernel for vLLM's device becomes the new function. Without a
    planner that is vLLM's own again.
    """
    from vllm.platforms import current_platform

    replacement = wrap_indexer(original, _batch, providers)
    library = torch.library.Library("vllm", "IMPL")
    library.impl(OPERATOR, replacement, current_platform.dispatch_key, allow_override=True)
    # The kernel lives as long as its library does.
    replacement.__dict__["library"] = library
    return replacement


def _batch() -> Any:
    from vllm.forward_context import get_forward_context

    # Without a planner nobody left anything out, and vLLM's own names count.
    return None if serving() is None else get_forward_context().attn_metadata
