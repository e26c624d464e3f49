"""The demo's requests take every execution path."""

import pytest

from nsa_plugin.tools.compare.demo.workload import demo_workload

SHAPES = [(16, 16), (16, 300), (32, 64), (64, 256), (128, 128), (256, 512)]


@pytest.mark.parametrize(("index_topk", "chunk"), SHAPES)
@pytest.mark.parametrize("long_answers", [False, True])
def test_the_workload_takes_every_route(index_topk, chunk, long_answers):
    requests = {request.name: request for request in demo_workload(index_topk, chunk, long_answers=long_answers)}
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
    assert demo_workload(64, 256, 1) == demo_workload(64, 256, 1)
    assert [r.prompt for r in demo_workload(64, 256, 1)] != [r.prompt for r in demo_workload(64, 256, 2)]


@pytest.mark.parametrize(
    ("index_topk", "chunk", "message"), [(8, 64, "index_topk is 8"), (64, 32, "chunk_tokens is 32")]
)
def test_too_small_a_shape_is_named(index_topk, chunk, message):
    with pytest.raises(ValueError, match=message):
        demo_workload(index_topk, chunk)


def test_names_and_lengths_tell_the_requests_apart():
    requests = demo_workload(64, 256)
    for request in requests:
        assert [other.name for other in requests if request.name in other.name] == [request.name]
