"""One layer's attention with plans: a subclass of vLLM's FlashMLA-sparse implementation, for 0.20 to 0.33.

vLLM's MLA layer passes the first query tokens of a batch to `forward_mqa`, with absorbed queries, and the others to
`forward_mha`, with queries as projected. Up to 0.25 it passes all to `forward_mqa` if the implementation is a
SparseMLAAttentionImpl, which cannot attend densely; `rebased` gives vLLM's class the base of dense-capable ones
instead. From 0.26 on the metadata's `prefill.use_dense_mha` decides.

- `forward_mqa` runs the pieces of the metadata: the plugin's provider with unpadded heads, straight from the cache, or
  vLLM's FlashMLA call with vLLM's metadata. If a piece reshards, its queries are exchanged, and the same kernels run
  over this rank's query tokens with all heads (`token_shard`).
- `forward_mha` runs the dense pieces, with the prefix read from the cache as bf16. It absorbs the queries of prefills
  that select and follow the first dense one.

With context parallelism (`dcp`) vLLM passes `forward_mqa` the heads of all ranks that share the KV cache, and merges
what each rank attends of the selected tokens by the lse that it returns.

Layers that vLLM built without a planner, and metadata from another builder, take the stock path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from nsa_plugin.backends.common.dense import DensePiece, keys_and_values
from nsa_plugin.backends.common.paths import PROVIDER
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.vllm.v32.metadata import PlannedMetadata, Planning, SparsePiece
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.token_shard import Copied, flash_mla
from nsa_plugin.decision.plan import Plan
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.libraries.registry import REFERENCE
from nsa_plugin.patches.ledger import TURN_OFF

# Attributes of the class object itself, which a copy of the class must not take over.
_OWN = {"__dict__", "__weakref__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"}

CUSTOM_OPS = "vllm._custom_ops"
"""vLLM's module of its own kernels."""

Layers = Callable[[], dict[str, Any]]
"""The attention layers of the running model by name (`forward_context.no_compile_layers`)."""


def rebased(stock: type, sparse_base: type | None, dense_base: type) -> type:
    """Give vLLM's implementation the base class of dense-capable ones.

    Args:
        stock: FlashMLASparseImpl.
        sparse_base: SparseMLAAttentionImpl of 0.20 to 0.25; None from 0.26 on, where `stock` is returned unchanged.
        dense_base: MLAAttentionImpl.

    Raises:
        PatchError: vLLM's class has other bases than expected.
    """
    if sparse_base is None or not issubclass(stock, sparse_base):
        return stock
    if stock.__mro__[1] is not sparse_base:
        raise PatchError(f"vLLM's {stock.__name__} does not derive from {sparse_base.__name__} directly. {TURN_OFF}")
    members = {name: value for name, value in vars(stock).items() if name not in _OWN}
    return type(stock.__name__, (dense_base,), members | {"forward_mha": _no_mha})


def _no_mha(*_: Any, **__: Any) -> None:
    raise PatchError("vLLM's sparse implementation has no forward_mha before 0.26")


def planned_impl(stock: type, planning: Planning, providers: Callable[[], Providers], layers: Layers) -> type:
    """Make a subclass of vLLM's implementation with the plugin's `forward_mqa` and `forward_mha`.

    Args:
        stock: FlashMLASparseImpl, with a dense-capable base (`rebased`).
        planning: called once per layer.
        providers: returns those of this process; called with a planner only.
        layers: called at the first batch that needs a layer's weights.
    """

    class Impl(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.nsa_plugin: VllmPlanner | None = planning()
            if self.nsa_plugin is None:
                return
            if self.topk_indices_buffer is None:
                raise PatchError(f"vLLM built a sparse MLA layer without a top-k buffer. {TURN_OFF}")
            if self.dcp_world_size != self.nsa_plugin.model.dcp_size:
                raise PatchError(
                    f"vLLM built a layer whose KV cache {self.dcp_world_size} ranks share, but plans are for "
                    f"{self.nsa_plugin.model.dcp_size}. {TURN_OFF}"
                )
            self.nsa_plugin_providers = providers()
            self.nsa_plugin_layer: Any = None
            self.kv_b_proj = kwargs["kv_b_proj"]
            self.qk_nope_head_dim, self.qk_rope_head_dim = kwargs["qk_nope_head_dim"], kwargs["qk_rope_head_dim"]
            self.v_head_dim = kwargs["v_head_dim"]
            # Plans do not support dense attention under the indexer's mask (SM100, 0.27 on).
            self.masked_mha_available = False

        def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
            """(out [rows, heads, kv_lora_rank], lse) of absorbed queries [rows, heads, 576], or their two parts.

            The lse is None, or with context parallelism float32 [rows, heads]: natural log, -inf for a query token
            without a key on this rank. The heads are then those of all ranks that share the KV cache.
            """
            if not isinstance(attn_metadata, PlannedMetadata):
                return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
            pieces = attn_metadata.mqa
            if len(pieces) == 1 and pieces[0].share is not None:
                return _reshard(self, pieces[0].share, _joined(q), kv_c_and_k_pe_cache, attn_metadata, pieces[0]), None
            if len(pieces) == 1 and pieces[0].path != PROVIDER and not self.nsa_plugin_providers.attended.wrong:
                out, lse = super().forward_mqa(q, kv_c_and_k_pe_cache, pieces[0].stock, layer)
                return out, lse if self.dcp_world_size > 1 else None
            q = _joined(q)
            out, lse = _results(self, q)
            stock = super().forward_mqa
            for piece in pieces:
                rows = piece.rows
                part = None if lse is None else lse[rows]
                _attend(self, stock, q[rows], kv_c_and_k_pe_cache, attn_metadata, piece, layer, out[rows], part)
            return out, lse

        def forward_mha(
            self,
            q: torch.Tensor,
            kv_c_normed: torch.Tensor,
            k_pe: torch.Tensor,
            kv_c_and_k_pe_cache: torch.Tensor,
            attn_metadata: Any,
            k_scale: torch.Tensor,
            output: torch.Tensor,
            output_scale: torch.Tensor | None = None,
        ) -> None:
            """Tokens from `num_decode_tokens` on: q [rows, heads, qk_nope + qk_rope], output [rows, heads * v]."""
            if not isinstance(attn_metadata, PlannedMetadata):
                super().forward_mha(
                    q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
                )
                return
            out = output.view(-1, self.num_heads, self.v_head_dim)
            first = attn_metadata.num_decode_tokens
            for dense in attn_metadata.mha:
                rows = _behind(dense.rows, first)
                latent = kv_c_normed[rows], k_pe.reshape(len(k_pe), -1)[rows]
                if isinstance(rows, slice):
                    _dense(self, q[rows], latent, kv_c_and_k_pe_cache, dense, out[rows])
                else:
                    out[rows] = _dense(self, q[rows], latent, kv_c_and_k_pe_cache, dense)
            if attn_metadata.tail is not None:
                rows = _behind(attn_metadata.tail.rows, first)
                layer = _layer_of(self, layers)
                nope, rope = q[rows].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
                absorbed = torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
                query = _joined((absorbed, rope))
                if self.dcp_world_size > 1:
                    query = layer.dcp_manager.query_gather(query)
                attended, lse = _results(self, query)
                stock, tail = super().forward_mqa, attn_metadata.tail
                _attend(self, stock, query, kv_c_and_k_pe_cache, attn_metadata, tail, layer, attended, lse)
                if lse is not None:
                    attended = layer.dcp_manager.combine(attended, lse)
                out[rows] = torch.bmm(attended.transpose(0, 1), layer.W_UV).transpose(0, 1)

    Impl.__name__ = Impl.__qualname__ = f"Planned{stock.__name__}"
    return Impl


def _results(impl: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tensors for the output [rows, heads, kv_lora_rank] and, if ranks share the cache, lse [rows, heads]."""
    out = q.new_empty(q.shape[0], q.shape[1], impl.kv_lora_rank)
    return out, None if impl.dcp_world_size == 1 else q.new_empty(q.shape[:2], dtype=torch.float32)


def _attend(
    impl: Any,
    stock: Callable[..., Any],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: PlannedMetadata,
    piece: SparsePiece,
    layer: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend a piece's query tokens into `out`, [rows, heads, kv_lora_rank].

    Args:
        stock: vLLM's `forward_mqa`, bound.
        q: [rows, heads, kv_lora_rank + qk_rope_head_dim].
        lse: [rows, heads] float32, written too; given with context parallelism.
    """
    if piece.share is not None:
        out.copy_(_reshard(impl, piece.share, q, kv_cache, metadata, piece))
        return
    selected = impl.topk_indices_buffer[piece.rows]
    if piece.path != PROVIDER:
        buffer = impl.topk_indices_buffer
        impl.topk_indices_buffer = impl.nsa_plugin_providers.attended(selected)
        try:
            found, found_lse = stock(q, kv_cache, piece.stock, layer)
            out.copy_(found)
            if lse is not None:
                lse.copy_(found_lse)
        finally:
            impl.topk_indices_buffer = buffer
        return
    cache = _paged(impl, kv_cache)
    assert piece.request_of_row is not None
    if lse is not None:
        _attend_part(impl, q, cache, selected, metadata.block_table, piece, out, lse)
        return
    slots = _slots(impl, selected, cache, metadata.block_table, piece.request_of_row)
    _by_provider(impl, q, cache, slots, piece.plan, out)


def _slots(
    impl: Any, selected: torch.Tensor, cache: PagedCache, block_table: torch.Tensor, owners: torch.Tensor
) -> torch.Tensor:
    """Return int32 [rows, topk]: cache slots."""
    transform = impl.nsa_plugin_providers.helper("index_transform_paged")
    slots: torch.Tensor = transform(selected, block_table, page_size=cache.page_size, row_to_request=owners)
    return slots


def _by_provider(
    impl: Any, q: torch.Tensor, cache: PagedCache, slots: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with the plan's provider: [rows, heads, kv_lora_rank], into `out` if given."""
    providers: Providers = impl.nsa_plugin_providers
    op = KERNEL_OPS[plan.attention]
    return providers.attend(op, plan.provider, q, cache, slots, scale=impl.scale, d_v=impl.kv_lora_rank, out=out)


def _attend_part(
    impl: Any,
    q: torch.Tensor,
    cache: PagedCache,
    selected: torch.Tensor,
    block_table: torch.Tensor,
    piece: SparsePiece,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend the selected tokens that this rank holds, with the plan's provider, into `out` and `lse`.

    A query token without any contributes nothing to vLLM's merge: output 0 and lse -inf, not a kernel's +inf.
    """
    providers: Providers = impl.nsa_plugin_providers
    transform, shard = providers.helper("index_transform_shard"), impl.nsa_plugin.shard
    own = transform(selected, block_table, shard, page_size=cache.page_size, row_to_request=piece.request_of_row)
    given = {"scale": impl.scale, "d_v": impl.kv_lora_rank, "topk_length": own.counts, "out": out}
    op, name = KERNEL_OPS[piece.plan.attention], piece.plan.provider
    _, found = providers.attend_part(op, name, q, cache, own.slots, **given)
    torch.nan_to_num(found, nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"), out=lse)


def _reshard(
    impl: Any, share: Share, q: torch.Tensor, kv_cache: torch.Tensor, metadata: PlannedMetadata, piece: SparsePiece
) -> torch.Tensor:
    """Attend a piece that reshards: [rows, heads, kv_lora_rank], valid until the next layer attends."""
    owners, plan = piece.request_of_row, piece.plan
    assert owners is not None
    cache = _paged(impl, kv_cache)
    copies = _Copies(impl, cache, piece.copied)

    def attend_rows(q_rows: torch.Tensor, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
        if piece.copied:
            first = share.rows.start
            return _over_copies(impl, q_rows, chosen, slice(rows.start - first, rows.stop - first), copies, plan)
        slots = _slots(impl, chosen, cache, metadata.block_table, owners[rows])
        if piece.path == PROVIDER:
            return _by_provider(impl, q_rows, cache, slots, plan)
        schedule = functools.partial(share.scheduled, id(impl), rows)
        return flash_mla(
            q_rows, cache, impl.nsa_plugin_providers.attended(slots), plan, scale=impl.scale, schedule=schedule
        )

    return share.attend(q, impl.topk_indices_buffer[piece.rows], attend_rows)


class _Copies:
    """One layer's bf16 copies of the contexts of this rank's query tokens, used in order; one exists at a time."""

    def __init__(self, impl: Any, cache: PagedCache, parts: tuple[Copied, ...]):
        self._impl, self._cache, self.parts = impl, cache, parts
        self._made: tuple[int, PagedCache] | None = None

    def of(self, place: int, dtype: torch.dtype) -> PagedCache:
        """Return the copy for `parts[place]`, as one page."""
        if self._made is None or self._made[0] != place:
            self._made = None  # free its memory for the next
            read = self._impl.nsa_plugin_providers.helper("kv_cache_read")
            rows = read(self._cache, self.parts[place].slots, dtype=dtype)
            self._made = place, open_cache(rows.unsqueeze(0), "bf16")
        return self._made[1]


def _over_copies(
    impl: Any, q: torch.Tensor, selected: torch.Tensor, own: slice, copies: _Copies, plan: Plan
) -> torch.Tensor:
    """Attend with FlashMLA over bf16 copies of the contexts: [n, all heads, kv_lora_rank].

    Args:
        q, selected: [n, ...], of some of this rank's query tokens.
        own: these query tokens, counted from this rank's first.
    """
    transform = impl.nsa_plugin_providers.helper("index_transform_ragged")
    out = q.new_empty(q.shape[0], q.shape[1], impl.kv_lora_rank)
    for place, part in enumerate(copies.parts):
        first, end = max(part.rows.start, own.start), min(part.rows.stop, own.stop)
        if first >= end:
            continue
        here = slice(first - own.start, end - own.start)
        offsets = part.offsets[first - part.rows.start : end - part.rows.start]
        rows = impl.nsa_plugin_providers.attended(transform(selected[here], offsets))
        out[here] = flash_mla(q[here], copies.of(place, q.dtype), rows, plan, scale=impl.scale)
    return out


def _dense(
    impl: Any,
    q: torch.Tensor,
    latent: tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    piece: DensePiece,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend densely and causally: [rows, heads, v_head_dim], in `into` if given.

    Args:
        latent: the query tokens' kv_c [rows, kv_lora_rank] and k_pe [rows, qk_rope_head_dim].
    """
    providers: Providers = impl.nsa_plugin_providers

    def read(slots: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = providers.helper("kv_cache_read")(_paged(impl, kv_cache), slots, dtype=q.dtype)
        return rows if piece.order is None else impl.nsa_plugin.dcp.in_order(rows, piece.order)

    k, v = keys_and_values(
        piece,
        *latent,
        read=read,
        kv_b_proj=impl.kv_b_proj,
        heads=impl.num_heads,
        nope=impl.qk_nope_head_dim,
    )
    provider = piece.plan.provider
    lengths: dict[str, Any] = {}
    if provider == "trtllm":  # without lengths it copies the boundaries from the device and waits
        lengths = {"seqlens_q": piece.q_lens, "seqlens_k": piece.kv_lens}
    elif provider != REFERENCE:
        lengths = {"max_seqlen_q": max(piece.q_lens), "max_seqlen_k": max(piece.kv_lens)}
    if provider == "fa3":
        lengths["padded"] = False
    mha = providers.load("mha_one_shot", provider)
    out: torch.Tensor = mha(q, k, v, piece.cu_seqlens_q, piece.cu_seqlens_k, scale=impl.scale, out=into, **lengths).out
    return out


def _paged(impl: Any, kv_cache: torch.Tensor) -> PagedCache:
    return open_cache(kv_cache, impl.nsa_plugin.model.kv_layout)


def _joined(q: Any) -> torch.Tensor:
    """Join queries that vLLM passes in two parts: [rows, heads, kv_lora_rank + qk_rope_head_dim].

    The result is a new tensor: other kernels also use the workspace of vLLM's buffer (vllm #56771). The kernel is the
    one that vLLM fills that buffer with: both parts are strided, and `torch.cat` copies such parts one after the other.
    """
    if not isinstance(q, tuple):
        return q
    nope, rope = q
    if not nope.is_cuda:
        return torch.cat(q, dim=-1)
    joined = nope.new_empty(*nope.shape[:2], nope.shape[2] + rope.shape[2])
    import_module(CUSTOM_OPS).concat_mla_q(nope, rope, joined)
    return joined


def _layer_of(impl: Any, layers: Layers) -> Any:
    """Return vLLM's MLA layer of this implementation, which has the absorbed weights.

    Raises:
        PatchError: vLLM does not list it.
    """
    if impl.nsa_plugin_layer is None:
        impl.nsa_plugin_layer = next((one for one in layers().values() if getattr(one, "impl", None) is impl), None)
        if impl.nsa_plugin_layer is None:
            raise PatchError(f"vLLM's forward context does not list the MLA layer that is running. {TURN_OFF}")
    return impl.nsa_plugin_layer


def _behind(rows: slice | torch.Tensor, first: int) -> slice | torch.Tensor:
    """Count rows of the batch from row `first`."""
    return slice(rows.start - first, rows.stop - first) if isinstance(rows, slice) else rows - first
