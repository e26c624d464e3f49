"""Send groups of requests to a server, and score answers that came without log probabilities."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.requests import Answer, PromptRequest, RequestGroup

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_FLUSH_TRIES, _FLUSH_WAIT_S = 20, 0.25


def send(
    engine: ServedEngine,
    url: str,
    group: RequestGroup,
    timeout: float,
    on_answer: Callable[[str, Answer], None] = lambda name, answer: None,
) -> dict[str, Answer]:
    """Empty the prefix cache, send a group and return its answers by request. A refused request has its `error` set.

    Args:
        url: the server's, without a path.
        timeout: seconds for the whole group.
        on_answer: called with each request's name and answer as it arrives.

    Raises:
        CompareError: no server, no answer in time, or an unexpected reply.
    """
    return asyncio.run(within_time(timeout, f"group {group.name}", _send(engine, url, group, on_answer)))


def scored(
    engine: ServedEngine, url: str, group: RequestGroup, answers: Mapping[str, Answer], timeout: float
) -> dict[str, Answer]:
    """Give answers without log probabilities those that the server assigns to their tokens in a prompt.

    Each prompt is sent again with its answer behind it, as one batch. An answer with an error is left as it is.

    Args:
        group: as it was sent, with `top` 0.

    Raises:
        CompareError: see `send`.
    """
    known = {request.name: request for request in group.requests if not answers[request.name].error}
    again = [
        PromptRequest(
            name=name,
            prompt=request.prompt + answers[name].token_ids,
            new_tokens=1,
            prompt_logprobs=len(answers[name].token_ids) + 1,  # the first of them has none
        )
        for name, request in known.items()
    ]
    found = dict(answers)
    if not again:
        return found
    name = f"{group.name}, scored"
    for asked, answer in send(
        engine, url, RequestGroup(name=name, case=group.case, how="one batch", requests=tuple(again)), timeout
    ).items():
        tokens = len(found[asked].token_ids)
        if answer.error or not len(answer.prompt_logprobs) == len(answer.prompt_top) == tokens:
            problem = answer.error or f"{len(answer.prompt_logprobs)} log probabilities for {tokens} tokens"
            found[asked] = replace(found[asked], error=f"not scored: {problem}")
        else:
            found[asked] = replace(found[asked], logprobs=answer.prompt_logprobs, top=answer.prompt_top)
    return found


def settle(engine: ServedEngine, url: str, timeout: float) -> None:
    """Wait until a server empties its prefix cache; a server with work to do refuses.

    Raises:
        CompareError: the server keeps refusing, is not there, or does not answer in time.
    """

    async def flushed() -> None:
        async with new_session() as session:
            await flush(session, engine, url)

    asyncio.run(within_time(timeout, engine.flush_path, flushed()))


async def within_time(timeout: float, what: str, work: Coroutine[Any, Any, T]) -> T:
    import aiohttp

    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError:
        raise CompareError(f"{what}: no answer after {timeout:.0f} s") from None
    except aiohttp.ClientError as error:
        raise CompareError(f"{what}: {type(error).__name__}: {error}") from error


async def _send(
    engine: ServedEngine, url: str, group: RequestGroup, on_answer: Callable[[str, Answer], None]
) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    async with new_session() as session:

        async def post(*requests: PromptRequest) -> None:
            found = await _post(session, engine, url, group, requests)
            for request, answer in zip(requests, found, strict=True):
                answers[request.name] = answer
                on_answer(request.name, answer)

        await flush(session, engine, url)
        if group.how == "one batch":
            await post(*group.requests)
        elif group.how == "at once":
            await _at_once(group, post)
        else:
            for request in group.requests:
                if group.how == "one by one, uncached":
                    await flush(session, engine, url)
                await post(request)
    return {request.name: answers[request.name] for request in group.requests}


async def _at_once(group: RequestGroup, post: Callable[[PromptRequest], Coroutine[Any, Any, None]]) -> None:
    """Send every request at once; a request with `after` waits until those are answered."""
    answered = {request.name: asyncio.Event() for request in group.requests}

    async def one(request: PromptRequest) -> None:
        for name in request.after:
            if name in answered:
                await answered[name].wait()
        await post(request)
        answered[request.name].set()

    await asyncio.gather(*(one(request) for request in group.requests))


def new_session() -> aiohttp.ClientSession:
    """A session without limits: the caller limits the time, and nothing limits the number of connections."""
    import aiohttp

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
    )


async def flush(session: aiohttp.ClientSession, engine: ServedEngine, url: str) -> None:
    """Empty the prefix cache. A server that is still cleaning up after a request refuses at first.

    Raises:
        CompareError: the server keeps refusing.
    """
    for _ in range(_FLUSH_TRIES):
        async with session.post(f"{url}{engine.flush_path}") as response:
            if response.status == 200:
                return
            text = await response.text()
        await asyncio.sleep(_FLUSH_WAIT_S)
    raise CompareError(f"the server does not empty its prefix cache ({response.status}): {text[:200]}")


async def _post(
    session: aiohttp.ClientSession,
    engine: ServedEngine,
    url: str,
    group: RequestGroup,
    requests: Sequence[PromptRequest],
) -> Sequence[Answer]:
    """Answers to the prompts of one HTTP request. All prompts ask for the same number of tokens."""
    body = engine.body(
        [request.prompt for request in requests],
        requests[0].new_tokens,
        top=group.top,
        prompt_logprobs=requests[0].prompt_logprobs,
    )
    headers = {"X-Request-Id": requests[0].name} if group.traced else {}
    started = time.monotonic()
    async with session.post(f"{url}{engine.generate_path}", json=body, headers=headers) as response:
        if response.status != 200:
            error = f"the server answered {response.status}: {(await response.text())[:300]}"
            return [Answer(error=error) for _ in requests]
        answers = engine.answers(json.loads(await response.read()))
    if len(answers) != len(requests):
        raise CompareError(f"{len(answers)} answers to {len(requests)} prompts")
    return [replace(answer, seconds=time.monotonic() - started) for answer in answers]
