"""Times from measurements, and how a decision uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision.case import Case
from nsa_plugin.decision.dispatch import decide, partition
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import FAMILY_LAYOUTS, BatchShape, ModelShape, Phase
from nsa_plugin.decision.sparse import COPY_BYTES, COPY_RATE, estimate
from nsa_plugin.layouts import V4_FP8, V32_FP8
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings

CUDA = "cuda sparse_prefill"
TRITON = "triton sparse_prefill"
STEP = "flash_mla sparse_decode"
COPIED = "flash_mla sparse_prefill after dequantisation"
PREFILL = (90, "sparse_mla_prefill", "v32_fp8")
V4_PREFILL = (90, "sparse_mla_prefill", "v4_fp8")
DECODE = (90, "sparse_mla_decode", "v32_fp8")
SHORT = (90, "mha_one_shot", "v32_fp8")

FEW = ModelShape(attn_tp_size=8, kv_layout="v32_fp8")  # 16 heads a rank
ALL = ModelShape(kv_layout="v32_fp8")
V4 = ModelShape(family="v4", num_heads=64, index_topk=512, kv_layout="v4_fp8", sliding_window=128)
H200 = synthetic(90)

Table = dict[tuple[int, str, str], dict[str, dict[int, timings.Points]]]
Measure = Callable[[Table], None]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Replace the measured times."""

    def put(table: Table) -> None:
        monkeypatch.setattr(timings, "TIMINGS", table)

    put({})
    return put


def _us(estimated: timings.TimeEstimate | None) -> float | None:
    return None if estimated is None else estimated.us


def extend(rows: int, context: int = 65536, **flags: Any) -> BatchShape:
    return BatchShape.from_lengths(Phase.EXTEND, [rows], [max(rows, context)], **flags)


def decode(requests: int, s_q: int = 1, **flags: Any) -> BatchShape:
    phase = Phase.DECODE if s_q == 1 else Phase.TARGET_VERIFY
    return BatchShape.from_lengths(phase, [s_q] * requests, [8192] * requests, **flags)


def choose(model: ModelShape, batch: BatchShape, device: DeviceProfile = H200, **settings: Any) -> Plan:
    return decide(model, batch, device, Settings(**settings))


def route(plan: Plan) -> tuple[str, str, bool]:
    return str(plan.attention), plan.provider, plan.dequantize_kv


# ---------------------------------------------------------------------------------------------------
# Interpolation


@pytest.mark.parametrize(
    ("rows", "time"),
    [
        (1, 20.0),  # below the first point: a launch's time
        (8, 20.0),
        (9, 20.0 + 1 / 24 * 40),
        (20, 40.0),  # between: linear
        (32, 60.0),
        (80, 110.0),
        (128, 160.0),
        (129, 160.0 * 129 / 128),  # beyond the last: proportional
        (1280, 1600.0),
    ],
)
def test_a_time_between_points(measure: Measure, rows: int, time: float) -> None:
    measure({DECODE: {"cuda sparse_decode": {16: ((8, 20.0), (32, 60.0), (128, 160.0))}}})
    assert _us(timings.estimate(*DECODE, 16, rows, "cuda sparse_decode")) == pytest.approx(time)


def test_a_single_point_is_a_launch_and_a_rate(measure: Measure) -> None:
    measure({PREFILL: {CUDA: {16: ((512, 100.0),)}}})
    assert [_us(timings.estimate(*PREFILL, 16, rows, CUDA)) for rows in (1, 512, 1024)] == [100.0, 100.0, 200.0]


@pytest.mark.parametrize(("heads", "time"), [(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0), (17, 4.0), (64, 4.0)])
def test_heads_take_the_next_measured_count(measure: Measure, heads: int, time: float) -> None:
    measure({PREFILL: {CUDA: {64: ((1, 4.0),), 8: ((1, 1.0),), 16: ((1, 2.0),)}}})
    assert _us(timings.estimate(*PREFILL, heads, 1, CUDA)) == time


@pytest.mark.parametrize(
    ("sm", "op", "layout", "heads", "label"),
    [
        (100, "sparse_mla_prefill", "v32_fp8", 16, CUDA),
        (90, "sparse_mla_decode", "v32_fp8", 16, CUDA),
        (90, "sparse_mla_prefill", "v4_fp8", 16, CUDA),
        (90, "sparse_mla_prefill", "v32_fp8", 65, CUDA),
        (90, "sparse_mla_prefill", "v32_fp8", 16, TRITON),
    ],
    ids=["SM", "op", "layout", "heads", "route"],
)
def test_what_was_not_measured_has_no_time(
    measure: Measure, sm: int, op: str, layout: str, heads: int, label: str
) -> None:
    measure({PREFILL: {CUDA: {64: ((1, 4.0),)}}})
    assert timings.estimate(sm, op, layout, heads, 1, label) is None
    assert timings.points(sm, op, layout, heads, label) == ()


PRO = replace(V4, num_heads=128, attn_tp_size=8, index_topk=1024)  # DeepSeek-V4-Pro, 16 heads a rank
PRO_PREFILL = (90, "sparse_mla_prefill", "v4_fp8, 1024 selected")


def test_each_selection_of_a_layout_has_times_of_its_own(measure: Measure) -> None:
    quickest = {CUDA: {16: ((8192, 1.0),)}, COPIED: {16: ((8192, 9.0),)}, STEP: {16: ((8192, 9.0),)}}
    measure({PRO_PREFILL: quickest})
    assert route(choose(PRO, extend(8192))) == ("sparse_prefill", "cuda", False)
    flash = V4, replace(V4, num_heads=128, attn_tp_size=8)
    assert {route(choose(model, extend(8192))) for model in flash} == {("sparse_prefill", "flash_mla", True)}
    measure({V4_PREFILL: quickest})
    assert route(choose(PRO, extend(8192))) == ("sparse_prefill", "flash_mla", True)
    assert route(choose(flash[1], extend(8192))) == ("sparse_prefill", "cuda", False)


def test_the_nearest_times_are_of_the_same_selection_where_it_has_some(measure: Measure) -> None:
    by_heads = {CUDA: {8: ((8192, 1.0),)}}
    measure({PRO_PREFILL: by_heads, V4_PREFILL: by_heads})
    for model, gpu, selected in ((replace(PRO, attn_tp_size=4), "H100", 1024), (V4, "H200", 512)):
        nearest = f"nearest measured: {gpu}, {selected} selected tokens and a window of 128, 8 heads, v4_fp8 cache"
        assert nearest in choose(model, extend(8192)).reasons["provider"]


def test_a_selection_that_nothing_is_filed_for_has_no_times(measure: Measure) -> None:
    measure({V4_PREFILL: {CUDA: {64: ((1, 1.0),)}}})
    other = replace(V4, index_topk=256)
    assert timings.filed("v4_fp8", (256, 128)) == ""
    assert "no times" in choose(other, extend(8192)).reasons["provider"]


def test_what_is_filed_is_found_again() -> None:
    for name in (*timings.SELECTIONS, *timings.MORE_SELECTIONS):
        assert timings.filed(*timings.filed_for(name)) == name


def test_every_layout_has_a_measured_selection() -> None:
    assert set(timings.SELECTIONS) == {layout for layouts in FAMILY_LAYOUTS.values() for layout in layouts}


# ---------------------------------------------------------------------------------------------------
# The provider of a batch


def prefills(**times: float) -> Table:
    """A table of 16 and 128 heads at 4096 rows."""
    names = {"cuda": CUDA, "triton": TRITON, "step": STEP, "copied": COPIED}
    return {PREFILL: {names[name]: {16: ((4096, time),), 128: ((4096, time),)} for name, time in times.items()}}


@pytest.mark.parametrize(
    ("times", "few", "many"),
    [
        # Nothing measured: upstream's kernel.
        ({}, "step", "step"),
        ({"cuda": 1550.0, "copied": 2410.0, "step": 3000.0}, "cuda", "cuda"),
        ({"cuda": 2500.0, "copied": 2410.0, "step": 3000.0}, "copied", "copied"),
        ({"cuda": 2500.0, "copied": 2410.0, "step": 1000.0}, "step", "step"),
        ({"cuda": 2500.0, "copied": 2410.0, "step": 1000.0, "triton": 900.0}, "triton", "triton"),
        # Within 3 % the usual order applies: step, copied, cuda.
        ({"cuda": 1029.0, "copied": 1000.0, "step": 1029.0}, "step", "step"),
        ({"cuda": 1031.0, "copied": 1000.0, "step": 1031.0}, "copied", "copied"),
        ({"cuda": 1000.0, "copied": 1000.0, "step": 1000.0}, "step", "step"),
        # A route without a measurement keeps its place.
        ({"cuda": 9000.0, "copied": 1000.0}, "step", "step"),
        ({"cuda": 1.0}, "step", "step"),
        ({"triton": 1.0}, "step", "step"),
    ],
)
def test_the_fastest_measured_route_is_used(measure: Measure, times: dict[str, float], few: str, many: str) -> None:
    measure(prefills(**times))
    routes = {
        "cuda": ("sparse_prefill", "cuda", False),
        "triton": ("sparse_prefill", "triton", False),
        "step": ("sparse_decode", "flash_mla", False),
        "copied": ("sparse_prefill", "flash_mla", True),
    }
    assert route(choose(FEW, extend(4096))) == routes[few]
    assert route(choose(ALL, extend(4096))) == routes[many]


def test_the_reason_names_the_times(measure: Measure) -> None:
    measure(prefills(cuda=1550.0, step=2410.0))
    expected = "cuda 1.55 ms, flash_mla decode kernel 2.41 ms (measured on H200, 16 heads, 4096 query tokens)"
    assert choose(FEW, extend(4096)).reasons["provider"] == expected
    measure(prefills(cuda=812.4, step=700.0, copied=690.0, triton=5000.0))
    assert choose(FEW, extend(4096)).reasons["provider"] == (
        "flash_mla decode kernel 700 us, flash_mla after dequantisation 690 us, cuda 812 us, triton 5.00 ms "
        "(measured on H200, 16 heads, 4096 query tokens), less than 3% apart, so their usual order holds"
    )


def test_a_time_that_stands_alone_or_decides_nothing_is_not_a_reason(measure: Measure) -> None:
    first = "flash_mla is the first that supports the batch on SM90"
    measure(prefills(step=1550.0))
    assert choose(FEW, extend(4096)).reasons["provider"] == first
    measure(prefills(cuda=1000.0, triton=900.0))
    assert choose(FEW, extend(4096)).reasons["provider"] == first


def test_a_faster_route_that_cannot_run_is_refused_with_a_reason(measure: Measure) -> None:
    measure(prefills(cuda=1550.0, step=1000.0))
    plan = choose(FEW, extend(4096), synthetic(90, libraries=("cuda", "triton")))
    assert route(plan) == ("sparse_prefill", "cuda", False)
    assert plan.reasons["provider"].startswith(
        "cuda is the first that supports the batch on SM90; refused flash_mla sparse_decode: not installed; "
    )


def test_a_setting_overrides_measured_times(measure: Measure) -> None:
    measure(prefills(cuda=1550.0, step=2410.0, copied=2000.0))
    assert choose(FEW, extend(4096), prefill_backend="triton").provider == "triton"
    plan = choose(FEW, extend(4096), prefill_backend="flash_mla")
    assert route(plan) == ("sparse_prefill", "flash_mla", True)  # the faster of the library's two
    assert plan.reasons["provider"] == (
        "prefill_backend asks for flash_mla; flash_mla after dequantisation 2.00 ms, flash_mla decode kernel 2.41 ms "
        "(measured on H200, 16 heads, 4096 query tokens)"
    )


def test_measurements_apply_only_to_their_topk_and_architecture(measure: Measure) -> None:
    measure(prefills(cuda=1000.0, step=9000.0))
    assert choose(FEW, extend(4096)).provider == "cuda"
    assert choose(replace(FEW, index_topk=1024), extend(4096)).provider == "flash_mla"
    measure({(100, *PREFILL[1:]): prefills(cuda=1000.0, step=9000.0)[PREFILL]})
    assert choose(FEW, extend(4096)).provider == "flash_mla"


def test_a_graph_and_a_row_limit_refuse_a_faster_route(measure: Measure) -> None:
    measure(prefills(cuda=2000.0, copied=1000.0, step=3000.0))
    assert route(choose(FEW, extend(4096, cuda_graph=True))) == ("sparse_prefill", "cuda", False)
    old = synthetic(90, versions={"flash_mla": ("sglang-kernel", "0.4.5")})
    measure(prefills(cuda=2000.0, copied=3000.0, step=1000.0))
    assert route(choose(FEW, extend(11622), old)) == ("sparse_decode", "flash_mla", False)
    assert route(choose(FEW, extend(11623), old)) == ("sparse_prefill", "cuda", False)


def test_decode_times_depend_on_query_tokens(measure: Measure) -> None:
    measure({DECODE: {"cuda sparse_decode": {16: ((1, 20.0), (256, 90.0))}, STEP: {16: ((1, 30.0), (256, 60.0))}}})
    for batch, provider in (
        (decode(1), "cuda"),
        (decode(256), "flash_mla"),
        (decode(128, 2), "flash_mla"),
        (decode(8, 2), "cuda"),
    ):
        assert choose(FEW, batch).provider == provider
        assert choose(FEW, replace(batch, cuda_graph=True)).provider == provider
    assert (
        choose(FEW, decode(128, 2))
        .reasons["provider"]
        .startswith(
            "flash_mla decode kernel 60 us, cuda 90 us (measured on H200, 16 heads, 256 query tokens); refused fa3 "
        )
    )


def test_v4_takes_its_own_measurements_and_keeps_large_q_rows(measure: Measure) -> None:
    curves = {STEP: ((512, 100.0), (8192, 1600.0)), COPIED: ((512, 150.0), (8192, 1200.0))}
    measure({V4_PREFILL: {label: {64: points} for label, points in curves.items()}})
    assert route(choose(V4, extend(512))) == ("sparse_decode", "flash_mla", False)
    assert route(choose(V4, extend(8192))) == ("sparse_prefill", "flash_mla", True)
    measure({V4_PREFILL: {STEP: {64: ((512, 100.0),)}, COPIED: {64: ((512, 900.0),)}}})
    assert route(choose(V4, extend(8192))) == ("sparse_decode", "flash_mla", False)
    assert route(choose(V4, extend(8192), large_q_rows=4096)) == ("sparse_prefill", "flash_mla", True)


def test_a_longer_context_takes_longer_to_copy(measure: Measure) -> None:
    measure(prefills(cuda=1100.0, copied=1000.0, step=2000.0))

    def copied(context: int) -> float | None:
        case = Case(FEW, extend(4096, context), H200, Settings())
        return _us(estimate(case, Route(Attention.SPARSE_PREFILL, "flash_mla", True), case.own_load))

    assert (copied(5000), copied(65536)) == (1000.0, 1000.0)
    assert copied(65536 + 30_000_000) == pytest.approx(1000.0 + 30_000_000 * 1808 / 3e6)
    assert choose(FEW, extend(4096)).provider == "flash_mla"
    assert choose(FEW, extend(4096, 1_000_000)).provider == "cuda"
    # With fewer rows than were measured the copy decides, and it was not measured by itself.
    assert copied(65536) is not None
    assert choose(FEW, extend(4095)).provider == "cuda"


def test_the_bytes_of_a_copy_follow_from_the_layout() -> None:
    assert COPY_BYTES["v32_fp8"] == V32_FP8.row_bytes + 2 * V32_FP8.dim
    assert COPY_BYTES["v4_fp8"] == (V4_FP8.row_bytes + 2 * V4_FP8.dim) // 4
    assert COPY_RATE > 0


# ---------------------------------------------------------------------------------------------------
# Dense attention of short prompts


def short(dense: list[float], **sparse: list[float]) -> Table:
    """Times at 512, 1024, 2048 and 4096 tokens."""
    names = {"cuda": CUDA, "triton": TRITON, "copied": COPIED}

    def points(times: list[float]) -> dict[int, timings.Points]:
        return {16: tuple(zip((512, 1024, 2048, 4096), times, strict=True))}

    by_label = {"fa3 mha_one_shot": points(dense)} | {names[name]: points(times) for name, times in sparse.items()}
    return {SHORT: by_label}


@pytest.mark.parametrize(
    ("table", "limit"),
    [
        ({}, 2048),
        (short([1, 2, 3, 4]), 2048),
        (short([1, 2, 3, 4], cuda=[2, 4, 6, 8]), 2048),
        (short([1, 2, 6, 9], cuda=[2, 4, 6, 8]), 2048),  # slower from beyond index_topk on
        (short([1, 2, 7, 9], cuda=[2, 4, 6, 8]), 1024),
        (short([1, 2, 7, 9], cuda=[9, 9, 9, 9], copied=[2, 1, 6, 8]), 512),
        (short([3, 2, 7, 9], cuda=[2, 4, 6, 8]), 1024),  # slower where both are launches: no limit from below
        (short([3, 5, 7, 9], cuda=[2, 4, 6, 8]), 0),
    ],
)
def test_dense_attention_up_to_the_measured_crossover(measure: Measure, table: Table, limit: int) -> None:
    measure(table)
    for tokens in (1, 512, 513, 1024, 1025, 2048):
        plan = choose(FEW, extend(tokens, tokens))
        assert (plan.attention is Attention.MHA_ONE_SHOT) == (tokens <= limit), tokens
    parts = partition(FEW, [300, 1500, 900], [300, 1500, 900], Phase.EXTEND, H200, Settings())
    dense = {request for part in parts if part.plan.provider == "fa3" for request in part.requests}
    assert dense == {request for request, tokens in enumerate((300, 1500, 900)) if tokens <= limit}
    assert len(parts) == (2 if 0 < len(dense) < 3 else 1)


def test_other_head_dimensions_scale_the_dense_times_and_the_reason_says_estimated(measure: Measure) -> None:
    """GLM-5's heads have 256 + 256 elements where 192 + 128 were measured: 1.6 times the operations."""
    measure(short([1, 2, 5, 9], cuda=[2, 4, 6, 9]))
    glm = replace(FEW, qk_nope_head_dim=192, v_head_dim=256)
    assert choose(FEW, extend(2048, 2048)).attention is Attention.MHA_ONE_SHOT
    assert choose(glm, extend(1024, 1024)).attention is Attention.MHA_ONE_SHOT
    plan = choose(glm, extend(2048, 2048))
    assert plan.attention is not Attention.MHA_ONE_SHOT
    assert (
        "fa3 is estimated, from measurements with heads of (192, 128), to take no longer" in plan.reasons["attention"]
    )


def test_the_crossover_is_reported_and_a_setting_overrides_it(measure: Measure) -> None:
    measure(short([1, 2, 7, 9], cuda=[2, 4, 6, 8]))
    why = "the 1024 up to which fa3 was measured to take no longer than sparse attention"
    assert choose(FEW, extend(9, 9)).reasons["attention"] == f"the longest context of 9 tokens is within {why}"
    assert f"the longest context of 1025 tokens exceeds {why}" in choose(FEW, extend(9, 1025)).reasons["attention"]
    assert choose(FEW, extend(2048, 2048), mha_max_kv=2048).attention is Attention.MHA_ONE_SHOT
    # Without sparse attention a prefill stays dense.
    without = synthetic(90, libraries=("flash_mla", "deep_gemm", "fa3"))
    assert choose(FEW, extend(2048, 2048), without).attention is Attention.MHA_ONE_SHOT


# ---------------------------------------------------------------------------------------------------
# Where a time comes from


CURVE = {16: ((512, 100.0), (2048, 400.0), (4096, 800.0))}


@pytest.mark.parametrize(
    ("heads", "tokens", "measured", "source"),
    [
        (16, 2048, True, "measured on H200, 16 heads, 2048 query tokens"),
        (16, 3000, False, "interpolated between 2048 and 4096 query tokens, measured on H200, 16 heads"),
        (16, 8192, False, "estimated from 4096 query tokens, measured on H200, 16 heads"),
        (16, 100, False, "estimated from 512 query tokens, measured on H200, 16 heads"),
        (12, 2048, False, "estimated from measurements on H200, 16 heads for 12, 2048 query tokens"),
        (12, 3000, False, "interpolated between 2048 and 4096 query tokens, measured on H200, 16 heads for 12"),
    ],
    ids=["measured", "between", "beyond", "below", "next head count", "next head count, between"],
)
def test_a_time_says_where_it_comes_from(
    measure: Measure, heads: int, tokens: int, measured: bool, source: str
) -> None:
    measure({PREFILL: {CUDA: CURVE}})
    found = timings.estimate(*PREFILL, heads, tokens, CUDA)
    assert found is not None
    assert (found.measured, found.source("H200")) == (measured, source)


def test_an_added_copy_is_in_the_reason(measure: Measure) -> None:
    measure({PREFILL: {COPIED: CURVE}})
    found = timings.estimate(*PREFILL, 16, 2048, COPIED)
    assert found is not None
    longer = found.plus(25.0)
    assert (longer.us, longer.measured) == (425.0, False)
    assert longer.source("H200") == (
        "estimated from measurements on H200, 16 heads, 2048 query tokens, copy of a longer context added"
    )
    assert found.plus(0.0) == found


def test_a_reason_never_calls_an_interpolated_time_measured_at_its_point(measure: Measure) -> None:
    """Before, every reason said "as measured", whatever the batch's query tokens and heads."""
    measure({PREFILL: {CUDA: CURVE, STEP: {64: ((512, 300.0), (4096, 2400.0))}}})
    assert choose(FEW, extend(3000)).reasons["provider"] == (
        "cuda 586 us (interpolated between 2048 and 4096 query tokens, measured on H200, 16 heads), "
        "flash_mla decode kernel 1.76 ms (interpolated between 512 and 4096 query tokens, measured on H200, "
        "64 heads for 16)"
    )


@pytest.mark.parametrize("layout", ["bf16", "v32_fp8"])
@pytest.mark.parametrize("topk", [512, 1024, 4096])
def test_a_selection_that_was_not_measured_has_no_estimate_and_says_so(layout: str, topk: int) -> None:
    """With the packaged times, which are for 2048 selected tokens."""
    model = ModelShape(attn_tp_size=8, kv_layout=layout, index_topk=topk)
    for batch in (extend(8192), decode(64)):
        plan = choose(model, batch)
        assert (
            f"no times on SM90 for {topk} selected tokens, 16 heads, {layout} cache "
            f"(nearest measured: H200, 2048 selected tokens, 16 heads, {layout} cache)"
        ) in plan.reasons["provider"]
        assert "measured on H200" not in plan.reasons["provider"]


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_bf16_cache_has_times_of_its_own(ranks: int) -> None:
    """With the packaged times: the kernel that reads bf16 rows unpadded is the faster one for few heads."""
    for batch in (extend(4096), decode(32)):
        plan = choose(ModelShape(attn_tp_size=ranks), batch)
        assert plan.provider == "cuda"
        assert f"measured on H200, {128 // ranks} heads, " in plan.reasons["provider"]
