"""python -m tests.backends.fuzz_sglang [COUNT] [--seed N]: random batches of SGLang through one layer, against float64.

A batch is a prefill (whole, chunked, or after a cached prefix, with requests that have no query tokens), a prefill with
decode steps, a decode step, or a verify step; some are padded as for MLP-sync. Batch n depends on the seed and n alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from nsa_plugin.kernels.kv_cache import open_cache, reference_read
from tests.backends.fake_sglang.shard_engine import (
    SCALE,
    TOPK,
    WAYS,
    Engine,
    Step,
    Way,
    backend_of,
    environment,
    model_of,
)
from tests.backends.fake_sglang.shard_steps import STEP_WAYS as FP8_STEP_WAYS
from tests.backends.fake_sglang.v32 import D_V, DRAFT_TOKENS, PAGE, ForwardMode
from tests.backends.fuzz import main

MODES = (*[ForwardMode.EXTEND] * 2, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
STEP_WAYS = (*FP8_STEP_WAYS, Way("bf16", "reference"))
KEYS = 1000  # of a batch, at most
TOLERANCE = 2e-2


def step(random: Random) -> Step:
    mode = random.choice(MODES)
    q_lens: list[int] = []
    kv_lens: list[int] = []
    for _ in range(random.randint(1, 9)):
        room = KEYS - sum(kv_lens)
        context = random.randint(1, min(room, random.choice((3, 40, 160, 400)))) if room else 0
        if mode is ForwardMode.EXTEND or (mode is ForwardMode.MIXED and random.random() < 0.5):
            rows = random.choice((0, 1, context, random.randint(0, context)))
        else:
            rows = DRAFT_TOKENS if mode is ForwardMode.TARGET_VERIFY else 1
        if rows <= context:
            q_lens.append(min(rows, 60))
            kv_lens.append(context)
    if not sum(q_lens):
        return Step([1], [7], mode=ForwardMode.DECODE)
    return Step(q_lens, kv_lens, padding=random.choice((0, 0, 1, 5)), mode=mode)


def run_one(random: Random, seed: int) -> str:
    """Check one batch; return its phase and how it was attended.

    Raises:
        AssertionError: a selection or an output is wrong.
    """
    of = step(random)
    way = random.choice(WAYS if of.mode.is_extend() else STEP_WAYS)
    if of.mode is ForwardMode.MIXED and way.copied:
        return "a prefill with decode steps, without a kernel that reads the fp8 cache in place"
    settings: dict[str, Any] = {} if random.random() < 0.5 else {"logits_budget_mb": 1}
    if not of.mode.is_extend():
        settings["decode_backend"] = way.library
    if random.random() < 0.7:
        settings["mha_max_kv"] = random.choice((0, 50))
    model = model_of(way, 1)
    backend, engine = backend_of(way, model, None, **settings), Engine(of, way.layout, model.num_heads, seed)
    backend.dense_allowed = random.random() < 0.5
    plan = engine.prepare(backend)
    attended = f"{plan.phase}: {plan.attention} by {plan.provider}"
    assert backend.use_mha == backend.nsa_plugin.route.dense
    if backend.use_mha:
        assert backend.dense_allowed
        longest = max(context for rows, context in zip(of.q_lens, of.kv_lens, strict=True) if rows)
        assert longest <= settings.get("mha_max_kv", longest)
        return attended  # SGLang attends, and selects nothing
    right = [row.tolist() for row in expected_positions(engine)]
    if of.mode.is_extend():
        buffer = torch.full((of.rows + of.padding, TOPK), -1, dtype=torch.int32)
        selected = engine.select(backend, random.choice((None, buffer)))
        ragged = engine.metadata(backend).topk_transform_method.name == "RAGGED"
    else:
        selected, ragged = torch.full((of.rows + of.padding, TOPK), -1, dtype=torch.int32), False
        for row, positions in enumerate(right):
            selected[row, : len(positions)] = slots_of(engine, row)[positions]
    first_key = engine.attention.topk_indices_offset
    for row, positions in enumerate(right):
        found = selected[row][selected[row] >= 0].tolist()
        wanted = (
            [int(first_key[row]) + one for one in positions] if ragged else slots_of(engine, row)[positions].tolist()
        )
        assert sorted(found) == sorted(wanted), f"query token {row} selects {found[:9]}"
    assert bool((selected[of.rows :] == -1).all())
    out = engine.attend(backend, selected, slice(None))
    for row, positions in enumerate(right):
        torch.testing.assert_close(
            out[row].float(), attention(engine, row, slots_of(engine, row)[positions]), atol=TOLERANCE, rtol=TOLERANCE
        )
    return attended


def expected_positions(engine: Engine) -> Iterator[torch.Tensor]:
    """The positions that each query token selects, from scores in float64."""
    starts, ends = engine.attention.ranges
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        products = (engine.index_k[start:end].double() @ engine.index_q[row].double().T).relu()
        scores = products @ engine.weights[row].double() * engine.k_scale[start:end].double()
        yield scores.topk(min(TOPK, end - start)).indices


def slots_of(engine: Engine, row: int) -> torch.Tensor:
    """The cache slots of the keys of a query token's request."""
    start, _ = engine.attention.ranges
    return engine.slots[int(start[row]) :]


def attention(engine: Engine, row: int, slots: torch.Tensor) -> torch.Tensor:
    """The output of a query token [heads, d_v], in float64."""
    cache = engine.cache
    if engine.layout == "v32_fp8":
        pages = open_cache(cache.view(-1, PAGE, 1, cache.shape[-1]), "v32_fp8")
        keys = reference_read(pages, slots.long(), dtype=torch.float32)
    else:
        keys = cache.view(-1, cache.shape[-1])[slots.long()]
    keys = keys.double()
    weights = (engine.all_q[row].double() @ keys.T * SCALE).softmax(-1)
    return (weights @ keys[:, :D_V]).float()


@contextmanager
def without_sglang() -> Iterator[None]:
    """SGLang's modules that the adapter reads, in miniature."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    environment()
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def run(count: int, seed: int) -> Counter[str]:
    """Check `count` batches; return how many were attended in each way.

    Raises:
        AssertionError: a batch is wrong, or anything was raised.
    """
    seen: Counter[str] = Counter()
    with without_sglang():
        for number in range(count):
            try:
                seen[run_one(Random(f"{seed}:{number}"), number)] += 1
            except Exception as error:
                raise AssertionError(f"batch {number} of seed {seed}: {error!r}") from error
    return seen


if __name__ == "__main__":
    main(run, "random batches of SGLang through one layer, against float64")
