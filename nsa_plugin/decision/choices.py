"""The rules of one decision, one function a question; each returns the choice and the sentence for it.

Dense attention: sglang #12788 and #12964. Providers: #16758, #17662. Head padding: #13646.
"""

from __future__ import annotations

from collections.abc import Sequence

from nsa_plugin.decision import timings as measured
from nsa_plugin.decision.candidates import (
    DEQUANTIZE_KV_PER_ROW,
    NEARLY_EQUAL,
    OPS,
    Case,
    Load,
    Refusal,
    Route,
    dense_routes,
    estimate_us,
    first,
    route_refusal,
    sparse_routes,
    usual_sparse_routes,
)
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import BatchShape
from nsa_plugin.errors import NoProviderError, SettingsError


def batch_sentence(batch: BatchShape) -> str:
    return (
        f"{batch.phase}: {count(batch.num_requests, 'request')}, {count(batch.num_tokens, 'query row')}, "
        f"the longest context {batch.max_kv_len} of {count(batch.total_kv_len, 'token')} in all"
    )


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# ---------------------------------------------------------------------------------------------------
# Dense attention


def mha_limit(case: Case) -> tuple[int, str]:
    """(longest context, in tokens, that may be attended densely; what says so).

    Unless `mha_max_kv` gives it, that is the model's index_topk, or less where dense attention was measured to take
    longer from some length on. It does not depend on the batch's lengths, so a part of a batch has the limit of
    the whole. The measurements have no prefix; a context counts as a prompt of its length.
    """
    model, asked = case.model, case.settings.mha_max_kv
    if asked >= 0:
        return asked, f"mha_max_kv {asked}"
    dense, _ = dense_provider(case)
    if dense is not None and measured.SELECTIONS[model.kv_layout] == (model.index_topk, model.sliding_window):
        load = Load(1, model.heads_per_rank)  # of one request: a kernel's limit of rows is the whole batch's concern
        routes = usual_sparse_routes(case, load)
        sparse = tuple(str(route) for route in routes if route_refusal(case, route, load) is None)
        limit = measured.dense_limit(case.device.sm, model.kv_layout, load.heads, str(dense), sparse)
        if limit is not None and limit < model.index_topk:
            quicker = f"{dense.library} was measured to take no longer than sparse attention"
            return limit, f"the {limit} up to which {quicker}"
    return model.index_topk, f"mha_max_kv {model.index_topk}"


def dense_ruled_out(case: Case) -> str | None:
    """Why no request of the batch may be dense, whatever its length; None if one may."""
    if not case.extend:
        return f"{case.batch.phase} always selects"
    if case.model.family != "v3.2":
        return f"family {case.model.family} attends to a window and to compressed keys"
    if case.batch.cuda_graph:
        return "a captured graph cannot branch on lengths"
    if case.batch.context_parallel:
        return "the prefill is split over a context-parallel group"
    if case.settings.mha_max_kv == 0:
        return "mha_max_kv is 0"
    return None


def dense_provider(case: Case) -> tuple[Route | None, list[Refusal]]:
    """The route of dense attention, and the refusals before it.

    `prefill_backend` does not choose it: that setting names the library of sparse prefill.
    """
    return first(dense_routes(), lambda route: route_refusal(case, route, case.own_load))


def pick_dense(case: Case) -> tuple[Route | None, list[Refusal], str]:
    """(the dense route or None, the refusals before it, why there is one or none)."""
    batch = case.batch
    if ruled_out := dense_ruled_out(case):
        return None, [], ruled_out
    limit, source = mha_limit(case)
    if batch.max_kv_len > limit:
        return None, [], f"the longest context of {batch.max_kv_len} tokens exceeds {source}"
    if 0 < batch.attention_workspace_tokens < batch.total_kv_len:
        held = batch.attention_workspace_tokens
        return None, [], f"{batch.total_kv_len} context tokens exceed the attention workspace of {held}"
    route, refused = dense_provider(case)
    if route is None:
        return None, refused, "no dense kernel (" + "; ".join(map(str, refused)) + ")"
    return route, refused, f"the longest context of {batch.max_kv_len} tokens is within {source}"


# ---------------------------------------------------------------------------------------------------
# Sparse attention


def pick_sparse(case: Case, load: Load) -> tuple[Route, list[Refusal]]:
    """The route that carries the batch, and the preferred ones that do not.

    Raises:
        SettingsError: the library that the settings name cannot.
        NoProviderError: none can.
    """
    routes = sparse_routes(case, load)
    if case.asked == "auto":
        route, refused = first(routes, lambda route: route_refusal(case, route, load))
        if route is None:
            raise NoProviderError(
                f"no installed kernel library carries {batch_sentence(case.batch)}; {load.heads} heads, "
                f"{case.model.kv_layout} cache, {case.device.where}. " + "; ".join(map(str, refused))
            )
        return route, refused
    named = [route for route in routes if route.library == case.asked]
    route, refused = first(named, lambda route: route_refusal(case, route, load, case.asked))
    if route is None:
        work = [r.library for r in routes if route_refusal(case, r, load, r.library) is None]
        raise SettingsError(
            f"{case.backend_setting} is {case.asked} and cannot carry {batch_sentence(case.batch)}. "
            f"{'; '.join(map(str, refused))}. What works here: {', '.join(dict.fromkeys(work)) or 'nothing'}"
        )
    return route, refused


def attention_sentence(case: Case, route: Route, load: Load, refused: Sequence[Refusal]) -> str:
    """Why this kernel of the library, naming its other kernels that were refused."""
    model, batch = case.model, case.batch
    kernel = "prefill" if route.attention is Attention.SPARSE_PREFILL else "decode"
    window = f" and a window of {model.sliding_window}" if model.sliding_window else ""
    rows = f"{count(load.rows, 'query row')} attend to {model.index_topk} selected tokens{window} each"
    if route.dequantize_kv:
        sentence = f"{rows}; {route.library}'s {kernel} kernel takes them over a bf16 copy of the cache"
        if case.dequantizing_pays:
            sentence += (
                f", because {batch.total_kv_len} context tokens are fewer than {DEQUANTIZE_KV_PER_ROW} "
                f"for each of {count(batch.num_tokens, 'query row')}"
            )
    else:
        sentence = f"{rows}; {route.library}'s {kernel} kernel reads the {model.kv_layout} cache in place"
    same = [refusal for refusal in refused if refusal.route.library == route.library]
    return "; ".join([sentence, *(f"refused {refusal}" for refusal in same)])


def provider_sentence(case: Case, route: Route, load: Load, refused: Sequence[Refusal]) -> str:
    """Why this library: asked for, quickest as measured, or the first; and the preferred ones that were refused."""
    dense = route.attention is Attention.MHA_ONE_SHOT
    times = [] if dense else _times(case, route, load)
    if case.asked != "auto" and not dense:
        return "; ".join([f"{case.backend_setting} asks for {case.asked}", *times])
    if case.device.kind == "cpu":
        return "on a CPU the plugin's plain-torch reference is what runs"
    others = [refusal for refusal in refused if refusal.route.library != route.library]
    chosen = times or [f"{route.library} is the first that carries the batch on {case.device.where}"]
    return "; ".join([*chosen, *(f"refused {refusal}" for refusal in others)])


def _times(case: Case, route: Route, load: Load) -> list[str]:
    """The measured times that put this route before the others that would carry the batch: one sentence or none."""
    own = estimate_us(case, route, load)
    rivals = {
        other: time
        for other in sparse_routes(case, load)
        if other != route
        and case.asked in ("auto", other.library)
        and route_refusal(case, other, load, case.asked) is None
        and (time := estimate_us(case, other, load)) is not None
    }
    if own is None or not rivals:
        return []
    against = " and ".join(f"{other.library}'s {_time(other, time)}" for other, time in rivals.items())
    sentence = (
        f"{route.library} {_time(route, own)} against {against} as measured on {case.device.where} for "
        f"{count(load.heads, 'head')} and {count(load.rows, 'row')}"
    )
    if own > min(rivals.values()):
        sentence += f", less than {NEARLY_EQUAL:.0%} apart, so their usual order holds"
    return [sentence]


def _time(route: Route, time: float) -> str:
    return in_time(time) + (" after dequantisation" if route.dequantize_kv else "")


def in_time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 999.5 else f"{us:.3g} us"


# ---------------------------------------------------------------------------------------------------
# Dequantisation, heads


def dequantize_sentence(case: Case, route: Route) -> str:
    layout = case.model.kv_layout
    if not case.model.fp8_cache:
        return f"the {layout} cache is not quantised"
    if route.attention is not Attention.MHA_ONE_SHOT:
        reads = "bf16 rows only" if route.dequantize_kv else f"{layout} itself"
        return f"{route.library}'s kernel reads {reads}"
    if route.dequantize_kv:
        return f"older keys of a prefix come from the {layout} cache, and dense attention reads bf16"
    return "no request has a prefix, so every key comes from this batch"


def head_padding(case: Case, route: Route, heads: int) -> tuple[int, str]:
    """(heads that the kernel is given where it does not take `heads`, else 0; why)."""
    capability = case.device.capability(route.library, OPS[route.attention], route.layout_read(case.model))
    given = capability.heads_given(heads) if capability else None
    if capability is None or given is None or given == heads:
        return 0, f"{route.library} takes {count(heads, 'head')} as they are"
    return given, (
        f"{route.library}'s kernel on {case.device.where} takes {capability.heads_in_words} heads; there are {heads}"
    )
