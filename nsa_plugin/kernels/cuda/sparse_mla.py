"""Sparse MLA for few heads, straight from the V3.2 or V4 fp8 cache, in CUDA C++ (`sparse_mla.cu`).

Ops `sparse_mla_prefill` and `sparse_mla_decode`; contract: `nsa_plugin.kernels.sparse_mla`. On SM90 the kernel copies
records in bulk and adds up a row's shares in a cluster of blocks; on SM80 to SM89 and SM120 it needs neither. It
takes bfloat16 queries, heads of (576, 512) elements with V3.2 records and (512, 512) with V4's, and both
caches of a call in one layout. It gathers the selected records once for every group of heads, so it pays
for few heads: where FlashMLA pads to 64, or where an fp8 cache would have to be copied to bfloat16 first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    HOPPER,
    IF_NEGATIVE,
    CudaScope,
    FewHeadsVariant,
    attend_in_shares,
    check_queries,
    cuda_scope,
    kernels,
    nothings,
    prepare,
    up_to,
)
from nsa_plugin.kernels.cuda.sparse_mla_rows import ROW_STRIDE
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import V4_FP8, V32_FP8

SOURCE = "sparse_mla.cu"
RAW = 768  # bytes of shared memory of a record that is to be converted


@dataclass(frozen=True, kw_only=True)
class Variant(FewHeadsVariant):
    """A compiled form of the kernel.

    Attributes:
        held: of a warp's `steps` over the query's fp8-multiplied values, those whose fragments stay in registers;
            shared memory has the others.
        group: neighbouring query rows of a block, which share the tiles and the union of their entries.
        value_parts: of a row in Q K^T; a warp takes one.
        sums: of S in shared memory: one for each of the parts of a row's values, or for two.
        head_parts: in Q K^T, 1: a warp takes all heads; 2: half of them. The warps that take the same values and heads
            share the keys.
        converts: codes become bfloat16 rows in shared memory, once a step (`sparse_mla_converted.cuh`).
    """

    held: int
    group: int = 1
    value_parts: int = 4
    sums: int = 4
    head_parts: int = 1
    converts: bool = False

    @property
    def heads(self) -> int:
        """Heads of a query row that a block takes."""
        return 8 * self.tiles // self.group

    @property
    def steps(self) -> int:
        """Steps of 16 values that a warp takes in Q K^T, without V3.2's RoPE part."""
        return 32 // self.value_parts

    @property
    def definitions(self) -> dict[str, int]:
        """Of the source's preprocessor."""
        parts = {"VALUE_PARTS": self.value_parts, "HEAD_PARTS": self.head_parts, "CONVERTS": int(self.converts)}
        return super().definitions | parts | {"HELD": self.held, "GROUP": self.group, "SUMS": self.sums}

    def takes(self, layout: str, *, has_extra: bool = False) -> bool:
        """Whether it reads a layout, whose records have one scale for a warp's output values, and a second cache."""
        if self.converts:
            return layout == V32_FP8.name and not has_extra
        return layout == V32_FP8.name or self.warps == 8

    def shared_bytes(self, layout: str) -> int:
        """Shared memory of a block, in bytes."""
        row, scales, p_copies = (656, 0, 1) if layout == V32_FP8.name else (592, 8, 2)
        columns = 8 * self.tiles
        validity = self.keys * (layout == V4_FP8.name)
        members = self.keys * (self.group > 1)
        kept = self.value_parts * (self.steps - self.held) + 4 * (layout == V32_FP8.name and not self.converts)
        parts = (
            self.converts * self.keys * (ROW_STRIDE + 4 * 4 + 2 * 8),  # rows, scales and what P is multiplied by
            self.stages * self.keys * (RAW + 1 if self.converts else row),  # records, and where converted ones begin
            self.sums * columns * (self.keys + 4) * 4,  # S
            p_copies * columns * (self.keys + 8) * 2,  # P
            self.stages * (self.keys * scales + validity + members),
            2 * self.keys * 8 + 2 * 8,  # addresses of records, of zero records and of rows
            self.stages * (8 + 8 * (self.producers > 0) + 4 * self.in_turn),  # barriers, and whether a row ends
            self.warps * 4 + 8 * self.converts,  # a number a warp, and the query's barrier
            kept * 32 * 2 * self.tiles * 4,  # fragments of the query
            2 * columns * 4,  # factors of a head
            128,  # alignment
        )
        return sum(parts)


VARIANTS = (
    Variant(tiles=1, blocks=2, held=16, warps=4, value_parts=2, sums=2),
    Variant(tiles=1, blocks=2, held=8),
    Variant(tiles=2, blocks=2, held=12, warps=4, value_parts=2, sums=2),
    Variant(tiles=2, blocks=2, held=4),
    Variant(tiles=4, blocks=1, held=8),
)
"""For SM90. With 8 and 16 heads V3.2's records take blocks of four warps, which are faster in prefills and about level
in decode steps; V4's take those of eight, because a warp's values must have one scale. `held` as measured: 12 and 4
leave 16 heads the registers that they lack."""
PORTABLE_VARIANTS = (
    Variant(tiles=1, blocks=2, held=16, warps=4, keys=32, value_parts=2, sums=2, producers=2, in_turn=True),
    Variant(tiles=1, blocks=1, held=8, producers=2, in_turn=True),
    Variant(tiles=2, blocks=1, held=16, value_parts=2, sums=2, producers=2),
    Variant(tiles=4, blocks=1, held=8, keys=32, stages=3),
    Variant(tiles=8, blocks=1, held=8, keys=32, stages=1, head_parts=2, sums=2, converts=True),
    Variant(tiles=8, blocks=1, held=3, keys=32, stages=3, head_parts=2),
    Variant(tiles=8, blocks=1, held=8, keys=32, stages=3, head_parts=2, sums=2),
)
"""For other GPUs than SM90: the fastest of those tried on an H100 and an H200. The first has two blocks an SM and does
not read V4's caches. With 16 heads rows in turn, and two blocks of four warps, were slower. The last three are for 64
heads: one for V3.2 without a second cache, two for other calls, the first of which needs more shared memory than the
99 KiB of SM86."""


ALONE = (
    Variant(tiles=1, blocks=1, held=8, stages=4, producers=4, eager=True),
    Variant(tiles=2, blocks=1, held=8, stages=4, producers=4, eager=True),
)
"""For SM90, where a call gives no SM more than one block."""


@functools.cache
def possible_variants(heads: int, layout: str, facts: DeviceFacts, *, has_extra: bool = False) -> Mapping[Variant, int]:
    """Those that calls with this many query heads may use on a device, in ascending order of their heads (on SM90 first
    those of blocks that have an SM alone), and the shared memory of a block in bytes."""
    hopper = facts.architecture == HOPPER
    possible: dict[Variant, int] = {}
    for known in (ALONE, VARIANTS) if hopper else (PORTABLE_VARIANTS,):
        taking = [one for one in known if one.takes(layout, has_extra=has_extra)]
        fitting = [one for one in taking if one.shared_bytes(layout) <= facts.shared_memory]
        first = {one.heads: one for one in reversed(fitting)}  # of those with the same heads
        possible |= {one: one.shared_bytes(layout) for one in up_to(heads, [*reversed(first.values())])}
    return possible


def definitions(
    layout: str, facts: DeviceFacts, *, has_extra: bool = False, is_flat: bool = False, out_float32: bool = False
) -> dict[str, int]:
    """What the source's preprocessor needs to know besides the variant.

    Args:
        layout: of the caches.
        facts: of the device.
        has_extra: there is a second cache.
        is_flat: pages and their records follow each other without a gap (V3.2 only).
        out_float32: the output is float32, not bfloat16.
    """
    return {
        "LAYOUT": int(layout == V4_FP8.name),
        "OUT_FLOAT32": int(out_float32),
        "HAS_EXTRA": int(has_extra),
        "FLAT": int(is_flat),
        "HOPPER": int(facts.architecture == HOPPER),
        "NATIVE_FP8": int(facts.native_fp8),
    }


def load(variant: Variant, layout: str, defines: Mapping[str, int], device: int | None) -> None:
    """Compile a variant that `attend` is called with, unless it is, on torch's current device.

    Args:
        defines: `definitions`, and GATE if it has one.

    Raises:
        KernelBuildError: it does not compile.
    """
    kernels(SOURCE, "attend", ((variant, variant.shared_bytes(layout)),), tuple(defines.items()), device)


def attend(
    call: SparseMlaCall,
    *,
    splits: int | None = None,
    variant: Variant | None = None,
    gate: torch.Tensor | None = None,
    result: SparseMlaResult | None = None,
) -> SparseMlaResult:
    """Attend with the CUDA kernel, within the module's limits.

    Args:
        splits: shares of a token's entries that are attended apart and then added up.
        variant: of the kernel. None for either: `choose_variant`.
        gate: [1] int32 on the device, from `sparse_mla_neighbours` or `sparse_mla_copy`: attend, in one share, only if
            it is negative.
        result: to write; None: a new one.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: the kernel does not compile or launch.
    """
    check_queries(call)
    layout = call.scopes[0].cache.layout
    scopes = [cuda_scope(call, scope, layout) for scope in call.scopes]
    launch = prepare(call, result=result)
    if not call.q.numel():
        return launch.result
    first, second = scopes if len(scopes) == 2 else (scopes[0], CudaScope(lengths_divisor=1, page_size=1))
    has_extra = second.topk > 0
    variants = possible_variants(call.heads, layout.name, launch.facts, has_extra=has_extra)
    if variant is not None:
        variants = {variant: variant.shared_bytes(layout.name)}
    defines = definitions(
        layout.name,
        launch.facts,
        has_extra=has_extra,
        is_flat=all(scope.is_flat for scope in scopes),
        out_float32=launch.out.dtype == torch.float32,
    )
    if gate is not None:
        defines["GATE"], splits = IF_NEGATIVE, 1
    return attend_in_shares(
        call,
        launch,
        (first, second, nothings(call.q.device, layout.name)),
        kernel=(SOURCE, "attend"),
        variants=variants,
        defines=defines,
        topk=first.topk + second.topk,
        splits=splits,
        gate=gate,
    )


prefill, decode = prefill_op(attend), decode_op(attend)
