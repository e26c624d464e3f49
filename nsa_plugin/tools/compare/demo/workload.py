"""The demo's requests. One run takes every execution path.

There are prompts below and above `index_topk`, answers that grow past it, a prompt of several chunks, prefixes that
are in the cache, and batches that mix prefill and decode. No two prompts have the same length, and no name is part of
another: the plugin's trace finds each request by its name.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nsa_plugin.tools.serving.requests import PromptRequest

# The checkpoint's tokenizer has bytes and two-letter pieces first, then the special tokens.
_FIRST_SPECIAL_TOKEN = 509


def demo_workload(
    index_topk: int, chunk_tokens: int, seed: int = 0, *, long_answers: bool = False
) -> list[PromptRequest]:
    """The requests for a model that selects `index_topk` tokens, on a server with chunks of `chunk_tokens`.

    Args:
        long_answers: give the shorter prompts long answers. A cache for little more than the longest request is
            too small for them, so the server preempts some.

    Raises:
        ValueError: `index_topk` or `chunk_tokens` is too small for prompts of unique lengths.
    """
    if index_topk < 16:
        raise ValueError(f"index_topk is {index_topk}; the workload needs at least 16")
    if chunk_tokens < index_topk:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; the workload needs at least index_topk, {index_topk}")
    source = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(_FIRST_SPECIAL_TOKEN) for _ in range(count))

    # Two and a bit pages of 128 tokens, the largest page that vLLM uses on a CPU.
    shared = tokens(max(272, index_topk + 16))
    requests: list[PromptRequest] = []

    def add(name: str, prompt: tuple[int, ...], new_tokens: int, purpose: str, **more: Any) -> None:
        requests.append(PromptRequest(name=name, prompt=prompt, new_tokens=new_tokens, purpose=purpose, **more))

    add("below-topk", tokens(index_topk // 3), 12, "every token is attended to, in prefill and in decode")
    add("up-to-topk", tokens(index_topk), 16, "the longest prompt that dense attention may take")
    selected = "decode starts with all tokens and goes on with a selection"
    add("past-topk", tokens(index_topk // 2 + 3), index_topk + 32, selected, control=True)
    add("above-topk", tokens(2 * index_topk + 21), 24, "sparse prefill in one piece", control=True)
    many = tokens(2 * chunk_tokens + index_topk + 25)
    add("many-chunks", many, 16, "a prompt longer than two chunks", control=True)
    add("shared-first", shared + tokens(9), 12, "fills the prefix cache")
    cached: dict[str, Any] = {"after": ("shared-first",), "cached_tokens": 256}
    add("shared-again", shared + tokens(23), 16, "prefill after a cached prefix", control=True, **cached)
    among = "a longer prefill after the same prefix, while others decode"
    add("shared-long", shared + tokens(index_topk + 40), 12, among, **cached)
    _check_unique(requests)
    if long_answers:
        longest_prompt = max(len(request.prompt) for request in requests)
        requests = [
            replace(request, new_tokens=2 * index_topk + 32) if 4 * len(request.prompt) < longest_prompt else request
            for request in requests
        ]
    return requests


def _check_unique(requests: Sequence[PromptRequest]) -> None:
    lengths = [len(request.prompt) for request in requests]
    if len(set(lengths)) != len(lengths):
        raise ValueError(f"two requests have prompts of the same length: {sorted(lengths)}")
    for request in requests:
        if any(request.name in other.name for other in requests if other is not request):
            raise ValueError(f"the name {request.name!r} is part of another")
