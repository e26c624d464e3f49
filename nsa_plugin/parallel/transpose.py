"""Blocks of two leading dimensions swapped: between the order of a kernel and the order of an exchange.

    [W, n, h, d]  received: each rank's heads of my rows   ->  [n, W, h, d], that is [n, W * h, d]
    [n, W, h, d]  attended: my rows with every head        ->  [W, n, h, d], as it is sent back

Both are `swap_leading`: dst[b, a] = src[a, b] for blocks of h * d elements. Values are moved as they are, NaN included.
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.checks import check_tensor

ITEM_SIZES = (1, 2, 4)


def swap_leading(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """dst, with dst[b, a] = src[a, b]; one launch on a GPU, nothing allocated, no wait.

    Args:
        src: [A, B, h, d] of 1, 2 or 4 bytes an element. On a GPU a block is copied in wide words where src[a, b] is
            contiguous, whatever the strides of A and B; else by PyTorch.
        dst: [B, A, h, d] of src's dtype and device; must not overlap src.

    Raises:
        KernelArgumentError: shapes, dtypes or devices do not go together.
    """
    check_tensor("swap_leading", "src", src, ("A", "B", "h", "d"), dtypes=(dst.dtype,), device=dst.device)
    first, second, heads, dim = src.shape
    check_tensor("swap_leading", "dst", dst, (second, first, heads, dim), dtypes=(src.dtype,))
    if src.numel() == 0:
        return dst
    dense = all(tensor.stride(3) == 1 and tensor.stride(2) == dim for tensor in (src, dst))
    if src.is_cuda and dense and src.element_size() in ITEM_SIZES:
        from nsa_plugin.parallel.transpose_triton import swap_blocks

        return swap_blocks(src, dst)
    return dst.copy_(src.transpose(0, 1))
