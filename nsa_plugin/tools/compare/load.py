"""The speed of a server: streamed requests without log probabilities, timed by the client.

The definitions are those of the engines' own benchmarks. Time to first token (`ttft`) is from sending a request to the
first event with a token, including HTTP. Inter-token latency (`itl`) is the time between two events divided by the
tokens of the second. Throughput is tokens divided by the time from the first request sent to the last one answered.
Prompts are random and distinct, have exactly the given length and are the same for every server. The prefix cache is
emptied before each repetition. All requests of a repetition are sent at once: each in its own request; all in one,
which excludes how a server receives them and how it streams; or behind a long one. `runner` repeats them. The first
repetition warms a server up and is not timed, but for the load whose measures ask for it (`FIRST`).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nsa_plugin.tools.serving.client import flush, new_session, within_time
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine

if TYPE_CHECKING:
    import aiohttp

TTFT, PREFILL, DECODE, STEPS, MIXED, TURNS = "ttft", "prefill", "decode", "steps", "mixed", "turns"
SPEED_CASES = (TTFT, PREFILL, DECODE, STEPS, MIXED, TURNS)
FIRST = "first_"
"""Prefix of a measure of the first repetition, which meets whatever a server still has to compile."""

# Default output tokens of each `DECODE` request.
USUAL_OUTPUT = 256
# Repetitions of `DECODE`, fewer for long outputs: 16 × 4096 tokens take half a minute.
_REPEAT_DECODE, _REPEAT_LONG_DECODE, _LONG_DECODE = 21, 3, 1024
# `DECODE` in one request: without a stream per request the server's CPU time for HTTP does not hide the GPU's.
_DECODE_IN_ONE, _REPEAT_DECODE_IN_ONE = 32, 9
# `STEPS`: one request alone, whose steps the host's part is the largest share of.
_STEPS, _REPEAT_STEPS = 512, 21
# `MIXED`: one long prompt and many short ones, each with some output so that prefills meet decodes.
_LONG, _SHORTS, _SHORT, _MIXED_OUTPUT, _REPEAT_MIXED = 60_000, 40, 1000, 32, 9
# `TURNS`: pairs of a long and a short prompt, so that a chunk of 8192 tokens has both kinds.
_TURNS, _TURN_LONG, _TURN_SHORT, _REPEAT_TURNS = 12, 3000, 1000, 21
# A server takes longer to read a body of 60000 numbers than one of 1000: without a head start the long prompt would
# arrive last. Its prefill takes much longer than this.
_HEAD_START_S = 0.1
# Repetitions of a single request, by its prompt's largest number of tokens.
_REPEAT = ((4000, 21), (10_000, 15), (64_000, 9))
_LONGEST_REPEAT = 5
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class SpeedLoad:
    """Requests that are sent together, repeatedly.

    Attributes:
        name: unique.
        case: see `SPEED_CASES`.
        requests: sent at once.
        prompt: tokens of each prompt.
        new_tokens: tokens to generate for each.
        repeat: timed repetitions, after one that is not timed. An H200 takes 20 ms for one of the shortest, and a
            second for one of the longest.
        in_one: all prompts are in one request, whose answer is not streamed and has log probabilities.
        long: tokens of one more prompt, sent early enough to be scheduled first; 0: none.
        turns: the lengths that the prompts have in turn, whose mean `prompt` is; (): all have the same.
    """

    name: str
    case: str
    requests: int
    prompt: int
    new_tokens: int
    repeat: int
    in_one: bool = False
    long: int = 0
    turns: tuple[int, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, in order, without the long one."""
        return [(self.turns or (self.prompt,))[place % max(1, len(self.turns))] for place in range(self.requests)]

    @property
    def measures(self) -> tuple[str, ...]:
        """Measures of this load: "ttft_ms", "itl_ms", "input_tokens_per_s", "output_tokens_per_s".

        "long_ttft_ms" is of the long prompt, which is in no other measure. A name that begins with `FIRST` is of the
        first repetition.
        """
        if self.in_one and self.case == DECODE:
            return ("output_tokens_per_s", f"{FIRST}output_tokens_per_s")
        if self.in_one:
            return ("input_tokens_per_s",)
        return {
            TTFT: ("ttft_ms",),
            PREFILL: ("ttft_ms", "input_tokens_per_s"),
            DECODE: ("itl_ms", "output_tokens_per_s"),
            STEPS: ("itl_ms",),
            MIXED: ("ttft_ms", "long_ttft_ms"),
        }[self.case]


def loads(
    context: int,
    cases: Sequence[str] = SPEED_CASES,
    prompts: Sequence[int] = (),
    output_tokens: int | None = None,
) -> list[SpeedLoad]:
    """The loads of `cases`.

    They are: one request of each of three lengths; 100 prompts of 2000 tokens with one token out, each in its own
    request and all in one; 16 prompts of 4096 with 256 out, and 32 in one request; one of 4096 with 512 out; 40 of 1000
    behind one of 60000; and 12 of 3000 and 12 of 1000 in turn, all in one. No prompt is longer than `context`: the load
    behind one of 60000 is left out if the context is too short (`left_out`), the others become shorter.

    Args:
        prompts: lengths in tokens of the single requests, if given.
        output_tokens: tokens to generate for each of the 16, if given; there are no 32 then.
    """
    found = []
    if TTFT in cases:
        for prompt in sorted({min(length, context) for length in prompts or (2000, 8192, context)}):
            # Longer prompts vary less and take longer: 128K tokens take seconds.
            repeat = next((times for most, times in _REPEAT if prompt <= most), _LONGEST_REPEAT)
            found.append(SpeedLoad(f"ttft-{prompt}", TTFT, 1, prompt, 1, repeat))
    if PREFILL in cases:
        prompt = min(2000, context)
        found.append(SpeedLoad(f"prefill-100x{prompt}", PREFILL, 100, prompt, 1, 21))
        found.append(SpeedLoad(f"prefill-100x{prompt}-in-one", PREFILL, 100, prompt, 1, 21, in_one=True))
    if DECODE in cases:
        prompt, new_tokens = decode_prompt(context), output_tokens or min(USUAL_OUTPUT, context)
        name = f"decode-16x{prompt}" + (f"-{output_tokens}-out" if output_tokens else "")
        repeat = _REPEAT_DECODE if new_tokens <= _LONG_DECODE else _REPEAT_LONG_DECODE
        if not output_tokens:
            in_one = f"decode-{_DECODE_IN_ONE}x{prompt}-in-one"
            load = SpeedLoad(in_one, DECODE, _DECODE_IN_ONE, prompt, new_tokens, _REPEAT_DECODE_IN_ONE, in_one=True)
            # Before all others, so that its first pass is the first that servers of a run without answers get.
            found.insert(0, load)
        found.append(SpeedLoad(name, DECODE, 16, prompt, new_tokens, repeat))
    if STEPS in cases:
        prompt, new_tokens = decode_prompt(context), min(_STEPS, context)
        found.append(SpeedLoad(f"steps-{prompt}-{new_tokens}-out", STEPS, 1, prompt, new_tokens, _REPEAT_STEPS))
    if MIXED in cases and context >= _LONG:
        found.append(SpeedLoad(_mixed_name(), MIXED, _SHORTS, _SHORT, _MIXED_OUTPUT, _REPEAT_MIXED, long=_LONG))
    if TURNS in cases:
        turns = min(_TURN_LONG, context), min(_TURN_SHORT, context)
        name = f"turns-{_TURNS}x{turns[0]}-{turns[1]}"
        load = SpeedLoad(name, TURNS, 2 * _TURNS, sum(turns) // 2, 1, _REPEAT_TURNS, in_one=True, turns=turns)
        found.append(load)
    return found


def decode_prompt(context: int) -> int:
    """Tokens of each `DECODE` prompt."""
    return min(4096, context)


def _mixed_name() -> str:
    return f"mixed-{_LONG}-{_SHORTS}x{_SHORT}"


def left_out(context: int, cases: Sequence[str]) -> dict[str, str]:
    """Loads of `cases` for which `context` is too short, and why."""
    if MIXED not in cases or context >= _LONG:
        return {}
    return {_mixed_name(): f"it has a prompt of {_LONG} tokens; --context allows {context}"}


@dataclass
class _Timed:
    """Arrival times of one streamed request's tokens, in seconds after it was sent."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    last: float = 0.0

    def event(self, tokens: int, now: float) -> None:
        if tokens <= self.tokens:
            return
        if not self.tokens:
            self.first = now
        else:
            new = tokens - self.tokens
            self.gaps += [(now - self.last) / new] * new
        self.tokens, self.last = tokens, now


def measure(
    engine: ServedEngine, url: str, load: SpeedLoad, repetition: int, vocab_size: int, timeout: float
) -> dict[str, float]:
    """Run one repetition of a load. Returns its measures (`SpeedLoad.measures`, without `FIRST`); a distribution is
    given by its median.

    Args:
        repetition: its number; the prompts follow from it and from the load's name.
        vocab_size: prompts use any of these tokens except the first ten.
        timeout: seconds for the whole repetition.

    Raises:
        CompareError: a request failed, or the time was not enough.
    """
    source = random.Random(f"{load.name}/{repetition}")
    lengths = [*([load.long] if load.long else []), *load.lengths]
    prompts = [[source.randrange(10, vocab_size) for _ in range(length)] for length in lengths]
    if load.in_one:
        bodies = [json.dumps(engine.body(prompts, load.new_tokens, top=1))]
    else:
        bodies = [json.dumps(engine.body([prompt], load.new_tokens, stream=True)) for prompt in prompts]

    async def once() -> dict[str, float]:
        async with new_session() as session:
            await flush(session, engine, url)
            started = time.perf_counter()
            if load.in_one:
                async with _post(session, engine, url, bodies[0]) as response:
                    text = await response.text()
                seconds = time.perf_counter() - started
                _check_answers(engine, load, text)
                return _throughputs(load, seconds)
            starts = [0.0, *[_HEAD_START_S] * load.requests] if load.long else [0.0] * load.requests
            pairs = zip(bodies, starts, strict=True)
            timed = await asyncio.gather(*(_stream(session, engine, url, body, after) for body, after in pairs))
            return _readings(load, timed, time.perf_counter() - started)

    found: dict[str, float] = asyncio.run(within_time(timeout, load.name, once()))
    return {name: found[name] for name in load.measures if name in found}


@asynccontextmanager
async def _post(
    session: aiohttp.ClientSession, engine: ServedEngine, url: str, body: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response to a request.

    Raises:
        CompareError: the server refused it.
    """
    async with session.post(f"{url}{engine.generate_path}", data=body, headers=_HEADERS) as response:
        if response.status != 200:
            raise CompareError(f"the server answered {response.status}: {(await response.text())[:300]}")
        yield response


def _check_answers(engine: ServedEngine, load: SpeedLoad, text: str) -> None:
    answers = engine.answers(json.loads(text))
    if len(answers) != load.requests:
        raise CompareError(f"{load.name}: {len(answers)} answers to {load.requests} prompts")
    for answer in answers:
        _check_length(load, len(answer.token_ids))


async def _stream(session: aiohttp.ClientSession, engine: ServedEngine, url: str, body: str, after: float) -> _Timed:
    """Send a request after `after` seconds, and record when its tokens arrive."""
    timed = _Timed()
    if after:
        await asyncio.sleep(after)
    started = time.perf_counter()
    async with _post(session, engine, url, body) as response:
        async for line in response.content:
            event = line.strip().removeprefix(b"data: ")
            if event and event != b"[DONE]":
                now = time.perf_counter() - started
                timed.event(engine.streamed(json.loads(event)), now)
    return timed


def _readings(load: SpeedLoad, timed: Sequence[_Timed], seconds: float) -> dict[str, float]:
    for one in timed:
        _check_length(load, one.tokens)
    long = 0.0
    if load.long:
        long, timed = timed[0].first, timed[1:]
    gaps = [gap for one in timed for gap in one.gaps]
    return {
        "ttft_ms": statistics.median(one.first for one in timed) * 1e3,
        "itl_ms": statistics.median(gaps) * 1e3 if gaps else 0.0,
        "long_ttft_ms": long * 1e3,
        **_throughputs(load, seconds),
    }


def _throughputs(load: SpeedLoad, seconds: float) -> dict[str, float]:
    tokens = {"input_tokens_per_s": sum(load.lengths), "output_tokens_per_s": load.requests * load.new_tokens}
    return {name: count / seconds for name, count in tokens.items()}


def _check_length(load: SpeedLoad, tokens: int) -> None:
    if tokens != load.new_tokens:
        raise CompareError(f"{load.name}: {tokens} tokens instead of {load.new_tokens}")
