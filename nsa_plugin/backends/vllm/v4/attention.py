"""A DeepSeek-V4 layer's attention under Plans: in front of vLLM's own `_forward_prefill` and `_forward_decode`.

vLLM's layer (its implementation class in 0.22) splits a batch in two and calls one of them for each part, by keyword
and with the same arguments in every version since 0.20. For the prefills' rows

    bf16 rows       vLLM's own function runs
    direct          the plugin's kernel, straight from the window's and the compressed cache, for the rank's own heads
    decode kernel   FlashMLA's decode kernel by vLLM's function, with slots of both caches

For steps the plugin's kernel where the plan names one, else vLLM's own function. Queries and output have heads that
vLLM added to the rank's own, behind them; it reads none of their output, and the plugin's kernels leave them out.
A batch without a plan is vLLM's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.vllm.v4.batch import ATTRIBUTE, SlotSelection, V4Batch
from nsa_plugin.backends.vllm.v4.routes import path
from nsa_plugin.decision.plan import Plan
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.layouts import V4_FP8
from nsa_plugin.patches.ledger import TURN_OFF

D_V = 512
ROWS_KERNEL = "flash_mla_sparse_fwd"
"""What vLLM's function calls over bf16 rows."""

Given = Mapping[str, Any]
KernelFunction = Callable[..., Any]
Engines = Callable[..., None]
"""Calls vLLM's function as vLLM did, or a copy of it with the same arguments."""


@dataclass(frozen=True)
class Rows:
    """The prefills' or the steps' rows of a batch, and what a layer's attention reads for them.

    Attributes:
        q, out: [rows, heads, 512] bfloat16; heads that vLLM added are behind the rank's own.
        caches: of the window and of the compressed keys, None without.
        window, extra: what each row names in them.
    """

    q: torch.Tensor
    out: torch.Tensor
    caches: tuple[PagedCache, PagedCache | None]
    window: SlotSelection
    extra: SlotSelection | None


def prefill(original: Any, kernel: Callable[[], tuple[KernelFunction, KernelFunction]]) -> Any:
    """For `_forward_prefill`.

    Args:
        original: vLLM's function, or classmethod (0.22).
        kernel: gives vLLM's `flash_mla_with_kvcache` and `get_mla_metadata`.
    """

    rows_kernel_of = functools.cache(functools.partial(_with_rows_kernel, original))

    def around(layer: Any, batch: V4Batch, given: Given, engines: Engines) -> None:
        plan = batch.prefill
        if plan is None:
            return engines()
        taken = path(plan)
        if taken == BF16_ROWS:
            return engines(rows_kernel_of(batch.providers.attended))
        caches = _caches(layer, given["swa_k_cache"], given["compressed_k_cache"], given["attn_metadata"])
        count, extra = batch.num_prefill_rows, _selected(layer, batch, given, caches[1])
        rows = Rows(given["q"][:count], given["output"][:count], caches, batch.window(), extra)
        if taken == DECODE_KERNEL:
            _by_decode_kernel(layer, batch, kernel(), rows)
        else:
            _direct(layer, batch, plan, rows)
        return None

    return _in_front(original, around)


def decode(original: Any) -> Any:
    """For `_forward_decode`, vLLM's function or classmethod."""

    def around(layer: Any, batch: V4Batch, given: Given, engines: Engines) -> None:
        plan = batch.steps
        if plan is None or path(plan) != DIRECT:
            return engines()
        metadata, rows = batch.metadata, int(batch.metadata.num_decode_tokens)
        caches = _caches(layer, layer.swa_cache_layer.kv_cache, given["kv_cache"], given["attn_metadata"])
        window = SlotSelection(metadata.decode_swa_indices[:rows].flatten(1), metadata.decode_swa_lens[:rows])
        extra = None
        if caches[1] is not None and layer.compress_ratio == 4:
            transform = batch.providers.helper("index_transform_paged")
            chosen, table = layer.topk_indices_buffer[:rows], given["attn_metadata"].block_table
            page_size, owners = caches[1].page_size, batch.step_owners()
            extra = SlotSelection(transform(chosen, table, page_size=page_size, row_to_request=owners), None)
        elif caches[1] is not None:
            named = given["attn_metadata"]
            slots = named.c128a_global_decode_topk_indices[:rows].flatten(1)
            extra = SlotSelection(slots, named.c128a_decode_topk_lens[:rows])
        _direct(layer, batch, plan, Rows(given["q"][:rows], given["output"][:rows], caches, window, extra))
        return None

    return _in_front(original, around)


def _in_front(original: Any, around: Callable[[Any, V4Batch, Given, Engines], None]) -> Any:
    """A function or classmethod like `original`, that hands batches under plans to `around`."""
    of_class = isinstance(original, classmethod)
    function = original.__func__ if of_class else original
    signature = inspect.signature(function)
    names = list(signature.parameters)

    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        batch: V4Batch | None = getattr(given["swa_metadata"], ATTRIBUTE, None)
        if batch is None:
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        layer = given["layer"] if of_class else given[names[0]]
        return around(layer, batch, given, lambda copied=None: (copied or function)(*args, **kwargs))

    return classmethod(attend) if of_class else attend


def _caches(layer: Any, window: torch.Tensor, extra: torch.Tensor | None, named: Any) -> tuple[PagedCache, Any]:
    """The layer's window cache and its compressed one, None without.

    Raises:
        PatchError: the compressed cache's pages are not as vLLM's block table counts them.
    """
    own = open_cache(window, V4_FP8)
    if layer.compress_ratio <= 1 or extra is None or named is None:
        return own, None
    second = open_cache(extra, V4_FP8)
    if int(named.block_size) // layer.compress_ratio != second.page_size:
        raise PatchError(
            f"vLLM's cache of compress ratio {layer.compress_ratio} has {second.page_size} entries a page; its blocks "
            f"of {named.block_size} tokens would have {int(named.block_size) // layer.compress_ratio}. {TURN_OFF}"
        )
    return own, second


def _selected(layer: Any, batch: V4Batch, given: Given, cache: PagedCache | None) -> SlotSelection | None:
    """The compressed keys of the prefills' rows; None without a compressed cache."""
    if cache is None:
        return None
    ratio, named = int(layer.compress_ratio), given["attn_metadata"]
    lengths = batch.lengths(ratio, given["positions"])
    if ratio == 4:
        chosen = layer.topk_indices_buffer[batch.prefill_rows]
    else:
        chosen = named.c128a_prefill_topk_indices[: len(lengths)]
    slots = batch.slots(ratio, chosen, named.block_table, cache.page_size, lengths)
    return SlotSelection(slots, lengths.clamp(max=slots.shape[1]))


def _direct(layer: Any, batch: V4Batch, plan: Plan, rows: Rows) -> None:
    """The plugin's kernel; heads that vLLM added are left alone."""
    (cache, second), window, extra = rows.caches, rows.window, rows.extra
    heads, op = _own_heads(layer), KERNEL_OPS[plan.attention]
    kernel = batch.providers.load(op, plan.provider, heads=heads)
    by_sequence = op == "sparse_mla_decode"

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(1) if by_sequence else tensor

    arguments: dict[str, Any] = {"scale": layer.scale, "d_v": D_V, "attn_sink": layer.attn_sink[:heads]}
    if extra is not None:
        arguments |= {"extra_cache" if by_sequence else "extra_kv": second, "extra_topk_length": extra.lengths}
        arguments["extra_indices"] = shaped(extra.slots)
    q, out = shaped(rows.q[:, :heads]), shaped(rows.out[:, :heads])
    kernel(q, cache, shaped(window.slots), topk_length=window.lengths, out=out, **arguments)


def _by_decode_kernel(layer: Any, batch: V4Batch, kernel: tuple[KernelFunction, KernelFunction], rows: Rows) -> None:
    """FlashMLA's decode kernel, with the arguments of vLLM's own call for decodes."""
    (cache, second), window, extra = rows.caches, rows.window, rows.extra
    attend, schedule = kernel
    attend = batch.providers.attended.kernel(attend, named=("indices", "extra_indices_in_kvcache"))
    ratio = int(layer.compress_ratio)
    if ratio not in batch.schedules:
        # Filled by the first layer of the ratio; the lengths of the others are the same.
        batch.schedules[ratio] = schedule()[0]
    attend(
        q=rows.q.unsqueeze(1),
        k_cache=cache.as_records(),
        block_table=None,
        head_dim_v=D_V,
        tile_scheduler_metadata=batch.schedules[ratio],
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=window.slots.unsqueeze(1),
        topk_length=window.lengths,
        softmax_scale=layer.scale,
        attn_sink=layer.attn_sink,
        extra_k_cache=None if second is None else second.as_records(),
        extra_indices_in_kvcache=None if extra is None else extra.slots.unsqueeze(1),
        extra_topk_length=None if extra is None else extra.lengths,
        out=rows.out.unsqueeze(1),
    )


def _with_rows_kernel(original: Any, attended: AttendedTokens) -> KernelFunction | None:
    """A copy of vLLM's function that attends wrong rows of its workspace; None without the fault.

    vLLM's function calls its kernel by a name of its module, which stays as it is: the copy has names of its own.
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


def _own_heads(layer: Any) -> int:
    """Heads of the rank; vLLM's queries may have more."""
    heads = getattr(layer, "n_local_heads", None)  # num_heads before 0.23
    return int(layer.num_heads if heads is None else heads)
