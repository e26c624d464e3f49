"""Host-side checks of the indexer's arguments, shared by the references and every provider.

Nothing is copied and no value is read; the references also check ranges and lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, INDEX_DTYPES, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.layouts import INDEXER_FP8

INDEX_VALUE_DTYPES = (FP8_DTYPE, *FLOAT_DTYPES)


def check_ragged(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    dtypes: Sequence[torch.dtype] = INDEX_VALUE_DTYPES,
) -> None:
    """Check the shapes, dtypes and devices of keys in one ragged buffer."""
    check_tensor(op, "q", q, ("rows", "heads", "dim"), dtypes=dtypes)
    rows, heads, dim = q.shape
    check_tensor(op, "k", k, ("keys", dim), dtypes=dtypes, device=q.device)
    if k_scale is not None:
        check_tensor(op, "k_scale", k_scale, (k.shape[0],), dtypes=(torch.float32,), device=q.device)
    check_tensor(op, "weights", weights, (rows, heads), dtypes=(torch.float32,), device=q.device)
    for name, bound in (("ks", ks), ("ke", ke)):
        check_tensor(op, name, bound, (rows,), dtypes=INDEX_DTYPES, device=q.device)


def check_paged(
    op: str,
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    dtypes: Sequence[torch.dtype] = INDEX_VALUE_DTYPES,
) -> torch.Tensor:
    """Check those of keys in the paged cache; return [batch, next_n], the keys that each query row sees.

    Below 1 for idle rows; not compared with the page table's capacity.
    """
    check_tensor(op, "q", q, ("batch", "next_n", "heads", "dim"), dtypes=dtypes)
    batch, next_n, heads, dim = q.shape
    require(cache.layout is INDEXER_FP8, op, f"cache has layout {cache.layout.name}; expected {INDEXER_FP8.name}")
    require(cache.device == q.device, op, f"cache is on {cache.device}; expected {q.device}")
    require(dim == cache.dim, op, f"q has {dim} values a head; the cache's keys have {cache.dim}")
    check_tensor(op, "weights", weights, (batch * next_n, heads), dtypes=(torch.float32,), device=q.device)
    check_tensor(op, "page_table", page_table, (batch, "pages"), dtypes=INDEX_DTYPES, device=q.device)
    if seq_lens.dim() == 2:
        check_tensor(op, "seq_lens", seq_lens, (batch, next_n), dtypes=INDEX_DTYPES, device=q.device)
        return seq_lens
    check_tensor(op, "seq_lens", seq_lens, (batch,), dtypes=INDEX_DTYPES, device=q.device)
    return seq_lens.unsqueeze(1) - torch.arange(next_n - 1, -1, -1, device=q.device, dtype=seq_lens.dtype)


def paged_limits(
    op: str,
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_len: int | None,
    dtypes: Sequence[torch.dtype] = INDEX_VALUE_DTYPES,
) -> tuple[torch.Tensor, int]:
    """As `check_paged`, within `max_len` and the page table: [batch, next_n] int32, and their most."""
    limits = check_paged(op, q, cache, weights, seq_lens, page_table, dtypes)
    require(max_len is None or max_len > 0, op, f"max_len is {max_len}; it is at least 1")
    capacity = page_table.shape[1] * cache.page_size
    longest = capacity if max_len is None else min(max_len, capacity)
    return limits.clamp(0, longest).int().contiguous(), longest


def check_limits(op: str, rows_per_chunk: int | None, max_key_span: int | None) -> None:
    for name, value in (("rows_per_chunk", rows_per_chunk), ("max_key_span", max_key_span)):
        require(value is None or value > 0, op, f"{name} is {value}; it is at least 1")
