"""Checks of one plan, for any input; shared by the property tests and the fuzzer."""

from __future__ import annotations

import re
from dataclasses import replace

from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.indexer import is_unpaged
from nsa_plugin.decision.plan import Attention, IndexerMode, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.decision.v4_memory import held_bytes
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import MIB, DeviceProfile
from nsa_plugin.settings import Settings

OPS = {
    Attention.MHA_ONE_SHOT: Op.MHA_ONE_SHOT,
    Attention.SPARSE_PREFILL: Op.SPARSE_MLA_PREFILL,
    Attention.SPARSE_DECODE: Op.SPARSE_MLA_DECODE,
}


def outcome(
    model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings, constraints: Constraints
) -> Plan | str:
    """The plan, or the message of a deliberate error; any other error is a failure."""
    try:
        return decide(model, batch, device, chosen, constraints)
    except (SettingsError, NoProviderError) as error:
        return str(error)


def check_decision(
    model: ModelShape,
    batch: BatchShape,
    device: DeviceProfile,
    chosen: Settings,
    constraints: Constraints = UNCONSTRAINED,
) -> Plan | str:
    """Decide twice, and check the plan; return it, or the message of the error."""
    plan = outcome(model, batch, device, chosen, constraints)
    equal = replace(model), replace(batch), replace(device), replace(chosen), replace(constraints)
    if chosen.token_shard != "auto":  # what selection costs then changes nothing
        same_model, same_constraints = replace(model, selecting_layers=1.0), replace(constraints, selection_split="")
        equal = same_model, replace(batch, scored=0), equal[2], equal[3], same_constraints
    again = outcome(*equal)
    assert plan == again
    if isinstance(plan, str):
        assert plan.strip()
        return plan
    assert isinstance(again, Plan)
    assert plan.reasons == again.reasons
    check_reasons(plan)
    check_kernel(plan, model, batch, device, chosen)
    check_dense(plan, model, batch, chosen)
    check_indexer(plan, model, batch, device, chosen, constraints)
    check_constraints(plan, batch, chosen, constraints)
    if plan.token_shard:
        assert model.attn_tp_size > 1
        assert model.dcp_size == 1
        assert device.providers(Op.TOKEN_SHARD)
        assert not batch.context_parallel
        assert chosen.token_shard != "off"
        assert batch.phase in sharding.PHASES
        assert not (batch.phase is Phase.EXTEND and batch.cuda_graph)
        assert model.attn_tp_size * plan.token_shard_chunks <= batch.num_tokens
    assert plan.token_shard_chunks == 1 or (plan.token_shard and batch.phase is Phase.EXTEND)
    return plan


def check_constraints(plan: Plan, batch: BatchShape, chosen: Settings, constraints: Constraints) -> None:
    """The plan keeps to what the engine restricts, and its reasons say so."""
    if plan.attention is Attention.NONE:
        return
    dense = plan.attention is Attention.MHA_ONE_SHOT
    copied = plan.dequantize_kv and not dense
    route = Route(plan.attention, plan.provider, copied)
    assert not (dense and constraints.no_dense)
    assert constraints.paths is None or route in constraints.paths
    assert not (copied and constraints.no_copy)
    assert not (constraints.stock_selects_prefills and batch.phase is Phase.EXTEND and is_unpaged(plan))
    unsplit = f"and the batch is not split: {constraints.no_split}"
    assert unsplit not in plan.reasons["attention"] or (constraints.no_split and batch.num_requests > 1)
    if copied and not constraints.copy_fits:
        assert f"{constraints.copy_refusal}, and no other kernel supports" in plan.reasons["dequantize_kv"]
    asked = chosen.prefill_backend if batch.phase is Phase.EXTEND else chosen.decode_backend
    if not dense and asked == "auto" and constraints.preferred:
        sentence = f"{constraints.preferred_by} asks for {plan.provider}"
        assert (route in constraints.preferred) == plan.reasons["provider"].startswith(sentence)
    if not dense and asked != "auto":
        setting = "prefill_backend" if batch.phase is Phase.EXTEND else "decode_backend"
        assert plan.reasons["provider"].startswith(f"{constraints.asked_by or setting} asks for {asked}")
    if plan.token_shard:
        assert not constraints.keep_heads
        assert route not in constraints.keep_heads_on
    if plan.stock_selection:
        unmeasured = constraints.stock_tokens > 0 and "no times for this shape" in plan.reasons["stock_selection"]
        assert (batch.total_kv_len > constraints.stock_tokens) == unmeasured
        assert not dense
    assert plan.stock_attention == (plan.stock_selection and route in constraints.stock_attends_by)


# "1 query tokens", "all 1 query token", "each of 1 request", "1 query token attends to 4 tokens each".
UNGRAMMATICAL = re.compile(
    r"(?<![\w.,])1 (?:\w+ ){0,2}(?:tokens|requests|ranks|heads|pieces)\b|\b(?:all|each of) 1 "
    r"|(?<![\w.,])1 query token [^;]* each\b"
)


def check_reasons(plan: Plan) -> None:
    data = plan.as_dict()
    fields = set(data) - {"reasons"} | {f"indexer.{name}" for name in data["indexer"]} - {"indexer.mode"}
    assert set(plan.reasons) == fields
    for sentence in plan.reasons.values():
        assert sentence.strip()
        assert "None" not in sentence
        assert not UNGRAMMATICAL.search(sentence), sentence


def check_kernel(plan: Plan, model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings) -> None:
    """The kernel is installed here and takes these layouts, dims, heads, selections and rows."""
    if plan.attention is Attention.NONE:
        assert plan.provider == ""
        assert batch.phase is Phase.IDLE or batch.num_tokens == 0
        return
    library = device.libraries[plan.provider]
    assert library.available
    dense = plan.attention is Attention.MHA_ONE_SHOT
    kernels = [kernel for kernel in library.capabilities if kernel.op == OPS[plan.attention]]
    copied = plan.dequantize_kv and not dense
    layout = "bf16" if copied else model.kv_layout
    (kernel,) = [kernel for kernel in kernels if layout in kernel.layouts]
    assert kernel.sm_min <= device.sm <= kernel.sm_max
    assert not kernel.dims or (model.mha_dims if dense else model.row_dims) in kernel.dims
    assert not (copied and batch.cuda_graph)
    assert model.fp8_cache or not plan.dequantize_kv
    rows = -(-batch.num_tokens // model.attn_tp_size) if plan.token_shard else batch.num_tokens
    assert kernel.max_rows is None or rows <= kernel.max_rows
    # With decode context parallelism a sparse call has the heads of all ranks that share the cache.
    heads = model.num_heads if plan.token_shard else model.heads_per_rank if dense else model.attended_heads
    given = plan.head_padding or heads
    assert given >= heads
    if not dense:
        assert not kernel.head_counts or given in kernel.head_counts
        assert given % kernel.head_multiple == 0
        assert plan.head_padding != heads
        assert model.index_topk % kernel.topk_multiple == 0
        assert model.sliding_window % kernel.topk_multiple == 0
        asked = chosen.prefill_backend if batch.phase is Phase.EXTEND else chosen.decode_backend
        assert asked in ("auto", plan.provider)
        assert plan.provider != "reference" or device.kind == "cpu" or asked == "reference"


def check_dense(plan: Plan, model: ModelShape, batch: BatchShape, chosen: Settings) -> None:
    """Dense attention only takes prefills whose contexts the indexer would not cut."""
    assert (plan.attention is Attention.MHA_ONE_SHOT) == (plan.indexer.mode is IndexerMode.STORE_ONLY)
    if plan.attention is not Attention.MHA_ONE_SHOT:
        return
    assert batch.phase is Phase.EXTEND
    assert model.family == "v3.2"
    assert batch.max_kv_len <= model.index_topk
    assert chosen.mha_max_kv < 0 or batch.max_kv_len <= chosen.mha_max_kv
    assert not batch.cuda_graph
    assert not batch.context_parallel
    assert not 0 < batch.attention_workspace_tokens < batch.total_kv_len
    assert plan.dequantize_kv == (model.fp8_cache and batch.has_prefix)


def check_indexer(
    plan: Plan,
    model: ModelShape,
    batch: BatchShape,
    device: DeviceProfile,
    chosen: Settings,
    constraints: Constraints,
) -> None:
    indexer = plan.indexer
    if indexer.mode is not IndexerMode.TOPK:
        assert (indexer.provider, indexer.rows_per_chunk, indexer.metadata_provider) == ("", 0, "")
        return
    kernel = device.capability(indexer.provider, Op.INDEXER_TOPK)
    assert kernel is not None
    assert kernel.heads_given(model.index_n_heads) == model.index_n_heads
    assert not kernel.dims or (model.index_head_dim,) in kernel.dims
    scored = batch.max_kv_len if model.family == "v3.2" else -(-batch.max_kv_len // 4)
    asked = chosen.logits_budget_mb * MIB
    if model.family == "v4" and batch.phase is Phase.EXTEND and not constraints.workspace_reserved:
        asked = max(asked - held_bytes(model, batch, over_rows=plan.dequantize_kv), asked // 8)
    budget = min(asked, device.memory_free // 4)
    rows = indexer.rows_per_chunk
    assert 1 <= rows <= batch.num_tokens
    assert rows == 1 or rows * 4 * scored <= budget
    assert rows == batch.num_tokens or rows & (rows - 1) == 0
    # Not too small: twice the rows would not fit.
    assert rows == batch.num_tokens or 2 * rows * 4 * max(scored, 1) > budget
    if batch.phase is Phase.EXTEND:
        assert indexer.metadata_provider == ""
    if indexer.metadata_provider:
        assert indexer.provider == "deep_gemm"
        assert indexer.metadata_provider in ("deep_gemm", "triton")
        scheduler = device.capability(indexer.metadata_provider, Op.INDEXER_METADATA)
        assert scheduler is not None
        fits = scheduler.max_rows is None or batch.num_tokens <= scheduler.max_rows
        assert fits != ("in pieces" in plan.reasons["indexer.metadata_provider"])
