"""FlashMLA behind the contracts of sparse MLA, on SM90 and SM100.

The library is sgl-flash-mla 1.0, and of it the kernels that `use_legacy=True` selects: they read V3.2 and
V4 records. What they need is made here, and what they cannot do is an error that names the argument:

    both      bfloat16 queries; d_v 512; 64 or 128 heads (fewer are padded, which costs their full time);
              top-k in multiples of 128 (prefill) or 64 (decode; rows are padded with -1)
    prefill   one cache of bfloat16 rows; an fp8 cache has to be dequantised first
    decode    an fp8 cache; with V3.2 records no topk_length and no second cache, and their float32 scales
              are rounded to bfloat16; pages that start at multiples of 16 bytes (SM100: of a whole row)

The output is bfloat16 and is a view of the padded one unless `out` or `out_dtype` asks for a copy.

Source: sgl-flash-mla 1.0.0 `flash_mla_interface.py`; FlashMLA `csrc/api/sparse_{fwd,decode}.h`.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from nsa_plugin.kernels.checks import KernelArgumentError, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import DecodeOutput, PrefillOutput
from nsa_plugin.kernels.sparse_mla_args import Scope, SparseMlaCall, decode_call, prefill_call
from nsa_plugin.kernels.triton.sparse_mla_indices import masked_rows
from nsa_plugin.layouts import V32_FP8, Fp8Layout

D_V = 512
HEADS = (64, 128)
PREFILL_TOPK_MULTIPLE = 128
DECODE_TOPK_MULTIPLE = 64

# Its vector loads; and on SM100 its tensor maps, whose rows span a page's data.
ALIGNMENT = 16


def prefill(
    q: torch.Tensor,
    kv: torch.Tensor | PagedCache,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int = D_V,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | PagedCache | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> PrefillOutput:
    """`reference_prefill` by `flash_mla_sparse_fwd`, within the library's limits (see the module).

    Raises:
        KernelArgumentError: an argument is wrong, or beyond what the library can do.
    """
    op = "sparse_mla_prefill"
    call = prefill_call(
        q,
        kv,
        indices,
        d_v,
        topk_length,
        attn_sink,
        extra_kv,
        extra_indices,
        extra_topk_length,
        out,
        out_dtype,
        allocate=False,
    )
    _check_queries(op, call)
    require(len(call.scopes) == 1, op, "extra_kv is given; flash_mla reads one cache: combine the rows and indices")
    scope = call.scopes[0]
    rows = _flat_rows(op, scope.cache)
    tokens, heads = call.rows, call.heads
    if call.is_empty:
        empty_out, lse = _empty(call)
        return PrefillOutput(empty_out.squeeze(1), torch.full_like(lse, -math.inf), lse)
    entries, lengths = _entries(scope, PREFILL_TOPK_MULTIPLE, only_minus_one=False)
    padded = _pad_heads(q)
    result, max_logits, lse = import_module("flash_mla").flash_mla_sparse_fwd(
        padded,
        rows,
        entries,
        scale,
        D_V,
        attn_sink=_pad_sink(attn_sink, padded.shape[1]),
        topk_length=None if lengths is None else lengths.view(tokens),
        use_legacy=True,
    )
    result = _deliver(result[:, :heads], out, call.out.dtype)
    return PrefillOutput(result, max_logits[:, :heads], lse[:, :heads])


def decode(
    q: torch.Tensor,
    cache: PagedCache,
    indices: torch.Tensor,
    *,
    scale: float,
    d_v: int = D_V,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    metadata: Any = None,
) -> DecodeOutput:
    """`reference_decode` by `flash_mla_with_kvcache`, within the library's limits (see the module).

    Args:
        metadata: the library's schedule, from `flash_mla.get_mla_metadata()`; a new one if None. It can
            be used again while shapes and the values of the lengths are the same, which nothing checks.
        Others: as `reference_decode`.

    Raises:
        KernelArgumentError: an argument is wrong, or beyond what the library can do.
    """
    op = "sparse_mla_decode"
    call = decode_call(
        q,
        cache,
        indices,
        d_v,
        topk_length,
        attn_sink,
        extra_cache,
        extra_indices,
        extra_topk_length,
        out,
        out_dtype,
        allocate=False,
    )
    _check_queries(op, call)
    for prefix, scope in zip(("", "extra_"), call.scopes, strict=False):
        _check_records(op, f"{prefix}cache", scope.cache)
    if cache.layout.name == V32_FP8.name:
        require(topk_length is None, op, "topk_length is given; flash_mla has none for v32_fp8: write -1 instead")
        require(extra_cache is None, op, "extra_cache is given; flash_mla reads one cache of v32_fp8")
    batch, s_q, heads = q.shape[:3]
    if call.is_empty:
        empty_out, lse = _empty(call)
        return DecodeOutput(empty_out, lse.view(batch, s_q, heads).transpose(1, 2))

    # Of an invalid entry the library reads the first row, so a cache without rows is not shown to it.
    scopes = [scope for scope in call.scopes if scope.topk and scope.cache.num_slots]
    entries, lengths = _entries(scopes[0], DECODE_TOPK_MULTIPLE, only_minus_one=True)
    extra: dict[str, torch.Tensor | None] = {}
    if len(scopes) > 1:
        second_entries, second_lengths = _entries(scopes[1], DECODE_TOPK_MULTIPLE, only_minus_one=True)
        extra = {
            "extra_k_cache": scopes[1].cache.as_records(),
            "extra_indices_in_kvcache": second_entries,
            "extra_topk_length": _by_sequence(second_lengths),
        }
    flash_mla = import_module("flash_mla")
    padded = _pad_heads(q)
    result, lse = flash_mla.flash_mla_with_kvcache(
        padded,
        scopes[0].cache.as_records(),
        None,
        None,
        D_V,
        flash_mla.get_mla_metadata()[0] if metadata is None else metadata,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=entries,
        topk_length=_by_sequence(lengths),
        attn_sink=_pad_sink(attn_sink, padded.shape[2]),
        use_legacy=True,
        **extra,
    )
    return DecodeOutput(_deliver(result[:, :, :heads], out, call.out.dtype), lse[:, :heads])


def _check_queries(op: str, call: SparseMlaCall) -> None:
    q, heads = call.q, call.heads
    require(q.dtype == torch.bfloat16, op, f"q has dtype {q.dtype}; flash_mla takes bfloat16")
    require(q.shape[-1] in (576, 512), op, f"q has {q.shape[-1]} values a head; flash_mla takes 576 or 512")
    require(call.out.shape[-1] == D_V, op, f"d_v is {call.out.shape[-1]}; flash_mla has {D_V}")
    require(heads <= HEADS[-1], op, f"q has {heads} heads; flash_mla takes up to {HEADS[-1]}")


def _flat_rows(op: str, cache: PagedCache) -> torch.Tensor:
    """The rows of a plain cache as [num_slots, 1, dim]. A view."""
    layout = cache.layout.name
    if isinstance(cache.layout, Fp8Layout):
        raise KernelArgumentError(
            f"{op}: kv has layout {layout}; flash_mla's prefill reads bfloat16 rows: dequantise first (kv_cache_read)"
        )
    data = cache.data
    require(data.dtype == torch.bfloat16, op, f"kv has dtype {data.dtype}; flash_mla takes bfloat16")
    pages, page_size, dim = data.shape
    stride = data.stride(0) if page_size == 1 else data.stride(1)
    gapless = page_size == 1 or pages < 2 or data.stride(0) == page_size * stride
    require(gapless, op, "kv has gaps between its pages; flash_mla takes rows at one stride")
    aligned = data.stride(2) == 1 and 2 * stride % ALIGNMENT == 0 and data.data_ptr() % ALIGNMENT == 0
    require(
        aligned, op, f"kv has strides {data.stride()}; flash_mla takes dense rows at multiples of {ALIGNMENT} bytes"
    )
    return data.as_strided((pages * page_size, 1, dim), (stride, stride, 1), data.storage_offset())


def _check_records(op: str, name: str, cache: PagedCache) -> None:
    layout = cache.layout
    if not isinstance(layout, Fp8Layout):
        raise KernelArgumentError(f"{op}: {name} has layout {layout.name}; flash_mla's decode reads fp8 caches")
    stride, data = cache.data.stride(0), cache.data
    unit = ALIGNMENT
    if data.is_cuda and torch.cuda.get_device_capability(data.device)[0] == 10:
        unit = layout.data_stride
    aligned = (stride % unit == 0 or cache.num_pages < 2) and data.data_ptr() % ALIGNMENT == 0
    require(aligned, op, f"{name} has pages every {stride} bytes; flash_mla takes multiples of {unit} bytes")


def _entries(scope: Scope, multiple: int, *, only_minus_one: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The indices as the library takes them, [batch, s_q, topk padded] int32, and the lengths [batch, s_q].

    Entries behind a length become -1: the library may read the rows that they name.
    only_minus_one: it takes nothing but -1 for an invalid index.
    """
    indices = scope.indices
    width = max(1, math.ceil(scope.topk / multiple)) * multiple
    fits = indices.dtype == torch.int32 and indices.is_contiguous() and width == scope.topk
    if fits and scope.length is None and not only_minus_one:
        return indices, None
    return masked_rows(indices, scope.cache.num_slots, scope.length, width)


def _by_sequence(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """The longest length of each sequence, [batch]: what lies behind a shorter one is -1 already."""
    if lengths is None:
        return None
    return lengths.view(-1) if lengths.shape[1] == 1 else lengths.amax(1)


def _pad_heads(q: torch.Tensor) -> torch.Tensor:
    """q with 64 or 128 heads, dense. Heads do not meet, so those added may hold anything."""
    heads = q.shape[-2]
    target = next(count for count in HEADS if heads <= count)
    if heads == target:
        return q.contiguous()
    padded = q.new_empty((*q.shape[:-2], target, q.shape[-1]))
    padded[..., :heads, :] = q
    return padded


def _pad_sink(attn_sink: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    if attn_sink is None or attn_sink.shape[0] == heads:
        return None if attn_sink is None else attn_sink.contiguous()
    return F.pad(attn_sink, (0, heads - attn_sink.shape[0]))


def _deliver(result: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return result.to(dtype) if out is None else out.copy_(result)


def _empty(call: SparseMlaCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What no valid entry gives: out of zeros [batch, s_q, heads, d_v], lse [rows, heads] of +inf."""
    out = torch.empty_like(call.out, device=call.q.device) if call.out.is_meta else call.out
    lse = torch.full((call.rows, call.heads), math.inf, dtype=torch.float32, device=call.q.device)
    return out.zero_(), lse
