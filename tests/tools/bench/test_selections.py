"""Selections with an asked overlap: what neighbours share, and which keys a row may have."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nsa_plugin.tools.bench.cases import SUITES
from nsa_plugin.tools.bench.selections import CAUTIOUS, LIKELY, SELECTIONS, Locality, neighbouring

TOPK = 256


def sets(chosen: torch.Tensor) -> list[set[int]]:
    return [set(row) for row in chosen.tolist()]


def made(first: int, tokens: int, locality: Locality, seed: int = 1) -> torch.Tensor:
    return neighbouring(torch.arange(first, first + tokens), TOPK, seed, locality)


@pytest.mark.parametrize("first", [1024, 16384])
@pytest.mark.parametrize("locality", [LIKELY, CAUTIOUS, Locality(0.5), Locality(0.95, sinks=0, window=32, run=1)])
def test_neighbours_share_the_asked_part(first: int, locality: Locality) -> None:
    rows = sets(made(first, 300, locality))
    shared = [len(one & other) / TOPK for one, other in pairwise(rows)]
    assert sum(shared) / len(shared) == pytest.approx(locality.overlap, abs=0.02)
    # No token sees most of its runs move at once.
    assert min(shared) > locality.overlap - 0.2
    if first < 16384:  # so few keys that runs soon come back to the same ones
        return
    four = [len(set.union(*rows[i : i + 4])) / TOPK for i in range(0, 296, 4)]
    assert sum(four) / len(four) == pytest.approx(1 + 3 * (1 - locality.overlap), rel=0.1)


@pytest.mark.parametrize("locality", [LIKELY, CAUTIOUS, Locality(0.5, run=7)])
def test_keys_are_distinct_causal_and_include_sinks_and_window(locality: Locality) -> None:
    for position, row in zip(range(200, 700), made(200, 500, locality).tolist(), strict=True):
        kept = [key for key in row if key >= 0]
        assert len(set(kept)) == len(kept) == min(TOPK, position + 1)
        assert max(kept) == position
        assert set(range(min(locality.sinks, TOPK // 4))) <= set(kept)
        assert set(range(position - min(locality.window, TOPK // 4) + 1, position + 1)) <= set(kept)


def test_scattered_keys_come_in_runs_from_the_whole_context() -> None:
    row = sorted(sets(made(20000, 1, Locality(0.9, run=8)))[0])
    scattered = [key for key in row if 16 <= key < 19900]
    assert len(scattered) % 8 == 0
    starts = scattered[::8]
    assert all(scattered[8 * i : 8 * i + 8] == list(range(key, key + 8)) for i, key in enumerate(starts))
    assert min(starts) < 3000
    assert max(starts) > 16000


def test_seeds_and_requests_differ_and_the_same_ones_repeat() -> None:
    one, again, other = made(5000, 3, LIKELY), made(5000, 3, LIKELY), made(5000, 3, LIKELY, seed=2)
    assert torch.equal(one, again)
    assert len(sets(one)[0] & sets(other)[0]) < TOPK * 0.6
    positions = torch.tensor([5000, 5001, 5000, 5001])
    both = sets(neighbouring(positions, TOPK, 1, LIKELY, torch.tensor([0, 0, 1, 1])))
    assert both[:2] == sets(one)[:2]
    assert len(both[0] & both[2]) < TOPK * 0.6
    assert len(both[2] & both[3]) > TOPK * 0.85


def test_order_of_a_row_says_nothing() -> None:
    row = made(5000, 1, LIKELY)[0].float()
    place = torch.arange(TOPK).float()
    assert torch.corrcoef(torch.stack([row, place]))[0, 1].abs() < 0.2


def test_overlap_that_the_window_does_not_allow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlap is 0\.999; with"):
        made(5000, 2, Locality(0.999))


def test_cases_ask_for_selections_that_there_are() -> None:
    asked = {one.as_dict().get("selection") for suite in SUITES.values() for one in (*suite.cases, *suite.tiny)}
    assert asked - {None} == set(SELECTIONS)
