"""Cases of the index kernels, shared by the interpreted tests and the GPU's.

Each check draws a case from a seed, runs the Triton kernel on `device` and the reference on the CPU, and
compares every entry. Tensors are padded, strided and expanded as engines hand them over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa_plugin.kernels import index_transform as transform
from nsa_plugin.kernels import swa_indices as swa
from nsa_plugin.kernels.triton import index_transform as transform_kernels
from nsa_plugin.kernels.triton import swa_indices as swa_kernels

from .oracles import INT_MAX, INT_MIN

BAD = (INT_MIN, -123456, -1, INT_MAX)


@dataclass
class Draw:
    """Random tensors of one case, on the CPU; `to` brings one to the device in some form."""

    seed: int
    device: str

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Uniform in [low, high), int32 or int64 by the seed."""
        dtype = torch.int32 if self.seed % 2 else torch.int64
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator).to(dtype)

    def positions(self, rows: int, topk: int, end: int) -> torch.Tensor:
        """Positions around [0, end), a fifth of them extreme."""
        values = self.integers(-3, end + 4, rows, topk)
        bad = torch.tensor(BAD, dtype=values.dtype)[torch.randint(len(BAD), (rows, topk), generator=self.generator)]
        return torch.where(torch.rand(rows, topk, generator=self.generator) < 0.2, bad, values)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, for odd seeds behind strides that are not the dense ones, with junk in between."""
        if self.seed % 2 == 0:
            return tensor.to(self.device)
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 77, dtype=tensor.dtype, device=self.device)
        wide[..., 1::2] = tensor.to(self.device)
        return wide[..., 1::2]


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.cpu(), expected)


def check_paged(seed: int, rows: int, topk: int, requests: int, pages: int, page_size: int, device: str) -> None:
    """With and without lengths and row_to_request, unassigned pages."""
    draw = Draw(seed, device)
    indices = draw.positions(rows, topk, pages * page_size)
    expanded = seed % 3 == 0
    table = draw.integers(-1, 10000, rows if expanded else requests, pages)
    of_row = None if expanded else draw.integers(-1, requests, rows)
    lengths = None if seed % 5 == 0 else draw.integers(-2, pages * page_size + 2, rows)
    expected = transform.reference_paged(indices, table, page_size=page_size, row_to_request=of_row, lengths=lengths)
    given = {
        "page_size": page_size,
        "row_to_request": None if of_row is None else draw.to(of_row),
        "lengths": None if lengths is None else draw.to(lengths),
    }
    same(transform_kernels.paged(draw.to(indices), draw.to(table), **given), expected)
    into = torch.full(expected.shape, 123456, dtype=torch.int32, device=device)
    assert transform_kernels.paged(draw.to(indices), draw.to(table), **given, out=into) is into
    same(into, expected)
    if rows and requests and not expanded:
        # One table row for all, as a view that repeats it.
        repeated = table[:1].expand(rows, pages)
        expected = transform.reference_paged(indices, repeated, page_size=page_size)
        same(
            transform_kernels.paged(draw.to(indices), draw.to(table)[:1].expand(rows, pages), page_size=page_size),
            expected,
        )
        # A request that the table lacks is an error of the reference and a padded row on the device.
        assert of_row is not None
        missing = transform.reference_paged(
            indices, table, page_size=page_size, row_to_request=torch.full_like(of_row, -1)
        )
        beyond = draw.to(torch.full_like(of_row, requests))
        same(
            transform_kernels.paged(draw.to(indices), draw.to(table), page_size=page_size, row_to_request=beyond),
            missing,
        )


def check_ragged(seed: int, rows: int, topk: int, device: str) -> None:
    draw = Draw(seed, device)
    indices = draw.positions(rows, topk, 5000).clamp(max=INT_MAX - 100000)
    offsets = draw.integers(0, 100000, rows)
    lengths = None if seed % 3 == 0 else draw.integers(-2, 5000, rows)
    expected = transform.reference_ragged(indices, offsets, lengths=lengths)
    moved_lengths = None if lengths is None else draw.to(lengths)
    same(transform_kernels.ragged(draw.to(indices), draw.to(offsets), lengths=moved_lengths), expected)


def check_window(seed: int, requests: int, window: int, padding: int, device: str, most: int = 7) -> None:
    """Ragged requests, some without queries or context."""
    draw = Draw(seed, device)
    counts = draw.integers(0, most, requests)
    contexts = counts + draw.integers(0, 3 * window, requests)
    cu_seqlens = torch.zeros(requests + 1, dtype=counts.dtype)
    cu_seqlens[1:] = counts.cumsum(0)
    num_tokens = int(cu_seqlens[-1]) + padding
    moved = draw.to(cu_seqlens), draw.to(contexts)
    expected = swa.reference_window(cu_seqlens, contexts, window, num_tokens=num_tokens)
    for actual, wanted in zip(swa_kernels.window(*moved, window, num_tokens=num_tokens), expected, strict=True):
        same(actual, wanted)
