"""The indexer without logits in memory on a GPU: sets against float64 logits, and data that defeats its threshold."""

from __future__ import annotations

import pytest
import torch
from sm90 import needs_sm90

from nsa_plugin.kernels.cuda import indexer
from nsa_plugin.kernels.indexer import reference_logits
from nsa_plugin.kernels.topk import reference_topk_rows
from tests.kernels.indexer_cases import assert_selected, indexer_inputs, ragged_requests

pytestmark = [pytest.mark.gpu, needs_sm90]

TOLERANCE = 1e-3
MIB = 2**20
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def whole(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    ks = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return ks, torch.full_like(ks, keys)


def check(
    inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, topk: int, largest: float = 1.0, **arguments: int | None
) -> torch.Tensor:
    """Compare with the reference; logits are at most `largest` times the usual ones, and so is their rounding."""
    result = indexer.topk(*inputs, ks, ke, topk, **arguments)
    some = torch.arange(len(ks), device="cuda")[:: max(1, len(ks) // 64)]
    q, k, scale, weights = inputs
    logits = reference_logits(q[some], k, scale, weights[some], ks[some], ke[some])
    assert_selected(result[some], logits, ks[some], ke[some], topk, TOLERANCE * largest)
    return result


@pytest.mark.parametrize(
    ("rows", "keys", "topk", "mib"),
    [
        (1, 131072, 2048, None),
        (9, 1000, 2048, None),
        (13, 5000, 2048, None),
        (33, 300_001, 2048, None),
        (57, 70_001, 4096, None),
        (264, 131072, 512, None),
        (1100, 40_000, 2048, 64),
        (1500, 9000, 2048, None),
    ],
)
@pytest.mark.parametrize("heads", indexer.HEADS)
def test_selects_as_the_reference(heads, rows, keys, topk, mib):
    rows_per_chunk = None if mib is None else max(1, mib * MIB // (4 * keys))
    check(indexer_inputs(rows, keys, heads, device="cuda"), *whole(rows, keys), topk, rows_per_chunk=rows_per_chunk)


@pytest.mark.parametrize("relu", [0, 1, 2])
def test_every_relu_gives_the_same_bits_and_so_do_reruns(relu):
    inputs, ranges = indexer_inputs(40, 60_000, 64, device="cuda"), whole(40, 60_000)
    first = indexer.topk(*inputs, *ranges, 2048)
    tuning = indexer.IndexerTuning(relu=relu)
    for _ in range(10):
        assert torch.equal(indexer.topk(*inputs, *ranges, 2048, tuning=tuning), first)


def test_requests_share_a_buffer_of_keys():
    _, ks, ke = ragged_requests([(30, 20_000), (5, 5), (77, 2100), (1, 40_000), (20, 2048)], device="cuda")
    rows, keys = len(ks), int(ke.max())
    check(indexer_inputs(rows, keys, 64, device="cuda"), ks, ke, 2048)


@pytest.mark.parametrize("heads", indexer.HEADS)
def test_ranges_of_every_kind(heads):
    generator = torch.Generator().manual_seed(5)
    rows, keys = 77, 50_000
    ks = torch.randint(0, 3000, (rows,), generator=generator).int()
    ke = torch.minimum(ks + torch.randint(0, keys, (rows,), generator=generator).int(), torch.tensor(keys).int())
    ke[::9], ke[4::9], ke[5::9] = ks[::9], ks[4::9] + 2048, ks[5::9] + 2049
    check(indexer_inputs(rows, keys, heads, device="cuda"), ks.cuda(), ke.cuda(), 2048)


def test_equal_logits_give_the_lowest_positions():
    q, k, scale, weights = indexer_inputs(24, 40_000, 64, device="cuda")
    k, scale = k[:1].expand(40_000, -1).contiguous(), torch.full_like(scale, 0.5)
    result = indexer.topk(q, k, scale, weights, *whole(24, 40_000), 2048)
    assert torch.equal(result, torch.arange(2048, device="cuda").int().expand(24, -1))


@pytest.mark.parametrize("factor", [100.0, 0.001])
@pytest.mark.parametrize("heads", indexer.HEADS)
def test_the_sample_misleads(heads, factor):
    q, k, scale, weights = indexer_inputs(24, 60_000, heads, device="cuda")
    scale[indexer.TUNING.step // 2 :: indexer.TUNING.step] *= factor
    check((q, k, scale, weights), *whole(24, 60_000), 2048, largest=max(1.0, factor))


def test_one_list_gets_everything():
    q, k, scale, weights = indexer_inputs(24, 60_000, 64, device="cuda")
    scale[torch.arange(60_000, device="cuda") % indexer.TILE >= indexer.TILE // indexer.LISTS] *= 0.01
    check((q, k, scale, weights), *whole(24, 60_000), 2048)


def test_keys_that_are_not_finite_take_the_places_that_the_contract_says():
    """A NaN scale makes a logit NaN, which counts as the least value; an infinite one makes it infinite."""
    q, k, scale, weights = indexer_inputs(16, 20_000, 64, device="cuda")
    weights = weights.abs()  # no logit is 0 or less: infinity is the largest
    scale[::3], scale[1::7] = torch.nan, torch.inf
    ks, ke = whole(16, 20_000)
    result = indexer.topk(q, k, scale, weights, ks, ke, 2048)
    logits = reference_logits(q, k, scale, weights, ks, ke)
    infinite = logits == torch.inf
    assert bool((infinite.sum(1) > 2048).all())
    assert torch.equal(result, reference_topk_rows(logits, ks, ke, 2048))
