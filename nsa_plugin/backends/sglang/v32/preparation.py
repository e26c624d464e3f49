"""What happens when SGLang prepares a batch: its plan is made, and the execution path set on the backend.

`wrappers` wraps the methods of the engine's backend class that do so; `attention` has the methods that attend.

- Eager batches: the engine calls `set_{nsa,dsa}_prefill_impl(forward_batch)` before anything depends on the result.
  SGLang's rules run first, then the plan sets the path and whether dense attention runs (`use_mha`). The model reads
  `use_mha` for the indexer too, so attention and selection cannot disagree (sglang #12816, vllm #52512).
- Captured batches: capture and replay go through `_apply_cuda_graph_metadata` (0.5.13 on) or
  `init_forward_metadata_{capture,replay}_cuda_graph` (before), and the draft steps of MTP through
  `..._replay_cuda_graph_from_precomputed`. A route depends on the phase and the number of query tokens alone, so a
  replay has the route of its capture.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.sglang.v32 import batch as batches
from nsa_plugin.backends.sglang.v32 import portable
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.routes import NO_DENSE, NO_DENSE_BESIDE_DRAFTS, SplitExecution
from nsa_plugin.backends.sglang.v32.split import ATTRIBUTE as SPLIT
from nsa_plugin.backends.sglang.v32.split import SplitBatch
from nsa_plugin.backends.sglang.v32.state import State, layer_cache, pool_of
from nsa_plugin.decision.shapes import Phase

SETTERS = ("set_dsa_prefill_impl", "set_nsa_prefill_impl")

# Methods that prepare a captured batch, each with bs and forward_mode. A class has the first or the next two at least.
GRAPH_METHODS = (
    "_apply_cuda_graph_metadata",
    "init_forward_metadata_capture_cuda_graph",
    "init_forward_metadata_replay_cuda_graph",
    "init_forward_metadata_replay_cuda_graph_from_precomputed",
)


def wrappers(original: type) -> dict[str, Callable[..., None]]:
    """Return the methods that prepare a batch, by the engine's names, each around the engine's; see `missing`."""
    setter = setter_of(original)
    graph = {name: _prepared(getattr(original, name)) for name in GRAPH_METHODS if hasattr(original, name)}
    return {setter: _setter(getattr(original, setter)), **graph}


def missing(original: type) -> list[str]:
    """Return the methods that prepare a batch and that the engine's class lacks, in words."""
    lacks = [] if setter_of(original) else [" or ".join(SETTERS)]
    once, capture, replay, _ = GRAPH_METHODS
    if not (hasattr(original, once) or (hasattr(original, capture) and hasattr(original, replay))):
        lacks.append(f"{once}, or {capture} and {replay}")
    return lacks


def setter_of(original: type) -> str:
    """Return the name of the engine's `set_..._prefill_impl`; "" if it has none."""
    return next((name for name in SETTERS if hasattr(original, name)), "")


def leaves_graph(backend: Any, original: type, forward_batch: Any) -> bool:
    """Whether a prefill runs eagerly: a graph is always sparse and keeps heads local.

    It does if `mha_max_kv` is set and it attends densely, if it is split, or if `token_shard` is on and it reshards.

    SGLang asks outside any graph, before it prepares the batch. All ranks must answer alike, so the answer depends on
    the batch's lengths and on state that the ranks share. With DP attention each group has a different batch, and the
    stock answer stands.

    Args:
        original: the engine's class.
    """
    state: State | None = backend.nsa_plugin
    if state is None:
        return False
    look(backend, state, forward_batch)
    if not state.plans_prefill:
        return False
    settings = state.planner.settings
    dense, splits = settings.mha_max_kv > 0, not state.planner.whole
    reshards = settings.token_shard == "on" and state.exchange is not None
    if not (dense or splits or reshards) or batches.phase_of(forward_batch.forward_mode) is not Phase.EXTEND:
        return False
    if getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
        return False
    batch = batches.prefill_batch(forward_batch)
    no_dense_of = functools.partial(_no_dense, getattr(original, setter_of(original)), backend)
    if dense or reshards:
        # SGLang's rules; the preparation sets them again.
        route = state.planner.prefill_execution(batch, no_dense=no_dense_of(forward_batch))
        if route is not None and ((dense and route.dense) or (reshards and route.plan.token_shard)):
            return True
    no_split = _no_split(state, batch, forward_batch, no_dense_of)
    return not no_split and isinstance(state.planner.prefill_execution(batch, no_split=no_split), SplitExecution)


def _setter(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `set_{nsa,dsa}_prefill_impl`. A call without a batch is for a captured one, whose route is already set."""

    @functools.wraps(original)
    def set_prefill_impl(self: Any, forward_batch: Any = None) -> None:
        state: State | None = self.nsa_plugin
        if state is None:
            return original(self, forward_batch)

        no_dense_of = functools.partial(_no_dense, original, self)
        no_dense = no_dense_of(forward_batch)
        if forward_batch is None:
            return None
        phase = batches.phase_of(forward_batch.forward_mode)
        if phase is Phase.EXTEND and state.plans_prefill:
            in_graph = state.exchange is not None and state.exchange.in_graph()
            batch = batches.prefill_batch(forward_batch, in_graph=in_graph)
            no_split = _no_split(state, batch, forward_batch, no_dense_of)
            route = state.planner.prefill(batch, no_dense=no_dense, no_split=no_split)
            if route is not None or state.planner.portable:
                self.use_mha = route is not None and route.dense
                portable.note_dense(forward_batch, self.use_mha)
            _follow(self, state, batch, route, forward_batch)
        elif state.plans_step(phase):
            draft = self.speculative_num_draft_tokens
            batch = batches.eager_step(forward_batch, phase, draft, self.max_context_len)
            _follow(self, state, batch, state.planner.step(batch))
        else:
            _follow(self, state)
        return None

    return set_prefill_impl


def _no_dense(original: Callable[..., None], backend: Any, forward_batch: Any) -> str:
    """Apply SGLang's rules, from the path it was started with; return why a batch may not attend densely, "" if it may.

    Args:
        original: `set_{nsa,dsa}_prefill_impl`.
    """
    state: State = backend.nsa_plugin
    setattr(backend, f"{state.x}_prefill_impl", state.prefill_impl)
    reason = portable.no_dense(state.planner, forward_batch) if state.planner.portable else ""
    rules: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if state.planner.portable:
        rules = portable.rules_for(backend, dense=state.plans_prefill and not reason)
    with rules:
        original(backend, forward_batch)
    return "" if backend.use_mha else reason or NO_DENSE


def _no_split(state: State, batch: Batch, forward_batch: Any, no_dense_of: Callable[[Any], str]) -> str:
    """Return why a prefill's short prompts do not attend densely next to its long ones; "" if they may."""
    if no_split := state.planner.no_split_of(batch):
        return no_split
    if getattr(forward_batch, "spec_info", None) is not None:
        return NO_DENSE_BESIDE_DRAFTS
    reason = no_dense_of(batches.ShortPrompts(forward_batch, state.planner.short_limit))
    no_dense_of(forward_batch)  # what the rules set stands for the whole batch
    return reason


def _prepared(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method that prepares a captured batch: set the batch's route first."""
    names = list(inspect.signature(original).parameters)[1:]
    bs_place, mode_place = names.index("bs"), names.index("forward_mode")

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        state: State | None = self.nsa_plugin
        if state is not None:
            bs = kwargs["bs"] if "bs" in kwargs else args[bs_place]
            phase = batches.phase_of(kwargs["forward_mode"] if "forward_mode" in kwargs else args[mode_place])
            if phase is not Phase.EXTEND:  # a prefill was noted by `leaves_graph` and has not run yet
                look(self, state)
            if state.plans_step(phase):
                batch = batches.captured_step(phase, bs, self.speculative_num_draft_tokens, self.max_context_len)
                _follow(self, state, batch, state.planner.step(batch))
            else:
                _follow(self, state)
        return original(self, *args, **kwargs)

    return prepare


def look(backend: Any, state: State, forward_batch: Any = None) -> None:
    """Look for the indexer's keys of the prefixes before this batch, and note its own if it is a prefill."""
    if state.loaded is None:
        return
    if (pool := pool_of(backend, forward_batch)) is not None:
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
        cache, read = functools.partial(layer_cache, backend, state), state.providers.helper("kv_cache_read")
        state.split = SplitBatch(route, batch.q_lens, batch.kv_lens, backend, cache, read)
    if forward_batch is not None:
        setattr(forward_batch, SPLIT, state.split)  # the layers' forward has only this
    step = route is not None and route.plan.phase is not Phase.EXTEND
    if path is not None and not step:
        setattr(backend, f"{state.x}_prefill_impl", path)
    setattr(backend, f"{state.x}_decode_impl", path if path is not None and step else state.decode_impl)
