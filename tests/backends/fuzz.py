"""python -m tests.backends.fuzz [COUNT] [--seed N] [--jobs N]: random batches of vLLM through one layer, against
float32.

Each batch mixes decode and verify steps, requests without query tokens, prompts that attend densely, and prompts that
select, with and without a prefix; some are padded as for a CUDA graph. Some are followed by a layer that shares the
selection of the first, and some by the layer's next batch: mostly steps with as many query tokens and other contexts.
Batch n depends on the seed and n alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from random import Random

import torch

from nsa_plugin.decision.plan import Plan
from tests.backends.fake_vllm.v32 import CPU, HEADS, MAX_LEN, MAX_ROWS, WITH_FLASH_MLA, Step, World, planner

REQUESTS = 11
CALLED_TOPK = 128
"""Selected tokens that FlashMLA supports."""
CHUNK = 20
"""Batches that a process takes at a time."""


def world(random: Random) -> World:
    """A planner and a layer; one in ten on a GPU, with Triton interpreted, and one in ten with vLLM's own calls, for
    prefills alone or for steps too."""
    kind, asked = random.random(), {}
    if kind < 0.1:
        asked = {"topk": CALLED_TOPK, "prefill_backend": "flash_mla"}
        asked |= {"decode_backend": random.choice(("flash_mla", "triton"))}
    return World(
        planner(
            random.choice(("bf16", "v32_fp8")),
            device=CPU if kind >= 0.2 else WITH_FLASH_MLA,
            **asked,
            step_tokens=random.choice((1, 1, 2, 3)),
            workspace_tokens=random.choice((0, 0, 30, 200)),
            mha_max_kv=random.choice((-1, -1, 0, 7)),
            heads=random.choice((HEADS, HEADS, 1, 8, 16)),
        ),
        later=random.random() < 0.5,
    )


def lengths(random: Random, step_tokens: int) -> tuple[list[tuple[int, int]], int]:
    """(query tokens, context) of each request, steps first, and the query tokens that are left."""
    found: list[tuple[int, int]] = []
    room = MAX_ROWS
    for _ in range(random.randint(0, REQUESTS)):
        rows = random.randint(0 if random.random() < 0.1 else 1, step_tokens)
        found.append((rows, random.randint(max(rows, 1), MAX_LEN)))
    if random.random() < 0.3:
        return found, room - sum(rows for rows, _ in found)
    for _ in range(random.randint(0, REQUESTS - len(found))):
        rows = random.randint(step_tokens + 1, random.choice((8, 24, 60)))
        context = rows if random.random() < 0.5 else random.randint(rows, MAX_LEN)
        found.append((rows, context))
    while sum(rows for rows, _ in found) > room:
        found.pop()
    return found, room - sum(rows for rows, _ in found)


def batch(random: Random, made: World) -> Step:
    step_tokens = made.planner.step_tokens
    requests, room = lengths(random, step_tokens)
    only_steps = all(rows <= step_tokens for rows, _ in requests)
    padded = random.randint(0, 3) if only_steps and room >= 3 * step_tokens else 0
    return made.step(requests, padded_rows=padded * step_tokens, padded_requests=padded)


def next_batch(random: Random, last: Step) -> Step:
    """A batch of the same layer; after steps alone mostly with the same query tokens."""
    if last.split.num_steps < last.split.num_requests or random.random() < 0.2:
        return batch(random, last.world)
    requests = [(rows, random.randint(max(rows, 1), MAX_LEN)) for rows, _ in last.lengths]
    padding = {
        "padded_rows": last.common.num_actual_tokens - last.num_rows,
        "padded_requests": last.common.num_reqs - len(requests),
    }
    return last.world.step(requests, **padding)


def run(numbers: range, seed: int) -> Counter[str]:
    """Check the batches with these numbers; return how many had a part with each attention path.

    Raises:
        AssertionError: an output differs from the reference, or anything was raised.
    """
    seen: Counter[str] = Counter()
    for number in numbers:
        random = Random(f"{seed}:{number}")
        step = None
        try:
            step = batch(random, world(random))
            step.check()
            if random.random() < 0.4:
                for _ in range(random.randint(1, 3)):
                    last, step = step, next_batch(random, step)
                    step.check()
                    if step.split is last.split:
                        seen["steps like the last batch's"] += 1
            if random.random() < 0.25:  # a layer that shares the selection: other queries, the same buffer
                step.q = step.q.flip(0)
                step.check()
        except Exception as error:
            what = "a batch" if step is None else f"{step.lengths}, {step.world.planner.settings}"
            raise AssertionError(f"batch {number} of seed {seed}: {what}: {error!r}") from error
        plans: list[Plan | None] = [step.split.steps, step.split.sparse, *(part.plan for part in step.split.dense)]
        seen.update({f"{plan.phase}: {plan.attention} by {plan.provider}" for plan in plans if plan is not None})
    return seen


def main(check: Callable[[range, int], Counter[str]], what: str) -> None:
    """Run a fuzzer from the command line."""
    parser = argparse.ArgumentParser(description=f"Run {what}.")
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    given = parser.parse_args()
    chunks = [range(first, min(first + CHUNK, given.count)) for first in range(0, given.count, CHUNK)]
    with ProcessPoolExecutor(given.jobs, initializer=torch.set_num_threads, initargs=(1,)) as processes:
        seen = sum(processes.map(check, chunks, repeat(given.seed)), Counter[str]())
    for name, times in seen.most_common():
        print(f"{times:7} {name}")


if __name__ == "__main__":
    main(run, "random batches of vLLM through one layer, against float32")
