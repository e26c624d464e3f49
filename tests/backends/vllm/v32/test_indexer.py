"""vLLM's indexer with plans: which query tokens it selects for, its memory budget, and steps in pieces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.planner import READ_EVERY
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.startup.arrival import IndexKeysMissingError
from nsa_plugin.backends.vllm.v32.indexer import (
    ATTRIBUTE,
    StepSelection,
    planned_indexer_builder,
    prefill_chunks,
    wrap_indexer,
)
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.kernels.indexer import reference_paged_topk
from tests.backends.fake_vllm.indexer import (
    MIB,
    MIXED,
    PAGE,
    TOPK,
    IndexerMetadata,
    StockIndexerBuilder,
    a_call,
    seen,
    small_budget,
    split_indexer_prefill_chunks,
    stock_indexer,
)
from tests.backends.fake_vllm.v32 import MAX_LEN, World, planner


def chunks_of(deciding: VllmPlanner | None, lengths: list[tuple[int, int]], offset: int) -> Any:
    """Chunks of a batch. vLLM's indexer takes its first `offset` requests for steps."""
    if deciding is not None:
        World(deciding).step(lengths)
    ours = prefill_chunks(split_indexer_prefill_chunks, lambda: deciding)
    rows, contexts = (torch.tensor([length[place] for length in lengths[offset:]]) for place in (0, 1))
    return ours(contexts, rows, 1000, 512 * MIB, request_offset=offset)


@pytest.mark.regression(2, "stock ranges, for the requests that the plan keeps in a chunk")
@pytest.mark.regression(10)
def test_requests_that_attend_densely_are_in_no_chunk():
    """vllm #52512: selection and attention must agree, request by request."""
    chunks = chunks_of(planner(), MIXED, 2)
    assert chunks == [(slice(3, 4), slice(0, 30)), (slice(5, 7), slice(0, 9))]


def test_requests_that_attend_densely_are_in_a_chunk_if_later_draft_steps_read_their_selection():
    """GLM-5's index_share_for_mtp_iteration: otherwise these drafts would attend to nothing."""
    deciding = planner()
    deciding.scores_dense = True
    found = [rows for requests, _ in chunks_of(deciding, MIXED, 2) for rows in range(requests.start, requests.stop)]
    assert found == [place for place, (rows, _) in enumerate(MIXED) if place >= 2 and rows]


@pytest.mark.regression(9)
def test_a_request_without_query_tokens_is_in_no_chunk():
    """vllm #51486: a chunk with keys only would be a launch without query tokens."""
    lengths = [(30, 60), (0, 12), (5, 70)]
    assert chunks_of(planner(), lengths, 0) == [(slice(0, 1), slice(0, 30)), (slice(2, 3), slice(0, 5))]


def test_short_requests_that_vllms_indexer_takes_for_prefills_are_in_one():
    lengths = [(2, 40), (1, 9), (30, 60)]
    assert chunks_of(planner(step_tokens=2), lengths, 1) == [(slice(1, 3), slice(0, 31))]


@pytest.mark.regression(7)
def test_the_budget_of_a_prefills_logits_follows_the_free_memory():
    deciding = planner()
    free = [4 * 60 * 10 * 4]  # a quarter of it is the logits of 10 rows of 60 keys
    deciding.free_memory = lambda: free[-1]
    in_tens = [(slice(0, 1), slice(first, first + 10)) for first in (0, 10, 20)]
    assert chunks_of(deciding, [(30, 60)], 0) == in_tens
    free.append(4 * 60 * 30 * 4)
    found = [chunks_of(deciding, [(30, 60)], 0) for _ in range(READ_EVERY)]
    assert found[:-1] == [in_tens] * (READ_EVERY - 1), "a reading may wait for the driver"
    assert found[-1] == [(slice(0, 1), slice(0, 30))]


def test_other_batches_are_left_to_vllm():
    lengths = [(30, 60), (6, 6)]
    own = split_indexer_prefill_chunks(torch.tensor([60, 6]), torch.tensor([30, 6]), 1000, 512 * MIB)
    assert chunks_of(None, lengths, 0) == own
    ours = prefill_chunks(split_indexer_prefill_chunks, lambda: planner())
    assert ours(torch.tensor([60, 6]), torch.tensor([30, 6]), 1000, 512 * MIB) == own


# ---------------------------------------------------------------------------------------------------
# Steps over the budget


def built(deciding: VllmPlanner, lengths: list[tuple[int, int]], **padding: int) -> tuple[IndexerMetadata, Any]:
    step = World(deciding).step(lengths, **padding)
    builder = planned_indexer_builder(StockIndexerBuilder, lambda: deciding)()
    return builder.build(0, step.common), step


def test_steps_within_the_budget_are_left_to_vllm():
    metadata, _ = built(planner(), [(1, 40), (1, 9)])
    assert (metadata.num_decodes, metadata.decode) == (2, "vLLM's")
    assert not hasattr(metadata, ATTRIBUTE)


@pytest.mark.parametrize("next_n", [1, 2, 4])
def test_steps_over_the_budget_are_removed_from_vllms_metadata(next_n: int):
    lengths = [(next_n, 40), (next_n, 9), (next_n, 20), (next_n, 80), (next_n, 5)]
    metadata, step = built(small_budget(next_n), lengths, padded_rows=next_n, padded_requests=1)
    assert (metadata.num_decodes, metadata.decode) == (0, None)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    assert steps.rows == 6 * next_n
    # A captured batch's lengths and pages are vLLM's buffers themselves.
    assert steps.lengths.data_ptr() == step.common.seq_lens.data_ptr()
    assert steps.page_table.data_ptr() == step.common.block_table_tensor.data_ptr()


def test_steps_that_vllms_indexer_takes_for_prefills_are_left_to_it():
    class Strict(StockIndexerBuilder):
        threshold = 0

    deciding = small_budget(1)
    step = World(deciding).step([(1, 40), (1, 9), (1, 3), (1, 80), (1, 96), (30, 60)])
    metadata = planned_indexer_builder(Strict, lambda: deciding)().build(0, step.common)
    assert metadata.num_prefills == 6
    assert not hasattr(metadata, ATTRIBUTE)


def test_keys_that_a_connector_left_behind_are_found_by_the_batchs_names_and_not_in_draft_steps():
    """The metadata of vLLM's second model runner has the requests' places in the runner's table."""
    deciding = planner()
    step = World(deciding).step([(1, 9)])
    step.common.req_idx = [7]
    deciding.request_ids = lambda common: [f"request {place}" for place in common.req_idx]
    layer = SimpleNamespace(kv_cache=torch.zeros(512, PAGE, 132, dtype=torch.uint8))
    step.common.block_table_tensor = torch.arange(1, 4, dtype=torch.int32)[None]

    class Connected(StockIndexerBuilder):
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector="SomeConnector"),
            compilation_config=SimpleNamespace(static_forward_context={"cache": layer}),
        )
        layer_names = ("cache",)

    builder = planned_indexer_builder(Connected, lambda: deciding)()
    for _ in range(4):
        builder.build(0, step.common, fast_build=True)
    builder.build(0, step.common)
    for _ in range(4):
        builder.build(0, step.common, fast_build=True)
    builder.build(0, step.common)  # vLLM prepares it before the first one's result
    with pytest.raises(IndexKeysMissingError, match="8 of the 8 cached tokens of request request 7"):
        builder.build(0, step.common)


@pytest.mark.regression(8, "one budget wherever a version of vLLM splits prefills")
def test_a_builder_with_a_method_for_chunks():
    class Later(StockIndexerBuilder):
        _split_indexer_prefill_chunks = staticmethod(split_indexer_prefill_chunks)

    deciding = planner()
    World(deciding).step(MIXED)
    builder = planned_indexer_builder(Later, lambda: deciding)()
    rows, contexts = (torch.tensor([length[place] for length in MIXED[2:]]) for place in (0, 1))
    chunks = builder._split_indexer_prefill_chunks(contexts, rows, 1000, 512 * MIB, request_offset=2)
    assert [some for some, _ in chunks] == [slice(3, 4), slice(5, 7)]


@pytest.mark.parametrize("provider", ["triton", "reference"])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 40), (1, 9), (1, 3), (1, 80), (1, 96)],
        [(2, 40), (2, 9), (2, 2), (2, 80)],
        [(4, 40), (4, 9), (4, 4), (4, 70)],
    ],
)
def test_steps_in_pieces_select_as_all_at_once(lengths: list[tuple[int, int]], provider: str):
    next_n = lengths[0][0]
    deciding = small_budget(next_n)
    metadata, step = built(deciding, lengths, padded_rows=next_n, padded_requests=1)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    indexer = replace(steps.plan.indexer, provider=provider, metadata_provider="")
    assert indexer.rows_per_chunk < steps.rows
    setattr(metadata, ATTRIBUTE, replace(steps, plan=replace(steps.plan, indexer=indexer)))
    call = a_call(steps.rows)
    sm = 90 if provider == "triton" else 0
    ours = wrap_indexer(stock_indexer, lambda: {"indexer": metadata}, lambda: Providers("bf16", sm))
    hidden = torch.empty(steps.rows, 1)
    pages = call.cache.data.view(160, PAGE, -1)
    result = ours(hidden, "indexer", pages, call.q, call.weights, TOPK, MAX_LEN, call.buffer)
    assert result is call.buffer
    expected = reference_paged_topk(
        call.q.unflatten(0, (-1, next_n)),
        call.cache,
        call.weights,
        step.common.seq_lens,
        step.common.block_table_tensor,
        TOPK,
    )
    assert [set(row) for row in call.buffer[: steps.rows].tolist()] == [set(row) for row in expected.tolist()]
    assert bool((call.buffer[-3 - next_n : -3] == -1).all())  # padded rows
    assert bool((call.buffer[-3:] == 9).all())


@pytest.mark.regression(7, "decode steps")
def test_steps_have_logits_for_the_plans_number_of_query_tokens():
    metadata, _ = built(small_budget(1), [(1, 40), (1, 9), (1, 3), (1, 80), (1, 96)])
    call, asked = a_call(5), []
    providers = Providers("bf16", 0)
    plan = getattr(metadata, ATTRIBUTE).plan.indexer
    providers._loaded["indexer_topk_paged", plan.provider] = lambda *_, **named: asked.append(named)
    given = (torch.empty(5, 1), "indexer", call.cache.data.view(160, PAGE, -1), call.q, call.weights)
    ours = wrap_indexer(stock_indexer, lambda: {"indexer": metadata}, lambda: providers)
    ours(*given, TOPK, MAX_LEN, call.buffer)
    (named,) = asked
    assert named["rows_per_chunk"] == plan.rows_per_chunk == 4
    assert named["max_len"] == MAX_LEN


@pytest.mark.regression(3, "steps selected in pieces")
def test_steps_of_different_lengths_select_token_by_token():
    class Native(StockIndexerBuilder):
        """A builder that allows steps of different lengths, as vLLM's for next_n over 2 on SM90."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
            return IndexerMetadata(common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens, 0)

    deciding = small_budget(3)
    step = World(deciding).step([(3, 40), (1, 9), (2, 20)])
    metadata = planned_indexer_builder(Native, lambda: deciding)().build(0, step.common)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    assert steps.lengths.tolist() == [38, 39, 40, 9, 19, 20]
    assert torch.equal(steps.page_table, step.table[[0, 0, 0, 1, 2, 2]])


@pytest.mark.regression(10)
def test_the_name_of_the_attentions_metadata_is_withheld():
    """From 0.28 on vLLM's function skips every prefill of a batch in which any attends densely."""
    seen.clear()
    prefix = SimpleNamespace(value="indexer")  # vLLM's LayerName
    call = a_call(2)
    arguments = (torch.empty(2, 1), prefix, call.cache.data, call.q, call.weights, TOPK, MAX_LEN, call.buffer, "mla")
    for batch in ({"indexer": IndexerMetadata(0, 0, 1)}, None):
        wrap_indexer(stock_indexer, lambda batch=batch: batch, lambda: Providers("bf16", 0))(*arguments)
    assert seen == ["", "mla"]


@pytest.mark.parametrize(
    ("lengths", "name"),
    [([(8, 8), (6, 9)], "mla"), ([(1, 30), (8, 8)], ""), ([(8, 8), (30, 60)], ""), ([(30, 60)], "")],
    ids=["all dense", "after a step", "before one that selects", "none dense"],
)
def test_vllm_skips_the_indexer_only_if_every_query_token_attends_densely(lengths, name):
    """vLLM then also saves clearing its buffer in every layer; its answer is that of its own dense batches."""
    seen.clear()
    step = World(planner()).step(lengths)
    call = a_call(2)
    batch = {"indexer": IndexerMetadata(0, 0, 1), "mla": step.metadata}
    ours = wrap_indexer(stock_indexer, lambda: batch, lambda: Providers("bf16", 0))
    arguments = (torch.empty(2, 1), "indexer", call.cache.data, call.q, call.weights, TOPK, MAX_LEN, call.buffer)
    for given, named in ((("mla",), {}), ((), {"dense_mha_metadata_layer_name": SimpleNamespace(value="mla")})):
        ours(*arguments, *given, **named)
    assert [getattr(one, "value", one) for one in seen] == [name, name]
