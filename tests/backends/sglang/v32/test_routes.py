"""Tests of SGLang's execution path for each plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from nsa_plugin.backends.common.paths import PATHS, SGLANG, routes_of
from nsa_plugin.backends.common.planner import execution_of
from nsa_plugin.backends.sglang.v32 import routes
from nsa_plugin.backends.sglang.v32.batch import eager_step, prefill_batch, step_batch
from nsa_plugin.backends.sglang.v32.routes import (
    DENSE_VARIABLE,
    FP8_PREFILLS,
    NO_DENSE,
    PLANNED,
    SglangPlanner,
    dense_beyond,
    v32_stock_feature,
    why_no_copy,
)
from nsa_plugin.decision.dispatch import Decider
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import ModelShape, Phase
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.backends.counted import Counted
from tests.backends.fake_sglang.model_runner import built, decided, keep_arguments_raw, runner
from tests.backends.fake_sglang.v32 import H200, MODEL, ForwardMode, forward_batch

LAYOUTS = ("bf16", "v32_fp8")
LONG = prefill_batch(forward_batch(ForwardMode.EXTEND, [4096], [32768]))
SHORT = prefill_batch(forward_batch(ForwardMode.EXTEND, [32, 100], [32, 100]))


def planner(layout: str, device=H200, heads: int = 8, **settings) -> SglangPlanner:
    model = replace(MODEL, num_heads=heads * 2, kv_layout=layout)
    return SglangPlanner(model, device, Settings(**settings))


@pytest.mark.parametrize(
    ("layout", "library", "attention", "impl", "own"),
    [
        ("v32_fp8", "cuda", Attention.SPARSE_PREFILL, "flashmla_kv", True),
        ("v32_fp8", "triton", Attention.SPARSE_PREFILL, "flashmla_kv", True),
        ("v32_fp8", "reference", Attention.SPARSE_PREFILL, "flashmla_kv", True),
        ("bf16", "triton", Attention.SPARSE_PREFILL, "flashmla_sparse", True),
        ("bf16", "flash_mla", Attention.SPARSE_PREFILL, "flashmla_sparse", False),
    ],
)
def test_prefill(layout: str, library: str, attention: Attention, impl: str, own: bool):
    route = planner(layout, prefill_backend=library).prefill(LONG)
    assert route is not None
    assert (route.plan.attention, route.plan.provider, route.path, route.own) == (attention, library, impl, own)


@pytest.mark.parametrize(
    ("layout", "library", "impl", "own"),
    [
        ("v32_fp8", "cuda", "flashmla_kv", True),
        ("v32_fp8", "flash_mla", "flashmla_kv", False),
        ("v32_fp8", "triton", "flashmla_kv", True),
        ("bf16", "fa3", "fa3", False),
        ("bf16", "flash_mla", "flashmla_sparse", False),
        ("bf16", "triton", "flashmla_sparse", True),
    ],
)
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND])
def test_steps(layout: str, library: str, impl: str, own: bool, phase: Phase):
    route = planner(layout, decode_backend=library).step(step_batch(phase, 8, 32, 4096))
    assert (route.plan.phase, route.plan.provider, route.path, route.own) == (phase, library, impl, own)


def test_both_flash_mla_paths_of_an_fp8_prefill():
    def executed(attention: Attention, dequantize: bool) -> tuple[str | None, bool]:
        topk = IndexerPlan(mode=IndexerMode.TOPK)
        plan = Plan(
            phase=Phase.EXTEND, attention=attention, provider="flash_mla", dequantize_kv=dequantize, indexer=topk
        )
        execution = execution_of(SGLANG, "v32_fp8", plan)
        return execution.path, execution.own

    assert executed(Attention.SPARSE_DECODE, False) == ("flashmla_kv", False)
    assert executed(Attention.SPARSE_PREFILL, True) == ("flashmla_sparse", False)
    with pytest.raises(NoProviderError, match="SGLang has no execution path for flash_mla sparse_prefill in extend"):
        executed(Attention.SPARSE_PREFILL, False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
def test_every_plan_has_a_path(layout: str, sm: int, heads: int):
    """Whatever the decision is, SGLang has a path for it, of those that it may change to."""
    # Without the plugin's own kernels too.
    for libraries in (None, ("flash_mla", "deep_gemm", "fa3", "trtllm", "triton")):
        made = planner(layout, synthetic(sm, libraries=libraries), heads)
        for context in (2048, 4096, 200_000):
            batch = prefill_batch(forward_batch(ForwardMode.EXTEND, [2000], [context]))
            route = made.prefill(batch, no_dense="")
            assert route is not None
            assert route.dense or route.path in PLANNED[layout, True]
        for rows in (1, 32, 512):
            for phase in (Phase.DECODE, Phase.TARGET_VERIFY):
                assert made.step(step_batch(phase, rows, rows, 200_000)).path in PLANNED[layout, False]


def test_every_path_may_be_taken():
    for entry in PATHS:
        if SGLANG in entry.engines and entry.path in ("flashmla_kv", "flashmla_sparse", "fa3"):
            assert all(any(entry.path in PLANNED[layout, ex] for ex in (True, False)) for layout in entry.layouts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_that_sglang_cannot_run_are_not_offered(layout: str):
    routes = routes_of(SGLANG, layout, prefill=True)
    assert Route(Attention.SPARSE_DECODE, "trtllm") not in routes
    assert Route(Attention.MHA_ONE_SHOT, "trtllm") in routes  # SGLang's dense attention on SM100
    assert Route(Attention.MHA_ONE_SHOT, "triton") not in routes
    assert Route(Attention.SPARSE_PREFILL, "triton") in routes
    plan = planner(layout, synthetic(100)).prefill(LONG).plan
    assert plan.provider != "trtllm"
    assert plan.indexer.provider == "deep_gemm"


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_trtllm_as_a_setting_is_refused_with_the_flag_that_sglang_wants(phase: str):
    """An SM100 device has the kernels; that they are missing would be the wrong reason."""
    made = planner("bf16", synthetic(100), **{f"{phase}_backend": "trtllm"})
    batch = LONG if phase == "prefill" else step_batch(Phase.DECODE, 4, 4, 200_000)
    plan = made.step if phase == "decode" else partial(made.prefill)
    with pytest.raises(SettingsError, match=f"{phase}_backend is trtllm.*--dsa-{phase}-backend trtllm") as error:
        plan(batch)
    assert "no sparse_mla" not in str(error.value)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_trtllm_as_a_setting_over_fp8_says_what_runs_it(phase: str):
    """The plugin has no layout without scales; SGLang lays such a cache out for its own calls."""
    made = planner("v32_fp8", synthetic(100), **{f"{phase}_backend": "trtllm"})
    batch = LONG if phase == "prefill" else step_batch(Phase.DECODE, 4, 4, 200_000)
    plan = made.step if phase == "decode" else partial(made.prefill)
    with pytest.raises(SettingsError) as error:
        plan(batch)
    assert "for a v32_fp8 cache on SM100 (it reads bf16); SGLang runs it only with --dsa-" in str(error.value)
    assert f"over a cache without scales that it lays out for it, {phase}_backend auto" in str(error.value)


@pytest.mark.parametrize(
    ("impl", "attention", "copied"),
    [("flashmla_kv", Attention.SPARSE_DECODE, False), ("flashmla_sparse", Attention.SPARSE_PREFILL, True)],
)
def test_the_users_exact_flash_mla_path_is_kept(impl: str, attention: Attention, copied: bool):
    """Field defect 4. With 8 heads the CUDA kernel is measured to be faster; of FlashMLA's, the flag's is used."""
    by = f"SGLang's --dsa-prefill-backend {impl}"
    made = planner("v32_fp8", prefill_backend="flash_mla")
    made.stock_prefill, made.asked_by = FP8_PREFILLS[impl], {"prefill_backend": by}
    made.device = replace(made.device, memory_free=1 << 20)  # too little for a copy within the plugin's budget
    route = made.prefill(LONG)
    assert route is not None
    assert (route.path, route.own) == (impl, False)
    assert (route.plan.attention, route.plan.dequantize_kv) == (attention, copied)
    assert route.plan.reasons["provider"].startswith(f"{by} asks for flash_mla")


def test_flashmla_auto_leaves_the_choice_of_the_path_open():
    by = "SGLang's --dsa-prefill-backend flashmla_auto"
    made = planner("v32_fp8", prefill_backend="flash_mla")
    made.asked_by = {"prefill_backend": by}
    route = made.prefill(LONG)
    assert route is not None
    assert route.path == "flashmla_sparse"  # the faster by its times
    assert route.plan.reasons["provider"].startswith(f"{by} asks for flash_mla; flash_mla after dequantisation ")


@pytest.mark.parametrize("impl", ["flashmla_kv", "flashmla_sparse"])
def test_without_times_sglangs_own_path_serves_prefills(impl: str):
    """Field defect 7: before, the CUDA kernel came first with few heads."""
    made = planner("v32_fp8")
    made.model = replace(made.model, index_topk=1024)
    made.stock_prefill = FP8_PREFILLS[impl]
    route = made.prefill(LONG)
    assert route is not None
    assert (route.path, route.own) == (impl, False)
    assert "so the stock engine's route comes first" in route.plan.reasons["provider"]


def test_trtllm_as_a_setting_keeps_its_reason_where_the_device_has_no_kernel():
    with pytest.raises(SettingsError, match="this device is SM90"):
        planner("bf16", synthetic(90), decode_backend="trtllm").step(step_batch(Phase.DECODE, 4, 4, 200_000))


@pytest.mark.regression(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_attention_and_the_selection_go_together(layout: str):
    for batch in (SHORT, LONG):
        for allowed in (True, False):
            for limit in (-1, 0, 64, 2048):
                route = planner(layout, mha_max_kv=limit).prefill(batch, no_dense="" if allowed else NO_DENSE)
                assert route is not None
                assert route.dense == (route.plan.indexer.mode is IndexerMode.STORE_ONLY)
                assert not route.dense or (allowed and limit != 0)


def test_sglang_may_exclude_dense_attention_and_the_plan_gives_the_reason():
    made = planner("bf16")
    assert made.prefill(SHORT, no_dense="").dense
    route = made.prefill(SHORT)
    assert not route.dense
    assert "SGLang's rules exclude it for this batch" in route.plan.reasons["attention"]
    assert not planner("bf16", mha_max_kv=0).prefill(SHORT, no_dense="").dense


def test_an_idle_batch_has_a_plan_and_no_path():
    route = planner("v32_fp8").step(step_batch(Phase.IDLE, 2, 2, 4096))
    assert (route.plan.attention, route.path, route.own, route.dense) == (Attention.NONE, None, False, False)


@pytest.mark.regression(20, "stock path")
def test_features_that_fall_back_to_stock_sglang():
    split = prefill_batch(forward_batch(ForwardMode.EXTEND, [4], [4], attn_cp_metadata=object()))
    assert planner("bf16").prefill(split, no_dense="") is None


MIXED = prefill_batch(forward_batch(ForwardMode.MIXED, [4096, 1], [32768, 9000]))


@pytest.mark.parametrize("settings", [{}, {"prefill_backend": "flash_mla"}])
@pytest.mark.parametrize("asked", [{}, {"prefill_backend": "SGLang's --dsa-prefill-backend flashmla_sparse"}])
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_a_prefill_with_decode_steps_reads_an_fp8_cache_in_place(settings: dict, asked: dict, heads: int):
    """In mode MIXED SGLang selects slots and makes no copy, whatever is faster or asked for."""
    made = planner("v32_fp8", heads=heads, **settings)
    made.asked_by, made.stock_prefill = asked, FP8_PREFILLS["flashmla_sparse"]
    route = made.prefill(MIXED)
    assert (route.path, route.plan.dequantize_kv) == ("flashmla_kv", False)
    assert route.own is (route.plan.provider != "flash_mla")
    whole = made.prefill(replace(MIXED, mixed=False))
    if asked or settings:
        assert (whole.path, whole.plan.provider) == ("flashmla_sparse", "flash_mla")
        words = " ".join(map(str, route.plan.reasons.values()))
        assert "makes no copy" in words


@pytest.mark.parametrize("heads", [64, 128])
def test_no_copy_is_made_where_the_selection_leaves_attention(heads: int):
    """With a copy, the selection is rows of the copy."""
    made = planner("v32_fp8", heads=heads)
    assert made.prefill(LONG).path == "flashmla_sparse"
    made = planner("v32_fp8", heads=heads)
    made.no_copy = "someone reads it"
    route = made.prefill(LONG)
    assert (route.path, route.plan.dequantize_kv) == ("flashmla_kv", False)
    assert "someone reads it" in " ".join(map(str, route.plan.reasons.values()))
    bf16 = planner("bf16", heads=heads)
    bf16.no_copy = "someone reads it"  # slots in any case
    assert bf16.prefill(LONG).plan == planner("bf16", heads=heads).prefill(LONG).plan


DRAFT = {"index_share_for_mtp_iteration": True}


@pytest.mark.parametrize(
    ("server_args", "config", "draft", "broadcast", "says"),
    [
        ({}, {}, False, False, ""),
        ({"enable_return_indexer_topk": True}, {}, False, False, "returned to users"),
        ({}, {}, False, True, "SGLANG_DSA_TOPK_BROADCAST"),
        ({}, DRAFT, True, False, "draft steps read the selection"),
        ({}, DRAFT, False, False, ""),  # the target's
        ({}, {}, True, False, ""),
    ],
)
@pytest.mark.parametrize("impl", ["flashmla_kv", "flashmla_auto", "flashmla_sparse"])
def test_who_else_reads_the_selection(
    sglang_variables: SimpleNamespace,
    impl: str,
    server_args: dict,
    config: dict,
    draft: bool,
    broadcast: bool,
    says: str,
):
    sglang_variables.SGLANG_DSA_TOPK_BROADCAST = SimpleNamespace(get=lambda: broadcast)
    backend, of = built(prefill=impl), runner(**server_args)
    of.is_draft_worker, of.model_config.hf_config = draft, SimpleNamespace(**config)
    said = why_no_copy(backend, of)
    assert (said == "") if not says or impl == "flashmla_sparse" else (says in said)
    if config:
        backend.prepare_mtp_seed_indices = None  # since 0.5.23 SGLang itself makes slots of the rows
        assert why_no_copy(backend, of) == ""


@pytest.mark.parametrize(
    ("threshold", "settings", "portable", "tokens"),
    [
        (None, {}, False, 0),
        (2048, {}, False, 0),  # as SGLang sets it
        (100, {}, False, 0),
        (4096, {}, False, 4096),
        (4096, {"mha_max_kv": 512}, False, 0),
        (4096, {}, True, 0),
    ],
)
@pytest.mark.parametrize("prefix", ["dsa", "nsa"])
def test_prefills_that_a_user_has_attend_densely_beyond_index_topk_are_left(
    sglang_variables: SimpleNamespace, prefix: str, threshold: int | None, settings: dict, portable: bool, tokens: int
):
    if threshold is not None:
        vars(sglang_variables)[DENSE_VARIABLE.format(prefix.upper())] = SimpleNamespace(get=lambda: threshold)
    made = planner("v32_fp8", **settings)
    made.dense_up_to = dense_beyond(prefix, made.model, made.settings, portable=portable)
    assert made.dense_up_to == tokens
    between = prefill_batch(forward_batch(ForwardMode.EXTEND, [3000], [3000]))
    assert (made.prefill(between, no_dense="") is None) is bool(tokens)
    for batch, no_dense in ((between, NO_DENSE), (LONG, NO_DENSE), (SHORT, "")):
        assert made.prefill(batch, no_dense=no_dense) is not None


@pytest.mark.parametrize("name", ["EXTEND", "DECODE"])
def test_halves_of_a_batch_and_made_up_requests_are_planned_and_not_counted(name: str):
    made, counted = planner("v32_fp8"), Counted()
    made.metrics, mode = counted, ForwardMode[name]

    def plan(**more) -> object:
        given = forward_batch(mode, [4096] if mode.is_extend() else [], [8192], **more)
        return (
            made.prefill(prefill_batch(given)) if mode.is_extend() else made.step(eager_step(given, Phase.DECODE, 1, 9))
        )

    first = plan()
    assert len(counted) == 1
    made.has_half = lambda: True
    assert plan() == first
    made.has_half = lambda: False
    if mode.is_extend():
        assert plan(_original_forward_mode=ForwardMode.IDLE) == first
    assert (len(counted), made.trace.counts.total()) == (1, 1)
    plan(_original_forward_mode=ForwardMode.DECODE)  # a rank's own steps, which run as a prefill
    assert (len(counted), made.trace.counts.total()) == (2, 2)


def test_a_prefill_with_decode_steps_over_a_bf16_cache_has_the_same_plan_as_one_without():
    made = planner("bf16")
    assert made.prefill(MIXED).plan == made.prefill(replace(MIXED, mixed=False)).plan


@pytest.mark.parametrize("portable", [False, True])
def test_the_plugins_dense_kernel_is_for_gpus_without_sglangs(portable: bool):
    made = SglangPlanner(MODEL, synthetic(90, libraries=("triton", "flash_mla")), Settings(), portable=portable)
    route = made.prefill(SHORT, no_dense="")
    assert route is not None
    assert route.dense is portable
    assert not portable or route.plan.provider == "triton"


def test_a_step_is_decided_once_and_counted_every_time():
    counted = Counted()
    made = planner("v32_fp8")
    made.metrics = counted
    first, again = (made.step(step_batch(Phase.DECODE, 4, 4, 4096)) for _ in range(2))
    assert first is again
    assert counted == [first.plan, first.plan]
    assert counted.tokens == [4, 4]
    assert counted.budgets == [made.logits_budget]  # a plan was looked for once
    assert made.trace.counts.total() == 2


def test_prefills_of_the_same_lengths_are_decided_once_and_counted_every_time(monkeypatch: pytest.MonkeyPatch):
    decided, counted = [], Counted()

    def deciding(self, batch, constraints):
        decided.append(batch)
        return decide(self, batch, constraints)

    decide = Decider.decide
    monkeypatch.setattr(Decider, "decide", deciding)
    monkeypatch.setattr(routes, "MAX_PREFILLS", 2)
    made = planner("v32_fp8")
    made.metrics = counted
    first, again = (made.prefill(SHORT, no_dense="") for _ in range(2))
    assert first is again
    assert (len(decided), len(counted)) == (1, 2)
    sparse = made.prefill(SHORT)
    assert sparse is not None
    assert first is not None
    assert first.dense
    assert not sparse.dense
    made.prefill(LONG, no_dense="")  # one more than are kept
    before = len(decided)
    assert made.prefill(SHORT, no_dense="").plan == first.plan
    assert len(decided) == before + 1


@pytest.mark.regression(7)
def test_the_indexers_chunks_follow_the_free_memory_when_serving():
    readings = []

    def free() -> int:
        readings.append(1)
        return 64 << 20

    made = planner("v32_fp8")
    before = made.prefill(LONG).plan.indexer.rows_per_chunk
    made.free_memory = free
    after = [made.prefill(LONG).plan.indexer.rows_per_chunk for _ in range(2)]
    assert after == [128, 128]  # 16 MiB of 32768 * 4 bytes
    assert before > 128
    assert len(readings) == 1


def test_a_copy_that_does_not_fit_is_not_made():
    """SGLang gathers a bf16 copy of every context of the batch for FlashMLA's prefill kernel."""
    made = planner("v32_fp8", synthetic(90, libraries=("flash_mla", "deep_gemm", "fa3")), heads=16)
    copy = LONG.shape.total_kv_len * 576 * 2
    for free, copied in ((4 * copy, True), (4 * copy - 4, False)):
        made.device = replace(made.device, memory_free=free)
        route = made.prefill(LONG)
        assert route.plan.dequantize_kv == copied
        assert route.path == ("flashmla_sparse" if copied else "flashmla_kv")
    assert "over a quarter of the free memory" in route.plan.reasons["dequantize_kv"]


@pytest.mark.parametrize(
    ("backend", "server_args", "feature"),
    [
        ({"hisparse_coordinator": object()}, {}, "hisparse"),
        ({}, {"enable_hisparse": True}, "hisparse"),
        ({}, {"enable_nsa_prefill_context_parallel": True}, "context-parallel prefill"),
        ({}, {"enable_prefill_cp": True}, "context-parallel prefill"),
        ({"dcp_size": 2}, {}, "context-parallel decode"),
        ({"dsa_index_kpool": 4}, {}, "pooled indexer keys"),
        ({"_kv_shard_pool": object()}, {}, "a sharded KV cache"),
        ({}, {"enable_deterministic_inference": True}, "deterministic inference"),
        ({"hisparse_coordinator": None, "_kv_shard_pool": None, "dcp_size": 1}, {"enable_prefill_cp": False}, None),
    ],
)
def test_features_left_to_sglang(backend: dict, server_args: dict, feature: str | None):
    assert v32_stock_feature(SimpleNamespace(**backend), SimpleNamespace(**server_args)) == feature


def test_features_that_sglang_turned_on_itself_are_left_to_it(monkeypatch: pytest.MonkeyPatch):
    """--rl-on-policy-target turns deterministic inference on."""
    keep_arguments_raw(monkeypatch)
    on = SimpleNamespace(**decided(enable_deterministic_inference=True))
    assert v32_stock_feature(SimpleNamespace(), on) == "deterministic inference"
    off = SimpleNamespace(enable_hisparse=True, _resolved_overrides=[("hisparse", {"enable_hisparse": False})])
    assert v32_stock_feature(SimpleNamespace(), off) is None


def test_the_tests_model_equals_the_plugins_shape():
    assert isinstance(MODEL, ModelShape)
    assert MODEL.heads_per_rank == 4


def test_each_input_of_a_steps_plan_makes_another_plan(monkeypatch: pytest.MonkeyPatch):
    decided = []

    def deciding(self, batch, constraints):
        decided.append((batch.phase, batch.num_requests, batch.num_tokens))
        return decide(self, batch, constraints)

    decide = Decider.decide
    monkeypatch.setattr(Decider, "decide", deciding)
    made, counted = planner("v32_fp8"), Counted()
    made.metrics = counted
    steps = [(Phase.DECODE, 4, 4), (Phase.DECODE, 8, 8), (Phase.TARGET_VERIFY, 4, 8), (Phase.TARGET_VERIFY, 8, 8)]
    for _ in range(3):
        for phase, requests, rows in steps:
            plan = made.step(step_batch(phase, requests, rows, 4096)).plan
            assert plan.phase is phase
            assert f"{requests} requests, {rows} query tokens" in plan.reasons["phase"]
    assert decided == steps
    assert made.trace.counts == {"decode/sparse_decode/cuda": 6, "target_verify/sparse_decode/cuda": 6}
    assert len(counted) == 12
    # The settings are a planner's: what another has decided is not taken over.
    other = planner("v32_fp8", decode_backend="triton").step(step_batch(*steps[0], 4096)).plan
    assert (other.provider, len(decided)) == ("triton", len(steps) + 1)


def test_a_new_reading_of_the_free_memory_makes_a_new_plan_of_the_same_lengths(monkeypatch: pytest.MonkeyPatch):
    made, chunks = planner("v32_fp8"), []
    for free in (64 << 20, 128 << 20, 64 << 20):
        made.free_memory = lambda free=free: free
        chunks.append(made.prefill(LONG).plan.indexer.rows_per_chunk)
    assert chunks == [128, 256, 128]
    monkeypatch.setattr(Decider, "decide", lambda *_: pytest.fail("decided before"))
    assert made.prefill(LONG).plan.indexer.rows_per_chunk == 128
