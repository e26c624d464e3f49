"""Sparse MLA of a prefill whose neighbouring query tokens select many of the same KV tokens, in CUDA C++.

Op `sparse_mla_prefill`; contract: `nsa_plugin.kernels.sparse_mla`. A first kernel (`sparse_mla_union.cu`) makes the
union of what each group of two or four neighbouring query tokens selects, with a bit for each token. The second one
(`sparse_mla.cu`) copies a union's records once, converts them once and attends all tokens of the group; bits keep every
token to its own selection. The result is exact whatever the tokens share. Equal inputs give bit-identical results, but
a token's sums have another order in another group. It takes V3.2 records and one cache.

It pays only where neighbours share much, which `sparse_mla_neighbours` finds out on the GPU.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from nsa_plugin.kernels.cuda import sparse_mla
from nsa_plugin.kernels.cuda.build import CudaKernel, load_kernel
from nsa_plugin.kernels.cuda.sparse_mla import Variant
from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    HOPPER,
    LOG2_E,
    NO_GATE,
    UNLESS_NEGATIVE,
    CudaScope,
    cuda_scope,
    nothings,
    prepare,
    require_records,
    up_to,
)
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts, facts_of
from nsa_plugin.layouts import V32_FP8

SOURCE = "sparse_mla_union.cu"
THREADS = (256, 1, 1)  # of a block that makes a union
SLOT_BITS = 28  # of an entry of a union; the others say which tokens select the slot
STATIC = 128  # bytes of shared memory that such a block has at most, beside its table


@dataclass(frozen=True, kw_only=True)
class UnionVariant(Variant):
    """A compiled form of the kernel that attends unions.

    Attributes:
        least_shared: of 100 entries, those that a token has to share with the one before it for unions to be faster:
            where a line through the recorded times of unions crosses those of tokens alone.
    """

    least_shared: int


HOPPER_VARIANTS = (UnionVariant(tiles=2, blocks=2, held=4, group=2, least_shared=52),)
"""For SM90, in ascending order of the heads that a block takes; with more, blocks copy a union once for each of them.
With 8 heads the lines cross at 50% (65,536 tokens of context) and 54% (8,192), by the record
`docs/benchmarks/h200/sparse-mla-prefill`, which has tokens alone with random selections only. Unions of four, which
that record no longer has, were slower with any overlap."""
PORTABLE_VARIANTS = (
    UnionVariant(tiles=4, blocks=1, held=8, keys=32, stages=3, group=4, least_shared=89),
    UnionVariant(tiles=4, blocks=1, held=8, keys=32, stages=3, group=2, least_shared=91),
)
"""For other GPUs: what 99 KiB of shared memory suffice for, one block an SM. With 8 heads the lines cross at 84% (8,192
tokens of context) and 93% (65,536), and 89 lies between; with 16 at 90 and 91%. With 32 heads unions are slower where
95% are shared (record `docs/benchmarks/h200/portable-sparse-mla-prefill`)."""


def variant_for(heads: int, facts: DeviceFacts) -> UnionVariant:
    """The form of `attend` that calls with this many query heads get on a device."""
    return up_to(heads, HOPPER_VARIANTS if facts.architecture == HOPPER else PORTABLE_VARIANTS)[-1]


def steps(topk: int) -> int:
    """Entries of a token that a thread of `unite` takes."""
    return -(-topk // THREADS[0])


def table_bits(topk: int, group: int) -> int:
    """log2 of the words of the table in which a group's entries are united: two for each entry."""
    return max(2 * group * topk - 1, 1).bit_length()


def most_entries(facts: DeviceFacts) -> int:
    """Most entries of a group, before they are united: the table in shared memory has two words for each."""
    return 1 << (((facts.shared_memory - STATIC) // 8).bit_length() - 1)


def fits(topk: int, num_slots: int, group: int, facts: DeviceFacts) -> bool:
    """Whether an entry of a union has room for a slot, and the table for the entries of a group."""
    return num_slots < 2**SLOT_BITS - 1 and group * topk <= most_entries(facts)


def attend(
    call: SparseMlaCall, *, gate: torch.Tensor | None = None, result: SparseMlaResult | None = None
) -> SparseMlaResult:
    """Attend unions of neighbouring query tokens, within the module's limits.

    Args:
        gate: [1] int32, see `sparse_mla_neighbours`: attend only if the neighbours share enough.
        result: to write, as `new_result` makes it; None: a new one.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    topk, num_slots = call.scopes[0].topk, call.scopes[0].cache.num_slots
    slots = f"{call.scopes[0].name} has {num_slots} slots; an entry of a union has {SLOT_BITS} bits for one"
    call.require(num_slots < 2**SLOT_BITS - 1, slots)
    given, facts = require_records(call), facts_of(call.q.device)
    variant, most = variant_for(call.heads, facts), most_entries(facts)
    group = variant.group
    call.require(group * topk <= most, f"topk is {topk}; {group} tokens may select {most} together on this GPU")
    launch = prepare(call, result=result)
    if not call.q.numel():
        return launch.result
    rows = call.rows
    scope = cuda_scope(call, given, V32_FP8)
    out_float32 = launch.out.dtype == torch.float32
    defines = sparse_mla.definitions(V32_FP8.name, launch.facts, is_flat=scope.is_flat, out_float32=out_float32)
    gates = () if gate is None else (gate,)
    defines["GATE"] = UNLESS_NEGATIVE if gates else NO_GATE
    groups, size, int64 = -(-rows // group), ctypes.c_int, ctypes.c_int64
    bits = table_bits(topk, group)
    with torch.cuda.device_of(launch.q):
        device = launch.q.device
        unite, run = kernels(topk, variant, tuple(defines.items()), device.index)
        entries = torch.empty((groups, group * topk), dtype=torch.int32, device=device)
        counts = torch.empty(groups, dtype=torch.int32, device=device)
        lengths = ctypes.c_void_p(scope.lengths), size(scope.lengths_divisor)
        indices = ctypes.c_void_p(scope.indices), int64(scope.indices_stride)
        numbers = map(size, (rows, topk, num_slots, bits))
        unite((groups, 1, 1), THREADS, (*indices, *lengths, *numbers, entries, counts, *gates), shared_bytes=4 << bits)
        united = CudaScope.from_buffer_copy(scope)
        united.indices, united.indices_stride = entries.data_ptr(), group * topk
        united.lengths, united.lengths_divisor, united.topk = counts.data_ptr(), 1, group * topk
        run(
            (groups, -(-call.heads // variant.heads), 1),
            variant.threads,
            (
                *(*launch.queries, united, CudaScope(lengths_divisor=1, page_size=1)),
                *(nothings(device, V32_FP8.name), launch.sink, ctypes.c_float(call.scale * LOG2_E)),
                *(*launch.outputs, None, None, size(rows), *gates),
            ),
            shared_bytes=variant.shared_bytes(V32_FP8.name),
        )
    return launch.finish()


prefill = prefill_op(attend)


@functools.cache
def kernels(
    topk: int, variant: UnionVariant, defines: tuple[tuple[str, int], ...], device: int | None
) -> tuple[CudaKernel, CudaKernel]:
    """`unite` and `attend`, compiled unless they are, on torch's current device.

    Args:
        defines: `sparse_mla.definitions`, and GATE.
    """
    table = 4 << table_bits(topk, variant.group)
    one = {"GROUP": variant.group, "STEPS": steps(topk), "GATE": dict(defines)["GATE"]}
    unite = load_kernel(SOURCE, "unite", defines=one, max_dynamic_shared=table)
    options = dict(defines) | variant.definitions
    shared = variant.shared_bytes(V32_FP8.name)
    return unite, load_kernel(sparse_mla.SOURCE, "attend", defines=options, max_dynamic_shared=shared)
