"""How vLLM's indexer selects for prefills: by the plugin's top-k, or without logits."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32 import prefill_selection, samples
from nsa_plugin.backends.vllm.v32.indexer import NO_LOGITS, planned_indexer_builder, wrap_indexer
from nsa_plugin.backends.vllm.v32.prefill_selection import (
    STOCK_KEYS,
    prefill_logits,
    prefill_topk,
    vllms_is_quicker,
    without_logits,
)
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.serving import PREFILL_LOGITS, GpuServing
from nsa_plugin.decision import timings
from nsa_plugin.decision.indexer import UNPAGED
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.indexer import quantize, reference_topk
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches.ledger import PatchStatus
from nsa_plugin.patches.vllm_gpu import GPU
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.fake_vllm.indexer import StockIndexerBuilder

TOPK_RECORD = Path(__file__).parents[4] / "docs" / "benchmarks" / "h100" / "topk.json"
ROWS, KEYS, HEADS, DIM, TOPK = 6, 40, 4, 128, 5
KS = torch.tensor([0, 0, 0, 25, 25, 25]).int()
KE = torch.tensor([3, 19, 25, 26, 25, 40]).int()


def chunk() -> tuple[Any, ...]:
    """The arguments of vLLM's call: two requests with 25 and 15 keys; one query token sees none."""
    random = torch.Generator().manual_seed(11)
    q, _ = quantize(torch.randn(ROWS, HEADS, DIM, generator=random))
    k, scale = quantize(torch.randn(KEYS, DIM, generator=random))
    weights = torch.randn(ROWS, HEADS, generator=random)
    return (q, None), (k, scale.flatten()), weights, KS, KE


def scored(*_: Any, **__: Any) -> torch.Tensor:
    raise AssertionError("vLLM's logits were made")


def providers(asked: list[dict[str, Any]]) -> Providers:
    found = Providers("v32_fp8", 0)

    def select(*given: Any, **named: Any) -> torch.Tensor:
        asked.append(named)
        return reference_topk(*given, **named)

    found._loaded["indexer_topk", UNPAGED] = select
    return found


def vllm_selects(logits_of: Any, topk_of: Any, compressed: bool, **named: Any) -> torch.Tensor:
    """As vLLM's indexer does for a chunk: with `compressed` the logits start at each row's first key (0.33)."""
    q, kv, weights, starts, ends = chunk()
    logits = logits_of(q, kv, weights, starts, ends, **named)
    out = torch.full((ROWS, TOPK + 2), -1, dtype=torch.int32)
    bounds = (torch.zeros_like(starts), ends - starts) if compressed else (starts, ends)
    topk_of(logits, *bounds, out[:, :TOPK], len(logits), *logits.stride(), TOPK)
    assert bool((out[:, TOPK:] == -1).all())
    return out[:, :TOPK].sort(1).values


@pytest.mark.regression(2, "where the plugin uses them")
def test_the_topk_of_a_prefill_counts_from_the_rows_first_key():
    ran: list[tuple[Any, ...]] = []
    logits = torch.full((3, 12), torch.nan)
    starts, ends = torch.tensor([0, 4, 4]).int(), torch.tensor([2, 11, 4]).int()
    logits[0, :2] = torch.tensor([1.0, 2.0])
    logits[1, 4:11] = torch.tensor([0.0, 9.0, 1.0, 8.0, 2.0, 7.0, 3.0])
    out = torch.full((3, 8), 9, dtype=torch.int32)
    given = (logits, starts, ends, out[:, :3], 3, logits.stride(0), logits.stride(1), 3)
    prefill_topk(lambda *args: ran.append(args), lambda: False, lambda: providers([]))(*given)
    assert len(ran) == 1
    assert bool((out == 9).all())
    prefill_topk(lambda *args: ran.append(args), lambda: True, lambda: providers([]))(*given)
    assert len(ran) == 1
    assert [set(row.tolist()) for row in out[:, :3]] == [{0, 1, -1}, {1, 3, 5}, {-1}]
    assert bool((out[:, 3:] == 9).all())


@pytest.mark.parametrize(
    ("on_gpu", "keys", "module", "stays"),
    [
        (True, 16384, "nsa_plugin.kernels.cuda.topk", True),
        (True, 16385, "nsa_plugin.kernels.cuda.topk", False),
        (True, 16385, "nsa_plugin.kernels.triton.topk", True),
        (False, 16384, "nsa_plugin.kernels.topk", False),
    ],
)
def test_vllms_topk_stays_where_the_plugins_is_not_known_to_be_quicker(
    on_gpu: bool, keys: int, module: str, stays: bool
):
    logits = SimpleNamespace(is_cuda=on_gpu, shape=(3, keys))
    assert vllms_is_quicker(logits, SimpleNamespace(__module__=module)) is stays


def test_the_record_has_the_stays_that_are_measured_as_quicker():
    """Batches of few query tokens are decode steps, which do not come here."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in json.loads(TOPK_RECORD.read_text())["rows"]:
        times.setdefault((row["case"]["q"], row["case"]["kv"]), {})[row["provider"]] = row["median_us"]
    prefills = {case: found for case, found in times.items() if case[0] >= 1024}
    assert {keys <= STOCK_KEYS for _, keys in prefills} == {True, False}
    for (_, keys), found in prefills.items():
        own, vllms = found["cuda"], found["vllm.top_k_per_row_prefill"]
        assert (vllms < own) is (keys <= STOCK_KEYS)
        assert vllms < found["triton"]


@pytest.mark.parametrize("stays", [True, False])
def test_what_stays_vllms_is_vllms_call(monkeypatch: pytest.MonkeyPatch, stays: bool):
    monkeypatch.setattr(prefill_selection, "vllms_is_quicker", lambda logits, select: stays)
    ran: list[tuple[Any, ...]] = []
    logits, bounds = torch.zeros(1, 4), torch.tensor([4]).int()
    given = (logits, bounds * 0, bounds, torch.zeros(1, 3, dtype=torch.int32), 1, *logits.stride(), 3)
    prefill_topk(lambda *args: ran.append(args), lambda: True, lambda: providers([]))(*given)
    assert len(ran) == stays


@pytest.mark.parametrize("compressed", [False, True])
def test_without_logits_the_selection_is_the_same(compressed: bool):
    q, kv, weights, starts, ends = chunk()
    expected = reference_topk(q[0], *kv, weights, starts, ends, TOPK).sort(1).values
    asked: list[dict[str, Any]] = []
    topk_of = prefill_topk(scored, lambda: True, lambda: providers(asked))
    with without_logits():
        for _ in range(2):  # a batch has several chunks
            assert torch.equal(vllm_selects(prefill_logits(scored), topk_of, compressed, clean_logits=False), expected)
    assert [named["rows_per_chunk"] for named in asked] == [ROWS, ROWS], "no more memory than the logits would take"


def test_other_calls_get_vllms_logits():
    """Batches that the plan does not select for so, fp4 queries, and other threads."""
    calls: list[tuple[Any, ...]] = []

    def logits_of(*given: Any, **named: Any) -> torch.Tensor:
        calls.append((*given, named))
        return torch.zeros(ROWS, KEYS)

    ours = prefill_logits(logits_of)
    q, kv, *rest = chunk()
    assert ours(q, kv, *rest, 40).shape == (ROWS, KEYS)
    with without_logits():
        assert ours((q[0], torch.ones(ROWS)), kv, *rest, clean_logits=False).shape == (ROWS, KEYS)
        other = threading.Thread(target=lambda: ours(q, kv, *rest, 40))
        other.start()
        other.join()
    assert ours(q, kv, *rest, 40).shape == (ROWS, KEYS)
    assert [given[5:] for given in calls] == [(40, {}), ({"clean_logits": False},), (40, {}), (40, {})]


def test_logits_that_vllm_does_not_select_from_end_the_batch():
    def indexer(chunks: int, error: str = "") -> None:
        ours = prefill_logits(scored)
        with without_logits():
            for _ in range(chunks):
                ours(*chunk(), 40)
            if error:
                raise RuntimeError(error)

    for chunks in (1, 2):
        with pytest.raises(PatchError, match="did not select from them"):
            indexer(chunks)
    with pytest.raises(RuntimeError, match="out of memory"):
        indexer(1, "out of memory")  # vLLM's own error is not hidden
    indexer(0)  # and what a batch left behind does not reach the next one


# ---------------------------------------------------------------------------------------------------
# Which batches


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by which the indexer without logits is the quickest from 16,384 keys and 4096 query tokens on."""
    table = {place: found for place, found in timings.TIMINGS.items() if place[1] != "indexer_topk"}
    for keys, ours in ((8192, 500.0), (16384, 300.0)):
        by_route = {"cuda": {64: ((4096, ours),)}, "deep_gemm": {64: ((4096, 400.0),)}}
        table[90, "indexer_topk", timings.selected_from(2048, keys)] = by_route
    monkeypatch.setattr(timings, "TIMINGS", table)


def planner(selects: bool) -> VllmPlanner:
    return VllmPlanner(
        model=ModelShape(kv_layout="v32_fp8", num_heads=16),
        device=synthetic(90),
        settings=Settings(),
        max_model_len=163_840,
        selects_prefills=selects,
    )


def metadata_of(lengths: list[tuple[int, int]], selects: bool = True) -> Any:
    deciding = planner(selects)
    starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0)
    common = SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=torch.tensor([kv_len for _, kv_len in lengths]),
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        block_table_tensor=torch.zeros(len(lengths), 1, dtype=torch.int32),
    )
    return planned_indexer_builder(StockIndexerBuilder, lambda: deciding)().build(0, common)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(4096, 16384)], True),
        ([(1, 9000), (4096, 100_000)], True),
        ([(4096, 16383)], False),
        ([(4095, 16384)], False),
        ([(1, 100_000)] * 4, False),
    ],
)
def test_the_plan_says_which_batches_need_no_logits(measured: None, lengths: list[tuple[int, int]], expected: bool):
    assert getattr(metadata_of(lengths), NO_LOGITS, False) == expected
    assert not hasattr(metadata_of(lengths, selects=False), NO_LOGITS)


@pytest.mark.parametrize(("marked", "candidates"), [(False, None), (True, None), (True, "blocks")])
def test_a_layer_selects_as_its_batchs_metadata_says(marked: bool, candidates: Any):
    """DeepSeek-V4.1's indexer also needs the logits for its candidates."""
    made: list[torch.Tensor] = []

    def logits_of(q: Any, kv: Any, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, *_: Any) -> torch.Tensor:
        made.append(weights)
        return torch.zeros(ROWS, KEYS)

    ours = prefill_logits(logits_of)
    topk_of = prefill_topk(lambda *_: None, lambda: True, lambda: providers([]))

    def vllm_indexer(
        k_cache_prefix: str, topk_indices_buffer: torch.Tensor, candidate_blocks: Any = None
    ) -> torch.Tensor:
        topk_indices_buffer[:] = vllm_selects(lambda *given: ours(*given, 40), topk_of, True)
        return topk_indices_buffer

    own = SimpleNamespace(**{NO_LOGITS: True} if marked else {})
    layer = wrap_indexer(vllm_indexer, lambda: {"indexer": own}, lambda: providers([]))
    for how in (lambda *given: layer(*given, candidates), lambda *given: layer(*given, candidate_blocks=candidates)):
        made.clear()
        assert how("indexer", torch.zeros(ROWS, TOPK, dtype=torch.int32)).shape == (ROWS, TOPK)
        assert bool(made) == (not marked or candidates is not None)


# ---------------------------------------------------------------------------------------------------
# Which workers


def worker(*applied: str, portable: bool = False) -> GpuServing:
    entries = [patch for patch in GPU if patch.name in applied]
    assert len(entries) == len(applied)
    return GpuServing(
        resolved=ResolvedSettings(Settings(), {}),
        trace=Trace(),
        vllm_config=None,
        statuses=[PatchStatus(patch=patch, state="applied") for patch in entries],
        portable=portable,
    )


def test_a_worker_selects_without_logits_where_vllms_calls_are_replaced_and_no_rank_reads_the_logits():
    model = ModelShape(kv_layout="v32_fp8", num_heads=16)
    shared = replace(model, num_heads=32, attn_tp_size=2, dcp_size=2)
    assert worker(PREFILL_LOGITS).selects_prefills(model)
    assert not worker().selects_prefills(model)  # a version before 0.22
    assert not worker("vllm.gpu-prefill-topk").selects_prefills(model)
    assert not worker(PREFILL_LOGITS, portable=True).selects_prefills(model)
    assert not worker(PREFILL_LOGITS).selects_prefills(shared)


@pytest.mark.parametrize(("selects", "longest", "expected"), [(True, 163_840, 1), (True, 8191, 0), (False, 163_840, 0)])
def test_the_kernel_runs_once_before_serving_if_prefills_take_it(
    measured: None, monkeypatch: pytest.MonkeyPatch, selects: bool, longest: int, expected: int
):
    """Else it would compile in the first long prefill."""
    warmed: list[Any] = []
    monkeypatch.setattr(samples, "warm_unpaged", lambda *given: warmed.append(given))
    deciding = replace(planner(selects), max_model_len=longest)
    samples.warm_without_logits(deciding, providers([]), torch.device("cpu"))
    assert len(warmed) == expected


def test_the_report_says_how_a_prefill_is_selected(measured: None):
    plan = planner(True).prefill_plan(4096, 100_000)
    assert samples.selection_of(plan) == "; selection by cuda without logits"
    assert "; logits of " in samples.selection_of(planner(False).prefill_plan(4096, 100_000))
