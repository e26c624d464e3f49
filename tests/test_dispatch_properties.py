"""The decision over all inputs: it is total or a named error, repeatable, and within every limit it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_plugin.capabilities import Capability, Op
from nsa_plugin.devices import MIB, DeviceProfile, synthetic
from nsa_plugin.dispatch import Part, decide, partition, validate
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.plan import Attention, IndexerMode, Plan
from nsa_plugin.settings import DECODE_BACKENDS, PREFILL_BACKENDS, TOKEN_SHARD_MODES, Settings
from nsa_plugin.shapes import FAMILY_LAYOUTS, BatchShape, ModelShape, Phase

OPS = {
    Attention.MHA_ONE_SHOT: Op.MHA_ONE_SHOT,
    Attention.SPARSE_PREFILL: Op.SPARSE_MLA_PREFILL,
    Attention.SPARSE_DECODE: Op.SPARSE_MLA_DECODE,
}
BUILDS = {
    "flash_mla": [("sgl-flash-mla", "1.0.0"), ("sglang-kernel", "0.4.5"), ("vllm", "0.32.0")],
    "deep_gemm": [("sgl-deep-gemm", "0.1.3"), ("sgl-deep-gemm", "0.2.0")],
}
OWN_KERNELS = (
    Capability(op=Op.SPARSE_MLA_PREFILL, layouts=("v32_fp8",), sm_min=90, sm_max=90, head_counts=(8, 16, 32)),
    Capability(op=Op.SPARSE_MLA_DECODE, layouts=("bf16", "v4_fp8"), sm_min=90, sm_max=109, max_rows=4096),
    Capability(op=Op.INDEXER_TOPK, layouts=(), sm_min=90, sm_max=109, head_multiple=16),
    Capability(op=Op.INDEXER_METADATA, layouts=(), sm_min=90, sm_max=90),
    Capability(op=Op.TOKEN_SHARD, layouts=(), sm_min=90, sm_max=109),
)
LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 200_000))


def mostly(usual: object, *rare: object) -> st.SearchStrategy[Any]:
    """The usual value two times in three: most random combinations are refused, and plans are what counts."""
    return st.sampled_from([usual] * 2 * len(rare) + list(rare))


FLAG = mostly(False, True)


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    family = draw(mostly("v3.2", "v4"))
    ranks = draw(st.sampled_from([1, 2, 3, 8, 16]))
    return ModelShape(
        family=family,
        num_heads=ranks * draw(st.sampled_from([1, 8, 12, 16, 32, 64, 96, 128, 200])),
        attn_tp_size=ranks,
        kv_lora_rank=draw(mostly(512, 64)),
        v_head_dim=draw(mostly(128, 80)),
        index_topk=draw(mostly(2048, 64, 512, 2000)),
        index_n_heads=draw(mostly(64, 8, 32)),
        index_head_dim=draw(mostly(128, 96)),
        kv_layout=draw(st.sampled_from(FAMILY_LAYOUTS[family])),
        sliding_window=draw(mostly(128, 100)) if family == "v4" else 0,
    )


@st.composite
def batches(draw: st.DrawFn) -> BatchShape:
    requests = draw(mostly(1, 0, 3, 300))
    rows = requests + draw(st.one_of(st.integers(0, 600), st.integers(0, 40_000))) if requests else 0
    longest = draw(LENGTHS)
    return BatchShape(
        phase=draw(mostly(Phase.EXTEND, *Phase)),
        num_requests=requests,
        num_tokens=rows,
        max_kv_len=longest,
        total_kv_len=longest + draw(LENGTHS),
        has_prefix=draw(st.booleans()),
        cuda_graph=draw(FLAG),
        context_parallel=draw(FLAG),
        attention_workspace_tokens=draw(mostly(0, 1, 1000, 100_000)),
    )


@st.composite
def machines(draw: st.DrawFn) -> DeviceProfile:
    return synthetic(
        draw(st.sampled_from([0, 0, 80, *[90] * 6, *[100] * 4, 103, 120])),
        libraries=draw(mostly(None, (), ("flash_mla", "deep_gemm"), ("fa3", "triton"), ("trtllm", "deep_gemm"))),
        versions={name: draw(st.sampled_from(builds)) for name, builds in BUILDS.items()},
        kernels={"triton": draw(st.sampled_from([(), OWN_KERNELS]))},
        memory_free=draw(st.sampled_from([0, 1, 64 * MIB, 4096 * MIB, 1 << 40])),
        nvlink=draw(st.booleans()),
    )


SETTINGS = st.builds(
    Settings,
    prefill_backend=mostly(*PREFILL_BACKENDS),
    decode_backend=mostly(*DECODE_BACKENDS),
    mha_max_kv=mostly(-1, 0, 1, 64, 500, 2049),
    logits_budget_mb=st.integers(1, 4096),
    token_shard=mostly(*TOKEN_SHARD_MODES),
    large_q_rows=mostly(0, 1, 4096, 11622, 20_000),
)
# Generation, not `decide`, is what takes time on a small machine.
thorough = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings) -> Plan | str:
    """The plan, or the message of an error that the plugin raises on purpose; any other error is a failure."""
    try:
        return decide(model, batch, device, chosen)
    except (SettingsError, NoProviderError) as error:
        return str(error)


@thorough
@given(models(), batches(), machines(), SETTINGS)
def test_a_plan_is_total_repeatable_and_within_limits(
    model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings
) -> None:
    plan = outcome(model, batch, device, chosen)
    again = outcome(replace(model), replace(batch), replace(device), replace(chosen))
    assert plan == again
    if isinstance(plan, str):
        assert plan.strip()
        return
    assert isinstance(again, Plan)
    assert plan.reasons == again.reasons
    check_reasons(plan)
    check_kernel(plan, model, batch, device, chosen)
    check_dense(plan, model, batch, chosen)
    check_indexer(plan, model, batch, device, chosen)
    if plan.token_shard:
        assert model.attn_tp_size > 1
        assert device.providers(Op.TOKEN_SHARD)
        assert not batch.context_parallel
        assert chosen.token_shard != "off"


def check_reasons(plan: Plan) -> None:
    data = plan.as_dict()
    fields = set(data) - {"reasons"} | {f"indexer.{name}" for name in data["indexer"]} - {"indexer.mode"}
    assert set(plan.reasons) == fields
    for sentence in plan.reasons.values():
        assert sentence.strip()
        assert "None" not in sentence


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
    heads = model.num_heads if plan.token_shard else model.heads_per_rank
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
    """Dense attention never sees a context that the indexer would cut, and only ever in a prefill."""
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


def check_indexer(plan: Plan, model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings) -> None:
    indexer = plan.indexer
    if indexer.mode is not IndexerMode.TOPK:
        assert (indexer.provider, indexer.rows_per_chunk, indexer.metadata_provider) == ("", 0, "")
        return
    kernel = device.capability(indexer.provider, Op.INDEXER_TOPK)
    assert kernel is not None
    assert kernel.heads_given(model.index_n_heads) == model.index_n_heads
    assert not kernel.dims or (model.index_head_dim,) in kernel.dims
    scored = batch.max_kv_len if model.family == "v3.2" else -(-batch.max_kv_len // 4)
    budget = min(chosen.logits_budget_mb * MIB, device.memory_free // 4)
    rows = indexer.rows_per_chunk
    assert 1 <= rows <= batch.num_tokens
    assert rows == 1 or rows * 4 * scored <= budget
    assert rows == batch.num_tokens or rows & (rows - 1) == 0
    # No smaller than it needs to be: twice the rows would not fit.
    assert rows == batch.num_tokens or 2 * rows * 4 * max(scored, 1) > budget
    if indexer.metadata_provider:
        scheduler = device.capability(indexer.metadata_provider, Op.INDEXER_METADATA)
        assert scheduler is not None
        assert scheduler.max_rows is None or batch.num_tokens <= scheduler.max_rows


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    kv_lens = draw(st.lists(LENGTHS, max_size=12))
    return [draw(st.one_of(st.integers(0, kv_len), st.just(kv_len))) for kv_len in kv_lens], kv_lens


@thorough
@given(
    models(),
    requests(),
    mostly(Phase.EXTEND, *Phase),
    machines(),
    SETTINGS,
    FLAG,
    FLAG,
    st.sampled_from([0, 1, 1000, 5000]),
)
def test_a_partition_covers_every_request_once_in_order(
    model: ModelShape,
    lengths: tuple[list[int], list[int]],
    phase: Phase,
    device: DeviceProfile,
    chosen: Settings,
    cuda_graph: bool,
    context_parallel: bool,
    workspace: int,
) -> None:
    q_lens, kv_lens = lengths
    try:
        parts = partition(
            model,
            q_lens,
            kv_lens,
            phase,
            device,
            chosen,
            cuda_graph=cuda_graph,
            context_parallel=context_parallel,
            attention_workspace_tokens=workspace,
        )
    except (SettingsError, NoProviderError):
        return
    assert sorted(request for part in parts for request in part.requests) == list(range(len(q_lens)))
    assert sum(part.batch.num_tokens for part in parts) == sum(q_lens)
    for part in parts:
        assert list(part.requests) == sorted(part.requests)
        assert part.plan == decide(model, part.batch, device, chosen)
        check_part(part, q_lens, kv_lens)
    attentions = [part.plan.attention for part in parts]
    assert sum(attention not in (Attention.MHA_ONE_SHOT, Attention.NONE) for attention in attentions) <= 1
    if phase is not Phase.EXTEND:
        assert len(parts) <= 1


def check_part(part: Part, q_lens: list[int], kv_lens: list[int]) -> None:
    live = [request for request in part.requests if q_lens[request]]
    assert part.batch.num_requests == len(live)
    assert part.batch.max_kv_len == max((kv_lens[request] for request in live), default=0)
    if part.plan.attention is Attention.NONE:
        assert not live or part.plan.phase is Phase.IDLE
    elif part.plan.phase is Phase.EXTEND:
        assert live == list(part.requests)


@thorough
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12), st.sampled_from([0, 4096]))
def test_a_long_prompt_takes_dense_attention_from_no_other(kv_lens: list[int], workspace: int) -> None:
    model, device = ModelShape(attn_tp_size=8), synthetic(90)
    parts = partition(model, kv_lens, kv_lens, Phase.EXTEND, device, Settings(), attention_workspace_tokens=workspace)
    dense = {request for part in parts if part.plan.attention is Attention.MHA_ONE_SHOT for request in part.requests}
    assert dense == {request for request, kv_len in enumerate(kv_lens) if kv_len <= model.index_topk}


@thorough
@given(models(), machines(), SETTINGS, st.sampled_from([1, 8192]), st.booleans())
def test_what_validates_decides(
    model: ModelShape, device: DeviceProfile, chosen: Settings, max_tokens: int, cuda_graph: bool
) -> None:
    """A configuration that passes at start-up carries the batches it was checked for."""
    try:
        validate(model, device, chosen, max_tokens=max_tokens, cuda_graph=cuda_graph)
    except (SettingsError, NoProviderError):
        return
    context = 100_000
    prefill = BatchShape.from_lengths(Phase.EXTEND, [max_tokens], [context + max_tokens])
    short = BatchShape.from_lengths(Phase.EXTEND, [max_tokens], [max_tokens])
    step = BatchShape.from_lengths(Phase.DECODE, [1], [context], cuda_graph=cuda_graph)
    for batch in (prefill, short, step):
        assert decide(model, batch, device, chosen).attention is not Attention.NONE
