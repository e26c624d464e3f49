"""Sparse MLA prefill in CUDA C++: the kernel of many heads where it is the faster one, else that of few.

Op `sparse_mla_prefill`; contract: `nsa_plugin.kernels.sparse_mla`. Records `docs/benchmarks/h200/sparse-mla-prefill`.
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_wide
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, prefill_op
from nsa_plugin.kernels.triton.device import facts_of

MOST_FEW_HEADS = 16
"""Up to these, a block of the kernel of few heads has all heads of a token, and so gathers a record only once too."""


def attend(call: SparseMlaCall) -> SparseMlaResult:
    """Attend with the faster of both kernels that the call suits.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    if call.heads <= MOST_FEW_HEADS or not call.rows or not sparse_mla_wide.suits(call):
        return sparse_mla.attend(call)
    of_block = sparse_mla_wide.heads_of_block(call.heads)
    with torch.cuda.device_of(call.q):
        # Also for a batch too small for it: none may be compiled while an engine serves.
        sparse_mla_wide.kernel(of_block, call.q.device.index)
    fills = call.rows * -(-call.heads // of_block) >= facts_of(call.q.device).sms
    return sparse_mla_wide.attend(call) if fills else sparse_mla.attend(call)


prefill = prefill_op(attend)
