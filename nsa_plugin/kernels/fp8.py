"""Float8 (e4m3) tile quantisation, shared by the cache writers and the indexer.

A tile of consecutive values shares a scale: `scale = max(amax, floor) / 448`, optionally rounded up
to a power of two ("ue8m0": the scale is an exponent), and `code = fp8(value / scale)`. 448 is the
largest finite e4m3 value, so that the tile's largest magnitude maps onto it and nothing overflows.

Source: DeepSeek-V3.2-Exp `inference/kernel.py` (`act_quant`); FlashMLA `tests/quant.py`.
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.checks import FP8_DTYPE
from nsa_plugin.layouts import FP8_E4M3_MAX

FLOAT32_MANTISSA_BITS = 23
FLOAT32_MANTISSA_MASK = (1 << FLOAT32_MANTISSA_BITS) - 1


def quantize_tiles(
    values: torch.Tensor, tile: int, *, amax_floor: float, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension in tiles.

    Args:
        values: [..., dim], any float dtype; dim is a multiple of `tile`.
        tile: values that share a scale.
        amax_floor: least magnitude that a tile is taken to have.
        power_of_two: round scales up to a power of two.

    Returns:
        codes [..., dim] float8_e4m3fn and scales [..., dim / tile] float32; `codes * scales` is the value.
    """
    tiles = values.float().unflatten(-1, (values.shape[-1] // tile, tile))
    scales = tiles.abs().amax(-1).clamp(min=amax_floor) / FP8_E4M3_MAX
    if power_of_two:
        scales = exponents_to_scales(ceil_exponents(scales))
    # No quotient exceeds 448 by more than a rounding of float32, which e4m3 rounds away.
    codes = (tiles / scales.unsqueeze(-1)).to(FP8_DTYPE)
    return codes.flatten(-2), scales


def dequantize_tiles(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`codes * scales` in float32: codes [..., dim] float8, scales [..., tiles] float32 -> [..., dim]."""
    tiles = codes.float().unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    return (tiles * scales.unsqueeze(-1)).flatten(-2)


def ceil_exponents(scales: torch.Tensor) -> torch.Tensor:
    """ue8m0 bytes (uint8) of the least powers of two that are not below positive normal float32 `scales`."""
    # Read from the bits: log2 in float32 lands on the wrong side of an integer next to a power of two.
    bits = scales.contiguous().view(torch.int32)
    exponents = (bits >> FLOAT32_MANTISSA_BITS) + ((bits & FLOAT32_MANTISSA_MASK) != 0)
    return exponents.clamp(max=255).to(torch.uint8)


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """float32 `2 ** (byte - 127)` of ue8m0 bytes (uint8); byte 255 is NaN."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()
