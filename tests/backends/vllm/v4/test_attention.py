"""A V4 layer under vLLM on every execution path, against a dense computation, and batches left to stock vLLM."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL, DIRECT
from nsa_plugin.backends.common.v4 import LAYOUT, RATIOS, CacheSelection
from nsa_plugin.backends.vllm.v4 import attention as v4_attention
from nsa_plugin.backends.vllm.v4.batch import ATTRIBUTE, V4Batch, planned_swa_builder
from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner, own_kernels, path
from nsa_plugin.errors import NoProviderError, PatchError
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.patches.ledger import is_marked, mark
from nsa_plugin.settings import Settings
from tests.backends.counted import Counted
from tests.backends.fake_vllm import v4 as fake_v4
from tests.backends.fake_vllm.v4 import CPU, H200, Layer, OldImpl, SWABuilder, World, planner
from tests.backends.fake_vllm.v4_cases import DECODES, DIRECTLY, OVER_ROWS, close

pytestmark = pytest.mark.usefixtures("large_read_programs")

MIXED = [(1, 300), (1, 7), (9, 9), (20, 400), (3, 130), (5, 5)]


@pytest.mark.regression(16, "DeepSeek-V4")
@pytest.mark.regression(21, "DeepSeek-V4")
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("since_24", [True, False])
@pytest.mark.parametrize(
    ("given", "execution", "own"),
    [
        (DIRECTLY, DIRECT, ["decode"]),
        (DECODES, DECODE_KERNEL, ["decode"]),
        (OVER_ROWS, BF16_ROWS, ["prefill", "decode"]),
    ],
)
def test_a_mixed_batch_on_every_execution_path(
    ratio: int, since_24: bool, given: dict[str, Any], execution: str, own: list[str]
):
    deciding = planner(**given)
    if given is DIRECTLY:  # a CPU has no FlashMLA for the steps
        deciding.step_execution_of = planner().step_execution_of  # type: ignore[method-assign]
    world = World(deciding, MIXED, since_24=since_24)
    metadata = world.metadata()
    assert path(getattr(metadata, ATTRIBUTE).prefill) == execution
    found, wanted, layer = world.run(ratio, metadata)
    assert close(found, wanted)
    assert layer.own == own


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_kernel_of_a_gpu_interpreted(ratio: int):
    world = World(planner(prefill_backend="triton"), [(1, 40), (3, 133), (2, 2)], since_24=False, triton=True)
    found, wanted, layer = world.run(ratio)
    assert close(found, wanted)
    assert layer.own == ["decode"]


@pytest.mark.regression(22, "padded query tokens belong to no prefill")
@pytest.mark.parametrize("ratio", RATIOS)
def test_padded_heads_and_query_tokens_are_not_written(ratio: int):
    deciding = planner(prefill_backend="triton")
    world = World(deciding, [(5, 300), (4, 4)], padding=3)
    world.triton = True
    metadata = world.metadata()
    assert metadata.num_prefill_tokens == 12
    layer = world.layer_class()(world, ratio)
    q = torch.full((12, 64, 512), torch.nan, dtype=torch.bfloat16)
    q[:9, :4] = 0.5
    out = torch.full_like(q, 3.0)
    layer.forward_mqa(q, torch.tensor([*world.position, 0, 0, 0]), out, metadata)
    assert bool(torch.isfinite(out[:9, :4]).all())
    assert bool((out[9:] == 3).all())
    assert bool((out[:, 4:] == 3).all())


def test_one_plan_per_batch_for_all_layers():
    plans = Counted()
    deciding = planner(CPU)
    deciding.step_execution_of = planner().step_execution_of  # type: ignore[method-assign]
    deciding.metrics = plans  # type: ignore[assignment]
    world = World(deciding, MIXED)
    metadata = world.metadata()
    for ratio in RATIOS:
        world.run(ratio, metadata)
    assert [(plan.phase, path(plan)) for plan in plans] == [("decode", DECODE_KERNEL), ("extend", DIRECT)]


def test_shared_data_of_a_batch_is_made_once(monkeypatch: pytest.MonkeyPatch):
    world = World(planner(**DECODES), [(9, 9), (20, 400)], since_24=False)
    metadata = world.metadata()
    batch = getattr(metadata, ATTRIBUTE)
    for _ in range(2):
        for ratio in RATIOS:
            found, wanted, _ = world.run(ratio, metadata)
            assert close(found, wanted)
    assert [schedule.calls for schedule in world.schedules] == [2, 2, 2], "one schedule for each compress ratio"
    named = world.named[128]
    given = (128, named.c128a_prefill_topk_indices, named.block_table, 2, batch.lengths(128, torch.zeros(0)))
    assert batch.slots(*given) is batch.slots(*given)
    assert batch.slots(*given).shape[1] == 128, "no more columns than the longest context needs"
    cache = allocate_cache(LAYOUT, 1, 64)
    assert batch.window(cache).indices is batch.window(cache).indices


@pytest.mark.regression(12, "DeepSeek-V4")
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (1, 3), (3, 0)])
def test_steps_by_the_users_library(ratio: int, rows: int, padding: int):
    deciding = VllmV4Planner(
        model=planner().model,
        device=CPU,
        settings=Settings(decode_backend="reference"),
        max_model_len=1024,
        step_tokens=rows,
    )
    world = World(deciding, [(rows, 300), (rows, 7), (rows, 129)], padding=padding)
    found, wanted, layer = world.run(ratio)
    assert close(found, wanted)
    assert layer.own == []


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("given", [DECODES, OVER_ROWS, {"prefill_backend": "reference", "device": CPU}])
def test_the_control_attends_to_other_tokens(ratio: int, given: dict[str, Any]):
    deciding = planner(**given)
    if given.get("device") is CPU:
        deciding.step_execution_of = planner().step_execution_of  # type: ignore[method-assign]
    deciding.settings = replace(deciding.settings, fault="shift_indices")
    world = World(deciding, [(1, 400), (20, 600)])
    before, all_of_them = world.topk.clone(), world.named[128].c128a_prefill_topk_indices.clone()
    kernel = fake_v4.flash_mla_sparse_fwd
    found, wanted, layer = world.run(ratio)
    assert ("prefill" in layer.own) == (given is OVER_ROWS)
    assert not any(close(found[row], wanted[row]) for row in range(1, len(found)))
    assert close(found[:1], wanted[:1]), "steps are vLLM's own"
    assert torch.equal(layer.topk_indices_buffer, before)
    assert torch.equal(world.named[128].c128a_prefill_topk_indices, all_of_them)
    assert fake_v4.flash_mla_sparse_fwd is kernel


def test_a_batch_without_a_plan_is_left_to_vllm():
    world = World(None, MIXED)
    metadata = world.metadata()
    assert not hasattr(metadata, ATTRIBUTE)
    found, wanted, layer = world.run(4, metadata)
    assert close(found, wanted)
    assert layer.own == ["prefill", "decode"]


def test_a_batch_of_requests_without_query_tokens_has_no_plan():
    world = World(planner(), [(1, 7)])
    batch = getattr(world.metadata(), ATTRIBUTE)
    assert (batch.prefill, batch.num_prefill_rows, batch.longest) == (None, 0, 0)


def alone(metadata: Any, providers: Any = None, longest: int = 0) -> V4Batch:
    rows = len(metadata.token_to_req_indices)
    return V4Batch(planner(), providers, metadata, None, None, slice(0, rows), longest)


def test_the_ranks_heads_have_another_name_before_023():
    window = CacheSelection(allocate_cache(LAYOUT, 1, 64), torch.zeros(1, 64, dtype=torch.int32), None)
    for names in ({"num_heads": 4}, {"n_local_heads": 4, "num_heads": 8}):
        layer = SimpleNamespace(attn_sink=None, scale=1.0, compress_ratio=0, **names)
        assert v4_attention._layer_call(layer, torch.zeros(1, 8, 512), window, None).num_heads == 4


def test_padding_of_steps_belongs_to_no_request():
    """vLLM leaves another batch's owners there, which may lie behind the block table."""
    metadata = SimpleNamespace(
        num_decode_tokens=5,
        token_to_req_indices=torch.tensor([0, 1, 90, 91], dtype=torch.int32),
        is_valid_token=torch.tensor([True, True, False, False, False, True]),
    )
    found = alone(metadata).step_owners()
    assert found.tolist() == [0, 1, -1, -1, -1]
    assert found.dtype == torch.int32


def test_keys_of_128_tokens_are_looked_up_for_the_longest_prefill_and_by_block_table():
    given: list[torch.Tensor] = []

    def transform(chosen: torch.Tensor, block_table: torch.Tensor, **_: Any) -> torch.Tensor:
        given.append(chosen)
        return block_table + chosen[:, :1]

    providers = SimpleNamespace(helper=lambda name: transform)
    batch = alone(SimpleNamespace(token_to_req_indices=torch.zeros(2).int()), providers, longest=128 * 129)
    chosen = torch.zeros(2, 512, dtype=torch.int32)
    tables = [torch.full((1, 4), number, dtype=torch.int32) for number in range(2)]
    found = [batch.slots(128, chosen, table, 2, torch.zeros(2).int()) for table in tables * 2]
    assert [one.shape for one in given] == [(2, 256)] * 2, "129 keys, and columns by 128"
    assert [int(one[0, 0]) for one in found] == [0, 1, 0, 1]
    assert getattr(World(planner(), MIXED).metadata(), ATTRIBUTE).longest == 400


def test_class_methods_that_are_given_the_layer():
    world = World(planner(**DECODES), MIXED)

    class Patched(OldImpl):
        _forward_prefill = mark(v4_attention.prefill(vars(OldImpl)["_forward_prefill"], _kernels(world)), "one")
        _forward_decode = mark(v4_attention.decode(vars(OldImpl)["_forward_decode"]), "two")

    assert is_marked(Patched._forward_prefill, "one")
    assert is_marked(Patched._forward_decode, "two")
    layer = Layer(world, 4)
    layer._forward_prefill = lambda **given: Patched._forward_prefill(layer=layer, **given)  # type: ignore[method-assign]
    layer._forward_decode = lambda **given: Patched._forward_decode(layer=layer, **given)  # type: ignore[method-assign]
    layer.num_heads = layer.__dict__.pop("n_local_heads")  # type: ignore[attr-defined]
    found, wanted, _ = world.run(4)
    q = torch.zeros(len(world.owner), 64, 512, dtype=torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    layer.forward_mqa(q, torch.tensor(world.position), out, world.metadata())
    assert bool(torch.isfinite(out[:, :4]).all())
    assert len(world.schedules) == 2
    assert layer.own == ["decode"]
    assert close(found, wanted)


def _kernels(world: World) -> Any:
    from tests.backends.fake_vllm.v4 import flash_mla_with_kvcache

    return lambda: (flash_mla_with_kvcache, world.schedule)


def test_pages_of_another_size_than_the_block_tables_are_refused():
    world = World(planner(**DECODES), MIXED)
    world.named[128].block_size = 512
    with pytest.raises(PatchError, match="compress ratio 128 has 2 entries a page; its blocks of 512 tokens"):
        world.run(128)


def test_the_slots_of_a_batch_are_freed_with_it():
    """Not only once the garbage collector runs: for long contexts they are hundreds of MiB on the GPU."""

    def slots_of_a_batch() -> weakref.ref[torch.Tensor]:
        world = World(planner(prefill_backend="triton"), [(3, 400), (2, 300)], triton=True)
        metadata = world.metadata()
        world.run(128, metadata)
        (slots,) = getattr(metadata, ATTRIBUTE)._slots.values()
        return weakref.ref(slots)

    gc.collect()
    gc.disable()
    try:
        assert slots_of_a_batch()() is None
    finally:
        gc.enable()


def test_a_builder_that_counts_other_requests_as_steps():
    build = planned_swa_builder(SWABuilder, lambda: planner(step_tokens=2), lambda: pytest.fail("not asked"))
    with pytest.raises(PatchError, match=r"1 query tokens as steps; the configuration says 2\. Turn the plugin off"):
        build(World(planner(), MIXED))


def test_a_batch_that_vllm_splits_elsewhere():
    world = World(planner(), MIXED)

    class Other(SWABuilder):
        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            metadata.num_decodes = 1
            return metadata

    builder = planned_swa_builder(Other, lambda: world.planner, world.providers)(world)
    with pytest.raises(PatchError, match="vLLM takes 1 requests of 2 query tokens as steps, the plans 2 of 2"):
        builder.build(0, world.common())


# ---------------------------------------------------------------------------------------------------
# Decisions


def test_steps_take_the_stock_path_unless_a_setting_picks_a_library():
    assert path(planner().step_plan(4, 4, 1)) == DECODE_KERNEL
    assert path(planner(decode_backend="triton").step_plan(4, 4, 1)) == DIRECT
    with pytest.raises(NoProviderError):
        planner(CPU).step_plan(4, 4, 1)


@pytest.mark.parametrize("heads", [4, 64])
def test_a_plans_chunks_are_those_that_vllm_cuts(heads: int):
    """vLLM's code cuts the logits by the whole budget, so a plan has nothing to take from it."""
    made = planner(heads=heads, prefill_backend="flash_mla")
    made.max_model_len = context = 1 << 20
    plan = made.prefill_plan(8192, context)
    assert plan.indexer.rows_per_chunk == made.logits_budget // (4 * (context // 4)) == 512
    assert "logits_budget_mb" in plan.reasons["indexer.rows_per_chunk"]
    assert " less " not in plan.reasons["indexer.rows_per_chunk"]


def test_kernels_of_sample_batches_are_known_before_serving():
    planner().validate(prefill_rows=8192, step_requests=256)
    with pytest.raises(NoProviderError):
        planner(CPU).validate(prefill_rows=8192, step_requests=256)
    plans = [planner(prefill_backend="triton").prefill_plan(64, 512), planner().step_plan(4, 4, 1)]
    assert own_kernels(plans) == {("sparse_mla_prefill", "triton")}
    other = replace(plans[1], provider="fa3")
    with pytest.raises(NoProviderError, match="vLLM has no execution path for fa3 sparse_decode in decode"):
        path(other)


def test_every_plan_has_an_execution_path():
    deciding = planner(H200)
    for rows in (1, 16, 300, 1000):
        assert path(deciding.prefill_plan(rows, 1024)) in (DIRECT, BF16_ROWS, DECODE_KERNEL)
