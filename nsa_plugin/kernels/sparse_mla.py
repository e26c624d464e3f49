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

from nsa_plugin.kernels.kv_cache import PagedCache, gather_rows
from nsa_plugin.kernels.sparse_mla_args import Scope, SparseMlaCall, decode_call, prefill_call

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
    call = prefill_call(
        q, kv, indices, d_v, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length, out, out_dtype
    )
    max_logits, lse = _attend_rows(call, scale)
    return PrefillOutput(call.out.squeeze(1) if out is None else out, max_logits, lse)


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
    call = decode_call(
        q, cache, indices, d_v, topk_length, attn_sink, extra_cache, extra_indices, extra_topk_length, out, out_dtype
    )
    _, lse = _attend_rows(call, scale)
    batch, s_q = call.q.shape[:2]
    return DecodeOutput(call.out, lse.view(batch, s_q, call.heads).transpose(1, 2))


def _attend_rows(call: SparseMlaCall, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `call.out`; return max_logits and lse, [rows, heads] each."""
    q, d_v = call.q.flatten(0, 1), call.out.shape[-1]
    rows, heads, d_qk = q.shape
    max_logits = torch.full((rows, heads), float("-inf"), dtype=torch.float32, device=q.device)
    lse = torch.full((rows, heads), float("inf"), dtype=torch.float32, device=q.device)
    if call.is_empty:
        call.out.zero_()
        return max_logits, lse
    out = call.out.flatten(0, 1)  # a view, or a copy to be copied back
    scopes = [(scope.cache, _slots(scope)) for scope in call.scopes]
    topk = sum(scope.topk for scope in call.scopes)
    step = max(1, GATHER_BYTES // (4 * d_qk * topk))
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        # Entries that no row of the chunk uses are left out: short contexts fill little of a wide top-k.
        named = [slots[chunk] for _, slots in scopes]
        named = [slots[:, (slots >= 0).any(0)] for slots in named]
        slots = torch.cat(named, dim=1)
        if slots.shape[1] == 0:
            out[chunk] = 0
            continue
        gathered = [gather_rows(cache, part) for (cache, _), part in zip(scopes, named, strict=True)]
        keys = gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=1)
        logits = torch.bmm(q[chunk].float(), keys.transpose(1, 2)).mul_(scale)
        logits.masked_fill_((slots < 0).unsqueeze(1), float("-inf"))
        chunk_lse = logits.logsumexp(-1)
        empty = chunk_lse == float("-inf")
        chunk_out = torch.bmm(logits.softmax(-1), keys[..., :d_v])
        if call.attn_sink is not None:
            chunk_out *= torch.sigmoid(chunk_lse - call.attn_sink).unsqueeze(-1)
        # The softmax of an empty row, and a sink of -inf beside it, are NaN until here.
        out[chunk] = chunk_out.masked_fill_(empty.unsqueeze(-1), 0.0).to(out.dtype)
        max_logits[chunk] = logits.amax(-1)
        lse[chunk] = chunk_lse.masked_fill(empty, float("inf"))
    if out.data_ptr() != call.out.data_ptr():
        call.out.copy_(out.view(call.out.shape))
    return max_logits, lse


def _slots(scope: Scope) -> torch.Tensor:
    """[rows, topk] with everything that makes an entry invalid folded into -1."""
    indices = scope.indices.flatten(0, 1)
    valid = (indices >= 0) & (indices < scope.cache.num_slots)
    if scope.length is not None:
        valid &= torch.arange(scope.topk, device=indices.device) < scope.length.flatten().unsqueeze(1)
    return torch.where(valid, indices, -1)
