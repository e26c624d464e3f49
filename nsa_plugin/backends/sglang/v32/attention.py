"""SGLang's attention backend with plans: one plan per batch, made when SGLang prepares it, read when it attends.

`with_plans` extends the engine's backend class, NSA or DSA; `adopt` switches an instance on. Before that, and for a
batch without a route, every method is the stock one.

- Eager batches: the engine calls `set_{nsa,dsa}_prefill_impl(forward_batch)` before anything depends on the result.
  SGLang's rules run first, then the plan sets the path and whether dense attention runs (`use_mha`). The model reads
  `use_mha` for the indexer too, so attention and selection cannot disagree (sglang #12816, vllm #52512).
- Captured batches: capture and replay go through `_apply_cuda_graph_metadata` (0.5.13 on) or
  `init_forward_metadata_{capture,replay}_cuda_graph` (before), and the draft steps of MTP through
  `..._replay_cuda_graph_from_precomputed`. A route depends on the phase and the number of query tokens alone, so a
  replay has the route of its capture.
- `_forward_flashmla_kv` and `_forward_flashmla_sparse` call the kernel. The plan's provider runs instead, with the same
  slots and cache and without head padding, or the upstream kernel does.
- If the plan reshards (`token_shard`), the exchange around both gives them all heads of this rank's query tokens. A
  captured step is partitioned by its number of query tokens alone, so a replay exchanges as its capture did.
- Padding, which the engine adds up to a graph's size or a multiple of its ranks, has slots too: -1, or some slot of the
  cache. Providers skip -1 and get no lengths that could be too short.
- `nsa_plugin_leaves_graph` says whether a prefill that the engine would replay runs eagerly; see
  `patches.wrap_can_run_graph`.

Two-batch overlap and the steps of MTP each have a backend instance, and so a route. `routes` lists what the plugin
leaves to SGLang.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.sglang.startup.model import prefix_of
from nsa_plugin.backends.sglang.v32 import batch as batches
from nsa_plugin.backends.sglang.v32.arrival import LoadedPrefixes
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.indexer import Selection, attach
from nsa_plugin.backends.sglang.v32.routes import (
    FP8_PREFILLS,
    NO_DENSE,
    PLANNED,
    SglangPlanner,
    SplitExecution,
    v32_stock_feature,
)
from nsa_plugin.backends.sglang.v32.split import ATTRIBUTE as SPLIT
from nsa_plugin.backends.sglang.v32.split import AttendPart, SplitBatch
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange, all_heads, flash_mla_metadata, schedule_of
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NsaPluginError, PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.patches.ledger import TURN_OFF

# Methods that `with_plans` needs, besides the setter and the preparation of captured batches.
OVERRIDDEN = (
    "init_forward_metadata",
    "get_indexer_metadata",
    "_compute_flashmla_metadata",
    "_forward_flashmla_kv",
    "_forward_flashmla_sparse",
    "_forward_fa3",
)
SETTERS = ("set_dsa_prefill_impl", "set_nsa_prefill_impl")

# Methods that prepare a captured batch, each with bs and forward_mode. A class has the first or the next two at least.
GRAPH_METHODS = (
    "_apply_cuda_graph_metadata",
    "init_forward_metadata_capture_cuda_graph",
    "init_forward_metadata_replay_cuda_graph",
    "init_forward_metadata_replay_cuda_graph_from_precomputed",
)
# The page size, by its names in SGLang's versions.
PAGE_SIZES = ("physical_page_size", "real_page_size")
# By whether the flag is for prefills.
STOCK_PHASES = {True: "prefills", False: "decode, verify and draft steps"}


@dataclass
class State:
    """State of the plugin on a backend.

    Attributes:
        planner: makes the plans.
        x: "nsa" or "dsa", as in the engine's names.
        prefill_impl, decode_impl: the paths that the engine was started with.
        plans_prefill: whether prefills have plans.
        plans_steps: whether decode, verify and draft steps have plans.
        route: of the batch prepared last; None if it is left to the stock path.
        preparing: inside `init_forward_metadata`, which no graph captures.
        exchange: for resharding; None if no plan of this backend reshards.
        share: this rank's query tokens of the batch prepared last, if its plan reshards.
        split: the batch prepared last, if its short prompts attend while others select.
        selection: what the indexer of every layer gets for the batch prepared last, once the first layer asked.
        caches: each layer's KV cache as pages, by address and shape; SGLang's pool keeps its buffers.
        portable: whether SGLang's libraries do not support the GPU, so that the plugin's kernels do all.
        loaded: looks for the indexer's keys of prefixes that SGLang loaded; None if nothing loads any.
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
    split: SplitBatch | None = None
    selection: Selection | None = None
    caches: dict[Hashable, PagedCache] = field(default_factory=dict)
    portable: bool = False
    loaded: LoadedPrefixes | None = None

    @property
    def own(self) -> bool:
        """Whether the plugin's kernel attends the batch prepared last."""
        return self.route is not None and self.route.own

    @property
    def part(self) -> Share | SplitBatch | None:
        """What sparse attention gets of the batch prepared last; None: all query tokens with this rank's heads."""
        return self.share or self.split

    def plans_step(self, phase: Phase | None) -> TypeGuard[Phase]:
        return self.plans_steps and phase is not None and phase is not Phase.EXTEND


def adopt(
    backend: Any,
    planner: SglangPlanner,
    server_args: Any,
    exchange: SglangExchange | None = None,
    *,
    portable: bool = False,
) -> list[str]:
    """Let a backend, fully built by the engine, take its routes from a planner.

    Args:
        portable: see `State`.

    Returns:
        A note for each kind of batch that falls back to the stock path, for the start-up report.

    Raises:
        PatchError: the backend lacks an attribute that the plugin reads.
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
    if feature := v32_stock_feature(backend, server_args):
        return [f"{feature} is on, which the plugin does not support: every batch falls back to the stock path"]
    for what, impl, extend in (("prefill", prefill, True), ("decode", decode, False)):
        if impl not in PLANNED[layout, extend]:
            notes.append(f"SGLang's --{x}-{what}-backend is {impl}: {STOCK_PHASES[extend]} fall back to the stock path")
    if layout == "v32_fp8":
        planner.stock_prefill = FP8_PREFILLS.get(prefill)
    if planner.sinks:  # SGLang's FA3 path does not support them
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
        portable=portable,
    )
    return notes


def release(backend: Any) -> None:
    """Undo `adopt`: all later batches take the stock path. Captured graphs stay as they are."""
    state: State | None = backend.nsa_plugin
    if state is not None:
        setattr(backend, f"{state.x}_prefill_impl", state.prefill_impl)
        setattr(backend, f"{state.x}_decode_impl", state.decode_impl)
        backend.nsa_plugin = None


def with_plans(original: type) -> type:
    """Make a subclass of the engine's backend class with the plugin's methods; see the module.

    Raises:
        PatchError: the class lacks a method that the plugin overrides, so SGLang would never call the override.
    """
    setter = _check_methods(original)
    original_setter: Callable[..., None] = getattr(original, setter)

    class Planned(original):
        nsa_plugin: State | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            state = self.nsa_plugin
            if state is None:
                return super().init_forward_metadata(forward_batch)
            _look(self, state, forward_batch)
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
                    # Before 0.5.13 the batch has the pool.
                    pool = getattr(self, "token_to_kv_pool", None)
                    pool = forward_batch.token_to_kv_pool if pool is None else pool
                    state.selection = Selection(
                        state.route.plan, pool, state.providers, state.share, state.split, portable=state.portable
                    )
                attach(metadata, state.selection)
            return metadata

        def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
            state = self.nsa_plugin
            if state is not None and state.portable:
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
            state, q = self.nsa_plugin, q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
            if state is not None and state.own:
                return _attend(self, state, q, kv_cache, page_table_1, v_head_dim, sm_scale).unsqueeze(1)
            named = {"kv_cache": kv_cache, "v_head_dim": v_head_dim, "sm_scale": sm_scale}
            stock, slots = functools.partial(super()._forward_flashmla_kv, **named), _attended(state, page_table_1)
            if state is not None and state.part is not None:
                schedule = super()._compute_flashmla_metadata
                return _flashmla_kv_of_part(self, state, stock, schedule, q, slots, metadata, layer)
            rows = slots.shape[0]
            given = _rows_with_lengths(state, metadata, rows)
            out: torch.Tensor = stock(q_all=q_all[:given], layer=layer, metadata=metadata, page_table_1=slots[:given])
            return out if given == rows else F.pad(out, (0, 0) * (out.dim() - 1) + (0, rows - given))

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

        def nsa_plugin_leaves_graph(self, forward_batch: Any) -> bool:
            """Whether a prefill runs eagerly, because some or all of it attends densely; a graph is always sparse.

            SGLang asks outside any graph, before it prepares the batch. All ranks must answer alike, so the answer
            depends on the batch's lengths and on state that the ranks share. With DP attention each group has a
            different batch, and the stock answer stands.
            """
            state = self.nsa_plugin
            if state is None or not state.plans_prefill:
                return False
            _look(self, state, forward_batch)
            dense, splits = state.planner.settings.mha_max_kv > 0, not state.planner.whole
            if not (dense or splits) or batches.phase_of(forward_batch.forward_mode) is not Phase.EXTEND:
                return False
            if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
                return False
            batch, allows = batches.prefill_batch(forward_batch), functools.partial(_allows, original_setter, self)
            if dense and allows(forward_batch):  # SGLang's rules; the preparation sets them again
                route = state.planner.prefill_execution(batch, dense_allowed=True)
                if route is not None and route.dense:
                    return True
            no_split = _no_split(state, batch, forward_batch, allows)
            return not no_split and isinstance(
                state.planner.prefill_execution(batch, no_split=no_split), SplitExecution
            )

    methods = {setter: _setter(original_setter)}
    methods |= {name: _prepared(getattr(original, name)) for name in GRAPH_METHODS if hasattr(original, name)}
    for name, method in methods.items():
        setattr(Planned, name, method)
    Planned.__name__ = Planned.__qualname__ = f"Planned{original.__name__}"
    return Planned


def _check_methods(original: type) -> str:
    """Return the name of the engine's `set_..._prefill_impl`; raise PatchError if a method is missing."""
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
    """Wrap `set_{nsa,dsa}_prefill_impl`. A call without a batch is for a captured one, whose route is already set."""

    @functools.wraps(original)
    def set_prefill_impl(self: Any, forward_batch: Any = None) -> None:
        state: State | None = self.nsa_plugin
        if state is None:
            return original(self, forward_batch)

        allows = functools.partial(_allows, original, self)
        dense_allowed = allows(forward_batch)
        if forward_batch is None:
            return None
        phase = batches.phase_of(forward_batch.forward_mode)
        if phase is Phase.EXTEND and state.plans_prefill:
            in_graph = state.exchange is not None and state.exchange.in_graph()
            batch = batches.prefill_batch(forward_batch, in_graph=in_graph)
            no_split = _no_split(state, batch, forward_batch, allows)
            route = state.planner.prefill(batch, dense_allowed=dense_allowed, no_split=no_split)
            if route is not None:
                self.use_mha = route.dense
            _follow(self, state, batch, route, forward_batch)
        elif state.plans_step(phase):
            draft = self.speculative_num_draft_tokens
            batch = batches.eager_step(forward_batch, phase, draft, self.max_context_len)
            _follow(self, state, batch, state.planner.step(batch))
        else:
            _follow(self, state)
        return None

    return set_prefill_impl


def _allows(original: Callable[..., None], backend: Any, forward_batch: Any) -> bool:
    """Apply SGLang's rules, from the path it was started with; return whether a batch may attend densely.

    Args:
        original: `set_{nsa,dsa}_prefill_impl`.
    """
    state: State = backend.nsa_plugin
    setattr(backend, f"{state.x}_prefill_impl", state.prefill_impl)
    original(backend, forward_batch)
    return bool(backend.use_mha)


def _no_split(state: State, batch: Batch, forward_batch: Any, allows: Callable[[Any], bool]) -> str:
    """Return why a prefill's short prompts do not attend densely next to its long ones; "" if they may."""
    if no_split := state.planner.no_split_of(batch):
        return no_split
    if getattr(forward_batch, "spec_info", None) is not None:
        return "the draft model reads the selection of every prompt"
    short = allows(batches.ShortPrompts(forward_batch, state.planner.short_limit))
    allows(forward_batch)  # what the rules set stands for the whole batch
    return "" if short else NO_DENSE


def _prepared(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method that prepares a captured batch: set the batch's route first."""
    names = list(inspect.signature(original).parameters)[1:]
    places = names.index("bs"), names.index("forward_mode")

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        state: State | None = self.nsa_plugin
        if state is not None:
            _look(self, state)
            bs, mode = (kwargs[names[place]] if names[place] in kwargs else args[place] for place in places)
            phase = batches.phase_of(mode)
            if state.plans_step(phase):
                batch = batches.captured_step(phase, bs, self.speculative_num_draft_tokens, self.max_context_len)
                _follow(self, state, batch, state.planner.step(batch))
            else:
                _follow(self, state)
        return original(self, *args, **kwargs)

    return prepare


def _look(backend: Any, state: State, forward_batch: Any = None) -> None:
    """Look for the indexer's keys of the prefixes before this batch, and note its own if it is a prefill."""
    if state.loaded is None:
        return
    # Before 0.5.13 the batch has the pool, and a step of a graph has no batch.
    pool = getattr(backend, "token_to_kv_pool", None) or getattr(forward_batch, "token_to_kv_pool", None)
    if pool is not None:
        state.loaded.look(pool, forward_batch)
    if forward_batch is not None and batches.phase_of(forward_batch.forward_mode) is Phase.EXTEND:
        state.loaded.prefill(forward_batch, backend.req_to_token)


def _follow(
    backend: Any,
    state: State,
    batch: Batch | None = None,
    route: Execution | None = None,
    forward_batch: Any = None,
) -> None:
    """Set a batch's route, or None for the stock path, on the backend."""
    state.route, state.share, state.split, state.selection = route, None, None, None
    path = None if route is None else route.path
    if route is not None and batch is not None and state.exchange is not None and route.plan.token_shard:
        shares = state.planner.shares(route.plan, batch, state.exchange.shard.max_rows)
        state.share = Share(state.exchange, shares, route.plan.token_shard_chunks)
    if isinstance(route, SplitExecution) and batch is not None:
        cache, read = functools.partial(_layer_cache, backend, state), state.providers.helper("kv_cache_read")
        state.split = SplitBatch(route, batch.q_lens, batch.kv_lens, backend, cache, read)
    if forward_batch is not None:
        setattr(forward_batch, SPLIT, state.split)  # the layers' forward has only this
    step = route is not None and route.plan.phase is not Phase.EXTEND
    if path is not None and not step:
        setattr(backend, f"{state.x}_prefill_impl", path)
    setattr(backend, f"{state.x}_decode_impl", path if path is not None and step else state.decode_impl)


def _layer_cache(backend: Any, state: State, layer_id: int) -> PagedCache:
    return _paged(backend, state, backend.token_to_kv_pool.get_key_buffer(layer_id))


def _paged(backend: Any, state: State, kv_cache: torch.Tensor) -> PagedCache:
    """Open a layer's cache, of any shape [..., bytes or values of a token], as pages."""
    key = kv_cache.data_ptr(), kv_cache.shape, kv_cache.dtype
    found = state.caches.get(key)
    if found is None:
        page_size = next(int(getattr(backend, name)) for name in PAGE_SIZES if hasattr(backend, name))
        pages = kv_cache.view(-1, page_size, 1, kv_cache.shape[-1])
        found = state.caches[key] = open_cache(pages, state.planner.model.kv_layout)
    return found


def _rows_with_lengths(state: State | None, metadata: Any, rows: int) -> int:
    """Return how many of `rows` query tokens the upstream FlashMLA gets: those with lengths in its metadata.

    The engine pads the query tokens in more ways than the lengths, and the library then raises "seqlens_k must have
    shape (batch_size)" (thread of sglang #13646).
    """
    if state is None:
        return rows
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
    cache = _paged(backend, state, kv_cache)
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
