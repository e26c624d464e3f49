"""A control of the soak: a server that answers wrongly under load alone fails, whatever the wrong answers look like."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from soak_case import by_rule, failed, good

from ci.soak.client import Client, new_session
from ci.soak.engines import SETUPS
from ci.soak.judge import RULES
from ci.soak.measured import Kind, Repeat
from nsa_plugin.tools.serving.requests import TOP, Answer, PromptRequest

web = pytest.importorskip("aiohttp.web")

PROBES = [PromptRequest(name=f"probe {place}", prompt=(place, 7, 9), new_tokens=24) for place in range(8)]
TIMES = 3
VOCABULARY = 64

Attend = Callable[[Sequence[int]], list[float]]
"""Logits of the next token, of the tokens in the cache."""


def right(context: Sequence[int]) -> list[float]:
    source = random.Random(str(context))
    return [source.gauss(0, 3) for _ in range(VOCABULARY)]


def wrong_key(context: Sequence[int]) -> list[float]:
    """Attend one key of another request's."""
    return right((*context[:1], 63, *context[2:]))


def wrong_scale(context: Sequence[int]) -> list[float]:
    """Flatten the distribution; the likeliest token stays the likeliest."""
    return [logit / 4 for logit in right(context)]


def rounded(context: Sequence[int]) -> list[float]:
    """Differ as another order of additions does."""
    source = random.Random(f"order {context}")
    return [logit + source.uniform(-1e-4, 1e-4) for logit in right(context)]


def answered(prompt: Sequence[int], new_tokens: int, attend: Attend) -> dict[str, Any]:
    """A greedy answer of vLLM's server."""
    context, tokens, chosen, tops = list(prompt), [], [], []
    for _ in range(new_tokens):
        logits = attend(tuple(context))
        total = math.log(sum(map(math.exp, logits)))
        likeliest = sorted(range(VOCABULARY), key=logits.__getitem__, reverse=True)[:TOP]
        tokens.append(f"token_id:{likeliest[0]}")
        chosen.append(logits[likeliest[0]] - total)
        tops.append({f"token_id:{token}": logits[token] - total for token in likeliest})
        context.append(likeliest[0])
    choice = {
        "index": 0,
        "finish_reason": "length",
        "logprobs": {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops},
    }
    return {"choices": [choice], "usage": {"completion_tokens": new_tokens}}


def under_load(attend: Attend, wrong_each: int) -> list[Repeat]:
    """Ask every probe of a server whose every so many answers come from `attend`; the others are right."""
    from aiohttp.test_utils import TestServer

    engine, asked = SETUPS["vllm"].engine, 0
    idle: dict[str, Answer] = {}
    for probe in PROBES:
        (idle[probe.name],) = engine.answers(answered(probe.prompt, probe.new_tokens, right))

    async def handler(request: Any) -> Any:
        nonlocal asked
        asked += 1
        body = await request.json()
        how = attend if asked % wrong_each == 0 else right
        return web.Response(body=json.dumps(answered(body["prompt"][0], body["max_tokens"], how)).encode())

    async def ask() -> list[Repeat]:
        app = web.Application()
        app.router.add_post(engine.generate_path, handler)
        async with TestServer(app) as server, new_session() as session:
            client = Client(engine, str(server.make_url("")).rstrip("/"), session, lambda: 0.0, 10.0, idle)
            for probe in PROBES * TIMES:
                assert (await client.send(Kind.PROBE, probe)).detail == ""
            return client.repeats

    return asyncio.run(ask())


def checks_failed(repeats: list[Repeat], dtype: str) -> list[str]:
    soak = by_rule(good(), dtype)
    soak.repeats = [one for one in soak.repeats if one.after] + repeats
    return failed(soak)


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("attend", [right, rounded])
def test_right_answers_pass(attend: Attend, dtype: str) -> None:
    repeats = under_load(attend, 1)
    assert len(repeats) == TIMES * len(PROBES)
    assert checks_failed(repeats, dtype) == []


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("attend", [wrong_key, wrong_scale])
@pytest.mark.parametrize("wrong_each", [1, TIMES * len(PROBES)])
def test_wrong_answers_fail(attend: Attend, wrong_each: int, dtype: str) -> None:
    """All of them, or the last one alone."""
    assert checks_failed(under_load(attend, wrong_each), dtype) == ["tokens under load"]


def test_a_wrong_scale_is_noticed_by_its_log_probabilities_alone() -> None:
    repeats = under_load(wrong_scale, 1)
    assert all(one.same == one.tokens for one in repeats)
    assert max(one.logprob_error for one in repeats) > RULES["bfloat16"][0]
