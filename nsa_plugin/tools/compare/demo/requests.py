"""The demo's workload, and the client that sends it.

The requests are chosen so that one run takes every route: prompts below and above `index_topk`, answers that
grow past it, a prompt of several chunks, prefixes that the cache holds, and batches that mix prefill and decode.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nsa_plugin.errors import NsaPluginError

if TYPE_CHECKING:
    import aiohttp

NUM_LOGPROBS = 5
# Bytes and two-letter pieces of the checkpoint's tokenizer; the special tokens come after them.
_FIRST_SPECIAL_TOKEN = 509


class RequestError(NsaPluginError):
    """The server refused a request or broke the connection."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of the workload.

    Attributes:
        name: unique, and part of no other name: it is found again in the server's own request ids.
        prompt: token ids; no two requests have prompts of the same length.
        max_tokens: tokens to generate; the end-of-sequence token does not end the answer earlier.
        purpose: what the request is there for.
        after: names of requests that must have been answered before this one is sent.
        cached_tokens: at least so many of the prompt's tokens must come from the prefix cache.
        control: sent again to the server that attends to wrong tokens.
    """

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    purpose: str
    after: tuple[str, ...] = ()
    cached_tokens: int = 0
    control: bool = False

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server answered.

    Attributes:
        token_ids: generated tokens.
        logprobs: of each generated token, natural logarithm.
        top_logprobs: for each generated token, the most probable token ids with their log probabilities.
        cached_tokens: prompt tokens that the server took from its prefix cache.
        seconds: from sending to the whole answer.
    """

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, float], ...]
    cached_tokens: int
    seconds: float


def workload(index_topk: int, chunk_tokens: int, seed: int = 0, *, long_answers: bool = False) -> list[Request]:
    """The requests for a model that selects `index_topk` tokens, on a server with chunks of `chunk_tokens`.

    Args:
        long_answers: the shorter prompts get answers that outgrow a cache which holds little more than the
            longest request, so that some are preempted.

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
    requests = [
        Request(
            name="below-topk",
            prompt=tokens(index_topk // 3),
            max_tokens=12,
            purpose="every token is attended, in prefill and in decode",
        ),
        Request(
            name="up-to-topk",
            prompt=tokens(index_topk),
            max_tokens=16,
            purpose="the longest prompt that dense attention may take",
        ),
        Request(
            name="past-topk",
            prompt=tokens(index_topk // 2 + 3),
            max_tokens=index_topk + 32,
            purpose="decode starts with all tokens and goes on with a selection",
            control=True,
        ),
        Request(
            name="above-topk",
            prompt=tokens(2 * index_topk + 21),
            max_tokens=24,
            purpose="sparse prefill in one piece",
            control=True,
        ),
        Request(
            name="many-chunks",
            prompt=tokens(2 * chunk_tokens + index_topk + 25),
            max_tokens=16,
            purpose="a prompt longer than two chunks",
            control=True,
        ),
        Request(
            name="shared-first",
            prompt=shared + tokens(9),
            max_tokens=12,
            purpose="fills the prefix cache",
        ),
        Request(
            name="shared-again",
            prompt=shared + tokens(23),
            max_tokens=16,
            purpose="prefill after a cached prefix",
            after=("shared-first",),
            cached_tokens=256,
            control=True,
        ),
        Request(
            name="shared-long",
            prompt=shared + tokens(index_topk + 40),
            max_tokens=12,
            purpose="a longer prefill after the same prefix, while others decode",
            after=("shared-first",),
            cached_tokens=256,
        ),
    ]
    _check_unique(requests)
    if long_answers:
        longest_prompt = max(len(request.prompt) for request in requests)
        requests = [
            replace(request, max_tokens=2 * index_topk + 32) if 4 * len(request.prompt) < longest_prompt else request
            for request in requests
        ]
    return requests


def _check_unique(requests: Sequence[Request]) -> None:
    lengths = [len(request.prompt) for request in requests]
    if len(set(lengths)) != len(lengths):
        raise ValueError(f"two requests have prompts of the same length: {sorted(lengths)}")
    for request in requests:
        if any(request.name in other.name for other in requests if other is not request):
            raise ValueError(f"the name {request.name!r} is part of another")


def send(
    url: str,
    model: str,
    requests: Sequence[Request],
    timeout: float,
    on_answer: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Send all requests at once, those with `after` as soon as these are answered.

    Args:
        url: of the server, without the path.
        model: name that the server gives the model.
        timeout: seconds for all of it.
        on_answer: called after each answer.

    Returns:
        The answers in the order of `requests`.

    Raises:
        RequestError: a request failed; names it.
    """
    return asyncio.run(_send_all(url, model, requests, timeout, on_answer or (lambda answer: None)))


async def _send_all(
    url: str, model: str, requests: Sequence[Request], timeout: float, on_answer: Callable[[Answer], None]
) -> list[Answer]:
    import aiohttp

    answered = {request.name: asyncio.Event() for request in requests}

    async def one(session: aiohttp.ClientSession, request: Request) -> Answer:
        for name in request.after:
            if name in answered:
                await answered[name].wait()
        answer = await _post(session, url, model, request)
        answered[request.name].set()
        on_answer(answer)
        return answer

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        tasks = [asyncio.create_task(one(session, request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # One that failed would leave the others waiting for it.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _post(session: aiohttp.ClientSession, url: str, model: str, request: Request) -> Answer:
    import aiohttp

    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": NUM_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    started = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": request.name}) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise RequestError(f"request {request.name}: the server answered {response.status}: {text}")
            data = await response.json()
    except TimeoutError:
        raise RequestError(f"request {request.name}: no answer after {time.monotonic() - started:.0f} s") from None
    except aiohttp.ClientError as error:
        raise RequestError(f"request {request.name}: {type(error).__name__}: {error}") from error
    return read_answer(request, data, time.monotonic() - started)


def read_answer(request: Request, data: dict[str, Any], seconds: float) -> Answer:
    """An answer from the JSON of /v1/completions.

    Raises:
        RequestError: a field is missing or of the wrong kind.
    """
    try:
        choice = data["choices"][0]
        logprobs = choice["logprobs"]
        details = data["usage"].get("prompt_tokens_details") or {}
        return Answer(
            request=request,
            token_ids=tuple(int(token) for token in choice["token_ids"]),
            logprobs=tuple(float(value) for value in logprobs["token_logprobs"]),
            top_logprobs=tuple(
                {int(token.removeprefix("token_id:")): float(value) for token, value in top.items()}
                for top in logprobs["top_logprobs"]
            ),
            cached_tokens=int(details.get("cached_tokens") or 0),
            seconds=seconds,
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"request {request.name}: the answer is not as expected ({type(error).__name__}: {error})"
        ) from error
