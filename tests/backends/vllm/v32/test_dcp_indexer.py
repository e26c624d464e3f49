"""The indexer with ranks that share its keys: decode steps over the budget, against the undivided keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32.dcp import DcpGroup, LogitsOfSelected
from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, StepSelection, planned_indexer_builder, wrap_indexer
from nsa_plugin.kernels.indexer import quantize, reference_paged_topk
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, reference_write
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.topk import reference_topk_rows
from tests.backends.fake_vllm.dcp import Coordinator, Ranks, Shared, shared
from tests.backends.fake_vllm.indexer import DIM, HEADS, PAGE, TOPK, StockIndexerBuilder, stock_indexer
from tests.backends.fake_vllm.v32 import MAX_LEN, TRITON, Step, World, vllm_config

PAGES = 160
SHARES = pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (2, 8), (3, 2)])


def group_of(step_tokens: int, rows: int = 4, **given: Any) -> Shared:
    """Ranks with free memory for the logits of `rows` query tokens at once."""
    device = replace(TRITON, memory_free=4 * 4 * MAX_LEN * rows)
    return shared(device=device, step_tokens=step_tokens, **given)


def builder_of(world: World) -> Any:
    stock = type("Stock", (StockIndexerBuilder,), {"vllm_config": vllm_config(), "device": "cpu"})
    return planned_indexer_builder(stock, lambda: world.planner)()


def keys_of(step: Step, keys: torch.Tensor) -> PagedCache:
    """The indexer's cache of one rank: not a number where it has no token; `keys` [requests, MAX_LEN, DIM]."""
    cache = allocate_cache("indexer_fp8", PAGES, PAGE)
    cache.data.view(torch.uint8).fill_(0xFF)
    for request in range(len(step.lengths)):
        held, slots = step.held(request)
        reference_write(cache, keys[request, held], slots, power_of_two_scales=True)
    return cache


@SHARES
@pytest.mark.parametrize("provider", ["reference", "triton"])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 40), (1, 9), (1, 3), (1, 80), (1, 96), (1, 1)],
        [(2, 40), (2, 9), (2, 2), (2, 80)],
        [(4, 40), (4, 9), (4, 4), (4, 70)],
    ],
)
def test_steps_in_pieces_select_as_over_the_undivided_keys(
    lengths: list[tuple[int, int]], provider: str, ranks: int, interleave: int
):
    next_n = lengths[0][0]
    group = group_of(next_n, ranks=ranks, interleave=interleave)
    keys = torch.randn(len(lengths), MAX_LEN, DIM, generator=torch.Generator().manual_seed(3))
    rows = (len(lengths) + 1) * next_n
    random = torch.Generator().manual_seed(5)
    q, _ = quantize(torch.randn(rows, HEADS, DIM, generator=random))
    weights = torch.rand(rows, HEADS, generator=random)

    def prepared(world: World) -> tuple[Any, PagedCache, Step]:
        step = world.step(lengths, padded_rows=next_n, padded_requests=1)
        builder = builder_of(world)
        metadata = builder.build(0, step.common)
        steps: StepSelection = getattr(metadata, ATTRIBUTE)
        again: StepSelection = getattr(builder.build(0, step.common), ATTRIBUTE)
        # A captured batch's lengths and pages are in buffers that keep their addresses.
        assert steps.lengths.data_ptr() == again.lengths.data_ptr()
        assert steps.page_table.data_ptr() == again.page_table.data_ptr()
        assert (metadata.num_decodes, steps.rows, len(steps.lengths)) == (0, rows, rows)
        indexer = replace(steps.plan.indexer, provider=provider, metadata_provider="")
        assert indexer.rows_per_chunk < rows
        setattr(metadata, ATTRIBUTE, replace(steps, plan=replace(steps.plan, indexer=indexer)))
        return metadata, keys_of(step, keys), step

    parts = [prepared(world) for world in group.parts]

    def select(rank: int) -> torch.Tensor:
        metadata, cache, _ = parts[rank]
        buffer = torch.full((rows + 3, TOPK), 9, dtype=torch.int32)
        providers = Providers("v32_fp8", 90 if provider == "triton" else 0)
        ours = wrap_indexer(stock_indexer, lambda: {"indexer": metadata}, lambda: providers)
        pages = cache.data.view(PAGES, PAGE, -1)
        ours(torch.empty(rows, 1), "indexer", pages, q, weights, TOPK, MAX_LEN, buffer)
        return buffer

    first, *others = group.ranks.run(select)
    assert all(torch.equal(first, other) for other in others), "a token that ranks disagree on is lost or read twice"
    undivided = group.whole[0].step(lengths, padded_rows=next_n, padded_requests=1)
    expected = reference_paged_topk(
        q.unflatten(0, (-1, next_n)),
        keys_of(undivided, keys),
        weights,
        undivided.common.seq_lens,
        undivided.table,
        TOPK,
    )
    assert [set(row) for row in first[:rows].tolist()] == [set(row) for row in expected.tolist()]
    assert bool((first[rows:] == 9).all())
    # One exchange of candidates, whatever the number of pieces.
    assert group.ranks.calls == [(rows, TOPK, 2)]


def test_equal_logits_are_the_same_tokens_on_every_rank():
    ranks = Ranks(2)

    def merged(rank: int) -> torch.Tensor:
        selected = torch.tensor([[0, 1, 2, -1], [3, -1, -1, -1], [-1] * 4], dtype=torch.int32)
        logits = torch.where(selected < 0, -torch.inf, 1.0)
        DcpGroup(KvShard(2, rank, 2), Coordinator(ranks, rank)).merge(selected, logits)
        return selected

    first, second = ranks.run(merged)
    assert torch.equal(first, second)
    # Two ranks take turns of 2 tokens: local 0 to 3 are 0, 1, 4 and 5 on the first, and 2, 3, 6 and 7 on the other.
    assert first.tolist() == [[0, 1, 4, 2], [5, 7, -1, -1], [-1] * 4]


def test_a_logit_that_is_not_a_number_is_the_least():
    out = torch.empty((3, 3), dtype=torch.int32)
    logits = torch.tensor([[torch.nan, 2.0, 1.0, 9.0], [3.0, -torch.inf, 5.0, 9.0]])
    kept = LogitsOfSelected(reference_topk_rows, out)
    kept(logits, torch.tensor([0, 1]), torch.tensor([3, 3]), 3, out[1:])
    assert [set(row) for row in out[1:].tolist()] == [{0, 1, 2}, {0, 1, -1}]
    least = torch.finfo(torch.float32).min
    of_row = dict(zip(out[1].tolist(), kept.logits[1].tolist(), strict=True))
    assert of_row == {0: least, 1: 2.0, 2: 1.0}
    of_row = dict(zip(out[2].tolist(), kept.logits[2].tolist(), strict=True))
    assert of_row == {0: least, 1: 5.0, -1: -torch.inf}
    assert bool(kept.logits[0].isneginf().all())


def test_steps_within_the_budget_are_left_to_vllm():
    world = shared().parts[0]
    step = world.step([(1, 40), (1, 9)])
    builder = builder_of(world)
    metadata = builder.build(0, step.common)
    assert (metadata.num_decodes, metadata.decode) == (2, "vLLM's")
    assert not hasattr(metadata, ATTRIBUTE)
