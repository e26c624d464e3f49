"""Sparse MLA over paged bfloat16 rows of 576 values, in CUDA C++ (`sparse_mla_rows.cu`).

Ops `sparse_mla_prefill` and `sparse_mla_decode`; contract: `nsa_plugin.kernels.sparse_mla`. On SM90 the kernel copies
rows in bulk and adds up a row's shares in a cluster of blocks; on SM80 to SM89 and SM120 it needs neither. It takes
bfloat16 queries with heads of (576, 512) elements and one cache. It gathers the selected rows once for every group of
heads, where FlashMLA pads to 64 heads and FA3 looks rows up one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    HOPPER,
    NOTHINGS,
    CudaScope,
    FewHeadsVariant,
    attend_in_shares,
    check_queries,
    only_scope,
    paged_scope,
    prepare,
    up_to,
)
from nsa_plugin.kernels.sparse_mla import Scope, SparseMlaCall, SparseMlaResult
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import BF16

SOURCE = "sparse_mla_rows.cu"
DIM = 576
ROW_BYTES = BF16.row_bytes(DIM)
ROW_STRIDE = ROW_BYTES + 16  # in shared memory, at most: swizzled rows have no gap
UNIT = 16  # rows of a stage, where a block attends query rows in turn


@dataclass(frozen=True, kw_only=True)
class RowsVariant(FewHeadsVariant):
    """A compiled form of the kernel.

    Attributes:
        teams: of the warps that multiply: each has `tiles` of its own, and while one exponentiates, another multiplies.
        value_parts: of a row in Q K^T; a warp takes one.
        head_parts: in Q K^T, 1: a warp takes all heads of its team; 2: half of them.
        sums: of Q K^T in shared memory: one for each of the parts of a row's values, or for two.
    """

    teams: int = 1
    value_parts: int = 4
    head_parts: int = 1
    sums: int = 4

    @property
    def heads(self) -> int:
        """Heads of a query row that a block takes."""
        return super().heads * self.teams

    @property
    def definitions(self) -> dict[str, int]:
        """Of the source's preprocessor."""
        parts = {"VALUE_PARTS": self.value_parts, "HEAD_PARTS": self.head_parts}
        return super().definitions | parts | {"TEAMS": self.teams, "SUMS": self.sums}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in bytes: at least what `Shared` of the source has."""
        of_stage = UNIT if self.in_turn else self.keys
        parts = (
            self.stages * of_stage * ROW_STRIDE,
            self.sums * self.heads * (self.keys + 4) * 4,  # S
            self.heads * (self.keys + 8) * 2,  # P
            self.heads * 4,  # changes of the output
            2 * self.keys * 8,  # addresses of rows and of zero rows
            self.stages * (2 * 8 + 4 * self.in_turn + of_stage),  # barriers, whether a row ends, and validity
            self.warps * 4 + 8,  # a number a warp, and the query's barrier
            128,  # alignment
        )
        return sum(parts)


VARIANTS = tuple(RowsVariant(tiles=tiles, blocks=1, producers=4, eager=True) for tiles in (1, 2, 4))
PORTABLE_VARIANTS = (
    RowsVariant(tiles=1, keys=32, blocks=1, stages=8, producers=2, in_turn=True),
    RowsVariant(tiles=1, keys=32, blocks=1, stages=5, producers=2, in_turn=True),
    RowsVariant(tiles=2, keys=32, blocks=1, stages=8, producers=2, in_turn=True, value_parts=2, head_parts=2, sums=2),
    RowsVariant(tiles=2, keys=32, blocks=1, stages=5, producers=2, in_turn=True, value_parts=2, head_parts=2, sums=2),
    RowsVariant(tiles=4, keys=32, blocks=1),
    RowsVariant(tiles=4, keys=32, blocks=1, stages=2, teams=2, sums=2),
)
"""For other GPUs than SM90, one block an SM. With 32 heads two teams were slower than one. Eight stages need more
shared memory than the 99 KiB of SM86."""


@functools.cache
def possible_variants(heads: int, facts: DeviceFacts) -> Mapping[RowsVariant, int]:
    """Those that calls with this many query heads may use on a device, in ascending order of their heads;
    and the shared memory of a block in bytes."""
    known = VARIANTS if facts.architecture == HOPPER else PORTABLE_VARIANTS
    # Of those with the same heads the first that fits.
    fitting = {one.heads: one for one in reversed(known) if one.shared_bytes <= facts.shared_memory}
    return {one: one.shared_bytes for one in up_to(heads, [*reversed(fitting.values())])}


def attend(call: SparseMlaCall, *, splits: int | None = None, variant: RowsVariant | None = None) -> SparseMlaResult:
    """Attend bfloat16 rows with the CUDA kernel, within the module's limits.

    Args:
        splits: shares of a token's entries that are attended apart and then added up.
        variant: of the kernel. None for either: `choose_variant`.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: the kernel does not compile or launch.
    """
    check_queries(call)
    scope = row_scope(call, only_scope(call))
    launch = prepare(call)
    if not call.q.numel():
        return launch.result
    variants = possible_variants(call.heads, launch.facts) if variant is None else {variant: variant.shared_bytes}
    return attend_in_shares(
        call,
        launch,
        (scope, zeros(call.q.device)),
        kernel=(SOURCE, "attend_rows"),
        variants=variants,
        defines=definitions(launch.facts, is_flat=scope.is_flat, out_float32=launch.out.dtype == torch.float32),
        topk=scope.topk,
        splits=splits,
    )


def row_scope(call: SparseMlaCall, given: Scope) -> CudaScope:
    """The kernel's view of one cache of rows and its entries, checked against what it can read."""
    name, cache = given.name, given.cache
    what = f"layout {cache.layout.name} of {cache.data.dtype} in rows of {cache.dim}"
    readable = cache.layout is BF16 and cache.data.dtype == torch.bfloat16 and cache.dim == DIM
    call.require(readable, f"{name} has {what}; this kernel reads {BF16.name} in rows of {DIM}")
    _, row, value = cache.data.stride()
    dense = value == 1 and (cache.page_size == 1 or row == DIM)
    call.require(dense, f"{name} has strides {cache.data.stride()}; this kernel reads pages of rows without gaps")
    return paged_scope(call, given, ROW_BYTES)


def definitions(facts: DeviceFacts, *, is_flat: bool = False, out_float32: bool = False) -> dict[str, int]:
    """What the source's preprocessor needs to know besides the variant.

    Args:
        facts: of the device.
        is_flat: pages follow each other without a gap.
        out_float32: the output is float32, not bfloat16.
    """
    return {"OUT_FLOAT32": int(out_float32), "FLAT": int(is_flat), "HOPPER": int(facts.architecture == HOPPER)}


@functools.cache
def zeros(device: torch.device) -> torch.Tensor:
    """The rows that stand for entries which do not count."""
    return torch.zeros((NOTHINGS, DIM), dtype=torch.bfloat16, device=device)
