"""Sparse multi-head latent attention: each query token attends its selected KV rows.

Ops `sparse_mla_prefill` (one row of indices a token) and `sparse_mla_decode` (a batch of sequences with one to a few
query tokens each, straight from the paged cache). All query heads share one KV head. A key is a whole row (d_qk
values); a value is the row's first `d_v` values.

For query row t and head h, over the valid entries j of `indices[t]` and then of `extra_indices[t]`:

    logit[j]      = scale * dot(q[t, h], row[j])
    max_logits    = max(logit)                       -inf for a row with no valid entry
    lse           = log(sum(exp(logit)))             natural log; +inf for a row with no valid entry
    out           = sum(exp(logit[j] - lse) * row[j][:d_v])           0 for a row with no valid entry
    with a sink:    out *= exp(lse) / (exp(lse) + exp(attn_sink[h]))  lse and max_logits without it

An entry is valid if it lies before `topk_length` (all do without one) and 0 <= index < number of rows. Other entries,
INT_MIN to INT_MAX, are skipped; the memory they point to has no influence, even NaN. An index that occurs twice counts
twice. `attn_sink` may be -inf (no effect) or +inf (out is 0). Any number of heads; no padding of heads or top-k. A
`topk_length` below 0 counts as 0, above top-k as top-k.

The units are FlashMLA's. FlashMLA's limits are narrower: 64 or 128 heads, top-k in multiples of 64 (decode) or 128
(prefill); with V3.2 records on SM90 no topk_length and no extra cache, float32 scales rounded to bfloat16; in decode
only -1 is an invalid index.

A provider is a function from a `SparseMlaCall` to a `SparseMlaResult`. `prefill_op` and `decode_op` wrap it in the
op's signature, check the arguments once and pass further keywords on. A prefill is a decode with one query token a
sequence, so both reach the provider as the same call of 4-D views. No argument is copied and no value is read.

Source: FlashMLA `tests/ref.py` and `flash_mla_interface.py`; DeepSeek-V3.2-Exp `inference/model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache, gather_rows, open_cache
from nsa_plugin.layouts import BF16

PREFILL = "sparse_mla_prefill"
DECODE = "sparse_mla_decode"

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


class SparseMlaResult(NamedTuple):
    """A provider's result: out [batch, s_q, heads, d_v]; lse and max_logits [batch * s_q, heads] float32.

    A decode may return lse as [batch, s_q, heads], and max_logits as None.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None = None


class Scope(NamedTuple):
    """One cache and the entries of it that each query row selects.

    Attributes:
        name: the cache's argument, for error messages.
        cache: the paged cache.
        indices: [batch, s_q, topk] int32 or int64.
        length: [batch, s_q] int32 or int64, the entries that count; None: all.
    """

    name: str
    cache: PagedCache
    indices: torch.Tensor
    length: torch.Tensor | None

    @property
    def topk(self) -> int:
        return int(self.indices.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaCall:
    """The checked arguments of one call.

    Attributes:
        op: `PREFILL` or `DECODE`.
        q: [batch, s_q, heads, d_qk].
        scopes: one or two caches with their entries.
        scale: factor of the logits.
        d_v: values of a row that are its value vector.
        attn_sink: [heads] float32, or None.
        out: [batch, s_q, heads, d_v], the caller's output, or None.
        out_dtype: dtype of the output.
    """

    op: str
    q: torch.Tensor
    scopes: tuple[Scope, ...]
    scale: float
    d_v: int
    attn_sink: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: torch.dtype

    @property
    def rows(self) -> int:
        return int(self.q.shape[0] * self.q.shape[1])

    @property
    def heads(self) -> int:
        return int(self.q.shape[2])

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or no entry that could select a key."""
        return self.q.numel() == 0 or all(scope.topk == 0 or scope.cache.num_slots == 0 for scope in self.scopes)

    def require(self, condition: bool, message: str) -> None:
        """Raise `KernelArgumentError` with the op and `message` unless `condition` is true."""
        require(condition, self.op, message)

    def output(self) -> torch.Tensor:
        """The caller's output, or a new one."""
        if self.out is not None:
            return self.out
        return torch.empty((*self.q.shape[:-1], self.d_v), dtype=self.out_dtype, device=self.q.device)

    def deliver(self, values: torch.Tensor) -> torch.Tensor:
        """The output with these values: the caller's, or `values` themselves where the dtype fits."""
        values = values.view(*self.q.shape[:-1], self.d_v)
        return values.to(self.out_dtype) if self.out is None else self.out.copy_(values)

    def statistics(self, value: float) -> torch.Tensor:
        """float32 [batch * s_q, heads] of one value."""
        return torch.full((self.rows, self.heads), value, dtype=torch.float32, device=self.q.device)

    def empty_result(self) -> SparseMlaResult:
        """The result without a valid entry."""
        return SparseMlaResult(self.output().zero_(), self.statistics(math.inf), self.statistics(-math.inf))


SparseMlaKernel = Callable[..., SparseMlaResult]
# A cache, the indices into it and their lengths, as a caller gives them.
GivenEntries = tuple[torch.Tensor | PagedCache | None, torch.Tensor | None, torch.Tensor | None]


def prefill_op(
    attend: SparseMlaKernel, query_dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
) -> Callable[..., PrefillOutput]:
    """The op `sparse_mla_prefill` by a provider that takes queries of these dtypes."""

    def prefill(
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
        **options: Any,
    ) -> PrefillOutput:
        """Attention of query tokens over their selected KV rows. Contract: see the module.

        Args:
            q: [tokens, heads, d_qk], float.
            kv: rows [s_kv, d_qk] or [s_kv, 1, d_qk], float; or a paged cache, whose slots the indices then are.
            indices: [tokens, topk] or [tokens, 1, topk], int32 or int64.
            scale: factor of the logits.
            d_v: values of a row that are its value vector.
            topk_length: [tokens], int: how many entries of a row count; None: all.
            attn_sink: [heads] float32.
            extra_kv, extra_indices, extra_topk_length: a second cache and the indices into it.
            out: [tokens, heads, d_v], where to put the output; sets the output's dtype.
            out_dtype: dtype of a new output; default q's, bfloat16 for fp8.
            options: further arguments of the provider.

        Raises:
            KernelArgumentError: an argument has the wrong shape, dtype or device, or the provider does not support it.
        """
        check_tensor(PREFILL, "q", q, ("tokens", "heads", "d_qk"), dtypes=query_dtypes)
        main, extra = (kv, indices, topk_length), (extra_kv, extra_indices, extra_topk_length)
        call = _checked_call(PREFILL, "kv", q, main, extra, scale, d_v, attn_sink, out, out_dtype)
        result = attend(call, **options)
        assert result.max_logits is not None
        return PrefillOutput(result.out.squeeze(1) if out is None else out, result.max_logits, result.lse)

    prefill.__module__ = attend.__module__
    return prefill


def decode_op(
    attend: SparseMlaKernel, query_dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
) -> Callable[..., DecodeOutput]:
    """The op `sparse_mla_decode` by a provider that takes queries of these dtypes."""

    def decode(
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
        **options: Any,
    ) -> DecodeOutput:
        """Attention of a batch's new tokens over cache slots. Contract: see the module.

        Args:
            q: [batch, s_q, heads, d_qk], float.
            cache: the paged cache, any layout.
            indices: [batch, s_q, topk] int32 or int64, physical slots (no block table).
            topk_length: [batch], or [batch, s_q] for a length of each query token.
            extra_cache, extra_indices, extra_topk_length: a second cache and the indices into it.
            out: [batch, s_q, heads, d_v], where to put the output; sets the output's dtype.
            Others: as of the prefill.

        Raises:
            KernelArgumentError: an argument has the wrong shape, dtype or device, or the provider does not support it.
        """
        check_tensor(DECODE, "q", q, ("batch", "s_q", "heads", "d_qk"), dtypes=query_dtypes)
        main, extra = (cache, indices, topk_length), (extra_cache, extra_indices, extra_topk_length)
        call = _checked_call(DECODE, "cache", q, main, extra, scale, d_v, attn_sink, out, out_dtype)
        result = attend(call, **options)
        return DecodeOutput(result.out, result.lse.view(q.shape[:3]).transpose(1, 2))

    decode.__module__ = attend.__module__
    return decode


def _checked_call(
    op: str,
    cache_name: str,
    q: torch.Tensor,
    main: GivenEntries,
    extra: GivenEntries,
    scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> SparseMlaCall:
    """Check everything but q, and make 4-D views of a prefill's 3-D tensors."""
    scopes: tuple[Scope, ...] = (_scope(op, "", cache_name, q, *main),)
    if extra[0] is None:
        for name, tensor in (("extra_indices", extra[1]), ("extra_topk_length", extra[2])):
            require(tensor is None, op, f"{name} is given without extra_{cache_name}")
    else:
        scopes += (_scope(op, "extra_", cache_name, q, *extra),)
    require(0 < d_v <= q.shape[-1], op, f"d_v is {d_v}; a row has {q.shape[-1]} values")
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, (q.shape[-2],), dtypes=(torch.float32,), device=q.device)
    if out is None:
        require(out_dtype is None or out_dtype in FLOAT_DTYPES, op, f"out_dtype is {out_dtype}; allowed: a float")
        out_dtype = out_dtype or (q.dtype if q.dtype in FLOAT_DTYPES else torch.bfloat16)
    else:
        require(out_dtype in (None, out.dtype), op, f"out_dtype is {out_dtype} but out has {out.dtype}")
        check_tensor(op, "out", out, (*q.shape[:-1], d_v), dtypes=FLOAT_DTYPES, device=q.device)
        out_dtype = out.dtype
    if op == PREFILL:
        q, out = q.unsqueeze(1), None if out is None else out.unsqueeze(1)
    return SparseMlaCall(
        op=op, q=q, scopes=scopes, scale=scale, d_v=d_v, attn_sink=attn_sink, out=out, out_dtype=out_dtype
    )


def _scope(
    op: str,
    prefix: str,
    cache_name: str,
    q: torch.Tensor,
    cache: Any,
    indices: torch.Tensor | None,
    length: torch.Tensor | None,
) -> Scope:
    """Check one cache, a `PagedCache` or a prefill's rows, and its entries."""
    name, lead, d_qk = f"{prefix}{cache_name}", q.shape[:-2], q.shape[-1]
    if indices is None:
        raise KernelArgumentError(f"{op}: extra_indices is missing beside {name}")
    if not isinstance(cache, PagedCache):
        cache = cache.squeeze(1) if cache.dim() == 3 else cache
        check_tensor(op, name, cache, ("s_kv", d_qk), dtypes=FLOAT_DTYPES, device=q.device)
        cache = open_cache(cache.unsqueeze(1), BF16)
    require(cache.dim == d_qk, op, f"{name} has rows of {cache.dim} values; q has {d_qk}")
    require(cache.device == q.device, op, f"{name} is on {cache.device}; expected {q.device}")
    indices = indices.squeeze(1) if op == PREFILL and indices.dim() == 3 else indices
    check_tensor(op, f"{prefix}indices", indices, (*lead, "topk"), dtypes=INDEX_DTYPES, device=q.device)
    if length is not None:
        shape = lead[:1] if length.dim() == 1 else lead
        check_tensor(op, f"{prefix}topk_length", length, shape, dtypes=INDEX_DTYPES, device=q.device)
        length = length.unsqueeze(1) if length.dim() == 1 else length
        length = length if op == PREFILL else length.expand(lead)
    return Scope(name, cache, indices.unsqueeze(1) if op == PREFILL else indices, length)


def _reference(call: SparseMlaCall) -> SparseMlaResult:
    """Attend in float32, chunk by chunk of query rows."""
    if call.is_empty:
        return call.empty_result()
    q = call.q.flatten(0, 1)
    rows, _, d_qk = q.shape
    lse, max_logits = call.statistics(math.inf), call.statistics(-math.inf)
    result = call.output()
    out = result.flatten(0, 1)  # a view, or a copy to be copied back
    scopes = [(scope.cache, _slots(scope)) for scope in call.scopes]
    topk = sum(scope.topk for scope in call.scopes)
    step = max(1, GATHER_BYTES // (4 * d_qk * topk))
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        # Columns that no row of the chunk uses are left out: short contexts fill little of a wide top-k.
        selected = [slots[chunk] for _, slots in scopes]
        selected = [slots[:, (slots >= 0).any(0)] for slots in selected]
        slots = torch.cat(selected, dim=1)
        if slots.shape[1] == 0:
            out[chunk] = 0
            continue
        gathered = [gather_rows(cache, part) for (cache, _), part in zip(scopes, selected, strict=True)]
        keys = gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=1)
        logits = torch.bmm(q[chunk].float(), keys.transpose(1, 2)).mul_(call.scale)
        logits.masked_fill_((slots < 0).unsqueeze(1), float("-inf"))
        chunk_lse = logits.logsumexp(-1)
        empty = chunk_lse == float("-inf")
        chunk_out = torch.bmm(logits.softmax(-1), keys[..., : call.d_v])
        if call.attn_sink is not None:
            chunk_out *= torch.sigmoid(chunk_lse - call.attn_sink).unsqueeze(-1)
        # The softmax of an empty row is NaN until here, and so is a sink of -inf for it.
        out[chunk] = chunk_out.masked_fill_(empty.unsqueeze(-1), 0.0).to(out.dtype)
        max_logits[chunk] = logits.amax(-1)
        lse[chunk] = chunk_lse.masked_fill(empty, float("inf"))
    if out.data_ptr() != result.data_ptr():
        result.copy_(out.view(result.shape))
    return SparseMlaResult(result, lse, max_logits)


def _slots(scope: Scope) -> torch.Tensor:
    """[rows, topk] with -1 in place of every invalid entry."""
    indices = scope.indices.flatten(0, 1)
    valid = (indices >= 0) & (indices < scope.cache.num_slots)
    if scope.length is not None:
        valid &= torch.arange(scope.topk, device=indices.device) < scope.length.flatten().unsqueeze(1)
    return torch.where(valid, indices, -1)


reference_prefill, reference_decode = prefill_op(_reference), decode_op(_reference)
