"""Sparse MLA prefill for 17 to 64 heads and their multiples, straight from the V3.2 fp8 cache, in CUDA C++ for SM90.

For `nsa_plugin.kernels.cuda.attention`, which chooses between this and `sparse_mla`. The kernel (`sparse_mla_wide.cu`)
takes 32 or 64 heads a block, in wgmma's products, and gathers a token's records once for them; a block goes from token
to token. It takes bfloat16 queries with heads of (576, 512) elements and one cache of V3.2 records. It writes
bfloat16.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from nsa_plugin.kernels.cuda.build import CudaKernel, load_kernel
from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    KEYS,
    LOG2_E,
    CudaScope,
    cuda_scope,
    nothings,
    prepare,
    require_hopper,
)
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult
from nsa_plugin.layouts import V32_FP8

SOURCE = "sparse_mla_wide.cu"
HEADS = (32, 64)  # of a block
STAGES = {32: 3, 64: 2}
"""Steps of 64 keys in shared memory, by heads. One more fits, but leaves less of the L1 cache for spilled registers."""
LOGITS = {32: 2, 64: 1}  # warpgroups that make logits, by heads


class WideArguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_row_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("scope", CudaScope),
        ("rows", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("nothings", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("out_row_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("max_logits", ctypes.c_void_p),
    )


def heads_of_block(heads: int) -> int:
    """Of a token with this many."""
    return HEADS[0] if heads <= HEADS[0] else HEADS[1]


def block(heads: int) -> tuple[int, int, int]:
    """Threads of a block with this many heads."""
    return ((3 + LOGITS[heads]) * 128, 1, 1)


def shared_bytes(heads: int) -> int:
    """Shared memory of a block with this many heads, in bytes: at least what `Shared` of the source has."""
    warps, stages = 4 * LOGITS[heads], STAGES[heads]
    parts = (
        9 * heads * 128,  # the query
        2 * heads * 128,  # P
        stages * KEYS * V32_FP8.row_bytes,
        2 * 4 * KEYS // 2 * 4 + 2 * 4 * 4,  # scales, and their changes
        2 * heads * 4 + 8 * heads + 2 * warps * heads * 4 + 4 * heads,  # by head
        warps * 4 * 4 + 2 * 4 * 4 + 2 * 4 + 4 + stages * 4,
        (heads // 4) * 128 * 4 if LOGITS[heads] == 1 else 0,  # largest logits
        8 * (2 * stages + 6),  # barriers
        128,  # alignment
    )
    return sum(parts)


def attend(call: SparseMlaCall) -> SparseMlaResult:
    """Attend with many heads a block, within the module's limits.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: the kernel does not compile or launch.
    """
    given = require_hopper(call)
    launch = prepare(call, (torch.bfloat16,))
    if not call.q.numel():
        return launch.result
    scope = cuda_scope(call, given, V32_FP8)
    q, out, sink, of_block = launch.q, launch.out, launch.sink, heads_of_block(call.heads)
    *_, lse, max_logits = launch.outputs
    groups = -(-call.heads // of_block)
    with torch.cuda.device_of(q):
        arguments = WideArguments(
            q=q.data_ptr(),
            q_row_stride=q.stride(0),
            q_head_stride=q.stride(1),
            scope=scope,
            rows=call.rows,
            heads=call.heads,
            groups=groups,
            nothings=nothings(q.device, V32_FP8.name).data_ptr(),
            sink=sink.data_ptr() if sink is not None else None,
            scale_log2=call.scale * LOG2_E,
            out=out.data_ptr(),
            out_row_stride=out.stride(0),
            out_head_stride=out.stride(1),
            lse=lse.data_ptr(),
            max_logits=max_logits.data_ptr(),
        )
        shared = shared_bytes(of_block)
        grid = min(call.rows * groups, launch.facts.sms), 1, 1
        kernel(of_block, q.device.index)(grid, block(of_block), (arguments,), shared_bytes=shared)
    return launch.finish()


def definitions(heads: int) -> dict[str, int]:
    """What the source's preprocessor needs to know, with this many heads a block."""
    return {"HEADS": heads, "STAGES": STAGES[heads], "LOGITS": LOGITS[heads]}


@functools.cache
def kernel(heads: int, device: int | None) -> CudaKernel:
    """The kernel with this many heads a block, compiled unless it already is."""
    shared = shared_bytes(heads)
    return load_kernel(SOURCE, "attend_wide", defines=definitions(heads), max_dynamic_shared=shared)
