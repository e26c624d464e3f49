import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nsa_plugin.tools.compare.demo.requests import Request, RequestError, read_answer, send, workload

aiohttp_web = pytest.importorskip("aiohttp.web")

SHAPES = [(16, 16), (16, 300), (32, 64), (64, 256), (128, 128), (256, 512)]


@pytest.mark.parametrize(("index_topk", "chunk"), SHAPES)
@pytest.mark.parametrize("long_answers", [False, True])
def test_the_workload_takes_every_route(index_topk, chunk, long_answers):
    requests = {request.name: request for request in workload(index_topk, chunk, long_answers=long_answers)}
    lengths = [len(request.prompt) for request in requests.values()]
    assert len(set(lengths)) == len(lengths)
    assert len(requests["below-topk"].prompt) < index_topk
    assert len(requests["up-to-topk"].prompt) == index_topk
    past = requests["past-topk"]
    assert len(past.prompt) < index_topk < past.total_tokens - 32
    assert index_topk < len(requests["above-topk"].prompt)
    assert len(requests["many-chunks"].prompt) > 2 * chunk
    for request in requests.values():
        assert all(0 <= token < 509 for token in request.prompt)
        for name in request.after:
            common = min(request.cached_tokens, len(requests[name].prompt))
            assert common >= 256
            assert request.prompt[:common] == requests[name].prompt[:common]
    assert all(request.total_tokens > index_topk for request in requests.values() if request.control)
    assert any(request.control for request in requests.values())


def test_the_workload_is_seeded():
    assert workload(64, 256, 1) == workload(64, 256, 1)
    assert [r.prompt for r in workload(64, 256, 1)] != [r.prompt for r in workload(64, 256, 2)]


@pytest.mark.parametrize(
    ("index_topk", "chunk", "message"), [(8, 64, "index_topk is 8"), (64, 32, "chunk_tokens is 32")]
)
def test_too_small_a_shape_is_named(index_topk, chunk, message):
    with pytest.raises(ValueError, match=message):
        workload(index_topk, chunk)


def completion(token_ids=(5, 6), cached=3):
    return {
        "choices": [
            {
                "token_ids": list(token_ids),
                "logprobs": {
                    "token_logprobs": [-0.5] * len(token_ids),
                    "top_logprobs": [{f"token_id:{token}": -0.5, "token_id:9": -1.5} for token in token_ids],
                },
            }
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
    }


@contextmanager
def serving(handler):
    """An HTTP server in a thread; gives its URL and the list of what was asked: (name, body)."""
    seen, ready, loop = [], threading.Event(), asyncio.new_event_loop()
    address = []

    async def complete(request):
        body = await request.json()
        seen.append((request.headers["X-Request-Id"], body))
        return await handler(request.headers["X-Request-Id"], body)

    async def start():
        app = aiohttp_web.Application()
        app.router.add_post("/v1/completions", complete)
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
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{address[0]}", seen
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def request(name, after=()):
    return Request(name=name, prompt=(1, 2, 3, 4), max_tokens=2, purpose="", after=after)


def test_answers_come_back_in_order_and_whole():
    progress = []

    async def handler(name, body):
        while name == "first" and not progress:  # it is answered after the second has come back
            await asyncio.sleep(0.01)
        return aiohttp_web.json_response(completion((1, 2) if name == "first" else (3, 4)))

    with serving(handler) as (url, seen):
        answers = send(
            url, "model", [request("first"), request("second")], 10, lambda a: progress.append(a.request.name)
        )
    assert [answer.request.name for answer in answers] == ["first", "second"]
    assert progress == ["second", "first"], "both were under way at once"
    assert answers[0].token_ids == (1, 2)
    assert answers[0].logprobs == (-0.5, -0.5)
    assert answers[0].top_logprobs[0] == {1: -0.5, 9: -1.5}
    assert answers[0].cached_tokens == 3
    body = dict(seen)["first"]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["prompt"]) == (0, True, 2, [1, 2, 3, 4])


def test_a_request_waits_for_those_before_it():
    order = []

    async def handler(name, body):
        order.append(f"{name} in")
        await asyncio.sleep(0.05)
        order.append(f"{name} out")
        return aiohttp_web.json_response(completion())

    with serving(handler) as (url, _):
        send(url, "model", [request("later", after=("origin",)), request("origin")], 10)
    assert order == ["origin in", "origin out", "later in", "later out"]


def test_a_prerequisite_that_is_not_sent_is_not_waited_for():
    async def handler(name, body):
        return aiohttp_web.json_response(completion())

    with serving(handler) as (url, _):
        (answer,) = send(url, "model", [request("later", after=("origin",))], 10)
    assert answer.token_ids == (5, 6)


def test_a_refusal_names_the_request_and_does_not_wait_for_the_rest():
    async def handler(name, body):
        if name == "bad":
            return aiohttp_web.Response(status=400, text="prompt too long")
        await asyncio.sleep(30)

    with (
        serving(handler) as (url, _),
        pytest.raises(RequestError, match="request bad: the server answered 400: prompt too long"),
    ):
        send(url, "model", [request("slow"), request("bad"), request("never", after=("bad",))], 20)


def test_no_answer_in_time_is_an_error():
    async def handler(name, body):
        await asyncio.sleep(30)

    with serving(handler) as (url, _), pytest.raises(RequestError, match="request slow: no answer after"):
        send(url, "model", [request("slow")], 0.2)


def test_no_server_is_an_error():
    with pytest.raises(RequestError, match="request r: Client"):
        send("http://127.0.0.1:9", "model", [request("r")], 5)


@pytest.mark.parametrize(
    "change",
    [
        {"choices": []},
        {"choices": [{"token_ids": [1]}]},
        {"choices": [{"token_ids": None, "logprobs": {"token_logprobs": [], "top_logprobs": []}}]},
        {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [None], "top_logprobs": [{}]}}]},
        {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"hello": -1.0}]}}]},
    ],
    ids=["nothing", "no-logprobs", "no-tokens", "null-logprob", "text-for-token"],
)
def test_an_answer_that_is_not_as_expected_is_an_error(change):
    with pytest.raises(RequestError, match="request r: the answer is not as expected"):
        read_answer(request("r"), {**completion(), **change}, 0.0)


def test_an_answer_without_cache_details_has_no_cached_tokens():
    data = json.loads(json.dumps(completion()))
    data["usage"] = {"prompt_tokens": 4, "prompt_tokens_details": None}
    assert read_answer(replace(request("r"), cached_tokens=1), data, 0.0).cached_tokens == 0
