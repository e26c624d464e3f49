"""Bodies of the tests of decode context parallelism on real process groups: ranks agree at start-up, and attend."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin.backends.vllm.v32 import dcp
from nsa_plugin.backends.vllm.v32 import serving as gpu_serving
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.settings import Settings
from tests.backends.fake_vllm.dcp import Manager
from tests.backends.fake_vllm.shard_engine import H200
from tests.backends.fake_vllm.shard_start import serving_of
from tests.backends.fake_vllm.v32 import World, planner


class Coordinator:
    """vLLM's GroupCoordinator over gloo."""

    def __init__(self) -> None:
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()
        self.cpu_group = dist.group.WORLD

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.contiguous())
        return torch.cat(found, dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total.chunk(self.world_size, dim=dim)[self.rank_in_group]


def starting(device: torch.device, interleave: int) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    module = ModuleType(dcp.GROUP[0])
    vars(module)[dcp.GROUP[1]] = Coordinator
    sys.modules[module.__name__] = module
    gpu_serving.dense_workspace_tokens = lambda vllm_config: 4096
    gpu_serving.warm_selection = gpu_serving.warm_reading = lambda *_, **__: None
    warmed: list[Any] = []
    gpu_serving.warm = lambda kernels, providers, shape, device: warmed.append(shape.attended_heads)
    gpu_serving.warm_shard = lambda *_, **given: warmed.append(given)
    h200 = replace(H200, memory_free=(1 + rank) << 30)

    def parallel(**changed: Any) -> dict[str, Any]:
        return {"decode_context_parallel_size": ranks, "cp_kv_cache_interleave_size": interleave, **changed}

    made = serving_of(Settings(), h200, parallel=parallel())
    heads = made.planning().model.heads_per_rank
    assert warmed == [ranks * heads, {"page_size": 64, "interleave": interleave}]
    assert made.planning().dcp is None
    found = made.building()
    assert found.shard is not None
    assert (found.shard.ranks, found.shard.rank, found.shard.interleave) == (ranks, rank, interleave)
    assert made.building().dcp is found.dcp
    assert found.exchange is None
    # Plans depend on the free memory: the least of all ranks, now and after vLLM has allocated its cache.
    assert found.device.memory_free == 1 << 30
    gpu_serving.free_device_memory = lambda: (9 - rank) << 30
    made.settle()
    found.read_free_memory()
    assert found.device.memory_free == (9 - (ranks - 1)) << 30
    context = made.vllm_config.compilation_config.static_forward_context
    context["attn"] = SimpleNamespace(impl=SimpleNamespace(nsa_plugin=found))
    assert f"with {ranks * heads} heads" in made.facts()["context parallelism"]

    # Ranks that would decide differently do not start, and say why.
    other = Settings(logits_budget_mb=64 + rank)
    with pytest.raises(MismatchError, match="decode context parallelism: the ranks differ in settings"):
        serving_of(other, h200, parallel=parallel()).building()
    with pytest.raises(MismatchError, match="the ranks differ in tokens that a rank holds in turn"):
        serving_of(Settings(), h200, parallel=parallel(cp_kv_cache_interleave_size=1 + rank)).building()

    # The same group carries a batch: steps, dense prefills with a cached prefix, and ones that select behind them.
    assert found.dcp is not None
    deciding = planner("v32_fp8", dcp=ranks)
    deciding.dcp = found.dcp
    world = World(deciding, later=True, rank=rank, shard=found.shard)
    world.layer.dcp_manager = Manager(found.dcp.group)
    lengths = [(1, 40), (1, 1), (6, 6), (9, 60), (4, 21), (5, 70)]
    out = world.step(lengths).run()
    undivided = World(planner("v32_fp8"), later=True, rank=rank).step(lengths)
    torch.testing.assert_close(out.float(), undivided.expected(), atol=0.03, rtol=0.03)
