"""Sparse MLA in CUDA C++: the kernel for a call, by the layout of its cache and by which one is the faster.

Ops `sparse_mla_prefill` and `sparse_mla_decode`; contract: `nsa_plugin.kernels.sparse_mla`. bfloat16 rows have a kernel
of their own (`sparse_mla_rows`). Of prefills over the V3.2 fp8 cache, long ones of few heads get
`sparse_mla_neighbours`; those of many heads get `sparse_mla_wide` on SM90 where that is faster (record
`docs/benchmarks/h200/sparse-mla-prefill`), elsewhere `sparse_mla_copy` if they are long. Everything else gets
`sparse_mla`.
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_copy, sparse_mla_neighbours, sparse_mla_rows, sparse_mla_wide
from nsa_plugin.kernels.cuda.sparse_mla_launch import suits_hopper
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.device import facts_of
from nsa_plugin.layouts import BF16

MOST_FEW_HEADS = 16
"""Up to these, a block of the kernel of few heads has all heads of a token, and so gathers a record only once too."""


def attend_prefill(call: SparseMlaCall) -> SparseMlaResult:
    """Attend with the faster of the kernels that the call suits.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    if call.rows and sparse_mla_neighbours.suits(call):
        # Also for a batch too small for it: none may be compiled while an engine serves.
        sparse_mla_neighbours.load(call)
        if sparse_mla_neighbours.is_long(call):
            return sparse_mla_neighbours.attend(call)
    if call.rows and sparse_mla_copy.suits(call):
        sparse_mla_copy.load(call)
        if sparse_mla_copy.is_long(call):
            return sparse_mla_copy.attend(call)
    if call.heads <= MOST_FEW_HEADS or not call.rows or not suits_hopper(call):
        return attend_decode(call)
    of_block = sparse_mla_wide.heads_of_block(call.heads)
    with torch.cuda.device_of(call.q):
        # As above.
        sparse_mla_wide.kernel(of_block, call.q.device.index)
    fills = call.rows * -(-call.heads // of_block) >= facts_of(call.q.device).sms
    return sparse_mla_wide.attend(call) if fills else sparse_mla.attend(call)


def attend_decode(call: SparseMlaCall) -> SparseMlaResult:
    """Attend with the kernel that reads the layout of the call's cache.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    kernel = sparse_mla_rows if call.scopes[0].cache.layout is BF16 else sparse_mla
    return kernel.attend(call)


prefill, decode = prefill_op(attend_prefill), decode_op(attend_decode)
