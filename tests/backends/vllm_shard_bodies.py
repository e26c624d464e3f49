"""What ranks do in the tests of heads for tokens under vLLM: batches through the adapter's indexer and attention.

Every rank has the layer of `vllm_fakes` with heads of its own, the same cache and the same batches. What it gets is
compared, bit for bit, with the same rank that keeps its heads. Attention is float64 here, so that neither the number of
heads nor that of rows shows in what is rounded to bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nsa_plugin import measured, sharding
from nsa_plugin.backends.token_shard import Exchange
from nsa_plugin.backends.vllm import gpu_serving, gpu_token_shard
from nsa_plugin.backends.vllm.gpu_indexer import planned_indexer_builder
from nsa_plugin.backends.vllm.gpu_routes import Carrier, Planner
from nsa_plugin.capabilities import Op
from nsa_plugin.devices import synthetic
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_read
from nsa_plugin.kernels.mha import reference as dense_reference
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.parallel.partition import by_count
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.shard_times import quickest_in
from tests.backends.vllm_fakes import HEADS, LORA, MAX_LEN, MAX_ROWS, ROPE, Step, World, model

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
    def carriers(self) -> set[Carrier]:
        """Of prefills."""
        if self.prefill != "flash_mla":
            return {Carrier.PROVIDER}
        if self.layout == "bf16":
            return {Carrier.STOCK}
        return {Carrier.SEPARATE if self.copied else Carrier.MIXED}


WAYS = (
    Way("bf16", "reference", "reference"),
    Way("v32_fp8", "reference", "reference", later=True),
    Way("bf16", "flash_mla", "flash_mla", later=True),
    Way("v32_fp8", "flash_mla", "flash_mla"),
    Way("v32_fp8", "flash_mla", "reference", copied=True),
)

# (rows, context) of each request. Contexts up to MHA_MAX_KV attend densely.
BATCHES: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([(1, 40), (1, 9), (6, 6), (30, 60), (20, 20), (5, 70), (4, 21)], 0),
    ([(30, 60), (5, 70)], 0),
    ([(1, 40), (1, 7), (1, 80), (1, 30), (1, 31), (1, 96), (1, 1)], 0),
    ([(1, 50)], 0),
    ([(2, 90)], 0),
    ([(1, 40), (6, 6), (3, 80)], 0),
    ([(1, 40), (0, 12), (9, 33), (6, 6), (9, 80), (7, 7), (2, 40), (0, 50), (11, 95)], 0),
    ([(70, 90), (40, 60)], 0),
    ([(96, 96), (90, 92), (30, 50)], 0),  # more than the buffers hold
    ([(1, 50), (1, 90), (1, 3)], 5),
    ([(1, 50), (1, 90), (1, 3), (1, 12), (1, 60)], 3),
    ([(12, 12), (5, 5)], 0),
)
VERIFY: tuple[tuple[list[tuple[int, int]], int], ...] = (
    ([(3, 50), (3, 8), (1, 33), (9, 40), (4, 7), (20, 90)], 0),
    ([(3, 50), (3, 8), (3, 96)], 0),
    ([(3, 50), (3, 8)], 2),
    ([(3, 60)], 0),
)


# ---------------------------------------------------------------------------------------------------
# Attention in float64


def attended(q: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, scale: float) -> torch.Tensor:
    """[n, heads, LORA] in q's dtype.

    Args:
        q: [n, heads, LORA + ROPE]. rows: [tokens, LORA + ROPE] that entries of `chosen`, [n, topk], name; -1 for none.
    """
    out = torch.zeros(*q.shape[:2], LORA, dtype=torch.float64)
    for row, entries in enumerate(chosen):
        keys = rows[entries[entries >= 0].long()].double()
        if len(keys):
            out[row] = (q[row].double() @ keys.T * scale).softmax(-1) @ keys[:, :LORA]
    return out.to(q.dtype)


def rows_read(cache: PagedCache, slots: torch.Tensor, read: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the rows that slots name, read as `read`; the slots as places among them)."""
    used = slots[slots >= 0].long().unique()
    places = torch.searchsorted(used, slots.long().contiguous())
    return reference_read(cache, used, dtype=read), places.masked_fill(slots < 0, -1)


def kernels(read: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The ops of prefill and decode, over a cache whose rows are read as `read`."""

    def prefill(
        q: torch.Tensor, cache: PagedCache, slots: torch.Tensor, *, scale: float, d_v: int, out: Any = None
    ) -> Any:
        found = attended(q, *rows_read(cache, slots, read), scale)
        return SimpleNamespace(out=found if out is None else out.copy_(found))

    def decode(
        q: torch.Tensor, cache: PagedCache, slots: torch.Tensor, *, scale: float, d_v: int, out: Any = None
    ) -> Any:
        into = None if out is None else out.squeeze(1)
        found = prefill(q.squeeze(1), cache, slots.squeeze(1), scale=scale, d_v=d_v, out=into)
        return SimpleNamespace(out=found.out.unsqueeze(1))

    return prefill, decode


def dense(*given: Any, max_seqlen_q: int, max_seqlen_k: int, **named: Any) -> Any:
    """Not traded, and quicker than Triton's interpreted one."""
    return dense_reference(*given, **named)


schedules: list[Any] = []


def get_mla_metadata() -> tuple[Any, None]:
    schedules.append(SimpleNamespace(shape=None))
    return schedules[-1], None


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, topk_length: torch.Tensor
) -> tuple[torch.Tensor]:
    """vLLM's: 64 or 128 heads, rows of bf16, and lengths behind which nothing is read."""
    assert q.shape[1] % 64 == 0
    assert q.dtype == kv.dtype == torch.bfloat16
    assert indices.shape[:2] == (q.shape[0], 1)
    chosen = indices[:, 0].clone()
    chosen[torch.arange(chosen.shape[1]) >= topk_length.unsqueeze(1)] = -1
    return (attended(q, kv[:, 0], chosen, sm_scale),)


def flash_mla_with_kvcache(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: None,
    head_dim_v: int,
    cache_seqlens: None,
    tile_scheduler_metadata: Any,
    is_fp8_kvcache: bool,
    indices: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, None]:
    """vLLM's over fp8 pages: a schedule is of the shapes of the first call with it."""
    assert is_fp8_kvcache
    assert q.shape[0] == indices.shape[0] == 1
    assert q.shape[2] in (64, 128)
    schedule = tile_scheduler_metadata
    schedule.shape = schedule.shape or q.shape
    assert schedule.shape == q.shape
    cache = open_cache(k_cache.squeeze(2), "v32_fp8")
    return attended(q[0], *rows_read(cache, indices[0], torch.float32), softmax_scale).unsqueeze(0), None


# ---------------------------------------------------------------------------------------------------
# vLLM's indexer in miniature


def split_chunks(
    seq_lens: torch.Tensor, query_lens: torch.Tensor, workspace: int, max_logits_bytes: int, request_offset: int = 0
) -> list[tuple[slice, slice]]:
    """vLLM's rule: requests together while their logits fit; rows of one where its own do not."""
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
    made.nsa_plugin, made.steps = world.planner, steps
    metadata = made.build(0, step.common)
    full, rows = world.buffer.clone(), step.common.num_actual_tokens
    world.buffer[:rows] = -1
    world.buffer[: metadata.num_decode_tokens] = full[: metadata.num_decode_tokens]
    if metadata.prefill is None:
        return
    dealt = step.split.head_dealt is not None or step.split.tail_dealt is not None
    assert (metadata.prefill.row_shard_sizes is None) == dealt
    workspace, scored = None, torch.zeros(rows, dtype=torch.int32)
    for chunk in metadata.prefill.chunks:
        if dealt:
            assert chunk.skip_kv_gather == (workspace == chunk.requests), "keys are gathered once"
        if not chunk.skip_kv_gather:
            workspace = chunk.requests
        assert workspace == chunk.requests
        some = slice(chunk.token_start, chunk.token_end)
        scored[some] += 1
        world.buffer[some] = full[some]
    assert int(scored.max()) <= 1
    if not dealt:
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


def planner_of(way: Way, ranks: int, *, on: bool, step_tokens: int = 1, **settings: Any) -> Planner:
    left_out = Op.SPARSE_MLA_DECODE if way.copied else Op.SPARSE_MLA_PREFILL if way.layout == "v32_fp8" else None
    device = H200.keeping(lambda library, kernel: library != "flash_mla" or kernel.op is not left_out)
    return Planner(
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
    """One whose ranks trade, or which keeps its heads and does without FlashMLA."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    planner = planner_of(way, ranks, on=exchange is not None, step_tokens=step_tokens, **settings)
    if exchange is not None:
        planner.trade(exchange, "")
    planner.prefill_device = replace(planner.prefill_device, memory_free=4 * 4 * 60 * 9)  # chunks of a few rows
    world = World(planner, way.later, rank)
    prefill, decode = kernels(torch.bfloat16 if way.copied else torch.float32)
    _, plain_decode = kernels(torch.float32)
    loaded = world.impl.nsa_plugin_providers._loaded
    loaded["mha_one_shot", "triton", HEADS] = dense
    for heads in (HEADS, ranks * HEADS):
        loaded["sparse_mla_prefill", "reference", heads] = prefill
        loaded["sparse_mla_decode", "reference", heads] = plain_decode if way.copied else decode
    return world


def poison(exchange: Exchange) -> None:
    for buffer in vars(exchange.shard).values():
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(float("nan"))


def environment() -> None:
    """vLLM's modules that the adapter reads, in miniature."""
    group = SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD)
    library = {
        "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_metadata": get_mla_metadata,
    }
    contents: dict[str, dict[str, Any]] = {
        gpu_token_shard.GROUP[0]: {gpu_token_shard.GROUP[1]: lambda: group},
        gpu_token_shard.FLASH_MLA: library,
    }
    for name, members in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)


# ---------------------------------------------------------------------------------------------------
# Batches


def equal_to_untraded(way: Way, batches: Any, step_tokens: int, chunks: int = 1) -> int:
    """Batch after batch through the same buffers, each with two layers; how many parts of them were traded.

    Args:
        chunks: pieces of a prefill that has the rows.
    """
    ranks = dist.get_world_size()
    exchange = exchange_of()
    traded, kept = world_of(way, exchange, step_tokens), world_of(way, None, step_tokens)
    trades, cut, empty, read = 0, 0, 0, reads_of(traded)
    for lengths, padding in batches:
        steps = sum(rows <= step_tokens for rows, _ in lengths)
        # To vLLM's indexer steps of other rows than the first one's are prefills.
        uniform = next((place for place, (rows, _) in enumerate(lengths) if rows != lengths[0][0]), len(lengths))
        found = []
        for world in (traded, kept):
            step = world.step(lengths, padded_rows=padding * step_tokens, padded_requests=padding)
            select(world, step, step.common.num_reqs if padding else min(steps, uniform))
            found.append(step)
        step, untraded = found
        wanted = untraded.run()
        split = step.split
        for plan, rows in (
            (split.steps, split.step_rows),
            (split.sparse, sum(lengths[request][0] for request in split.sparse_requests)),
        ):
            if plan is not None:
                everything = rows if plan is split.steps else sum(rows for rows, _ in lengths[split.num_steps :])
                assert plan.token_shard == (ranks <= rows and everything <= MAX_TOKENS), plan.reasons["token_shard"]
                trades += plan.token_shard
                pieces = chunks if plan is split.sparse and plan.token_shard and rows >= ranks * chunks else 1
                assert plan.token_shard_chunks == pieces, plan.reasons["token_shard_chunks"]
                cut += pieces > 1
        parts = [*step.metadata.mqa] + ([step.metadata.tail] if step.metadata.tail is not None else [])
        for piece in parts:
            assert (piece.share is not None) == piece.plan.token_shard
            assert piece.share is None or piece.stock is None
            assert piece.share is None or piece.share.chunks == piece.plan.token_shard_chunks
            empty += piece.share is not None and 0 < rows_of(piece) < piece.share.chunks
            if piece.plan is split.sparse:
                assert {piece.carrier} == way.carriers
                assert bool(piece.copied) == (way.copied and piece.plan.token_shard and rows_of(piece) > 0)
        assert split.steps_dealt is None or split.steps_dealt.partition == by_count(split.step_rows, ranks)
        # vLLM's own call, which attends for those that keep their heads, is float32 here.
        exact = all(piece.share is not None or piece.carrier is Carrier.PROVIDER for piece in parts)
        for _ in range(2):  # two layers
            poison(exchange)
            read.clear()
            out = step.run()
            copies = [part.slots for piece in parts for part in piece.copied]
            copies += [dense.slots for dense in step.metadata.mha if dense.slots is not None]
            assert sorted(map(id, read)) == sorted(map(id, copies)), "what is copied, once a layer"
            if exact:
                assert torch.equal(out, wanted), (lengths, padding)
            else:
                torch.testing.assert_close(out, wanted, atol=0.03, rtol=0.03)
        assert bool(out[: step.num_rows].isfinite().all())
        assert float(out[: step.num_rows].abs().max()) > 0.01
    assert (cut > 0) == (chunks > 1)
    found_empty = torch.tensor(empty)
    dist.all_reduce(found_empty)
    assert bool(found_empty) or chunks < 4, "a rank without rows of some piece"
    return trades


def reads_of(world: World) -> list[torch.Tensor]:
    """The slots of every reading of rows from a world's cache, from now on."""
    found: list[torch.Tensor] = []
    providers = world.impl.nsa_plugin_providers
    helper = providers.helper

    def noted(name: str) -> Callable[..., Any]:
        def read(cache: PagedCache, slots: torch.Tensor, **named: Any) -> Any:
            found.append(slots)
            return helper(name)(cache, slots, **named)

        return read if name == "kv_cache_read" else helper(name)

    providers.helper = noted
    return found


def rows_of(piece: Any) -> int:
    return int(piece.share.rows.stop - piece.share.rows.start)


def schedules_are_made_once_a_step() -> None:
    """By its first layer, and again where that layer comes again: what a graph reads it has made."""
    ranks = dist.get_world_size()
    world = world_of(WAYS[3], exchange_of())
    step = world.step([(1, 50)] * (3 * ranks))
    schedules.clear()
    share = step.metadata.mqa[0].share
    first = step.run().clone()
    for another in (1, 2):
        assert share.scheduled(another, share.rows, get_mla_metadata) is schedules[0]
    assert len(schedules) == 1
    assert torch.equal(step.run(), first)
    assert len(schedules) == 2


def controls() -> None:
    """The comparison notices an exchange that is wrong, and rows of others are not read."""
    way, exchange = WAYS[0], exchange_of()
    world = world_of(way, exchange)
    step = world.step([(30, 60), (11, 70)])
    select(world, step, 0)
    right = step.run().clone()
    assert bool((right.abs().amax((1, 2)) > 0).all())
    fetch = exchange.shard._fetch
    exchange.shard._fetch = lambda *given: fetch(*given).flip(1)  # type: ignore[method-assign]
    assert not torch.equal(step.run(), right)
    exchange.shard._fetch = fetch  # type: ignore[method-assign]
    own = step.metadata.mqa[0].share.rows
    others = torch.ones(MAX_ROWS, dtype=torch.bool)
    others[own] = False
    assert bool((world.buffer[:41][others[:41]] == -1).all())
    world.buffer[others] = 2
    assert torch.equal(step.run(), right)


def captured_batches_share_alike() -> None:
    """A replay exchanges what its capture did, whatever its lengths are."""
    world = world_of(WAYS[1], exchange_of())
    capture = world.step([(1, 1)] * 12).metadata.mqa[0]
    replay = world.step([(1, 50), (1, 90), (1, 3)], padded_rows=9, padded_requests=9).metadata.mqa[0]
    assert capture.plan is replay.plan
    assert capture.plan.token_shard
    assert capture.share.partition == replay.share.partition
    assert capture.request_of_row.data_ptr() == replay.request_of_row.data_ptr()


def the_fault_shows() -> None:
    lengths = [(1, 60), (1, 50), (1, 40), (1, 30), (40, 90)]
    for way in (WAYS[0], WAYS[4]):
        out = []
        for fault in ("none", "shift_indices"):
            step = world_of(way, exchange_of(), fault=fault).step(lengths)
            out.append(step.run().clone())
        assert not torch.equal(out[0][:4], out[1][:4])
        assert not torch.equal(out[0][4:], out[1][4:])


def ranks_with_other_rows() -> None:
    """With rows compared before each exchange, ranks that prepared other batches say so instead of waiting."""
    world = world_of(WAYS[1], exchange_of(check_rows=True))
    step = world.step([(40, 90)] if dist.get_rank() else [(39, 89)])
    with pytest.raises(MismatchError, match=r"rank 0: T 39, .* rank 1: T 40"):
        step.run()


# ---------------------------------------------------------------------------------------------------
# Start-up


def config(**more: Any) -> Any:
    ranks = dist.get_world_size()
    shape = model("v32_fp8", HEADS * ranks, TOPK)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads")
    hf = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"],
        num_attention_heads=shape.num_heads,
        index_head_dim=128,
        **{name: getattr(shape, name) for name in names},
    )
    parallel = {"tensor_parallel_size": ranks} | more.pop("parallel", {})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf, max_model_len=MAX_LEN),
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
    gpu_serving.warm_selection = lambda *given: None
    warmed: list[Any] = []
    gpu_serving.warm = lambda kernels, providers, shape, device: warmed.append((kernels, shape.heads_per_rank))
    on = Settings(token_shard="on", prefill_backend="reference", decode_backend="triton")
    device = replace(H200, memory_free=(1 + rank) << 30)

    made = serving_of(on, device)
    # A step of fewer rows than ranks keeps its heads; prefills of as many tokens are dense.
    assert warmed[0] == ({("sparse_mla_decode", "triton")}, HEADS) or ("sparse_mla_decode", "triton") in warmed[0][0]
    assert ("sparse_mla_decode", "triton") in warmed[1][0]
    assert warmed[1][1] == ranks * HEADS
    assert made.planning().exchange is None
    planner = made.building()
    exchange = planner.exchange
    assert exchange is not None
    assert made.building().exchange is exchange
    assert (exchange.shard.ranks, exchange.shard.rank, exchange.shard.max_tokens) == (ranks, rank, MAX_TOKENS)
    assert not exchange.shard._check_rows
    assert planner.prefill_device.memory_free == planner.step_device.memory_free == 1 << 30
    assert planner.step_plan(64, 64, 1).token_shard
    assert not planner.step_plan(ranks - 1, ranks - 1, 1).token_shard
    assert "exceed the 200" in planner.step_plan(MAX_TOKENS + 1, MAX_TOKENS + 1, 1).reasons["token_shard"]
    context = made.vllm_config.compilation_config.static_forward_context
    context["attn"] = SimpleNamespace(impl=SimpleNamespace(nsa_plugin=planner))
    words = made.facts()["decode, 64 requests"]
    assert f"; heads traded for tokens: {ranks} ranks take about {64 // ranks} of 64 query rows each" in words
    gpu_serving.free_device_memory = lambda: (9 - rank) << 30
    made.settle()
    assert planner.free_memory is not None
    assert planner.free_memory() == (9 - (ranks - 1)) << 30

    # Not asked for, and nothing measured, or nothing to be quicker: no memory is taken for what no batch would use.
    before, measured.MEASUREMENTS = measured.MEASUREMENTS, {}
    quiet = serving_of(replace(on, token_shard="auto"))
    assert quiet.building().exchange is None
    assert "not measured" in quiet.planning().step_plan(64, 64, 1).reasons["token_shard"]
    assert len(warmed) == 3
    measured.MEASUREMENTS = before
    slower = serving_of(replace(on, token_shard="auto")).building()
    assert slower.exchange is None
    assert f"no batch of up to {MAX_TOKENS} query rows was measured on SM90 to be quicker" in slower.no_exchange
    traced = serving_of(replace(on, trace="/nowhere/trace.jsonl")).building().exchange
    assert traced is not None
    assert traced.shard._check_rows

    with pytest.raises(SettingsError, match="token_shard is on and cannot work here: batches are split in two"):
        serving_of(on, parallel={"enable_dbo": True}).building()
    # One rank that cannot is all of them that do not.
    wanted = "batches are split in two" if rank == 1 else "another rank of the attention group cannot"
    with pytest.raises(SettingsError, match=wanted):
        serving_of(on, parallel={"ubatch_size": 2 * (rank == 1)}).building()
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
    with pytest.raises(NoProviderError, match="the exchange of token_shard: a rank did not get"):
        serving_of(on).building()
    TokenShard._fetch = fetch  # type: ignore[method-assign]
    what_only_a_rank_notices(on)
    a_rank_without_links(replace(on, token_shard="auto"))


def a_rank_without_links(auto: Settings) -> None:
    """Only it knows; all of them keep their heads."""
    rank, never, pointless = dist.get_rank(), sharding.never, sharding.pointless
    sharding.never = lambda model, device, settings: None if device.nvlink else "no link"
    sharding.pointless = lambda *given: None
    try:
        planner = serving_of(auto, replace(H200, nvlink=rank != 1)).building()
    finally:
        sharding.never, sharding.pointless = never, pointless
    assert planner.exchange is None
    others = "another rank of the attention group cannot, and its own report says why"
    assert planner.no_exchange == ("no link" if rank == 1 else others)


def what_only_a_rank_notices(on: Settings) -> None:
    """Heads in another order that come back in the right one; and an exchange that fails on one rank alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    fetch, give_back, attend = TokenShard._fetch, TokenShard._give_back, TokenShard.attend
    totals: list[int] = []

    def fetched(self: TokenShard, q: torch.Tensor, partition: Any, *given: Any) -> torch.Tensor:
        totals.append(partition.total)
        return fetch(self, q, partition, *given).flip(1)

    def given_back(self: TokenShard, out: torch.Tensor | None, *given: Any) -> None:
        give_back(self, out if out is None else out.flip(1), *given)

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
        TokenShard._fetch, TokenShard._give_back = fetched, given_back  # type: ignore[method-assign]
        with pytest.raises(NoProviderError, match="the exchange of token_shard: a rank did not get"):
            serving_of(on).building()
        TokenShard._fetch, TokenShard._give_back = fetch, give_back  # type: ignore[method-assign]
        TokenShard.attend = failing  # type: ignore[method-assign,assignment]
        with pytest.raises(NoProviderError, match="a compiler's" if rank == 1 else "a rank did not get"):
            serving_of(on).building()
        TokenShard.attend, TokenShard._overlapped = attend, failing_aside  # type: ignore[method-assign]
        with pytest.raises(NoProviderError, match="a second stream's" if rank == 1 else "exchange of token_shard"):
            serving_of(on).building()
    finally:
        TokenShard._fetch, TokenShard._give_back = fetch, give_back  # type: ignore[method-assign]
        TokenShard.attend, TokenShard._overlapped = attend, overlapped  # type: ignore[method-assign]
    assert totals == [2 * ranks + 1], "rows that no number of ranks divides"


def pieces_on_ranks(device: torch.device, way: int, chunks: int) -> None:
    environment()
    quickest_in(chunks, dist.get_world_size(), HEADS, TOPK)
    # And a tail behind a dense request that has fewer rows than a rank has pieces.
    short_tail = [(1, 40), (14, 60), (20, 20), (3, 70)], 0
    one_copy = [(12, 30), (12, 32), (8, 30)], 0  # of several requests, and cut within it
    equal_to_untraded(WAYS[way], (*BATCHES, short_tail, one_copy), 1, chunks)
    the_fault_shows()
    if WAYS[way].prefill == "flash_mla" and not WAYS[way].copied:
        schedules_are_of_a_piece(WAYS[way], chunks)


def schedules_are_of_a_piece(way: Way, chunks: int) -> None:
    """Each layer's pieces have one each, which the layers share."""
    world = world_of(way, exchange_of())
    step = world.step([(60, 90)])
    schedules.clear()
    first = step.run().clone()
    share = step.metadata.mqa[0].share
    in_place = way.layout == "v32_fp8"
    assert len(schedules) == len(share.schedules) == chunks * in_place
    assert torch.equal(step.run(), first)
    assert len(schedules) == 2 * chunks * in_place


def batches_on_ranks(device: torch.device, way: int) -> None:
    environment()
    trades = equal_to_untraded(WAYS[way], BATCHES, 1)
    assert trades >= (10 if dist.get_world_size() == 2 else 7), trades
    assert equal_to_untraded(WAYS[way], VERIFY, 3) >= 4


def others_on_ranks(device: torch.device) -> None:
    environment()
    for body in (
        schedules_are_made_once_a_step,
        controls,
        captured_batches_share_alike,
        the_fault_shows,
        ranks_with_other_rows,
        starting,
    ):
        body()
