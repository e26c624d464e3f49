"""The indexer's part of a plan: which provider scores, how many query tokens at a time, and which one schedules.

Chunks of query tokens follow sglang #13646 (float32 logits of [query tokens, context] ran out of memory under tensor
parallelism). DeepGEMM's own scheduling kernel has a row limit (#25502) and is compiled again for every 32 requests;
on SM90 the plugin schedules for it, for any number of query tokens.

In a V4 prefill the logits and the bf16 rows share one budget (sglang #25502 copied the whole cache as well): what the
rows take is subtracted, so that both together stay within the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nsa_plugin.decision import timings, v4_memory
from nsa_plugin.decision.case import Case, count, each_of, in_time
from nsa_plugin.decision.plan import IndexerMode, IndexerPlan, Plan, Reason
from nsa_plugin.decision.routes import Route, capability_refusal, rows_refusal
from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import MIB, DeviceProfile

LOGIT_BYTES = 4
V32_HEADS = 64
"""The heads of DeepSeek-V3.2's indexer, whose times stand for another number of heads that was not measured."""
# The logits keep at least this share of the budget, whatever else is held: less would leave the device idle.
LEAST_SHARE = 8
LIBRARIES = ("deep_gemm", "triton", "reference")
"""Libraries with an indexer, the preferred first."""
UNPAGED = "cuda"
"""A library whose indexer keeps no logits and reads no pages: for prefills that it was measured to be quickest for."""
UNPAGED_KEYS = 2**20
"""Most keys of a batch for it. With more it would sample fewer of them, and its thresholds would be worse."""


def is_unpaged(plan: Plan) -> bool:
    """Whether a plan's selection is made without logits in memory."""
    return plan.indexer.provider == UNPAGED


def topk_plan(case: Case, route: Route, *, shared: bool = False) -> tuple[IndexerPlan, Callable[[], dict[str, Reason]]]:
    """The plan of an indexer that selects, and a function that returns its reasons.

    Args:
        route: attention's route; on a GPU the reference indexer runs only with the reference attention.
        shared: the ranks reshard, and each selects only for the query tokens that it attends.

    Raises:
        NoProviderError: no installed library supports the model's indexer.
    """
    model, batch = case.model, case.batch
    rows = case.sharded_load.rows if shared else batch.num_tokens
    unpaged = _unpaged(case, rows)
    provider, why_first = (UNPAGED, "") if unpaged else _provider(case, route.library)
    metadata, why_metadata = _metadata_provider(case, provider)

    def reasons() -> dict[str, Reason]:
        verb = "is" if model.index_topk == 1 else "are"
        tokens = each_of(batch.num_tokens, "query token")
        selected = f"{count(model.index_topk, 'KV token')} {verb} selected for {tokens}"
        return {
            "indexer": selected + (", by the rank that attends to them" if shared else ""),
            "indexer.provider": _why_unpaged(case, unpaged) if unpaged else why_first,
            "indexer.rows_per_chunk": ("bounds the memory: " if unpaged else "") + _why_rows_per_chunk(case, route),
            "indexer.metadata_provider": why_metadata,
        }

    plan = IndexerPlan(
        mode=IndexerMode.TOPK,
        provider=provider,
        rows_per_chunk=_rows_per_chunk(case, route),
        metadata_provider=metadata,
    )
    return plan, reasons


def selection_us(case: Case, scored: int, rows: int) -> float:
    """Microseconds that a prefill's indexer takes on average over the layers; 0 where no time fits.

    Each measured time is of all pairs of its query tokens and keys, with the heads of DeepSeek-V3.2's indexer. Other
    numbers of heads are taken in proportion, as the products are.

    Args:
        scored: pairs of a query token and a token that it may select.
        rows: query tokens that a rank selects for; they decide which library does it.
    """
    model = case.model
    if not scored or not case.timed or model.family != "v3.2":
        return 0.0
    provider = UNPAGED if _unpaged(case, rows) else _provider(case, "")[0]
    heads, known = case.once(("indexer.times", provider), lambda: _times_by_pairs(case, provider))
    return timings.time_at(known, scored) * model.index_n_heads / heads * model.selecting_layers if known else 0.0


def _times_by_pairs(case: Case, provider: str) -> tuple[int, timings.Points]:
    """(measured indexer heads, (pairs, microseconds) of a library)."""
    for heads in (case.model.index_n_heads, V32_HEADS):
        found = timings.selections(case.device.sm, Op.INDEXER_TOPK, heads, case.model.index_topk)
        points = {one.rows * one.keys: one.us[provider] for one in found if provider in one.us}
        if points:
            return heads, tuple(sorted(points.items()))
    return 0, ()


def _provider(case: Case, attention_provider: str) -> tuple[str, str]:
    """(library of the logits and the top-k, why)."""
    limits = case.once("indexer.limits", lambda: _row_limits(case))
    if limits and case.batch.num_tokens > min(limits):  # a refusal gives the number of query tokens
        return _first_provider(case, attention_provider)
    allows_reference = attention_provider == "reference"
    return case.once(("indexer", allows_reference), lambda: _first_provider(case, attention_provider))


def _unpaged(case: Case, rows: int) -> timings.SelectionTimes | None:
    """The times by which the indexer without logits selects for `rows` query tokens, or None if another one does."""
    if not case.extend or case.constraints.stock_selects_prefills:
        return None
    measured = case.once("indexer.unpaged", lambda: _unpaged_times(case))
    batch, compression = case.batch, _compression(case)
    if not measured or batch.total_kv_len // compression > UNPAGED_KEYS:
        return None
    # Which request a query token belongs to is not known here.
    keys = batch.total_kv_len // batch.num_requests // compression
    for quickest, times in measured:
        if times.keys <= keys and times.rows <= rows:
            return times if quickest == UNPAGED else None
    return None


def _why_unpaged(case: Case, times: timings.SelectionTimes) -> str:
    listed = ", ".join(f"{name} {in_time(us)}" for name, us in sorted(times.us.items(), key=lambda one: one[1]))
    at = f"{timings.gpu_of(case.device.sm)}, {count(times.rows, 'query token')}, {times.keys} keys"
    return f"no logits in memory, and the least time: {listed} ({at})"


def _unpaged_times(case: Case) -> tuple[tuple[str, timings.SelectionTimes], ...]:
    """(the quickest library, times of those that support the model's indexer), where the one without logits is one.

    The most keys come first.
    """
    found = timings.selections(case.device.sm, Op.INDEXER_TOPK, case.model.index_n_heads, case.model.index_topk)
    if not found or _refusal(case, UNPAGED, "") is not None:
        return ()
    supported = {name for name in (UNPAGED, *LIBRARIES) if _refusal(case, name, "") is None}
    kept = (replace(one, us={name: us for name, us in one.us.items() if name in supported}) for one in found)
    compared = [one for one in kept if UNPAGED in one.us and len(one.us) > 1]
    return tuple((min(one.us, key=one.us.__getitem__), one) for one in reversed(compared))


def _compression(case: Case) -> int:
    return v4_memory.COMPRESSION if case.model.family == "v4" else 1


def _row_limits(case: Case) -> list[int]:
    """The most query tokens of the indexers that have such a limit."""
    kernels = [case.device.capability(name, Op.INDEXER_TOPK) for name in LIBRARIES]
    return [kernel.max_rows for kernel in kernels if kernel and kernel.max_rows is not None]


def _first_provider(case: Case, attention_provider: str) -> tuple[str, str]:
    model, device = case.model, case.device
    refused: list[str] = []
    for library in LIBRARIES:
        refusal = _refusal(case, library, attention_provider)
        if refusal is None:
            why = f"{library} is the first that supports {model.index_n_heads} indexer heads on {device.where}"
            if refused and device.kind != "cpu":
                why += f"; refused {'; '.join(refused)}"
            return library, why
        refused.append(f"{library}: {refusal}")
    raise NoProviderError(
        f"no installed kernel library selects KV tokens for {model.index_n_heads} indexer heads of "
        f"{model.index_head_dim} elements on {device.where}: {'; '.join(refused)}"
    )


def _refusal(case: Case, library: str, attention_provider: str) -> str | None:
    model, device = case.model, case.device
    entry = device.libraries.get(library)
    if entry is None or not entry.available:
        return entry.reason if entry else "unknown to this device profile"
    if library == "reference" and device.kind != "cpu" and attention_provider != "reference":
        return "plain torch, chosen on a GPU only beside a reference attention that a setting asks for"
    capability = device.capability(library, Op.INDEXER_TOPK)
    if capability is None:
        return f"no {Op.INDEXER_TOPK} kernel on {device.where}"
    if capability.heads_given(model.index_n_heads) != model.index_n_heads:
        # More heads would need keys and zero weights for them; nothing pads an indexer.
        return f"supports {capability.heads_in_words} indexer heads; the model has {model.index_n_heads}"
    unfit = capability_refusal(capability, heads=model.index_n_heads, dims=(model.index_head_dim,))
    return unfit or rows_refusal(capability.max_rows, case.batch.num_tokens)


def _rows_per_chunk(case: Case, route: Route) -> int:
    """Query tokens whose float32 logits are held at once."""
    fit = _budget(case, route) // _row_bytes(case)
    if fit >= case.batch.num_tokens:
        return case.batch.num_tokens
    # Few distinct chunk sizes, so that kernels specialised on them are not compiled for every batch.
    return 1 << (fit.bit_length() - 1) if fit else 1


def _why_rows_per_chunk(case: Case, route: Route) -> str:
    tokens, each, budget = case.batch.num_tokens, _row_bytes(case), _budget(case, route)
    limit = f"{budget / MIB:.1f} MiB ({_source(case, route)})"
    fit = budget // each
    if tokens == 1 and fit:
        return f"the logits of one query token, {each} B, fit {limit}"
    if fit >= tokens:
        return f"the logits of all {tokens} query tokens, {each} B each, fit {limit}"
    if fit == 0:
        return f"the logits of one query token take {each} B, more than {limit}, so they are made one by one"
    return f"the logits of {count(fit, 'query token')}, {each} B each, fit {limit}; rounded down to a power of two"


def _row_bytes(case: Case) -> int:
    """Bytes of a query token's logits."""
    return LOGIT_BYTES * max(-(-case.batch.max_kv_len // _compression(case)), 1)


def _budget(case: Case, route: Route) -> int:
    """Bytes that logits may take: what the setting leaves for them, and at most a quarter of the free memory."""
    return min(_logits_budget(case, route), case.device.memory_free // 4)


def _logits_budget(case: Case, route: Route) -> int:
    """Bytes that `logits_budget_mb` leaves for logits."""
    budget = case.settings.logits_budget_mb * MIB
    return budget if case.model.family != "v4" else max(budget - _held(case, route), budget // LEAST_SHARE)


def _held(case: Case, route: Route) -> int:
    """Bytes of the budget that a V4 prefill takes for other things than logits."""
    if not case.extend or case.constraints.workspace_reserved:
        return 0
    return v4_memory.held_bytes(case.model, case.batch, over_rows=route.dequantize_kv)


def _source(case: Case, route: Route) -> str:
    """Where `_budget` comes from."""
    left = _logits_budget(case, route)
    if _budget(case, route) < left:
        return "a quarter of the free memory"
    held = _held(case, route) if case.model.family == "v4" else 0
    if not held:
        return "logits_budget_mb"
    what = "bf16 rows, their indices and gathered keys" if route.dequantize_kv else "gathered keys"
    if left == case.settings.logits_budget_mb * MIB - held:
        return f"logits_budget_mb less {held / MIB:.1f} MiB for {what}"
    return f"1/{LEAST_SHARE} of logits_budget_mb, since {what} take {held / MIB:.1f} MiB"


def _metadata_provider(case: Case, provider: str) -> tuple[str, Reason]:
    """(library of the paged logits' scheduling metadata or "", why)."""
    rows, device = case.batch.num_tokens, case.device
    if provider != "deep_gemm":
        return "", f"{provider} needs no scheduling metadata"
    if case.extend:
        return "", "a prefill's logits are ragged, and only paged logits are scheduled"
    any_rows, limit = case.once("indexer.metadata", lambda: _schedulers(device))
    if any_rows:
        return "triton", lambda: f"the plugin schedules any number of query tokens for DeepGEMM on {device.where}"
    if limit is None or rows <= limit:
        return "deep_gemm", lambda: f"the installed DeepGEMM schedules {count(rows, 'query token')}"
    return (
        "deep_gemm",
        lambda: f"{count(rows, 'query token')} in pieces: the installed DeepGEMM schedules {limit} at once here",
    )


def _schedulers(device: DeviceProfile) -> tuple[bool, int | None]:
    """(whether the plugin schedules DeepGEMM's logits here, most query tokens that DeepGEMM itself schedules)."""
    capability = device.capability("deep_gemm", Op.INDEXER_METADATA)
    plugin = device.has("triton", Op.INDEXER_METADATA) and device.has("deep_gemm", Op.SCHEDULED_LOGITS)
    return plugin, capability.max_rows if capability else None
