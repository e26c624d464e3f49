"""Sparse attention: the routes in order of preference, the choice among them, and the sentences for it.

The order is upstream's, and where the plugin has measured several routes, their times'. Providers: sglang #16758,
#17662. Head padding: #13646.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from nsa_plugin.decision import timings
from nsa_plugin.decision.case import DEQUANTIZE_KV_PER_ROW, Case, batch_sentence, count, each_of, in_time, route_refusal
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, OPS, KernelLoad, Refusal, Route, first, unranked
from nsa_plugin.decision.timings import TimeEstimate
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.architectures import is_sm120
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.manifest import MANIFEST

# Times that differ by less than this keep their order: another run may turn them around.
NEARLY_EQUAL = 0.03
# Bytes read and written to copy a context token to bf16; V4's selected keys are every fourth token's.
COPY_BYTES = {"v32_fp8": 656 + 2 * 576, "v4_fp8": (584 + 2 * 512) // 4}
# The part of the device memory's rate that such a copy reaches at least on SM90, in bytes a microsecond.
COPY_RATE = 3e6
# Libraries whose sparse kernels the stock engines run.
UPSTREAM = frozenset({"flash_mla", "fa3", "trtllm", "flashinfer_sm120"})
# On SM100 the trtllm kernel is quicker than a padded FlashMLA up to this many heads (vLLM #35807, #33451).
TRTLLM_HEADS = 16


def sparse_routes(case: Case, load: KernelLoad, *, usable: bool = False) -> tuple[Route, ...]:
    """Every route for a batch that attends to selected tokens, the preferred first.

    Measured routes are ordered by their times, within the places that they have among the others.

    Args:
        usable: without those that support no batch.
    """
    stock = case.stock_prefill if stock_route_first(case, load) else None
    pays = case.dequantizing_pays
    order: _Order = case.once(("order", case.extend, load.heads, pays, stock), lambda: _order(case, load, stock))
    between = bisect_right(order.bounds, load.rows)
    if between not in order.kept:
        order.kept[between] = _same_between(order, between)
    sorted_routes = order.kept[between]
    longer_copy = _longer_copy(case) if order.copies else 0.0
    if sorted_routes is None or longer_copy:
        sorted_routes = _by_time(order, load.rows, longer_copy)
    return sorted_routes.usable if usable else sorted_routes.all


class _Sorted(NamedTuple):
    """Routes by time, and the usable ones of them."""

    all: tuple[Route, ...]
    usable: tuple[Route, ...]


class _Order(NamedTuple):
    """Routes in the order used without measured times.

    Attributes:
        timed: (place, measured points) of the routes that have a measured time; the last route's does not count.
        usable: the routes that support some batch.
        copies: one of the timed routes copies the cache, so that its time depends on the context too.
        bounds: the numbers of query tokens that one of them was measured with, ascending.
        kept: what `_same_between` returned, by its number.
    """

    routes: tuple[Route, ...]
    timed: tuple[tuple[int, timings.Points], ...]
    usable: frozenset[Route]
    copies: bool
    bounds: tuple[int, ...]
    kept: dict[int, _Sorted | None]


def _order(case: Case, load: KernelLoad, stock: Route | None) -> _Order:
    """The usual order, with the stock engine's route first if one is given."""
    routes = usual_sparse_routes(case, load)
    if stock is not None:
        routes = (stock, *(route for route in routes if route != stock))
    kernels = [case.kernel(route, load.heads) for route in routes]
    timed = tuple((place, kernel.times[1]) for place, kernel in enumerate(kernels[:-1]) if kernel.times[1])
    usable = frozenset(route for route, kernel in zip(routes, kernels, strict=True) if kernel.usable)
    copies = any(routes[place].dequantize_kv for place, _ in timed)
    bounds = sorted({rows for _, points in timed for rows, _ in points})
    return _Order(routes, timed, usable, copies, tuple(bounds), {})


def _same_between(order: _Order, between: int) -> _Sorted | None:
    """The order by time that holds from one measured number of query tokens to the next; None if it changes there.

    No copy is longer than the measured ones. Every time is on a straight line there, so of two times one is less than
    the other, or nearly equal to it, everywhere if it is at both ends. Beyond the last number all are in proportion.

    Args:
        between: the number of `order.bounds` up to the batch's query tokens.
    """
    low = order.bounds[between - 1] if between else 0
    high = order.bounds[between] - 1 if between < len(order.bounds) else low
    return _by_time(order, low) if _compared(order, low) == _compared(order, high) else None


def _compared(order: _Order, rows: int) -> dict[tuple[int, int], bool]:
    """Whether the first of two routes, given by their places, is quicker than the second or nearly as quick."""
    times = _times_at(order, rows)
    return {
        (one, other): us <= others * (1 + NEARLY_EQUAL) for one, us in times.items() for other, others in times.items()
    }


def _times_at(order: _Order, rows: int, longer_copy: float = 0.0) -> dict[int, float]:
    """Microseconds by the places of the routes that have a time for `rows` query tokens, as in `estimate`."""
    times = {}
    for place, points in order.timed:
        copies = order.routes[place].dequantize_kv
        if not copies or rows >= points[0][0]:
            times[place] = timings.time_at(points, rows) + (longer_copy if copies else 0.0)
    return times


def _by_time(order: _Order, rows: int, longer_copy: float = 0.0) -> _Sorted:
    """Order the routes that have a time by it, within the places that they have among the others."""
    times = _times_at(order, rows, longer_copy)
    places = list(times)
    routes = list(order.routes)
    for place in places:
        limit = min(times.values()) * (1 + NEARLY_EQUAL)
        quickest = next(one for one, us in times.items() if us <= limit)
        del times[quickest]
        routes[place] = order.routes[quickest]
    return _Sorted(tuple(routes), tuple(route for route in routes if route in order.usable))


def stock_route_first(case: Case, load: KernelLoad) -> bool:
    """Whether the stock engine's route is known and no measurement shows another one to be faster.

    Its time is unknown where nothing was measured and, if it copies the cache, for fewer query tokens than were
    measured. Then the times at the fewest measured ones decide. `large_q_rows` keeps V4's decode kernel.
    """
    stock = case.stock_prefill
    if stock is None or (case.model.family == "v4" and case.settings.large_q_rows):
        return False
    if _has_time(case, stock, load):
        return False
    least = _least_measured(case, stock, load)
    own = estimate(case, stock, least)
    if own is None:
        return True
    for route in usual_sparse_routes(case, load):
        time = estimate(case, route, least)
        if route != stock and time is not None and time.us < own.us and route_refusal(case, route, load) is None:
            return False
    return True


def _least_measured(case: Case, route: Route, load: KernelLoad) -> KernelLoad:
    """The load with the fewest query tokens that a route was measured with, if it was."""
    _, points = case.kernel(route, load.heads).times
    return load._replace(rows=points[0][0]) if points else load


def usual_sparse_routes(case: Case, load: KernelLoad) -> tuple[Route, ...]:
    """The same in the order used without measured times; the last one is the last in any case.

    Upstream kernels come first: the stock engines run them, and nothing shows that the plugin's are faster there.
    """
    return _usual(
        case.extend, case.device.sm, load.heads, case.model.fp8_cache, case.dequantizing_pays, tuple(MANIFEST)
    )


@functools.cache  # the same objects every time, so that each makes its words once
def _usual(
    extend: bool, sm: int, heads: int, fp8_cache: bool, dequantizing_pays: bool, known: tuple[str, ...]
) -> tuple[Route, ...]:
    shape = Attention.SPARSE_PREFILL if extend else Attention.SPARSE_DECODE
    names = ("cuda", "triton", "trtllm", "fa3", "reference")
    cuda, triton, trtllm, fa3, reference = (Route(shape, library) for library in names)
    flash_mla = _flash_mla_routes(fp8_cache, dequantizing_pays)
    if not extend:
        # SGLang's defaults: FA3 on SM90 and TRT-LLM on SM100 for a bf16 cache, FlashMLA for fp8.
        upstream = (fa3, trtllm, *flash_mla)
    elif sm >= 100 and heads <= TRTLLM_HEADS:
        upstream = (trtllm, *flash_mla)
    else:
        upstream = (*flash_mla, trtllm)
    others = [Route(shape, library) for library in unranked(OPS[shape], known)]
    if is_sm120(sm):
        # vLLM runs them there; the start-up trial has compared them with the plugin's.
        first = [route for route in others if route.library in UPSTREAM]
        upstream, others = (*first, *upstream), [route for route in others if route not in first]
    return (*upstream, cuda, triton, *others, reference)


def _flash_mla_routes(fp8_cache: bool, dequantizing_pays: bool) -> tuple[Route, ...]:
    if not fp8_cache:
        return (Route(Attention.SPARSE_PREFILL, "flash_mla"),)
    return (BF16_COPY, FLASH_MLA_DECODE) if dequantizing_pays else (FLASH_MLA_DECODE, BF16_COPY)


def estimate(case: Case, route: Route, load: KernelLoad) -> TimeEstimate | None:
    """The time of a route for the batch, or None where no measurement says.

    The measured time of a route that copies the cache includes a copy of `timings.COPIED_CONTEXT` tokens. A longer
    context adds to it; a shorter one does not reduce it. With fewer query tokens than were measured the copy is most of
    the time, and the cost of a query token cannot be separated from it.
    """
    if not _has_time(case, route, load):
        return None
    from_heads, points = case.kernel(route, load.heads).times
    found = timings.estimate_from(from_heads, points, load.rows, load.heads)
    return found.plus(_longer_copy(case)) if found is not None and route.dequantize_kv else found


def _has_time(case: Case, route: Route, load: KernelLoad) -> bool:
    _, points = case.kernel(route, load.heads).times
    return bool(points) and not (route.dequantize_kv and load.rows < points[0][0])


def _longer_copy(case: Case) -> float:
    """Microseconds that a copy of the batch's context takes in addition to the measured one's."""
    longer = max(case.batch.total_kv_len - timings.COPIED_CONTEXT, 0)
    return longer * COPY_BYTES[case.model.kv_layout] / COPY_RATE


def pick_sparse(case: Case, load: KernelLoad) -> Route:
    """The route of the batch.

    Raises:
        SettingsError: the library that the settings name does not support the batch.
        NoProviderError: no installed library does.
    """
    if case.asked == "auto" and not case.constraints.preferred:
        for route in sparse_routes(case, load, usable=True):
            if route_refusal(case, route, load) is None:
                return route
    picked, refused = _picked(case, load)
    if picked is not None:
        return picked
    if case.asked == "auto":
        raise NoProviderError(
            f"no installed kernel library supports {batch_sentence(case.batch)}; {load.heads} heads, "
            f"{case.model.kv_layout} cache, {case.device.where}. " + "; ".join(map(str, refused))
        )
    work = [r.library for r in sparse_routes(case, load) if route_refusal(case, r, load, r.library) is None]
    raise SettingsError(
        f"{case.backend_setting} is {case.asked}, which does not support {batch_sentence(case.batch)}. "
        f"{'; '.join(map(str, refused))}. What works here: {', '.join(dict.fromkeys(work)) or 'nothing'}"
    )


def refused_before(case: Case, load: KernelLoad) -> list[Refusal]:
    """The routes before the one of the batch, which do not support it, and why."""
    return _picked(case, load)[1]


def _picked(case: Case, load: KernelLoad) -> tuple[Route | None, list[Refusal]]:
    """(the route of the batch, or None if no library that the settings allow supports it; the refusals before it)."""
    asked, preferred = case.asked, case.constraints.preferred
    routes = list(sparse_routes(case, load))
    wanted = [route for route in routes if asked in ("auto", route.library)]
    # Preferred routes come first; each refusal is named once.
    wanted.sort(key=lambda route: route not in preferred)
    return first(wanted, lambda route: route_refusal(case, route, load, asked))


# ---------------------------------------------------------------------------------------------------
# Reasons


def attention_sentence(case: Case, route: Route, load: KernelLoad, refused: Sequence[Refusal]) -> str:
    """Why this kernel of the library, with its other kernels that were refused."""
    model, batch = case.model, case.batch
    kernel = "prefill" if route.attention is Attention.SPARSE_PREFILL else "decode"
    window = f" and a window of {model.sliding_window}" if model.sliding_window else ""
    attend, each = ("attends", "") if load.rows == 1 else ("attend", " each")
    selected = count(model.index_topk, "selected KV token")
    rows = f"{count(load.rows, 'query token')} {attend} to {selected}{window}{each}"
    if route.dequantize_kv:
        sentence = f"{rows}; {route.library}'s {kernel} kernel reads a bf16 copy of the cache"
        if case.dequantizing_pays:
            sentence += (
                f", because {count(batch.total_kv_len, 'context token')} {'is' if batch.total_kv_len == 1 else 'are'} "
                f"fewer than {DEQUANTIZE_KV_PER_ROW} for {each_of(batch.num_tokens, 'query token')}"
            )
    else:
        sentence = f"{rows}; {route.library}'s {kernel} kernel reads the {model.kv_layout} cache in place"
    same = [refusal for refusal in refused if refusal.route.library == route.library]
    preferred = [f"{case.constraints.preferred_by} asks for it"] if _is_preferred(case, route) else []
    return "; ".join([sentence, *preferred, *(f"refused {refusal}" for refusal in same)])


def provider_sentence(case: Case, route: Route, load: KernelLoad, refused: Sequence[Refusal]) -> str:
    """Why this library: asked for, the quickest by its times, or the first; and the preferred ones refused."""
    dense = route.attention is Attention.MHA_ONE_SHOT
    times = [] if dense else _times(case, route, load)
    if case.asked != "auto" and not dense:
        return "; ".join([f"{case.constraints.asked_by or case.backend_setting} asks for {case.asked}", *times])
    if _is_preferred(case, route):
        return "; ".join([f"{case.constraints.preferred_by} asks for {route.library}", *times])
    if case.device.kind == "cpu":
        return "on a CPU only the plugin's plain-torch reference runs"
    others = [refusal for refusal in refused if refusal.route.library != route.library]
    chosen = times or [f"{route.library} is the first that supports the batch on {case.device.where}"]
    untimed = [] if dense or times else _untimed(case, route, load)
    return "; ".join([*chosen, *untimed, *(f"refused {refusal}" for refusal in others)])


def _is_preferred(case: Case, route: Route) -> bool:
    return case.asked == "auto" and route in case.constraints.preferred


def _untimed(case: Case, route: Route, load: KernelLoad) -> list[str]:
    """That the order comes from no measured time, and why there is none; nothing if one route has a time."""
    first = stock_route_first(case, load) and route == case.stock_prefill
    if any(estimate(case, other, load) is not None for other in sparse_routes(case, load)):
        if not first:
            return []
        fewest = _least_measured(case, route, load).rows
        known = "for it" if fewest == load.rows else f"for it below {fewest} query tokens, where it was the fastest"
        return [f"no times on {case.device.where} {known}, so the stock engine's route comes first"]
    model = case.model
    selection = _selection(model.index_topk, model.sliding_window)
    sentence = f"no times on {case.device.where} for {selection}, {count(load.heads, 'head')}, {model.kv_layout} cache"
    op = Op.SPARSE_MLA_PREFILL if case.extend else Op.SPARSE_MLA_DECODE
    if found := timings.nearest(case.device.sm, op, model.family, case.filed or model.kv_layout, load.heads):
        sm, name, heads = found
        layout, selected = timings.filed_for(name)
        measured = f"{_selection(*selected)}, {count(heads, 'head')}, {layout} cache"
        sentence += f" (nearest measured: {timings.gpu_of(sm, op, name)}, {measured})"
    if first:
        return [f"{sentence}, so the stock engine's route comes first"]
    if route.library in UPSTREAM:
        return [f"{sentence}, so an upstream kernel comes first"]
    return [sentence]


def _selection(topk: int, window: int) -> str:
    return count(topk, "selected token") + (f" and a window of {window}" if window else "")


def _times(case: Case, route: Route, load: KernelLoad) -> list[str]:
    """The times that put this route before the others that support the batch: one sentence or none."""
    own = estimate(case, route, load)
    rivals = {
        other: time
        for other in sparse_routes(case, load)
        if other != route
        and case.asked in ("auto", other.library)
        and route_refusal(case, other, load, case.asked) is None
        and (time := estimate(case, other, load)) is not None
    }
    if own is None or not rivals:
        return []
    op = Op.SPARSE_MLA_PREFILL if case.extend else Op.SPARSE_MLA_DECODE
    gpu = timings.gpu_of(case.device.sm, op, case.filed)
    sentence = compared({_named(other): time for other, time in {route: own, **rivals}.items()}, gpu)
    if case.model.dcp_size > 1:
        sentence += f", measured with every selected token on one rank, while {case.model.dcp_size} ranks share them"
    if own.us > min(time.us for time in rivals.values()) and case.asked == "auto" and not _is_preferred(case, route):
        sentence += f", less than {NEARLY_EQUAL:.0%} apart, so their usual order holds"
    return [sentence]


def _named(route: Route) -> str:
    """The kernel in words: "cuda", "flash_mla after dequantisation", "flash_mla decode kernel"."""
    if route.dequantize_kv:
        return f"{route.library} after dequantisation"
    return f"{route.library} decode kernel" if route == FLASH_MLA_DECODE else route.library


def compared(times: dict[str, TimeEstimate], gpu: str) -> str:
    """Times side by side and where each comes from, said once if it is the same for all."""
    sources = [time.source(gpu) for time in times.values()]
    if len(set(sources)) == 1:
        listed = ", ".join(f"{name} {in_time(time.us)}" for name, time in times.items())
        return f"{listed} ({sources[0]})"
    return ", ".join(f"{name} {in_time(time.us)} ({time.source(gpu)})" for name, time in times.items())


def dequantize_sentence(case: Case, route: Route, refused: Sequence[Refusal] = ()) -> str:
    """Why the cache is copied to bf16, or is not."""
    layout = case.model.kv_layout
    if not case.model.fp8_cache:
        return f"the {layout} cache is not quantised"
    if route.attention is not Attention.MHA_ONE_SHOT:
        reads = "bf16 rows only" if route.dequantize_kv else f"{layout} itself"
        sentence = f"{route.library}'s kernel reads {reads}"
        copies = [refusal for refusal in refused if refusal.route.dequantize_kv]
        if copies and not case.constraints.copy_fits:
            return f"{sentence}; {copies[0].reason}"
        return sentence
    if route.dequantize_kv:
        return f"older keys of a prefix come from the {layout} cache, and dense attention reads bf16"
    return "no request has a prefix, so every key comes from this batch"


def head_padding(case: Case, route: Route, heads: int) -> tuple[int, str]:
    """(heads that the kernel gets where it does not support `heads`, else 0; why)."""
    return case.kernel(route, heads).padding
