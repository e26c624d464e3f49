"""Decisions for DeepSeek-V4, and for shapes with and without measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import (
    AFTER_PREFILL,
    B200,
    CPU,
    FULL_B200,
    FULL_H200,
    H200,
    LONG,
    OLD_H200,
    V4,
    V32,
    V32_FP8,
    choose,
    decode,
    extend,
    route,
)

pytestmark = pytest.mark.usefixtures("nothing_measured")

RELEASED = timings.TIMINGS  # read before the fixture empties it


@pytest.mark.parametrize(
    ("rows", "device", "settings", "expected"),
    [
        (11622, OLD_H200, {"large_q_rows": 11622}, ("sparse_decode", "flash_mla", False, 0)),
        (11623, OLD_H200, {"large_q_rows": 11622}, ("sparse_prefill", "flash_mla", True, 0)),
        (32768, H200, {"large_q_rows": 32768}, ("sparse_decode", "flash_mla", False, 0)),
        (32768, H200, {}, ("sparse_prefill", "flash_mla", True, 0)),
        (4096, H200, {"large_q_rows": 4096}, ("sparse_decode", "flash_mla", False, 0)),
        (4097, H200, {"large_q_rows": 4096}, ("sparse_prefill", "flash_mla", True, 0)),
        (100, CPU, {}, ("sparse_prefill", "reference", False, 0)),
    ],
    ids=["old limit", "past it", "new build", "no times", "setting", "past the setting", "CPU"],
)
def test_v4_prefill(
    rows: int, device: DeviceProfile, settings: dict[str, Any], expected: tuple[str, str, bool, int]
) -> None:
    assert route(choose(V4, extend(rows, 40000), device, **settings)) == expected


def test_v4_is_never_dense() -> None:
    plan = choose(V4, extend(100))
    assert plan.attention is Attention.SPARSE_PREFILL
    assert "family v4 attends to a window and to compressed keys" in plan.reasons["attention"]


V4_PRO = replace(V4, num_heads=128, index_topk=1024)
V4_OTHER = replace(V4_PRO, index_topk=256)


@pytest.mark.parametrize(
    ("heads", "shape", "taken"),
    [
        (8, extend(8192, 65536), ("sparse_prefill", "cuda", False)),
        (16, extend(2048, 65536), ("sparse_prefill", "cuda", False)),
        (32, extend(8192, 65536), ("sparse_prefill", "flash_mla", True)),
        (128, extend(8192, 65536), ("sparse_prefill", "flash_mla", True)),
        (16, decode(32, 32768), ("sparse_decode", "cuda", False)),
        (128, decode(128, 32768), ("sparse_decode", "flash_mla", False)),
    ],
)
def test_v4_pro_is_served_by_its_own_times(
    heads: int, shape: BatchShape, taken: tuple[str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field defect 1: V4-Pro's selections took the times of V4-Flash's."""
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    plan = choose(replace(V4_PRO, attn_tp_size=128 // heads), shape, FULL_H200)
    assert route(plan)[:3] == taken
    assert f"on H100, {heads} heads" in plan.reasons["provider"]


@pytest.mark.parametrize(
    ("model", "device", "missing"),
    [
        (
            V4_OTHER,
            FULL_H200,
            "no times on SM90 for 256 selected tokens and a window of 128, 128 heads, v4_fp8 cache "
            "(nearest measured: H200, 512 selected tokens and a window of 128, 128 heads, v4_fp8 cache)",
        ),
        (V4, FULL_B200, "no times on SM100 for 512 selected tokens and a window of 128, 64 heads, v4_fp8 cache"),
        (replace(V4, attn_tp_size=8), B200, "no times on SM100 for 512 selected tokens and a window of 128, 8 heads, "),
    ],
    ids=["256 selected", "SM100", "SM100, few heads"],
)
def test_a_v4_prefill_without_measured_times_takes_the_stock_route(
    model: ModelShape, device: DeviceProfile, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    for tokens in (100, 4096, 32768):
        plan = choose(model, extend(tokens, 40000), device)
        assert route(plan)[:3] == ("sparse_prefill", "flash_mla", True)
        assert missing in plan.reasons["provider"]
        assert "so the stock engine's route comes first" in plan.reasons["provider"]
        # Before 0.5.15 SGLang's own route is the decode kernel.
        older = Constraints(stock_prefill=FLASH_MLA_DECODE)
        assert choose(model, extend(tokens, 40000), device, older).attention is Attention.SPARSE_DECODE
    # Decode steps keep their order, and a graph its one kernel.
    assert choose(model, decode(8, 5000), device).attention is Attention.SPARSE_DECODE
    assert choose(model, extend(64, 40000, cuda_graph=True), device).dequantize_kv is False


GLM = replace(V32_FP8, num_heads=64, index_n_heads=32, qk_nope_head_dim=192, v_head_dim=256)
UNMEASURED: list[tuple[str, ModelShape, DeviceProfile]] = [
    ("V4 with 256 selected tokens, 16 heads", replace(V4_OTHER, attn_tp_size=8), FULL_H200),
    ("V4 on SM100, 8 heads", replace(V4, attn_tp_size=8), FULL_B200),
    ("V3.2 with 1024 selected tokens", replace(V32_FP8, index_topk=1024), FULL_H200),
    ("V3.2 on SM100", V32_FP8, FULL_B200),
    ("bf16, 16 heads, 1024 selected tokens", replace(V32, index_topk=1024), FULL_H200),
    ("bf16, 8 heads, 4096 selected tokens", replace(V32, attn_tp_size=16, index_topk=4096), FULL_H200),
    ("GLM-5 with a bf16 cache on SM100, 8 heads", replace(GLM, kv_layout="bf16"), FULL_B200),
]


@pytest.mark.parametrize(("model", "device"), [row[1:] for row in UNMEASURED], ids=[row[0] for row in UNMEASURED])
@pytest.mark.parametrize(
    "shape", [LONG, decode(32, 4096), decode(32, 4096, Phase.TARGET_VERIFY)], ids=lambda b: b.phase
)
def test_without_times_an_upstream_kernel_attends_unless_a_setting_asks_for_another(
    model: ModelShape, device: DeviceProfile, shape: BatchShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field defects 1 and 7. Before, the plugin's CUDA kernel came first up to 16 heads, whether measured or not."""
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    plan = choose(model, shape, device)
    assert plan.provider in ("flash_mla", "fa3", "trtllm")
    reason = plan.reasons["provider"]
    assert f"no times on {device.where} for" in reason
    assert "(nearest measured: H200, " in reason
    assert "so the stock engine's route comes first" in reason or "so an upstream kernel comes first" in reason
    assert choose(model, shape, device, prefill_backend="triton", decode_backend="triton").provider == "triton"


def test_below_the_measured_query_tokens_the_stock_route_stays_unless_another_was_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a V4 prefill of fewer query tokens took the faster of the others, without a time of the stock route."""
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    small = extend(300, 40000)
    plan = choose(V4, small, FULL_H200)
    assert route(plan) == ("sparse_prefill", "flash_mla", True, 0)
    assert (
        "no times on SM90 for it below 512 query tokens, where it was the fastest, so the stock engine's route comes "
        "first"
    ) in plan.reasons["provider"]
    assert "no times" not in choose(V4, extend(512, 40000), FULL_H200).reasons["provider"]
    few = replace(V4, attn_tp_size=8)
    assert choose(few, small, FULL_H200).provider == "cuda"  # faster at 2048 query tokens, its and the copy's fewest
    assert choose(few, small, H200).dequantize_kv is True  # but not installed here
    assert choose(V4, small, FULL_H200, prefill_backend="cuda").provider == "cuda"
    captured = choose(V4, extend(300, 40000, cuda_graph=True), FULL_H200)
    assert route(captured) == ("sparse_decode", "flash_mla", False, 0)


@pytest.mark.parametrize("ranks", [4, 8])
def test_glm_5_and_v4_with_few_heads_have_times(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    for model in (replace(GLM, attn_tp_size=ranks), replace(V4, attn_tp_size=ranks)):
        for shape in (LONG, decode(32, 4096)):
            plan = choose(model, shape, FULL_H200)
            assert "no times" not in plan.reasons["provider"]
            assert "measured on H200" in plan.reasons["provider"]


def test_the_nearest_measured_shape_is_of_the_same_layout_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    assert timings.nearest(100, "sparse_mla_prefill", "v4", "v4_fp8", 12) == (90, "v4_fp8", 8)
    assert timings.nearest(90, "sparse_mla_decode", "v3.2", "bf16", 100) == (90, "bf16", 128)
    assert timings.nearest(90, "mha_one_shot", "v3.2", "bf16", 16) == (90, "bf16", 16)
    assert timings.nearest(90, "indexer_topk", "v3.2", "bf16", 16) is None


def test_the_stock_engines_prefill_route_comes_first_for_v32_too() -> None:
    """vLLM's route from 32 heads on, and SGLang's with --dsa-prefill-backend flashmla_sparse, is the bf16 copy."""
    constraints = Constraints(stock_prefill=BF16_COPY)
    plan = choose(V32_FP8, LONG, FULL_H200, constraints)
    assert route(plan) == ("sparse_prefill", "flash_mla", True, 64)
    assert plan.reasons["provider"].endswith("so the stock engine's route comes first")
    assert choose(V32_FP8, decode(8, 5000), FULL_H200, constraints).attention is Attention.SPARSE_DECODE


def test_a_v4_prefill_with_measured_times_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "TIMINGS", RELEASED)
    reason = choose(V4, extend(8192, 40000), FULL_H200).reasons["provider"]
    assert "(measured on H200, 64 heads, 8192 query tokens)" in reason
    assert "no times" not in reason


@pytest.mark.parametrize("phase", AFTER_PREFILL)
def test_v4_decode_ignores_large_q_rows(phase: Phase) -> None:
    plan = choose(V4, decode(64, 5000, phase), large_q_rows=16)
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)


def test_v4_keeps_one_kernel_in_a_graph() -> None:
    plan = choose(V4, extend(4097, 40000, cuda_graph=True), large_q_rows=4096)
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)


def test_v4_pads_its_heads_too() -> None:
    plan = choose(replace(V4, attn_tp_size=8), extend(12000, 40000), OLD_H200)
    assert route(plan) == ("sparse_prefill", "flash_mla", True, 64)
    on_sm100 = choose(replace(V4, attn_tp_size=8), extend(5000, 40000), B200, large_q_rows=4096)
    assert route(on_sm100) == ("sparse_prefill", "flash_mla", True, 128)


def test_v4_large_q_rows_beyond_the_build_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"large_q_rows is 12000; allowed: 0 to 11622"):
        decide(V4, decode(1, 5), OLD_H200, Settings(large_q_rows=12000))
    assert choose(V4, extend(12000, 40000), large_q_rows=12000).attention is Attention.SPARSE_DECODE
