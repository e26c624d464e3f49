"""The answers of a real vLLM compared with the reference, and the checkpoint that both run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec

SPEC = CheckpointSpec(dtype="float32")
# The environment of an engine that starts no process, which would import vLLM again.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# One thread per rank; otherwise vLLM binds each rank to a separate memory node.
TWO_RANKS = ONE_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# float32 against float32: what the order of summation leaves is about 3e-5. Where two tokens at the edge of a selection
# score alike it may also decide which of them is attended, which moves a log probability by less than this.
TOLERANCE = 1e-2


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


def transfer(connector: str, module: str | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of vllm.LLM for a KV connector, whose pages are of 16 tokens and the only ones that are used again."""
    return {
        "enable_prefix_caching": False,
        "block_size": 16,
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        },
    }


@dataclass
class Answer:
    """One request of a case: what the engine answered, and what the reference says of the same tokens.

    Attributes:
        prompt_tokens, cached_tokens: of the prompt, and how many of them came from the prefix cache.
        equal: the reference would have chosen the same token, step by step.
        logprob_errors: absolute difference of the chosen token's log probability, step by step.
        gaps: log-probability in nats that the reference gives its token minus that of the engine's token.
    """

    prompt_tokens: int
    cached_tokens: int
    equal: list[bool]
    logprob_errors: list[float]
    gaps: list[float]


@dataclass
class Outcome:
    rounds: list[list[Answer]]
    preemptions: float | None
    log: str
    trace: list[dict[str, Any]]

    @property
    def answers(self) -> list[Answer]:
        return [answer for answers in self.rounds for answer in answers]

    def equal(self) -> int:
        return sum(sum(answer.equal) for answer in self.answers)

    def total(self) -> int:
        return sum(len(answer.equal) for answer in self.answers)

    def worst(self) -> float:
        return max(error for answer in self.answers for error in answer.logprob_errors)


def assert_right(outcome: Outcome) -> None:
    assert outcome.equal() == outcome.total(), f"{outcome.equal()} of {outcome.total()} tokens are the reference's"
    assert outcome.worst() < TOLERANCE, f"a log probability differs by {outcome.worst()}"


def compare(reference: Any, answer: dict[str, Any]) -> Answer:
    """Compare an answer ({ids, tokens, logprobs, cached}) with what the reference says of the same tokens."""
    ids, tokens = answer["ids"], answer["tokens"]
    logprobs = reference.run(ids + tokens).logprobs[len(ids) - 1 : -1]
    best, choice = logprobs.max(-1)
    own = [logprobs[step, token].item() for step, token in enumerate(tokens)]
    return Answer(
        prompt_tokens=len(ids),
        cached_tokens=answer["cached"],
        equal=[int(choice[step]) == token for step, token in enumerate(tokens)],
        logprob_errors=[abs(a - b) for a, b in zip(own, answer["logprobs"], strict=True)],
        gaps=[float(best[step]) - own[step] for step in range(len(tokens))],
    )
