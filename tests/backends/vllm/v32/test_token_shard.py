"""Resharding under vLLM on real process groups (`shard_batches`), and tests of one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import Exchange, Share
from nsa_plugin.backends.common.warm import warm
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32 import token_shard as gpu_token_shard
from nsa_plugin.backends.vllm.v32.indexer import own_rows, runs
from nsa_plugin.backends.vllm.v32.metadata import _copied
from nsa_plugin.backends.vllm.v32.token_shard import OwnRows, _flat_rows, assign, impossible
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.dispatch import validate
from nsa_plugin.errors import NsaPluginError, PatchError, SettingsError
from nsa_plugin.kernels.kv_cache import open_cache
from nsa_plugin.parallel.partition import Partition, by_count
from nsa_plugin.settings import Settings
from tests.backends.fake_vllm import shard_batches
from tests.backends.fake_vllm.shard_engine import WAYS, planner_of
from tests.backends.fake_vllm.v32 import TRITON, planner
from tests.parallel.ranks import on_ranks


@pytest.mark.regression(23)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_two_ranks_reshard_bit_for_bit(way: int, tmp_path: Path):
    on_ranks(2, shard_batches.batches_on_ranks, tmp_path, way)


@pytest.mark.regression(23)
@pytest.mark.parametrize("way", [1, 3, 4])
def test_four_ranks_reshard_bit_for_bit(way: int, tmp_path: Path):
    on_ranks(4, shard_batches.batches_on_ranks, tmp_path, way)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 2)])  # both numbers of each, and each the larger once
def test_resharding_in_pieces_is_bit_for_bit(ranks: int, way: int, chunks: int, tmp_path: Path):
    on_ranks(ranks, shard_batches.pieces_on_ranks, tmp_path, way, chunks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_start_up_capture_and_controls(ranks: int, tmp_path: Path):
    on_ranks(ranks, shard_batches.others_on_ranks, tmp_path)


def test_a_planner_without_an_exchange_keeps_heads_local_with_a_reason():
    made = planner_of(WAYS[0], 2, on=True)
    for plan in (made.step_plan(64, 64, 1), made.prefill_plan(60, 90)):
        assert not plan.token_shard
        assert plan.reasons["token_shard"] == "this worker has no exchange"
    assert made.prefill_plan(20, 20).reasons["token_shard"] == "dense attention pads no heads"
    made.set_exchange(None, "batches are split in two")
    assert made.step_plan(64, 64, 1).reasons["token_shard"] == "batches are split in two"


def test_on_is_served_and_auto_without_measured_times_needs_no_group():
    """vLLM's group does not exist."""
    made = planner_of(next(way for way in WAYS if way.layout == "v32_fp8"), 8, on=True)
    validate(made.model, made.device, made.settings, decode_constraints=made.constraints(prefill=False))
    found = gpu_token_shard.open_exchange(config(), made.model, made.device, Settings(), torch.device("cpu"))
    reason = f"no times on SM90 for 8 ranks that reshard {made.model.heads_per_rank} heads each over a v32_fp8 cache"
    assert found == (None, reason)
    made.set_exchange(*found)
    assert made.step_plan(64, 64, 1).reasons["token_shard"] == reason


def test_with_strict_off_no_rank_waits_for_a_stock_one(monkeypatch: pytest.MonkeyPatch):
    """The group is not looked up: vLLM's does not exist."""
    made = planner_of(WAYS[0], 2, on=True)

    def opened(token_shard: str) -> Any:
        settings = Settings(token_shard=token_shard, strict=False)
        return gpu_token_shard.open_exchange(config(), made.model, made.device, settings, torch.device("cpu"))

    with pytest.raises(SettingsError, match="token_shard is on and cannot work here: strict is off"):
        opened("on")
    monkeypatch.setattr(sharding, "never", lambda *_: None)
    exchange, reason = opened("auto")
    assert exchange is None
    assert reason == "strict is off, and a rank that does not serve would keep the others waiting"


def config(speculative: Any = None, *, sinks: bool = False, **parallel: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(learnable_sink=sinks)),
        parallel_config=SimpleNamespace(**({"tensor_parallel_size": 2} | parallel)),
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )


def draft(ranks: int | None, shared: bool) -> Any:
    hf_config = SimpleNamespace(index_share_for_mtp_iteration=shared)
    return SimpleNamespace(draft_tensor_parallel_size=ranks, draft_model_config=SimpleNamespace(hf_config=hf_config))


@pytest.mark.parametrize(
    ("vllm_config", "why"),
    [
        (config(), None),
        (config(enable_dbo=False, ubatch_size=0), None),
        (config(enable_dbo=True), "attend at the same time"),
        (config(ubatch_size=2), "attend at the same time"),
        (config(draft(None, False)), None),
        (config(draft(2, False)), None),
        (config(SimpleNamespace()), None),
        (config(sinks=True), "the model has attention sinks"),
        (config(draft(1, False)), "the draft model has 1 of the 2 ranks"),
        (config(draft(2, True)), "index_share_for_mtp_iteration"),
    ],
)
def test_servers_that_do_not_support_resharding(vllm_config: Any, why: str | None):
    said = impossible(vllm_config)
    assert (said is None) if why is None else (said is not None and why in said)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (None, "vLLM has no vllm.distributed.parallel_state.get_tp_group"),
        (SimpleNamespace(device_group=3, cpu_group=None), "has no cpu_group"),
        (SimpleNamespace(device_group=3, cpu_group=object()), "has 3 ranks, but heads for 2"),
    ],
)
def test_an_unexpected_group_is_refused(monkeypatch: pytest.MonkeyPatch, group: Any, message: str):
    monkeypatch.setattr(dist, "get_world_size", lambda size: size)
    module = ModuleType(gpu_token_shard.GROUP[0])
    if group is not None:
        module.get_tp_group = lambda: group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shape = planner_of(WAYS[0], 2, on=True).model
    with pytest.raises(PatchError, match=message):
        gpu_token_shard.open_exchange(config(), shape, TRITON, Settings(token_shard="on"), torch.device("cpu"))


def test_own_rows_count_from_the_request():
    requests, q_lens, kv_lens = (3, 5, 6), [10, 4, 6], [50, 4, 90]
    shares = Partition((0, 7, 16, 20))
    assert assign(shares, 0, requests, q_lens, kv_lens).own == (OwnRows(3, 0, 7, 47),)
    assert assign(shares, 1, requests, q_lens, kv_lens).own == (
        OwnRows(3, 7, 10, 50),
        OwnRows(5, 0, 4, 4),
        OwnRows(6, 0, 2, 86),
    )
    assert assign(shares, 2, requests, q_lens, kv_lens).own == (OwnRows(6, 2, 6, 90),)
    assert assign(by_count(0, 3), 1, (), [], []).own == ()


def test_no_rank_gets_more_query_tokens_than_its_buffers_hold():
    made = planner_of(WAYS[0], 4, on=True)
    shard: Any = SimpleNamespace(rank=0, max_tokens=200, max_rows=50)
    made.exchange, made.no_exchange, made.exchange_rows = Exchange(shard, None), "", 200  # type: ignore[arg-type]
    split = made._split((0, 200), [200], [200], 0, 200)
    assert split.head_assigned is not None
    assert split.head_assigned.partition.counts == [50] * 4, (
        "by cost the first rank has more: its tokens see fewer keys"
    )
    shard.max_rows = 200
    split = made._split((0, 200), [200], [200], 0, 200)
    assert split.head_assigned is not None
    assert max(split.head_assigned.partition.counts) > 50


def test_padded_and_missing_query_tokens():
    def attend(q: torch.Tensor, shares: Partition, attend_rows: Any, *, chunks: int) -> torch.Tensor:
        pieces = [shares.chunk(0, index, chunks) for index in range(chunks)]
        return torch.cat([attend_rows(q[rows], rows) for rows in pieces])

    shard: Any = SimpleNamespace(rank=0, attend=attend)
    share = Share(Exchange(shard, None), by_count(3, 1))  # type: ignore[arg-type]
    given: list[torch.Tensor] = []

    def attend_rows(q_rows: torch.Tensor, chosen: torch.Tensor, rows: slice) -> torch.Tensor:
        given.append(chosen)
        assert len(chosen) == len(q_rows) == rows.stop - rows.start
        return q_rows + 1

    out = share.attend(torch.ones(5, 1, 2), torch.tensor([[4], [5]]), attend_rows)
    assert given[0].tolist() == [[4], [5], [-1]], "a row without a selection attends to nothing"
    assert out[:, 0, 0].tolist() == [2, 2, 2, 0, 0]
    share.chunks = 2
    share.attend(torch.ones(5, 1, 2), torch.tensor([[4], [5]]), attend_rows)
    assert [chosen.tolist() for chosen in given[1:]] == [[[4]], [[5], [-1]]]
    with pytest.raises(NsaPluginError, match="attends 2 query tokens of a batch that it prepared with 3"):
        share.attend(torch.ones(2, 1, 2), torch.tensor([[4]]), attend_rows)


def test_copies_of_contexts_are_made_in_parts():
    own = [OwnRows(0, 0, 2, 30), OwnRows(1, 1, 2, 30), OwnRows(2, 0, 3, 30), OwnRows(3, 0, 1, 90)]
    table = torch.arange(4 * 23, dtype=torch.int32).view(4, 23)
    parts = _copied(own, table, 4, 60)
    assert [(part.rows, len(part.slots)) for part in parts] == [
        (slice(0, 3), 60),
        (slice(3, 6), 30),
        (slice(6, 7), 90),  # longer than a part by itself
    ]
    assert parts[0].offsets.tolist() == [0, 0, 30]
    assert parts[1].slots.tolist() == list(range(2 * 23 * 4, 2 * 23 * 4 + 30))


def test_building_a_layer_opens_the_exchange(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    monkeypatch.setattr(gpu_patches, "building", lambda: asked.append(1))
    assert gpu_patches.impl_class(staticmethod(lambda: int)).__func__() is int
    assert asked == [1]


@pytest.mark.parametrize("library", ["reference", "triton"])
def test_kernels_run_while_a_model_is_built(library: str):
    """vLLM sets the default device and dtype to the model's then."""
    shape, kernels = planner_of(WAYS[1], 2, on=True).model, {("sparse_mla_prefill", library)}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            warm(kernels | {("sparse_mla_decode", library)}, Providers("v32_fp8", 90), shape, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)


def test_an_error_after_the_start_falls_back_to_vllm_with_strict_off(monkeypatch: pytest.MonkeyPatch):
    def settle() -> None:
        raise SettingsError("no layer attends")

    settings = SimpleNamespace(settings=Settings(strict=False))
    here: list[Any] = [SimpleNamespace(measure=lambda: None, settle=settle, resolved=settings, first=True)]
    said: list[str] = []

    def give_up(error: Exception, resolved: Any, report: bool) -> None:
        said.append(str(error))
        here[0] = None

    process = SimpleNamespace(give_up=give_up, report_gpu=lambda found: pytest.fail("it serves nothing"))
    monkeypatch.setattr(gpu_patches, "serving", lambda: here[0])
    monkeypatch.setattr(gpu_patches, "process", lambda: process)
    assert gpu_patches.worker_warm_up(lambda worker: "seconds")(object()) == "seconds"
    assert said == ["no layer attends"]


def test_without_resharding_runs_of_requests_do_not_change():
    split = planner()._split((0, 2, 3, 33), [2, 1, 30], [60], 2, 33)
    assert own_rows(split) is None
    assert runs(split, [1, 30], 1, split.dense_requests) == [(0, 2)]


def test_rows_of_pages_with_gaps():
    """vLLM may keep other layers' pages between a layer's pages."""
    everything = torch.arange(4 * 6 * 576).reshape(4, 6, 576).bfloat16()
    cache = open_cache(everything[:, :2], "bf16")
    slots = torch.tensor([[0, 3, 6, -1]], dtype=torch.int32)
    rows, moved = _flat_rows(cache, slots)
    assert moved.dtype == torch.int32
    assert moved.tolist() == [[0, 7, 18, -1]]
    for slot, row in zip(slots[0, :3].tolist(), moved[0, :3].tolist(), strict=True):
        assert torch.equal(rows[row, 0], cache.data[slot // 2, slot % 2])
    last = open_cache(everything[:, 4:], "bf16")  # behind it there is nothing
    assert torch.equal(_flat_rows(last, slots)[0][18:20, 0], everything[3, 4:])
    dense = open_cache(everything, "bf16")
    assert _flat_rows(dense, slots)[1] is slots
    uneven = torch.zeros(20000).bfloat16().as_strided((3, 2, 576), (1500, 576, 1))
    with pytest.raises(NsaPluginError, match="rows at one stride"):
        _flat_rows(open_cache(uneven, "bf16"), slots)
