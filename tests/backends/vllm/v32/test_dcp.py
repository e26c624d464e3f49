"""Decode context parallelism: batches over ranks that share the KV cache, against the undivided cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.backends.common.paths import MIXED as MIXED_PATH
from nsa_plugin.backends.common.paths import PROVIDER, STOCK
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import warm_shard
from nsa_plugin.backends.vllm.v32.metadata import planned_builder
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import NoProviderError, PatchError, SettingsError
from nsa_plugin.kernels.shard_indices import KvShard
from tests.backends.fake_vllm import dcp_start
from tests.backends.fake_vllm.dcp import shared
from tests.backends.fake_vllm.v32 import (
    HEADS,
    MIXED,
    TRITON,
    WITH_FLASH_MLA,
    Step,
    StockBuilder,
    World,
    planner,
    vllm_config,
)
from tests.parallel.ranks import on_ranks

SHARES = pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 8), (3, 2)])


@SHARES
def test_a_mixed_batch(ranks: int, interleave: int):
    """Decode steps, long prompts, dense ones with and without a cached prefix, and long ones behind them."""
    group = shared(ranks, interleave)
    steps, _ = group.run(MIXED)
    for step in steps:
        assert step.split.num_steps == 2
        assert step.split.sparse_requests == (3, 5)
        assert step.split.dense_requests == {2, 4, 6}
        assert [piece.path for piece in step.metadata.mqa] == [PROVIDER]
        assert step.metadata.tail is not None
        assert step.metadata.decode is None


def test_the_triton_kernels():
    steps, _ = shared(device=TRITON).run([(1, 40), (1, 1), (6, 6), (5, 60), (3, 21)])
    assert {piece.plan.provider for piece in (*steps[0].metadata.mqa, steps[0].metadata.tail)} == {"triton"}


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_steps_and_verify_steps(next_n: int):
    group = shared(step_tokens=next_n)
    steps, _ = group.run([(next_n, 50), (next_n, next_n), (1, 33), (next_n, 96)])
    phase = Phase.DECODE if next_n == 1 else Phase.TARGET_VERIFY
    assert {step.split.steps.phase for step in steps} == {phase}


@SHARES
@pytest.mark.parametrize("lengths", [[(30, 60), (40, 96)], [(9, 70), (5, 80), (60, 60)], [(1, 40), (30, 61), (4, 90)]])
def test_prefills_with_a_cached_prefix(lengths: list[tuple[int, int]], ranks: int, interleave: int):
    group = shared(ranks, interleave)
    steps, _ = group.run(lengths)
    assert not any(step.split.dense for step in steps)


@SHARES
def test_dense_prefills_with_a_cached_prefix(ranks: int, interleave: int):
    """The prefix comes from all ranks; where the last rank has fewer tokens, what it reads behind them is unused."""
    group = shared(ranks, interleave)
    steps, _ = group.run([(4, 21), (3, 20), (6, 6), (2, 3), (5, 17)])
    for step in steps:
        (dense,) = step.metadata.mha
        assert dense.order is not None
        assert len(dense.slots) < len(dense.order) == 21 + 20 + 6 + 3 + 17


def test_dense_prefills_without_a_prefix_exchange_nothing():
    group = shared()
    group.run([(8, 8), (20, 20)])
    assert group.ranks.calls == []


def test_query_tokens_without_a_key_on_a_rank():
    """Selections of one rank's tokens alone: the others contribute 0 with an lse of -inf, and never a NaN."""

    def even_positions(step: Step) -> None:
        """Rows 0 and 3 on select tokens of rank 0 alone; row 1 has one token; row 2 selects nothing."""
        buffer = step.world.buffer
        for row in (0, *range(3, step.num_rows)):
            kept = buffer[row][(buffer[row] >= 0) & (buffer[row] % 2 == 0)]
            buffer[row] = -1
            buffer[row, : len(kept)] = kept
        buffer[2] = -1

    group = shared()
    # Undivided dense attention of no token is not a number; the kernels return 0.
    lengths = [(1, 40), (1, 1), (1, 30), (30, 60)]
    steps = [world.step(lengths) for world in group.parts]
    for step in steps:
        even_positions(step)
    outputs = group.ranks.run(lambda rank: steps[rank].run())
    for step, world, out in zip(steps, group.whole, outputs, strict=True):
        undivided = world.step(lengths)
        even_positions(undivided)
        expected = undivided.expected()
        assert bool(expected[2].isnan().all())
        expected[2] = 0
        torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
        (lse,) = world_lses(step.world)
        empty = lse.isneginf().all(1)
        assert torch.equal(lse.isneginf().any(1), empty)
        assert not bool(lse.isposinf().any() | lse.isnan().any())
        # Rank 1 has a key of no row; rank 0 only not of the row that selects nothing.
        assert empty.tolist() == [True] * len(lse) if step.world.rank else [row == 2 for row in range(len(lse))]


def world_lses(world: World) -> list[torch.Tensor]:
    found: list[torch.Tensor] = world.layer.dcp_manager.merged
    return found


@pytest.mark.regression(20)
def test_padded_rows_of_a_captured_batch():
    group = shared(step_tokens=2)
    steps, outputs = group.run([(2, 50), (2, 8)], padded_rows=4, padded_requests=2)
    for step, out in zip(steps, outputs, strict=True):
        assert step.metadata.num_decode_tokens == 8
        assert not bool(out[4:].any())


def test_a_rank_attends_the_heads_of_all_ranks():
    group = shared(3)
    group.run([(1, 40), (1, 9)])
    assert group.ranks.calls[0] == (2, HEADS, 576)
    (lse,) = world_lses(group.parts[1])
    assert lse.shape == (2, 3 * HEADS)
    assert group.parts[0].planner.model.attended_heads == 3 * HEADS


def test_vllms_flashmla_calls():
    """Steps and a prefill by vLLM's call on each rank, with vLLM's lse, behind a dense prefill too."""
    asked = {"prefill_backend": "flash_mla", "decode_backend": "flash_mla", "mha_max_kv": 24}
    group = shared(device=WITH_FLASH_MLA, topk=128, **asked)
    steps, _ = group.run(MIXED)
    for step in steps:
        assert [piece.path for piece in step.metadata.mqa] == [STOCK]
        assert step.metadata.tail.path == MIXED_PATH
        assert len(step.world.impl.calls) == 2
    steps, _ = group.run([(1, 40), (1, 9)])
    assert all(len(step.world.impl.calls) == 3 for step in steps)


def test_no_route_copies_the_cache():
    """FlashMLA's prefill kernel over a bf16 copy would need the other ranks' tokens."""
    asked = {"prefill_backend": "flash_mla", "mha_max_kv": 0}
    group = shared(device=WITH_FLASH_MLA, topk=128, **asked)
    for rows in (30, 4096):
        plan = group.parts[0].planner.prefill_plan(rows, max(rows, 96))
        assert (plan.attention, plan.dequantize_kv) == (Attention.SPARSE_DECODE, False)
    copying = planner("v32_fp8", device=WITH_FLASH_MLA, topk=128, heads=64, **asked).prefill_plan(30, 96)
    assert copying.dequantize_kv
    assert "would have to be gathered" in group.parts[0].planner.constraints(prefill=True).no_copy


def test_heads_stay_local_with_the_reason():
    plan = shared(device=TRITON).parts[0].planner.prefill_plan(60, 90)
    assert not plan.token_shard
    assert plan.reasons["token_shard"] == "decode context parallelism gathers the heads of 2 ranks"
    with pytest.raises(SettingsError, match="cannot work here: decode context parallelism gathers the heads"):
        planner("v32_fp8", device=TRITON, dcp=2, token_shard="on").prefill_plan(60, 90)


def test_vllm_settles_the_interleave_before_it_builds_metadata():
    """With a KV connector that is after the layers are built."""
    world = shared(interleave=8).parts[1]
    assert world.planner.dcp is not None
    world.planner.dcp = world.planner.dcp.interleaved(1)
    assert world.planner.shard == KvShard(2, 1, 1)
    config = vllm_config(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=8))
    spec = SimpleNamespace(block_size=8)
    planned_builder(StockBuilder, lambda: world.planner)(spec, ["mla"], config, torch.device("cpu"))
    assert world.planner.shard == KvShard(2, 1, 8)


def test_a_batch_before_the_ranks_are_known_is_refused():
    world = World(planner("v32_fp8"), later=True)
    world.planner.model = planner("v32_fp8", dcp=2).model
    with pytest.raises(PatchError, match="ranks that share the KV cache"):
        world.step([(1, 40)])


def test_a_layer_with_another_number_of_ranks_is_refused():
    with pytest.raises(PatchError, match="1 ranks share, but plans are for 2"):
        World(planner("v32_fp8", dcp=2), later=True)


def test_the_warm_up_checks_that_the_ranks_have_every_token(monkeypatch: pytest.MonkeyPatch):
    model, cpu = planner("v32_fp8", dcp=3).model, torch.device("cpu")
    providers = Providers("v32_fp8", 0)
    for interleave in (1, 4):
        warm_shard(providers, model, cpu, page_size=8, interleave=interleave)
    whole = KvShard(1, 0)
    transform = providers.helper("index_transform_shard")
    wrong = {("index_transform_shard", "reference"): lambda a, b, shard, **c: transform(a, b, whole, **c)}
    monkeypatch.setattr(providers, "_loaded", wrong)
    with pytest.raises(NoProviderError, match="the ranks do not have every selected token once"):
        warm_shard(providers, model, cpu, page_size=8, interleave=1)


@pytest.mark.parametrize("interleave", [1, 8])
def test_ranks_of_a_real_group(interleave: int, tmp_path: Path):
    on_ranks(2, dcp_start.starting, tmp_path, interleave)
