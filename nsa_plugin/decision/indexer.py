"""The indexer's part of a plan: which provider scores, how many query tokens at a time, and which one schedules.

Chunks of query tokens follow sglang #13646 (float32 logits of [query tokens, context] ran out of memory under tensor
parallelism). DeepGEMM's own scheduling kernel has a row limit (#25502) and is compiled again for every 32 requests;
on SM90 the plugin schedules for it, for any number of query tokens.

In a V4 prefill the logits and the bf16 rows share one budget (sglang #25502 copied the whole cache as well): what the
rows take is subtracted, so that both together stay within the setting.
"""

from __future__ import annotations

from nsa_plugin.decision import v4_memory
from nsa_plugin.decision.case import Case, count
from nsa_plugin.decision.plan import IndexerMode, IndexerPlan
from nsa_plugin.decision.routes import Route, capability_refusal
from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import MIB

LOGIT_BYTES = 4
# The logits keep at least this share of the budget, whatever else is held: less would leave the device idle.
LEAST_SHARE = 8


def topk_plan(case: Case, route: Route, *, shared: bool = False) -> tuple[IndexerPlan, dict[str, str]]:
    """The plan of an indexer that selects, and its reasons.

    Args:
        route: attention's route; on a GPU the reference indexer runs only with the reference attention.
        shared: the ranks reshard, and each selects only for the query tokens that it attends.

    Raises:
        NoProviderError: no installed library supports the model's indexer.
    """
    model, batch = case.model, case.batch
    provider, why_provider = _provider(case, route.library)
    rows, why_rows = _rows_per_chunk(case, route)
    metadata, why_metadata = _metadata_provider(case, provider)
    plan = IndexerPlan(mode=IndexerMode.TOPK, provider=provider, rows_per_chunk=rows, metadata_provider=metadata)
    whose = ", by the rank that attends to them" if shared else ""
    each = f"each of {count(batch.num_tokens, 'query token')}{whose}"
    return plan, {
        "indexer": f"{model.index_topk} KV tokens are selected for {each}",
        "indexer.provider": why_provider,
        "indexer.rows_per_chunk": why_rows,
        "indexer.metadata_provider": why_metadata,
    }


def _provider(case: Case, attention_provider: str) -> tuple[str, str]:
    model, device = case.model, case.device
    refused: list[str] = []
    for library in ("deep_gemm", "triton", "reference"):
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
    return capability_refusal(
        capability, heads=model.index_n_heads, rows=case.batch.num_tokens, dims=(model.index_head_dim,)
    )


def _rows_per_chunk(case: Case, route: Route) -> tuple[int, str]:
    """(query tokens whose float32 logits are held at once, why)."""
    batch = case.batch
    compression = v4_memory.COMPRESSION if case.model.family == "v4" else 1
    row_bytes = LOGIT_BYTES * max(-(-batch.max_kv_len // compression), 1)
    asked, source = _logits_budget(case, route)
    quarter = case.device.memory_free // 4
    budget, source = (asked, source) if asked <= quarter else (quarter, "a quarter of the free memory")
    limit = f"{budget / MIB:.1f} MiB ({source})"
    fit, tokens = budget // row_bytes, count(batch.num_tokens, "query token")
    if fit >= batch.num_tokens:
        return batch.num_tokens, f"the logits of all {tokens}, {row_bytes} B each, fit {limit}"
    if fit == 0:
        return 1, f"the logits of one query token take {row_bytes} B, more than {limit}, so they are made one by one"
    # Few distinct chunk sizes, so that kernels specialised on them are not compiled for every batch.
    bucket = 1 << (fit.bit_length() - 1)
    return (
        bucket,
        f"the logits of {count(fit, 'query token')}, {row_bytes} B each, fit {limit}; rounded down to a power of two",
    )


def _logits_budget(case: Case, route: Route) -> tuple[int, str]:
    """(bytes that the setting leaves for logits, where the limit comes from)."""
    budget = case.settings.logits_budget_mb * MIB
    if case.model.family != "v4" or not case.extend:
        return budget, "logits_budget_mb"
    held = v4_memory.held_bytes(case.model, case.batch, over_rows=route.dequantize_kv)
    what = "bf16 rows, their indices and gathered keys" if route.dequantize_kv else "gathered keys"
    if budget - held >= budget // LEAST_SHARE:
        return budget - held, f"logits_budget_mb less {held / MIB:.1f} MiB for {what}"
    return budget // LEAST_SHARE, f"1/{LEAST_SHARE} of logits_budget_mb, since {what} take {held / MIB:.1f} MiB"


def _metadata_provider(case: Case, provider: str) -> tuple[str, str]:
    """(library of the paged logits' scheduling metadata or "", why)."""
    batch, device = case.batch, case.device
    if provider != "deep_gemm":
        return "", f"{provider} needs no scheduling metadata"
    if case.extend:
        return "", "a prefill's logits are ragged, and only paged logits are scheduled"
    if device.has("triton", Op.INDEXER_METADATA) and device.has("deep_gemm", Op.SCHEDULED_LOGITS):
        return "triton", f"the plugin schedules any number of query tokens for DeepGEMM on {device.where}"
    capability = device.capability("deep_gemm", Op.INDEXER_METADATA)
    limit = capability.max_rows if capability else None
    if limit is None or batch.num_tokens <= limit:
        return "deep_gemm", f"the installed DeepGEMM schedules {count(batch.num_tokens, 'query token')}"
    return (
        "deep_gemm",
        f"{count(batch.num_tokens, 'query token')} in pieces: the installed DeepGEMM schedules {limit} at once here",
    )
