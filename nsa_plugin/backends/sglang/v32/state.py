"""State of the plugin on one of SGLang's attention backends: `adopt` switches it on, `release` off.

Two-batch overlap and the steps of MTP each have a backend instance, and so a state.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Share
from nsa_plugin.backends.sglang.startup.model import prefix_of
from nsa_plugin.backends.sglang.v32.arrival import LoadedPrefixes
from nsa_plugin.backends.sglang.v32.indexer import Selection
from nsa_plugin.backends.sglang.v32.routes import (
    DENSE_VARIABLE,
    FP8_PREFILLS,
    PLANNED,
    SglangPlanner,
    v32_stock_feature,
)
from nsa_plugin.backends.sglang.v32.split import SplitBatch
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.patches.ledger import TURN_OFF

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
) -> list[str]:
    """Let a backend, fully built by the engine, take its routes from a planner.

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
    if planner.dense_up_to:
        notes.append(
            f"{DENSE_VARIABLE.format(x.upper())} is {planner.dense_up_to}: prefills that SGLang attends densely beyond "
            f"the model's index_topk of {planner.model.index_topk} tokens fall back to the stock path"
        )
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
    )
    return notes


def release(backend: Any) -> None:
    """Undo `adopt`: all later batches take the stock path. Captured graphs stay as they are."""
    state: State | None = backend.nsa_plugin
    if state is not None:
        setattr(backend, f"{state.x}_prefill_impl", state.prefill_impl)
        setattr(backend, f"{state.x}_decode_impl", state.decode_impl)
        backend.nsa_plugin = None


def pool_of(backend: Any, forward_batch: Any) -> Any:
    """Return SGLang's KV pool; None if neither has it: before 0.5.13 the batch does, and a step of a graph has none."""
    pool = getattr(backend, "token_to_kv_pool", None)
    return getattr(forward_batch, "token_to_kv_pool", None) if pool is None else pool


def layer_cache(backend: Any, state: State, layer_id: int) -> PagedCache:
    return paged_cache(backend, state, backend.token_to_kv_pool.get_key_buffer(layer_id))


def paged_cache(backend: Any, state: State, kv_cache: torch.Tensor) -> PagedCache:
    """Open a layer's cache, of any shape [..., bytes or values of a token], as pages."""
    key = kv_cache.data_ptr(), kv_cache.shape, kv_cache.dtype
    found = state.caches.get(key)
    if found is None:
        page_size = next(int(getattr(backend, name)) for name in PAGE_SIZES if hasattr(backend, name))
        pages = kv_cache.view(-1, page_size, 1, kv_cache.shape[-1])
        found = state.caches[key] = open_cache(pages, state.planner.model.kv_layout)
    return found
