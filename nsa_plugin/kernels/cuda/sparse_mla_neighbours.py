"""Sparse MLA of a prefill with few heads: unions where neighbouring query tokens share keys, found out on the GPU.

For `nsa_plugin.kernels.cuda.attention`; contract: `nsa_plugin.kernels.sparse_mla`. A union of neighbouring query tokens
(`sparse_mla_union`) is copied and converted once for all of them. By the records it is faster where neighbours share
most of their selections, as those of real models do, and slower where they share few. The host does not wait to learn
which: a kernel counts what a sample of pairs shares (`sparse_mla_sample.cu`), and of the two that follow for the whole
batch one ends at once (`gate.cuh`).

The result is exact either way, and equal inputs give equal bits. It takes V3.2 records and one cache. The unions take 4
bytes of memory for each selected entry: 64 MiB for 8192 query tokens and a top-k of 2048.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_union
from nsa_plugin.kernels.cuda.build import load_kernel
from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    HOPPER,
    IF_NEGATIVE,
    UNLESS_NEGATIVE,
    CudaScope,
    cuda_scope,
    is_flat,
    new_result,
    require_records,
    result_of_either,
    suits_records,
    up_to,
)
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts, facts_of
from nsa_plugin.layouts import V32_FP8

SOURCE = "sparse_mla_sample.cu"
THREADS = (256, 1, 1)
PAIRS = 64
"""Most pairs of the sample, spread evenly over the batch."""


class Limits(NamedTuple):
    """What unions may be faster for.

    Attributes:
        heads: most of them. With more, unions are slower, or barely faster, at any overlap.
        rows: fewest query tokens of a batch. The sample and the kernels that end at once take as long whatever the
            batch: on an SM90, by the record, 9% of the time of 512 query tokens.
    """

    heads: int
    rows: int


HOPPER_LIMITS, PORTABLE_LIMITS = Limits(heads=8, rows=4096), Limits(heads=16, rows=1024)
"""For SM90, and for other GPUs, where a token takes longer."""


def limits(facts: DeviceFacts) -> Limits:
    """Those of a device."""
    return HOPPER_LIMITS if facts.architecture == HOPPER else PORTABLE_LIMITS


def alone(heads: int, facts: DeviceFacts) -> sparse_mla.Variant:
    """How a token of so many heads is attended alone on a device: in one share, by one block."""
    variants = sparse_mla.VARIANTS if facts.architecture == HOPPER else sparse_mla.PORTABLE_VARIANTS
    return up_to(heads, variants)[-1]


def suits(call: SparseMlaCall) -> bool:
    """Whether a call has what these kernels read and write."""
    if not suits_records(call) or not call.scopes[0].topk:
        return False
    facts = facts_of(call.q.device)
    return call.heads <= limits(facts).heads and _fits(call, facts)


def is_long(call: SparseMlaCall) -> bool:
    """Whether a call that `suits` has enough query tokens."""
    return call.rows >= limits(facts_of(call.q.device)).rows


def _fits(call: SparseMlaCall, facts: DeviceFacts) -> bool:
    given, group = call.scopes[0], sparse_mla_union.variant_for(call.heads, facts).group
    return sparse_mla_union.fits(given.topk, given.cache.num_slots, group, facts)


def load(call: SparseMlaCall) -> None:
    """Compile the kernels that `attend` launches for calls such as this one, unless they are.

    Raises:
        KernelBuildError: one does not compile.
    """
    given = call.scopes[0]
    with torch.cuda.device_of(call.q):
        _load(call.heads, given.topk, is_flat(given.cache, V32_FP8.row_bytes), call.q.device)


@functools.cache
def _load(heads: int, topk: int, flat: bool, device: torch.device) -> None:
    facts = facts_of(device)
    defines = sparse_mla.definitions(V32_FP8.name, facts, is_flat=flat)
    load_kernel(SOURCE, "sample")
    united = tuple((defines | {"GATE": UNLESS_NEGATIVE}).items())
    sparse_mla_union.kernels(topk, sparse_mla_union.variant_for(heads, facts), united, device.index)
    sparse_mla.load(alone(heads, facts), V32_FP8.name, defines | {"GATE": IF_NEGATIVE}, device.index)


def attend(call: SparseMlaCall) -> SparseMlaResult:
    """Attend unions of neighbouring query tokens if they share enough, else each token alone.

    Selections and caches that are too large for unions are attended token by token.

    Raises:
        KernelArgumentError: a kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    given = require_records(call)
    facts = facts_of(call.q.device)
    most = limits(facts).heads
    few = f"there are {call.heads} heads; on this GPU unions are faster with up to {most}"
    call.require(call.heads <= most, few)
    if not _fits(call, facts):
        return sparse_mla.attend(call)
    result = new_result(call)
    if not call.q.numel():
        return result
    least = sparse_mla_union.variant_for(call.heads, facts).least_shared
    found = sample(call.rows, cuda_scope(call, given, V32_FP8), least, call.q.device)
    with result_of_either(result) as own:
        sparse_mla_union.attend(call, gate=found, result=own)
        sparse_mla.attend(call, variant=alone(call.heads, facts), gate=found, result=own)
    return result


def sample(rows: int, scope: CudaScope, least_shared: int, device: torch.device) -> torch.Tensor:
    """[1] int32 on the device: of the entries of the sample's second rows, 100 for each that the first ones have too,
    less `least_shared` for each.

    Args:
        rows: query tokens.
        scope: what they select.
        least_shared: of 100 entries.
    """
    with torch.cuda.device(device):
        found = torch.zeros(1, dtype=torch.int32, device=device)
        size = ctypes.c_int
        if pairs := min(rows // 2, PAIRS):
            indices = ctypes.c_void_p(scope.indices), ctypes.c_int64(scope.indices_stride)
            lengths = ctypes.c_void_p(scope.lengths), size(scope.lengths_divisor)
            numbers = map(size, (rows, scope.topk, scope.num_slots, least_shared))
            load_kernel(SOURCE, "sample")((pairs, 1, 1), THREADS, (*indices, *lengths, *numbers, found))
    return found


prefill = prefill_op(attend)
