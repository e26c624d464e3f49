"""Whether ranks trade heads for tokens, by every fact that decides it, and whose rows are whose then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_plugin import measured, sharding
from nsa_plugin.devices import DeviceProfile, synthetic
from nsa_plugin.dispatch import decide, validate
from nsa_plugin.errors import SettingsError
from nsa_plugin.parallel.partition import PartitionError, by_count
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import BatchShape, ModelShape, Phase
from tests.dispatch_cases import (
    CPU,
    H200,
    LONG,
    OLD_FLASH_MLA,
    OLD_H200,
    SHARDING_H200,
    STOCK,
    TOKEN_SHARD,
    V4,
    V32,
    V32_FP8,
    choose,
    decode,
    extend,
    route,
)

CUDA, COPIED, STEP = "cuda sparse_prefill", "flash_mla sparse_prefill after dequantisation", "flash_mla sparse_decode"
PREFILL = (90, "sparse_mla_prefill", "v32_fp8")
GROUP8 = (90, "token_shard_attention tp8", "v32_fp8")
FULL = synthetic(90)
AS_RELEASED = sharding.TOKEN_SHARD_SERVED
TRADED_STEPS = (Phase.DECODE, Phase.TARGET_VERIFY)

Table = dict[tuple[int, str, str], dict[str, dict[int, measured.Points]]]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "TOKEN_SHARD_SERVED", True)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(table: Table) -> None:
        monkeypatch.setattr(measured, "MEASUREMENTS", table)

    put({})
    return put


def table(kept: float, traded: float, *, by: str = STEP) -> Table:
    """Times of 4096 rows: CUDA with 16 heads, `by` with all heads of an eighth of them, and that with the exchange."""
    slow = {16: ((4096, 9e9),), 128: ((512, 9e9),)}
    kernels = {CUDA: {16: ((4096, kept),), 128: ((512, 9e9),)}, STEP: slow, COPIED: slow}
    return {
        PREFILL: kernels | {by: {16: ((4096, 9e9),), 128: ((512, 1.0),)}},
        GROUP8: {f"token_shard by {by}": {16: ((2048, traded / 2), (4096, traded))}},
    }


# ---------------------------------------------------------------------------------------------------
# The constant


def test_nothing_is_traded_before_it_has_been_run(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    measure(table(1000.0, 100.0))
    assert choose(V32_FP8, LONG, FULL).token_shard
    monkeypatch.setattr(sharding, "TOKEN_SHARD_SERVED", AS_RELEASED)
    plan = choose(V32_FP8, LONG, FULL)
    assert not plan.token_shard
    assert "has not been run on GPUs with this release" in plan.reasons["token_shard"]
    for start in (decide, validate):
        arguments: tuple[Any, ...] = (LONG,) if start is decide else ()
        with pytest.raises(SettingsError, match=r"token_shard is on and cannot work here: .*not been run on GPUs"):
            start(V32_FP8, *arguments, FULL, Settings(token_shard="on"))
    assert choose(V32_FP8, LONG, FULL, token_shard="off").reasons["token_shard"] == "token_shard is off"


# ---------------------------------------------------------------------------------------------------
# Where heads are kept


@pytest.mark.parametrize(
    ("model", "shape", "device", "mode", "reason"),
    [
        (V32, LONG, SHARDING_H200, "off", "token_shard is off"),
        (V32, LONG, H200, "auto", "no token_shard kernels"),
        (replace(V32, attn_tp_size=1), LONG, SHARDING_H200, "auto", "attn_tp_size is 1"),
        (replace(V4, attn_tp_size=8), LONG, FULL, "auto", "family v4"),
        (V32, LONG, SHARDING_H200, "auto", "were not measured on SM90 with a bf16 cache"),
        (V32, extend(4096, 65536, context_parallel=True), SHARDING_H200, "on", "context-parallel group already"),
        (V32, extend(4096, 65536, cuda_graph=True), SHARDING_H200, "on", "a captured graph keeps its rows"),
        (V32, extend(7, 65536), SHARDING_H200, "on", "7 query rows are fewer than the 8 ranks"),
        (V32, extend(100), SHARDING_H200, "on", "dense attention pads no heads"),
        # 144 heads are more than any of these kernels takes, and 18 of them are not.
        (
            replace(V32, num_heads=144),
            LONG,
            synthetic(
                90, libraries=("flash_mla", "deep_gemm"), kernels=TOKEN_SHARD | {"deep_gemm": TOKEN_SHARD["triton"]}
            ),
            "on",
            "no kernel takes all heads of a share",
        ),
    ],
)
def test_heads_are_kept(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, mode: str, reason: str, measure: Any
) -> None:
    plan = choose(model, shape, device, token_shard=mode)
    assert not plan.token_shard
    assert reason in plan.reasons["token_shard"]


def test_draft_steps_keep_their_heads() -> None:
    plan = choose(V32_FP8, decode(512, 5000, phase=Phase.DRAFT_EXTEND), FULL, token_shard="on")
    assert not plan.token_shard
    assert plan.reasons["token_shard"] == "draft_extend: the rows of draft steps are not traded"


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        (V32, H200, "no token_shard kernels"),
        (V32, CPU, "no token_shard kernels"),
        (replace(V32, attn_tp_size=1), SHARDING_H200, "attn_tp_size is 1"),
        (replace(V4, attn_tp_size=8), FULL, "family v4"),
    ],
)
def test_on_where_it_cannot_work_is_an_error(model: ModelShape, device: DeviceProfile, reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"token_shard is on and cannot work here: .*{reason}.*: auto, off"):
        validate(model, device, Settings(token_shard="on"))


# ---------------------------------------------------------------------------------------------------
# Where they are traded


def test_on_trades_wherever_it_can(measure: Any) -> None:
    assert choose(V32, extend(8, 65536), SHARDING_H200, token_shard="on").token_shard
    assert choose(V32, LONG, replace(SHARDING_H200, nvlink=False), token_shard="on").token_shard
    unpadded = choose(replace(V32, attn_tp_size=2), LONG, SHARDING_H200, token_shard="on")
    assert unpadded.reasons["token_shard"].endswith("with all 128 heads instead of 64")
    plan = choose(V32, LONG, SHARDING_H200, token_shard="on")
    assert route(plan) == ("sparse_prefill", "flash_mla", False, 0)
    assert plan.reasons["token_shard"] == (
        "8 ranks take about 512 of 4096 query rows each with all 128 heads instead of 16 padded to 64"
    )
    assert plan.reasons["indexer"].endswith("for each of 4096 query rows, by the rank that attends it")
    own = choose(V32_FP8, LONG, FULL, token_shard="on")
    assert own.token_shard
    assert route(own) == ("sparse_decode", "flash_mla", False, 0)  # its 128 heads are not few


@pytest.mark.parametrize("phase", TRADED_STEPS)
@pytest.mark.parametrize("graph", [False, True])
def test_on_trades_the_rows_of_a_step(measure: Any, phase: Phase, graph: bool) -> None:
    plan = choose(V32_FP8, decode(512, 5000, phase=phase, cuda_graph=graph), FULL, token_shard="on")
    assert plan.token_shard
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)
    assert "8 ranks take about 64 of 512 query rows each with all 128 heads" in plan.reasons["token_shard"]
    few = choose(V32_FP8, decode(7, 5000, phase=phase, cuda_graph=graph), FULL, token_shard="on")
    assert (few.token_shard, few.reasons["token_shard"]) == (False, "7 query rows are fewer than the 8 ranks")


@pytest.mark.parametrize("phase", TRADED_STEPS)
def test_auto_trades_a_step_from_the_measured_size_on(measure: Any, phase: Phase) -> None:
    """By what was measured of steps, and not of prefills, at so many rows."""
    kernels = {
        "cuda sparse_decode": {16: ((1, 20.0), (1024, 400.0)), 128: ((1024, 9e9),)},
        STEP: {16: ((1024, 9e9),), 128: ((1, 20.0), (1024, 1400.0))},
    }
    label = f"token_shard by {STEP}"
    steps = (90, "sparse_mla_decode", "v32_fp8")
    for key, traded in (((90, "token_shard_steps tp8", "v32_fp8"), True), (GROUP8, False)):
        measure({steps: kernels, key: {label: {16: ((128, 95.0), (512, 150.0))}}})
        plan = choose(V32_FP8, decode(512, 5000, phase=phase), FULL)
        assert plan.token_shard == traded
        reason = plan.reasons["token_shard"]
        if not traded:
            assert reason == f"{STEP} over 8 ranks was not measured on SM90 for 512 rows"
            continue
        assert reason.endswith("150 us against cuda sparse_decode's 210 us, as measured on SM90")
        slower = choose(V32_FP8, decode(128, 5000, phase=phase), FULL).reasons["token_shard"]
        assert "of the own heads takes 67.2 us against 95 us of the trade, as measured on SM90" in slower
        fewer = choose(V32_FP8, decode(127, 5000, phase=phase), FULL)
        assert "was not measured on SM90 for 127 rows" in fewer.reasons["token_shard"]


def test_rows_come_under_a_limit(measure: Any) -> None:
    # 80000 rows are too many for the decode kernel on one rank; an eighth of them is not.
    device = synthetic(90, libraries=(*STOCK, "triton"), versions=OLD_FLASH_MLA)
    measure({})
    plan = choose(V32_FP8, extend(80000), device, token_shard="on")
    assert (plan.token_shard, route(plan)) == (True, ("sparse_decode", "flash_mla", False, 0))
    assert route(choose(V32_FP8, extend(80000), OLD_H200)) == ("sparse_prefill", "flash_mla", True, 64)


@pytest.mark.parametrize(
    ("kept", "traded", "trades"),
    [(1000.0, 500.0, True), (1000.0, 960.0, True), (1000.0, 980.0, False), (1000.0, 1500.0, False)],
)
def test_auto_trades_where_it_was_measured_to_be_quicker(
    measure: Any, kept: float, traded: float, trades: bool
) -> None:
    measure(table(kept, traded))
    plan = choose(V32_FP8, LONG, FULL)
    assert plan.token_shard == trades
    assert route(plan)[:2] == (("sparse_decode", "flash_mla") if trades else ("sparse_prefill", "cuda"))
    for time in (kept, traded):
        assert (f"{time:g} us" if time < 999.5 else f"{time / 1e3:.2f} ms") in plan.reasons["token_shard"]
    assert plan.reasons["token_shard"].endswith("as measured on SM90")


def test_auto_trades_over_nvlink_only(measure: Any) -> None:
    measure(table(1000.0, 500.0))
    plan = choose(V32_FP8, LONG, replace(FULL, nvlink=False))
    assert (plan.token_shard, "over NVLink" in plan.reasons["token_shard"]) == (False, True)


def test_auto_compares_with_the_best_kernel_for_few_heads(measure: Any) -> None:
    """Not with the padded one: what pads is slower, and not what would run."""
    padded = table(1000.0, 1500.0)
    padded[PREFILL][STEP] = padded[PREFILL][STEP] | {16: ((4096, 4000.0),)}
    measure(padded)
    assert not choose(V32_FP8, LONG, FULL).token_shard
    without = replace(FULL, libraries={**FULL.libraries, "cuda": replace(FULL.libraries["cuda"], available=False)})
    assert choose(V32_FP8, LONG, without).token_shard


def test_a_copy_of_the_context_counts(measure: Any) -> None:
    """Every rank copies it for its share; the measurement of the exchange has none in it."""
    of_copy = 65536 * (656 + 2 * 576) / 3e6
    for extra, trades in ((1.05, True), (0.9, False)):
        measure(table(1000.0, 970.0 - extra * of_copy, by=COPIED))
        assert choose(V32_FP8, LONG, FULL, prefill_backend="auto").token_shard == trades


@pytest.mark.parametrize(
    ("rows", "change", "reason"),
    [
        (2047, {}, "flash_mla sparse_decode over 8 ranks was not measured on SM90 for 2047 rows"),
        (4096, {PREFILL: {}}, "cuda sparse_prefill of 16 heads was not measured"),
        (
            4096,
            {GROUP8: {f"token_shard by {CUDA}": {16: ((2048, 1.0),)}}},
            "flash_mla sparse_decode over 8 ranks was not",
        ),
        (4096, {GROUP8: {}}, "8 ranks trading 16 heads each were not measured on SM90"),
    ],
)
def test_what_was_not_measured_is_not_traded(measure: Any, rows: int, change: Table, reason: str) -> None:
    measure(table(1000.0, 500.0) | change)
    plan = choose(V32_FP8, extend(rows, 65536), FULL)
    assert not plan.token_shard
    assert reason in plan.reasons["token_shard"]


def test_measurements_of_another_group_or_another_selection_say_nothing(measure: Any) -> None:
    measure(table(1000.0, 500.0))
    for model in (replace(V32_FP8, attn_tp_size=4), V32, replace(V32_FP8, index_topk=1024)):
        assert not choose(model, LONG, FULL).token_shard


# ---------------------------------------------------------------------------------------------------
# Shares


def test_shares_of_a_step_are_made_of_the_number_of_rows() -> None:
    assert sharding.step_shares(V32, 512).counts == [64] * 8
    assert sharding.step_shares(V32, 9) == by_count(9, 8)


def test_weights_are_a_devices_rates() -> None:
    """In picoseconds, of 128 heads of 576 and 512 values and 64 indexer heads of 128."""
    values = 128 * (576 + 512)
    assert sharding.weights(V32).row == pytest.approx(2 * values / 400e9 * 1e12, rel=0.01)
    assert sharding.weights(V32).attention == pytest.approx(values / 300e12 * 1e12, rel=0.01)
    assert sharding.weights(V32).indexer == pytest.approx(64 * 128 / 600e12 * 1e12, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200_000)), min_size=1, max_size=9),
    st.sampled_from([2, 4, 8, 16]),
)
def test_shares_are_every_row_once_and_fit(requests: list[tuple[int, int]], ranks: int) -> None:
    q_lens, kv_lens = [rows for rows, _ in requests], [rows + prefix for rows, prefix in requests]
    total = sum(q_lens)
    model = replace(V32, attn_tp_size=ranks)
    plan = choose(V32, LONG, H200)
    held = max(1, 2 * -(-total // ranks))
    found = sharding.shares(model, H200, plan, q_lens, kv_lens, held)
    assert (found.ranks, found.total) == (ranks, total)
    assert found.max_count <= held
    assert found == sharding.shares(model, H200, plan, q_lens, kv_lens, held)


def test_shares_of_one_long_prompt_are_balanced_by_cost() -> None:
    plan = choose(V32, LONG, H200)
    found = sharding.shares(V32, H200, plan, [8192], [8192], 2048)
    assert found.counts == sorted(found.counts, reverse=True)  # early rows see fewer keys
    assert found.counts[0] > 1.2 * found.counts[-1]


def test_shares_keep_to_the_kernels_limit_of_rows(measure: Any) -> None:
    device = synthetic(90, libraries=(*STOCK, "triton"), versions=OLD_FLASH_MLA)
    limit = 11622
    plan = choose(V32_FP8, extend(8 * limit), device, token_shard="on")
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)
    found = sharding.shares(V32_FP8, device, plan, [8 * limit], [8 * limit], 10**6)
    assert found.counts == [limit] * 8
    with pytest.raises(PartitionError, match=f"max_rows is {limit}"):
        sharding.shares(V32_FP8, device, plan, [8 * limit + 1], [8 * limit + 1], 10**6)
