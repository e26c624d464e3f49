"""The requests of a soak, drawn from a seed: lengths, shared prefixes, kinds, and what is malformed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ci.soak.measured import Kind
from nsa_plugin.tools.serving.engine import ServedEngine
from nsa_plugin.tools.serving.requests import PromptRequest

# Out of 100 requests. Bursts come on their own.
SHARES = {
    Kind.PLAIN: 24,
    Kind.STREAM: 20,
    Kind.SLOW: 5,
    Kind.DISCONNECT: 14,
    Kind.CANCEL: 9,
    Kind.PROBE: 16,
    Kind.MALFORMED: 8,
    Kind.OVERSIZED: 4,
}
_PREFIXES, _WITH_PREFIX = 4, 0.4
# SGLang ends an answer two tokens before the context does.
_SPARE = 2
# Ids of special tokens follow in the checkpoint's vocabulary.
_FIRST, _END = 10, 500


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes.

    Attributes:
        context: longest prompt and answer together, in tokens.
        topk: tokens that sparse attention selects.
        chunk: most tokens of a prefill.
        running: most requests in a batch.
        answer: longest answer of a drawn request, in tokens.
    """

    context: int
    topk: int
    chunk: int
    running: int
    answer: int = 128


class Traffic:
    """Draws requests. The same seed gives the same requests in the same order."""

    def __init__(self, limits: Limits, seed: int):
        self.limits = limits
        self._source = random.Random(seed)
        longest = limits.context // 2
        self._prefixes = [self._tokens(self._source.randint(longest // 4, longest)) for _ in range(_PREFIXES)]
        self.probes = self._probes()

    def kind(self) -> Kind:
        return self._source.choices(list(SHARES), list(SHARES.values()))[0]

    def request(self) -> PromptRequest:
        """A prompt of some length, in two of five cases behind a shared prefix, and an answer that fits."""
        limits, draw = self.limits, self._source.randint
        edges = (1, limits.topk, limits.context // 4, limits.context * 3 // 4)
        band = self._source.choices((0, 1, 2), (30, 45, 25))[0]
        length = draw(edges[band], max(edges[band : band + 2]))
        prefix = self._source.choice(self._prefixes) if self._source.random() < _WITH_PREFIX else ()
        prompt = (*prefix, *self._tokens(length))[: limits.context - limits.answer - _SPARE]
        lowest, highest = self._source.choice(((1, 8), (8, limits.answer // 3), (limits.answer // 3, limits.answer)))
        return PromptRequest(name="drawn", prompt=prompt, new_tokens=draw(lowest, max(lowest, highest)))

    def long_answer(self) -> PromptRequest:
        """A request that is answered for long enough to be interrupted."""
        limits = self.limits
        prompt = self._tokens(limits.topk // 2)
        return PromptRequest(name="interrupted", prompt=prompt, new_tokens=limits.context - len(prompt) - 8)

    def probe(self) -> PromptRequest:
        return self._source.choice(self.probes)

    def number(self, least: int, most: int) -> int:
        return self._source.randint(least, most)

    def seconds(self, most: float) -> float:
        return self._source.random() * most

    def _probes(self) -> list[PromptRequest]:
        """Fixed requests around the edges where the plugin's path changes, two of them with the same prefix."""
        limits = self.limits
        lengths = {
            "short": limits.topk // 3,
            "grows past top-k": limits.topk - 4,
            "top-k": limits.topk,
            "above top-k": 2 * limits.topk + 21,
            "several chunks": min(2 * limits.chunk + 9, limits.context * 3 // 4),
        }
        found = [PromptRequest(name=name, prompt=self._tokens(length)) for name, length in lengths.items()]
        for number in (1, 2):
            prompt = (*self._prefixes[0], *self._tokens(9 + 7 * number))
            found.append(PromptRequest(name=f"prefix {number}", prompt=prompt))
        return found

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._source.randrange(_FIRST, _END) for _ in range(count))


def oversized(engine: ServedEngine, limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Requests beyond the context, without end, as (what, body)."""
    while True:
        yield "prompt beyond the context", _json(engine.body([[7] * (limits.context + 1)], 1))
        yield "prompt that leaves no room for an answer", _json(engine.body([[7] * limits.context], 1))
        yield "prompt of 300,000 tokens", _json(engine.body([[7] * 300_000], 1))


def malformed(engine: ServedEngine) -> Iterator[tuple[str, bytes]]:
    """Requests that the server may not accept, without end, as (what, body)."""
    body = engine.body([[7, 8, 9]], 4)
    # SGLang has a group of sampling parameters, vLLM has them next to the prompt.
    group = "sampling_params" if "sampling_params" in body else ""
    prompt = "input_ids" if group else "prompt"
    length = "max_new_tokens" if group else "max_tokens"

    def with_sampling(**values: Any) -> dict[str, Any]:
        return body | ({group: body[group] | values} if group else values)

    while True:
        yield "not JSON", b'{"prompt": [1, 2'
        yield "not an object", b"[1, 2, 3]"
        yield "no body", b""
        yield "not UTF-8", b'{"prompt": "\xff\xfe"}'
        yield "no prompt", _json({name: value for name, value in body.items() if name != prompt})
        yield "prompt is an object", _json(body | {prompt: {"a": 1}})
        yield "prompt of strings and numbers", _json(body | {prompt: [["a", 1]]})
        if not group:  # SGLang answers it
            yield "empty prompt", _json(body | {prompt: [[]]})
        yield "negative temperature", _json(with_sampling(temperature=-1.0))
        yield "temperature is text", _json(with_sampling(temperature="hot"))
        yield "top_p above 1", _json(with_sampling(top_p=3.0))
        yield "negative length", _json(with_sampling(**{length: -5}))
        yield "length is text", _json(with_sampling(**{length: "many"}))


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()
