"""From a Plan to how a V4 batch attends under SGLang, and what of SGLang's own settings a Plan has to respect.

A prefill has the three routes of `backends.v4.CARRIERS`; that over bfloat16 rows is `kernels.v4_prefill`.

SGLang's variables, where a user has set them and no setting of the plugin's names a library:

    SGLANG_OPT_FLASHMLA_SPARSE_PREFILL   1: bfloat16 rows and FlashMLA's prefill kernel; 0: its decode kernel, as far as
                                         the installed build takes the rows, and the routes of `auto` above
    SGLANG_FP8_PAGED_MQA_LOGITS_TORCH    the indexer is SGLang's own torch code (`v4_indexer`)
    SGLANG_OPT_USE_JIT_INDEXER_METADATA  who schedules SGLang's own paged logits; past what the library's scheduling
                                         kernel takes, its 0 cannot be followed and SGLang's kernel schedules

Small prefills are selected by SGLang's own code, and attended by it where it would make bfloat16 rows as well: see
`ENGINE_TOKENS`.

What stays SGLang's own: context parallelism, hisparse, the fp4 indexer, DSpark, --dsv4-prefill-backend other than auto,
trtllm's and the unified caches, V4.1's caches and ratios, bounded replay, deterministic inference; decode, verify and
draft steps unless `decode_backend` names a library.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nsa_plugin.backends.common.v4 import DECODE_KERNEL, LAYOUT, ROWS, carrier_name, runnable
from nsa_plugin.backends.sglang.v4.batch import spans, workspace_bytes
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.routes import MAX_PREFILLS, Planner, Route, in_place
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape
from nsa_plugin.decision.v4_memory import ROWS_BYTES
from nsa_plugin.errors import NoProviderError, NsaPluginError
from nsa_plugin.libraries.devices import MIB

SPARSE_PREFILL_VARIABLE = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
JIT_METADATA_VARIABLE = "SGLANG_OPT_USE_JIT_INDEXER_METADATA"
TORCH_LOGITS_VARIABLE = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"

WINDOW = 128
"""Tokens of the window; SGLang hardcodes them."""
WINDOW_PAGE = 256

ENGINE_TOKENS = 8192
"""Most tokens, of all of a prefill's contexts, for which SGLang's own code selects, and attends over bf16 rows where
that is its route too.

Its kernels do the same work there, and attention ends in the same one of FlashMLA's. What the plugin's save the device
is less than what the plugin asks of the host besides, and it is the host that so few tokens wait for."""


def asked_by_engine(envs: Any) -> frozenset[str]:
    """The routes that SGLang's own variable asks for; none where no user has set it.

    Args:
        envs: SGLang's `environ.envs`; 0.5.12 has no such variable.
    """
    field = getattr(envs, SPARSE_PREFILL_VARIABLE, None)
    if field is None or not field.is_set():
        return frozenset()
    return frozenset({ROWS if field.get() else DECODE_KERNEL})


def makes_rows(envs: Any) -> bool:
    """Whether SGLang's own route of a prefill is over bf16 rows, whatever its size: from 0.5.15 on unless told not to.

    Args:
        envs: see `asked_by_engine`.
    """
    field = getattr(envs, SPARSE_PREFILL_VARIABLE, None)
    return field is not None and bool(field.get())


def route_of(plan: Plan) -> Route:
    """How SGLang's V4 backend carries a plan.

    Raises:
        NoProviderError: it cannot; `runnable` keeps such a plan from being made.
    """
    if plan.attention is Attention.NONE:
        return Route(plan)
    name = carrier_name(plan)
    if name is None:
        after = " after dequantisation" if plan.dequantize_kv else ""
        raise NoProviderError(f"SGLang's V4 backend has no route for {plan.provider}'s {plan.attention}{after}")
    return Route(plan, name, own=name != DECODE_KERNEL)


def engines_rows(route: Route) -> bool:
    """Whether SGLang's own code brings the caches to bf16 rows, selects and attends for this route."""
    return route.impl == ROWS and not route.own


@dataclass
class V4Planner(Planner):
    """The decisions of one V4 backend; see `Planner`.

    Attributes:
        asked: routes that SGLang's own variable asks for, for prefills; see `asked_by_engine`.
        engine_makes_rows: see `makes_rows`.
        engine_tokens: see `ENGINE_TOKENS`.
    """

    asked: frozenset[str] = frozenset()
    engine_makes_rows: bool = False
    engine_tokens: int = ENGINE_TOKENS
    _routes: dict[tuple[BatchShape, tuple[tuple[int, int], ...], int], Route | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = runnable(self.device)

    def prefill_route(self, batch: Batch, *, dense_allowed: bool = False) -> Route | None:
        """The route of a prefill, or None where it is SGLang's. A V4 model has no dense attention to allow."""
        lengths = tuple((rows, context) for _, rows, context in batch.requests)
        key = batch.shape, lengths, self.device.memory_free
        if key not in self._routes:
            if len(self._routes) >= MAX_PREFILLS:
                self._routes.clear()
            self._routes[key] = self._v4_route(batch)
        return self._routes[key]

    def _v4_route(self, batch: Batch) -> Route | None:
        if batch.shape.context_parallel:
            return None
        plan = self._asked_plan(batch) or decide(self.model, batch.shape, self.device, self.settings)
        if plan.dequantize_kv and (held := self._rows_bytes(batch)) > self._room():
            # Nothing else may take so many rows: then they are copied as SGLang would.
            with suppress(NsaPluginError):
                plan = decide(self.model, batch.shape, in_place(self.device, LAYOUT), self.settings)
                said = f"{plan.reasons['dequantize_kv']}; bf16 rows would take {held / MIB:.0f} MiB"
                plan = replace(plan, reasons={**plan.reasons, "dequantize_kv": said})
        return self._by_engine(route_of(plan), batch)

    def _by_engine(self, route: Route, batch: Batch) -> Route:
        """The same route with as much of SGLang's own code as may carry it, where the batch is small."""
        tokens, chunk = sum(context for *_, context in batch.requests), route.plan.indexer.rows_per_chunk
        if tokens > self.engine_tokens or 0 < chunk < batch.shape.num_tokens:  # the engine scores all rows at once
            return route
        if route.impl != ROWS or not self.engine_makes_rows or self.settings.fault != "none":
            return replace(route, selects=False)
        said = f"{route.plan.reasons['attention']}; SGLang's own code makes rows of {tokens} tokens with less work"
        plan = replace(route.plan, reasons={**route.plan.reasons, "attention": said})
        return replace(route, plan=plan, own=False, selects=False)

    def step_route(self, batch: Batch) -> Route:
        """See `Planner.step_route`."""
        key = (batch.shape.phase, batch.shape.num_requests, batch.shape.num_tokens)
        if key not in self._steps:
            self._steps[key] = route_of(decide(self.model, batch.shape, self.device, self.settings))
        return self._steps[key]

    def _asked_plan(self, batch: Batch) -> Plan | None:
        """The plan by the routes that SGLang's variable asks for, or None: nothing asked, or they do not carry it."""
        if not self.asked or self.settings.prefill_backend != "auto":
            return None
        try:
            plan = decide(self.model, batch.shape, runnable(self.device, self.asked), self.settings)
        except NoProviderError:
            return None
        said = f"{plan.reasons['attention']}; {SPARSE_PREFILL_VARIABLE} asks for it"
        return replace(plan, reasons={**plan.reasons, "attention": said})

    def _rows_bytes(self, batch: Batch) -> int:
        q_lens = [rows for _, rows, _ in batch.requests]
        return workspace_bytes(spans(q_lens, [context for *_, context in batch.requests]), WINDOW, WINDOW_PAGE)

    def _room(self) -> int:
        return min(ROWS_BYTES, self.device.memory_free // 4)


def v4_shape(model_runner: Any) -> ModelShape:
    """The model as one rank of its attention group sees it. Every V4 cache that is adopted is of fp8 records."""
    config = model_runner.model_config.hf_text_config
    return ModelShape(
        family="v4",
        num_heads=config.num_attention_heads,
        attn_tp_size=attention_ranks(model_runner),
        kv_lora_rank=512,
        qk_nope_head_dim=448,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=512,
        index_topk=config.index_topk,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        kv_layout=LAYOUT,
        sliding_window=WINDOW,
    )


def attention_ranks(model_runner: Any) -> int:
    """Ranks that share the attention's heads: of the runner until 0.5.15, of its `ps` or SGLang's context later."""
    for holder in (model_runner, getattr(model_runner, "ps", None)):
        size = getattr(holder, "attn_tp_size", None)
        if size is not None:
            return int(size)
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        from sglang.srt.layers.dp_attention import get_attention_tp_size

        return int(get_attention_tp_size())
    return int(get_parallel().attn_tp_size)


def engines_own(backend: Any, server_args: Any) -> str | None:
    """The feature of this server whose batches the plugin leaves to SGLang altogether, or None."""
    # Read of live objects: several of the names exist only in some versions.
    if getattr(backend, "hisparse_coordinator", None) is not None or getattr(server_args, "enable_hisparse", False):
        return "hisparse"
    if getattr(backend, "trtllm_attn", False):
        return "trtllm's uniform fp8 cache"
    if getattr(backend, "is_dspark_draft", False):
        return "DSpark's draft"
    if getattr(backend, "is_dsv41", False):
        return "DeepSeek-V4.1"
    if getattr(backend, "enable_decoder_swa_bounded_replay", False):
        return "bounded replay of the window"
    pool = getattr(backend, "token_to_kv_pool", None)
    if getattr(pool, "_unified_kv", False):
        return "the unified KV cache"
    if getattr(pool, "request_window", None) is not None:
        return "a window kept by request"
    asked = getattr(backend, "dsv4_prefill_backend", "auto")
    if asked != "auto":
        return f"--dsv4-prefill-backend {asked}"
    flags = ("enable_prefill_cp", "enable_prefill_context_parallel", "enable_dsa_prefill_context_parallel")
    if any(getattr(server_args, flag, False) for flag in (*flags, "enable_nsa_prefill_context_parallel")):
        return "context-parallel prefill"
    if getattr(server_args, "enable_deterministic_inference", False):
        return "deterministic inference"
    return None
