"""The indexer without logits in memory: chosen for prefills by measured times alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings

V32 = ModelShape(kv_layout="v32_fp8")
H200 = synthetic(90)
# (keys, query tokens): times in microseconds.
TIMES = {
    (8192, 2048): {"cuda": 500.0, "deep_gemm": 360.0},
    (65536, 512): {"cuda": 700.0, "deep_gemm": 650.0},
    (65536, 4096): {"cuda": 3900.0, "deep_gemm": 4700.0, "triton": 7600.0},
}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[timings.TimingKey, Any] = {}
    for (keys, rows), us in TIMES.items():
        by_route = table.setdefault((90, "indexer_topk", timings.selected_from(2048, keys)), {})
        for route, time in us.items():
            points = by_route.setdefault(route, {}).get(64, ())
            by_route[route][64] = (*points, (rows, time))
    monkeypatch.setattr(timings, "TIMINGS", table)


def prefill(*requests: tuple[int, int]) -> BatchShape:
    q_lens, kv_lens = zip(*requests, strict=True)
    return BatchShape.from_lengths(Phase.EXTEND, q_lens, kv_lens)


def choose(
    batch: BatchShape,
    model: ModelShape = V32,
    device: DeviceProfile = H200,
    constraints: Constraints = UNCONSTRAINED,
    **settings: Any,
) -> Plan:
    return decide(model, batch, device, Settings(**settings), constraints)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(4096, 65536)], "cuda"),
        ([(8192, 300_000)], "cuda"),  # beyond every measured case, the largest decides
        ([(4095, 65536)], "deep_gemm"),  # the case of 512 query tokens
        ([(511, 65536)], "deep_gemm"),  # fewer than any of so many keys: the case of 8192 keys does not fit either
        ([(4096, 65535)], "deep_gemm"),  # the case of 8192 keys
        ([(4096, 8000)], "deep_gemm"),  # shorter than any
        ([(2048, 65536), (2048, 65536)], "cuda"),
        ([(4000, 5000), (96, 100_000)], "deep_gemm"),  # 52500 keys on average
        ([(512, 65536)] * 17, "deep_gemm"),  # more than a million keys in all
    ],
)
def test_the_nearest_smaller_case_decides(requests: list[tuple[int, int]], expected: str) -> None:
    assert choose(prefill(*requests)).indexer.provider == expected


def test_the_reason_has_the_times() -> None:
    plan = choose(prefill((4096, 70_000)))
    assert plan.reasons["indexer.provider"] == (
        "no logits in memory, and the least time: cuda 3.90 ms, deep_gemm 4.70 ms, triton 7.60 ms "
        "(H200, 4096 query tokens, 65536 keys)"
    )
    assert plan.indexer.metadata_provider == ""
    assert plan.reasons["indexer.rows_per_chunk"].startswith("bounds the memory: the logits of ")


@pytest.mark.parametrize(
    "model",
    [
        replace(V32, index_n_heads=32),  # not measured
        replace(V32, index_n_heads=16),  # nor supported
        replace(V32, index_topk=1024),  # not measured
        replace(V32, index_head_dim=64),
    ],
)
def test_another_indexer_is_left_to_others(model: ModelShape) -> None:
    assert choose(prefill((4096, 70_000)), model).indexer.provider != "cuda"


def test_a_decode_reads_pages() -> None:
    batch = BatchShape.from_lengths(Phase.DECODE, [1] * 4096, [70_000] * 4096)
    assert choose(batch).indexer.provider == "deep_gemm"


def test_an_engine_that_selects_itself_keeps_its_code() -> None:
    constraints = Constraints(stock_selects_prefills=True)
    assert choose(prefill((4096, 70_000)), constraints=constraints).indexer.provider == "deep_gemm"


def test_only_libraries_that_are_installed_are_compared() -> None:
    short = prefill((2048, 8192))
    assert choose(short).indexer.provider == "deep_gemm"
    without = synthetic(90, libraries=("cuda", "triton", "flash_mla"))
    # Without a rival's time nothing was compared.
    assert choose(short, device=without).indexer.provider == "triton"
    assert choose(prefill((4096, 70_000)), device=without).indexer.provider == "cuda"
    bare = synthetic(90, libraries=("deep_gemm", "triton", "flash_mla"))
    assert choose(prefill((4096, 70_000)), device=bare).indexer.provider == "deep_gemm"


def test_compressed_keys_count_for_v4() -> None:
    v4 = ModelShape(family="v4", num_heads=64, index_topk=2048, kv_layout="v4_fp8", sliding_window=128)
    assert choose(prefill((4096, 4 * 65536)), v4).indexer.provider == "cuda"
    assert choose(prefill((4096, 4 * 65536 - 4)), v4).indexer.provider == "deep_gemm"


def test_a_resharded_batch_counts_the_query_tokens_of_a_rank() -> None:
    """The rank that attends a query token selects for it."""
    sharded = replace(V32, attn_tp_size=8)
    plan = choose(prefill((8 * 4096, 70_000)), sharded, token_shard="on")
    assert plan.token_shard
    assert plan.indexer.provider == "cuda"
    plan = choose(prefill((8 * 4095, 70_000)), sharded, token_shard="on")
    assert plan.token_shard
    assert plan.indexer.provider == "deep_gemm"
