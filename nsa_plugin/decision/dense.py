"""Dense attention for short prefills: whether a batch may attend densely, and by which library.

Sources: sglang #12788 and #12964.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from nsa_plugin.decision import timings
from nsa_plugin.decision.case import Case, count, route_refusal
from nsa_plugin.decision.plan import Attention, Reason
from nsa_plugin.decision.routes import KernelLoad, Refusal, Route, first, unranked
from nsa_plugin.decision.sparse import usual_sparse_routes
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.manifest import MANIFEST


def dense_routes() -> tuple[Route, ...]:
    """One-shot dense attention (sglang #12788: FA3 on SM90, TRT-LLM ragged on SM100)."""
    return _dense(tuple(MANIFEST))


@functools.cache
def _dense(known: tuple[str, ...]) -> tuple[Route, ...]:
    libraries = ("fa3", "trtllm", "triton", *unranked(Op.MHA_ONE_SHOT, known), "reference")
    return tuple(Route(Attention.MHA_ONE_SHOT, library) for library in libraries)


def mha_limit(case: Case) -> tuple[int, str]:
    """(longest context, in tokens, that may be attended densely; where the limit comes from).

    Unless `mha_max_kv` gives it, that is the model's index_topk, or less where dense attention was measured to take
    longer from some length on. It does not depend on the batch's lengths, so a part of a batch has the limit of
    the whole. The measurements have no prefix; a context counts as a prompt of its length. With decode context
    parallelism nothing was measured.
    """
    if case.settings.mha_max_kv >= 0:
        return case.settings.mha_max_kv, f"mha_max_kv {case.settings.mha_max_kv}"
    dense, _ = dense_provider(case)
    return case.once(("mha_limit", case.constraints.paths, dense), lambda: _mha_limit(case, dense))


def _mha_limit(case: Case, dense: Route | None) -> tuple[int, str]:
    model = case.model
    if dense is not None and case.timed and model.dcp_size == 1:
        load = KernelLoad(1, model.heads_per_rank)  # one request: a kernel's limit of rows is the batch's concern
        if not case.constraints.copy_fits:  # the limit is one for all batches, whatever their copies take
            case = replace(case, constraints=replace(case.constraints, copy_bytes=None))
        routes = usual_sparse_routes(case, load)
        sparse = tuple(str(route) for route in routes if route_refusal(case, route, load) is None)
        limit = timings.dense_limit(case.device.sm, model.kv_layout, load.heads, str(dense), sparse, model.mha_dims)
        if limit is not None and limit < model.index_topk:
            known = "was measured"
            if model.mha_dims != timings.MHA_DIMS:
                known = f"is estimated, from measurements with heads of {timings.MHA_DIMS},"
            return limit, f"the {limit} up to which {dense.library} {known} to take no longer than sparse attention"
    return model.index_topk, f"mha_max_kv {model.index_topk}"


def dense_ruled_out(case: Case) -> str | None:
    """Why no request of the batch may attend densely, whatever its length; None if one may."""
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
    if case.dense is None:
        case.dense = first(dense_routes(), lambda route: route_refusal(case, route, case.dense_load))
    return case.dense


def pick_dense(case: Case) -> tuple[Route | None, list[Refusal], Reason]:
    """(the dense route or None, the refusals before it, why there is one or none)."""
    batch = case.batch
    if ruled_out := dense_ruled_out(case):
        return None, [], ruled_out
    # No limit exceeds either of these, and most prompts do.
    longest = case.settings.mha_max_kv if case.settings.mha_max_kv >= 0 else case.model.index_topk
    if batch.max_kv_len > longest or batch.max_kv_len > mha_limit(case)[0]:
        whole = case.constraints.no_split if batch.num_requests > 1 else ""
        unsplit = f", and the batch is not split: {whole}" if whole else ""

        def too_long() -> str:
            return f"the longest context of {count(batch.max_kv_len, 'token')} exceeds {mha_limit(case)[1]}{unsplit}"

        return None, [], too_long
    if 0 < batch.attention_workspace_tokens < batch.total_kv_len:
        held = batch.attention_workspace_tokens
        return None, [], lambda: f"{batch.total_kv_len} context tokens exceed the attention workspace of {held}"
    route, refused = dense_provider(case)
    if route is None:
        return None, refused, lambda: "no dense kernel (" + "; ".join(map(str, refused)) + ")"
    if case.constraints.no_dense:
        return None, refused, case.constraints.no_dense
    return (
        route,
        refused,
        lambda: f"the longest context of {count(batch.max_kv_len, 'token')} is within {mha_limit(case)[1]}",
    )
