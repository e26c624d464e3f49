"""A DeepSeek-V4 layer's attention under vLLM: wraps `_forward_prefill` and `_forward_decode`.

vLLM's layer (its implementation class in 0.22) splits a batch in two and calls one function for each part, by keyword
and with the same arguments since 0.20. For a prefill, by execution path:

    bf16 rows       vLLM's function runs
    direct          the plugin's kernel reads the window's and the compressed cache in place
    decode kernel   FlashMLA's decode kernel, through vLLM's function, with slots of both caches

Decode and verify steps run the plugin's kernel if the plan has one, else vLLM's function, as does a batch without a
plan. vLLM pads the rank's heads; the plugin's kernels skip the padding, whose output vLLM does not read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.common.v4 import D_V, CacheSelection, LayerCall, attend_in_place
from nsa_plugin.backends.vllm.v4.batch import ATTRIBUTE, V4Batch
from nsa_plugin.backends.vllm.v4.routes import path
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.layouts import V4_FP8
from nsa_plugin.patches.ledger import TURN_OFF

ROWS_KERNEL = "flash_mla_sparse_fwd"
"""The kernel that vLLM's function calls over bf16 rows."""

Given = Mapping[str, Any]
KernelFunction = Callable[..., Any]
Engines = Callable[..., None]
"""Calls vLLM's function with the arguments that vLLM passed, or a copy of it."""


def flash_mla() -> tuple[KernelFunction, KernelFunction]:
    """Return vLLM's functions that call FlashMLA's decode kernel and make its schedule."""
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    return flash_mla_with_kvcache, get_mla_metadata


def prefill(original: Any, kernel: Callable[[], tuple[KernelFunction, KernelFunction]] = flash_mla) -> Any:
    """For `_forward_prefill` of vLLM's FlashMLA layer: a function, or a classmethod (0.22)."""
    rows_kernel_of = functools.cache(functools.partial(_with_rows_kernel, original))

    def around(layer: Any, batch: V4Batch, given: Given, engines: Engines) -> None:
        plan = batch.prefill
        assert plan is not None
        taken = path(plan)
        if taken == BF16_ROWS:
            return engines(rows_kernel_of(batch.providers.attended))
        cache, compressed = _caches(layer, given["swa_k_cache"], given["compressed_k_cache"], given["attn_metadata"])
        count = batch.num_prefill_rows
        window, extra = batch.window(cache), _selected(layer, batch, given, compressed)
        call, out = _layer_call(layer, given["q"][:count], window, extra), given["output"][:count]
        if taken == DECODE_KERNEL:
            _by_decode_kernel(batch, kernel(), call, out)
        else:
            attend_in_place(batch.providers, KERNEL_OPS[plan.attention], plan.provider, call, out)
        return None

    return _in_front(original, around, lambda batch: batch.prefill is not None)


def decode(original: Any) -> Any:
    """For `_forward_decode` of vLLM's FlashMLA layer, as `prefill`."""

    def around(layer: Any, batch: V4Batch, given: Given, engines: Engines) -> None:
        plan = batch.steps
        assert plan is not None
        metadata, rows = batch.metadata, int(batch.metadata.num_decode_tokens)
        layer_metadata = given["attn_metadata"]
        cache, compressed = _caches(layer, layer.swa_cache_layer.kv_cache, given["kv_cache"], layer_metadata)
        window = CacheSelection(cache, metadata.decode_swa_indices[:rows].flatten(1), metadata.decode_swa_lens[:rows])
        extra = None
        if compressed is not None and layer.compress_ratio == 4:
            transform = batch.providers.helper("index_transform_paged")
            chosen, owners = layer.topk_indices_buffer[:rows], batch.step_owners()
            slots = transform(chosen, layer_metadata.block_table, page_size=compressed.page_size, row_to_request=owners)
            extra = CacheSelection(compressed, slots, None)
        elif compressed is not None:
            slots = layer_metadata.c128a_global_decode_topk_indices[:rows].flatten(1)
            extra = CacheSelection(compressed, slots, layer_metadata.c128a_decode_topk_lens[:rows])
        call = _layer_call(layer, given["q"][:rows], window, extra)
        op = KERNEL_OPS[plan.attention]
        attend_in_place(batch.providers, op, plan.provider, call, given["output"][:rows])

    return _in_front(original, around, lambda batch: batch.steps_in_place)


def _layer_call(layer: Any, q: torch.Tensor, window: CacheSelection, extra: CacheSelection | None) -> LayerCall:
    heads = getattr(layer, "n_local_heads", None)  # num_heads before 0.23
    heads = int(layer.num_heads if heads is None else heads)
    return LayerCall(q, window, extra, layer.attn_sink, layer.scale, heads, int(layer.compress_ratio))


def _in_front(
    original: Any, around: Callable[[Any, V4Batch, Given, Engines], None], wanted: Callable[[V4Batch], bool]
) -> Any:
    """Wrap `original`, a function or classmethod: batches that are `wanted` go to `around`.

    Every layer of every step comes here, so a batch that is left to vLLM costs no more than looking at it.
    """
    of_class = isinstance(original, classmethod)
    function = original.__func__ if of_class else original
    signature = inspect.signature(function)
    names = list(signature.parameters)

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> None:
        metadata = kwargs["swa_metadata"] if "swa_metadata" in kwargs else args[names.index("swa_metadata")]
        batch: V4Batch | None = getattr(metadata, ATTRIBUTE, None)
        if batch is None or not wanted(batch):
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        layer = given["layer"] if of_class else given[names[0]]
        return around(layer, batch, given, lambda copied=None: (copied or function)(*args, **kwargs))

    return classmethod(attend) if of_class else attend


def _caches(layer: Any, window: torch.Tensor, extra: torch.Tensor | None, metadata: Any) -> tuple[PagedCache, Any]:
    """The layer's window cache and its compressed one or None.

    Raises:
        PatchError: the compressed cache's pages differ from those of vLLM's block table.
    """
    first = open_cache(window, V4_FP8)
    if layer.compress_ratio <= 1 or extra is None or metadata is None:
        return first, None
    second = open_cache(extra, V4_FP8)
    if int(metadata.block_size) // layer.compress_ratio != second.page_size:
        raise PatchError(
            f"vLLM's cache of compress ratio {layer.compress_ratio} has {second.page_size} entries a page; its blocks "
            f"of {metadata.block_size} tokens would have {int(metadata.block_size) // layer.compress_ratio}. {TURN_OFF}"
        )
    return first, second


def _selected(layer: Any, batch: V4Batch, given: Given, cache: PagedCache | None) -> CacheSelection | None:
    """The prefills' selection in the compressed cache; None without one."""
    if cache is None:
        return None
    ratio, metadata = int(layer.compress_ratio), given["attn_metadata"]
    lengths = batch.lengths(ratio, given["positions"])
    if ratio == 4:
        chosen = layer.topk_indices_buffer[batch.prefill_rows]
    else:
        chosen = metadata.c128a_prefill_topk_indices[: len(lengths)]
    slots = batch.slots(ratio, chosen, metadata.block_table, cache.page_size, lengths)
    return CacheSelection(cache, slots, lengths.clamp(max=slots.shape[1]))


def _by_decode_kernel(
    batch: V4Batch, kernel: tuple[KernelFunction, KernelFunction], call: LayerCall, out: torch.Tensor
) -> None:
    """Call FlashMLA's decode kernel with the arguments of vLLM's call for decode steps."""
    attend, schedule = kernel
    attend = batch.providers.attended.kernel(attend, named=("indices", "extra_indices_in_kvcache"))
    if call.ratio not in batch.schedules:
        # The first layer of a ratio fills it; the other layers have the same lengths.
        batch.schedules[call.ratio] = schedule()[0]
    window, extra = call.window, call.extra
    attend(
        q=call.q.unsqueeze(1),
        k_cache=window.cache.as_records(),
        block_table=None,
        head_dim_v=D_V,
        tile_scheduler_metadata=batch.schedules[call.ratio],
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=window.indices.unsqueeze(1),
        topk_length=window.lengths,
        softmax_scale=call.scale,
        attn_sink=call.attn_sink,
        extra_k_cache=None if extra is None else extra.cache.as_records(),
        extra_indices_in_kvcache=None if extra is None else extra.indices.unsqueeze(1),
        extra_topk_length=None if extra is None else extra.lengths,
        out=out.unsqueeze(1),
    )


def _with_rows_kernel(original: Any, attended: AttendedTokens) -> KernelFunction | None:
    """Copy vLLM's function with a kernel that attends wrong rows of its workspace; None without the fault.

    vLLM's function looks its kernel up in its module, which stays unchanged: the copy has separate globals.
    """
    if not attended.wrong:
        return None
    function = inspect.unwrap(original)
    names = function.__globals__
    kernel = attended.kernel(names[ROWS_KERNEL], named=("indices",))
    copied = FunctionType(
        function.__code__,
        {**names, ROWS_KERNEL: kernel},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
