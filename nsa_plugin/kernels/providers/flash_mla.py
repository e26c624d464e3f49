"""FlashMLA behind the contracts of sparse MLA, on SM90 and SM100.

The library is sgl-flash-mla 1.0, and of it the kernels that `use_legacy=True` selects: they read V3.2 and
V4 records. The provider prepares their inputs, and raises an error that names the argument they do not support:

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
from nsa_plugin.kernels.sparse_mla import Scope, SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.sparse_mla_indices import masked_rows
from nsa_plugin.layouts import V32_FP8, Fp8Layout

D_V = 512
HEADS = (64, 128)
PREFILL_TOPK_MULTIPLE = 128
DECODE_TOPK_MULTIPLE = 64

# Its vector loads; and on SM100 its tensor maps, whose rows span a page's data.
ALIGNMENT = 16


def attend_prefill(call: SparseMlaCall) -> SparseMlaResult:
    """Attend with `flash_mla_sparse_fwd`, within the library's limits (see the module)."""
    _check_queries(call)
    one = len(call.scopes) == 1
    call.require(one, "extra_kv is given; flash_mla reads one cache: combine the rows and indices")
    rows = _flat_rows(call.op, call.scopes[0].cache)
    if call.is_empty:
        return call.empty_result()
    entries, lengths = _entries(call.scopes[0], PREFILL_TOPK_MULTIPLE, only_minus_one=False)
    padded = _pad_heads(call.q.squeeze(1))
    out, max_logits, lse = import_module("flash_mla").flash_mla_sparse_fwd(
        padded,
        rows,
        entries,
        call.scale,
        D_V,
        attn_sink=_pad_sink(call.attn_sink, padded.shape[1]),
        topk_length=None if lengths is None else lengths.view(call.rows),
        use_legacy=True,
    )
    heads = slice(0, call.heads)
    return SparseMlaResult(call.deliver(out[:, heads]), lse[:, heads], max_logits[:, heads])


def attend_decode(call: SparseMlaCall, *, metadata: Any = None) -> SparseMlaResult:
    """Attend with `flash_mla_with_kvcache`, within the library's limits (see the module).

    Args:
        metadata: the library's schedule, from `flash_mla.get_mla_metadata()`; a new one if None. It can
            be used again while shapes and the values of the lengths are the same, which nothing checks.
    """
    _check_queries(call)
    for scope in call.scopes:
        _check_records(call.op, scope.name, scope.cache)
    first = call.scopes[0]
    if first.cache.layout.name == V32_FP8.name:
        no_length = first.length is None
        call.require(no_length, "topk_length is given; flash_mla has none for v32_fp8: write -1 instead")
        call.require(len(call.scopes) == 1, "extra_cache is given; flash_mla reads one cache of v32_fp8")
    if call.is_empty:
        return call.empty_result()
    # The library reads the first row for an invalid entry, so it is not given a cache without rows.
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
    padded = _pad_heads(call.q)
    out, lse = flash_mla.flash_mla_with_kvcache(
        padded,
        scopes[0].cache.as_records(),
        None,
        None,
        D_V,
        flash_mla.get_mla_metadata()[0] if metadata is None else metadata,
        softmax_scale=call.scale,
        is_fp8_kvcache=True,
        indices=entries,
        topk_length=_by_sequence(lengths),
        attn_sink=_pad_sink(call.attn_sink, padded.shape[2]),
        use_legacy=True,
        **extra,
    )
    return SparseMlaResult(call.deliver(out[:, :, : call.heads]), lse[:, : call.heads].transpose(1, 2))


prefill, decode = prefill_op(attend_prefill), decode_op(attend_decode)


def _check_queries(call: SparseMlaCall) -> None:
    q, heads = call.q, call.heads
    call.require(q.dtype == torch.bfloat16, f"q has dtype {q.dtype}; flash_mla takes bfloat16")
    call.require(q.shape[-1] in (576, 512), f"q has {q.shape[-1]} values a head; flash_mla takes 576 or 512")
    call.require(call.d_v == D_V, f"d_v is {call.d_v}; flash_mla has {D_V}")
    call.require(heads <= HEADS[-1], f"q has {heads} heads; flash_mla takes up to {HEADS[-1]}")


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

    Entries beyond a length become -1: the library may read the rows that they name.
    only_minus_one: it takes nothing but -1 for an invalid index.
    """
    indices = scope.indices
    width = max(1, math.ceil(scope.topk / multiple)) * multiple
    fits = indices.dtype == torch.int32 and indices.is_contiguous() and width == scope.topk
    if fits and scope.length is None and not only_minus_one:
        return indices, None
    return masked_rows(indices, scope.cache.num_slots, scope.length, width)


def _by_sequence(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """The longest length of each sequence, [batch]: entries beyond a shorter one are already -1."""
    if lengths is None:
        return None
    return lengths.view(-1) if lengths.shape[1] == 1 else lengths.amax(1)


def _pad_heads(q: torch.Tensor) -> torch.Tensor:
    """q with 64 or 128 heads, dense. Heads are independent, so the added ones are uninitialised."""
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
