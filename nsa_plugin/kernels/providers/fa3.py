"""FlashAttention-3 (FA3) behind the contracts of dense attention and of sparse decode, on SM90.

FA3 comes with SGLang (`sgl_kernel.flash_attn`) or with vLLM (`vllm.vllm_flash_attn`); the provider uses the first that
imports. Their functions differ in names only, which `_Library` hides.

`mha` is `flash_attn_varlen_func` over the requests' own keys. `decode` attends a bfloat16 cache of latent rows. The
RoPE parts of q and of the rows are FA3's q and k, the rest its `qv` and v. The page table lists single rows, one query
token a sequence (SGLang `_forward_fa3`, vLLM FLASH_ATTN_MLA_SPARSE). FA3 attends a prefix of a page-table row, so
valid entries are moved to the front.

Limits: bfloat16 and float16 only. In `mha`, rows of k and v after the last request have to be finite (FA3 reads whole
tiles, and a probability of 0 keeps a NaN). In `decode`, no sink, no second cache, d_v 512 of rows of 576, and no gaps
between pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from nsa_plugin.kernels.checks import check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.mha import MhaCall, MhaOutput, mha_op
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, decode_op
from nsa_plugin.kernels.triton.compact import compact
from nsa_plugin.layouts import PlainLayout

DTYPES = (torch.bfloat16, torch.float16)
KV_LORA_RANK = 512
ROPE_DIM = 64


class _Library(NamedTuple):
    """A package that contains FA3.

    varlen: its `flash_attn_varlen_func`; paged: its function for a page table and `qv`, with the argument names of
    `attend`; takes_out: `varlen` and `paged` write into a given `out`.
    """

    module: str
    varlen: Callable[..., Any]
    paged: Callable[..., Any]
    takes_out: bool


def attend_dense(call: MhaCall, *, padded: bool = True) -> MhaOutput:
    """Attend with `flash_attn_varlen_func`.

    q, k and v are copied unless the values of a head are contiguous; int64 boundaries are converted. Without
    `max_seqlen_q` and `max_seqlen_k` the shapes give the bounds, so nothing is read on the host.

    Args:
        padded: whether rows may follow the last request; False saves zeroing the output.
    """
    q, k, v, out = call.q, call.k, call.v, call.out
    tokens, bounds = q.shape[0], call.cu_seqlens_q
    if q.numel() == 0 or k.shape[0] == 0 or len(bounds) == 1:
        return call.empty_output()
    library = load()
    # FA3 does not write the rows after the last request.
    direct = library.takes_out and out.dtype == q.dtype and out.is_contiguous()
    written = out if direct else torch.empty(out.shape, dtype=q.dtype, device=q.device)
    if library.takes_out and padded:
        written.zero_()
    arguments: dict[str, Any] = {"out": written} if library.takes_out else {}
    given, raw_lse, *_ = library.varlen(
        q=_inner_contiguous(q),
        k=_inner_contiguous(k),
        v=_inner_contiguous(v),
        cu_seqlens_q=_int32(bounds),
        cu_seqlens_k=_int32(call.cu_seqlens_k),
        max_seqlen_q=tokens if call.max_seqlen_q is None else call.max_seqlen_q,
        max_seqlen_k=k.shape[0] if call.max_seqlen_k is None else call.max_seqlen_k,
        softmax_scale=call.scale,
        causal=call.causal,
        num_splits=1,
        return_softmax_lse=True,
        **arguments,
    )
    if not library.takes_out and padded:
        given = given.masked_fill(_is_padding(bounds, tokens)[:, None, None], 0.0)
    if not direct:
        out.copy_(given)
    if not call.return_lse:
        return MhaOutput(out, None)
    lse = raw_lse.transpose(0, 1)
    unseen = (lse == float("-inf")) | _is_padding(bounds, tokens)[:, None]
    return MhaOutput(out, lse.masked_fill(unseen, float("inf")))


mha = mha_op(attend_dense, DTYPES, one_dtype=True)


def _is_padding(cu_seqlens_q: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [tokens]: rows after the last request."""
    return torch.arange(tokens, device=cu_seqlens_q.device) >= cu_seqlens_q[-1]


def attend(call: SparseMlaCall) -> SparseMlaResult:
    """Attend a bfloat16 or float16 cache with FA3, within the module's limits."""
    call.require(call.attn_sink is None, "attn_sink is given; provider fa3 has no sink here")
    call.require(len(call.scopes) == 1, "extra_cache is given; provider fa3 reads one cache")
    call.require(call.d_v == KV_LORA_RANK, f"d_v is {call.d_v}; provider fa3 takes {KV_LORA_RANK}")
    scope, q = call.scopes[0], call.q
    rows = flat_rows(call.op, scope.cache, KV_LORA_RANK + ROPE_DIM)
    check_tensor(call.op, "q", q, q.shape, dtypes=(rows.dtype,))
    if call.is_empty:
        return call.empty_result()
    library = load()
    # FA3 does not attend the entries after the valid ones, but may prefetch their rows.
    packed = compact(scope.indices, scope.length, scope.cache.num_slots, fill=0)
    flat_q = q.reshape(call.rows, call.heads, -1)
    out = call.output()
    direct = library.takes_out and out.dtype == q.dtype and out.is_contiguous()
    arguments: dict[str, Any] = {"out": out.view(call.rows, call.heads, call.d_v)} if direct else {}
    given, raw_lse, *_ = library.paged(
        q=flat_q[..., KV_LORA_RANK:],
        k_rows=rows[:, KV_LORA_RANK:].view(-1, 1, 1, ROPE_DIM),
        v_rows=rows[:, :KV_LORA_RANK].view(-1, 1, 1, KV_LORA_RANK),
        qv=flat_q[..., :KV_LORA_RANK],
        page_table=packed.indices,
        lengths=packed.counts,
        cu_seqlens_q=torch.arange(call.rows + 1, dtype=torch.int32, device=q.device),
        max_seqlen_q=1,
        softmax_scale=call.scale,
        causal=True,
        return_softmax_lse=True,
        **arguments,
    )
    if not direct:
        out.copy_(given.view(out.shape))
    lse = raw_lse.transpose(0, 1)
    return SparseMlaResult(out, lse.masked_fill(lse == float("-inf"), float("inf")))


decode = decode_op(attend)


def flat_rows(op: str, cache: PagedCache, dim: int) -> torch.Tensor:
    """View a plain cache as [num_slots, dim], so that a slot is a row number.

    Raises:
        KernelArgumentError: the layout is not plain, rows have another width or type, or there are gaps between pages.
    """
    plain = isinstance(cache.layout, PlainLayout) and cache.data.dtype in DTYPES
    require(plain, op, f"cache has layout {cache.layout.name} of {cache.data.dtype}; this provider reads 16-bit rows")
    require(cache.dim == dim, op, f"cache has rows of {cache.dim} values; this provider takes {dim}")
    page, row, value = cache.data.stride()
    even = value == 1 and (cache.num_pages < 2 or page == row * cache.page_size)
    require(even, op, f"cache has strides {cache.data.stride()}; this provider takes pages without gaps")
    row = page if cache.page_size == 1 else row
    return cache.data.as_strided((cache.num_slots, dim), (row, 1), cache.data.storage_offset())


@lru_cache(maxsize=1)
def load() -> _Library:
    """Load the first FA3 that imports.

    Raises:
        ImportError: none does; the message says why for each.
    """
    reasons = []
    for module, wrap in (("sgl_kernel.flash_attn", _from_sglang), ("vllm.vllm_flash_attn", _from_vllm)):
        try:
            return wrap(module, import_module(module))
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    raise ImportError(f"FlashAttention-3 does not import: {'; '.join(reasons)}")


def _from_sglang(name: str, module: Any) -> _Library:
    with_kvcache = module.flash_attn_with_kvcache

    def paged(*, k_rows: torch.Tensor, v_rows: torch.Tensor, lengths: torch.Tensor, **arguments: Any) -> Any:
        return with_kvcache(k_cache=k_rows, v_cache=v_rows, cache_seqlens=lengths, **arguments)

    varlen = module.flash_attn_varlen_func
    return _Library(name, varlen, paged, _takes(varlen, "out") and _takes(with_kvcache, "out"))


def _from_vllm(name: str, module: Any) -> _Library:
    function = module.flash_attn_varlen_func
    if not _takes(function, "q_v"):
        raise ImportError("flash_attn_varlen_func has no parameter q_v; vLLM has it since it reads sparse MLA with FA3")

    def varlen(**arguments: Any) -> Any:
        return function(**arguments, fa_version=3)

    def paged(
        *,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        qv: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        **arguments: Any,
    ) -> Any:
        keys = {"max_seqlen_k": page_table.shape[1], "seqused_k": lengths, "block_table": page_table}
        return varlen(k=k_rows, v=v_rows, q_v=qv, **keys, **arguments)

    return _Library(name, varlen, paged, _takes(function, "out"))


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _inner_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32).contiguous()
