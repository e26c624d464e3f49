"""Bodies of the tests of resharding under SGLang: prefills through the adapter's indexer and attention.

What a rank of `shard_engine` gets is compared, bit for bit, with the same kernel given all heads of all rows in one
piece and a selection for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nsa_plugin.backends.sglang.startup import serving
from nsa_plugin.backends.sglang.v32.attention import with_plans
from nsa_plugin.backends.sglang.v32.token_shard import SglangExchange, open_exchange
from nsa_plugin.decision import timings
from nsa_plugin.decision import token_shard as sharding
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.parallel.exchange import MismatchError
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.settings import ResolvedSettings, Settings
from tests.backends.common.shard_times import quickest_in
from tests.backends.fake_sglang.shard_engine import (
    HEADS,
    MANY,
    MAX_TOKENS,
    SCALE,
    STEPS,
    TOPK,
    WAYS,
    Engine,
    Step,
    Way,
    WideDsa,
    backend_of,
    environment,
    exchange_of,
    heads_of,
    model_of,
    poison,
    same,
)
from tests.backends.fake_sglang.v32 import D_V, H200, ForwardMode, forward_batch


def equal_to_unsharded(way: Way, chunks: int = 1) -> None:
    """Batch after batch through the same buffers, each with two layers, in so many pieces where there are the rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, exchange = model_of(way, ranks), exchange_of()
    sharded = backend_of(way, model, exchange)
    own = backend_of(way, model, None)
    whole = backend_of(way, replace(model, attn_tp_size=1), None)
    reshards = 0
    for seed, step in enumerate(STEPS):
        engine = Engine(step, way.layout, model.num_heads, seed)
        plan = engine.prepare(sharded)
        if step.rows == 0:
            assert not plan.token_shard
            continue
        assert plan.token_shard == (ranks <= step.rows <= MAX_TOKENS), plan.reasons["token_shard"]
        reshards += plan.token_shard
        cut = plan.token_shard and step.rows >= ranks * chunks
        assert plan.token_shard_chunks == (chunks if cut else 1), plan.reasons["token_shard_chunks"]
        unsharded, heads = (whole, slice(None)) if plan.token_shard else (own, heads_of(rank))
        engine.prepare(unsharded)
        assert unsharded.impls == sharded.impls
        selected = engine.select(unsharded)
        wanted = engine.attend(unsharded, selected, heads)
        mine = sharded.nsa_plugin.share.rows if plan.token_shard else slice(0, step.rows)
        garbage = torch.full_like(selected, 5)  # a buffer of the engine's, which held something
        for layer_id, buffer in enumerate((None, garbage)):
            poison(exchange)
            sharded.calls.clear()
            chosen = engine.select(sharded, buffer)
            same(chosen[mine], selected[mine])
            if plan.token_shard:
                others = torch.ones(len(chosen), dtype=torch.bool)
                others[mine] = False
                assert (chosen[others] == -1).all()
            out = engine.attend(sharded, chosen, heads_of(rank), layer_id)
            same(out[: step.rows], wanted[: step.rows] if not plan.token_shard else wanted[: step.rows, heads_of(rank)])
            if plan.token_shard:
                assert not out[step.rows :].any()
                pieces = plan.token_shard_chunks
                assert sharded.calls.count("schedule") == pieces * (buffer is None and _in_place(way, sharded))
                assert sum(call.startswith("flashmla") for call in sharded.calls) in (0, pieces)
            assert sharded.nsa_plugin.route.plan.dequantize_kv == way.copied
            assert (way.library != "reference") == any(call.startswith("flashmla") for call in sharded.calls)
        assert wanted[: step.rows].float().abs().max() > 0.1
    assert reshards >= 6 if ranks < 4 else reshards >= 5


def some_rows_in_some_pieces(chunks: int) -> None:
    """Ranks with fewer rows than pieces, and one with none: such pieces are exchanged, and not attended there."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for way in WAYS:
        model, exchange = model_of(way, ranks), exchange_of()
        sharded, whole = backend_of(way, model, exchange), backend_of(way, replace(model, attn_tp_size=1), None)
        engine = Engine(Step([3, 20, 1], [140, 20, 9]), way.layout, model.num_heads, 2)
        for bounds in ((0, 1), (0, 0), (0, 24)):
            engine.prepare(sharded)
            share = sharded.nsa_plugin.share
            assert share.chunks == chunks
            share.partition = type(share.partition)((*bounds, *[24] * (ranks - 1)))
            engine.prepare(whole)
            selected = engine.select(whole)
            wanted = engine.attend(whole, selected, slice(None))[:, heads_of(rank)]
            for layer_id in (0, 1):
                poison(exchange)
                sharded.calls.clear()
                same(engine.attend(sharded, engine.select(sharded), heads_of(rank), layer_id), wanted)
                attended = sum(call.startswith("flashmla") for call in sharded.calls)
                assert attended == (way.library != "reference") * min(chunks, share.partition.counts[rank])


def _in_place(way: Way, backend: Any) -> bool:
    return way.library == "flash_mla" and backend.impls[0] == "flashmla_kv"


def mixed_with_decodes() -> None:
    """Over a bfloat16 cache a batch of prefills and decodes has a plan."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    way = Way("bf16", "reference")
    model, exchange = model_of(way, ranks), exchange_of()
    sharded, whole = backend_of(way, model, exchange), backend_of(way, replace(model, attn_tp_size=1), None)
    engine = Engine(Step([40, 1, 1, 1], [170, 9, 140, 33], mode=ForwardMode.MIXED), "bf16", model.num_heads, 3)
    assert engine.prepare(sharded).token_shard
    engine.prepare(whole)
    wanted = engine.attend(whole, engine.select(whole), slice(None))[:, heads_of(rank)]
    same(engine.attend(sharded, engine.select(sharded), heads_of(rank)), wanted)


def a_share_is_of_its_batch_alone() -> None:
    """No batch has the share of a batch before it."""
    way = Way("v32_fp8", "reference")
    ranks = dist.get_world_size()
    sharded = backend_of(way, model_of(way, ranks), exchange_of(), decode_backend="reference")
    engine = Engine(MANY, way.layout, 1, 0)
    for batch in (
        forward_batch(ForwardMode.DECODE, [], [100] * (ranks - 1)),
        forward_batch(ForwardMode.DRAFT_EXTEND_V2, [4, 4], [100, 200]),
        forward_batch(ForwardMode.IDLE, [], []),
        forward_batch(ForwardMode.SPLIT_PREFILL, [200], [200]),
        forward_batch(ForwardMode.EXTEND, [3, 30], [3, 30]),  # dense
        forward_batch(ForwardMode.EXTEND, [100], [200], attn_cp_metadata=object()),
    ):
        assert engine.prepare(sharded).token_shard
        assert sharded.nsa_plugin.share is not None
        sharded.init_forward_metadata(batch)
        assert sharded.nsa_plugin.share is None
    sharded._apply_cuda_graph_metadata(4, None, None, None, ForwardMode.DRAFT_EXTEND_V2, None)
    assert sharded.nsa_plugin.share is None
    sharded._apply_cuda_graph_metadata(ranks - 1, None, None, None, ForwardMode.DECODE, None)
    assert sharded.nsa_plugin.share is None


def controls() -> None:
    """The comparison notices an exchange that is wrong, and what reads rows of others reads nothing."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    way = Way("v32_fp8", "reference")
    model, exchange = model_of(way, ranks), exchange_of()
    sharded = backend_of(way, model, exchange)
    engine = Engine(MANY, way.layout, model.num_heads, 1)
    engine.prepare(sharded)
    selected = engine.select(sharded)
    right = engine.attend(sharded, selected, heads_of(rank)).clone()
    assert right.float().abs().amax((1, 2)).min() > 0

    fetch = exchange.shard._fetch
    exchange.shard._fetch = lambda *given: fetch(*given).flip(1)  # type: ignore[method-assign]  # heads in another order
    assert not torch.equal(engine.attend(sharded, selected, heads_of(rank)), right)
    exchange.shard._fetch = fetch  # type: ignore[method-assign]
    same(engine.attend(sharded, selected, heads_of(rank)), right)

    # The same batch partitioned otherwise after the indexer has selected: rows that changed hands have no selection.
    share = sharded.nsa_plugin.share
    before = share.partition
    bounds = (0, *(bound - 1 for bound in before.bounds[1:-1]), before.total)
    share.partition = type(before)(bounds)
    moved = engine.attend(sharded, selected, heads_of(rank))
    changed = [bound - 1 for bound in before.bounds[1:-1]]
    kept = [row for row in range(MANY.rows) if row not in changed]
    assert not moved[changed].any()
    same(moved[kept], right[kept])


def ranks_with_other_rows() -> None:
    """If ranks compare rows before each exchange, different batches raise an error instead of a hang."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    way = Way("v32_fp8", "reference")
    model, exchange = model_of(way, ranks), exchange_of(check_rows=True)
    sharded = backend_of(way, model, exchange)
    step = Step([40], [170]) if rank else Step([39], [169])
    engine = Engine(step, way.layout, model.num_heads, 1)
    engine.prepare(sharded)
    with pytest.raises(MismatchError, match=r"rank 0: T 39, .* rank 1: T 40"):
        engine.attend(sharded, engine.select(sharded), heads_of(rank))


def a_sink_that_no_configuration_names_is_refused() -> None:
    rank = dist.get_rank()
    for library in ("reference", "flash_mla"):
        way = Way("bf16", library)
        model, exchange = model_of(way, dist.get_world_size()), exchange_of()
        sharded = backend_of(way, model, exchange)
        engine = Engine(MANY, way.layout, model.num_heads, 1)
        engine.prepare(sharded)
        with pytest.raises(Exception, match="attention sinks, which token_shard does not support"):
            sharded._forward_flashmla_sparse(
                q_all=engine.all_q[:, heads_of(rank)].contiguous(),
                kv_cache=engine.cache,
                page_table_1=F.pad(engine.select(sharded), (0, 0)),
                sm_scale=SCALE,
                v_head_dim=D_V,
                attn_sink=torch.zeros(HEADS),
            )


# ---------------------------------------------------------------------------------------------------
# Start-up


def built(model: ModelShape, **args: Any) -> tuple[Any, Any]:
    """(a backend after SGLang's own start of it, its runner)."""
    backend = with_plans(WideDsa)("flashmla_kv", "flashmla_kv")
    backend.num_q_heads, backend.device, backend.dsa_kv_cache_store_fp8 = model.heads_per_rank, "cpu", True
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads")
    config = {name: getattr(model, name) for name in (*names, "index_head_dim")}
    config["learnable_sink"] = args.pop("learnable_sink", False)
    of_model = SimpleNamespace(num_attention_heads=model.num_heads, **config)
    runner = SimpleNamespace(
        tp_rank=dist.get_rank(),
        pp_rank=0,
        dp_rank=None,
        kv_cache_dtype="torch.float8_e4m3fn",
        is_draft_worker=args.pop("is_draft_worker", False),
        model_config=SimpleNamespace(hf_config=of_model, hf_text_config=of_model),
        server_args=SimpleNamespace(
            **({"chunked_prefill_size": MAX_TOKENS, "max_prefill_tokens": 4 * MAX_TOKENS} | args)
        ),
    )
    return backend, runner


def starting() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = model_of(Way("v32_fp8", "reference"), ranks)
    on = Settings(token_shard="on", prefill_backend="reference")

    def opened(settings: Settings = on, device: Any = H200, **args: Any) -> tuple[SglangExchange | None, str]:
        backend, runner = built(model, **args)
        return open_exchange(backend, runner, model, device, settings)

    exchange, keeps = opened()
    assert exchange is not None
    assert keeps == ""
    assert (exchange.shard.ranks, exchange.shard.rank, exchange.shard.max_tokens) == (ranks, rank, MAX_TOKENS)
    assert not exchange.shard._check_rows
    traced, _ = opened(replace(on, trace="/nowhere/trace.jsonl"))
    assert traced is not None
    assert traced.shard._check_rows
    unchunked, _ = opened(chunked_prefill_size=-1)
    assert unchunked is not None
    assert unchunked.shard.max_tokens == 4 * MAX_TOKENS
    assert exchange.least(10 + rank) == 10

    # Not asked for, and nothing measured, or nothing to be quicker: no memory is taken for what no batch would use.
    before = timings.TIMINGS, timings.SELECTIONS
    timings.TIMINGS = {}
    assert opened(Settings())[0] is None
    assert "no times on SM90" in opened(Settings())[1]
    assert opened(Settings(token_shard="off")) == (None, "token_shard is off")
    kernel, layout = "flash_mla sparse_decode", "v32_fp8"
    timings.SELECTIONS = {layout: (model.index_topk, 0)}

    def times(sharded: float) -> None:
        group = {f"token_shard by {kernel}": {HEADS: ((1, sharded),)}}
        timings.TIMINGS = {
            (90, "sparse_mla_prefill", layout): {kernel: {HEADS: ((1, 2.0),)}},
            (90, f"{sharding.ATTENTION} tp{ranks}", layout): group,
        }

    times(3.0 if rank == 1 else 1.0)  # one rank that has no use of it is all of them that do not
    reason = "no batch of up to 120 query tokens is quicker" if rank == 1 else "another rank of the attention group"
    slower, keeps = opened(Settings())
    assert slower is None
    assert reason in keeps

    # Measured to be quicker, but a rank is not reached over NVLink: all of them keep heads local.
    times(1.0)
    assert opened(Settings())[0] is not None
    nowhere, keeps = opened(Settings(), replace(H200, nvlink=rank != 1))
    assert nowhere is None
    assert ("over NVLink" if rank == 1 else "another rank of the attention group") in keeps
    timings.TIMINGS, timings.SELECTIONS = before

    with pytest.raises(SettingsError, match="two-batch overlap is on"):
        opened(enable_two_batch_overlap=True)
    with pytest.raises(SettingsError, match=r"token_shard is on and cannot work here: .* attention sinks"):
        opened(learnable_sink=True)
    # One rank that cannot is all of them that do not.
    wanted = "returned to users" if rank == 1 else "another rank of the attention group cannot"
    with pytest.raises(SettingsError, match=wanted):
        opened(enable_return_indexer_topk=rank == 1)
    with pytest.raises(MismatchError, match="the ranks differ in tokens of a prefill"):
        opened(chunked_prefill_size=MAX_TOKENS + rank)
    with pytest.raises(MismatchError, match="the ranks differ in settings"):
        opened(replace(on, logits_budget_mb=64 + rank))
    fetch = TokenShard._fetch

    def swapped(self: TokenShard, *given: Any) -> torch.Tensor:
        return fetch(self, *given).flip(1)

    TokenShard._fetch = swapped if rank == 1 else fetch  # type: ignore[method-assign]
    with pytest.raises(NoProviderError, match="the exchange of token_shard: a rank did not receive"):
        opened()
    TokenShard._fetch = fetch  # type: ignore[method-assign]


def serving_both() -> None:
    """Target and draft of speculative decoding: the draft keeps its heads; ranks with other memory plan alike."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = model_of(Way("v32_fp8", "reference"), ranks)
    serving._warm_selection = lambda *given: None
    serving.free_device_memory = lambda: (1 + rank) << 30
    settings = Settings(token_shard="on", prefill_backend="reference", decode_backend="reference", mha_max_kv=0)
    backend, runner = built(model)
    made = serving.SglangServing.begin(ResolvedSettings(settings, {}), backend, runner, H200)
    made.adopt(backend, runner)
    draft, draft_runner = built(model, is_draft_worker=True)
    made.adopt(draft, draft_runner)
    assert backend.nsa_plugin.exchange is made.exchange
    assert draft.nsa_plugin.exchange is None
    words = made.routes["prefill, 1024 of 1024 tokens"]
    assert f"heads stay local: 1024 query tokens exceed the {MAX_TOKENS}" in words
    for each, reshards in ((backend, True), (draft, False)):
        engine = Engine(MANY, "v32_fp8", model.num_heads, 1)
        plan = engine.prepare(each)
        assert plan.token_shard == reshards
        assert each.nsa_plugin.planner.device.memory_free == (1 if reshards else 1 + rank) << 30
    assert "draft model" in plan.reasons["token_shard"]
    serving.free_device_memory = lambda: (9 - rank) << 30
    made.settle()
    engine.prepare(backend)
    assert backend.nsa_plugin.planner.device.memory_free == (9 - (ranks - 1)) << 30


ALL: tuple[Callable[[], None], ...] = (
    mixed_with_decodes,
    a_share_is_of_its_batch_alone,
    controls,
    ranks_with_other_rows,
    a_sink_that_no_configuration_names_is_refused,
    starting,
    serving_both,
)


def pieces_on_ranks_of_cpus(device: torch.device, chunks: int) -> None:
    environment()
    quickest_in(chunks, dist.get_world_size(), HEADS, TOPK)
    for way in WAYS:
        equal_to_unsharded(way, chunks)
    some_rows_in_some_pieces(chunks)


def on_ranks_of_cpus(device: torch.device) -> None:
    environment()
    for way in WAYS:
        equal_to_unsharded(way)
    for body in ALL:
        body()
