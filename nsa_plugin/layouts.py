"""KV-cache byte layouts as data: where each token's values and scales lie in a page.

A cache is a sequence of pages of `page_size` tokens. Token `slot` is in page `slot // page_size` at position
`slot % page_size`. There are two kinds:

- plain rows (`bf16`): `dim` values of one float type per token;
- quantised records (`v32_fp8`, `v4_fp8`, `indexer_fp8`): fp8 values with a scale per tile. The attention caches add a
  bfloat16 tail, the RoPE part, which is not quantised.

The scales of a record are either inside the token's row (V3.2) or in a second array after the rows of the page
("page-SOA": V4 and the indexer):

    v32_fp8      656 B a token   [512 fp8][4 float32][64 bf16]
    v4_fp8       584 B a token   page: [page_size x (448 fp8, 64 bf16)][page_size x (7 ue8m0, 1 pad)][pad]
    indexer_fp8  132 B a token   page: [page_size x 128 fp8][page_size x 1 float32]

A V4 page is padded to a multiple of 576 bytes, the row stride of FlashMLA's tensor maps.

To add a layout, describe it here with its model families and add it to `LAYOUTS`. `FAMILY_LAYOUTS`, the reference's
reader and writer, and the entries of the manifest that read every layout follow.

Sources: FlashMLA `csrc/kernels/kv_cache_format.h` and `tests/quant.py`; SGLang
`kernels/ops/attention/{dsa,dsv4}/{quant_k_cache,index_buf_accessor}.py`; vLLM `csrc/cache_kernels.cu`
(`concat_and_cache_ds_mla`, `indexer_k_quant_and_cache`) and `models/deepseek_v4*/common/ops/cache_utils.py`.

This module imports no torch: decisions and the command line read it without.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nsa_plugin.errors import NsaPluginError

FP8_E4M3_MAX = 448.0
FLOAT32_TINY = 2.0**-126


class LayoutError(NsaPluginError, ValueError):
    """No layout has that name, or a page size, slot or scale is out of range."""


class ScaleFormat(StrEnum):
    """How a tile's scale is stored."""

    FLOAT32 = "float32"  # 4 bytes, any positive value
    UE8M0 = "ue8m0"  # 1 byte, the biased exponent of a power of two: scale = 2 ** (byte - 127)


@dataclass(frozen=True, kw_only=True)
class PlainLayout:
    """One row of floats per token.

    Attributes:
        name: the value of `layout` that selects it.
        families: model families whose attention cache may have it.
        dims: row widths in values that DeepSeek models use: 576 (V3.2), 512 (V4). Others are allowed.
        value_bytes: bytes of a value, unless the caller gives another float type.
    """

    name: str
    families: tuple[str, ...] = ()
    dims: tuple[int, ...]
    value_bytes: int

    @property
    def is_fp8(self) -> bool:
        return False

    def row_bytes(self, dim: int, value_bytes: int | None = None) -> int:
        """Bytes of a token's row of `dim` values."""
        if dim < 1:
            raise LayoutError(f"layout {self.name}: dim is {dim}; a row has at least 1 value")
        return dim * (self.value_bytes if value_bytes is None else value_bytes)

    def page_bytes(self, page_size: int, dim: int, value_bytes: int | None = None) -> int:
        """Bytes from the start of a page to the start of the next."""
        _check_page_size(self.name, page_size)
        return page_size * self.row_bytes(dim, value_bytes)


@dataclass(frozen=True, kw_only=True)
class Fp8Layout:
    """One record per token: fp8 values with tile scales and, in attention caches, a bfloat16 tail.

    Attributes:
        name: the value of `layout` that selects it.
        families: model families whose attention cache may have it; empty for an indexer's key cache.
        fp8_dim: values stored as float8_e4m3 (the NoPE part, or the indexer's key).
        bf16_dim: values stored as bfloat16 after them (the RoPE part); 0 for the indexer.
        tile: consecutive fp8 values that share a scale.
        scale_format: how a scale is stored.
        scale_slot_bytes: bytes reserved for a token's scales, including padding.
        scales_after_page: the scales of a page follow all of its rows (page-SOA). Otherwise a token's scales are in
            its row, between the fp8 values and the bfloat16 tail.
        page_alignment: a page's size in bytes is rounded up to a multiple of this.
        amax_floor: lower bound of a tile's largest magnitude when it is written, so that a tile of zeros has a
            finite scale. Readers do not use it.
    """

    name: str
    families: tuple[str, ...] = ()
    fp8_dim: int
    bf16_dim: int
    tile: int
    scale_format: ScaleFormat
    scale_slot_bytes: int
    scales_after_page: bool
    page_alignment: int
    amax_floor: float

    @property
    def is_fp8(self) -> bool:
        return True

    @property
    def dim(self) -> int:
        """Values of a token after dequantisation."""
        return self.fp8_dim + self.bf16_dim

    @property
    def num_scales(self) -> int:
        return self.fp8_dim // self.tile

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return 4 if self.scale_format is ScaleFormat.FLOAT32 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, including scales and excluding page padding: 656, 584 or 132."""
        return self.fp8_dim + 2 * self.bf16_dim + self.scale_slot_bytes

    @property
    def data_stride(self) -> int:
        """Bytes from one token to the next in a page's first array: 656, 576 or 128."""
        return self.row_bytes - (self.scale_slot_bytes if self.scales_after_page else 0)

    @property
    def tail_start(self) -> int:
        """Offset of the bfloat16 tail in a token's row."""
        return self.fp8_dim + (0 if self.scales_after_page else self.scale_slot_bytes)

    def page_bytes(self, page_size: int) -> int:
        """Bytes from the start of a page to the start of the next, including padding."""
        _check_page_size(self.name, page_size)
        return -(-page_size * self.row_bytes // self.page_alignment) * self.page_alignment


CacheLayout = PlainLayout | Fp8Layout

BF16 = PlainLayout(name="bf16", families=("v3.2", "v4"), dims=(576, 512), value_bytes=2)

V32_FP8 = Fp8Layout(
    name="v32_fp8",
    families=("v3.2",),
    fp8_dim=512,
    bf16_dim=64,
    tile=128,
    scale_format=ScaleFormat.FLOAT32,
    scale_slot_bytes=16,
    scales_after_page=False,
    page_alignment=1,
    amax_floor=FP8_E4M3_MAX * FLOAT32_TINY,
)

V4_FP8 = Fp8Layout(
    name="v4_fp8",
    families=("v4",),
    fp8_dim=448,
    bf16_dim=64,
    tile=64,
    scale_format=ScaleFormat.UE8M0,
    scale_slot_bytes=8,
    scales_after_page=True,
    page_alignment=576,
    amax_floor=1e-4,
)

INDEXER_FP8 = Fp8Layout(
    name="indexer_fp8",
    fp8_dim=128,
    bf16_dim=0,
    tile=128,
    scale_format=ScaleFormat.FLOAT32,
    scale_slot_bytes=4,
    scales_after_page=True,
    page_alignment=1,
    amax_floor=1e-4,
)

LAYOUTS: dict[str, CacheLayout] = {layout.name: layout for layout in (BF16, V32_FP8, V4_FP8)}
"""Layouts of an attention KV cache, by name."""

FAMILY_LAYOUTS: dict[str, tuple[str, ...]] = {
    family: tuple(layout.name for layout in LAYOUTS.values() if family in layout.families)
    for family in dict.fromkeys(family for layout in LAYOUTS.values() for family in layout.families)
}
"""Names of the layouts that each model family's attention cache may have."""

INDEXER_LAYOUTS: dict[str, Fp8Layout] = {INDEXER_FP8.name: INDEXER_FP8}
"""Layouts of an indexer's key cache, by name."""


def get_layout(name: str) -> CacheLayout:
    """The layout of that name, of an attention cache or an indexer's key cache.

    Raises:
        LayoutError: no layout has that name; the message lists the known ones.
    """
    every: dict[str, CacheLayout] = {**LAYOUTS, **INDEXER_LAYOUTS}
    if name not in every:
        raise LayoutError(f"layout is {name!r}; allowed: {', '.join(every)}")
    return every[name]


def _check_page_size(name: str, page_size: int) -> None:
    if page_size < 1:
        raise LayoutError(f"layout {name}: page_size is {page_size}; a page holds at least 1 token")
