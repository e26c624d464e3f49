"""python -m tests.backends.fuzz_v4 [COUNT] [--seed N] [--jobs N]: random DeepSeek-V4 batches of vLLM and SGLang,
against a dense computation, through a layer of each compress ratio.

A batch of vLLM has decode and verify steps, requests without query tokens, prefills with and without a prefix, and
padding as for a CUDA graph, on one of the execution paths. One of SGLang is a prefill, with requests that have no query
tokens and padding as for MLP-sync, a decode step or a verify step. Batch n depends on the seed and n alone.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import torch

from nsa_plugin.backends.common.v4 import RATIOS
from nsa_plugin.backends.vllm.v4.batch import ATTRIBUTE
from nsa_plugin.backends.vllm.v4.routes import path
from tests.backends.fake_sglang import v4 as sglang
from tests.backends.fake_sglang.v32 import ForwardMode
from tests.backends.fake_vllm import v4 as vllm
from tests.backends.fake_vllm.v4_cases import DECODES, DIRECTLY, OVER_ROWS, close
from tests.backends.fuzz import main

REQUESTS, ROWS = 6, 48
"""Of a batch, at most."""
HEADS = (1, 4, 4, 4, 8, 16, 64, 80)
"""Of a rank; vLLM pads them to 64 or 128."""
# Around the window, a page of it, a block, and an entry of the compressed caches.
EDGES = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 130, 191, 192, 255, 256, 257, 383, 384, 385, 511, 512, 513, 640)


def context(random: Random, rows: int, most: int) -> int:
    """Tokens of a request with `rows` query tokens."""
    drawn = random.choice((rows, random.choice(EDGES), random.randint(1, most)))
    return min(most, max(rows, 1, drawn))


def of_vllm(random: Random, **settings: Any) -> set[str]:
    """Check one batch of vLLM; return how it was attended.

    Args:
        settings: of the plugin, besides those of the path.

    Raises:
        AssertionError: an output is wrong.
    """
    step_tokens = random.choice((1, 1, 2, 3))
    given = random.choice((DIRECTLY | {"decode_backend": "reference"}, DECODES, OVER_ROWS))
    lengths: list[tuple[int, int]] = []
    for _ in range(random.randint(0, REQUESTS)):
        rows = random.randint(0 if random.random() < 0.1 else 1, step_tokens)
        lengths.append((rows, context(random, rows, vllm.MAX_LEN)))
    for _ in range(random.randint(0, REQUESTS - len(lengths))):
        rows = random.randint(step_tokens + 1, random.choice((step_tokens + 1, 9, 30)))
        if sum(count for count, _ in lengths) + rows <= ROWS:
            lengths.append((rows, context(random, rows, vllm.MAX_LEN)))
    if not any(rows for rows, _ in lengths):
        lengths = [(1, 1)]
    deciding = vllm.planner(step_tokens=step_tokens, heads=random.choice(HEADS), **(given | settings))
    world = vllm.World(deciding, lengths, padding=random.choice((0, 0, 1, 7)), since_24=random.random() < 0.7)
    metadata = world.metadata()
    for ratio in RATIOS:
        found, wanted, layer = world.run(ratio, metadata)
        assert close(found, wanted), (
            f"ratio {ratio}, {layer.own or 'the plugin'}: {world.heads} heads, {lengths}, {given}"
        )
    batch = getattr(metadata, ATTRIBUTE)
    return {f"vllm, {plan.phase}: {path(plan)}" for plan in (batch.steps, batch.prefill) if plan is not None}


def of_sglang(random: Random, **settings: Any) -> set[str]:
    """As `of_vllm`, for one batch of SGLang."""
    mode = random.choice((ForwardMode.EXTEND, ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY))
    draft = random.randint(2, 4)
    lengths: list[tuple[int, int]] = []
    for _ in range(random.randint(1, REQUESTS)):
        rows = {ForwardMode.DECODE: 1, ForwardMode.TARGET_VERIFY: draft}.get(mode)
        if rows is None:
            rows = random.choice((0, 1, random.randint(1, 9), random.randint(1, ROWS // REQUESTS * 2)))
        lengths.append((rows, context(random, rows, 900)))
    if not any(rows for rows, _ in lengths):
        lengths.append((2, 2))
    padded = random.choice((0, 0, 1, 5)) if mode is ForwardMode.EXTEND else 0
    given: dict[str, Any] = {"prefill_backend": "reference", "decode_backend": "reference"} | settings
    original = random.choice((sglang.Engine, sglang.LateEngine))
    of = sglang.batch(*lengths, padded=padded, mode=mode, heads=random.choice(HEADS))
    backend = sglang.started(of, original, **given)
    backend.speculative_num_draft_tokens = draft
    backend.init_forward_metadata(of.forward)
    core = backend.forward_metadata.core_attn_metadata
    of.select_something(core)
    for layer in sglang.LAYERS:
        out = sglang.attend(backend, layer)
        wanted = of.expected(core, layer)
        torch.testing.assert_close(out[: of.rows].double(), wanted, atol=4e-3, rtol=2e-2)
        assert not out[of.rows :].any(), "a padded query token has an output"
    assert not {"decode kernel", "sparse"} & set(backend.calls), backend.calls
    return {f"sglang, {name}" for name in backend.nsa_plugin.planner.trace.counts}


def run(numbers: range, seed: int) -> Counter[str]:
    """Check the batches with these numbers, of both engines in turn; return how many were attended in each way.

    Raises:
        AssertionError: an output is wrong, or anything was raised.
    """
    seen: Counter[str] = Counter()
    for number in numbers:
        check = (of_vllm, of_sglang)[number % 2]
        try:
            seen.update(check(Random(f"{seed}:{number}")))
        except Exception as error:
            raise AssertionError(f"batch {number} of seed {seed}, {check.__name__}: {error!r}") from error
    return seen


if __name__ == "__main__":
    main(run, "random DeepSeek-V4 batches of vLLM and SGLang, against a dense computation")
