"""Bodies of the tests of resharding under vLLM at start-up: ranks agree, open the exchange, or refuse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.decision import timings
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.errors import LeftToStockError, NoProviderError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.fake_vllm.config import REGISTRY
from tests.backends.fake_vllm.shard_engine import H200, MAX_TOKENS, TOPK
from tests.backends.fake_vllm.v32 import HEADS, MAX_LEN, model


def config(**more: Any) -> Any:
    ranks = dist.get_world_size()
    shape = model("v32_fp8", HEADS * ranks, TOPK)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads")
    hf = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"],
        num_attention_heads=shape.num_heads,
        index_head_dim=128,
        learnable_sink=more.pop("learnable_sink", False),
        **{name: getattr(shape, name) for name in names},
    )
    parallel = {"tensor_parallel_size": ranks} | more.pop("parallel", {})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf, max_model_len=MAX_LEN, registry=REGISTRY),
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"),
        parallel_config=SimpleNamespace(**parallel),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=more.pop("tokens", MAX_TOKENS), max_num_seqs=8),
        speculative_config=more.pop("speculative", None),
        attention_config=SimpleNamespace(use_fp4_indexer_cache=False, backend="FLASHMLA_SPARSE"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def serving_of(settings: Settings, device: Any = H200, **more: Any) -> gpu_serving.GpuServing:
    made = gpu_serving.GpuServing(
        resolved=ResolvedSettings(settings, {}),
        trace=Trace(),
        vllm_config=config(**more),
        device_profile=lambda: device,
    )
    made.prepare(torch.device("cpu"))
    return made


def starting() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    gpu_serving.dense_workspace_tokens = lambda vllm_config: 4096
    gpu_serving.warm_selection = gpu_serving.warm_reading = lambda *_, **__: None
    warmed: list[Any] = []
    gpu_serving.warm = lambda kernels, providers, shape, device: warmed.append((kernels, shape.heads_per_rank))
    on = Settings(token_shard="on", prefill_backend="reference", decode_backend="triton")
    device = replace(H200, memory_free=(1 + rank) << 30)

    made = serving_of(on, device)
    assert [heads for _, heads in warmed] == [HEADS]
    assert ("sparse_mla_decode", "triton") in warmed[0][0]
    assert made.planning().exchange is None
    planner = made.building()
    exchange = planner.exchange
    assert exchange is not None
    assert made.building().exchange is exchange
    assert [heads for _, heads in warmed] == [HEADS, ranks * HEADS]
    assert ("sparse_mla_decode", "triton") in warmed[1][0]
    assert (exchange.shard.ranks, exchange.shard.rank, exchange.shard.max_tokens) == (ranks, rank, MAX_TOKENS)
    assert not exchange.shard._check_rows
    assert planner.device.memory_free == 1 << 30
    assert planner.step_plan(64, 64, 1).token_shard
    assert not planner.step_plan(ranks - 1, ranks - 1, 1).token_shard
    assert "exceed the 200" in planner.step_plan(MAX_TOKENS + 1, MAX_TOKENS + 1, 1).reasons["token_shard"]
    context = made.vllm_config.compilation_config.static_forward_context
    context["attn"] = SimpleNamespace(impl=SimpleNamespace(nsa_plugin=planner))
    words = made.facts()["decode, 64 requests"]
    assert f"; resharded: each of {ranks} ranks attends about {64 // ranks} of 64 query tokens" in words
    gpu_serving.free_device_memory = lambda: (9 - rank) << 30
    made.settle()
    assert planner.free_memory is not None
    assert planner.free_memory() == (9 - (ranks - 1)) << 30

    # With token_shard auto and no measured times, or none that are quicker, no memory is allocated and no kernel runs.
    warmed.clear()
    before, timings.TIMINGS = timings.TIMINGS, {}
    quiet = serving_of(replace(on, token_shard="auto"))
    assert quiet.building().exchange is None
    assert "no times on SM90" in quiet.planning().step_plan(64, 64, 1).reasons["token_shard"]
    timings.TIMINGS = before
    slower = serving_of(replace(on, token_shard="auto")).building()
    assert slower.exchange is None
    assert f"no batch of up to {MAX_TOKENS} query tokens is quicker" in slower.no_exchange
    assert [heads for _, heads in warmed] == [HEADS, HEADS]
    traced = serving_of(replace(on, trace="/nowhere/trace.jsonl")).building().exchange
    assert traced is not None
    assert traced.shard._check_rows

    # Left to vLLM before resharding is looked at.
    with pytest.raises(LeftToStockError, match="--ubatch-size 2"):
        serving_of(on, parallel={"ubatch_size": 2}).building()
    with pytest.raises(SettingsError, match=r"token_shard is on and cannot work here: .* attention sinks"):
        serving_of(on, learnable_sink=True).building()
    # One rank that cannot is all of them that do not.
    wanted = "attention sinks" if rank == 1 else "another rank of the attention group cannot"
    with pytest.raises(SettingsError, match=wanted):
        serving_of(on, learnable_sink=rank == 1).building()
    with pytest.raises(MismatchError, match="the ranks differ in tokens of a prefill"):
        serving_of(on, tokens=MAX_TOKENS + rank).building()
    with pytest.raises(MismatchError, match=r"the ranks differ in settings \(their checksum\)\."):
        serving_of(replace(on, logits_budget_mb=64 + rank)).building()
    with pytest.raises(MismatchError, match=r"the ranks differ in whether trace is a \.jsonl file"):
        serving_of(replace(on, trace="/nowhere/trace.jsonl" if rank == 1 else "log")).building()
    with pytest.raises(MismatchError, match="the ranks differ in kernel libraries"):
        serving_of(on, synthetic(90, libraries=("triton", "flash_mla")) if rank == 1 else H200).building()
    with pytest.raises(SettingsError, match="no layer attends by vLLM's FLASHMLA_SPARSE"):
        serving_of(on).settle()
    fetch = TokenShard._fetch

    def swapped(self: TokenShard, *given: Any) -> torch.Tensor:
        return fetch(self, *given).flip(1)

    TokenShard._fetch = swapped if rank == 1 else fetch  # type: ignore[method-assign]
    with pytest.raises(NoProviderError, match="the exchange of token_shard: a rank did not receive"):
        serving_of(on).building()
    TokenShard._fetch = fetch  # type: ignore[method-assign]
    what_only_a_rank_notices(on)
    a_rank_without_links(replace(on, token_shard="auto"))


def a_rank_without_links(auto: Settings) -> None:
    """Only it knows; all of them keep their heads."""
    rank, never, reshards = dist.get_rank(), sharding.never, sharding._reshards
    sharding.never = lambda model, device, settings: None if device.nvlink else "no link"
    sharding._reshards = lambda case: True
    try:
        planner = serving_of(auto, replace(H200, nvlink=rank != 1)).building()
    finally:
        sharding.never, sharding._reshards = never, reshards
    assert planner.exchange is None
    others = "another rank of the attention group cannot, and its own report says why"
    assert planner.no_exchange == ("no link" if rank == 1 else others)


def what_only_a_rank_notices(on: Settings) -> None:
    """Heads in another order that come back in the right one; and an exchange that fails on one rank alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    fetch, send_back, attend = TokenShard._fetch, TokenShard._send_back, TokenShard.attend
    totals: list[int] = []

    def fetched(self: TokenShard, q: torch.Tensor, partition: Any, *given: Any) -> torch.Tensor:
        totals.append(partition.total)
        return fetch(self, q, partition, *given).flip(1)

    def given_back(self: TokenShard, out: torch.Tensor | None, *given: Any) -> None:
        send_back(self, out if out is None else out.flip(1), *given)

    def failing(self: TokenShard, *given: Any, **named: Any) -> torch.Tensor:
        result = attend(self, *given, **named)
        if rank == 1:
            raise RuntimeError("a compiler's")
        return result

    overlapped = TokenShard._overlapped

    def failing_aside(self: TokenShard, *given: Any) -> None:
        overlapped(self, *given)
        if rank == 1:
            raise RuntimeError("a second stream's")

    try:
        TokenShard._fetch, TokenShard._send_back = fetched, given_back  # type: ignore[method-assign]
        with pytest.raises(NoProviderError, match="the exchange of token_shard: a rank did not receive"):
            serving_of(on).building()
        TokenShard._fetch, TokenShard._send_back = fetch, send_back  # type: ignore[method-assign]
        TokenShard.attend = failing  # type: ignore[method-assign,assignment]
        with pytest.raises(NoProviderError, match="a compiler's" if rank == 1 else "a rank did not receive"):
            serving_of(on).building()
        TokenShard.attend, TokenShard._overlapped = attend, failing_aside  # type: ignore[method-assign]
        with pytest.raises(NoProviderError, match="a second stream's" if rank == 1 else "exchange of token_shard"):
            serving_of(on).building()
    finally:
        TokenShard._fetch, TokenShard._send_back = fetch, send_back  # type: ignore[method-assign]
        TokenShard.attend, TokenShard._overlapped = attend, overlapped  # type: ignore[method-assign]
    assert totals == [2 * ranks + 1], "rows that no number of ranks divides"
