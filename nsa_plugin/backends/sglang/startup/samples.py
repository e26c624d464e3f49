"""Sample batches, used to decide before serving, to report, and to find the kernels to warm up."""

from __future__ import annotations

from contextlib import suppress

from nsa_plugin.backends.common.planner import SAMPLE_ROWS, Execution
from nsa_plugin.backends.common.warm import DENSE
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner
from nsa_plugin.backends.sglang.v32.batch import Batch, step_batch
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.backends.sglang.v32.state import State
from nsa_plugin.decision.plan import Attention, IndexerMode
from nsa_plugin.decision.shapes import BatchShape, Phase
from nsa_plugin.errors import NsaPluginError

SHORT, LONG, CONTEXT = 1024, 4096, 32768  # tokens
FEW, MANY = 1, 64  # requests
V4_ROWS = (1024, 4096, 8192, 16384, 32768)
"""Query tokens of V4's sample prefills, each without a prefix and with the longest context."""


def routes(state: State, max_context: int, draft_tokens: int | None) -> dict[str, Execution]:
    """Return the execution of sample batches by name; none of a kind that is left to the stock path.

    Args:
        state: of an adopted backend.
        max_context: most tokens of a request that the server allows.
        draft_tokens: query tokens of a request that is verified; None without speculative decoding.

    Raises:
        SettingsError, NoProviderError: no kernel supports such a batch; see `decide`.
    """
    found: dict[str, Execution] = {}
    if state.plans_prefill:
        for rows, context in ((SHORT, SHORT), (LONG, CONTEXT)):
            rows, context = min(rows, max_context), min(context, max_context)
            if route := _prefill(state.planner, rows, context):
                found[f"prefill, {rows} of {context} tokens"] = route
        if state.planner.mixes and (route := _prefill(state.planner, rows, context, mixed=True)):
            found[f"prefill with decode steps, {rows} of {context} tokens"] = route
    if state.plans_steps:
        found |= step_routes(state.planner, max_context, draft_tokens)
    return found


def step_routes(planner: SglangPlanner, max_context: int, draft_tokens: int | None) -> dict[str, Execution]:
    """As `routes`, for decode and verify steps only."""
    batches = {
        f"decode, {FEW} request": step_batch(Phase.DECODE, FEW, FEW, max_context),
        f"decode, {MANY} requests": step_batch(Phase.DECODE, MANY, MANY, max_context),
    }
    if draft_tokens:
        rows = MANY * draft_tokens
        batches[f"verify, {MANY} requests"] = step_batch(Phase.TARGET_VERIFY, MANY, rows, max_context)
    return {name: planner.step_execution(batch) for name, batch in batches.items()}


def v4_prefills(planner: SglangV4Planner, max_context: int) -> dict[str, Execution]:
    """As `routes`, for prefills of a V4 backend; without those that no kernel supports."""
    found: dict[str, Execution] = {}
    for rows in V4_ROWS:
        for context in dict.fromkeys((min(rows, max_context), max_context)):
            with suppress(NsaPluginError):  # this size may never occur
                if route := _prefill(planner, min(rows, context), context):
                    found[f"prefill, {min(rows, context)} of {context} tokens"] = route
    return found


def own_kernels(state: State, max_context: int, *, sharded: bool = False) -> set[tuple[str, str]]:
    """Return (op, provider) of every plugin kernel that batches of some size take.

    Args:
        sharded: for batches that reshard, whose kernels run with all heads; else for the others.
    """
    found: list[Execution | None] = []
    planner = state.planner
    for rows in SAMPLE_ROWS:
        with suppress(NsaPluginError):  # no kernel supports this size, which may never occur
            if state.plans_steps:
                found.append(planner.step_execution(step_batch(Phase.DECODE, rows, rows, max_context)))
            if state.plans_prefill and rows <= max_context:
                found += [_prefill(planner, rows, rows), _prefill(planner, rows, max_context)]
                if planner.mixes:  # without a copy another kernel may be the fastest
                    found.append(_prefill(planner, rows, max_context, mixed=True))
    taken = [route for route in found if route is not None and route.own]
    return {(route.op, route.plan.provider) for route in taken if route.plan.token_shard == sharded}


def attends_densely(planner: SglangPlanner, max_context: int) -> bool:
    """Return whether prompts of some size attend densely with the plugin's kernel."""
    for rows in SAMPLE_ROWS:
        with suppress(NsaPluginError):  # as above
            route = _prefill(planner, min(rows, max_context), min(rows, max_context))
            if route is not None and route.dense and route.plan.provider == DENSE:
                return True
    return False


def indexers(planner: SglangPlanner, max_context: int) -> set[str]:
    """Return the providers that select for prefills of some size, alone or with the longest context."""
    found: set[str] = set()
    for rows in (*SAMPLE_ROWS, *V4_ROWS):
        for context in (min(rows, max_context), max_context):
            with suppress(NsaPluginError):  # as above
                route = _prefill(planner, min(rows, context), context)
                if route is not None and route.plan.indexer.mode is IndexerMode.TOPK:
                    found.add(route.plan.indexer.provider)
    return found


def describe(route: Execution) -> str:
    """Describe an execution and its reasons in one line."""
    plan = route.plan
    if plan.attention is Attention.MHA_ONE_SHOT:
        return f"{plan.attention} by {plan.provider}; {plan.reasons['attention']}"
    chosen = f"{plan.attention} by {plan.provider}" + (" after dequantisation" if plan.dequantize_kv else "")
    text = f"{chosen} on SGLang's path {route.path}; {plan.reasons['provider']}"
    if plan.phase is Phase.EXTEND and plan.indexer.mode is IndexerMode.TOPK:
        text += f"; selection by {plan.indexer.provider}, {plan.indexer.rows_per_chunk} query tokens at once"
    return text + f"; {'resharded' if plan.token_shard else 'heads stay local'}: {plan.reasons['token_shard']}"


def _prefill(planner: SglangPlanner, rows: int, context: int, *, mixed: bool = False) -> Execution | None:
    shape = BatchShape.from_lengths(Phase.EXTEND, [rows], [context])
    batch = Batch(shape, mixed=mixed, requests=[("", rows, context)])
    return planner.prefill_execution(batch, no_dense="")
