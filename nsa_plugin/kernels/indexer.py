"""The lightning indexer: fp8 MQA logits of every query against its keys, and the top-k of each row.

Ops `indexer_topk` (keys of the batch in one ragged buffer) and `indexer_topk_paged` (keys in the paged
indexer cache). For query row i with key range ks[i] <= n < ke[i]:

    logits[i, n] = k_scale[n] * sum over heads h of weights[i, h] * relu(dot(q[i, h], k[n]))

and -inf outside the range. `weights` already include everything that is constant along a row: the head's
gate, the query's scale (q is fp8 too) and the softmax factors (`fold_weights`).

The top-k of a row is a *set*: the `min(topk, ke - ks)` largest logits of its range, as positions
relative to ks, then -1. The reference takes the lowest positions among equal logits and returns them in
ascending order; another provider may order them otherwise and take other members of a tie. A NaN logit
counts as the least finite one. No position reaches past the row's range, and a row with ke <= ks is
all -1.

`rows_per_chunk` bounds the memory: the largest logits buffer has rows_per_chunk rows and one float32 a
key. It never changes the result: dots of fp8 values are exact in float64, so that no sum depends on how
a matrix product was blocked.

Source: DeepSeek-V3.2-Exp `inference/kernel.py` (`fp8_index`) and `model.py` (`Indexer`); DeepGEMM
`fp8_mqa_logits` and `fp8_paged_mqa_logits`, whose arguments these are.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, check_tensor, require
from nsa_plugin.kernels.fp8 import quantize_tiles
from nsa_plugin.kernels.index_transform import request_slots
from nsa_plugin.kernels.indexer_args import check_limits, check_paged, check_ragged
from nsa_plugin.kernels.kv_cache import PagedCache, reference_read_codes
from nsa_plugin.kernels.topk import Selector, in_range, new_output, select

# Elements of the float64 [query rows x heads, keys] product of one step: 32 MiB.
SCRATCH_ELEMENTS = 4 * 2**20
SCRATCH_ROWS = 64


def quantize(
    values: torch.Tensor, block: int = 128, *, ue8m0: bool = True, amax_floor: float = 1e-4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise q or k of the indexer to fp8, one scale for `block` values of the last dimension.

    Args:
        values: [..., dim] float; dim a multiple of `block`.
        ue8m0: round scales up to powers of two, as DeepSeek-V3.2 is served.
        amax_floor: least magnitude that a block is taken to have.

    Returns:
        codes [..., dim] float8_e4m3fn and scales [..., dim / block] float32.
    """
    op = "indexer_quantize"
    check_tensor(op, "values", values, values.shape, dtypes=FLOAT_DTYPES)
    require(values.shape[-1] % block == 0, op, f"values has {values.shape[-1]} in a row; block is {block}")
    return quantize_tiles(values, block, amax_floor=amax_floor, power_of_two=ue8m0)


def fold_weights(weights: torch.Tensor, q_scale: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [rows, heads]: head gates times query scales times the constant factors of a logit.

    Args:
        weights: [rows, heads] float, the gates.
        q_scale: [rows, heads] or [rows, heads, 1] float32, from `quantize`.
        scale: index_head_dim ** -0.5 * num_heads ** -0.5 in DeepSeek-V3.2.
    """
    op = "indexer_fold_weights"
    check_tensor(op, "weights", weights, ("rows", "heads"), dtypes=FLOAT_DTYPES)
    q_scale = q_scale.squeeze(-1) if q_scale.dim() == 3 else q_scale
    check_tensor(op, "q_scale", q_scale, weights.shape, dtypes=(torch.float32,), device=weights.device)
    return weights.float() * q_scale * scale


def reference_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
) -> torch.Tensor:
    """float32 [rows, keys] logits, -inf outside each row's range. Contract: see the module.

    Args:
        q: [rows, heads, dim] float8_e4m3fn or float.
        k: [keys, dim] float8_e4m3fn or float.
        k_scale: [keys] float32, or None for 1.
        weights: [rows, heads] float32.
        ks, ke: [rows] int32 or int64, 0 <= ks and ke <= keys.

    Raises:
        KernelArgumentError: a shape, dtype or range is wrong.
    """
    check_ragged("indexer_logits", q, k, k_scale, weights, ks, ke)
    _check_ranges("indexer_logits", ks, ke, len(k))
    logits = _scores(q, k, k_scale, weights)
    return logits.masked_fill_(~in_range(ks, ke, 0, k.shape[0]), float("-inf"))


def reference_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int | None = None,
    out: torch.Tensor | None = None,
    selector: Selector | None = None,
) -> torch.Tensor:
    """int32 [rows, topk] positions relative to ks, -1 behind them. Contract: see the module.

    Args:
        q, k, k_scale, weights, ks, ke: as `reference_logits`.
        topk: positions a row.
        rows_per_chunk: query rows whose logits are held at once; None: all.
        out: [rows, topk] int32, where to put the result; overwritten whole.
        selector: the `topk_rows` to use for chunks with a key; None: the reference's.

    Raises:
        KernelArgumentError: a shape, dtype, range or count is wrong.
    """
    op = "indexer_topk"
    check_ragged(op, q, k, k_scale, weights, ks, ke)
    _check_ranges(op, ks, ke, len(k))
    rows = q.shape[0]
    out = new_output(op, rows, topk, out, q.device).fill_(-1)
    check_limits(op, rows_per_chunk, None)
    step = rows_per_chunk or max(1, rows)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        chunk_ks, chunk_ke = ks[chunk], ke[chunk]
        nonempty = chunk_ke > chunk_ks
        if not bool(nonempty.any()):
            continue
        # Keys that no row of the chunk may see are not scored.
        first, last = int(chunk_ks[nonempty].min()), int(chunk_ke[nonempty].max())
        scale = None if k_scale is None else k_scale[first:last]
        logits = _scores(q[chunk], k[first:last], scale, weights[chunk])
        if selector is None:
            out[chunk] = select(logits, chunk_ks, chunk_ke, first, topk)
        else:
            starts, ends = ((bound - first).clamp(0, last - first) for bound in (chunk_ks, chunk_ke))
            selector(logits, starts, ends, topk, out=out[chunk])
    return out


def reference_paged_logits(
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    *,
    max_len: int,
) -> torch.Tensor:
    """float32 [batch * next_n, max_len] logits over logical positions, -inf from a row's limit on.

    Arguments as `reference_paged_topk`; no row's limit may exceed `max_len`.
    """
    op = "indexer_paged_logits"
    limits = _check_paged(op, q, cache, weights, seq_lens, page_table)
    longest = int(limits.max()) if limits.numel() else 0
    require(longest <= max_len, op, f"max_len is {max_len}; a row sees {longest} keys")
    batch, next_n = limits.shape
    logits = torch.full((batch, next_n, max_len), float("-inf"), dtype=torch.float32, device=q.device)
    for request in range(batch):
        length = int(limits[request].max()) if next_n else 0
        if length > 0:
            k, k_scale = _request_keys(cache, page_table[request], length)
            row_weights = weights[request * next_n : (request + 1) * next_n]
            ke = limits[request]
            row_logits = reference_logits(q[request], k, k_scale, row_weights, torch.zeros_like(ke), ke)
            logits[request, :, :length] = row_logits
    return logits.view(batch * next_n, max_len)


def reference_paged_topk(
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int | None = None,
    out: torch.Tensor | None = None,
    selector: Selector | None = None,
) -> torch.Tensor:
    """int32 [batch * next_n, topk] logical positions, -1 behind them. Contract: see the module.

    Args:
        q: [batch, next_n, heads, dim] float8_e4m3fn or float; next_n query tokens a request (1, or more
            with speculation).
        cache: an `indexer_fp8` cache.
        weights: [batch * next_n, heads] float32.
        seq_lens: [batch]: tokens of the request, all its next_n included; query j sees those up to its
            own, seq_len - next_n + j + 1. Or [batch, next_n]: the keys that each query sees. Values
            below 1 (idle rows) mean none.
        page_table: [batch, pages] int: the pages of each request; only those of seen keys are read.
        topk: positions a row.
        rows_per_chunk: query rows whose logits are held at once; None: those of one request.
        out: [batch * next_n, topk] int32, where to put the result; overwritten whole.
        selector: as `reference_topk`.

    Raises:
        KernelArgumentError: a shape, dtype, length or count is wrong.
    """
    op = "indexer_topk_paged"
    limits = _check_paged(op, q, cache, weights, seq_lens, page_table)
    batch, next_n = limits.shape
    out = new_output(op, batch * next_n, topk, out, q.device).fill_(-1)
    check_limits(op, rows_per_chunk, None)
    for request in range(batch):
        length = int(limits[request].max()) if next_n else 0
        if length > 0:
            rows = slice(request * next_n, (request + 1) * next_n)
            k, k_scale = _request_keys(cache, page_table[request], length)
            ke = limits[request]
            ks = torch.zeros_like(ke)
            given: dict[str, Any] = {"rows_per_chunk": rows_per_chunk, "out": out[rows], "selector": selector}
            reference_topk(q[request], k, k_scale, weights[rows], ks, ke, topk, **given)
    return out


def _scores(q: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
    """float32 [rows, keys] logits of all keys, in blocks that bound the product of all heads."""
    rows, heads, dim = q.shape
    keys = k.shape[0]
    logits = torch.empty((rows, keys), dtype=torch.float32, device=q.device)
    key_step = max(1, SCRATCH_ELEMENTS // max(1, min(rows, SCRATCH_ROWS) * heads))
    for key_start in range(0, keys, key_step):
        key_block = slice(key_start, min(key_start + key_step, keys))
        block = k[key_block].double()
        for row_start in range(0, rows, SCRATCH_ROWS):
            row_block = slice(row_start, min(row_start + SCRATCH_ROWS, rows))
            products = (q[row_block].double().reshape(-1, dim) @ block.T).relu_().view(-1, heads, len(block))
            scores = torch.bmm(weights[row_block].double().unsqueeze(1), products).squeeze(1)
            logits[row_block, key_block] = scores if k_scale is None else scores * k_scale[key_block]
    return logits


def _request_keys(cache: PagedCache, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys of a request: codes [length, dim] and scales [length]."""
    slots, _ = request_slots(pages.unsqueeze(0), pages.new_full((1,), length), cache.page_size)
    codes, scales = reference_read_codes(cache, slots)
    return codes, scales.squeeze(1)


def _check_ranges(op: str, ks: torch.Tensor, ke: torch.Tensor, keys: int) -> None:
    if len(ks):
        low, high = int(ks.min()), int(ke.max())
        require(low >= 0, op, f"ks has {low}; ranges start at 0 or later")
        require(high <= keys, op, f"ke has {high}; there are {keys} keys")


def _check_paged(
    op: str, q: torch.Tensor, cache: PagedCache, weights: torch.Tensor, seq_lens: torch.Tensor, page_table: torch.Tensor
) -> torch.Tensor:
    """Check the arguments; return [batch, next_n] int64, the keys that each query row sees, 0 or more."""
    limits = check_paged(op, q, cache, weights, seq_lens, page_table).long().clamp(min=0)
    capacity = page_table.shape[1] * cache.page_size
    longest = int(limits.max()) if limits.numel() else 0
    require(longest <= capacity, op, f"seq_lens has a row of {longest} keys; page_table holds {capacity}")
    return limits
