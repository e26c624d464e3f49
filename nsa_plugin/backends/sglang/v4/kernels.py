"""A V4 layer's attention under SGLang: read its caches and selections, then run the batch's execution path.

SGLang passes, in every version: q [query tokens, heads, 512] bfloat16, some versions with a dimension of 1 behind the
tokens; both caches as [pages, bytes] of fp8 records with padding at the end of a page (`layouts.V4_FP8`): window pages
of 256 tokens, compressed pages of 64 (ratio 4) or 2 (ratio 128); int32 slots and lengths per query token; attn_sink
[heads] float32. It does not use lse.

MLP-sync may pad q beyond the query tokens of the metadata. The padding attends no keys here and its output is zero;
SGLang gives it one key and never reads the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.v4 import D_V, CacheSelection, LayerCall, attend_in_place
from nsa_plugin.backends.sglang.v4.batch import Prefill
from nsa_plugin.backends.sglang.v4.rows import over_rows
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.layouts import V4_FP8


def layer_call(
    state: V4State,
    core: Any,
    pool: Any,
    layer_id: int,
    *,
    q: torch.Tensor,
    attn_sink: torch.Tensor | None,
    scale: float,
    own_heads: int,
    ratio: int,
) -> LayerCall:
    """Return the attention call of one layer.

    Args:
        core: SGLang's `DSV4AttnMetadata`.
        pool: SGLang's KV pool.
        own_heads: heads of the tensor-parallel rank; q may have more.
    """
    heads = own_heads if state.own_heads_first and 0 < own_heads < q.shape[1] else q.shape[1]
    window, extra = selections(state, core, pool, layer_id, ratio, q.shape[0])
    return LayerCall(q, window, extra, attn_sink, scale, heads, ratio, core)


def selections(
    state: V4State, core: Any, pool: Any, layer_id: int, ratio: int, rows: int
) -> tuple[CacheSelection, CacheSelection | None]:
    """Return a layer's selections in the window's cache and, with a compress ratio, in its compressed cache."""
    cache = state.cache(
        layer_id, "window", pool.get_swa_key_buffer_radix(layer_id), V4_FP8, lambda: window_page_size(pool)
    )
    window = CacheSelection(cache, *_of_rows(state.prefill, core.swa_page_indices, core.swa_topk_lengths, rows))
    if ratio == 0:
        return window, None
    chosen, counts = (
        (core.c4_sparse_page_indices, core.c4_sparse_topk_lengths)
        if ratio == 4
        else (core.c128_page_indices, core.c128_topk_lengths_clamp1)
    )
    cache = state.cache(
        layer_id,
        "extra",
        pool.get_extra_key_buffer(layer_id),
        V4_FP8,
        lambda: int(pool.get_extra_key_page_size(layer_id)),
    )
    return window, CacheSelection(cache, *_of_rows(state.prefill, chosen, counts, rows))


def _of_rows(
    prefill: Prefill | None, indices: torch.Tensor, lengths: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit indices and lengths to q: [rows, topk] and [rows].

    A prefill's layers share one view, so that what is computed from it is computed once. Padding makes a copy, which
    would not see the next layer's selection, so padded tensors are not shared.
    """
    key = id(indices), id(lengths), rows
    known = None if prefill is None else prefill.views.get(key)
    if known is not None and known[0] is indices and known[1] is lengths:
        return known[2:]
    fitted = _fitted(indices.flatten(1), rows, -1), _fitted(lengths.flatten(), rows, 0)
    if prefill is not None and rows <= min(indices.shape[0], lengths.shape[0]):
        prefill.views[key] = indices, lengths, *fitted
    return fitted


def attend(state: V4State, chosen: Execution, call: LayerCall) -> torch.Tensor:
    """Attend; return [query tokens, heads, 512] in new memory, because the model rotates the RoPE part in place.

    The output of padded heads is undefined; the model does not read it.
    """
    if chosen.path == BF16_ROWS:
        return over_rows(state, call)
    if chosen.path == DECODE_KERNEL:
        return _by_decode_kernel(state, call)
    out = call.q.new_empty(*call.q.shape[:-1], D_V)
    attend_in_place(state.providers, chosen.op, chosen.plan.provider, call, out)
    return out


def _by_decode_kernel(state: V4State, call: LayerCall) -> torch.Tensor:
    """Call FlashMLA's decode kernel for more query tokens than SGLang does, if the installed build supports them."""
    decode = state.providers.load("sparse_mla_decode", "flash_mla")
    if call.ratio not in state.schedules:
        from flash_mla import get_mla_metadata

        # The first layer of a ratio fills it; the other layers have the same lengths.
        state.schedules[call.ratio] = get_mla_metadata()[0]
    step = decode(
        call.q.unsqueeze(1),
        call.window.cache,
        call.window.indices.unsqueeze(1),
        scale=call.scale,
        d_v=D_V,
        topk_length=call.window.lengths,
        attn_sink=call.attn_sink,
        metadata=state.schedules[call.ratio],
        **call.second("extra_cache", by_sequence=True),
    )
    return step.out.squeeze(1)  # type: ignore[no-any-return]


def window_page_size(pool: Any) -> int:
    """Tokens of a page of the window's cache."""
    ask = getattr(pool, "get_swa_key_page_size", None)  # since 0.5.22
    return int(pool.swa_kv_pool.page_size if ask is None else ask())


def longest_context(backend: Any) -> int:
    """The server's longest context in tokens."""
    # Since 0.5.16; before, the width of the slot table, which is a few tokens more.
    known = getattr(backend, "max_context_len", None)
    return int(backend.MAX_SEQ_LEN_FOR_CAPTURE if known is None else known)


def record_bytes(pool: Any) -> int:
    """Bytes of a token in the window's cache."""
    ask = getattr(pool, "get_swa_key_bytes_per_token", None)  # since 0.5.21
    return int(pool.swa_kv_pool.kv_cache_total_dim if ask is None else ask())


def _fitted(values: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """Cut `values` to q's query tokens, or pad it if MLP-sync has padded q: [rows, ...]."""
    missing = rows - values.shape[0]
    if missing <= 0:
        return values[:rows]
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing), value=padding)
