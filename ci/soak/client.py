"""Send one request of a soak as its kind demands, and say how it ended."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ci.soak.measured import End, Kind, Repeat, Sent
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.requests import TOP, Answer, PromptRequest

if TYPE_CHECKING:
    import aiohttp

_HEADERS = {"Content-Type": "application/json"}
_SLOW_READ_S = 0.1
_STREAMED = (Kind.STREAM, Kind.SLOW, Kind.DISCONNECT)


def new_session() -> aiohttp.ClientSession:
    """A session with a new connection for each request.

    A server closes a connection that is idle for some seconds, and a request sent at that moment is lost through no
    fault of the server (RFC 9112, section 9.3.1).
    """
    import aiohttp

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    )


class _ClientLeft(Exception):
    """The client has what it wanted."""


@dataclass
class Client:
    """Sends requests to a server.

    Attributes:
        clock: seconds since the start of the load.
        timeout: seconds after which a request counts as hung.
        idle: the probes' answers on the idle server, by name.
        repeats: filled with each probe's comparison.
    """

    engine: ServedEngine
    url: str
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    timeout: float
    idle: dict[str, Answer] = field(default_factory=dict)
    repeats: list[Repeat] = field(default_factory=list)

    async def send(self, kind: Kind, request: PromptRequest, leave_after: float = 0.0) -> Sent:
        """Send a well-formed request.

        Args:
            leave_after: events after which a `DISCONNECT` leaves, or seconds after which a `CANCEL` does.
        """
        body = self.engine.body(
            [request.prompt],
            request.new_tokens,
            top=TOP if kind is Kind.PROBE else 0,
            stream=kind in _STREAMED,
        )
        return await self.post(kind, json.dumps(body).encode(), request, leave_after)

    async def post(
        self, kind: Kind, body: bytes, request: PromptRequest | None = None, leave_after: float = 0.0, what: str = ""
    ) -> Sent:
        """Send a body; without a `request` it is one to be refused, and `what` describes it."""
        call = _Call(self, kind, request, leave_after, detail=what)
        at = self.clock()
        limit = leave_after if kind is Kind.CANCEL else self.timeout
        try:
            async with asyncio.timeout(limit):
                end = await call.run(body)
        except TimeoutError:
            end = End.LEFT if kind is Kind.CANCEL else End.HUNG
        except Exception as error:  # whatever breaks the connection is a figure of the soak, not its end
            end = End.LOST
            call.detail = f"{call.detail} {type(error).__name__}: {error}".strip()[:200]
        return Sent(
            kind=kind,
            end=end,
            at=round(at, 3),
            seconds=round(self.clock() - at, 3),
            first_token=round(call.first_token, 3),
            status=call.status,
            detail=call.detail,
        )


@dataclass
class _Call:
    client: Client
    kind: Kind
    request: PromptRequest | None
    leave_after: float
    status: int = 0
    first_token: float = 0.0
    detail: str = ""

    async def run(self, body: bytes) -> End:
        client = self.client
        url = f"{client.url}{client.engine.generate_path}"
        try:
            async with client.session.post(url, data=body, headers=_HEADERS) as response:
                self.status = response.status
                if response.status != 200:
                    text = await response.text()
                    if self.request is not None:
                        self.detail = text[:200]
                    return End.REFUSED if 400 <= response.status < 500 else End.ERROR
                if self.request is None:
                    await response.read()
                    return End.ANSWERED
                generated = await (self._stream(response) if self.kind in _STREAMED else self._whole(response))
        except _ClientLeft:
            return End.LEFT
        except CompareError as error:
            self.detail = str(error)[:200]
            return End.ERROR
        if generated == self.request.new_tokens:
            return End.ANSWERED
        self.detail = f"{generated} tokens instead of {self.request.new_tokens}"
        return End.SHORT

    async def _whole(self, response: aiohttp.ClientResponse) -> int:
        data: Any = json.loads(await response.read())
        engine = self.client.engine
        if self.kind is not Kind.PROBE:
            # SGLang answers with a list, one element a prompt.
            return sum(engine.streamed(one) for one in (data if isinstance(data, list) else [data]))
        assert self.request is not None
        (answer,) = engine.answers(data)
        if answer.error:
            raise CompareError(answer.error)
        self.client.repeats.append(compared(self.request.name, self.client.idle[self.request.name], answer))
        return len(answer.token_ids)

    async def _stream(self, response: aiohttp.ClientResponse) -> int:
        started = time.monotonic()
        generated = events = 0
        async for line in response.content:
            event = line.strip().removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            generated = max(generated, self.client.engine.streamed(json.loads(event)))
            if generated and not self.first_token:
                self.first_token = time.monotonic() - started
            events += 1
            if self.kind is Kind.DISCONNECT and events >= self.leave_after:
                raise _ClientLeft
            if self.kind is Kind.SLOW:
                await asyncio.sleep(_SLOW_READ_S)
        return generated


def compared(name: str, idle: Answer, again: Answer, *, after: bool = False) -> Repeat:
    """Compare a probe's answer with its answer on the idle server, up to the first token that differs."""
    pairs = zip(idle.token_ids, again.token_ids, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(again.token_ids))
    gap = 0.0
    if same < len(again.token_ids):
        gap = idle.logprobs[same] - idle.top[same].get(again.token_ids[same], float("-inf"))
    errors = [abs(one - other) for one, other in zip(idle.logprobs[:same], again.logprobs[:same], strict=True)]
    if any(map(math.isnan, errors)):  # max would pass over it
        errors = [math.inf]
    return Repeat(
        name=name,
        tokens=len(again.token_ids),
        same=same,
        gap=gap,
        logprob_error=max(errors, default=0.0),
        after=after,
    )
