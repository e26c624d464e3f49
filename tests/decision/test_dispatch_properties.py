"""The decision over all inputs: a plan or a named error, repeatable, within every given limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa_plugin.decision import timings
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.case import Case
from nsa_plugin.decision.dispatch import BatchPart, decide, partition, validate
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import KernelLoad, Route
from nsa_plugin.decision.shapes import FAMILY_LAYOUTS, BatchShape, ModelShape, Phase
from nsa_plugin.decision.sparse import NEARLY_EQUAL, estimate, sparse_routes, stock_route_first, usual_sparse_routes
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.devices import MIB, DeviceProfile, synthetic
from nsa_plugin.settings import TOKEN_SHARD_MODES, Settings, backends
from tests.decision.plan_checks import check_decision

BUILDS = {
    "flash_mla": [("sgl-flash-mla", "1.0.0"), ("sglang-kernel", "0.4.5"), ("vllm", "0.32.0")],
    "deep_gemm": [("sgl-deep-gemm", "0.1.3"), ("sgl-deep-gemm", "0.2.0")],
}
LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 200_000))


def _us(estimated: timings.TimeEstimate | None) -> float | None:
    return None if estimated is None else estimated.us


def mostly(usual: object, *rare: object) -> st.SearchStrategy[Any]:
    """The usual value in two of three draws: most random combinations are refused, and the tests need plans."""
    return st.sampled_from([usual] * 2 * len(rare) + list(rare))


FLAG = mostly(False, True)


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    family = draw(mostly("v3.2", "v4"))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
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
        libraries=draw(
            mostly(
                None,
                (),
                ("flash_mla", "deep_gemm"),
                ("flash_mla", "deep_gemm", "fa3", "trtllm"),
                ("fa3", "triton"),
                ("trtllm", "deep_gemm"),
                ("cuda", "triton"),
            )
        ),
        versions={name: draw(st.sampled_from(builds)) for name, builds in BUILDS.items()},
        memory_free=draw(st.sampled_from([0, 1, 64 * MIB, 4096 * MIB, 1 << 40])),
        nvlink=draw(st.booleans()),
    )


SETTINGS = st.builds(
    Settings,
    prefill_backend=mostly(*backends("prefill_backend")),
    decode_backend=mostly(*backends("decode_backend")),
    mha_max_kv=mostly(-1, 0, 1, 64, 500, 2049),
    logits_budget_mb=st.integers(1, 4096),
    token_shard=mostly(*TOKEN_SHARD_MODES),
    large_q_rows=mostly(0, 1, 4096, 11622, 20_000),
)


SPARSE = (
    "cuda sparse_prefill",
    "triton sparse_prefill",
    "flash_mla sparse_decode",
    "flash_mla sparse_prefill",
    "flash_mla sparse_prefill after dequantisation",
    "cuda sparse_decode",
    "triton sparse_decode",
)
DENSE = ("fa3 mha_one_shot", "triton mha_one_shot")
SHARDED = tuple(sharding.in_chunks(f"token_shard by {label}", chunks) for label in SPARSE for chunks in sharding.CHUNKS)
GROUPS = tuple(f"token_shard_{what} tp{ranks}" for what in ("attention", "steps") for ranks in (2, 4, 8))


def table_of(seed: int) -> Any:
    """Measurements of some routes, heads and query tokens, from few values so that some are equal."""
    random = Random(seed)

    def curve() -> timings.Points:
        rows = sorted(random.sample([1, 64, 512, 1024, 2048, 4096, 8192], random.randint(1, 7)))
        return tuple((count, random.choice([1.0, 20.0, 20.5, 300.0, 5e4])) for count in rows)

    return {
        (sm, op, layout): {
            label: {heads: curve() for heads in random.sample([8, 16, 64, 128], random.randint(1, 4))}
            for label in (SHARDED if op in GROUPS else (*SPARSE, *DENSE))
            if random.random() < 0.7
        }
        for sm in (90, 100)
        for op in ("sparse_mla_prefill", "sparse_mla_decode", "mha_one_shot", *GROUPS)
        for layout in ("bf16", "v32_fp8", "v4_fp8")
        if random.random() < 0.7
    }


TABLES = st.integers(0, 10_000).map(table_of)
MEASUREMENTS = st.one_of(st.just({}), TABLES, st.just(timings.TIMINGS))


@contextmanager
def measurements(table: Any) -> Iterator[None]:
    with mock.patch.object(timings, "TIMINGS", table):
        yield


# Generation, not `decide`, is what takes time: `fuzz` checks more inputs, and hypothesis shrinks those that fail.
thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(models(), batches(), machines(), SETTINGS, MEASUREMENTS)
def test_a_plan_is_total_repeatable_and_within_limits(
    model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings, table: Any
) -> None:
    with measurements(table):
        check_decision(model, batch, device, chosen)


@thorough
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([8, 16, 32, 64]),
    st.one_of(st.integers(1, 1100), st.integers(1, 20_000)),
    st.integers(0, 200_000),
    st.sampled_from([Phase.EXTEND, Phase.DECODE]),
    MEASUREMENTS,
)
def test_auto_reshards_only_if_measured_faster(
    ranks: int, heads: int, rows: int, prefix: int, phase: Phase, table: Any
) -> None:
    model = ModelShape(num_heads=ranks * heads, attn_tp_size=ranks, kv_layout="v32_fp8")
    context = prefix + rows
    batch = BatchShape(
        phase=phase, num_requests=1, num_tokens=rows, max_kv_len=context, total_kv_len=context, has_prefix=prefix > 0
    )
    device, chosen = synthetic(90), Settings(mha_max_kv=0)
    with measurements(table):
        plan = decide(model, batch, device, chosen)
        if not plan.token_shard:
            return
        case = Case(model, batch, device, chosen)
        kept = decide(model, batch, device, replace(chosen, token_shard="off"))
        sharded = Route(plan.attention, plan.provider, plan.dequantize_kv)
        taken = _us(sharding.sharded_time(case, sharded, plan.token_shard_chunks))
        others = [
            _us(sharding.sharded_time(case, sharded, chunks)) for chunks in sharding.CHUNKS if chunks * ranks <= rows
        ]
        instead = _us(estimate(case, Route(kept.attention, kept.provider, kept.dequantize_kv), case.own_load))
    assert taken is not None
    assert instead is not None
    assert taken < instead
    assert phase is Phase.DECODE or taken == min(time for time in others if time is not None)


@thorough
@given(models(), batches(), machines(), SETTINGS, TABLES, st.lists(st.integers(1, 20_000), max_size=3))
def test_measurements_reorder_routes_and_lose_none(
    model: ModelShape, batch: BatchShape, device: DeviceProfile, chosen: Settings, table: Any, others: list[int]
) -> None:
    case = Case(model, batch, device, chosen)  # what it keeps for one number of query tokens must hold for the next
    for rows in (max(batch.num_tokens, 1), *others):
        load = KernelLoad(rows, model.heads_per_rank)
        with measurements({}):
            usual = sparse_routes(Case(model, batch, device, chosen), load)  # a case keeps its routes and times
        with measurements(table):
            if not stock_route_first(case, load):  # then one has a time, and the stock route keeps its usual place
                usual = usual_sparse_routes(case, load)
            routes = sparse_routes(case, load)
            times = [_us(estimate(case, route, load)) for route in routes]
            unmeasured = [estimate(case, route, load) is None for route in usual]
        assert len(routes) == len(usual)
        assert set(routes) == set(usual)
        # Routes without a time keep their place.
        assert [time is None for time in times] == unmeasured
        assert all(ours == theirs for ours, theirs, still in zip(routes, usual, unmeasured, strict=True) if still)
        # A later one is never clearly faster, and nearly equal ones keep their order.
        known = [(route, time) for route, time in zip(routes, times, strict=True) if time is not None]
        for (one, first), (other, second) in pairwise(known):
            assert first <= second * (1 + NEARLY_EQUAL)
            assert first <= second or usual.index(one) < usual.index(other)


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
    MEASUREMENTS,
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
    table: Any,
) -> None:
    q_lens, kv_lens = lengths
    with measurements(table):
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
        assert all(part.plan == decide(model, part.batch, device, chosen) for part in parts)
    assert sorted(request for part in parts for request in part.requests) == list(range(len(q_lens)))
    assert sum(part.batch.num_tokens for part in parts) == sum(q_lens)
    for part in parts:
        assert list(part.requests) == sorted(part.requests)
        check_part(part, q_lens, kv_lens)
    attentions = [part.plan.attention for part in parts]
    assert sum(attention not in (Attention.MHA_ONE_SHOT, Attention.NONE) for attention in attentions) <= 1
    if phase is not Phase.EXTEND:
        assert len(parts) <= 1


def check_part(part: BatchPart, q_lens: list[int], kv_lens: list[int]) -> None:
    live = [request for request in part.requests if q_lens[request]]
    assert part.batch.num_requests == len(live)
    assert part.batch.max_kv_len == max((kv_lens[request] for request in live), default=0)
    if part.plan.attention is Attention.NONE:
        assert not live or part.plan.phase is Phase.IDLE
    elif part.plan.phase is Phase.EXTEND:
        assert live == list(part.requests)


@thorough
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12), st.sampled_from([0, 4096]))
def test_a_long_prompt_leaves_short_ones_dense(kv_lens: list[int], workspace: int) -> None:
    model, device = ModelShape(attn_tp_size=8), synthetic(90)
    with measurements({}):
        parts = partition(
            model, kv_lens, kv_lens, Phase.EXTEND, device, Settings(), attention_workspace_tokens=workspace
        )
    dense = {request for part in parts if part.plan.attention is Attention.MHA_ONE_SHOT for request in part.requests}
    assert dense == {request for request, kv_len in enumerate(kv_lens) if kv_len <= model.index_topk}


@thorough
@given(models(), machines(), SETTINGS, st.sampled_from([1, 8192]), st.booleans(), MEASUREMENTS)
def test_a_validated_configuration_decides_every_batch(
    model: ModelShape, device: DeviceProfile, chosen: Settings, max_tokens: int, cuda_graph: bool, table: Any
) -> None:
    """A configuration that passes at start-up supports the batches it was checked for."""
    context = 100_000
    prefill = BatchShape.from_lengths(Phase.EXTEND, [max_tokens], [context + max_tokens])
    short = BatchShape.from_lengths(Phase.EXTEND, [max_tokens], [max_tokens])
    step = BatchShape.from_lengths(Phase.DECODE, [1], [context], cuda_graph=cuda_graph)
    with measurements(table):
        try:
            validate(model, device, chosen, max_tokens=max_tokens, cuda_graph=cuda_graph)
        except (SettingsError, NoProviderError):
            return
        for batch in (prefill, short, step):
            assert decide(model, batch, device, chosen).attention is not Attention.NONE
