"""Dense multi-head attention over ragged requests: the one-shot path of short prefills.

Op `mha_one_shot`. Requests lie one after the other in q and in k and v. A request has as many keys as its context, and
its queries are the last tokens of it, so a cached prefix is simply more keys than queries. For query i of a request
with sq queries and sk keys, over keys n <= sk - sq + i (all of them if not causal):

    logit[n] = scale * dot(q[i, h], k[n, h])
    lse      = log(sum(exp(logit)))     natural log; +inf for a row that sees no key
    out      = softmax(logit) @ v       0 for a row that sees no key

Rows after the last request (padding) see no key. FlashAttention returns lse as [heads, tokens]; here it is
[tokens, heads], as in `sparse_mla`. A provider is a function from an `MhaCall` to an `MhaOutput`; `mha_op` wraps it in
the op's signature and checks the arguments.

Source: FlashAttention's varlen interface (bottom-right aligned causal mask).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, check_tensor, require

OP = "mha_one_shot"

# Bytes of float32 logits [heads, query rows, keys] in one pass.
LOGITS_BYTES = 64 * 2**20


class MhaOutput(NamedTuple):
    """out [tokens, heads, d_v]; lse [tokens, heads] float32, None unless asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MhaCall:
    """The checked arguments of one call; `out` is the caller's or new, the others are as of `mha_op`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    scale: float
    causal: bool
    return_lse: bool
    out: torch.Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def require(self, condition: bool, message: str) -> None:
        """Raise `KernelArgumentError` with the op and `message` unless `condition` is true."""
        require(condition, OP, message)

    def statistics(self, value: float) -> torch.Tensor:
        """float32 [tokens, heads] of one value."""
        return torch.full(self.q.shape[:2], value, dtype=torch.float32, device=self.q.device)

    def empty_output(self) -> MhaOutput:
        """The output where no query sees a key."""
        return MhaOutput(self.out.zero_(), self.statistics(float("inf")) if self.return_lse else None)


def mha_op(
    attend: Callable[..., MhaOutput], dtypes: Sequence[torch.dtype] = FLOAT_DTYPES, *, one_dtype: bool = False
) -> Callable[..., MhaOutput]:
    """The op `mha_one_shot` by a provider.

    Args:
        attend: the provider's function; keywords that the op does not know are passed on to it.
        dtypes: what it takes as q, k and v.
        one_dtype: k and v must have q's.
    """

    def mha(
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
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **options: Any,
    ) -> MhaOutput:
        """Dense attention of ragged requests. Contract: see the module.

        Args:
            q: [tokens, heads, d_qk] float; d_qk is 192 in DeepSeek-V3.2.
            k: [kv_tokens, heads, d_qk] float.
            v: [kv_tokens, heads, d_v] float; d_v is 128 in DeepSeek-V3.2.
            cu_seqlens_q, cu_seqlens_k: [requests + 1] int, cumulative tokens from 0, not decreasing; the
                last entries may lie below tokens and kv_tokens (padding).
            scale: factor of the logits.
            causal: mask the keys after a query.
            return_lse: also return lse.
            out: [tokens, heads, d_v], where to put the output; sets the output's dtype.
            out_dtype: dtype of a new output; default q's.
            max_seqlen_q, max_seqlen_k: most queries and keys of a request, if the host knows; they affect speed alone.
            options: further arguments of the provider.

        Raises:
            KernelArgumentError: a shape, dtype, device or boundary is wrong, or the provider does not support it.
        """
        check_tensor(OP, "q", q, ("tokens", "heads", "d_qk"), dtypes=dtypes)
        tokens, heads, d_qk = q.shape
        kv_dtypes = (q.dtype,) if one_dtype else dtypes
        check_tensor(OP, "k", k, ("kv_tokens", heads, d_qk), dtypes=kv_dtypes, device=q.device)
        check_tensor(OP, "v", v, (k.shape[0], heads, "d_v"), dtypes=kv_dtypes, device=q.device)
        for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            check_tensor(OP, name, bounds, ("requests + 1",), dtypes=INDEX_DTYPES, device=q.device)
        count, k_count = len(cu_seqlens_q), len(cu_seqlens_k)
        require(count > 0, OP, "cu_seqlens_q is []; it has at least the entry 0")
        require(count == k_count, OP, f"cu_seqlens_k has {k_count} entries; expected {count}")
        shape = (tokens, heads, v.shape[-1])
        if out is None:
            out = torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device)
        require(out_dtype in (None, out.dtype), OP, f"out_dtype is {out_dtype} but out has {out.dtype}")
        check_tensor(OP, "out", out, shape, dtypes=FLOAT_DTYPES, device=q.device)
        call = MhaCall(
            q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, scale=scale, causal=causal,
            return_lse=return_lse, out=out, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
        return attend(call, **options)

    mha.__module__ = attend.__module__
    return mha


def _reference(call: MhaCall) -> MhaOutput:
    """Attend in float32, request by request; reads the boundaries."""
    q, k, v, out = call.q, call.k, call.v, call.out
    q_bounds = _bounds("cu_seqlens_q", call.cu_seqlens_q, q.shape[0])
    k_bounds = _bounds("cu_seqlens_k", call.cu_seqlens_k, k.shape[0])
    out.zero_()
    lse = call.statistics(float("inf"))
    for request in range(len(q_bounds) - 1):
        q_start, q_end = q_bounds[request : request + 2]
        k_start, k_end = k_bounds[request : request + 2]
        if q_start == q_end or k_start == k_end:
            continue
        keys = k[k_start:k_end].float().permute(1, 2, 0)
        values = v[k_start:k_end].float().transpose(0, 1)
        step = max(1, LOGITS_BYTES // (4 * q.shape[1] * (k_end - k_start)))
        for start in range(q_start, q_end, step):
            rows = slice(start, min(start + step, q_end))
            seen = torch.arange(rows.start, rows.stop, device=q.device) + (k_end - k_start - q_end + 1)
            if not call.causal:
                seen = torch.full_like(seen, k_end - k_start)
            logits = torch.matmul(q[rows].float().transpose(0, 1), keys).mul_(call.scale)
            hidden = torch.arange(k_end - k_start, device=q.device) >= seen.unsqueeze(1)
            logits.masked_fill_(hidden, float("-inf"))
            row_lse = logits.logsumexp(-1).T
            empty = row_lse == float("-inf")
            row_out = torch.matmul(logits.softmax(-1), values).transpose(0, 1)
            out[rows] = row_out.masked_fill(empty.unsqueeze(-1), 0.0).to(out.dtype)
            lse[rows] = row_lse.masked_fill(empty, float("inf"))
    return MhaOutput(out, lse if call.return_lse else None)


def _bounds(name: str, cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    """The boundaries on the host, checked."""
    bounds: list[int] = cu_seqlens.tolist()
    ascending = bounds[:1] == [0] and all(a <= b for a, b in pairwise(bounds))
    fits = ascending and bounds[-1] <= tokens
    require(fits, OP, f"{name} is {bounds}; it must rise from 0 to at most {tokens}")
    return bounds


reference = mha_op(_reference)
