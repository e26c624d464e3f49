"""The decision to reshard heads, by each fact that it depends on, and the partition of query tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_plugin.decision import timings
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import decide, partition, validate
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.decision.sparse import NEARLY_EQUAL
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.parallel.partition import PartitionError, by_count
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import (
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
from tests.decision.sharding_records import ATTENTION_ALONE, recorded

CUDA, COPIED, STEP = "cuda sparse_prefill", "flash_mla sparse_prefill after dequantisation", "flash_mla sparse_decode"
PREFILL = (90, "sparse_mla_prefill", "v32_fp8")
GROUP8 = (90, "token_shard_attention tp8", "v32_fp8")
FULL = synthetic(90)
RESHARDED_STEPS = (Phase.DECODE, Phase.TARGET_VERIFY)

Table = dict[tuple[int, str, str], dict[str, dict[int, timings.Points]]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(table: Table) -> None:
        monkeypatch.setattr(timings, "TIMINGS", table)

    put({})
    return put


def table(local: float, resharded: float, *, by: str = STEP) -> Table:
    """Times of 4096 rows: CUDA with 16 heads, `by` with all heads of an eighth of them, and `by` with the exchange."""
    slow = {16: ((4096, 9e9),), 128: ((512, 9e9),)}
    kernels = {CUDA: {16: ((4096, local),), 128: ((512, 9e9),)}, STEP: slow, COPIED: slow}
    return {
        PREFILL: kernels | {by: {16: ((4096, 9e9),), 128: ((512, 1.0),)}},
        GROUP8: {f"token_shard by {by}": {16: ((2048, resharded / 2), (4096, resharded))}},
    }


# ---------------------------------------------------------------------------------------------------
# Heads stay local


@pytest.mark.parametrize(
    ("model", "shape", "device", "mode", "reason"),
    [
        (V32, LONG, SHARDING_H200, "off", "token_shard is off"),
        (V32, LONG, H200, "auto", "no token_shard kernels"),
        (replace(V32, attn_tp_size=1), LONG, SHARDING_H200, "auto", "attn_tp_size is 1"),
        (replace(V4, attn_tp_size=8), LONG, FULL, "auto", "family is v4"),
        (V32, LONG, SHARDING_H200, "auto", "no times on SM90 for 8 ranks that reshard 16 heads each over a bf16 cache"),
        (
            V32,
            extend(4096, 65536, context_parallel=True),
            SHARDING_H200,
            "on",
            "already split over a context-parallel group",
        ),
        (V32, extend(4096, 65536, cuda_graph=True), SHARDING_H200, "on", "a captured graph has fixed query tokens"),
        (V32, extend(7, 65536), SHARDING_H200, "on", "7 query tokens, fewer than the 8 ranks"),
        (V32, extend(100), SHARDING_H200, "on", "dense attention pads no heads"),
        # 144 heads exceed every kernel's limit; 18 do not.
        (
            replace(V32, num_heads=144),
            LONG,
            synthetic(
                90, libraries=("flash_mla", "deep_gemm"), kernels=TOKEN_SHARD | {"deep_gemm": TOKEN_SHARD["triton"]}
            ),
            "on",
            "no kernel supports all heads of a rank's share",
        ),
    ],
)
def test_heads_stay_local(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, mode: str, reason: str, measure: Any
) -> None:
    plan = choose(model, shape, device, token_shard=mode)
    assert not plan.token_shard
    assert reason in plan.reasons["token_shard"]


KEEPS = "two batches are attended at once"


@pytest.mark.parametrize(
    ("shape", "mode", "reason"),
    [
        (LONG, "on", KEEPS),
        (decode(512, 5000, cuda_graph=True), "on", KEEPS),
        (LONG, "auto", KEEPS),
        (LONG, "off", "token_shard is off"),
        (extend(1024, 1024), "on", "dense attention pads no heads"),
        (decode(512, 5000, phase=Phase.DRAFT_EXTEND), "on", "draft_extend: draft steps do not reshard"),
    ],
)
def test_an_engines_reason_keeps_heads_local_whatever_was_measured(shape: BatchShape, mode: str, reason: str) -> None:
    """The rest of the plan equals that of `off`."""
    model, settings = replace(V32_FP8, attn_tp_size=4), Settings(token_shard=mode)
    local = decide(model, shape, FULL, settings, Constraints(keep_heads=KEEPS))
    off = decide(model, shape, FULL, replace(settings, token_shard="off"))
    assert local.reasons == off.reasons | {"token_shard": reason}
    assert replace(local, reasons={}) == replace(off, reasons={})
    if reason == KEEPS:
        assert decide(model, shape, FULL, settings).token_shard


def test_an_engines_reason_keeps_heads_local_in_all_parts_of_a_prefill() -> None:
    model = replace(V32_FP8, attn_tp_size=4)
    q_lens, kv_lens = [4096, 100], [65536, 100]
    parts = partition(
        model,
        q_lens,
        kv_lens,
        Phase.EXTEND,
        FULL,
        Settings(token_shard="on"),
        constraints=Constraints(keep_heads=KEEPS),
    )
    said = {part.requests: (part.plan.token_shard, part.plan.reasons["token_shard"]) for part in parts}
    assert said == {(0,): (False, KEEPS), (1,): (False, "dense attention pads no heads")}


def test_draft_steps_keep_heads_local() -> None:
    plan = choose(V32_FP8, decode(512, 5000, phase=Phase.DRAFT_EXTEND), FULL, token_shard="on")
    assert not plan.token_shard
    assert plan.reasons["token_shard"] == "draft_extend: draft steps do not reshard"


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [
        (V32, H200, "no token_shard kernels"),
        (V32, CPU, "no token_shard kernels"),
        (replace(V32, attn_tp_size=1), SHARDING_H200, "attn_tp_size is 1"),
        (replace(V4, attn_tp_size=8), FULL, "family is v4"),
    ],
)
def test_on_is_an_error_where_resharding_cannot_work(model: ModelShape, device: DeviceProfile, reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"token_shard is on and cannot work here: .*{reason}.*: auto, off"):
        validate(model, device, Settings(token_shard="on"))


# ---------------------------------------------------------------------------------------------------
# Heads are resharded


def test_on_reshards_wherever_it_can(measure: Any) -> None:
    assert choose(V32, extend(8, 65536), SHARDING_H200, token_shard="on").token_shard
    assert choose(V32, LONG, replace(SHARDING_H200, nvlink=False), token_shard="on").token_shard
    unpadded = choose(replace(V32, attn_tp_size=2), LONG, SHARDING_H200, token_shard="on")
    assert unpadded.reasons["token_shard"].endswith("with all 128 heads instead of 64")
    plan = choose(V32, LONG, SHARDING_H200, token_shard="on")
    assert route(plan) == ("sparse_prefill", "flash_mla", False, 0)
    assert plan.reasons["token_shard"] == (
        "each of 8 ranks attends about 512 of 4096 query tokens with all 128 heads instead of 16 padded to 64"
    )
    assert plan.reasons["indexer"].endswith("for each of 4096 query tokens, by the rank that attends to them")
    own = choose(V32_FP8, LONG, FULL, token_shard="on")
    assert own.token_shard
    assert route(own) == ("sparse_decode", "flash_mla", False, 0)  # 128 heads need no padding


@pytest.mark.parametrize("phase", RESHARDED_STEPS)
@pytest.mark.parametrize("graph", [False, True])
def test_on_reshards_decode_and_verify_steps(measure: Any, phase: Phase, graph: bool) -> None:
    plan = choose(V32_FP8, decode(512, 5000, phase=phase, cuda_graph=graph), FULL, token_shard="on")
    assert plan.token_shard
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)
    assert "each of 8 ranks attends about 64 of 512 query tokens with all 128 heads" in plan.reasons["token_shard"]
    few = choose(V32_FP8, decode(7, 5000, phase=phase, cuda_graph=graph), FULL, token_shard="on")
    assert (few.token_shard, few.reasons["token_shard"]) == (False, "7 query tokens, fewer than the 8 ranks")


@pytest.mark.parametrize("phase", RESHARDED_STEPS)
def test_auto_reshards_steps_from_the_measured_size_up(measure: Any, phase: Phase) -> None:
    """From measurements of steps, not of prefills, at that number of query tokens."""
    kernels = {
        "cuda sparse_decode": {16: ((1, 20.0), (1024, 400.0)), 128: ((1024, 9e9),)},
        STEP: {16: ((1024, 9e9),), 128: ((1, 20.0), (1024, 1400.0))},
    }
    label = f"token_shard by {STEP}"
    steps = (90, "sparse_mla_decode", "v32_fp8")
    for key, resharded in (((90, "token_shard_steps tp8", "v32_fp8"), True), (GROUP8, False)):
        measure({steps: kernels, key: {label: {16: ((128, 95.0), (512, 150.0))}}})
        plan = choose(V32_FP8, decode(512, 5000, phase=phase), FULL)
        assert plan.token_shard == resharded
        reason = plan.reasons["token_shard"]
        if not resharded:
            assert reason == f"no times on SM90 for {STEP} over 8 ranks and 512 query tokens"
            continue
        assert reason.endswith(
            "own heads with cuda sparse_decode 210 us (interpolated between 1 and 1024 query tokens, measured on H200, "
            "16 heads), resharding 150 us (measured on H200, 16 heads, 512 query tokens)"
        )
        slower = choose(V32_FP8, decode(128, 5000, phase=phase), FULL).reasons["token_shard"]
        assert "no gain: own heads with cuda sparse_decode 67.2 us (interpolated" in slower
        assert "resharding 95 us (measured on H200, 16 heads, 128 query tokens)" in slower
        fewer = choose(V32_FP8, decode(127, 5000, phase=phase), FULL)
        assert "over 8 ranks and 127 query tokens" in fewer.reasons["token_shard"]


def test_resharding_keeps_query_tokens_within_a_kernels_limit(measure: Any) -> None:
    # 80000 query tokens exceed the decode kernel's limit on one rank; an eighth of them does not.
    device = synthetic(90, libraries=(*STOCK, "triton"), versions=OLD_FLASH_MLA)
    measure({})
    plan = choose(V32_FP8, extend(80000), device, token_shard="on")
    assert (plan.token_shard, route(plan)) == (True, ("sparse_decode", "flash_mla", False, 0))
    assert route(choose(V32_FP8, extend(80000), OLD_H200)) == ("sparse_prefill", "flash_mla", True, 64)


@pytest.mark.parametrize(
    ("local", "resharded", "reshards"),
    [(1000.0, 500.0, True), (1000.0, 960.0, True), (1000.0, 980.0, False), (1000.0, 1500.0, False)],
)
def test_auto_reshards_if_measured_faster(measure: Any, local: float, resharded: float, reshards: bool) -> None:
    measure(table(local, resharded))
    plan = choose(V32_FP8, LONG, FULL)
    assert plan.token_shard == reshards
    assert route(plan)[:2] == (("sparse_decode", "flash_mla") if reshards else ("sparse_prefill", "cuda"))
    for time in (local, resharded):
        assert (f"{time:g} us" if time < 999.5 else f"{time / 1e3:.2f} ms") in plan.reasons["token_shard"]
    assert plan.reasons["token_shard"].endswith("(measured on H200, 16 heads, 4096 query tokens)")


def test_auto_reshards_over_nvlink_only(measure: Any) -> None:
    measure(table(1000.0, 500.0))
    plan = choose(V32_FP8, LONG, replace(FULL, nvlink=False))
    assert (plan.token_shard, "over NVLink" in plan.reasons["token_shard"]) == (False, True)


def test_auto_compares_with_the_best_kernel_for_few_heads(measure: Any) -> None:
    """Not with the padded one, which is slower and would not run."""
    padded = table(1000.0, 1500.0)
    padded[PREFILL][STEP] = padded[PREFILL][STEP] | {16: ((4096, 4000.0),)}
    measure(padded)
    assert not choose(V32_FP8, LONG, FULL).token_shard
    without = replace(FULL, libraries={**FULL.libraries, "cuda": replace(FULL.libraries["cuda"], available=False)})
    assert choose(V32_FP8, LONG, without).token_shard


def test_a_copy_of_the_context_counts(measure: Any) -> None:
    """Every rank makes the copy for its share; the measurement of the exchange does not include it."""
    of_copy = 65536 * (656 + 2 * 576) / 3e6
    for extra, reshards in ((1.05, True), (0.9, False)):
        measure(table(1000.0, 970.0 - extra * of_copy, by=COPIED))
        assert choose(V32_FP8, LONG, FULL, prefill_backend="auto").token_shard == reshards


# ---------------------------------------------------------------------------------------------------
# Number of pieces


def in_pieces(*times: float, rows: int = 2048, phase: str = "attention") -> Table:
    """Times of resharding in 1, 2 and 4 pieces, for `rows` and for twice as many."""
    points = {chunks: {16: ((rows, time), (2 * rows, 2 * time))} for chunks, time in zip((1, 2, 4), times, strict=True)}
    labels = {sharding.in_chunks(f"token_shard by {STEP}", chunks): by_heads for chunks, by_heads in points.items()}
    return table(1000.0, 1.0) | {(90, f"token_shard_{phase} tp8", "v32_fp8"): labels}


@pytest.mark.parametrize(
    ("times", "chunks"),
    [((250.0, 200.0, 225.0), 2), ((250.0, 225.0, 200.0), 4), ((200.0, 225.0, 250.0), 1), ((200.0, 200.0, 200.0), 1)],
)
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_the_fastest_number_of_pieces_is_used(measure: Any, times: Any, chunks: int, mode: str) -> None:
    measure(in_pieces(*times))
    plan = choose(V32_FP8, LONG, FULL, token_shard=mode, prefill_backend="flash_mla" if mode == "on" else "auto")
    assert (plan.token_shard, plan.token_shard_chunks) == (True, chunks)
    assert ("in" in plan.reasons["token_shard"].split()) == (chunks > 1)
    assert chunks == 1 or f", in {chunks} pieces" in plan.reasons["token_shard"]
    if mode == "auto":
        assert plan.reasons["token_shard"].endswith("400 us (measured on H200, 16 heads, 4096 query tokens)")
        assert f": own heads with {CUDA} 1.00 ms, resharding" in plan.reasons["token_shard"]
    one, two, four = (f"{2 * time:g} us" for time in times)
    said = f"1 piece {one}, 2 pieces {two}, 4 pieces {four} (measured on H200, 16 heads, 4096 query tokens)"
    assert plan.reasons["token_shard_chunks"] == said


def test_auto_compares_the_best_pieces_with_local_heads(measure: Any) -> None:
    measure(in_pieces(1400.0, 900.0, 1200.0, rows=4096))
    plan = choose(V32_FP8, LONG, FULL)
    assert (plan.token_shard, plan.token_shard_chunks) == (True, 2)
    assert sharding.pointless(V32_FP8, FULL, Settings(), 4096) is None
    measure(in_pieces(1400.0, 1100.0, 1200.0, rows=4096))
    plan = choose(V32_FP8, LONG, FULL)
    assert (plan.token_shard, plan.token_shard_chunks) == (False, 1)
    assert (
        "no gain: own heads with cuda sparse_prefill 1.00 ms, resharding in 2 pieces 1.10 ms (measured"
        in plan.reasons["token_shard"]
    )
    assert plan.reasons["token_shard_chunks"] == "nothing is exchanged"
    assert sharding.pointless(V32_FP8, FULL, Settings(), 4096) is not None


def test_a_prefill_is_cut_if_measured_and_large_enough(measure: Any) -> None:
    def chosen(shape: BatchShape) -> tuple[int, str]:
        plan = choose(V32_FP8, shape, FULL, token_shard="on", decode_backend="flash_mla", prefill_backend="flash_mla")
        assert plan.token_shard
        return plan.token_shard_chunks, plan.reasons["token_shard_chunks"]

    unmeasured = "no times on SM90 for more than one piece and 2047 query tokens"
    measure({})
    assert chosen(extend(2047, 65536)) == (1, unmeasured)
    measure(in_pieces(300.0, 200.0, 100.0))
    assert chosen(extend(2047, 65536)) == (1, unmeasured)  # fewer rows than were
    assert chosen(extend(2048, 65536))[0] == 4
    measure(in_pieces(300.0, 200.0, 100.0, rows=8))
    assert chosen(extend(32, 65536))[0] == 4
    assert chosen(extend(31, 65536)) == (
        2,
        "1 piece 1.16 ms, 2 pieces 775 us (estimated from 16 query tokens, measured on H200, 16 heads)",
    )
    assert chosen(extend(16, 65536))[0] == 2
    assert chosen(extend(15, 65536)) == (1, "15 query tokens of 8 ranks are too few to split")
    measure(in_pieces(300.0, 200.0, 100.0, rows=8, phase="steps"))
    for phase in RESHARDED_STEPS:
        whole = 1, "decode and verify steps are exchanged in one piece"
        assert chosen(decode(512, 5000, phase=phase, cuda_graph=True)) == whole


@pytest.mark.parametrize(
    ("rows", "change", "reason"),
    [
        (2047, {}, "no times on SM90 for flash_mla sparse_decode over 8 ranks and 2047 query tokens"),
        (4096, {PREFILL: {}}, "no times on SM90 for flash_mla sparse_decode of 16 heads"),
        (
            4096,
            {GROUP8: {f"token_shard by {CUDA}": {16: ((2048, 1.0),)}}},
            "no times on SM90 for flash_mla sparse_decode over 8 ranks",
        ),
        (4096, {GROUP8: {}}, "no times on SM90 for 8 ranks that reshard 16 heads each"),
    ],
)
def test_auto_does_not_reshard_without_a_measurement(measure: Any, rows: int, change: Table, reason: str) -> None:
    measure(table(1000.0, 500.0) | change)
    plan = choose(V32_FP8, extend(rows, 65536), FULL)
    assert not plan.token_shard
    assert reason in plan.reasons["token_shard"]


def test_measurements_of_another_group_or_topk_are_not_used(measure: Any) -> None:
    measure(table(1000.0, 500.0))
    for model in (replace(V32_FP8, attn_tp_size=4), V32, replace(V32_FP8, index_topk=1024)):
        assert not choose(model, LONG, FULL).token_shard


# ---------------------------------------------------------------------------------------------------
# As released


@pytest.mark.parametrize(("rows", "chunks"), [(2048, None), (4096, 2), (8192, 4)])
def test_pieces_are_those_of_the_records(rows: int, chunks: int | None) -> None:
    plan = choose(replace(V32_FP8, attn_tp_size=4), extend(rows, 65536), FULL, ATTENTION_ALONE)
    assert (plan.token_shard, plan.token_shard_chunks) == ((True, chunks) if chunks else (False, 1))
    if not chunks:
        assert "no gain: own heads with cuda sparse_prefill" in plan.reasons["token_shard"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_auto_reshards_what_the_records_show_is_faster(ranks: int) -> None:
    """Compared with the kernels of the same record; the decision has their times from other, later records.

    A kernel for local heads that is faster there may leave no gain to resharding, and the reason then says so.
    """
    model = replace(V32_FP8, attn_tp_size=ranks)
    cases = recorded(ranks)
    assert {phase for phase, *_ in cases} == {"extend", "decode"}
    reshards = set()
    for (phase, rows, context), (local, resharded) in cases.items():
        shape = extend(rows, context) if phase == "extend" else decode(rows, context, cuda_graph=True)
        plan = choose(model, shape, FULL, ATTENTION_ALONE)
        reason = plan.reasons["token_shard"]
        known = re.search(r"no gain: own heads with \w+ sparse_decode (\d+) us, resharding (\d+) us", reason)
        now = min(local, float(known[1])) if known else local
        assert plan.token_shard == (resharded * (1 + NEARLY_EQUAL) < now), (phase, rows, context, reason)
        if plan.token_shard:
            reshards.add((phase, rows))
    assert reshards == (set() if ranks == 2 else {("extend", 2048), ("extend", 8192)})


def test_auto_keeps_heads_local_if_no_kernel_pads_them() -> None:
    """FlashMLA supports 64 heads a rank: by the record attention alone is slower resharded, whatever the number of
    query tokens."""
    model = replace(V32_FP8, attn_tp_size=2)
    for rows in (2048, 2500, 4096, 6000, 8192, 16384):
        for context in (rows, 65536, 131072):
            assert not choose(model, extend(rows, context), FULL, ATTENTION_ALONE).token_shard
    for rows in (128, 200, 384, 512, 1024):
        assert not choose(model, decode(rows, 8192, cuda_graph=True), FULL).token_shard


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_on_is_served(ranks: int) -> None:
    model = replace(V32_FP8, attn_tp_size=ranks)
    validate(model, FULL, Settings(token_shard="on"), max_tokens=8192, max_decode_tokens=512, cuda_graph=True)
    for shape in (extend(8192, 65536), decode(ranks, 8192, cuda_graph=True)):
        assert choose(model, shape, FULL, token_shard="on").token_shard


# ---------------------------------------------------------------------------------------------------
# Buffers


@pytest.mark.parametrize(
    ("device", "mode", "reason"),
    [
        (FULL, "off", "token_shard is off"),
        (H200, "on", "there are no token_shard kernels"),
        (replace(FULL, nvlink=False), "auto", "no other GPU is reached over NVLink"),
    ],
)
def test_buffers_are_not_needed_if_no_batch_reshards(device: DeviceProfile, mode: str, reason: str) -> None:
    said = sharding.pointless(replace(V32_FP8, attn_tp_size=4), device, Settings(token_shard=mode), 8192)
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("model", "most", "wanted"),
    [
        (
            replace(V32_FP8, attn_tp_size=2),
            8192,
            "by the times on SM90, no batch of up to 8192 query tokens is quicker",
        ),
        (replace(V32_FP8, attn_tp_size=4), 256, "by the times on SM90, no batch of up to 256 query tokens is quicker"),
        (replace(V32_FP8, attn_tp_size=4), 512, "by the times on SM90, no batch of up to 512 query tokens is quicker"),
        (replace(V32_FP8, attn_tp_size=4), 2048, None),
        (replace(V32_FP8, attn_tp_size=4), 8192, None),
    ],
)
def test_buffers_are_needed_if_some_batch_reshards(model: ModelShape, most: int, wanted: str | None) -> None:
    assert sharding.never(model, FULL, Settings()) is None
    said = sharding.pointless(model, FULL, Settings(), most)
    assert (said is None) if wanted is None else (said is not None and said.startswith(wanted))
    assert sharding.pointless(model, FULL, Settings(token_shard="on"), most) is None


@pytest.mark.parametrize("ranks", [2, 4])
def test_buffers_are_needed_exactly_if_some_batch_reshards(ranks: int) -> None:
    """For batches of every size, also between the measured ones."""
    model = replace(V32_FP8, attn_tp_size=ranks)
    least = min(
        (
            rows
            for rows in range(2, 8193, 7)
            for shape in (extend(rows, max(rows, 2049)), decode(rows, 2049, cuda_graph=True))
            if choose(model, shape, FULL).token_shard
        ),
        default=None,
    )
    assert (sharding.pointless(model, FULL, Settings(), 8192) is None) == (least is not None)
    if least is not None:
        assert sharding.pointless(model, FULL, Settings(), least) is None
        assert sharding.pointless(model, FULL, Settings(), least // 2) is not None


def test_buffers_may_be_needed_only_between_measured_points_or_without_a_copy(measure: Any) -> None:
    label = f"token_shard by {STEP}"
    # At 2048 and 6144 query tokens another kernel is as fast as resharding; between them resharding is faster.
    kernels = {
        CUDA: {16: ((2048, 100.0), (6144, 9000.0)), 128: ((1, 9e9),)},
        STEP: {16: ((2048, 4000.0), (6144, 4100.0)), 128: ((1, 1.0),)},
    }
    measure({PREFILL: kernels, GROUP8: {label: {16: ((2048, 110.0), (6144, 4200.0))}}})
    for rows, reshards in ((2048, False), (4096, True), (6144, False)):
        assert choose(V32_FP8, extend(rows, 65536), FULL).token_shard == reshards
    assert sharding.pointless(V32_FP8, FULL, Settings(), 6144) is None
    assert sharding.pointless(V32_FP8, FULL, Settings(), 2048) is not None

    # Only without memory for a bf16 copy of the cache.
    copied = table(5000.0, 4000.0)
    copied[PREFILL][COPIED] = {16: ((1, 1.0), (4096, 2000.0)), 128: ((512, 9e9),)}
    measure(copied)
    for rows in (2048, 3000, 4096):
        assert not choose(V32_FP8, extend(rows, 65536), FULL).token_shard
    assert sharding.pointless(V32_FP8, FULL, Settings(), 4096) is None
    copied[GROUP8] = {label: {16: ((4096, 6000.0),)}}
    assert sharding.pointless(V32_FP8, FULL, Settings(), 4096) is not None


# ---------------------------------------------------------------------------------------------------
# Shares


def test_shares_of_a_step_depend_only_on_the_number_of_query_tokens() -> None:
    assert sharding.step_shares(V32, 512).counts == [64] * 8
    assert sharding.step_shares(V32, 9) == by_count(9, 8)


def test_weights_follow_from_a_devices_rates() -> None:
    """In picoseconds, for 128 heads of 576 and 512 values and 64 indexer heads of 128."""
    values = 128 * (576 + 512)
    assert sharding.weights(V32).row == pytest.approx(2 * values / 400e9 * 1e12, rel=0.01)
    assert sharding.weights(V32).attention == pytest.approx(values / 300e12 * 1e12, rel=0.01)
    assert sharding.weights(V32).indexer == pytest.approx(64 * 128 / 600e12 * 1e12, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200_000)), min_size=1, max_size=9),
    st.sampled_from([2, 4, 8, 16]),
)
def test_shares_cover_every_query_token_once_and_fit(requests: list[tuple[int, int]], ranks: int) -> None:
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
