"""Sparse multi-head latent attention: each query attends the KV rows that its indices name.

Ops `sparse_mla_prefill` (one row of indices a token) and `sparse_mla_decode` (a batch of sequences
with 1 to a few query tokens each, straight from the paged cache). All query heads share one KV head;
keys are whole rows (d_qk values) and values are their first `d_v` values.

For query row t and head h, over the valid entries j of `indices[t]` and then of `extra_indices[t]`:

    logit[j]      = scale * dot(q[t, h], row[j])
    max_logits    = max(logit)                       -inf for a row with no valid entry
    lse           = log(sum(exp(logit)))             natural log; +inf for a row with no valid entry
    out           = sum(exp(logit[j] - lse) * row[j][:d_v])           0 for a row with no valid entry
    with a sink:    out *= exp(lse) / (exp(lse) + exp(attn_sink[h]))  lse and max_logits without it

An entry is valid if it lies before `topk_length` (all do without one) and 0 <= index < number of
rows; anything else, INT_MIN to INT_MAX, is skipped and its memory has no influence, even NaN. An
index named twice counts twice. `attn_sink` may be -inf (no effect) or +inf (out is 0). Any number
of heads; no padding of heads or top-k. A `topk_length` below 0 counts as 0, above top-k as top-k.

These are FlashMLA's units. Its own limits are narrower: 64 or 128 heads, top-k in multiples of 64
(decode) or 128 (prefill); with V3.2 records on SM90 no topk_length and no extra cache, float32 scales
rounded to bfloat16; in decode only -1 is an invalid index.

Source: FlashMLA `tests/ref.py` and `flash_mla_interface.py`; DeepSeek-V3.2-Exp `inference/model.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache, gather_rows, open_cache
from nsa_plugin.layouts import BF16

# Bytes of float32 KV rows that one pass gathers; bounds the references' memory.
GATHER_BYTES = 32 * 2**20


class PrefillOutput(NamedTuple):
    """out [tokens, heads, d_v]; max_logits and lse [tokens, heads] float32."""

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


class DecodeOutput(NamedTuple):
    """out [batch, s_q, heads, d_v]; lse [batch, heads, s_q] float32."""

    out: torch.Tensor
    lse: torch.Tensor


class _Scope(NamedTuple):
    """One cache with the slots that each query row names in it: slots [rows, topk], -1 where invalid."""

    cache: PagedCache
    slots: torch.Tensor


def reference_prefill(
    q: torch.Tensor,
    kv: torch.Tensor | PagedCache,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int = 512,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | PagedCache | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> PrefillOutput:
    """Attention of query tokens over the rows that they name. Contract: see the module.

    Args:
        q: [tokens, heads, d_qk], float.
        kv: rows [s_kv, d_qk] or [s_kv, 1, d_qk], float; or a paged cache, then indices are its slots.
        indices: [tokens, topk] or [tokens, 1, topk], int32 or int64.
        scale: factor of the logits.
        d_v: values of a row that are its value vector.
        topk_length: [tokens], int: only the first so many entries of a row count.
        attn_sink: [heads] float32.
        extra_kv, extra_indices, extra_topk_length: a second cache with its own indices.
        out: [tokens, heads, d_v], where to put the output; its dtype counts then.
        out_dtype: dtype of a new output; default q's.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device.
    """
    op = "sparse_mla_prefill"
    check_tensor(op, "q", q, ("tokens", "heads", "d_qk"), dtypes=FLOAT_DTYPES)
    tokens, heads, _ = q.shape
    scopes = [_scope(op, "", "kv", q, kv, indices, topk_length)]
    scopes += _extra_scope(op, "kv", q, extra_kv, extra_indices, extra_topk_length)
    out = _output(op, q, (tokens, heads, d_v), out, out_dtype)
    _check_sink(op, attn_sink, q)
    return _attend_rows(op, q, scopes, scale, d_v, attn_sink, out)


def reference_decode(
    q: torch.Tensor,
    cache: PagedCache,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int = 512,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> DecodeOutput:
    """Attention of a batch's new tokens over cache slots. Contract: see the module.

    Args:
        q: [batch, s_q, heads, d_qk], float.
        cache: the paged cache, any layout.
        indices: [batch, s_q, topk] int32 or int64, physical slots (no block table).
        topk_length: [batch], or [batch, s_q] for a length of each query token.
        extra_cache, extra_indices, extra_topk_length: a second cache with its own indices.
        out: [batch, s_q, heads, d_v], where to put the output; its dtype counts then.
        Others: as `reference_prefill`.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device.
    """
    op = "sparse_mla_decode"
    check_tensor(op, "q", q, ("batch", "s_q", "heads", "d_qk"), dtypes=FLOAT_DTYPES)
    batch, s_q, heads, d_qk = q.shape
    rows = q.reshape(batch * s_q, heads, d_qk)

    def flat_indices(name: str, tensor: torch.Tensor) -> torch.Tensor:
        check_tensor(op, name, tensor, (batch, s_q, "topk"), dtypes=INDEX_DTYPES, device=q.device)
        return tensor.reshape(batch * s_q, tensor.shape[-1])

    def flat_length(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        shape = (batch,) if tensor.dim() == 1 else (batch, s_q)
        check_tensor(op, name, tensor, shape, dtypes=INDEX_DTYPES, device=q.device)
        by_query = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
        return by_query.expand(batch, s_q).reshape(batch * s_q)

    length = flat_length("topk_length", topk_length)
    scopes = [_scope(op, "", "cache", rows, cache, flat_indices("indices", indices), length)]
    flat_extra = None if extra_indices is None else flat_indices("extra_indices", extra_indices)
    extra_length = flat_length("extra_topk_length", extra_topk_length)
    scopes += _extra_scope(op, "cache", rows, extra_cache, flat_extra, extra_length)
    out = _output(op, q, (batch, s_q, heads, d_v), out, out_dtype)
    _check_sink(op, attn_sink, q)
    flat_shape = (batch * s_q, heads, d_v)
    flat_out = out.view(flat_shape) if out.is_contiguous() else out.new_empty(flat_shape)
    result = _attend_rows(op, rows, scopes, scale, d_v, attn_sink, flat_out)
    if not out.is_contiguous():
        out.copy_(result.out.view(out.shape))
    return DecodeOutput(out, result.lse.view(batch, s_q, heads).transpose(1, 2))


def _attend_rows(
    op: str,
    q: torch.Tensor,
    scopes: list[_Scope],
    scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
) -> PrefillOutput:
    rows, heads, d_qk = q.shape
    require(0 < d_v <= d_qk, op, f"d_v is {d_v}; a row has {d_qk} values")
    max_logits = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("inf"), dtype=torch.float32, device=q.device)
    topk = sum(scope.slots.shape[1] for scope in scopes)
    if topk == 0 or q.numel() == 0:
        out.zero_()
        return PrefillOutput(out, max_logits, lse)
    step = max(1, GATHER_BYTES // (4 * d_qk * topk))
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        # Entries that no row of the chunk uses are left out: short contexts fill little of a wide top-k.
        named = [scope.slots[chunk] for scope in scopes]
        named = [slots[:, (slots >= 0).any(0)] for slots in named]
        slots = torch.cat(named, dim=1)
        if slots.shape[1] == 0:
            out[chunk] = 0
            continue
        gathered = [gather_rows(scope.cache, part) for scope, part in zip(scopes, named, strict=True)]
        keys = gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=1)
        logits = torch.bmm(q[chunk].float(), keys.transpose(1, 2)).mul_(scale)
        logits.masked_fill_((slots < 0).unsqueeze(1), float("-inf"))
        chunk_lse = logits.logsumexp(-1)
        empty = chunk_lse == float("-inf")
        chunk_out = torch.bmm(logits.softmax(-1), keys[..., :d_v])
        if attn_sink is not None:
            chunk_out *= torch.sigmoid(chunk_lse - attn_sink).unsqueeze(-1)
        # The softmax of an empty row, and a sink of -inf beside it, are NaN until here.
        out[chunk] = chunk_out.masked_fill_(empty.unsqueeze(-1), 0.0).to(out.dtype)
        max_logits[chunk] = logits.amax(-1)
        lse[chunk] = chunk_lse.masked_fill(empty, float("inf"))
    return PrefillOutput(out, max_logits, lse)


def _scope(
    op: str,
    prefix: str,
    cache_name: str,
    q: torch.Tensor,
    kv: torch.Tensor | PagedCache,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
) -> _Scope:
    """Check one cache and its indices, and fold everything that makes an entry invalid into slots of -1."""
    rows, _, d_qk = q.shape
    if isinstance(kv, torch.Tensor):
        kv = kv.squeeze(1) if kv.dim() == 3 else kv
        check_tensor(op, f"{prefix}{cache_name}", kv, ("s_kv", d_qk), dtypes=FLOAT_DTYPES, device=q.device)
        kv = open_cache(kv.unsqueeze(1), BF16)
    require(kv.dim == d_qk, op, f"{prefix}{cache_name} has rows of {kv.dim} values; q has {d_qk}")
    require(kv.device == q.device, op, f"{prefix}{cache_name} is on {kv.device}; expected {q.device}")
    indices = indices.squeeze(1) if indices.dim() == 3 else indices
    check_tensor(op, f"{prefix}indices", indices, (rows, "topk"), dtypes=INDEX_DTYPES, device=q.device)
    valid = (indices >= 0) & (indices < kv.num_slots)
    if topk_length is not None:
        check_tensor(op, f"{prefix}topk_length", topk_length, (rows,), dtypes=INDEX_DTYPES, device=q.device)
        valid &= torch.arange(indices.shape[1], device=q.device) < topk_length.unsqueeze(1)
    return _Scope(kv, torch.where(valid, indices, -1))


def _extra_scope(
    op: str,
    cache_name: str,
    q: torch.Tensor,
    extra_kv: torch.Tensor | PagedCache | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
) -> list[_Scope]:
    if extra_kv is None:
        for name, tensor in (("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length)):
            require(tensor is None, op, f"{name} is given without extra_{cache_name}")
        return []
    if extra_indices is None:
        raise KernelArgumentError(f"{op}: extra_indices is missing beside extra_{cache_name}")
    return [_scope(op, "extra_", cache_name, q, extra_kv, extra_indices, extra_topk_length)]


def _output(
    op: str, q: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
    require(out_dtype in (None, out.dtype), op, f"out_dtype is {out_dtype} but out has {out.dtype}")
    check_tensor(op, "out", out, shape, dtypes=FLOAT_DTYPES, device=q.device)
    return out


def _check_sink(op: str, attn_sink: torch.Tensor | None, q: torch.Tensor) -> None:
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, (q.shape[-2],), dtypes=(torch.float32,), device=q.device)
