"""The check that the indexer's keys came with transferred KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.vllm.startup import arrival
from nsa_plugin.backends.vllm.startup.activation import transfer_notes
from nsa_plugin.backends.vllm.startup.arrival import Arrival, IndexKeysMissingError, arrival_of
from nsa_plugin.kernels.kv_cache import open_cache, reference_write

PAGE, WIDTH = 4, 132
TABLE = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)


class World:
    """A worker's batches, and its indexer's cache of eight pages."""

    def __init__(self, *written: int, cache: torch.Tensor | None = None, ahead: int = 1) -> None:
        self.names: list[str] = []
        self.reads = 0
        self.cache = torch.zeros(8, PAGE, WIDTH, dtype=torch.uint8) if cache is None else cache
        for page in written:
            slots = torch.arange(page * PAGE, (page + 1) * PAGE)
            # A key of zeros has a scale, too.
            reference_write(open_cache(self.cache, "indexer_fp8"), torch.zeros(PAGE, 128), slots)
        self.arrival = Arrival("SomeConnector", lambda: self.cache, ahead)
        self.table = TABLE

    def batch(self, **requests: tuple[int, int]) -> None:
        """Requests as name=(new tokens, context)."""
        self.names = list(requests)
        starts = [0]
        for q_len, _ in requests.values():
            starts.append(starts[-1] + q_len)

        def kv_lens() -> list[int]:
            self.reads += 1
            return [kv_len for _, kv_len in requests.values()]

        self.arrival.batch(lambda: self.names, starts, kv_lens, self.table)


def test_a_prefix_without_keys_is_found_when_the_next_batch_is_prepared() -> None:
    world = World()
    world.batch(a=(1, 9))  # the connector may load during this batch
    with pytest.raises(IndexKeysMissingError, match=r"SomeConnector did not .*8 of the 8 cached tokens of request a"):
        world.batch(a=(1, 10))


def test_each_request_is_looked_up_in_its_own_pages() -> None:
    world = World(1, 2)
    world.batch(a=(1, 9), b=(2, 7))
    with pytest.raises(IndexKeysMissingError, match="5 of the 5 cached tokens of request b"):
        world.batch(a=(1, 10), b=(1, 8))


def test_keys_that_arrived_pass() -> None:
    world = World(1, 2)
    world.batch(a=(1, 9))
    world.batch(a=(1, 10))


def test_a_page_without_keys_is_found_beside_one_that_another_request_left() -> None:
    world = World(1)
    world.batch(a=(1, 9))
    with pytest.raises(IndexKeysMissingError, match="4 of the 8 cached tokens of request a"):
        world.batch(a=(1, 10))


def test_keys_that_arrive_during_the_batch_pass() -> None:
    world = World()
    world.batch(a=(1, 9))
    reference_write(open_cache(world.cache, "indexer_fp8"), torch.randn(8, 128), torch.arange(PAGE, 3 * PAGE))
    world.batch(a=(1, 10))


@pytest.mark.parametrize(
    "later",
    [
        {"a": (8, 8)},  # the transfer failed, and vLLM computes the prefix
        {"b": (5, 5)},  # it failed, and the request ended
        {},
    ],
)
def test_a_failed_transfer_is_left_to_vllm(later: dict[str, tuple[int, int]]) -> None:
    world = World()
    world.batch(a=(1, 9))
    world.batch(**later)


@pytest.mark.parametrize(
    "later",
    [
        {"a": (11, 11)},  # vLLM learned of the failure after it had prepared the batch between, and computes the prefix
        {"b": (5, 5)},  # it ended the request
    ],
)
def test_a_transfer_whose_failure_vllm_learns_of_a_batch_later_is_left_to_it(later: dict[str, tuple[int, int]]) -> None:
    world = World(ahead=2)
    world.batch(a=(1, 9))
    world.batch(a=(1, 10))  # prepared before the first batch's result
    world.batch(**later)


def test_batches_in_turn_hide_no_missing_keys() -> None:
    """With pipeline parallelism a request is in every other batch."""
    world = World(ahead=3)
    world.batch(a=(1, 9))
    world.batch(b=(4, 4))
    world.batch(a=(1, 10))
    world.batch(b=(1, 5))
    with pytest.raises(IndexKeysMissingError, match="8 of the 8 cached tokens of request a"):
        world.batch(a=(1, 11))


def test_a_request_that_is_scheduled_again_is_the_one_from_before() -> None:
    world = World(ahead=2)
    for context in range(9, 20, 2):
        world.batch(a=(9, 9) if context == 9 else (1, context))
        world.batch(b=(4, 4) if context == 9 else (1, context - 5))
    assert not world.arrival._noted


def test_a_request_that_does_not_come_back_is_forgotten() -> None:
    world = World()
    world.batch(a=(1, 9))
    for context in range(4, 20):
        world.batch(b=(4, 4) if context == 4 else (1, context))
    assert not world.arrival._noted


def test_requests_without_a_name_are_not_looked_up() -> None:
    world = World()
    for names in ([], ["", ""]):
        for context in (9, 10):
            world.arrival.batch(lambda names=names: names, [0, 1, 2], lambda context=context: [context] * 2, TABLE)


def test_requests_that_were_computed_here_are_not_looked_up() -> None:
    world = World()
    world.batch(a=(9, 9))
    reads = world.reads
    for context in range(10, 20):
        world.batch(a=(1, context))
    assert world.reads == reads == 1


def test_what_stands_for_no_page_is_no_page() -> None:
    world = World()
    world.batch(a=(1, 9))
    world.table = torch.zeros_like(TABLE)  # a batch that vLLM makes up
    world.batch(a=(1, 10))


def test_only_the_first_requests_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "CHECKS", 1)
    world = World(1, 2)
    world.batch(a=(1, 9))
    world.batch(a=(1, 10), b=(1, 9))
    world.batch(a=(1, 11), b=(1, 10))  # b has no keys


@pytest.mark.parametrize(
    "cache", [torch.zeros(8, PAGE, 72, dtype=torch.uint8), torch.zeros(8, PAGE, WIDTH, dtype=torch.float32)]
)
def test_keys_of_another_format_are_not_judged(cache: torch.Tensor) -> None:
    world = World(cache=cache)
    world.batch(a=(1, 9))
    world.batch(a=(1, 10))


def configured(
    connector: str | None = "SomeConnector",
    ranks: int = 1,
    cache: Any = None,
    architecture: str = "DeepseekV32ForCausalLM",
) -> Any:
    layer = SimpleNamespace(kv_cache=cache)
    named = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=named, hf_text_config=named),
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks),
        compilation_config=SimpleNamespace(static_forward_context={"first": layer}),
    )


def test_nothing_is_looked_up_without_a_connector_or_where_ranks_share_a_cache() -> None:
    fills = configured("DecodeBenchConnector")  # vLLM's benchmark of decode steps
    for config in (configured(None), fills, configured(ranks=2), SimpleNamespace(kv_transfer_config=None), None):
        assert arrival_of(config, ["first"]) is None
    for config in (configured(None), fills, None):
        assert transfer_notes(config) == []
    assert "SomeConnector" in transfer_notes(configured())[0]
    # Only where the plugin looks does it say that it does.
    v4 = configured(architecture="DeepseekV4ForCausalLM")
    for config, looks in ((configured(), True), (configured(ranks=2), False), (v4, False)):
        (note,) = transfer_notes(config)
        assert ("ends the server" in note, "does not look" in note) == (looks, not looks)
    assert arrival_of(configured(), ()) is None


def test_batches_are_prepared_ahead_for_each_stage_of_a_pipeline() -> None:
    config = configured()
    for stages, ahead in ((1, 2), (3, 4)):
        config.parallel_config.pipeline_parallel_size = stages
        found = arrival_of(config, ["first"])
        assert found is not None
        assert found._ahead == ahead


@pytest.mark.parametrize("form", ["tensor", "list", "empty list", "none", "empty"])
def test_the_cache_of_the_first_layer_is_read_once_it_is_there(form: str) -> None:
    tensor = torch.zeros(8, PAGE, WIDTH, dtype=torch.uint8)
    cache = {"tensor": tensor, "list": [tensor], "empty list": [], "none": None, "empty": torch.empty(0)}[form]
    found = arrival_of(configured(cache=cache), ["first", "second"])
    assert found is not None
    assert (found._cache() is tensor) == (form in ("tensor", "list"))
