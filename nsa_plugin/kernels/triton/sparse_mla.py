"""Sparse MLA in Triton: any number of heads, every cache layout read in place, one or two caches.

The contract is `nsa_plugin.kernels.sparse_mla`'s, with d_v 512 and d_qk 576 or 512, the widths of DeepSeek's models.
Products are taken in the rows' own 16-bit float type (fp8 codes in float16, exactly) and accumulated in float32.
Queries of another type are rounded to it, rows of float32 to bfloat16.

No argument is copied, whatever its strides, and no value is read on the host, so a CUDA graph can capture a call. Few
query rows are split over programs along their keys. A second kernel combines the parts in a fixed order, so equal
inputs give bit-identical results.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import PREFILL, Scope, SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton import sparse_mla_kernels as kernels
from nsa_plugin.kernels.triton.device import INTERPRETER, facts_of
from nsa_plugin.kernels.triton.sizes import ceil_div
from nsa_plugin.kernels.triton.tiles import STREAMS, SparseTile, sparse_tile
from nsa_plugin.layouts import V4_FP8, V32_FP8, Fp8Layout

D_V = 512
D_QK = (512, 576)

# Most parts that one row's keys are cut into, and the fewest blocks of keys worth a part of their own.
COMBINE = STREAMS["combine"]
MAX_SPLITS = COMBINE.block
LEAST_BLOCKS = 2

LAYOUT_CODES = {V32_FP8.name: kernels.V32_FP8.value, V4_FP8.name: kernels.V4_FP8.value}

# Alignment in bytes that the fields of a record need: float32 scales, and eight ue8m0 bytes read as one word.
ALIGNMENTS = {V32_FP8.name: 4, V4_FP8.name: 8}


def num_splits(rows: int, heads: int, topk: int, tile: SparseTile, sms: int) -> int:
    """Parts to cut every row's keys into. From shapes alone.

    Args:
        rows: query rows.
        heads: query heads.
        topk: entries of a row, of both caches together.
        sms: the device's processors.
    """
    programs = rows * math.ceil(heads / tile.block_h)
    by_blocks = math.ceil(topk / tile.block_k) // LEAST_BLOCKS
    return max(1, min(sms * tile.programs_per_sm // programs, by_blocks, MAX_SPLITS))


def attend(call: SparseMlaCall) -> SparseMlaResult:
    """Attend in Triton. An alignment that the kernels cannot read is a `KernelArgumentError`."""
    d_qk, d_v = call.q.shape[-1], call.d_v
    call.require(d_v == D_V, f"d_v is {d_v}; this kernel has {D_V}")
    call.require(d_qk in D_QK, f"q has {d_qk} values a head; this kernel has {' or '.join(map(str, D_QK))}")
    for scope in call.scopes:
        _check_alignment(call, scope.cache)
    if call.is_empty:
        return call.empty_result()
    lse = torch.empty((call.rows, call.heads), dtype=torch.float32, device=call.q.device)
    result = SparseMlaResult(call.output(), lse, torch.empty_like(lse) if call.op == PREFILL else None)
    with torch.cuda.device(call.q.device) if call.q.is_cuda else nullcontext():
        _launch(call, *result)
    return result


prefill, decode = prefill_op(attend), decode_op(attend)


def _launch(call: SparseMlaCall, out: torch.Tensor, lse: torch.Tensor, max_logits: torch.Tensor | None) -> None:
    q, sink = call.q, call.attn_sink
    rows, heads, s_q, device = call.rows, call.heads, q.shape[1], q.device
    interpreted = not isinstance(kernels.sparse_mla_kernel, triton.JITFunction)
    facts = INTERPRETER if interpreted else facts_of(device)
    tile = sparse_tile(facts.architecture, heads)
    splits = num_splits(rows, heads, sum(scope.topk for scope in call.scopes), tile, facts.sms)
    sink_stride = 0 if sink is None else sink.stride(0)
    target, target_lse, target_max = out, lse, max_logits
    part_stride = 0
    if splits > 1:
        parts = torch.empty((splits, *q.shape[:3], D_V), dtype=torch.float32, device=device)
        target, part_stride = parts[0], parts.stride(0)
        target_lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=device)
        target_max = None if max_logits is None else torch.empty_like(target_lse)

    main, extra = call.scopes[0], call.scopes[1] if len(call.scopes) > 1 else None
    layouts = [_layout_code(scope.cache) for scope in call.scopes]
    grid = (rows * ceil_div(heads, tile.block_h), splits)
    kernels.sparse_mla_kernel[grid](
        q,
        *q.stride(),
        target,
        part_stride,
        *target.stride(),
        target_lse,
        target_max,
        sink,
        sink_stride,
        *_scope_arguments(main),
        *(_scope_arguments(extra) if extra is not None else _scope_arguments(main)),
        float(call.scale),
        rows,
        s_q,
        heads,
        splits,
        LAYOUT=layouts[0],
        PAGE_SIZE=main.cache.page_size,
        EXTRA_LAYOUT=kernels.NO_CACHE.value if extra is None else layouts[1],
        EXTRA_PAGE_SIZE=1 if extra is None else extra.cache.page_size,
        D_QK=q.shape[-1],
        TILES=8 if kernels.V4_FP8.value in layouts else 4,
        WHOLE=splits == 1,
        BLOCK_H=tile.block_h,
        BLOCK_K=tile.block_k,
        NATIVE_FP8=interpreted or facts.native_fp8,
        PLAIN_DTYPE=tl.float32 if interpreted else _plain_dtype(call),
        CODE_DTYPE=tl.float32 if interpreted else tl.float16,
        TAIL_DTYPE=tl.float32 if interpreted else tl.bfloat16,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        kernels.combine_kernel[(rows * heads,)](
            target,
            target_lse,
            target_max,
            out,
            *out.stride(),
            lse,
            max_logits,
            sink,
            sink_stride,
            s_q,
            heads,
            splits,
            BLOCK_SPLITS=MAX_SPLITS,
            num_warps=COMBINE.num_warps,
        )


def _scope_arguments(scope: Scope) -> tuple[object, ...]:
    _, cache, indices, length = scope
    if isinstance(cache.layout, Fp8Layout):
        page_stride, row_stride, value_stride = cache.data.stride(0), cache.layout.data_stride, 1
    else:
        page_stride, row_stride, value_stride = cache.data.stride()
    length_strides = (0, 0) if length is None else length.stride()
    return (
        cache.data,
        page_stride,
        row_stride,
        value_stride,
        cache.num_slots,
        indices,
        *indices.stride(),
        length,
        *length_strides,
        scope.topk,
    )


def _layout_code(cache: PagedCache) -> int:
    return LAYOUT_CODES.get(cache.layout.name, kernels.PLAIN.value)


def _plain_dtype(call: SparseMlaCall) -> tl.dtype:
    """float16 where plain rows and queries are float16; otherwise bfloat16, whose range holds them all."""
    plain = [scope.cache.data.dtype for scope in call.scopes if not isinstance(scope.cache.layout, Fp8Layout)]
    return tl.float16 if all(dtype == torch.float16 for dtype in [call.q.dtype, *plain]) else tl.bfloat16


def _check_alignment(call: SparseMlaCall, cache: PagedCache) -> None:
    alignment = ALIGNMENTS.get(cache.layout.name, 1)
    stride, address = cache.data.stride(0), cache.data.data_ptr()
    aligned = (stride % alignment == 0 or cache.num_pages < 2) and address % alignment == 0
    message = f"pages of {cache.layout.name} start at multiples of {alignment} bytes; the page stride is {stride}"
    call.require(aligned, f"{message} and the cache starts at {address:#x}")
