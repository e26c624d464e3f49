"""Dense multi-head attention over ragged requests: the one-shot route of short prefills.

Op `mha_one_shot`. Requests lie one after the other in q and in k and v; a request has as many keys as
its context, of which its queries are the last (so a cached prefix is simply more keys than queries).
For query i of a request with sq queries and sk keys, over keys n <= sk - sq + i (all of them if not
causal):

    logit[n] = scale * dot(q[i, h], k[n, h])
    lse      = log(sum(exp(logit)))     natural log; +inf for a row that sees no key
    out      = softmax(logit) @ v       0 for a row that sees no key

Rows behind the last request (padding) see no key. FlashAttention returns lse as [heads, tokens]; here
it is [tokens, heads], as in `sparse_mla`.

Source: FlashAttention's varlen interface (bottom-right aligned causal mask).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require

# Bytes of float32 logits [heads, query rows, keys] that one pass holds.
LOGITS_BYTES = 64 * 2**20


class MhaOutput(NamedTuple):
    """out [tokens, heads, d_v]; lse [tokens, heads] float32, None unless asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> MhaOutput:
    """Dense attention of ragged requests. Contract: see the module.

    Args:
        q: [tokens, heads, d_qk] float; d_qk is 192 in DeepSeek-V3.2.
        k: [kv_tokens, heads, d_qk] float.
        v: [kv_tokens, heads, d_v] float; d_v is 128 in DeepSeek-V3.2.
        cu_seqlens_q, cu_seqlens_k: [requests + 1] int, cumulative tokens from 0, not decreasing; the
            last entries may lie below tokens and kv_tokens (padding).
        scale: factor of the logits.
        causal: mask keys behind a query.
        return_lse: also return lse.
        out: [tokens, heads, d_v], where to put the output; its dtype counts then.
        out_dtype: dtype of a new output; default q's.

    Raises:
        KernelArgumentError: a shape, dtype or boundary is wrong.
    """
    op = "mha_one_shot"
    check_tensor(op, "q", q, ("tokens", "heads", "d_qk"), dtypes=FLOAT_DTYPES)
    tokens, heads, d_qk = q.shape
    check_tensor(op, "k", k, ("kv_tokens", heads, d_qk), dtypes=FLOAT_DTYPES, device=q.device)
    check_tensor(op, "v", v, (k.shape[0], heads, "d_v"), dtypes=FLOAT_DTYPES, device=q.device)
    q_bounds = _bounds(op, "cu_seqlens_q", cu_seqlens_q, tokens)
    k_bounds = _bounds(op, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    same = len(q_bounds) == len(k_bounds)
    require(same, op, f"cu_seqlens_k has {len(k_bounds)} entries; expected {len(q_bounds)}")
    shape = (tokens, heads, v.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
    require(out_dtype in (None, out.dtype), op, f"out_dtype is {out_dtype} but out has {out.dtype}")
    check_tensor(op, "out", out, shape, dtypes=FLOAT_DTYPES, device=q.device)
    out.zero_()
    lse = torch.full((tokens, heads), float("inf"), dtype=torch.float32, device=q.device)

    for request in range(len(q_bounds) - 1):
        q_start, q_end = q_bounds[request : request + 2]
        k_start, k_end = k_bounds[request : request + 2]
        if q_start == q_end or k_start == k_end:
            continue
        keys = k[k_start:k_end].float().permute(1, 2, 0)
        values = v[k_start:k_end].float().transpose(0, 1)
        step = max(1, LOGITS_BYTES // (4 * heads * (k_end - k_start)))
        for start in range(q_start, q_end, step):
            rows = slice(start, min(start + step, q_end))
            seen = torch.arange(rows.start, rows.stop, device=q.device) + (k_end - k_start - q_end + 1)
            if not causal:
                seen = torch.full_like(seen, k_end - k_start)
            logits = torch.matmul(q[rows].float().transpose(0, 1), keys).mul_(scale)
            hidden = torch.arange(k_end - k_start, device=q.device) >= seen.unsqueeze(1)
            logits.masked_fill_(hidden, float("-inf"))
            row_lse = logits.logsumexp(-1).T
            empty = row_lse == float("-inf")
            row_out = torch.matmul(logits.softmax(-1), values).transpose(0, 1)
            out[rows] = row_out.masked_fill(empty.unsqueeze(-1), 0.0).to(out.dtype)
            lse[rows] = row_lse.masked_fill(empty, float("inf"))
    return MhaOutput(out, lse if return_lse else None)


def _bounds(op: str, name: str, cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    """The boundaries on the host, checked."""
    check_tensor(op, name, cu_seqlens, ("requests + 1",), dtypes=INDEX_DTYPES)
    bounds: list[int] = cu_seqlens.tolist()
    ascending = bounds[:1] == [0] and all(a <= b for a, b in pairwise(bounds))
    fits = ascending and bounds[-1] <= tokens
    require(fits, op, f"{name} is {bounds}; it must rise from 0 to at most {tokens}")
    return bounds
