"""The answers of a real vLLM compared with the reference, and the checkpoint that both run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec

SPEC = CheckpointSpec(dtype="float32")
# The environment of an engine that starts no process, which would import vLLM again.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


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
