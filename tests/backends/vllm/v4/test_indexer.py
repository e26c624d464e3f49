"""vLLM's indexer for V4 with plans: steps over the budget select from the compressed keys of each query token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, StepSelection, planned_indexer_builder, wrap_indexer
from nsa_plugin.kernels.indexer import reference_paged_topk
from tests.backends.fake_vllm.indexer import (
    PAGE,
    TOPK,
    IndexerMetadata,
    a_call,
    split_indexer_prefill_chunks,
    stock_indexer,
)
from tests.backends.fake_vllm.v4 import MAX_LEN, planner
from tests.backends.fake_vllm.v4_indexer import MIB, RATIO, Stock, builder_of, common, small_budget


def test_steps_within_the_budget_are_left_to_vllm():
    for deciding in (planner(), None):
        metadata = builder_of(deciding).build(0, common([(1, 40), (1, 9)]))
        assert (metadata.num_decodes, metadata.decode) == (2, "vLLM's")
        assert not hasattr(metadata, ATTRIBUTE)


@pytest.mark.regression(3, "steps selected in pieces")
@pytest.mark.parametrize("provider", ["triton", "reference"])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 400), (1, 90), (1, 3), (1, 800), (1, 96)],
        [(2, 400), (2, 90), (2, 2), (2, 800)],
        [(4, 401), (4, 90), (4, 4), (4, 702)],
    ],
)
@pytest.mark.parametrize("padding", [0, 1])
def test_steps_in_pieces_select_among_visible_keys(lengths: list[tuple[int, int]], provider: str, padding: int):
    each = lengths[0][0]
    batch = common(lengths, padding)
    metadata = builder_of(small_budget(each)).build(0, batch)
    assert (metadata.num_decodes, metadata.decode) == (0, None)
    steps: StepSelection = getattr(metadata, ATTRIBUTE)
    real = sum(rows for rows, _ in lengths)
    assert steps.rows == real + each * padding
    seen = [(context - rows + place + 1) // RATIO for rows, context in lengths for place in range(rows)]
    assert steps.lengths.tolist() == seen + [0] * each * padding

    indexer = replace(steps.plan.indexer, provider=provider, metadata_provider="")
    assert indexer.rows_per_chunk < steps.rows
    setattr(metadata, ATTRIBUTE, replace(steps, plan=replace(steps.plan, indexer=indexer)))
    call = a_call(steps.rows)
    sm = 90 if provider == "triton" else 0
    ours = wrap_indexer(stock_indexer, lambda: {"indexer": metadata}, lambda: Providers("v4_fp8", sm))
    pages = call.cache.data.view(160, PAGE, -1)
    hidden = torch.empty(steps.rows, 1)
    ours(hidden, "indexer", pages, call.q, call.weights, TOPK, MAX_LEN // RATIO, call.buffer)
    owner = [request for request, (rows, _) in enumerate(lengths) for _ in range(rows)]
    expected = reference_paged_topk(
        call.q[:real].unsqueeze(1),
        call.cache,
        call.weights[:real],
        torch.tensor(seen).int(),
        batch.block_table_tensor[owner],
        TOPK,
    )
    assert [set(row) for row in call.buffer[:real].tolist()] == [set(row) for row in expected.tolist()]
    assert bool((call.buffer[real : steps.rows] == -1).all())
    assert bool((call.buffer[steps.rows :] == 9).all())


@pytest.mark.regression(13, "DeepSeek-V4")
def test_captured_lengths_and_pages_keep_their_addresses():
    builder = builder_of(small_budget())
    first, second = (getattr(builder.build(0, common([(1, context)] * 5)), ATTRIBUTE) for context in (40, 90))
    assert first.lengths.data_ptr() == second.lengths.data_ptr()
    assert first.page_table.data_ptr() == second.page_table.data_ptr()
    assert second.lengths.tolist() == [22] * 5


def test_padding_sees_no_key_after_any_batch():
    builder = builder_of(small_budget())
    builder.build(0, common([(1, 90)] * 6))
    steps = getattr(builder.build(0, common([(1, 40)] * 5, padding=1)), ATTRIBUTE)
    assert steps.lengths.tolist() == [10] * 5 + [0]


def test_a_dummy_batch_with_contexts_shorter_than_its_queries():
    steps = getattr(builder_of(small_budget(3)).build(0, common([(3, 1)] * 2)), ATTRIBUTE)
    assert steps.lengths.tolist() == [0] * 6


@pytest.mark.parametrize(("tokens", "captured", "rows"), [(64, None, 64), (8, None, 24), (8, 40, 40)])
def test_buffers_are_large_enough_for_captured_graphs(tokens: int, captured: int | None, rows: int):
    class Small(Stock):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.vllm_config.scheduler_config.max_num_batched_tokens = tokens
            self.vllm_config.compilation_config.max_cudagraph_capture_size = captured

    builder = builder_of(small_budget(3), Small)
    assert len(builder.nsa_plugin_lengths) == rows


def test_steps_of_different_lengths():
    class Native(Stock):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return IndexerMetadata(common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens, 0)

    metadata = builder_of(small_budget(3), Native).build(0, common([(3, 40), (1, 9), (2, 20)]))
    assert getattr(metadata, ATTRIBUTE).lengths.tolist() == [9, 9, 10, 2, 4, 5]


def test_a_prefill_in_the_same_batch_is_not_changed():
    """The steps' query tokens stay counted: vLLM's layer selects for as many of a batch with short contexts itself."""
    metadata = builder_of(small_budget()).build(0, common([(1, 40)] * 5 + [(30, 300)]))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.prefill) == (0, 1, "vLLM's")
    assert (getattr(metadata, ATTRIBUTE).rows, metadata.num_decode_tokens) == (5, 5)


@pytest.mark.regression(7, "DeepSeek-V4")
@pytest.mark.regression(8, "one budget wherever a version of vLLM splits prefills")
def test_the_logits_of_a_prefill_keep_to_the_free_memory():
    class Later(Stock):
        _split_indexer_prefill_chunks = staticmethod(split_indexer_prefill_chunks)

    deciding = planner()
    deciding.free_memory = lambda: 4 * 4 * 100 * 10  # a quarter of it is the logits of 10 rows of 100 entries
    builder = builder_of(deciding, Later)
    builder.build(0, common([(1, 40), (30, 400)]))
    split = builder._split_indexer_prefill_chunks
    chunks = split(torch.tensor([100]), torch.tensor([30]), 1000, 512 * MIB, request_offset=1)
    assert chunks == [(slice(1, 2), slice(first, first + 10)) for first in (0, 10, 20)]


def test_a_planned_builder_is_not_planned_twice():
    there = planned_indexer_builder(Stock, lambda: None)
    assert there.__mro__[1] is Stock
    assert planned_indexer_builder(there, lambda: None) is there
