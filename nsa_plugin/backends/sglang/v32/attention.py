"""SGLang's attention backend under Plans: one for each batch, made where SGLang prepares it, read where it attends.

`with_plans` adds to the engine's backend class, NSA or DSA, what follows; `adopt` switches it on for an instance, and
until then, or for a batch that has no route, every method is the engine's own.

- Eager batches: the engine asks `set_{nsa,dsa}_prefill_impl(forward_batch)` before anything depends on the answer. It
  decides, then the plan: whether dense attention runs (`use_mha`, which the model reads, and with it whether the
  indexer selects, so that the two cannot come apart: sglang #12816, vllm #52512), and the path.
- Captured batches: capture and replay go through `_apply_cuda_graph_metadata` (0.5.13 on) or
  `init_forward_metadata_{capture,replay}_cuda_graph` (before), and the draft steps of MTP through
  `..._replay_cuda_graph_from_precomputed`. A phase and a number of rows have one route, so a replay has its capture's.
- `_forward_flashmla_kv` and `_forward_flashmla_sparse`, where every path of `routes.CARRIERS` ends: the plan's provider
  runs in their place, given the same slots and cache, with no padding of heads; or the engine's own kernel does.
- Where the plan trades heads for tokens (`token_shard`), both are given every head of this rank's rows, by the exchange
  around them. A captured step's rows are dealt out by their number alone, so a replay exchanges what its capture did.
- Rows that are no request's, which the engine adds to a graph's size or to a multiple of its ranks, have slots like any
  other: -1, or some slot of the cache. Providers skip whatever is no slot, and take no lengths that could be too few.
- `nsa_plugin_leaves_graph` says whether a prefill that the engine would replay is to run eagerly; see `prefill_graph`.

Two-batch overlap and the steps of MTP have a backend instance each, and so a route each. What the plugin leaves to
SGLang is listed in `routes`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.sglang.startup.model import prefix_of
from nsa_plugin.backends.sglang.v32 import batch as batches
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.indexer import Selection, attach
from nsa_plugin.backends.sglang.v32.routes import PLANNED, SglangPlanner, sglangs_own
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange, all_heads, schedule_of
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NsaPluginError, PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.patches.ledger import TURN_OFF

# What the engine's class has to have for `with_plans`, besides the setter and the preparation of captured batches.
OVERRIDDEN = (
    "init_forward_metadata",
    "get_indexer_metadata",
    "_compute_flashmla_metadata",
    "_forward_flashmla_kv",
    "_forward_flashmla_sparse",
    "_forward_fa3",
)
SETTERS = ("set_dsa_prefill_impl", "set_nsa_prefill_impl")

# Where a captured batch is prepared: those of them that the engine's class has, the first or the next two at least.
# Each takes bs and forward_mode.
GRAPH_METHODS = (
    "_apply_cuda_graph_metadata",
    "init_forward_metadata_capture_cuda_graph",
    "init_forward_metadata_replay_cuda_graph",
    "init_forward_metadata_replay_cuda_graph_from_precomputed",
)
# The fp8 pages' and the bf16 pages' size, by the versions' names of it.
PAGE_SIZES = ("physical_page_size", "real_page_size")


@dataclass
class State:
    """What the plugin keeps on a backend.

    Attributes:
        planner: decides.
        x: "nsa" or "dsa", as the engine's names have it.
        prefill_impl, decode_impl: the paths that the engine was started with.
        plans_prefill, plans_steps: whether plans are made for prefills, and for later steps.
        route: of the batch that was prepared last; None where it is SGLang's own.
        preparing: inside `init_forward_metadata`, which no graph captures.
        exchange: of heads for tokens; None where no plan of this backend trades them.
        share: this rank's rows of the batch that was prepared last, where its plan trades.
    """

    planner: SglangPlanner
    x: str
    prefill_impl: str
    decode_impl: str
    plans_prefill: bool
    plans_steps: bool
    providers: Providers
    route: Execution | None = None
    preparing: bool = False
    exchange: SglangExchange | None = None
    share: Share | None = None


def adopt(backend: Any, planner: SglangPlanner, server_args: Any, exchange: SglangExchange | None = None) -> list[str]:
    """Let a backend take its routes from a planner; call it once the engine's own start of the backend is done.

    Returns:
        A sentence for each kind of batch that stays SGLang's own although the plugin is on; for the start-up report.

    Raises:
        PatchError: the backend lacks something that the plugin reads of it.
    """
    x = prefix_of(backend)
    read = (f"{x}_prefill_impl", f"{x}_decode_impl", "max_context_len", "speculative_num_draft_tokens")
    lacks = [name for name in read if not hasattr(backend, name)]
    if not any(hasattr(backend, name) for name in PAGE_SIZES):
        lacks.append(" or ".join(PAGE_SIZES))
    if lacks:
        raise PatchError(f"SGLang's {type(backend).__name__} has no {', '.join(lacks)}. {TURN_OFF}")
    prefill, decode = getattr(backend, f"{x}_prefill_impl"), getattr(backend, f"{x}_decode_impl")
    layout = planner.model.kv_layout
    notes = []
    if feature := sglangs_own(backend, server_args):
        return [f"{feature} is on, which the plugin has no part in: every batch stays SGLang's own"]
    for what, impl, extend in (("prefill", prefill, True), ("decode", decode, False)):
        if impl not in PLANNED[layout, extend]:
            notes.append(f"SGLang's --{x}-{what}-backend is {impl}, which the plugin leaves as it is")
    if planner.sinks:  # SGLang's FA3 path refuses them
        notes.append("the model has attention sinks: decode, verify and draft steps fall back to the stock path")
    backend.nsa_plugin = State(
        planner=planner,
        x=x,
        prefill_impl=prefill,
        decode_impl=decode,
        plans_prefill=prefill in PLANNED[layout, True],
        plans_steps=decode in PLANNED[layout, False] and not planner.sinks,
        providers=Providers(layout, planner.device.sm, attended=AttendedTokens.of(planner.settings)),
        exchange=exchange,
    )
    return notes


def release(backend: Any) -> None:
    """Undo `adopt`: every batch from now on is the engine's own. What graphs have captured stays in them."""
    state: State | None = backend.nsa_plugin
    if state is not None:
        setattr(backend, f"{state.x}_prefill_impl", state.prefill_impl)
        setattr(backend, f"{state.x}_decode_impl", state.decode_impl)
        backend.nsa_plugin = None


def with_plans(original: type) -> type:
    """The engine's backend class with the plugin's methods; see the module.

    Raises:
        PatchError: the class lacks a method that is to be overridden: nobody would call the plugin's.
    """
    setter = _check_methods(original)
    original_setter: Callable[..., None] = getattr(original, setter)

    class Planned(original):
        nsa_plugin: State | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            state = self.nsa_plugin
            if state is None:
                return super().init_forward_metadata(forward_batch)
            state.preparing = True
            try:
                super().init_forward_metadata(forward_batch)
            finally:
                state.preparing = False

        def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> Any:
            metadata = super().get_indexer_metadata(layer_id, forward_batch)
            state = self.nsa_plugin
            if state is not None and state.route is not None and metadata is not None:
                # Before 0.5.13 the batch has it.
                pool = getattr(self, "token_to_kv_pool", None)
                pool = forward_batch.token_to_kv_pool if pool is None else pool
                attach(metadata, Selection(state.route.plan, pool, state.providers, state.share))
            return metadata

        def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
            state = self.nsa_plugin
            # Nobody reads the schedule then; of a large prefill the library may not be able to make it (sglang #25502).
            unread = state is not None and state.preparing and _replaces_flashmla_kv(state)
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
            state = self.nsa_plugin
            if state is None or state.route is None or not state.route.own:
                page_table_1 = _attended(state, page_table_1)
                if state is not None and state.share is not None:
                    named = {"kv_cache": kv_cache, "v_head_dim": v_head_dim, "sm_scale": sm_scale}
                    stock = functools.partial(super()._forward_flashmla_kv, **named), super()._compute_flashmla_metadata
                    q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
                    return _flashmla_kv_of_all_heads(self, state, stock, q, page_table_1, metadata, layer.layer_id)
                rows = page_table_1.shape[0]
                given = _rows_with_lengths(state, metadata, rows)
                out: torch.Tensor = super()._forward_flashmla_kv(
                    q_all=q_all[:given],
                    kv_cache=kv_cache,
                    v_head_dim=v_head_dim,
                    sm_scale=sm_scale,
                    layer=layer,
                    metadata=metadata,
                    page_table_1=page_table_1[:given],
                )
                return out if given == rows else F.pad(out, (0, 0) * (out.dim() - 1) + (0, rows - given))
            q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
            cache = _paged(self, kv_cache, state)
            return _attend(state, q, cache, page_table_1, v_head_dim, sm_scale).unsqueeze(1)

        def _forward_flashmla_sparse(
            self,
            q_all: torch.Tensor,
            kv_cache: torch.Tensor,
            v_head_dim: int,
            page_table_1: torch.Tensor,
            sm_scale: float,
            **later: Any,
        ) -> torch.Tensor:
            """`later`: topk_length (from 0.5.17; -1 behind it says the same) and attn_sink (from 0.5.20)."""
            state = self.nsa_plugin
            if state is None or state.route is None or not state.route.own:
                page_table_1 = _attended(state, page_table_1)
                named = {"kv_cache": kv_cache, "v_head_dim": v_head_dim, "sm_scale": sm_scale}
                kernel = super()._forward_flashmla_sparse
                if state is None or state.share is None:
                    return kernel(q_all=q_all, page_table_1=page_table_1, **named, **later)  # type: ignore[no-any-return]
                # Of `later`, the length says what -1 says; its rows are SGLang's of the whole batch.
                _refuse_sink(later.get("attn_sink"))
                return state.share.attend(
                    q_all, page_table_1, lambda q, chosen, _: kernel(q_all=q, page_table_1=chosen, **named)
                )
            cache = _paged(self, kv_cache, state)
            return _attend(state, q_all, cache, page_table_1, v_head_dim, sm_scale, later.get("attn_sink"))

        def _forward_fa3(self, *, page_table: torch.Tensor, **named: Any) -> torch.Tensor:
            """The engine's own kernel, whose call names everything; only the deliberate fault is added to it."""
            return super()._forward_fa3(page_table=_attended(self.nsa_plugin, page_table), **named)  # type: ignore[no-any-return]

        def nsa_plugin_leaves_graph(self, forward_batch: Any) -> bool:
            """Whether a prefill is to run eagerly and densely rather than be replayed from a graph, which is sparse.

            It is asked outside any graph, before the batch is prepared. All ranks have to answer alike: the answer is
            made of the batch's lengths and of what the ranks share, and under DP attention, where each group of them
            has a batch of its own, it is the engine's.
            """
            state = self.nsa_plugin
            if state is None or not state.plans_prefill or state.planner.settings.mha_max_kv <= 0:
                return False
            if batches.phase_of(forward_batch.forward_mode) is not Phase.EXTEND:
                return False
            if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
                return False
            original_setter(self, forward_batch)  # the engine's rules; what it sets, the preparation sets again
            if not self.use_mha:
                return False
            route = state.planner.prefill_execution(batches.prefill_batch(forward_batch), dense_allowed=True)
            return route is not None and route.dense

    methods = {setter: _setter(original_setter)}
    methods |= {name: _prepared(getattr(original, name)) for name in GRAPH_METHODS if hasattr(original, name)}
    for name, method in methods.items():
        setattr(Planned, name, method)
    Planned.__name__ = Planned.__qualname__ = f"Planned{original.__name__}"
    return Planned


def _check_methods(original: type) -> str:
    """The name of the engine's `set_..._prefill_impl`, once everything else is seen to be there."""
    setter = next((name for name in SETTERS if hasattr(original, name)), None)
    lacks = [name for name in OVERRIDDEN if not hasattr(original, name)]
    if setter is None:
        lacks.append(" or ".join(SETTERS))
    once, capture, replay, _ = GRAPH_METHODS
    if not (hasattr(original, once) or (hasattr(original, capture) and hasattr(original, replay))):
        lacks.append(f"{once}, or {capture} and {replay}")
    if lacks or setter is None:
        raise PatchError(f"SGLang's {original.__name__} has no method {'; '.join(lacks)}")
    return setter


def _setter(original: Callable[..., None]) -> Callable[..., None]:
    """`set_{nsa,dsa}_prefill_impl` under a plan. Without a batch it is asked for a captured one, whose route is set."""

    @functools.wraps(original)
    def set_prefill_impl(self: Any, forward_batch: Any = None) -> None:
        state: State | None = self.nsa_plugin
        if state is None:
            return original(self, forward_batch)
        # Whatever the last batch's route was: the engine's own rules start from the engine's own path.
        setattr(self, f"{state.x}_prefill_impl", state.prefill_impl)
        original(self, forward_batch)
        if forward_batch is None:
            return None
        phase = batches.phase_of(forward_batch.forward_mode)
        route, share = None, None
        if phase is Phase.EXTEND and state.plans_prefill:
            in_graph = state.exchange is not None and state.exchange.in_graph()
            batch = batches.prefill_batch(forward_batch, in_graph=in_graph)
            route = state.planner.prefill(batch, dense_allowed=bool(self.use_mha))
            if route is not None:
                self.use_mha = route.dense
                share = _share(state, route, batch)
        elif phase is not None and phase is not Phase.EXTEND and state.plans_steps:
            draft = self.speculative_num_draft_tokens
            batch = batches.eager_step(forward_batch, phase, draft, self.max_context_len)
            route = state.planner.step(batch)
            share = _share(state, route, batch)
        _follow(self, state, route, share)
        return None

    return set_prefill_impl


def _prepared(original: Callable[..., None]) -> Callable[..., None]:
    """A method that prepares a captured batch, after its route is set."""
    names = list(inspect.signature(original).parameters)[1:]
    bs_place, mode_place = names.index("bs"), names.index("forward_mode")

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        state: State | None = self.nsa_plugin
        if state is not None:
            bs = kwargs["bs"] if "bs" in kwargs else args[bs_place]
            mode = kwargs["forward_mode"] if "forward_mode" in kwargs else args[mode_place]
            phase = batches.phase_of(mode)
            route, share = None, None
            if phase is not None and phase is not Phase.EXTEND and state.plans_steps:
                batch = batches.captured_step(phase, bs, self.speculative_num_draft_tokens, self.max_context_len)
                route = state.planner.step(batch)
                share = _share(state, route, batch)
            _follow(self, state, route, share)
        return original(self, *args, **kwargs)

    return prepare


def _share(state: State, route: Execution, batch: Batch) -> Share | None:
    """This rank's rows of a batch, where its plan trades heads for tokens."""
    if state.exchange is None or not route.plan.token_shard:
        return None
    shares = state.planner.shares(route.plan, batch, state.exchange.shard.max_rows)
    return Share(state.exchange, shares, route.plan.token_shard_chunks)


def _follow(backend: Any, state: State, route: Execution | None, share: Share | None) -> None:
    """Make a route, or its absence, the backend's."""
    state.route, state.share = route, share
    impl = None if route is None else route.path
    if impl is not None and route is not None and route.plan.phase is Phase.EXTEND:
        setattr(backend, f"{state.x}_prefill_impl", impl)
    stepping = impl is not None and route is not None and route.plan.phase is not Phase.EXTEND
    setattr(backend, f"{state.x}_decode_impl", impl if stepping else state.decode_impl)


def _paged(backend: Any, kv_cache: torch.Tensor, state: State) -> PagedCache:
    """The engine's cache of one layer, any shape [..., bytes or values of a token], as pages."""
    page_size = next(int(getattr(backend, name)) for name in PAGE_SIZES if hasattr(backend, name))
    pages = kv_cache.view(-1, page_size, 1, kv_cache.shape[-1])
    return open_cache(pages, state.planner.model.kv_layout)


def _rows_with_lengths(state: State | None, metadata: Any, rows: int) -> int:
    """How many of `rows` query rows the engine's FlashMLA is given: those that its metadata has lengths for.

    The engine pads rows behind the last request in more ways than it pads the lengths, and the library refuses
    the difference: "seqlens_k must have shape (batch_size)" (thread of sglang #13646).
    """
    if state is None:
        return rows
    lengths = getattr(metadata, f"{state.x}_cache_seqlens_int32", None)
    return rows if lengths is None else min(rows, int(lengths.shape[0]))


def _attended(state: State | None, slots: torch.Tensor) -> torch.Tensor:
    """The slots or rows that a stock kernel attends, [tokens, topk]."""
    return slots if state is None else state.providers.attended(slots)


def _attend(
    state: State,
    q: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    d_v: int,
    scale: float,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, d_v] by the plan's provider.

    Args:
        q: [tokens, heads, d_qk], rows that MLP-sync padded included.
        slots: [tokens or fewer, topk] int32 cache slots, -1 for none; rows that are missing have none.
    """
    if state.share is None:
        return _by_provider(state, q, cache, slots, d_v, scale, attn_sink)
    _refuse_sink(attn_sink)
    return state.share.attend(
        q, slots, lambda q_rows, chosen, _: _by_provider(state, q_rows, cache, chosen, d_v, scale, None)
    )


def _by_provider(
    state: State,
    q: torch.Tensor,
    cache: PagedCache,
    slots: torch.Tensor,
    d_v: int,
    scale: float,
    attn_sink: torch.Tensor | None,
) -> torch.Tensor:
    route = state.route
    assert route is not None
    if slots.shape[0] < q.shape[0]:
        slots = F.pad(slots, (0, 0, 0, q.shape[0] - slots.shape[0]), value=-1)
    given = {"scale": scale, "d_v": d_v, "attn_sink": attn_sink}
    return state.providers.attend(route.op, route.plan.provider, q, cache, slots, **given)


def _replaces_flashmla_kv(state: State) -> bool:
    """Whether the engine's FlashMLA over fp8 pages is not called for the batch, or for other rows and heads of it."""
    return state.route is not None and (state.route.own or state.share is not None)


def _flashmla_kv_of_all_heads(
    backend: Any,
    state: State,
    stock: tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor, int], Any]],
    q: torch.Tensor,
    slots: torch.Tensor,
    metadata: Any,
    layer_id: int,
) -> torch.Tensor:
    """[tokens, 1, heads, d_v] by the engine's FlashMLA over fp8 pages, given every head of this rank's rows.

    Args:
        stock: the engine's call, but for what is changed here, and its schedule.
        q, slots: as for `_attend`.
        metadata: the engine's of the whole batch.
    """
    route, share = state.route, state.share
    assert route is not None
    assert share is not None
    attend, schedule = stock
    heads = state.planner.model.num_heads
    lengths = getattr(metadata, f"{state.x}_cache_seqlens_int32")
    layer = SimpleNamespace(tp_q_head_num=heads, head_dim=q.shape[-1])

    def attend_rows(q_rows: torch.Tensor, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
        with all_heads(backend, route.plan.head_padding or heads):
            own = schedule_of(share, layer_id, rows, schedule, lengths, state.x)
            return attend(q_all=q_rows, page_table_1=chosen, layer=layer, metadata=own).squeeze(1)

    return share.attend(q, slots, attend_rows).unsqueeze(1)


def _refuse_sink(attn_sink: torch.Tensor | None) -> None:
    """Refuse the sinks of a model whose configuration does not name them (`has_sinks`), rather than drop them."""
    if attn_sink is not None:
        raise NsaPluginError("SGLang passes attention sinks, which token_shard does not support: set it to off")
