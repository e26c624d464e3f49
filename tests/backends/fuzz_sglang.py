"""python -m tests.backends.fuzz_sglang [COUNT] [--seed N] [--jobs N]: random batches of SGLang through one layer,
against float64.

A batch is a prefill (whole, chunked, or after a cached prefix, with requests that have no query tokens), a prefill with
decode steps, a decode step, or a verify step; some are padded as for MLP-sync. Several layers attend some of them, each
with its own selection or with that of the layer before. Batch n depends on the seed and n alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch

from nsa_plugin.backends.sglang.v32.routes import NO_COPY
from nsa_plugin.errors import SettingsError
from nsa_plugin.kernels.kv_cache import open_cache, reference_read
from nsa_plugin.libraries.capabilities import Op
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
    reference_row_by_row,
)
from tests.backends.fake_sglang.shard_steps import STEP_WAYS as FP8_STEP_WAYS
from tests.backends.fake_sglang.v32 import D_V, PAGE, ForwardMode
from tests.backends.fuzz import main

MODES = (*[ForwardMode.EXTEND] * 2, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
STEP_WAYS = (*FP8_STEP_WAYS, Way("bf16", "reference"))
HEADS = (1, 2, 2, 2, 3, 8, 16)
"""Of a rank."""
RANKS = (1, 1, 2, 8)
DRAFT_TOKENS = (2, 3, 4, 4, 6, 8)
LAYERS = 3
"""At most."""
KEYS = 1000  # of a batch, at most
TOLERANCE = 2e-2


def step(random: Random, draft: int) -> Step:
    mode = random.choice(MODES)
    q_lens: list[int] = []
    kv_lens: list[int] = []
    for _ in range(random.randint(1, 9)):
        room = KEYS - sum(kv_lens)
        context = random.randint(1, min(room, random.choice((3, 40, 160, 400)))) if room else 0
        if mode is ForwardMode.EXTEND or (mode is ForwardMode.MIXED and random.random() < 0.5):
            rows = random.choice((0, 1, context, random.randint(0, context)))
        else:
            rows = draft if mode is ForwardMode.TARGET_VERIFY else 1
        if rows <= context:
            q_lens.append(min(rows, 60))
            kv_lens.append(context)
    if not sum(q_lens):
        return Step([1], [7], mode=ForwardMode.DECODE)
    return Step(q_lens, kv_lens, padding=random.choice((0, 0, 1, 5)), mode=mode)


def run_one(random: Random, seed: int) -> set[str]:
    """Check one batch; return its phase, how it was attended, and whether layers shared a selection.

    Raises:
        AssertionError: a selection or an output is wrong.
    """
    draft = random.choice(DRAFT_TOKENS)
    of = step(random, draft)
    way = random.choice(WAYS if of.mode.is_extend() else STEP_WAYS)
    uncopied = way.copied and of.mode is ForwardMode.MIXED
    if uncopied and random.random() < 0.7:
        way = replace(way, library="auto")
    settings: dict[str, Any] = {} if random.random() < 0.5 else {"logits_budget_mb": 1}
    if not of.mode.is_extend():
        settings["decode_backend"] = way.library
    if random.random() < 0.7:
        settings["mha_max_kv"] = random.choice((0, 50))
    heads, ranks = random.choice(HEADS), random.choice(RANKS)
    model = replace(model_of(way, ranks), num_heads=ranks * heads)
    backend, engine = backend_of(way, model, None, **settings), Engine(of, way.layout, heads, seed)
    backend.speculative_num_draft_tokens = draft
    backend.dense_allowed = random.random() < 0.5
    try:
        plan = engine.prepare(backend)
    except SettingsError as error:
        # The setting names a library that only reads a copy here, and SGLang makes none.
        assert uncopied
        assert way.library != "auto"
        message = str(error)
        assert NO_COPY in message
        return {"MIXED: the copy that a setting asks for is refused"}
    attended = f"{plan.phase}: {plan.attention} by {plan.provider}"
    assert f", {of.rows} query token" in plan.reasons["phase"]
    assert backend.use_mha == backend.nsa_plugin.route.dense
    if backend.use_mha:
        assert backend.dense_allowed
        longest = max(context for rows, context in zip(of.q_lens, of.kv_lens, strict=True) if rows)
        assert longest <= settings.get("mha_max_kv", longest)
        return {attended}  # SGLang attends, and selects nothing
    if uncopied:
        assert not plan.dequantize_kv, "SGLang makes no copy of this batch"
        # The CUDA kernel runs on a GPU only.
        backend.nsa_plugin.providers._loaded[Op.SPARSE_MLA_PREFILL, plan.provider] = reference_row_by_row
    seen = {f"MIXED, {attended}" if of.mode is ForwardMode.MIXED else attended}
    selected, right = selection(random, engine, backend)
    for layer_id in range(random.choice((1, 1, 1, *range(2, LAYERS + 1)))):
        if layer_id:
            next_layer(engine, seed + layer_id)
            if random.random() < 0.3:
                selected, right = selection(random, engine, backend)
            else:  # IndexShare
                seen.add("a layer that shares the selection of the one before")
        before = selected.clone()
        out = engine.attend(backend, selected, slice(None), layer_id)
        assert torch.equal(selected, before), "attention changes the selection, which other layers may share"
        torch.testing.assert_close(
            out[: of.rows].float(), attention(engine, backend, right), atol=TOLERANCE, rtol=TOLERANCE
        )
    return seen


def next_layer(engine: Engine, seed: int) -> None:
    """Give the engine the inputs of another layer of the same batch: queries, indexer inputs and keys, and a cache."""
    other = Engine(engine.step, engine.layout, engine.all_q.shape[1], seed)
    engine.all_q, engine.index_q, engine.index_k = other.all_q, other.index_q, other.index_k
    engine.k_scale, engine.weights = other.k_scale, other.weights
    engine.cache = engine.cache.view(torch.uint8 if engine.layout == "v32_fp8" else engine.cache.dtype)
    engine.cache = engine.cache.flip(0).view(other.cache.dtype)


def selection(random: Random, engine: Engine, backend: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """(the selection of a layer, [rows, topk]; the positions that each query token has to select).

    A prefill's is the plugin's, and checked. A step's is SGLang's own.
    """
    of = engine.step
    right = [row.tolist() for row in expected_positions(engine)]
    selected = torch.full((of.rows + of.padding, TOPK), -1, dtype=torch.int32)
    if not of.mode.is_extend():
        for row, positions in enumerate(right):
            selected[row, : len(positions)] = slots_of(engine, row)[positions]
        return selected, right
    selected = engine.select(backend, random.choice((None, selected)))
    ragged = engine.metadata(backend).topk_transform_method.name == "RAGGED"
    first_key = engine.attention.topk_indices_offset
    for row, positions in enumerate(right):
        found = selected[row][selected[row] >= 0].tolist()
        wanted = (
            [int(first_key[row]) + one for one in positions] if ragged else slots_of(engine, row)[positions].tolist()
        )
        assert sorted(found) == sorted(wanted), f"query token {row} selects {found[:9]}"
    assert bool((selected[of.rows :] == -1).all())
    return selected, right


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


def attention(engine: Engine, backend: Any, selected: list[list[int]]) -> torch.Tensor:
    """The output [rows, heads, d_v], in float64, of query tokens that attend to these positions.

    SGLang's copy of an fp8 cache rounds its values to bf16, which alone moves some outputs by more than the tolerance.
    """
    cache = engine.cache.view(-1, engine.cache.shape[-1])
    if engine.layout == "v32_fp8":
        pages = open_cache(cache.view(-1, PAGE, 1, cache.shape[-1]), "v32_fp8")
        copied = engine.step.mode.is_extend() and engine._copies(backend)
        read = torch.bfloat16 if copied else torch.float32
        cache = reference_read(pages, torch.arange(pages.num_slots), dtype=read)
    cache = cache.double()
    rows = []
    for row, positions in enumerate(selected):
        keys = cache[slots_of(engine, row)[positions].long()]
        weights = (engine.all_q[row].double() @ keys.T * SCALE).softmax(-1)
        rows.append(weights @ keys[:, :D_V])
    return torch.stack(rows).float()


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


def run(numbers: range, seed: int) -> Counter[str]:
    """Check the batches with these numbers; return how many were attended in each way.

    Raises:
        AssertionError: a batch is wrong, or anything was raised.
    """
    seen: Counter[str] = Counter()
    with without_sglang():
        for number in numbers:
            try:
                seen.update(run_one(Random(f"{seed}:{number}"), number))
            except Exception as error:
                raise AssertionError(f"batch {number} of seed {seed}: {error!r}") from error
    return seen


if __name__ == "__main__":
    main(run, "random batches of SGLang through one layer, against float64")
