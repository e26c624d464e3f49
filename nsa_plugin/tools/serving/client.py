"""Sends the workload's requests to a server, all with log probabilities."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsa_plugin.tools.compare.measured import Answer
from nsa_plugin.tools.compare.workload import TOP, Group, Request
from nsa_plugin.tools.serving.engine import CompareError, Engine

if TYPE_CHECKING:
    import aiohttp

_FLUSH_TRIES, _FLUSH_WAIT_S = 20, 0.25


def send(engine: Engine, url: str, group: Group, timeout: float) -> dict[str, Answer]:
    """The answers of a group, by request, the prefix cache emptied before. What is refused has its `error` set.

    Args:
        url: of the server, without the path.
        timeout: seconds for all of it.

    Raises:
        CompareError: the server is not there, does not answer in time, or answers in another form.
    """
    return asyncio.run(within_time(timeout, f"group {group.name}", _send(engine, url, group)))


def settle(engine: Engine, url: str, timeout: float) -> None:
    """Wait until a server empties its prefix cache, which it refuses while it has work.

    Raises:
        CompareError: it keeps refusing, is not there, or does not answer in time.
    """

    async def flushed() -> None:
        async with new_session() as session:
            await flush(session, engine, url)

    asyncio.run(within_time(timeout, engine.flush_path, flushed()))


async def within_time(timeout: float, what: str, work: Any) -> Any:
    import aiohttp

    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError:
        raise CompareError(f"{what}: no answer after {timeout:.0f} s") from None
    except aiohttp.ClientError as error:
        raise CompareError(f"{what}: {type(error).__name__}: {error}") from error


async def _send(engine: Engine, url: str, group: Group) -> dict[str, Answer]:
    async with new_session() as session:
        await flush(session, engine, url)
        if group.how == "one batch":
            answers = await _post(session, engine, url, group.requests)
        elif group.how == "at once":
            answered = await asyncio.gather(*(_post(session, engine, url, [one]) for one in group.requests))
            answers = [answer for one in answered for answer in one]
        else:
            answers = []
            for request in group.requests:
                if group.how == "one by one, uncached":
                    await flush(session, engine, url)
                answers += await _post(session, engine, url, [request])
    return {request.name: answer for request, answer in zip(group.requests, answers, strict=True)}


def new_session() -> aiohttp.ClientSession:
    """A session with no limits of its own: neither on time, which the caller sets, nor on connections."""
    import aiohttp

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
    )


async def flush(session: aiohttp.ClientSession, engine: Engine, url: str) -> None:
    """Empty the prefix cache. A server that still tidies up after a request refuses at first.

    Raises:
        CompareError: it keeps refusing.
    """
    for _ in range(_FLUSH_TRIES):
        async with session.post(f"{url}{engine.flush_path}") as response:
            if response.status == 200:
                return
            text = await response.text()
        await asyncio.sleep(_FLUSH_WAIT_S)
    raise CompareError(f"the server does not empty its prefix cache ({response.status}): {text[:200]}")


async def _post(
    session: aiohttp.ClientSession, engine: Engine, url: str, requests: Sequence[Request]
) -> Sequence[Answer]:
    """The answers to the requests of one HTTP request, which ask for the same of every prompt."""
    body = engine.body(
        [request.prompt for request in requests],
        requests[0].new_tokens,
        top=TOP,
        prompt_logprobs=requests[0].prompt_logprobs,
    )
    async with session.post(f"{url}{engine.generate_path}", json=body) as response:
        if response.status != 200:
            error = f"the server answered {response.status}: {(await response.text())[:300]}"
            return [Answer(error=error) for _ in requests]
        answers = engine.answers(json.loads(await response.read()))
    if len(answers) != len(requests):
        raise CompareError(f"{len(answers)} answers to {len(requests)} prompts")
    return answers
