"""Sparse MLA for few heads, straight from the V3.2 or V4 fp8 cache, in CUDA C++ (`sparse_mla.cu`).

Ops `sparse_mla_prefill` and `sparse_mla_decode`; contract: `nsa_plugin.kernels.sparse_mla`. The kernel
takes bfloat16 queries, heads of (576, 512) elements with V3.2 records and (512, 512) with V4's, and both
caches of a call in one layout. It gathers the selected records once for every group of heads, so it pays
for few heads: where FlashMLA pads to 64, or where an fp8 cache would have to be copied to bfloat16 first.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.cuda.build import Argument, Kernel, load_kernel
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import DecodeOutput, PrefillOutput
from nsa_plugin.layouts import V4_FP8, V32_FP8

SOURCE = "sparse_mla.cu"
LOG2_E = 1.4426950408889634
KEYS = 64  # entries that a block of threads attends at a time
D_V = 512
D_QK = {V32_FP8.name: 576, V4_FP8.name: 512}
MAX_SPLITS = 16
NOTHINGS = 1024  # records that stand for entries which do not count
NOT_COUNTED = -1.0  # and their first scale, with V3.2


@dataclass(frozen=True)
class Variant:
    """A compiled form of the kernel.

    Attributes:
        tiles: tiles of 8 heads that a block of threads takes.
        blocks: blocks of threads that an SM holds.
    """

    tiles: int
    blocks: int

    @property
    def heads(self) -> int:
        return 8 * self.tiles

    def shared_bytes(self, layout: str) -> int:
        row, copies, variants = (656, 0, 4) if layout == V32_FP8.name else (592, 2 * KEYS * 8, 8)
        logits, weights = 4 * self.heads * 68 * 4, variants * self.heads * 72 * 2
        # The last terms: validity, two factors a head, two barriers, a number a warp, and alignment.
        return 2 * KEYS * row + logits + weights + copies + 2 * KEYS + 8 * self.heads + 16 + 32 + 128


VARIANTS = (Variant(tiles=1, blocks=2), Variant(tiles=2, blocks=2), Variant(tiles=4, blocks=1))


class _Scope(ctypes.Structure):
    """`Scope` of the source, and what the host keeps beside it.

    Attributes:
        is_flat: the record of slot s lies s records from the start.
        kept: tensors that have to live until the launch.
    """

    is_flat: bool
    kept: tuple[torch.Tensor | None, ...]

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("indices", ctypes.c_void_p),
        ("indices_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("lengths_divisor", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("page_shift", ctypes.c_int),
        ("num_slots", ctypes.c_int),
        ("topk", ctypes.c_int),
    )


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
    splits: int | None = None,
) -> PrefillOutput:
    """Attention of query tokens over the rows that they name. Contract: see the module.

    Args:
        q: [tokens, heads, d_qk] bfloat16.
        kv: a paged cache of layout v32_fp8 or v4_fp8.
        splits: shares of a token's entries that are attended apart and then added up; None: as many as
            fill the device.
        Others: as `sparse_mla.reference_prefill`.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype, layout or device.
        KernelBuildError: the kernel does not compile or launch.
    """
    op = "sparse_mla_prefill"
    check_tensor(op, "q", q, ("tokens", "heads", "d_qk"), dtypes=(torch.bfloat16,))
    tokens, heads, _ = q.shape
    indices = indices.squeeze(1) if indices.dim() == 3 else indices
    if extra_indices is not None and extra_indices.dim() == 3:
        extra_indices = extra_indices.squeeze(1)
    first = _scope(op, "", "kv", q, kv, indices, topk_length, 1)
    second = _extra_scope(op, "kv", q, kv, extra_kv, extra_indices, extra_topk_length, 1)
    result = _output(op, q, (tokens, heads, d_v), out, out_dtype)
    lse, max_logits = _attend(op, q, kv, first, second, scale, d_v, attn_sink, result, splits)
    return PrefillOutput(_given(result, out, out_dtype), max_logits, lse)


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
    splits: int | None = None,
) -> DecodeOutput:
    """Attention of a batch's new tokens over cache slots. Contract: see the module.

    Args:
        q: [batch, s_q, heads, d_qk] bfloat16.
        cache: a paged cache of layout v32_fp8 or v4_fp8.
        splits: as in `prefill`.
        Others: as `sparse_mla.reference_decode`.

    Raises:
        KernelArgumentError, KernelBuildError: as in `prefill`.
    """
    op = "sparse_mla_decode"
    check_tensor(op, "q", q, ("batch", "s_q", "heads", "d_qk"), dtypes=(torch.bfloat16,))
    batch, s_q, heads, d_qk = q.shape
    rows = q.reshape(batch * s_q, heads, d_qk)

    def flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
        check_tensor(op, name, tensor, (batch, s_q, "topk"), dtypes=INDEX_DTYPES, device=q.device)
        return tensor.reshape(batch * s_q, tensor.shape[-1])

    def lengths(name: str, tensor: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
        """The lengths in a row, and how many query rows share one."""
        if tensor is None:
            return None, 1
        shape = (batch,) if tensor.dim() == 1 else (batch, s_q)
        check_tensor(op, name, tensor, shape, dtypes=INDEX_DTYPES, device=q.device)
        return tensor.reshape(-1), s_q if tensor.dim() == 1 else 1

    length, divisor = lengths("topk_length", topk_length)
    first = _scope(op, "", "cache", rows, cache, flat("indices", indices), length, divisor)
    flat_extra = None if extra_indices is None else flat("extra_indices", extra_indices)
    extra_length, divisor = lengths("extra_topk_length", extra_topk_length)
    second = _extra_scope(op, "cache", rows, cache, extra_cache, flat_extra, extra_length, divisor)
    result = _output(op, q, (batch, s_q, heads, d_v), out, out_dtype)
    rows_out = result.view(batch * s_q, heads, d_v)
    lse, _ = _attend(op, rows, cache, first, second, scale, d_v, attn_sink, rows_out, splits)
    return DecodeOutput(_given(result, out, out_dtype), lse.view(batch, s_q, heads).transpose(1, 2))


def choose_splits(rows: int, groups: int, topk: int, sms: int, blocks: int) -> int:
    """Shares of each row's entries: as many as fill the device once, each of several steps' work.

    Args:
        rows: query rows.
        groups: groups of heads, each a block of threads of its own.
        topk: entries of a row, both caches together.
        sms, blocks: SMs of the device and blocks of threads that one holds.
    """
    steps = -(-topk // KEYS)
    room = sms * blocks // max(1, rows * groups)
    return max(1, min(room, steps // 2, MAX_SPLITS))


def _attend(
    op: str,
    q: torch.Tensor,
    cache: Any,
    first: _Scope,
    second: _Scope,
    scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch; (lse, max_logits) [rows, heads] float32."""
    rows, heads, _ = q.shape
    require(d_v == D_V, op, f"d_v is {d_v}; this kernel has values of {D_V}")
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, (heads,), dtypes=(torch.float32,), device=q.device)
        attn_sink = attn_sink.contiguous()
    lse, max_logits = torch.empty((2, rows, heads), dtype=torch.float32, device=q.device).unbind()
    require(q.is_cuda, op, f"q is on {q.device}; the CUDA kernel needs a CUDA device")
    if not q.numel():
        return lse, max_logits
    q = q if q.stride(2) == 1 else q.contiguous()
    layout = cache.layout.name
    variant = next((v for v in VARIANTS if v.heads >= heads), VARIANTS[-1])
    groups = -(-heads // variant.heads)
    if splits is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = choose_splits(rows, groups, first.topk + second.topk, sms, variant.blocks)
    defines = {
        "LAYOUT": int(layout == V4_FP8.name),
        "NT": variant.tiles,
        "MIN_BLOCKS": variant.blocks,
        "OUT_FLOAT32": int(out.dtype == torch.float32),
        "HAS_EXTRA": int(second.topk > 0),
        "FLAT": int(all(scope.is_flat for scope in (first, second) if scope.topk)),
    }
    parts: tuple[Argument, Argument] = (None, None)
    if splits > 1:
        parts = (
            torch.empty((splits, rows, heads, D_V), dtype=torch.float32, device=q.device),
            torch.empty((splits, rows, heads, 2), dtype=torch.float32, device=q.device),
        )
    size, int64 = ctypes.c_int, ctypes.c_int64
    strides = int64(out.stride(0)), int64(out.stride(1))
    shared = variant.shared_bytes(layout)
    with torch.cuda.device_of(q):
        attend, combine = _kernels(tuple(defines.items()), shared, q.device.index)
        attend(
            (rows, groups, splits),
            (256, 1, 1),
            (
                *(q, int64(q.stride(0)), int64(q.stride(1)), size(heads)),
                *(first, second, _nothing(q.device, layout), attn_sink, ctypes.c_float(scale * LOG2_E)),
                *(out, *strides, lse, max_logits, *parts),
            ),
            shared_bytes=shared,
        )
        if splits > 1:
            numbers = size(splits), size(rows), size(heads)
            combine((rows, heads, 1), (128, 1, 1), (*parts, *numbers, attn_sink, out, *strides, lse, max_logits))
    return lse, max_logits


@functools.cache
def _kernels(defines: tuple[tuple[str, int], ...], shared: int, device: int | None) -> tuple[Kernel, Kernel]:
    options = dict(defines)
    return (
        load_kernel(SOURCE, "attend", defines=options, max_dynamic_shared=shared),
        load_kernel(SOURCE, "combine", defines=options),
    )


@functools.cache
def _nothing(device: torch.device, layout: str) -> torch.Tensor:
    """The records that stand for entries which do not count: zeros, but for V3.2's first scale, which marks them."""
    if layout == V4_FP8.name:
        return torch.zeros((NOTHINGS, V4_FP8.data_stride), dtype=torch.uint8, device=device)
    records = torch.zeros((NOTHINGS, V32_FP8.row_bytes), dtype=torch.uint8, device=device)
    records[:, V32_FP8.fp8_dim : V32_FP8.fp8_dim + 4].view(torch.float32).fill_(NOT_COUNTED)
    return records


def _scope(
    op: str,
    prefix: str,
    cache_name: str,
    q: torch.Tensor,
    cache: torch.Tensor | PagedCache,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    divisor: int,
) -> _Scope:
    """The kernel's view of one cache and its indices, checked."""
    name = f"{prefix}{cache_name}"
    if not isinstance(cache, PagedCache) or cache.layout.name not in D_QK:
        layout = cache.layout.name if isinstance(cache, PagedCache) else "bf16"
        raise KernelArgumentError(f"{op}: {name} has layout {layout}; this kernel reads {', '.join(D_QK)}")
    rows, _, d_qk = q.shape
    wanted = D_QK[cache.layout.name]
    require(d_qk == wanted, op, f"q has rows of {d_qk} values; {name} of layout {cache.layout.name} has {wanted}")
    require(cache.device == q.device, op, f"{name} is on {cache.device}; expected {q.device}")
    require(cache.num_slots < 2**31, op, f"{name} has {cache.num_slots} slots; this kernel counts them in int32")
    stride = cache.data.stride(0) if cache.num_pages > 1 else 0
    aligned = cache.data.data_ptr() % 16 == 0 and stride % 16 == 0
    require(aligned, op, f"{name} starts or strides ({stride} B) off a multiple of 16 B")
    check_tensor(op, f"{prefix}indices", indices, (rows, "topk"), dtypes=INDEX_DTYPES, device=q.device)
    indices = _int32(indices)
    indices = indices if indices.stride(1) == 1 else indices.contiguous()
    if lengths is not None:
        shape = (-(-rows // divisor),)
        check_tensor(op, f"{prefix}topk_length", lengths, shape, dtypes=INDEX_DTYPES, device=q.device)
        lengths = _int32(lengths).contiguous()
    size = cache.page_size
    scope = _Scope(
        data=cache.data.data_ptr(),
        page_stride=stride,
        indices=indices.data_ptr(),
        indices_stride=indices.stride(0),
        lengths=lengths.data_ptr() if lengths is not None else 0,
        lengths_divisor=divisor,
        page_size=size,
        page_shift=size.bit_length() - 1 if size & (size - 1) == 0 else -1,
        num_slots=cache.num_slots,
        topk=indices.shape[1],
    )
    scope.is_flat = cache.layout is V32_FP8 and stride in (0, size * V32_FP8.row_bytes)
    scope.kept = (indices, lengths)  # copies made here live until the launch
    return scope


def _extra_scope(
    op: str,
    cache_name: str,
    q: torch.Tensor,
    cache: Any,
    extra: torch.Tensor | PagedCache | None,
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
    divisor: int,
) -> _Scope:
    if extra is None:
        for name, tensor in (("extra_indices", indices), ("extra_topk_length", lengths)):
            require(tensor is None, op, f"{name} is given without extra_{cache_name}")
        return _Scope(lengths_divisor=1, page_size=1)
    if indices is None:
        raise KernelArgumentError(f"{op}: extra_indices is missing beside extra_{cache_name}")
    scope = _scope(op, "extra_", cache_name, q, extra, indices, lengths, divisor)
    same = isinstance(extra, PagedCache) and extra.layout is cache.layout
    require(same, op, f"extra_{cache_name} has another layout than {cache_name}; this kernel reads one a call")
    return scope


def _int32(indices: torch.Tensor) -> torch.Tensor:
    """The same entries in int32; what does not fit stays invalid."""
    return indices if indices.dtype == torch.int32 else indices.clamp(-1, 2**31 - 1).int()


def _output(
    op: str, q: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """What the kernel writes: `out` itself where it can."""
    if out is not None:
        require(out_dtype in (None, out.dtype), op, f"out_dtype is {out_dtype} but out has {out.dtype}")
        check_tensor(op, "out", out, shape, dtypes=FLOAT_DTYPES, device=q.device)
        out_dtype = out.dtype
    dtype = out_dtype or q.dtype
    require(dtype in FLOAT_DTYPES, op, f"out_dtype is {dtype}; allowed: a float")
    # Rows of a decode are addressed as one dimension, so only a prefill's `out` may have gaps.
    fits = dtype in (torch.bfloat16, torch.float32)
    if out is not None and fits and (out.is_contiguous() or (out.dim() == 3 and out.stride(-1) == 1)):
        return out
    return torch.empty(shape, dtype=dtype if dtype == torch.bfloat16 else torch.float32, device=q.device)


def _given(result: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.Tensor:
    """The result where the caller wants it."""
    if out is None:
        return result if out_dtype is None else result.to(out_dtype)
    return out if result is out else out.copy_(result)
