"""Selections whose neighbouring query tokens share keys, as those of real models do.

Published: SGLang's `triton_sparse_mla` (sgl-project/sglang #32779) rests on captured GLM-5.1 prefills in which
neighbouring query tokens "select nearly the same KV rows"; its authors measure on those captures because synthetic
indices lack that. IndexCache for DeepSeek-V4 (GDzhu01/vllm-ascend-deepseekv4 #134) states an overlap of at least 95%
between the top-k of adjacent decode steps. `LIKELY` is that figure, `CAUTIOUS` assumes four times as many new keys.
Neither publication gives the keys themselves: sinks, window and runs are parameters with plain defaults.

A row has the first keys of the request (sinks), the last ones before its token (window), and scattered runs of
consecutive keys. Each run stays for many tokens and then moves. The moves are spread evenly over tokens, so neighbours
share the asked part of their keys, and queries n apart share about overlap - (n - 1) (1 - overlap) of them until every
run has moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_plugin.tools.bench.cases import RANDOM


@dataclass(frozen=True)
class Locality:
    """What the selections of neighbouring query tokens have in common.

    Attributes:
        overlap: part of its keys that a query token shares with the one before it.
        sinks: first keys of the request, which every query token selects.
        window: last keys up to the query token, which it selects.
        run: consecutive keys that are selected together.
    """

    overlap: float
    sinks: int = 16
    window: int = 128
    run: int = 4


LIKELY, CAUTIOUS = Locality(0.95), Locality(0.8)
SELECTIONS = {RANDOM: None, "overlap 95%": LIKELY, "overlap 80%": CAUTIOUS}
"""What a case's `selection` may be; None: `inputs.selection`."""


def neighbouring(
    positions: torch.Tensor, topk: int, seed: int, locality: Locality, sequences: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, topk] int32: distinct keys of each row, none after its token, in an order without meaning; then -1.

    The same arguments give the same selections on every device.

    Args:
        positions: [rows] int64: the token of each row in its request, one after the other within a request. A row of
            fewer than topk keys selects them all.
        sequences: [rows] int64: the request of each row; None: all rows belong to one.

    Raises:
        ValueError: the overlap is not possible with these sinks and this window.
    """
    device = positions.device
    position = positions.unsqueeze(1)
    request = torch.zeros_like(position) if sequences is None else sequences.unsqueeze(1)
    sinks = min(locality.sinks, topk // 4)
    runs = (topk - sinks - min(locality.window, topk // 4)) // locality.run
    window = topk - sinks - runs * locality.run
    moved = (topk * (1 - locality.overlap) - 1) / (runs * locality.run)  # part of the runs; the window moves by a key
    if not 0 <= moved <= 1:
        raise ValueError(f"overlap is {locality.overlap}; with {sinks} sinks and a window of {window}, not possible")

    # Run g takes one of the stretches g, g + runs, ...: no two runs ever meet. It moves when its own clock ticks, and
    # among the stretches that were there at that time, so that it stays where it is until the next tick.
    g = torch.arange(runs, device=device).unsqueeze(0)
    phase = (_mixed(g, request, seed) % runs).double() / runs
    clock = (position * moved + phase).floor()
    since = ((clock - phase) / moved).ceil().long() if moved else torch.zeros_like(clock).long()
    known = torch.minimum(since, position).clamp(min=topk - 1) + 1 - sinks - window
    stretches = ((known // locality.run - g - 1).div(runs, rounding_mode="floor") + 1).clamp(min=1)
    # Every other move goes to the odd stretches, so that each one is a move.
    odd = clock.long() % 2 * (stretches > 1)
    choices = torch.where(odd == 1, stretches // 2, (stretches + 1) // 2)
    stretch = g + runs * (2 * (_mixed(g + runs * clock.long(), request, seed + 1) % choices) + odd)
    scattered = sinks + stretch.unsqueeze(2) * locality.run + torch.arange(locality.run, device=device)
    first = torch.arange(sinks, device=device).expand(len(positions), -1)
    recent = position - torch.arange(window, device=device)
    chosen = torch.cat([first, recent, scattered.flatten(1)], dim=1)
    # In order of no key: libraries' top-k kernels give none.
    order = _mixed(torch.arange(topk, device=device).unsqueeze(0), position + (request << 32), seed + 2).argsort(1)
    chosen = chosen.gather(1, order)
    every = torch.arange(topk, device=device)
    every = torch.where(every <= position, every, -1)
    return torch.where(position < topk, every, chosen).int()


def _mixed(one: torch.Tensor, other: torch.Tensor, seed: int) -> torch.Tensor:
    """Hashes of two integers and a seed: 31 bits each, of a multiply-and-shift mixer."""
    x = (one * 0x2545F491 + other * 0x1B873593 + seed * 0x9E3779B1 + 0x7F4A7C15) & 0x7FFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):
        x = ((x ^ (x >> 16)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)
