"""SGLang's attention backend with plans: one plan per batch, made when SGLang prepares it, read when it attends.

`with_plans` extends the engine's backend class, NSA or DSA; `state.adopt` switches an instance on. Before that, and for
a batch without a route, every method is the stock one. `preparation` has what happens before a batch attends.

- `_forward_flashmla_kv` and `_forward_flashmla_sparse` call the kernel. The plan's provider runs instead, with the same
  slots and cache and without head padding, or the upstream kernel does.
- If the plan reshards (`token_shard`), the exchange around both gives them all heads of this rank's query tokens. A
  captured step is partitioned by its number of query tokens alone, so a replay exchanges as its capture did.
- Padding, which the engine adds up to a graph's size or a multiple of its ranks, has slots too: -1, or some slot of the
  cache. Providers skip -1 and get no lengths that could be too short.
- `nsa_plugin_leaves_graph` says whether a prefill that the engine would replay runs eagerly; see
  `patches.wrap_can_run_graph`.

`routes` lists what the plugin leaves to SGLang.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.sglang.v32.indexer import Selection, attach
from nsa_plugin.backends.sglang.v32.portable import attend_dense
from nsa_plugin.backends.sglang.v32.preparation import leaves_graph, look, missing, wrappers
from nsa_plugin.backends.sglang.v32.split import AttendPart
from nsa_plugin.backends.sglang.v32.state import State, paged_cache, pool_of
from nsa_plugin.backends.sglang.v32.token_shard import all_heads, flash_mla_metadata, schedule_of
from nsa_plugin.errors import NsaPluginError, PatchError

# Methods that `with_plans` needs, besides the setter and the preparation of captured batches.
OVERRIDDEN = (
    "init_forward_metadata",
    "get_indexer_metadata",
    "_compute_flashmla_metadata",
    "_forward_flashmla_kv",
    "_forward_flashmla_sparse",
    "_forward_fa3",
)


def with_plans(original: type) -> type:
    """Make a subclass of the engine's backend class with the plugin's methods; see the module.

    Raises:
        PatchError: the class lacks a method that the plugin overrides, so SGLang would never call the override.
    """
    if lacks := [*(name for name in OVERRIDDEN if not hasattr(original, name)), *missing(original)]:
        raise PatchError(f"SGLang's {original.__name__} has no method {'; '.join(lacks)}")
    methods = wrappers(original)

    class Planned(original):
        nsa_plugin: State | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            state = self.nsa_plugin
            if state is None:
                return super().init_forward_metadata(forward_batch)
            look(self, state, forward_batch)
            state.preparing = True
            try:
                super().init_forward_metadata(forward_batch)
            finally:
                state.preparing = False

        def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
            metadata = super().get_indexer_metadata(layer_id, forward_batch)
            state = self.nsa_plugin
            if state is not None and state.route is not None and metadata is not None:
                if state.selection is None:
                    state.selection = Selection(
                        state.route.plan,
                        pool_of(self, forward_batch),
                        state.providers,
                        state.share,
                        state.split,
                        portable=state.planner.portable,
                    )
                attach(metadata, state.selection)
            return metadata

        def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
            state = self.nsa_plugin
            if state is not None and state.planner.portable:
                return _no_schedule(original, cache_seqlens)
            # FlashMLA is not called then, or with other query tokens and heads, and the library may fail to make a
            # large prefill's schedule (sglang #25502).
            unread = state is not None and state.preparing and (state.own or state.part is not None)
            return None if unread else super()._compute_flashmla_metadata(cache_seqlens, seq_len_q)

        def _forward_flashmla_kv(
            self,
            q_all: torch.Tensor,
            kv_cache: torch.Tensor,
            v_head_dim: int,
            sm_scale: float,
            layer: Any,
            metadata: Any,
            page_table_1: torch.Tensor,
        ) -> torch.Tensor:
            state, named = self.nsa_plugin, {"kv_cache": kv_cache, "v_head_dim": v_head_dim, "sm_scale": sm_scale}
            stock = functools.partial(super()._forward_flashmla_kv, **named)
            if state is None:
                return stock(q_all=q_all, layer=layer, metadata=metadata, page_table_1=page_table_1)
            q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
            if state.own:
                return _attend(self, state, q, kv_cache, page_table_1, v_head_dim, sm_scale).unsqueeze(1)
            slots = _attended(state, page_table_1)
            if state.part is not None:
                schedule = super()._compute_flashmla_metadata
                return _flashmla_kv_of_part(self, state, stock, schedule, q, slots, metadata, layer)
            rows = slots.shape[0]
            kept = _rows_with_lengths(state, metadata, rows)
            out: torch.Tensor = stock(q_all=q_all[:kept], layer=layer, metadata=metadata, page_table_1=slots[:kept])
            return out if kept == rows else F.pad(out, (0, 0) * (out.dim() - 1) + (0, rows - kept))

        def _forward_flashmla_sparse(
            self,
            q_all: torch.Tensor,
            kv_cache: torch.Tensor,
            v_head_dim: int,
            page_table_1: torch.Tensor,
            sm_scale: float,
            **later: Any,
        ) -> torch.Tensor:
            """`later`: topk_length (0.5.17 on; redundant, since -1 follows) and attn_sink (0.5.20 on)."""
            state, sink = self.nsa_plugin, later.get("attn_sink")
            if state is not None and state.own:
                return _attend(self, state, q_all, kv_cache, page_table_1, v_head_dim, sm_scale, sink)
            named = {"kv_cache": kv_cache, "v_head_dim": v_head_dim, "sm_scale": sm_scale}
            stock, slots = functools.partial(super()._forward_flashmla_sparse, **named), _attended(state, page_table_1)
            if state is None or state.part is None:
                return stock(q_all=q_all, page_table_1=slots, **later)  # type: ignore[no-any-return]
            # topk_length is for the whole batch, and -1 in the slots says the same.
            kept = {} if sink is None else {"attn_sink": sink}

            def attend(q: torch.Tensor, chosen: torch.Tensor, _: Any) -> torch.Tensor:
                return stock(q_all=q, page_table_1=chosen, **kept)  # type: ignore[no-any-return]

            return _of_part(state, q_all, slots, attend, sink)

        def _forward_fa3(self, *, page_table: torch.Tensor, **named: Any) -> torch.Tensor:
            """Call the upstream kernel, all arguments by name; only the deliberate fault changes its slots."""
            return super()._forward_fa3(page_table=_attended(self.nsa_plugin, page_table), **named)  # type: ignore[no-any-return]

        def _forward_standard_mha(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, metadata: Any
        ) -> torch.Tensor:
            state = self.nsa_plugin
            if state is not None and state.planner.portable:
                return attend_dense(state.providers, q, k, v, layer, metadata)
            given = {"layer": layer, "forward_batch": forward_batch, "metadata": metadata}
            return super()._forward_standard_mha(q=q, k=k, v=v, **given)  # type: ignore[no-any-return]

        def nsa_plugin_leaves_graph(self, forward_batch: Any) -> bool:
            """Whether a prefill that the engine would replay runs eagerly; see `preparation.leaves_graph`."""
            return leaves_graph(self, original, forward_batch)

    for name, method in methods.items():
        setattr(Planned, name, method)
    Planned.__name__ = Planned.__qualname__ = f"Planned{original.__name__}"
    return Planned


def _rows_with_lengths(state: State, metadata: Any, rows: int) -> int:
    """Return how many of `rows` query tokens the upstream FlashMLA gets: those with lengths in its metadata.

    The engine pads the query tokens in more ways than the lengths, and the library then raises "seqlens_k must have
    shape (batch_size)" (thread of sglang #13646).
    """
    lengths = getattr(metadata, f"{state.x}_cache_seqlens_int32", None)
    return rows if lengths is None else min(rows, int(lengths.shape[0]))


def _attended(state: State | None, slots: torch.Tensor) -> torch.Tensor:
    """Return the slots or rows that an upstream kernel attends, [tokens, topk]."""
    return slots if state is None else state.providers.attended(slots)


def _attend(
    backend: Any,
    state: State,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    d_v: int,
    scale: float,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the plan's provider: [tokens, heads, d_v].

    Args:
        q: [tokens, heads, d_qk], padding by MLP-sync included.
        kv_cache: the layer's cache, of any shape [..., bytes or values of a token].
        slots: [tokens or fewer, topk] int32 cache slots, -1 for none; missing query tokens have none.
    """
    route = state.route
    assert route is not None
    cache = paged_cache(backend, state, kv_cache)
    given = {"scale": scale, "d_v": d_v, "attn_sink": attn_sink}

    def attend(q_rows: torch.Tensor, chosen: torch.Tensor, _: Any) -> torch.Tensor:
        if chosen.shape[0] < q_rows.shape[0]:
            chosen = F.pad(chosen, (0, 0, 0, q_rows.shape[0] - chosen.shape[0]), value=-1)
        return state.providers.attend(route.op, route.plan.provider, q_rows, cache, chosen, **given)

    return _of_part(state, q, slots, attend, attn_sink)


def _of_part(
    state: State, q: torch.Tensor, slots: torch.Tensor, attend: AttendPart, attn_sink: torch.Tensor | None
) -> torch.Tensor:
    """Attend what `state.part` says: [tokens, heads, d_v]."""
    if state.part is None:
        return attend(q, slots, slice(0, q.shape[0]))
    if state.share is not None and attn_sink is not None:  # not in the model's configuration (`has_sinks`)
        raise NsaPluginError("SGLang passes attention sinks, which token_shard does not support: set it to off")
    return state.part.attend(q, slots, attend)


def _no_schedule(original: type, cache_seqlens: torch.Tensor) -> Any:
    """Return a schedule for FlashMLA that SGLang can slice and copy, and that no kernel reads."""
    given = {"dtype": torch.int32, "device": cache_seqlens.device}
    return importlib.import_module(original.__module__).DSAFlashMLAMetadata(
        flashmla_metadata=torch.zeros(1, 8, **given), num_splits=torch.zeros(len(cache_seqlens) + 1, **given)
    )


def _flashmla_kv_of_part(
    backend: Any,
    state: State,
    stock: Callable[..., torch.Tensor],
    schedule: Callable[[torch.Tensor, int], Any],
    q: torch.Tensor,
    slots: torch.Tensor,
    metadata: Any,
    layer: Any,
) -> torch.Tensor:
    """Attend what `state.part` says with upstream FlashMLA over fp8 pages: [tokens, 1, heads, d_v].

    Args:
        stock, schedule: SGLang's call, with the arguments that stay, and its `_compute_flashmla_metadata`.
        q, slots: as for `_attend`.
        metadata: of the whole batch.
        layer: SGLang's attention layer.
    """
    route, share, split, part = state.route, state.share, state.split, state.part
    assert route is not None
    assert part is not None
    heads, lengths = state.planner.model.num_heads, getattr(metadata, f"{state.x}_cache_seqlens_int32")
    of_all_heads = SimpleNamespace(tp_q_head_num=heads, head_dim=q.shape[-1])

    def attend(q_rows: torch.Tensor, chosen: torch.Tensor, rows: Any) -> torch.Tensor:
        if split is not None:
            if split.schedule is None:
                split.schedule = flash_mla_metadata(schedule, lengths[rows], state.x)
            return stock(q_all=q_rows, page_table_1=chosen, layer=layer, metadata=split.schedule).squeeze(1)
        assert share is not None
        with all_heads(backend, route.plan.head_padding or heads):
            own = schedule_of(share, layer.layer_id, rows, schedule, lengths, state.x)
            return stock(q_all=q_rows, page_table_1=chosen, layer=of_all_heads, metadata=own).squeeze(1)

    return part.attend(q, slots, attend).unsqueeze(1)
