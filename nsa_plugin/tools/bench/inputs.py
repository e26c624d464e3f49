"""Random inputs of the suites: caches, queries, indices. Seeded, and made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_plugin.kernels.indexer import fold_weights, quantize
from nsa_plugin.kernels.kv_cache import PagedCache, allocate_cache, reference_write
from nsa_plugin.layouts import PlainLayout

INDEX_DIM = 128  # of the indexer's heads
# Rows with distinct values; a larger cache repeats their pages in random order. Writing 4 million random rows with
# the reference would take longer than all measurements.
_OWN_ROWS = 16384
# float32 scores of one pass of `selection`: 256 MiB.
_SCORES = 64 * 2**20


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def normal(device: torch.device, seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(device, seed), device=device, dtype=torch.float32).to(dtype)


def filled_cache(device: torch.device, layout: str, slots: int, page_size: int, seed: int) -> PagedCache:
    """A cache of at least `slots` rows of random values with a standard deviation of 1/4.

    Scales are powers of two: libraries that round float32 scales to bfloat16 read the same values.
    """
    pages = -(-slots // page_size)
    own = min(pages, -(-_OWN_ROWS // page_size))
    cache = allocate_cache(layout, own, page_size, device=device)
    rows = normal(device, seed, cache.num_slots, cache.dim) / 4
    pow2 = not isinstance(cache.layout, PlainLayout)
    reference_write(cache, rows, torch.arange(cache.num_slots, device=device), power_of_two_scales=pow2)
    if own == pages:
        return cache
    order = torch.randint(own, (pages,), generator=generator(device, seed + 1), device=device)
    whole = allocate_cache(layout, pages, page_size, device=device)
    for start in range(0, pages, own):
        whole.data[start : start + own] = cache.data[order[start : start + own]]
    return whole


def selection(
    device: torch.device, rows: int, keys: int, topk: int, seed: int, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, topk] int32: distinct keys of each row in random order, the worst case for locality; then -1.

    Args:
        counts: [rows]: a row selects from its first `counts` keys; None: from all keys.
    """
    count = min(topk, keys)
    chosen = torch.full((rows, topk), -1, dtype=torch.int32, device=device)
    random = generator(device, seed)
    step = max(1, _SCORES // keys)
    position = torch.arange(keys, device=device)
    for start in range(0, rows, step):
        part = chosen[start : start + step]
        scores = torch.rand(len(part), keys, generator=random, device=device)
        if counts is not None:
            scores.masked_fill_(position >= counts[start : start + step].unsqueeze(1), -1.0)
        best = scores.topk(count, dim=1)
        part[:, :count] = torch.where(best.values < 0, -1, best.indices).int()
    return chosen


class IndexerInputs(NamedTuple):
    """The indexer's inputs for queries that all see every key, as `indexer_topk` takes them."""

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor

    def rows(self, rows: slice | torch.Tensor) -> IndexerInputs:
        """Those of these queries, with all keys."""
        return IndexerInputs(self.q[rows], self.k, self.k_scale, self.weights[rows], self.ks[rows], self.ke[rows])


def index_queries(device: torch.device, seed: int, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 queries [rows, heads, 128], and float32 weights [rows, heads] with the scales of queries and scores."""
    q, q_scale = quantize(normal(device, seed, rows, heads, INDEX_DIM))
    gates = normal(device, seed + 1, rows, heads, dtype=torch.float32)
    return q, fold_weights(gates, q_scale, INDEX_DIM**-0.5 * heads**-0.5)


def indexer(device: torch.device, seed: int, rows: int, keys: int, heads: int) -> IndexerInputs:
    k, k_scale = quantize(normal(device, seed, keys, INDEX_DIM))
    q, weights = index_queries(device, seed + 1, rows, heads)
    ks = torch.zeros(rows, dtype=torch.int32, device=device)
    return IndexerInputs(q, k, k_scale.squeeze(1), weights, ks, torch.full_like(ks, keys))


def budgeted_rows(budget_mib: int, keys: int, topk: int) -> int:
    """Rows whose logits and selections (integers) fit the budget; at least one."""
    return max(1, budget_mib * 2**20 // (4 * (keys + topk)))


def distinct_rows(indices: torch.Tensor, slots: int) -> int:
    """Number of different valid rows among indices into a cache of `slots` rows."""
    seen = torch.zeros(slots, dtype=torch.bool, device=indices.device)
    flat = indices.reshape(-1)
    seen[flat[(flat >= 0) & (flat < slots)].long()] = True
    return int(seen.sum())


def sample(device: torch.device, rows: int, count: int) -> torch.Tensor:
    """[min(rows, count)] int64: evenly spread rows, including the first and the last."""
    return torch.linspace(0, rows - 1, min(rows, count), device=device).round().long().unique()
