"""Bodies of the tests of resharding under SGLang: decode and verify steps through the adapter's attention.

The engine in miniature of `shard_engine`. Every rank has the selection of all rows, as SGLang's own indexer gives it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nsa_plugin.parallel.partition import by_count
from tests.backends.fake_sglang.shard_engine import (
    MAX_TOKENS,
    TOPK,
    Engine,
    Step,
    Way,
    WideNsa,
    backend_of,
    environment,
    exchange_of,
    heads_of,
    model_of,
    poison,
    same,
)
from tests.backends.fake_sglang.v32 import ForwardMode

STEP_WAYS = (Way("v32_fp8", "reference"), Way("v32_fp8", "flash_mla"), Way("v32_fp8", "flash_mla", original=WideNsa))


def decoded(requests: int, *, draft: int = 0) -> Step:
    """A decode, or with `draft` rows a request a verify step."""
    kv_lens = [draft + 1 + 13 * request % 40 for request in range(requests)]
    return Step([draft or 1] * requests, kv_lens, mode=ForwardMode.TARGET_VERIFY if draft else ForwardMode.DECODE)


def steps_equal_to_unsharded() -> None:
    """Decode and verify steps, eager or prepared for a graph, of sizes that change every time; selected by everyone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for way in STEP_WAYS:
        model, exchange = model_of(way, ranks), exchange_of()
        sharded = backend_of(way, model, exchange, decode_backend=way.library)
        own = backend_of(way, model, None, decode_backend=way.library)
        whole = backend_of(way, replace(model, attn_tp_size=1), None, decode_backend=way.library)
        sizes = (decoded(9), decoded(1), decoded(ranks), decoded(5, draft=4), decoded(23), decoded(31, draft=4))
        for seed, step in enumerate(sizes):
            reshards = ranks <= step.rows <= MAX_TOKENS
            unsharded, heads = (whole, slice(None)) if reshards else (own, heads_of(rank))
            for padding, graph in ((0, False), (3, False), (0, True)):
                engine = Engine(replace(step, padding=padding), way.layout, model.num_heads, seed)
                for backend in (sharded, unsharded):
                    prepare_step(engine, backend, graph)
                plan, share = sharded.nsa_plugin.route.plan, sharded.nsa_plugin.share
                assert plan.token_shard == reshards == (share is not None), plan.reasons["token_shard"]
                assert share is None or share.partition == by_count(step.rows, ranks)
                selected = everything_seen(engine)
                wanted = engine.attend(unsharded, selected, heads)[: step.rows]
                for layer_id in (0, 1):
                    poison(exchange)
                    out = engine.attend(sharded, selected, heads_of(rank), layer_id)
                    same(out[: step.rows], wanted[:, heads_of(rank)] if reshards else wanted)
                    assert not out[step.rows :].nan_to_num(1).any() or not reshards


def prepare_step(engine: Engine, backend: Any, graph: bool) -> None:
    """Prepare a batch to run, capture or replay, as SGLang does."""
    if not graph:
        engine.prepare(backend)
    elif backend.x == "dsa":
        backend._apply_cuda_graph_metadata(len(engine.step.q_lens), None, None, None, engine.step.mode, None)
    else:
        bs, mode = len(engine.step.q_lens), engine.step.mode
        backend.init_forward_metadata_replay_cuda_graph(bs, None, None, 0, None, mode, None, None)


def everything_seen(engine: Engine) -> torch.Tensor:
    """int32 [rows, TOPK]: slots of what each row sees, and -1; rows that are padded behind the last have none."""
    first, end = engine.attention.ranges
    chosen = torch.full((engine.step.rows + engine.step.padding, TOPK), -1, dtype=torch.int32)
    for row, (start, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        chosen[row, : stop - start] = engine.slots[start:stop]
    return chosen


def a_schedule_is_made_again_when_the_model_begins_again() -> None:
    """A warm-up run before a capture, and the capture: what the graph reads it has made, from lengths as they are then.

    And rows that SGLang has no lengths for, which it pads behind a batch's.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    way = Way("v32_fp8", "flash_mla")
    model, exchange = model_of(way, ranks), exchange_of()
    sharded = backend_of(way, model, exchange, decode_backend="flash_mla")
    engine = Engine(decoded(2 * ranks), way.layout, model.num_heads, 0)
    prepare_step(engine, sharded, True)
    sharded.calls.clear()
    selected = everything_seen(engine)
    first = engine.attend(sharded, selected, heads_of(rank), 3).clone()
    for layer_id in (4, 5, 3, 4):
        same(engine.attend(sharded, selected, heads_of(rank), layer_id), first)
    assert sharded.calls.count("schedule") == 2
    # In place, as a replay's lengths are: the last request's row sees one token now.
    engine.lengths[-1] = 1
    selected[-1, 1:] = -1
    assert not torch.equal(engine.attend(sharded, selected, heads_of(rank), 3)[-1], first[-1])

    engine.lengths, selected[-1] = engine.lengths[:-1], -1
    out = engine.attend(sharded, selected[:-1], heads_of(rank), 3)
    assert not out[-1].any()
    same(out[:-1], first[:-1])


def where_steps_keep_their_heads() -> None:
    ranks = dist.get_world_size()
    bf16 = backend_of(Way("bf16", "reference"), model_of(Way("bf16", ""), ranks), exchange_of(), decode_backend="auto")
    prepare_step(Engine(decoded(4 * ranks), "bf16", 1, 0), bf16, True)
    plan = bf16.nsa_plugin.route.plan
    assert (plan.provider, plan.token_shard, bf16.nsa_plugin.share) == ("fa3", False, None)
    assert plan.reasons["token_shard"] == "SGLang's path fa3 attends the query tokens of the whole batch"


def on_ranks_of_cpus(device: torch.device) -> None:
    environment()
    steps_equal_to_unsharded()
    a_schedule_is_made_again_when_the_model_begins_again()
    where_steps_keep_their_heads()
