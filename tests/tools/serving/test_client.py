"""The client: groups of requests to a server, in order, at once, and with what may go wrong."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest

from nsa_plugin.tools.serving.client import send
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.requests import PromptRequest, RequestGroup
from nsa_plugin.tools.serving.vllm import VllmCpuEngine

aiohttp_web = pytest.importorskip("aiohttp.web")

ENGINE = VllmCpuEngine()


def completion(token_ids=(5, 6), cached=3):
    return {
        "choices": [
            {
                "index": 0,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in token_ids],
                    "token_logprobs": [-0.5] * len(token_ids),
                    "top_logprobs": [{f"token_id:{token}": -0.5, "token_id:9": -1.5} for token in token_ids],
                },
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
    }


@contextmanager
def serving(handler):
    """An HTTP server in a thread; gives its URL and the list of what was asked: (name, body).

    It empties its prefix cache whenever it is asked to.
    """
    seen, ready, loop = [], threading.Event(), asyncio.new_event_loop()
    address = []

    async def complete(request):
        body = await request.json()
        seen.append((request.headers["X-Request-Id"], body))
        return await handler(request.headers["X-Request-Id"], body)

    async def flushed(request):
        return aiohttp_web.Response()

    async def start():
        app = aiohttp_web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_post("/reset_prefix_cache", flushed)
        runner = aiohttp_web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = aiohttp_web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(site._server.sockets[0].getsockname()[1])
        ready.set()
        return runner

    def work():
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield f"http://127.0.0.1:{address[0]}", seen
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def request(name, after=()):
    return PromptRequest(name=name, prompt=(1, 2, 3, 4), new_tokens=2, after=after)


def group(*requests, how="at once"):
    return RequestGroup(name="g", case="g", how=how, requests=requests, top=5, traced=True)


def test_answers_come_back_in_order_and_complete():
    progress = []

    async def handler(name, body):
        while name == "first" and not progress:  # answer it after the second has come back
            await asyncio.sleep(0.01)
        return aiohttp_web.json_response(completion((1, 2) if name == "first" else (3, 4)))

    with serving(handler) as (url, seen):
        asked = group(request("first"), request("second"))
        answers = send(ENGINE, url, asked, 10, lambda name, answer: progress.append(name))
    assert list(answers) == ["first", "second"]
    assert progress == ["second", "first"], "both were under way at once"
    first = answers["first"]
    assert first.token_ids == (1, 2)
    assert first.logprobs == (-0.5, -0.5)
    assert first.top[0] == {1: -0.5, 9: -1.5}
    assert first.cached_tokens == 3
    assert first.seconds > 0
    body = dict(seen)["first"]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["prompt"]) == (0, True, 2, [[1, 2, 3, 4]])
    assert body["logprobs"] == 5


def test_a_request_waits_for_those_before_it():
    order = []

    async def handler(name, body):
        order.append(f"{name} in")
        await asyncio.sleep(0.05)
        order.append(f"{name} out")
        return aiohttp_web.json_response(completion())

    with serving(handler) as (url, _):
        send(ENGINE, url, group(request("later", after=("origin",)), request("origin")), 10)
    assert order == ["origin in", "origin out", "later in", "later out"]


def test_a_prerequisite_that_is_not_sent_is_not_waited_for():
    async def handler(name, body):
        return aiohttp_web.json_response(completion())

    with serving(handler) as (url, _):
        answers = send(ENGINE, url, group(request("later", after=("origin",))), 10)
    assert answers["later"].token_ids == (5, 6)


def test_a_refused_request_has_an_error_and_the_others_their_answers():
    async def handler(name, body):
        if name == "bad":
            return aiohttp_web.Response(status=400, text="prompt too long")
        return aiohttp_web.json_response(completion())

    with serving(handler) as (url, _):
        answers = send(ENGINE, url, group(request("good"), request("bad"), request("next", after=("bad",))), 10)
    assert answers["bad"].error == "the server answered 400: prompt too long"
    assert [answers[name].error for name in ("good", "next")] == ["", ""]


def test_no_answer_in_time_is_an_error():
    async def handler(name, body):
        await asyncio.sleep(30)

    with serving(handler) as (url, _), pytest.raises(CompareError, match="group g: no answer after"):
        send(ENGINE, url, group(request("slow")), 0.2)


def test_no_server_is_an_error():
    with pytest.raises(CompareError, match="group g: Client"):
        send(ENGINE, "http://127.0.0.1:9", group(request("r")), 5)


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": [{"index": 0, "logprobs": {"tokens": None, "token_logprobs": [], "top_logprobs": []}}]},
        {
            "choices": [
                {
                    "index": 0,
                    "logprobs": {
                        "tokens": ["token_id:1"],
                        "token_logprobs": [-1.0],
                        "top_logprobs": [{"hello": -1.0}],
                    },
                }
            ]
        },
    ],
    ids=["nothing", "no-logprobs", "no-tokens", "text-for-token"],
)
def test_an_unexpected_answer_is_an_error(change):
    async def handler(name, body):
        return aiohttp_web.json_response({**completion(), **change})

    with serving(handler) as (url, _), pytest.raises(CompareError, match=r"not as expected|0 answers to 1 prompts"):
        send(ENGINE, url, group(request("r")), 10)


def test_an_answer_without_cache_details_has_no_cached_tokens():
    data = json.loads(json.dumps(completion()))
    data["usage"] = {"prompt_tokens": 4, "prompt_tokens_details": None}
    (answer,) = ENGINE.answers(data)
    assert answer.cached_tokens == 0
