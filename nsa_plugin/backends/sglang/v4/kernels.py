"""The routes of a V4 batch, from SGLang's caches and indices to the attention's output.

What SGLang hands over, in every version: q [rows, heads, 512] bfloat16, or with a dimension of 1 behind the rows; both
caches as [pages, bytes] of fp8 records with padding behind a page's (`layouts.V4_FP8`), the window's with pages of 256
tokens, the compressed ones' with 64 (c4) or 2 (c128); int32 slots and lengths a row; attn_sink [heads] float32. Of lse
it takes nothing.

Rows of the metadata and of q may differ by those that MLP-sync added. Those get no keys here, and an output of zeros;
SGLang gives them one key and reads none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v4.batch import Prefill
from nsa_plugin.backends.sglang.v4.flash_mla import sparse_prefill
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner
from nsa_plugin.backends.sglang.v4.rows import over_rows
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.kernels.v4_prefill import RowsAttention
from nsa_plugin.kernels.workspace import Workspace
from nsa_plugin.layouts import V4_FP8, CacheLayout

D_V = 512


@dataclass
class V4State:
    """What the plugin keeps on a V4 backend.

    Attributes:
        planner: decides.
        providers: where its kernels come from.
        own_heads_first: the heads that the model adds for FlashMLA follow the rank's own (from 0.5.14 on).
        rows_attention: attends rows of a workspace; FlashMLA's.
        plans_steps: whether later steps than prefills have plans.
        route: of the prefill that was prepared last; None where it is SGLang's own.
        prefill: that batch's requests.
        schedules: FlashMLA's, of that batch, by compress ratio.
        workspace: the rows, the combined indices and the maps of pages.
        caches: of the layers, by (layer, which); the engine has them for as long as it runs.
    """

    planner: SglangV4Planner
    providers: Providers
    own_heads_first: bool = True
    rows_attention: RowsAttention = sparse_prefill
    plans_steps: bool = False
    route: Execution | None = None
    prefill: Prefill | None = None
    schedules: dict[int, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    caches: dict[tuple[int, str], PagedCache] = field(default_factory=dict)

    def cache(
        self, layer_id: int, which: str, buffer: torch.Tensor, layout: CacheLayout, page_size: Callable[[], int]
    ) -> PagedCache:
        """A layer's cache, opened at its first batch, or anew if the engine has moved it."""
        known = self.caches.get((layer_id, which))
        moved = known is None or known.data.data_ptr() != buffer.data_ptr() or known.num_pages != buffer.shape[0]
        if known is None or moved or known.data.stride(0) != buffer.stride(0):
            known = self.caches[layer_id, which] = open_cache(buffer, layout, page_size())
        return known

    def forget(self) -> None:
        """The last batch is over."""
        self.route = self.prefill = None
        self.schedules.clear()


@dataclass(frozen=True)
class CacheSelection:
    """A cache of one layer and what each row names in it: indices [rows, topk], lengths [rows], both int32."""

    cache: PagedCache
    indices: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class LayerCall:
    """A layer's attention.

    Attributes:
        q: [rows, heads, 512].
        window, extra: see `named`.
        attn_sink: [heads] float32 or None.
        scale: of the logits.
        own_heads: heads of the rank; the model may have added some.
        ratio: 0, 4 or 128.
        core: SGLang's `DSV4AttnMetadata`.
    """

    q: torch.Tensor
    window: CacheSelection
    extra: CacheSelection | None
    attn_sink: torch.Tensor | None
    scale: float
    own_heads: int
    ratio: int
    core: Any

    def second(self, cache: str, *, by_sequence: bool = False) -> dict[str, Any]:
        """The arguments of the second cache, whose parameter is called `cache`; none without one."""
        if self.extra is None:
            return {}
        indices = self.extra.indices.unsqueeze(1) if by_sequence else self.extra.indices
        return {cache: self.extra.cache, "extra_indices": indices, "extra_topk_length": self.extra.lengths}


def named(
    state: V4State, core: Any, pool: Any, layer_id: int, ratio: int, rows: int
) -> tuple[CacheSelection, CacheSelection | None]:
    """The window and, with a compress ratio, the compressed keys of a layer, of as many rows as there are queries."""
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
    """[rows, topk] and [rows]: of a prefill the same views for all layers, and so what is made of them only once.

    Rows that are padded are copies, which would not see the next layer's selection, and are made for each.
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
    """[rows, heads, 512] in memory of its own: the model rotates the last values back in place.

    Heads that the model added are left out by the plugin's own kernels; they hold anything, and it reads none of them.
    """
    if chosen.path == BF16_ROWS:
        return over_rows(state, call)
    if chosen.path == DECODE_KERNEL:
        return _by_decode_kernel(state, call)
    q, window = call.q, call.window
    heads = call.own_heads if state.own_heads_first and 0 < call.own_heads < q.shape[1] else q.shape[1]
    provider = state.providers.load(chosen.op, chosen.plan.provider, heads=heads)
    out = q.new_empty(*q.shape[:-1], D_V)
    some, into = q[:, :heads], out[:, :heads]
    arguments: dict[str, Any] = {
        "scale": call.scale,
        "d_v": D_V,
        "topk_length": window.lengths,
        "attn_sink": None if call.attn_sink is None else call.attn_sink[:heads],
    }
    if chosen.op == "sparse_mla_prefill":
        provider(some, window.cache, window.indices, out=into, **arguments, **call.second("extra_kv"))
    else:
        arguments |= call.second("extra_cache", by_sequence=True)
        indices = window.indices.unsqueeze(1)
        provider(some.unsqueeze(1), window.cache, indices, out=into.unsqueeze(1), **arguments)
    return out


def _by_decode_kernel(state: V4State, call: LayerCall) -> torch.Tensor:
    """FlashMLA's decode kernel for more rows than SGLang gives it, where the installed build takes them."""
    decode = state.providers.load("sparse_mla_decode", "flash_mla", heads=call.q.shape[1])
    if call.ratio not in state.schedules:
        from flash_mla import get_mla_metadata

        # Filled by the first layer of the ratio; the lengths of the others are the same.
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
    """Tokens a page of the window's cache, by the versions' names of it."""
    ask = getattr(pool, "get_swa_key_page_size", None)  # since 0.5.22
    return int(pool.swa_kv_pool.page_size if ask is None else ask())


def longest_context(backend: Any) -> int:
    """Most tokens of a request that the server allows."""
    # Since 0.5.16; before, the width of the table of every request's slots, which holds a few more.
    known = getattr(backend, "max_context_len", None)
    return int(backend.MAX_SEQ_LEN_FOR_CAPTURE if known is None else known)


def record_bytes(pool: Any) -> int:
    """Bytes of a token in the window's cache."""
    ask = getattr(pool, "get_swa_key_bytes_per_token", None)  # since 0.5.21
    return int(pool.swa_kv_pool.kv_cache_total_dim if ask is None else ask())


def _fitted(values: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """[rows, ...]: cut, or padded where MLP-sync added queries behind the batch's."""
    missing = rows - values.shape[0]
    if missing <= 0:
        return values[:rows]
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing), value=padding)
