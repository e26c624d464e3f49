"""One decision: `decide` routes a batch, `partition` splits a prefill first, `validate` checks at start-up.

A serving engine keeps a `Decider`, which does the same for many batches of one model, device and settings.

Pure: no torch, no engine, no I/O; the same arguments give the same plan. One place decides, as in sglang #13544. The
rules are in `dense`, `sparse`, `token_shard` and `indexer`, each with the pull request that it follows. Limits come
from the `DeviceProfile` and restrictions from the `Constraints`, never from here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nsa_plugin.decision import dense, sparse, token_shard
from nsa_plugin.decision.case import Case, batch_sentence, count
from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.indexer import topk_plan
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan, Reason, Reasons, text_of
from nsa_plugin.decision.routes import Refusal, Route
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError, SettingsError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings


@dataclass(frozen=True)
class BatchPart:
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
    model: ModelShape,
    batch: BatchShape,
    device: DeviceProfile,
    settings: Settings,
    constraints: Constraints = UNCONSTRAINED,
) -> Plan:
    """The plan of a batch.

    `Plan.reasons` has a sentence for every field of the plan, the indexer's own under "indexer.<field>".

    Args:
        model: the model on this rank.
        batch: the batch, or the part of one that shares a plan.
        device: what this machine has; `memory_free` is taken as free now.
        settings: what the user chose.
        constraints: what the engine restricts.

    Raises:
        SettingsError: a setting contradicts the model, the device, or what this batch needs.
        NoProviderError: no installed kernel supports the batch; lists each and why not.
    """
    return Decider(model, device, settings).decide(batch, constraints)


class Decider:
    """`decide` for one model, device and settings, which keeps what follows from these alone.

    Constraints are those of a batch. What is kept does not grow with the batches. Several threads may use one.
    """

    def __init__(self, model: ModelShape, device: DeviceProfile, settings: Settings) -> None:
        self.model, self.device, self.settings = self.inputs = model, device, settings
        self._known: dict[Hashable, Any] = {}
        self._checked = False

    def _case(self, batch: BatchShape, constraints: Constraints) -> Case:
        return Case(self.model, batch, self.device, self.settings, constraints, self._known)

    def decide(self, batch: BatchShape, constraints: Constraints = UNCONSTRAINED) -> Plan:
        """See `decide`."""
        if not self._checked:
            _check_settings(self.model, self.device, self.settings)
            self._checked = True
        if batch.phase is Phase.IDLE or batch.num_tokens == 0:
            return _idle_plan(batch)
        case = self._case(batch, constraints)
        route, refused, why = dense.pick_dense(case)
        if route is not None:
            return _dense_plan(case, route, refused, why)
        try:
            return _sparse_plan(case, why)
        except NsaPluginError:
            if constraints.copy_fits:
                raise
        # Only a copy supports the batch: then the cache is copied, over its budget, as the stock engine does.
        plan = _sparse_plan(replace(case, constraints=replace(constraints, copy_bytes=None)), why)
        copied = plan.reasons["dequantize_kv"]
        over = "and no other kernel supports the batch, so it is made, as in the stock engine"
        reasons = {**plan.reasons, "dequantize_kv": f"{copied}; {constraints.copy_refusal}, {over}"}
        return replace(plan, reasons=reasons)

    def partition(
        self,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        phase: Phase,
        *,
        cuda_graph: bool = False,
        context_parallel: bool = False,
        attention_workspace_tokens: int = 0,
        selecting: Collection[int] = (),
        constraints: Constraints = UNCONSTRAINED,
    ) -> tuple[BatchPart, ...]:
        """See `partition`."""

        def shape(requests: Sequence[int]) -> BatchShape:
            return BatchShape.from_lengths(
                phase,
                [q_lens[request] for request in requests],
                [kv_lens[request] for request in requests],
                cuda_graph=cuda_graph,
                context_parallel=context_parallel,
                attention_workspace_tokens=attention_workspace_tokens,
            )

        def part(requests: Sequence[int], batch: BatchShape) -> BatchPart:
            return BatchPart(tuple(requests), self.decide(batch, constraints), batch)

        everything = range(len(q_lens))
        whole = shape(everything)  # the same without the requests that have no query tokens
        if phase is not Phase.EXTEND or whole.num_tokens == 0:
            return (part(everything, whole),) if everything else ()
        live = [request for request in everything if q_lens[request]]
        empty = [request for request in everything if not q_lens[request]]
        dense_groups, others = _split_dense(self._case(whole, constraints), live, kv_lens, selecting)
        parts = [
            part(requests, whole if len(requests) == len(live) else shape(requests))
            for requests in (*dense_groups, others)
            if requests
        ]
        return (*parts, part(empty, shape(empty))) if empty else tuple(parts)


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
    selecting: Collection[int] = (),
    constraints: Constraints = UNCONSTRAINED,
) -> tuple[BatchPart, ...]:
    """A batch split so that one long prompt does not take dense attention from the short ones.

    Only a prefill is split: into parts of dense requests, each within the workspace, then one part of
    the sparse requests, then one of the requests that have no rows. Every request is in exactly one
    part and keeps its order within it. No requests, no parts.

    Args:
        q_lens, kv_lens: new rows and whole context of each request, in tokens.
        cuda_graph, context_parallel, attention_workspace_tokens: see `BatchShape`.
        selecting: places of the requests that are in the part of the long ones, whatever their contexts.
        constraints: of all parts; see `decide`.

    Raises:
        ShapeError: the lengths cannot belong together.
        SettingsError, NoProviderError: see `decide`.
    """
    return Decider(model, device, settings).partition(
        q_lens,
        kv_lens,
        phase,
        cuda_graph=cuda_graph,
        context_parallel=context_parallel,
        attention_workspace_tokens=attention_workspace_tokens,
        selecting=selecting,
        constraints=constraints,
    )


def _split_dense(
    case: Case, live: Sequence[int], kv_lens: Sequence[int], always: Collection[int]
) -> tuple[list[list[int]], list[int]]:
    """(groups of requests that attend densely, those that select)."""
    ruled_out = dense.dense_ruled_out(case) or case.constraints.no_dense
    if ruled_out or dense.dense_provider(case)[0] is None:
        return [], list(live)
    limit, workspace = dense.mha_limit(case)[0], case.batch.attention_workspace_tokens
    groups: list[list[int]] = []
    selecting: list[int] = []
    held = 0
    for request in live:
        tokens = kv_lens[request]
        if request in always or tokens > limit or 0 < workspace < tokens:
            selecting.append(request)
        elif groups and (not workspace or held + tokens <= workspace):
            groups[-1].append(request)
            held += tokens
        else:
            groups.append([request])
            held = tokens
    return groups, selecting


def validate(
    model: ModelShape,
    device: DeviceProfile,
    settings: Settings,
    *,
    max_tokens: int = 1,
    max_decode_tokens: int = 1,
    cuda_graph: bool = False,
    constraints: Constraints = UNCONSTRAINED,
    decode_constraints: Constraints | None = None,
) -> None:
    """Raise before serving what `decide` would raise for a batch of this configuration.

    Args:
        max_tokens: most query rows that a prefill batch may have (the engine's chunk size), at least 1.
        max_decode_tokens: most query rows that a decode batch may have, at least 1.
        cuda_graph: decode batches are captured.
        constraints: of prefills, and of decode batches too unless `decode_constraints` is given.

    Raises:
        SettingsError: a setting contradicts the model or the device, or names a library that does not
            support prefill or decode here.
        NoProviderError: no installed kernel supports prefill or decode.
    """

    def selecting(phase: Phase, rows: int, cuda_graph: bool = False) -> BatchShape:
        context = model.index_topk + rows
        return BatchShape.from_lengths(phase, [rows], [context], cuda_graph=cuda_graph)

    prefill = selecting(Phase.EXTEND, max_tokens)
    decode = selecting(Phase.DECODE, max_decode_tokens, cuda_graph)
    errors: list[NsaPluginError] = []
    of_decode = constraints if decode_constraints is None else decode_constraints
    for batch, restricted in ((prefill, constraints), (decode, of_decode)):
        try:
            decide(model, batch, device, settings, restricted)
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
    if settings.token_shard == "on" and (reason := token_shard.impossible(model, device)):
        raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")


_STOCK_FIELDS = ("stock_attention", "stock_selection")
_NOT_STOCK = "no constraint leaves it to the stock engine's code"
_INDEXER_FIELDS = ("indexer.provider", "indexer.rows_per_chunk", "indexer.metadata_provider")


def _idle_plan(batch: BatchShape) -> Plan:
    fields = ("attention", "provider", "dequantize_kv", "head_padding", "token_shard", "token_shard_chunks", "indexer")
    reasons: dict[str, Reason] = dict.fromkeys((*fields, *_INDEXER_FIELDS, *_STOCK_FIELDS), "there are no query tokens")
    return Plan(
        phase=batch.phase,
        attention=Attention.NONE,
        provider="",
        indexer=IndexerPlan(mode=IndexerMode.NONE),
        reasons=Reasons(lambda: {"phase": batch_sentence(batch), **reasons}),
    )


def _dense_plan(case: Case, route: Route, refused: Sequence[Refusal], why: Reason) -> Plan:
    batch = case.batch
    route = route._replace(dequantize_kv=case.model.fp8_cache and batch.has_prefix)
    nothing = "every token is attended, so nothing is selected"
    return Plan(
        phase=batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        indexer=IndexerPlan(mode=IndexerMode.STORE_ONLY),
        reasons=Reasons(
            lambda: {
                "phase": lambda: batch_sentence(batch),
                "attention": why,
                "provider": lambda: sparse.provider_sentence(case, route, case.dense_load, refused),
                "dequantize_kv": lambda: sparse.dequantize_sentence(case, route),
                "head_padding": "dense attention supports any number of heads",
                "token_shard": "dense attention pads no heads",
                "token_shard_chunks": "nothing is exchanged",
                "indexer": f"the keys are stored for later; {nothing}",
                **dict.fromkeys(_INDEXER_FIELDS, nothing),
                **dict.fromkeys(_STOCK_FIELDS, _NOT_STOCK),
            }
        ),
    )


def _sparse_plan(case: Case, not_dense: Reason) -> Plan:
    load = case.own_load
    route = sparse.pick_sparse(case, load)
    resharding = token_shard.decided(case, route)
    sharded = resharding.chunks > 0
    if sharded:
        load = case.sharded_load
        route = sparse.pick_sparse(case, load)

    padding, why_padding = sparse.head_padding(case, route, load.heads)
    indexer, why_indexer = topk_plan(case, route, shared=sharded and case.extend)
    stock_selection, why_selection = _stock_selection(case, indexer)
    stock_attention = stock_selection and route in case.constraints.stock_attends_by

    def reasons() -> dict[str, Reason]:
        refused = sparse.refused_before(case, load)
        attention = sparse.attention_sentence(case, route, load, refused)
        return {
            "phase": lambda: batch_sentence(case.batch),
            "attention": f"not dense: {text_of(not_dense)}; {attention}",
            "provider": lambda: sparse.provider_sentence(case, route, load, refused),
            "dequantize_kv": lambda: sparse.dequantize_sentence(case, route, refused),
            "head_padding": why_padding,
            "token_shard": resharding.why,
            "token_shard_chunks": resharding.why_chunks,
            "stock_attention": why_selection if stock_attention else _NOT_STOCK,
            "stock_selection": why_selection if stock_selection else _NOT_STOCK,
            **why_indexer(),
        }

    return Plan(
        phase=case.batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        head_padding=padding,
        token_shard=sharded,
        token_shard_chunks=max(1, resharding.chunks),
        indexer=indexer,
        stock_attention=stock_attention,
        stock_selection=stock_selection,
        reasons=Reasons(reasons),
    )


def _stock_selection(case: Case, indexer: IndexerPlan) -> tuple[bool, Reason]:
    """Whether the stock engine's code selects, and why."""
    if not case.constraints.stock_tokens:
        return False, _NOT_STOCK
    tokens, most = case.batch.total_kv_len, case.constraints.stock_tokens
    unmeasured = most > 0 and case.asked == "auto" and not case.measured
    # The stock code scores all query tokens at once.
    stock = (tokens <= most or unmeasured) and indexer.rows_per_chunk >= case.batch.num_tokens
    engine = case.constraints.engine
    if tokens > most:
        return stock, lambda: f"no times for this shape on {case.device.where}: {engine}'s own code is kept"
    return stock, lambda: f"{count(tokens, 'context token')}: up to {most}, {engine}'s own code costs the host less"
