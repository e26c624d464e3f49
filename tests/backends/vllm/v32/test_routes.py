"""Tests of what vLLM's planner tells the decision about vLLM's own prefill route."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_plugin.backends.vllm.v32.choice import kept_choice
from nsa_plugin.backends.vllm.v32.routes import BESIDE, COPIED_ROWS, VllmPlanner
from nsa_plugin.backends.vllm.v32.samples import own_kernels
from nsa_plugin.decision import timings
from nsa_plugin.decision.routes import BF16_COPY, FLASH_MLA_DECODE, Route
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import Trace
from tests.backends.counted import Counted
from tests.backends.fake_vllm.v32 import World, planner


@pytest.mark.parametrize(
    ("heads", "layout", "expected"),
    [
        (16, "v32_fp8", FLASH_MLA_DECODE),
        (31, "v32_fp8", FLASH_MLA_DECODE),
        (32, "v32_fp8", BF16_COPY),
        (16, "bf16", None),
    ],
)
def test_without_times_vllms_own_route_serves_prefills(heads: int, layout: str, expected: Route | None):
    """Field defect 7: before, the CUDA kernel came first with few heads, and the copy never did."""
    made = planner(layout, device=synthetic(90))
    made.model = ModelShape(num_heads=heads, kv_layout=layout, index_topk=1024)
    assert made.stock_prefill == expected
    plan = made.prefill_plan(4096, 32768)
    if expected is None:
        assert plan.provider == "flash_mla"
    else:
        assert Route(plan.attention, plan.provider, plan.dequantize_kv) == expected
        assert "so the stock engine's route comes first" in plan.reasons["provider"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_trtllm_over_an_fp8_cache_says_what_runs_it(phase: str):
    """Field defect 2. Not run on SM100 here."""
    made = planner("v32_fp8", device=synthetic(100), **{f"{phase}_backend": "trtllm"})
    made.model = replace(ModelShape(num_heads=16), kv_layout="v32_fp8")
    with pytest.raises(SettingsError) as error:
        made.prefill_plan(4096, 32768) if phase == "prefill" else made.step_plan(8, 8, 1)
    assert "for a v32_fp8 cache on SM100 (it reads bf16); vLLM runs it over a cache without scales" in str(error.value)
    assert "--attention-backend FLASHINFER_MLA_SPARSE" in str(error.value)


@pytest.mark.parametrize(
    ("fa3", "cuda", "kept"),
    [
        (None, None, "no times on SM90 for 16 heads and a bf16 cache, so vLLM's choice is kept"),
        (1800.0, 1500.0, ""),
        (1400.0, 1500.0, "it is the faster one by the times on SM90 for 16 heads and a bf16 cache"),
        (None, 1500.0, ""),
    ],
)
def test_vllms_own_choice_over_a_bf16_cache_is_kept_where_it_is_the_faster(monkeypatch, fa3, cuda, kept):
    """From 0.25 on vLLM chooses FLASH_ATTN_MLA_SPARSE; times of both say which serves."""
    given = {"fa3 sparse_decode": fa3, "cuda sparse_prefill": cuda, "flash_mla sparse_prefill": cuda and 1900.0}
    times = {route: {16: ((512, us / 8), (4096, us))} for route, us in given.items() if us}
    monkeypatch.setattr(timings, "TIMINGS", {(90, "sparse_mla_prefill", "bf16"): times} if times else {})
    made = planner("bf16", device=synthetic(90))
    made.model = ModelShape(num_heads=16, kv_layout="bf16")
    assert kept in kept_choice(made)
    assert bool(kept_choice(made)) == bool(kept)


@pytest.mark.parametrize("rows", [COPIED_ROWS, COPIED_ROWS - 1])
def test_steps_beside_a_long_prefill_of_vllms_call_take_it_too(rows: int):
    """Two calls would each copy their result into the batch's, in every layer."""
    made = planner("v32_fp8", device=synthetic(90), topk=2048)
    made.model = ModelShape(num_heads=128, kv_layout="v32_fp8")
    made.max_model_len = 65536
    split = made._split((0, 1, 1 + rows), [1, rows], [32768], 1, 1 + rows)
    assert split.steps is not None
    beside = rows == COPIED_ROWS
    assert split.steps.provider == ("flash_mla" if beside else "cuda")
    assert made.step_plan(1, 1, 1).provider == "cuda"
    assert (BESIDE in split.steps.reasons["provider"]) == beside


def test_a_setting_goes_before_the_call_of_the_prefill():
    made = planner("v32_fp8", device=synthetic(90), decode_backend="triton")
    made.model = ModelShape(num_heads=128, kv_layout="v32_fp8")
    split = made._split((0, 1, 4097), [1, 4096], [32768], 1, 4097)
    assert split.steps is not None
    assert split.steps.provider == "triton"


def test_steps_alike_are_decided_once_and_counted_every_time(monkeypatch: pytest.MonkeyPatch):
    world, counted = World(planner("v32_fp8")), Counted()
    made = world.planner
    made.metrics = counted
    commons = [world.step([(1, 40), (1, 12)]).common for _ in range(3)]
    counted.clear()
    made.forget_steps()
    first, again = (made.split(common) for common in commons[:2])
    assert first is again
    assert made.split(commons[1]) is again  # another builder's
    assert counted == [first.steps, first.steps]
    # Other query tokens, padding, a prefill, and memory to read anew are looked at again.
    assert made.split(world.step([(1, 40)]).common) is not first
    assert made.split(commons[2]) is not first
    assert made.split(world.step([(1, 40), (1, 12)], padded_rows=2).common).num_rows == 4
    assert made.split(world.step([(1, 40), (30, 60)]).common).sparse is not None
    reads: list[int] = []

    def read() -> int:
        reads.append(1)
        return 8 << 30

    made.split(commons[0])
    made.measure(read)
    made.split(commons[1])
    assert reads == [1]
    made.forget_steps()
    assert made.current is None


@pytest.mark.parametrize("steps", [0, 1])
def test_a_prefill_with_as_many_query_tokens_is_split_anew(steps: int):
    world = World(planner("v32_fp8"))
    short, long = (world.step([(1, 40)] * steps + [(10, context)]).split for context in (12, 90))
    assert short.starts == long.starts
    assert short.dense
    assert short.sparse is None
    assert long.sparse is not None
    assert not long.dense


@pytest.mark.parametrize("mode", ["off", "log", "file"])
def test_requests_are_named_for_a_trace_file_alone(mode: str, tmp_path: Path):
    file, asked = tmp_path / "trace.jsonl", []
    made = planner()
    made.trace = Trace(str(file) if mode == "file" else mode)
    made.request_ids = lambda common: asked.append(common) or ["first", "second"]
    step = World(made).step([(1, 40), (9, 60)])
    assert asked == ([step.common] if mode == "file" else [])
    if mode == "file":
        (line,) = file.read_text().splitlines()
        assert {one["request_id"] for one in json.loads(line)["requests"]} == {"first", "second"}


def test_kernels_of_the_largest_prefills_are_known_before_serving():
    """Beyond a library's limit on query tokens a prefill takes a kernel that no smaller one does."""
    versions = {name: ("vllm", "0.33.0") for name in ("flash_mla", "deep_gemm")}
    device = synthetic(90, libraries=("flash_mla", "deep_gemm", "triton", "cuda"), versions=versions)
    shared = ModelShape(num_heads=128, attn_tp_size=8, dcp_size=8, kv_layout="v32_fp8")
    made = VllmPlanner(model=shared, device=device, settings=Settings(), max_model_len=163840, selects_prefills=False)
    assert made.prefill_plan(8192, 163840).provider == "flash_mla"
    assert made.prefill_plan(16384, 163840).provider == "cuda"
    assert ("sparse_mla_prefill", "cuda") in own_kernels(made)
