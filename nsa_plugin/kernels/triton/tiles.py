"""The table of tiles, pipeline stages and warps of the plugin's Triton kernels, by GPU architecture.

Every launcher reads it. Kernels with matrix products hold their tiles in shared memory, so their entries depend on the
architecture: a block may have 227 KiB on SM90 and SM100, 163 KiB on SM80 and 99 KiB on SM86, SM89 and SM120. Kernels
without a product (`STREAMS`) keep nothing there and have the same sizes everywhere.

The records of an H200 were measured with SM90's entries. The other lines were not tuned on their GPUs; the indexer's
tiles were, on an H100 that emulated SM86 and SM89. The tests compile every entry for its architecture and check its
shared memory and registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nsa_plugin.libraries.architectures import FIRST_WITH_FP8, SHARED_MEMORY_PER_BLOCK

SHARED_RESERVE = 8 << 10
"""Bytes of shared memory of a dense-attention block that are left to the compiler."""


FLOAT32_OPERANDS = 80 << 10
"""Bytes of the operands of a float32 block at most: they stay in registers, and more spill kilobytes a thread."""


class SparseTile(NamedTuple):
    """Sparse MLA: heads, selected keys at a time, warps, stages of the loop; and programs a processor."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


class MhaTile(NamedTuple):
    """Dense attention: query rows and keys that a program holds at a time, its warps and the stages of its loop."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, d_qk: int, d_v: int, itemsize: int) -> int:
        """Shared memory of a program at least: its queries, and keys and values of each stage."""
        return itemsize * (self.block_m * d_qk + self.num_stages * self.block_n * (d_qk + d_v))


class LogitsTile(NamedTuple):
    """The indexer's logits: (query row, head) pairs and keys of a program's product, its warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class ArchitectureTiles(NamedTuple):
    """One line of the table.

    Attributes:
        sparse_mla: by rising `block_h`; the first that holds all heads is taken, or the last.
        mha: 16-bit inputs; the first that fits the shared memory with the heads' widths is taken.
        mha_short: the same for at most `SHORT_QUERIES` query rows a request.
        mha_float32: the same for float32. Its products have no tensor cores and keep operands in registers.
        logits: the indexer's, of ragged keys.
        paged_logits: the same of a decode step, from the paged cache.
    """

    sparse_mla: tuple[SparseTile, ...]
    mha: tuple[MhaTile, ...]
    mha_short: tuple[MhaTile, ...]
    mha_float32: tuple[MhaTile, ...]
    logits: LogitsTile
    paged_logits: LogitsTile


# 16 heads: two programs in the registers of a processor. 64 heads fill the rows of SM90's warpgroup products.
_SPARSE_16, _SPARSE_32, _SPARSE_64 = (
    SparseTile(16, 32, 4, 2, 2),
    SparseTile(32, 32, 8, 2, 1),
    SparseTile(64, 64, 8, 2, 1),
)
_MHA_99_KIB = (MhaTile(128, 64, 8, 2), MhaTile(128, 32, 8, 2), MhaTile(64, 32, 4, 2), MhaTile(32, 32, 4, 1))
_MHA_SHORT = (MhaTile(64, 64, 4, 3), MhaTile(64, 64, 4, 2), MhaTile(64, 32, 4, 2), MhaTile(32, 32, 4, 1))

_PORTABLE = ArchitectureTiles(
    sparse_mla=(_SPARSE_16, _SPARSE_32),
    mha=(MhaTile(128, 64, 8, 3), *_MHA_99_KIB),
    mha_short=_MHA_SHORT,
    mha_float32=(MhaTile(32, 32, 4, 1), MhaTile(16, 16, 4, 1)),
    logits=LogitsTile(128, 128, 8, 3),
    paged_logits=LogitsTile(128, 128, 8, 3),
)
# Products by warps and not by warpgroups: 64 x 64 of a product a warp, so that shared memory does not limit it. Without
# fp8 instructions each warp converts the codes of the paged cache that it multiplies, which four warps share better.
_WITHOUT_FP8 = _PORTABLE._replace(logits=LogitsTile(64, 128, 2, 2), paged_logits=LogitsTile(64, 128, 4, 2))
_FP8_BY_WARPS = _PORTABLE._replace(logits=LogitsTile(64, 128, 2, 3), paged_logits=LogitsTile(64, 128, 2, 2))
_SM90 = _PORTABLE._replace(sparse_mla=(_SPARSE_16, _SPARSE_32, _SPARSE_64))


def _line(sm: int) -> ArchitectureTiles:
    if sm < FIRST_WITH_FP8:
        return _WITHOUT_FP8
    return {90: _SM90, 100: _PORTABLE, 103: _PORTABLE, 110: _PORTABLE}.get(sm, _FP8_BY_WARPS)


TILES: Mapping[int, ArchitectureTiles] = MappingProxyType({sm: _line(sm) for sm in SHARED_MEMORY_PER_BLOCK})
"""By SM version."""

SHORT_QUERIES = 64


def tiles_of(architecture: int) -> ArchitectureTiles:
    """The line of an SM version; one that is not in the table, and Triton's interpreter (0), get the smallest."""
    return _line(architecture)


def sparse_tile(architecture: int, heads: int) -> SparseTile:
    """The tile of sparse MLA for a number of query heads."""
    tiles = tiles_of(architecture).sparse_mla
    return next((tile for tile in tiles if heads <= tile.block_h), tiles[-1])


def mha_tile(
    architecture: int, shared_memory: int, d_qk: int, d_v: int, itemsize: int, max_seqlen_q: int | None
) -> MhaTile:
    """The tile of dense attention for heads of these (padded) widths.

    Args:
        shared_memory: bytes that a block may request.
        itemsize: bytes of an input element.
        max_seqlen_q: query rows of the longest request; None = unknown, taken to be long.
    """
    line = tiles_of(architecture)
    is_short = max_seqlen_q is not None and max_seqlen_q <= SHORT_QUERIES
    tiles = line.mha_float32 if itemsize == 4 else line.mha_short if is_short else line.mha
    room = shared_memory - SHARED_RESERVE
    room = min(room, FLOAT32_OPERANDS) if itemsize == 4 else room
    return next((tile for tile in tiles if tile.shared_bytes(d_qk, d_v, itemsize) <= room), tiles[-1])


class Stream(NamedTuple):
    """A kernel without a product: elements of a program along a row, rows of a program, and warps."""

    block: int
    rows: int = 1
    num_warps: int = 4


STREAMS: Mapping[str, Stream] = MappingProxyType(
    {
        "combine": Stream(32),  # parts of a split row of sparse MLA at most; a power of two
        "topk": Stream(2048, num_warps=8),
        "indexer_metadata": Stream(64, num_warps=8),
        "index_transform": Stream(2048),  # a row of 2048 is one program
        "compact": Stream(1024),
        "sparse_mla_indices": Stream(1024),
        "swa_indices": Stream(1024, rows=8),
        "v4_prefill": Stream(1024),
        "v4_page_map": Stream(256),
        "kv_cache_plain": Stream(64, rows=32),
        # 16 rows of 512 values are 64 values a thread, enough loads in flight to reach HBM speed.
        "kv_cache_records": Stream(512, rows=16),
        "kv_cache_few_records": Stream(512, rows=2),
        # Words of the head/token all-to-all: 8 KiB of int64. A thread then has four loads of 16 bytes in flight.
        "transpose": Stream(1024),
    }
)
"""By kernel; the same on every architecture."""
