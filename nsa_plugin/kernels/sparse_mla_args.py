"""Arguments of sparse MLA in the one form that its kernels take: prefill and decode alike.

A prefill is a decode of a batch of sequences with one query token each, so both become a `SparseMlaCall` of
4-D views. Nothing is copied, no value is read, and the errors are those of the references.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.layouts import BF16


class Scope(NamedTuple):
    """One cache, the entries that each query row names in it, and how many of them count.

    indices: [batch, s_q, topk] int32 or int64; length: [batch, s_q] int32 or int64, or None: all.
    """

    cache: PagedCache
    indices: torch.Tensor
    length: torch.Tensor | None

    @property
    def topk(self) -> int:
        return int(self.indices.shape[-1])


class SparseMlaCall(NamedTuple):
    """q [batch, s_q, heads, d_qk], out [batch, s_q, heads, d_v], one or two scopes, sink [heads] or None."""

    q: torch.Tensor
    out: torch.Tensor
    scopes: tuple[Scope, ...]
    attn_sink: torch.Tensor | None

    @property
    def rows(self) -> int:
        return int(self.q.shape[0] * self.q.shape[1])

    @property
    def heads(self) -> int:
        return int(self.q.shape[2])

    @property
    def is_empty(self) -> bool:
        """No query, or no entry that could name a key."""
        return self.q.numel() == 0 or all(scope.topk == 0 or scope.cache.num_slots == 0 for scope in self.scopes)


def prefill_call(
    q: torch.Tensor,
    kv: torch.Tensor | PagedCache,
    indices: torch.Tensor,
    d_v: int,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_kv: torch.Tensor | PagedCache | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    allocate: bool = True,
) -> SparseMlaCall:
    """Check the arguments of `reference_prefill` (shapes, dtypes: see there) and take them together.

    Args:
        allocate: make an output if none is given; otherwise `Call.out` is then one without memory (meta).

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device.
    """
    op = "sparse_mla_prefill"
    check_tensor(op, "q", q, ("tokens", "heads", "d_qk"), dtypes=FLOAT_DTYPES)
    tokens, _, d_qk = q.shape

    def scope(
        prefix: str, rows: torch.Tensor | PagedCache, entries: torch.Tensor, length: torch.Tensor | None
    ) -> Scope:
        if isinstance(rows, torch.Tensor):
            rows = rows.squeeze(1) if rows.dim() == 3 else rows
            check_tensor(op, f"{prefix}kv", rows, ("s_kv", d_qk), dtypes=FLOAT_DTYPES, device=q.device)
            rows = open_cache(rows.unsqueeze(1), BF16)
        _check_cache(op, f"{prefix}kv", rows, q)
        entries = entries.squeeze(1) if entries.dim() == 3 else entries
        check_tensor(op, f"{prefix}indices", entries, (tokens, "topk"), dtypes=INDEX_DTYPES, device=q.device)
        if length is not None:
            check_tensor(op, f"{prefix}topk_length", length, (tokens,), dtypes=INDEX_DTYPES, device=q.device)
            length = length.unsqueeze(1)
        return Scope(rows, entries.unsqueeze(1), length)

    scopes: tuple[Scope, ...] = (scope("", kv, indices, topk_length),)
    if _has_extra(op, "kv", extra_kv, extra_indices, extra_topk_length):
        assert extra_kv is not None
        assert extra_indices is not None
        scopes += (scope("extra_", extra_kv, extra_indices, extra_topk_length),)
    out = _check_rest(op, q, d_v, attn_sink, out, out_dtype, allocate)
    return SparseMlaCall(q.unsqueeze(1), out.unsqueeze(1), scopes, attn_sink)


def decode_call(
    q: torch.Tensor,
    cache: PagedCache,
    indices: torch.Tensor,
    d_v: int,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_cache: PagedCache | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    allocate: bool = True,
) -> SparseMlaCall:
    """Check the arguments of `reference_decode` (shapes, dtypes: see there) and take them together.

    Args:
        allocate: make an output if none is given; otherwise `Call.out` is then one without memory (meta).

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device.
    """
    op = "sparse_mla_decode"
    check_tensor(op, "q", q, ("batch", "s_q", "heads", "d_qk"), dtypes=FLOAT_DTYPES)
    batch, s_q = q.shape[:2]

    def scope(prefix: str, paged: PagedCache, entries: torch.Tensor, length: torch.Tensor | None) -> Scope:
        _check_cache(op, f"{prefix}cache", paged, q)
        check_tensor(op, f"{prefix}indices", entries, (batch, s_q, "topk"), dtypes=INDEX_DTYPES, device=q.device)
        if length is not None:
            shape = (batch,) if length.dim() == 1 else (batch, s_q)
            check_tensor(op, f"{prefix}topk_length", length, shape, dtypes=INDEX_DTYPES, device=q.device)
            length = length.unsqueeze(1).expand(batch, s_q) if length.dim() == 1 else length
        return Scope(paged, entries, length)

    scopes: tuple[Scope, ...] = (scope("", cache, indices, topk_length),)
    if _has_extra(op, "cache", extra_cache, extra_indices, extra_topk_length):
        assert extra_cache is not None
        assert extra_indices is not None
        scopes += (scope("extra_", extra_cache, extra_indices, extra_topk_length),)
    out = _check_rest(op, q, d_v, attn_sink, out, out_dtype, allocate)
    return SparseMlaCall(q, out, scopes, attn_sink)


def _has_extra(
    op: str,
    cache_name: str,
    extra: torch.Tensor | PagedCache | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
) -> bool:
    if extra is None:
        for name, tensor in (("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length)):
            require(tensor is None, op, f"{name} is given without extra_{cache_name}")
        return False
    if extra_indices is None:
        raise KernelArgumentError(f"{op}: extra_indices is missing beside extra_{cache_name}")
    return True


def _check_cache(op: str, name: str, cache: PagedCache, q: torch.Tensor) -> None:
    require(cache.dim == q.shape[-1], op, f"{name} has rows of {cache.dim} values; q has {q.shape[-1]}")
    require(cache.device == q.device, op, f"{name} is on {cache.device}; expected {q.device}")


def _check_rest(
    op: str,
    q: torch.Tensor,
    d_v: int,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    allocate: bool,
) -> torch.Tensor:
    """Check what is left; the output, [*q.shape[:-1], d_v]."""
    require(0 < d_v <= q.shape[-1], op, f"d_v is {d_v}; a row has {q.shape[-1]} values")
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, (q.shape[-2],), dtypes=(torch.float32,), device=q.device)
    shape = (*q.shape[:-1], d_v)
    if out is None:
        require(out_dtype is None or out_dtype in FLOAT_DTYPES, op, f"out_dtype is {out_dtype}; allowed: a float")
        return torch.empty(shape, dtype=out_dtype or q.dtype, device=q.device if allocate else "meta")
    require(out_dtype in (None, out.dtype), op, f"out_dtype is {out_dtype} but out has {out.dtype}")
    check_tensor(op, "out", out, shape, dtypes=FLOAT_DTYPES, device=q.device)
    return out
