"""The transpose, interpreted where there is no GPU, against torch."""

from itertools import product

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.parallel.transpose import swap_leading
from nsa_plugin.parallel.transpose_triton import swap_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    (2, 5, 2, 8),  # heads, dim: a block of whole 8-byte words
    (4, 1, 1, 3),  # an odd number of elements
    (1, 6, 3, 10),
    (3, 37, 2, 72),
    (2, 3, 16, 576),  # several programs a block, the last one partly
]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, NaNs with payloads among them."""
    made = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=made).view(dtype).to(DEVICE)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("swap", [swap_blocks, swap_leading])
@pytest.mark.parametrize(
    ("shape", "dtype"), list(product(SHAPES, [torch.bfloat16, torch.float16, torch.float32, torch.int32]))
)
def test_moves_every_bit(swap, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    src = bits(shape, dtype, 0)
    dst = bits((shape[1], shape[0], *shape[2:]), dtype, 1)
    assert swap(src, dst) is dst
    assert same_bits(dst, src.transpose(0, 1))
    back = bits(shape, dtype, 2)
    swap(dst, back)
    assert same_bits(back, src)


@pytest.mark.parametrize("swap", [swap_blocks, swap_leading])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_reads_and_writes_views_and_nothing_around_them(swap, offset: int) -> None:
    """Rows of a padded output: some heads of a wider tensor, from an odd element on."""
    count, ranks, heads, dim = 5, 2, 3, 8
    wide = bits((count * 10 * dim + offset,), torch.bfloat16, 0)
    src = wide[offset:].view(count, 10, dim)[:, : ranks * heads].unflatten(1, (ranks, heads))
    buffer = bits((ranks * count * heads * dim + 2 * offset,), torch.bfloat16, 1)
    before = buffer.clone()
    dst = buffer[offset : offset + src.numel()].view(ranks, count, heads, dim)
    swap(src, dst)
    assert same_bits(dst, src.transpose(0, 1))
    assert same_bits(buffer[:offset], before[:offset])
    assert same_bits(buffer[offset + src.numel() :], before[offset + src.numel() :])


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4)])
def test_nothing_to_move(shape: tuple[int, int, int, int]) -> None:
    dst = torch.empty(shape[1], shape[0], *shape[2:], device=DEVICE)
    assert swap_leading(torch.empty(shape, device=DEVICE), dst) is dst


def test_heads_with_gaps_are_moved_too() -> None:
    src = bits((2, 3, 4, 6), torch.float32, 0).transpose(2, 3)
    dst = torch.empty(3, 2, 6, 4, device=DEVICE)
    assert same_bits(swap_leading(src, dst), src.transpose(0, 1))


@pytest.mark.parametrize(
    ("dst", "reason"),
    [
        (torch.empty(2, 3, 4, 5), "dst has shape"),
        (torch.empty(3, 2, 4, 5, dtype=torch.float64), "src has dtype"),
        (torch.empty(3, 2, 20), "dst has shape"),
    ],
)
def test_errors_name_the_wrong_argument(dst: torch.Tensor, reason: str) -> None:
    with pytest.raises(KernelArgumentError, match=reason):
        swap_leading(torch.empty(2, 3, 4, 5), dst)
