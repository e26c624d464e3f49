"""vLLM in miniature for the tests of resharding: ways to attend, its indexer, and a rank's worlds.

Every rank has the layer of `v32` with its local heads, the same cache and the same batches. What it gets is
compared, bit for bit, with the same rank that keeps its heads; attention is `shard_kernels`'.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from nsa_plugin.backends.common.paths import MIXED, PROVIDER, SEPARATE, STOCK
from nsa_plugin.backends.common.token_shard import Exchange
from nsa_plugin.backends.vllm.v32 import token_shard as gpu_token_shard
from nsa_plugin.backends.vllm.v32.indexer import planned_indexer_builder
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.settings import Settings
from tests.backends.fake_vllm.shard_kernels import (
    dense,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    kernels,
)
from tests.backends.fake_vllm.v32 import HEADS, LORA, MAX_LEN, ROPE, Step, World, model

H200 = synthetic(90, libraries=("triton", "deep_gemm", "flash_mla"))
TOPK, MHA_MAX_KV = 128, 24
MAX_TOKENS = 200


@dataclass(frozen=True)
class Way:
    """How batches are attended: the cache, the libraries, and whether FlashMLA reads a copy of an fp8 cache."""

    layout: str
    prefill: str
    decode: str
    copied: bool = False
    later: bool = False

    @property
    def paths(self) -> set[str]:
        """Execution paths of prefills."""
        if self.prefill != "flash_mla":
            return {PROVIDER}
        if self.layout == "bf16":
            return {STOCK}
        return {SEPARATE if self.copied else MIXED}


WAYS = (
    Way("bf16", "reference", "reference"),
    Way("v32_fp8", "reference", "reference", later=True),
    Way("bf16", "flash_mla", "flash_mla", later=True),
    Way("v32_fp8", "flash_mla", "flash_mla"),
    Way("v32_fp8", "flash_mla", "reference", copied=True),
)


# ---------------------------------------------------------------------------------------------------
# vLLM's indexer in miniature


def split_chunks(
    seq_lens: torch.Tensor, query_lens: torch.Tensor, workspace: int, max_logits_bytes: int, request_offset: int = 0
) -> list[tuple[slice, slice]]:
    """Split as vLLM does: group requests while their logits fit, and split a request that does not fit."""
    chunks, most, end = [], max_logits_bytes // 4, 0
    while end < len(seq_lens):
        start, rows, keys = end, 0, 0
        while end < len(seq_lens):
            more = rows + int(query_lens[end]), keys + int(seq_lens[end])
            if end > start and (more[0] * more[1] > most or more[1] > workspace):
                break
            (rows, keys), end = more, end + 1
        step = max(1, most // keys)
        some = slice(start + request_offset, end + request_offset)
        chunks += [(some, slice(first, min(first + step, rows))) for first in range(0, rows, step)]
    return chunks


class IndexerBuilder:
    """DeepseekV32IndexerMetadataBuilder of 0.32: keys are gathered for chunks that begin with a request's first row."""

    compress_ratio = 1
    _split_indexer_prefill_chunks = staticmethod(split_chunks)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common, steps = common_attn_metadata, self.steps  # type: ignore[attr-defined]
        starts = common.query_start_loc_cpu
        chunks = []
        if steps < common.num_reqs:
            lens = starts.diff()[steps:]
            bound = common.seq_lens_cpu_upper_bound[steps:]
            for requests, rows in self._split_indexer_prefill_chunks(bound, lens, 150, 1 << 29, request_offset=steps):
                first = int(starts[requests.start])
                assert first + rows.stop <= int(starts[requests.stop])
                chunks.append(
                    SimpleNamespace(
                        block_table=common.block_table_tensor[requests],
                        num_reqs=requests.stop - requests.start,
                        requests=requests,
                        token_start=first + rows.start,
                        token_end=first + rows.stop,
                        skip_kv_gather=rows.start > 0,
                    )
                )
        prefill = SimpleNamespace(chunks=chunks, row_shard_sizes=[1, 2]) if steps < common.num_reqs else None
        return SimpleNamespace(num_decode_tokens=int(starts[steps]), prefill=prefill)


def select(world: World, step: Step, steps: int) -> None:
    """What the indexer leaves in vLLM's buffer, which has a selection for every row; of rows that it does not score -1.

    Args:
        steps: requests that vLLM's indexer takes for steps.
    """
    builder = planned_indexer_builder(IndexerBuilder, lambda: world.planner)
    made = builder.__new__(builder)
    made.nsa_plugin, made.nsa_plugin_arrival, made.steps = world.planner, None, steps
    metadata = made.build(0, step.common)
    full, rows = world.buffer.clone(), step.common.num_actual_tokens
    world.buffer[:rows] = -1
    world.buffer[: metadata.num_decode_tokens] = full[: metadata.num_decode_tokens]
    if metadata.prefill is None:
        return
    assigned = step.split.head_assigned is not None or step.split.tail_assigned is not None
    assert (metadata.prefill.row_shard_sizes is None) == assigned
    workspace, scored = None, torch.zeros(rows, dtype=torch.int32)
    for chunk in metadata.prefill.chunks:
        if assigned:
            assert chunk.skip_kv_gather == (workspace == chunk.requests), "keys are gathered once"
        if not chunk.skip_kv_gather:
            workspace = chunk.requests
        assert workspace == chunk.requests
        some = slice(chunk.token_start, chunk.token_end)
        scored[some] += 1
        world.buffer[some] = full[some]
    assert int(scored.max()) <= 1
    if not assigned:
        return
    # Every row that selects is scored by one rank, and rows that are a step's to the planner by all.
    dist.all_reduce(scored)
    starts = step.starts
    for request in range(steps, len(step.lengths)):
        once = request in step.split.sparse_requests
        wanted = 1 if once else dist.get_world_size() * (request < step.split.num_steps)
        assert bool((scored[starts[request] : starts[request + 1]] == wanted).all())


# ---------------------------------------------------------------------------------------------------
# Worlds


def exchange_of(**changed: Any) -> Exchange:
    sizes = {"heads": HEADS, "d_qk": LORA + ROPE, "d_v": LORA, "max_tokens": MAX_TOKENS} | changed
    return Exchange(TokenShard(None, dtype=torch.bfloat16, device="cpu", **sizes), dist.group.WORLD)


def planner_of(way: Way, ranks: int, *, on: bool, step_tokens: int = 1, **settings: Any) -> VllmPlanner:
    left_out = Op.SPARSE_MLA_DECODE if way.copied else Op.SPARSE_MLA_PREFILL if way.layout == "v32_fp8" else None
    device = H200.keeping(lambda library, kernel: library != "flash_mla" or kernel.op is not left_out)
    return VllmPlanner(
        model=replace(model(way.layout, HEADS * ranks, TOPK), attn_tp_size=ranks),
        device=device,
        settings=Settings(
            token_shard="on" if on else "off",
            prefill_backend=way.prefill if on else "reference",
            decode_backend=way.decode if on else "reference",
            mha_max_kv=MHA_MAX_KV,
            **settings,
        ),
        max_model_len=MAX_LEN,
        step_tokens=step_tokens,
    )


def world_of(way: Way, exchange: Exchange | None, step_tokens: int = 1, **settings: Any) -> World:
    """A planner whose ranks reshard, or one that keeps its heads and has no FlashMLA."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    planner = planner_of(way, ranks, on=exchange is not None, step_tokens=step_tokens, **settings)
    if exchange is not None:
        planner.set_exchange(exchange, "")
    roomy = copy(planner)  # steps have enough memory to score all query tokens at once, as in a captured graph
    planner.device = replace(planner.device, memory_free=4 * 4 * 60 * 9)  # prefills: chunks of a few query tokens
    planner.step_execution_of = roomy.step_execution_of  # type: ignore[method-assign]
    world = World(planner, way.later, rank)
    prefill, decode = kernels(torch.bfloat16 if way.copied else torch.float32)
    _, plain_decode = kernels(torch.float32)
    providers = world.impl.nsa_plugin_providers
    loaded, attended = providers._loaded, providers.attended.kernel
    loaded["mha_one_shot", "triton"] = dense
    loaded["sparse_mla_prefill", "reference"] = attended(prefill)
    loaded["sparse_mla_decode", "reference"] = attended(plain_decode if way.copied else decode)
    return world


def environment() -> None:
    """vLLM's modules that the adapter reads, in miniature."""

    def group() -> Any:  # looked up by each call: a module that held the group would keep its threads alive
        return SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD)

    library = {
        "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_metadata": get_mla_metadata,
    }
    contents: dict[str, dict[str, Any]] = {
        gpu_token_shard.GROUP[0]: {gpu_token_shard.GROUP[1]: group},
        gpu_token_shard.FLASH_MLA: library,
    }
    for name, members in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
