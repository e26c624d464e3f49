"""The Triton kernel of `swap_leading`: a copy of blocks, in the widest words that divide them."""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS

WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
MAX_BLOCK = STREAMS["transpose"].block  # words a program


def swap_blocks(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """`swap_leading` for blocks src[a, b] and dst[b, a] that are contiguous and not empty."""
    first, second, heads, dim = src.shape
    size = src.element_size()
    # In bytes: a block, and from one to the next in both tensors.
    nbytes = heads * dim * size
    strides = [size * stride for tensor in (src, dst) for stride in tensor.stride()[:2]]
    places = [src.storage_offset() * size, dst.storage_offset() * size]
    word = next(word for word in WORDS if all(n % word.itemsize == 0 for n in (nbytes, *strides, *places)))
    words = nbytes // word.itemsize
    block = min(MAX_BLOCK, power_of_2(words))
    with torch.cuda.device_of(src):
        # Grid dimensions but the first end at 65535.
        _swap_blocks[(first * second, ceil_div(words, block))](
            _in_words(src, word), _in_words(dst, word), second, words, *(stride // word.itemsize for stride in strides),
            BLOCK=block,
        )  # fmt: skip
    return dst


def _in_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """The elements from the tensor's first to its last as words, which are no smaller than one."""
    used = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((used,), (1,)).view(word)


@triton.jit(do_not_specialize=["second"])
def _swap_blocks(
    src_ptr, dst_ptr, second, words, src_first_stride, src_second_stride, dst_second_stride, dst_first_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    a, b = pair // second, pair % second
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    values = tl.load(src_ptr + a * src_first_stride + b * src_second_stride + word, mask=inside)
    tl.store(dst_ptr + b * dst_second_stride + a * dst_first_stride + word, values, mask=inside)
