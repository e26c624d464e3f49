"""One decision: `decide` routes a batch, `partition` splits a prefill first, `validate` checks at start-up.

Pure: no torch, no engine, no I/O; the same arguments give the same plan. That there is one place that
decides follows sglang #13544; the rules themselves are in `choices`, `candidates`, `sharding` and `indexing`, each
with the pull request that it follows. Limits come from the `DeviceProfile`, never from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nsa_plugin.decision import choices
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.candidates import Case, Refusal, Route
from nsa_plugin.decision.indexer import topk_plan
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError, SettingsError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings


@dataclass(frozen=True)
class Part:
    """Requests of a batch that share a plan.

    Attributes:
        requests: their places in the batch, ascending.
        plan: their plan.
        batch: their shape.
    """

    requests: tuple[int, ...]
    plan: Plan
    batch: BatchShape


def decide(
    model: ModelShape, batch: BatchShape, device: DeviceProfile, settings: Settings, *, keeps_heads: str = ""
) -> Plan:
    """The plan of a batch.

    `Plan.reasons` has a sentence for every field of the plan, the indexer's own under "indexer.<field>".

    Args:
        model: the model on this rank.
        batch: the batch, or the part of one that shares a plan.
        device: what this machine has; `memory_free` is taken as free now.
        settings: what the user chose.
        keeps_heads: the engine's reason why the ranks do not trade heads for tokens, whatever speaks for it; "": they
            may.

    Raises:
        SettingsError: a setting contradicts the model, the device, or what this batch needs.
        NoProviderError: no installed kernel carries the batch; lists each and why not.
    """
    _check_settings(model, device, settings)
    if batch.phase is Phase.IDLE or batch.num_tokens == 0:
        return _idle_plan(batch)
    case = Case(model, batch, device, settings)
    route, refused, why = choices.pick_dense(case)
    return _sparse_plan(case, why, keeps_heads) if route is None else _dense_plan(case, route, refused, why)


def partition(
    model: ModelShape,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    phase: Phase,
    device: DeviceProfile,
    settings: Settings,
    *,
    cuda_graph: bool = False,
    context_parallel: bool = False,
    attention_workspace_tokens: int = 0,
    keeps_heads: str = "",
) -> tuple[Part, ...]:
    """A batch split so that one long prompt does not take dense attention from the short ones.

    Only a prefill is split: into parts of dense requests, each within the workspace, then one part of
    the sparse requests, then one of the requests that have no rows. Every request is in exactly one
    part and keeps its order within it. No requests, no parts.

    Args:
        q_lens, kv_lens: new rows and whole context of each request, in tokens.
        cuda_graph, context_parallel, attention_workspace_tokens: see `BatchShape`.
        keeps_heads: of all parts; see `decide`.

    Raises:
        ShapeError: the lengths cannot belong together.
        SettingsError, NoProviderError: see `decide`.
    """

    def shape(requests: Sequence[int]) -> BatchShape:
        return BatchShape.from_lengths(
            phase,
            [q_lens[request] for request in requests],
            [kv_lens[request] for request in requests],
            cuda_graph=cuda_graph,
            context_parallel=context_parallel,
            attention_workspace_tokens=attention_workspace_tokens,
        )

    def part(requests: Sequence[int]) -> Part:
        batch = shape(requests)
        return Part(tuple(requests), decide(model, batch, device, settings, keeps_heads=keeps_heads), batch)

    everything = range(len(q_lens))
    whole = BatchShape.from_lengths(phase, q_lens, kv_lens)
    if phase is not Phase.EXTEND or whole.num_tokens == 0:
        return (part(everything),) if everything else ()
    live = [request for request in everything if q_lens[request]]
    empty = [request for request in everything if not q_lens[request]]
    dense, sparse = _split_dense(Case(model, shape(live), device, settings), live, kv_lens)
    return tuple(part(requests) for requests in (*dense, sparse, empty) if requests)


def _split_dense(case: Case, live: Sequence[int], kv_lens: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """(groups of requests that run dense, those that run sparse)."""
    if choices.dense_ruled_out(case) or choices.dense_provider(case)[0] is None:
        return [], list(live)
    limit, workspace = choices.mha_limit(case)[0], case.batch.attention_workspace_tokens
    dense: list[list[int]] = []
    sparse: list[int] = []
    held = 0
    for request in live:
        tokens = kv_lens[request]
        if tokens > limit or 0 < workspace < tokens:
            sparse.append(request)
        elif dense and (not workspace or held + tokens <= workspace):
            dense[-1].append(request)
            held += tokens
        else:
            dense.append([request])
            held = tokens
    return dense, sparse


def validate(
    model: ModelShape,
    device: DeviceProfile,
    settings: Settings,
    *,
    max_tokens: int = 1,
    max_decode_tokens: int = 1,
    cuda_graph: bool = False,
) -> None:
    """Raise before serving what `decide` would raise for a batch of this configuration.

    Args:
        max_tokens: most query rows that a prefill batch may have (the engine's chunk size), at least 1.
        max_decode_tokens: most query rows that a decode batch may have, at least 1.
        cuda_graph: decode batches are captured.

    Raises:
        SettingsError: a setting contradicts the model or the device, or names a library that cannot
            carry prefill or decode here.
        NoProviderError: no installed kernel carries prefill or decode.
    """

    def sparse(phase: Phase, rows: int, cuda_graph: bool = False) -> BatchShape:
        context = model.index_topk + rows
        return BatchShape.from_lengths(phase, [rows], [context], cuda_graph=cuda_graph)

    prefill = sparse(Phase.EXTEND, max_tokens)
    decode = sparse(Phase.DECODE, max_decode_tokens, cuda_graph)
    errors: list[NsaPluginError] = []
    for batch in (prefill, decode):
        try:
            decide(model, batch, device, settings)
        except NsaPluginError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
    if errors:
        raise type(errors[0])(" | ".join(map(str, errors)))


def _check_settings(model: ModelShape, device: DeviceProfile, settings: Settings) -> None:
    """Settings that no batch of this model on this device can satisfy."""
    if settings.mha_max_kv > model.index_topk:
        raise SettingsError(
            f"mha_max_kv is {settings.mha_max_kv}; allowed: -1, or 0 to the model's index_topk "
            f"{model.index_topk}: in a longer context the indexer leaves tokens out"
        )
    if model.family == "v4" and settings.large_q_rows:
        capability = device.capability("flash_mla", Op.SPARSE_MLA_DECODE, model.kv_layout)
        if capability and capability.max_rows is not None and settings.large_q_rows > capability.max_rows:
            raise SettingsError(
                f"large_q_rows is {settings.large_q_rows}; allowed: 0 to {capability.max_rows}, the query "
                "rows that the installed FlashMLA takes on this device"
            )
    if settings.token_shard == "on" and (reason := sharding.impossible(model, device)):
        raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")


_INDEXER_FIELDS = ("indexer.provider", "indexer.rows_per_chunk", "indexer.metadata_provider")


def _idle_plan(batch: BatchShape) -> Plan:
    fields = ("attention", "provider", "dequantize_kv", "head_padding", "token_shard", "token_shard_chunks", "indexer")
    reasons = dict.fromkeys((*fields, *_INDEXER_FIELDS), "there are no query rows")
    return Plan(
        phase=batch.phase,
        attention=Attention.NONE,
        provider="",
        indexer=IndexerPlan(mode=IndexerMode.NONE),
        reasons={"phase": choices.batch_sentence(batch)} | reasons,
    )


def _dense_plan(case: Case, route: Route, refused: Sequence[Refusal], why: str) -> Plan:
    batch = case.batch
    route = replace(route, dequantize_kv=case.model.fp8_cache and batch.has_prefix)
    nothing = "every token is attended, so nothing is selected"
    return Plan(
        phase=batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        indexer=IndexerPlan(mode=IndexerMode.STORE_ONLY),
        reasons={
            "phase": choices.batch_sentence(batch),
            "attention": why,
            "provider": choices.provider_sentence(case, route, case.own_load, refused),
            "dequantize_kv": choices.dequantize_sentence(case, route),
            "head_padding": "dense attention takes any number of heads",
            "token_shard": "dense attention pads no heads",
            "token_shard_chunks": "nothing is exchanged",
            "indexer": f"the keys are stored for later; {nothing}",
        }
        | dict.fromkeys(_INDEXER_FIELDS, nothing),
    )


def _sparse_plan(case: Case, not_dense: str, keeps_heads: str) -> Plan:
    load = case.own_load
    route, refused = choices.pick_sparse(case, load)
    traded = sharding.decided(case, route, keeps_heads)
    sharded = traded.chunks > 0
    if sharded:
        load = case.sharded_load
        route, refused = choices.pick_sparse(case, load)
    padding, why_padding = choices.head_padding(case, route, load.heads)
    indexer, why_indexer = topk_plan(case, route, shared=sharded and case.extend)
    attention = choices.attention_sentence(case, route, load, refused)
    return Plan(
        phase=case.batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        head_padding=padding,
        token_shard=sharded,
        token_shard_chunks=max(1, traded.chunks),
        indexer=indexer,
        reasons={
            "phase": choices.batch_sentence(case.batch),
            "attention": f"not dense: {not_dense}; {attention}",
            "provider": choices.provider_sentence(case, route, load, refused),
            "dequantize_kv": choices.dequantize_sentence(case, route),
            "head_padding": why_padding,
            "token_shard": traded.why,
            "token_shard_chunks": traded.why_chunks,
        }
        | why_indexer,
    )
