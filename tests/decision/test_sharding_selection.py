"""Resharding counts what the ranks save in the indexer: each selects for its own query tokens alone."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.case import Case
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import Decider
from nsa_plugin.decision.indexer import selection_us
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import ShapeError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import V32_FP8, choose, decode, extend
from tests.decision.sharding_records import LAYER, recorded

FULL = synthetic(90)
PAIR = replace(V32_FP8, attn_tp_size=2)
STEP = "flash_mla sparse_decode"
PREFILL, GROUP2 = (90, "sparse_mla_prefill", "v32_fp8"), (90, "token_shard_attention tp2", "v32_fp8")
FEWER, MORE = (timings.selected_from(2048, keys) for keys in (102_400, 1_024_000))
INDEXER = [(90, "indexer_topk", selected) for selected in (FEWER, MORE)]
MEBI = 1 << 20


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 query tokens: 1000 us of attention with local heads, 1200 resharded; selection 1 us for 2**20 pairs."""
    table: timings.Timings = {
        PREFILL: {STEP: {64: ((4096, 1000.0),), 128: ((2048, 1.0),)}},
        GROUP2: {f"token_shard by {STEP}": {64: ((4096, 1200.0),)}},
        **{place: {"deep_gemm": {64: ((1024, us),)}} for place, us in zip(INDEXER, (100.0, 1000.0), strict=True)},
    }
    monkeypatch.setattr(timings, "TIMINGS", table)


def case(model: ModelShape = PAIR, **fields: Any) -> Case:
    return Case(model, extend(4096, 65536), FULL, Settings(), **fields)


@pytest.mark.parametrize(("context", "reshards"), [(8192, False), (65536, False), (131072, True), (500_000, True)])
def test_a_long_context_reshards_although_attention_alone_would_not(
    context: int, reshards: bool, measured: None
) -> None:
    """Half of the pairs is saved: more than 200 us of them, and than what counts as equal, from about 120,000 on."""
    plan = choose(PAIR, extend(4096, context), FULL)
    assert plan.token_shard == reshards
    assert "ms of the indexer's selection added" in plan.reasons["token_shard"]


def test_both_times_in_the_reason_have_their_selection(measured: None) -> None:
    reason = choose(PAIR, extend(4096, 131072), FULL).reasons["token_shard"]
    pairs = 4096 * 131072 - 4096 * 4095 // 2
    for ranks in (1, 2):
        assert f"{pairs / ranks / MEBI / 1e3:.2f} ms of the indexer's selection added" in reason


@pytest.mark.parametrize(
    ("changed", "factor"),
    [({}, 1.0), ({"index_n_heads": 32}, 0.5), ({"selecting_layers": 1 / 3}, 1 / 3), ({"index_topk": 1024}, 0.0)],
)
def test_the_selection_takes_its_time_by_heads_and_by_layers(
    changed: dict[str, Any], factor: float, measured: None
) -> None:
    found = selection_us(case(replace(PAIR, **changed)), 500 * MEBI, 4096)
    assert found == pytest.approx(500 * factor)


def test_without_times_or_pairs_nothing_is_counted(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selection_us(case(), 0, 4096) == 0
    for place in INDEXER:
        monkeypatch.delitem(timings.TIMINGS, place)
    assert selection_us(case(), 500 * MEBI, 4096) == 0
    assert not choose(PAIR, extend(4096, 500_000), FULL).token_shard


def test_the_time_is_of_the_library_that_selects(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer without logits is the faster one from its fewest measured query tokens on, if the engine calls it."""
    for place, us in zip(INDEXER, (80.0, 800.0), strict=True):
        monkeypatch.setitem(timings.TIMINGS[place], "cuda", {64: ((1024, us),)})
    batch = extend(4096, 200_000)
    own, stock = (
        Case(PAIR, batch, FULL, Settings(), Constraints(stock_selects_prefills=stock)) for stock in (False, True)
    )
    assert selection_us(own, 500 * MEBI, 4096) == pytest.approx(400)
    assert selection_us(own, 500 * MEBI, 1023) == pytest.approx(500)
    assert selection_us(stock, 500 * MEBI, 4096) == pytest.approx(500)


def test_an_engine_that_splits_the_selection_already_saves_nothing(measured: None) -> None:
    decider, batch = Decider(PAIR, FULL, Settings()), extend(4096, 500_000)
    assert decider.decide(batch).token_shard
    kept = decider.decide(batch, Constraints(selection_split="the ranks share the selection"))
    assert not kept.token_shard
    assert "selection added" not in kept.reasons["token_shard"]


def test_steps_count_attention_alone(measured: None) -> None:
    """Their selection is the stock engine's, for all query tokens on every rank."""
    assert "selection added" not in choose(PAIR, decode(512, 500_000, cuda_graph=True), FULL).reasons["token_shard"]


def test_buffers_are_needed_for_contexts_that_are_long_enough(measured: None) -> None:
    assert sharding.pointless(PAIR, FULL, Settings(), 4096) is not None
    assert sharding.pointless(PAIR, FULL, Settings(), 4096, 65536) is not None
    assert sharding.pointless(PAIR, FULL, Settings(), 4096, 163_840) is None


def test_the_records_make_two_ranks_reshard_long_contexts() -> None:
    """As the record of a whole layer on two GPUs has it: slower at 2048 of 8192 tokens, faster at 8192 of 65536."""
    assert not choose(PAIR, extend(2048, 8192), FULL).token_shard
    assert choose(PAIR, extend(8192, 65536), FULL).token_shard
    assert choose(PAIR, extend(8192, 131072), FULL).token_shard


@pytest.mark.parametrize("ranks", [2, 4])
def test_auto_reshards_where_a_recorded_layer_with_its_indexer_is_faster(ranks: int) -> None:
    """The decision adds up attention's time and the indexer's, which the record has as one, with DeepGEMM's."""
    model, cases = replace(V32_FP8, attn_tp_size=ranks), recorded(ranks, LAYER)
    decider = Decider(model, FULL, Settings())
    assert {(rows, context) for _, rows, context in cases} == {(2048, 8192), (8192, 65536), (8192, 131072)}
    for (_, rows, context), (local, resharded) in cases.items():
        assert choose(model, extend(rows, context), FULL).token_shard == (resharded < local), (rows, context)
        plan = decider.decide(extend(rows, context), Constraints(stock_selects_prefills=True))
        assert plan.token_shard == (resharded < local), (rows, context, plan.reasons["token_shard"])
        # Both estimates are near the readings of the whole layer.
        found = [float(ms) for ms in re.findall(r" (\d+\.\d+) ms \(", plan.reasons["token_shard"])]
        if max(local, resharded) > 5000:
            assert found == pytest.approx([local / 1e3, resharded / 1e3], rel=0.2)


def test_pairs_of_a_batch() -> None:
    """A query token sees the tokens up to itself."""
    shape = BatchShape.from_lengths(Phase.EXTEND, [3, 0, 1], [5, 9, 7])
    assert shape.scored == (3 + 4 + 5) + 7
    with pytest.raises(ShapeError, match="no negative counts"):
        BatchShape(phase=Phase.EXTEND, scored=-1)


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 1.0),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, 0.5),
        ({"index_topk_pattern": "FSSFSS"}, 1 / 3),
        ({"index_topk_freq": 4}, 0.25),
        ({"index_topk_freq": None, "indexer_types": None, "index_topk_pattern": None}, 1.0),
    ],
)
def test_the_share_of_layers_that_select(config: dict[str, Any], share: float) -> None:
    usual = {
        name: getattr(ModelShape(), name)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
    }
    given = SimpleNamespace(num_attention_heads=64, index_n_heads=32, index_head_dim=128, **usual, **config)
    assert ModelShape.from_config(given, attn_tp_size=2, kv_layout="v32_fp8").selecting_layers == pytest.approx(share)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_another_share_is_refused(share: float) -> None:
    with pytest.raises(ShapeError, match=r"selecting_layers is .* above 0 and at most 1"):
        ModelShape(selecting_layers=share)
