"""Requests to an engine's server and its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Most probable tokens requested with each generated token, to recognize near ties.
TOP = 16
NEW_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """One prompt, decoded greedily. An end-of-sequence token does not end the answer.

    Attributes:
        name: unique in its group.
        prompt: token ids.
        new_tokens: tokens to generate.
        prompt_logprobs: log probabilities requested, counted from the prompt's end.
        cached_tokens: fewest prompt tokens that must come from the prefix cache.
        after: requests of the group that must be answered before this one is sent ("at once" groups only).
        control: also sent to the demo's control server.
        purpose: why the request is in the demo.
    """

    name: str
    prompt: tuple[int, ...]
    new_tokens: int = NEW_TOKENS
    prompt_logprobs: int = 0
    cached_tokens: int = 0
    after: tuple[str, ...] = ()
    control: bool = False
    purpose: str = ""

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + self.new_tokens


@dataclass(frozen=True, kw_only=True)
class RequestGroup:
    """Requests that are sent together.

    Attributes:
        case: the case that the group belongs to.
        how: "one by one", "one batch" (one HTTP request) or "at once" (one HTTP request each).
        top: most probable tokens requested with each generated token; 0: no log probabilities.
        traced: send each request's name as its id, so that the plugin's trace can be read by request.
    """

    name: str
    case: str
    how: str
    requests: tuple[PromptRequest, ...]
    top: int = TOP
    traced: bool = False

    def digest(self) -> str:
        """SHA-256 of everything the requests contain. Equal digests mean that two servers got the same requests."""
        asked = [[one.name, one.prompt, one.new_tokens, one.prompt_logprobs] for one in self.requests]
        return hashlib.sha256(json.dumps([self.name, self.how, asked]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A server's answer to one prompt. Log probabilities are natural; NaN where the server returned none.

    Attributes:
        token_ids: generated tokens.
        logprobs: log probability of each generated token.
        top: for each generated token, the most probable token ids and their log probabilities.
        prompt_logprobs: log probabilities of the prompt's last tokens, if requested.
        prompt_top: for each of these, the most probable tokens and their log probabilities, if the engine gives them.
        cached_tokens: prompt tokens that came from the prefix cache.
        error: why there is no answer, or "".
        seconds: from sending the request to the complete answer; 0 if not measured.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top: tuple[dict[int, float], ...] = ()
    cached_tokens: int = 0
    error: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the time and the prompt's most probable tokens."""
        made = vars(self) | {"top": [[list(best), list(best.values())] for best in self.top]}
        del made["seconds"], made["prompt_top"]
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Answer:
        return cls(
            token_ids=tuple(data["token_ids"]),
            logprobs=tuple(data["logprobs"]),
            top=tuple(dict(zip(ids, values, strict=True)) for ids, values in data["top"]),
            prompt_logprobs=tuple(data["prompt_logprobs"]),
            cached_tokens=data["cached_tokens"],
            error=data["error"],
        )
