"""SGLang's V4 attention backend with plans: one per prefill, made when SGLang prepares it, read by every layer.

`with_v4_plans` adds to the engine's backend class the overrides of `table`; `adopt` switches it on for an instance.
Before that, and for a batch without a route, every method is the stock one.

- Eager prefills: `init_forward_metadata` makes the plan from the lengths on the host, then SGLang's metadata.
- Prefills whose graph breaks at attention (0.5.13 on): the plan is made when SGLang prepares the replay. Attention runs
  between the graph's parts, by the plan. The indexer is inside the graph, so SGLang's selects.
- The function that attends stores the layer's keys if SGLang asks for it, then runs the execution path (`kernels`).
- Decode, verify and draft steps fall back to the stock path, unless `decode_backend` names a library; then `steps`
  records them.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.names import engine_names
from nsa_plugin.backends.common.paths import DECODE_KERNEL
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import LAYOUT, RATIOS
from nsa_plugin.backends.sglang.v4 import indexer as v4_indexer
from nsa_plugin.backends.sglang.v4 import routes as v4_routes
from nsa_plugin.backends.sglang.v4 import steps as v4_steps
from nsa_plugin.backends.sglang.v4.batch import PAGE, Prefill, spans
from nsa_plugin.backends.sglang.v4.kernels import attend, layer_call, longest_context, record_bytes
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.backends.sglang.v4.switches import answering, steer
from nsa_plugin.backends.sglang.v4.table import POOL, SLOTS, check_class
from nsa_plugin.backends.sglang.v32 import batch as batches
from nsa_plugin.decision.constraints import steps_left_to_engine
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import PatchError
from nsa_plugin.layouts import V4_FP8
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.patches.ledger import TURN_OFF, wrap

THRESHOLD = "_LARGE_INDEXER_QUERY_THRESHOLD"
"""SGLang's limit (11673 query tokens) for prefills by FlashMLA's decode kernel; 0.5.12 has none."""


def adopt(backend: Any, planner: SglangV4Planner, server_args: Any, *, own_heads_first: bool = True) -> list[str]:
    """Let a V4 backend take its routes from a planner; call it once SGLang has started the backend.

    Args:
        own_heads_first: see `V4State`; False before 0.5.14.

    Returns:
        What falls back to the stock path although the plugin is on, for the start-up report.

    Raises:
        PatchError: the backend or its pool lacks something that the plugin reads.
    """
    if feature := v4_routes.v4_stock_feature(backend, server_args):
        return [f"{feature} is on, which the plugin does not support: every batch falls back to the stock path"]
    pool = getattr(backend, "token_to_kv_pool", None)
    read = ("softmax_scale", "page_size", "MAX_SEQ_LEN_FOR_CAPTURE", "speculative_num_draft_tokens")
    lacks = [name for name in read if not hasattr(backend, name)]
    lacks += [f"token_to_kv_pool.{name}" for name in POOL if not hasattr(pool, name)]
    if lacks:
        raise PatchError(f"SGLang's {type(backend).__name__} has no {', '.join(lacks)}. {TURN_OFF}")
    if backend.page_size != PAGE:
        raise PatchError(f"SGLang's V4 cache has pages of {backend.page_size}; the plugin knows {PAGE}. {TURN_OFF}")
    stored = record_bytes(pool)
    if stored != V4_FP8.row_bytes:
        return [
            f"the V4 cache has {stored} bytes a token, not {V4_FP8.row_bytes}: every batch falls back to the stock path"
        ]
    steps_left = steps_left_to_engine(planner.model.family, planner.settings, portable=False)
    backend.nsa_plugin = V4State(
        planner=planner,
        providers=Providers(LAYOUT, planner.device.sm, attended=AttendedTokens.of(planner.settings)),
        own_heads_first=own_heads_first,
        plans_steps=not steps_left,
    )
    notes = [steps_left] if steps_left else []
    if getattr(server_args, "enable_deepseek_v4_fp4_indexer", False):  # `indexer` leaves each selection
        notes.append("--enable-deepseek-v4-fp4-indexer is on: V4's selection runs on the stock path")
    return notes


def release(backend: Any) -> None:
    """Undo `adopt`: from now on every batch takes the stock path, except in graphs that are captured already."""
    backend.nsa_plugin = None


def with_v4_plans(original: type) -> type:
    """Make a subclass of SGLang's V4 backend class with the plugin's methods; see the module.

    Raises:
        PatchError: see `check_class`.
    """
    attends = check_class(original)

    class Planned(original):
        nsa_plugin: V4State | None = None
        nsa_plugin_family = "v4"

    made = {attends: _attending(getattr(original, attends))}
    made |= {name: make(getattr(original, name)) for name, make in WRAPPERS.items() if hasattr(original, name)}
    for name, method in made.items():
        setattr(Planned, name, method)
    Planned.__name__ = Planned.__qualname__ = f"Planned{original.__name__}"
    return Planned


def _preparing(original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `init_forward_metadata` of an eager batch. The plan is made first, because SGLang's code may read it."""
    _plan(self, forward_batch)
    v4_steps.eager(self, forward_batch)
    return original(self, forward_batch, *args, **kwargs)


def _replaying(
    original: Callable[..., Any], self: Any, capture_metadata: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the preparation of a prefill whose graph breaks at attention. The plan has the lengths without padding."""
    _plan(self, forward_batch)
    return original(self, capture_metadata, forward_batch, *args, **kwargs)


def _capturing(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.nsa_plugin is not None:
        self.nsa_plugin.forget()
    return original(self, *args, **kwargs)


def _without_tables(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    state: V4State | None = self.nsa_plugin
    idle = state is None or state.route is None or state.route.plan.stock_attention
    return original(self, *args, **kwargs) if idle else False


def _scheduling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_forward_metadata_indexer`: use SGLang's scheduling kernel if the library's supports too few rows.

    From 0.5.13 on SGLang does so above 11673 rows anyway; 0.5.12 reads only its variable.
    """
    field = getattr(engine_names(original).get("envs"), v4_routes.JIT_METADATA_VARIABLE, None)
    steer(field)

    @functools.wraps(original)
    def init(self: Any, core_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        state: V4State | None = self.nsa_plugin
        if state is None or field is None or field.get():
            return original(self, core_attn_metadata, *args, **kwargs)
        capability = state.planner.device.capability("deep_gemm", Op.INDEXER_METADATA)
        limit = None if capability is None else capability.max_rows
        if limit is None or core_attn_metadata.page_table.shape[0] <= limit:
            return original(self, core_attn_metadata, *args, **kwargs)
        with answering(field, True):
            return original(self, core_attn_metadata, *args, **kwargs)

    return init


def _selecting(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    defaults = {name: one.default for name, one in signature.parameters.items() if one.default is not one.empty}
    names = engine_names(original)

    @functools.wraps(original)
    def forward_c4_indexer(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: V4State | None = self.nsa_plugin
        if state is None or state.route is None or state.prefill is None or state.route.plan.stock_selection:
            return original(self, *args, **kwargs)
        if args:
            given = {**defaults, **signature.bind(self, *args, **kwargs).arguments}
        else:  # every version calls it so
            given = {"self": self, **defaults, **kwargs}
            if given.keys() != signature.parameters.keys():
                signature.bind(self, **kwargs)  # raises for missing or unknown arguments
        mode, plan = given["forward_batch"].forward_mode, state.route.plan.indexer
        if batches.phase_of(mode) is not Phase.EXTEND or not v4_indexer.covered(
            self, state.prefill, plan, given["c4_indexer"], names
        ):
            return original(self, *args, **kwargs)
        pool, topk = _pool(self, given["forward_batch"]), state.planner.model.index_topk
        return v4_indexer.select(self, state, state.prefill, plan, pool, topk, given)

    return forward_c4_indexer


def _attending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that attends, `forward` or `_forward_attention`."""
    names = engine_names(original)
    switch = getattr(names.get("envs"), v4_routes.SPARSE_PREFILL_VARIABLE, None)
    steer(switch)

    @functools.wraps(original)
    def attending(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        def engines(backend: Any) -> Any:
            later = {"save_kv_cache": save_kv_cache, "attn_sink": attn_sink, **more}
            return original(backend, q, k, v, layer, forward_batch, compress_ratio, **later)

        state: V4State | None = self.nsa_plugin
        chosen = None if state is None else _route(self, state, forward_batch, q.shape[0])
        # MegaAttention (0.5.21 on) passes its rotations and expects its output format.
        if state is None or chosen is None or compress_ratio not in RATIOS or more.get("cos_sin_cache") is not None:
            return engines(self)
        if chosen.path == DECODE_KERNEL and q.shape[0] <= names.get(THRESHOLD, q.shape[0]):
            with answering(switch, False):
                return engines(_attending_others(self) if state.providers.attended.wrong else self)
        if k is not v:
            raise PatchError(f"SGLang's V4 model passes keys that are not its values. {TURN_OFF}")
        _complete_metadata(self)
        if save_kv_cache:
            self.store_cache(layer.layer_id, k, forward_batch)
        core = self.forward_metadata.core_attn_metadata
        call = layer_call(
            state,
            core,
            _pool(self, forward_batch),
            layer.layer_id,
            q=q.squeeze(1) if q.dim() == 4 else q,
            attn_sink=attn_sink,
            scale=self.softmax_scale,
            own_heads=int(layer.tp_q_head_num),
            ratio=compress_ratio,
        )
        return attend(state, chosen, call)

    return attending


def _plan(backend: Any, forward_batch: Any) -> None:
    """Make the plan of a prefill; other batches get no route here."""
    state: V4State | None = backend.nsa_plugin
    if state is None:
        return
    state.forget()
    if batches.phase_of(forward_batch.forward_mode) is not Phase.EXTEND:
        return
    if getattr(backend, "encoder_replay", False) or getattr(backend, "encoder_row_floor", None) is not None:
        return
    if forward_batch.seq_lens_cpu is None or forward_batch.extend_seq_lens_cpu is None:
        return
    batch = batches.prefill_batch(forward_batch)
    state.route = state.planner.prefill(batch)
    if state.route is not None and not state.route.plan.stock_attention:
        state.prefill = Prefill(spans(batch.q_lens, batch.kv_lens), v4_routes.WINDOW)


def _route(backend: Any, state: V4State, forward_batch: Any, rows: int) -> Execution | None:
    """Return the route of a batch that attends; None for the stock path."""
    if batches.phase_of(forward_batch.forward_mode) is Phase.EXTEND:
        late = getattr(backend.forward_metadata, "late_layer_tail", None) is not None
        idle = state.route is None or state.route.path is None or state.route.plan.stock_attention
        return None if late or idle else state.route
    phase = v4_steps.planned(backend, forward_batch.forward_mode)
    if phase is None or rows == 0:
        return None
    batch = batches.step_batch(phase, int(forward_batch.batch_size), rows, longest_context(backend))
    return state.planner.step_execution(batch)


def _pool(backend: Any, forward_batch: Any) -> Any:
    """Return SGLang's KV pool: the backend's, or the batch's in 0.5.12."""
    own = getattr(backend, "token_to_kv_pool", None)
    return forward_batch.token_to_kv_pool if own is None else own


def _complete_metadata(backend: Any) -> None:
    if hasattr(backend, "_maybe_upgrade_forward_metadata"):  # 0.5.12 completes a decode's metadata here
        backend._maybe_upgrade_forward_metadata()


def _attending_others(backend: Any) -> Any:
    """Copy the backend with metadata of wrong slots, for the deliberate fault; the original stays as it is."""
    _complete_metadata(backend)
    other, metadata = copy.copy(backend), copy.copy(backend.forward_metadata)
    core = copy.copy(metadata.core_attn_metadata)
    for name in SLOTS:
        if (slots := getattr(core, name)) is not None:
            setattr(core, name, backend.nsa_plugin.providers.attended(slots))
    metadata.core_attn_metadata = core
    other.forward_metadata = metadata
    return other


_AROUND: dict[str, Callable[..., Any]] = {
    "init_forward_metadata": _preparing,
    "prepare_forward_metadata_for_breakable_cuda_graph_replay": _replaying,
    "init_forward_metadata_for_breakable_cuda_graph_capture": _capturing,
    "_use_sparse_prefill": _without_tables,
    "init_forward_metadata_out_graph": v4_steps.replayed,
    "init_forward_metadata_replay_cuda_graph": v4_steps.replayed_by_size,
}
WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "init_forward_metadata_indexer": _scheduling,
    "forward_c4_indexer": _selecting,
    **{name: functools.partial(wrap, around=around) for name, around in _AROUND.items()},
}
"""What the plugin overrides besides the method that attends, as far as the version has it: {method: its wrapper}."""
