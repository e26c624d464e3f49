"""The compiled index kernels against the reference, entry by entry, at the sizes that engines have."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.kernels import index_transform as transform
from nsa_plugin.kernels import swa_indices as swa
from nsa_plugin.kernels.triton import index_transform as transform_kernels
from nsa_plugin.kernels.triton import swa_indices as swa_kernels
from tests.kernels import index_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("rows", "topk", "requests", "pages", "page_size"),
    [
        (5, 9, 3, 4, 64),
        (1, 1, 1, 1, 1),
        (213, 2048, 7, 1000, 64),
        (128, 2048, 128, 5000, 1),
        (62, 2500, 5, 300, 256),
        (0, 4, 2, 3, 2),
        (4, 0, 2, 3, 2),
    ],
)
def test_paged(seed, rows, topk, requests, pages, page_size):
    cases.check_paged(seed, rows, topk, requests, pages, page_size, "cuda")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("rows", "topk"), [(5, 9), (1, 1), (0, 3), (3, 0), (4096, 2048), (213, 3000)])
def test_ragged(seed, rows, topk):
    cases.check_ragged(seed, rows, topk, "cuda")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("requests", "window", "padding", "most"),
    [(4, 3, 2, 7), (1, 1, 0, 7), (0, 4, 3, 7), (9, 128, 5, 900), (321, 128, 0, 4), (1000, 5, 1, 3), (2, 3000, 0, 50)],
)
def test_window(seed, requests, window, padding, most):
    cases.check_window(seed, requests, window, padding, "cuda", most)


def test_an_index_tensor_beyond_2_to_the_31_entries():
    rows, topk = 2**31 // 2048 + 5, 2048
    indices = torch.zeros(rows, topk, dtype=torch.int32, device="cuda")
    indices[-1] = torch.arange(topk, dtype=torch.int32)
    offsets = torch.arange(rows, dtype=torch.int32, device="cuda")
    moved = transform_kernels.ragged(indices, offsets)
    assert torch.equal(moved[-1].cpu(), torch.arange(topk, dtype=torch.int32) + rows - 1)
    assert torch.equal(moved[:, 0], torch.cat([offsets[:-1], offsets[-1:]]))


class Batch:
    """One batch through every kernel, on the CPU by the references and on the GPU by the kernels."""

    def __init__(self, seed: int, device: str) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(device)

        self.topk, self.table = integers(4096, 64, 512), integers(9000, 64, 64)
        self.offsets, self.lengths = integers(9000, 64), integers(4096, 64)
        self.cu_seqlens = torch.arange(0, 65, 4, dtype=torch.int32).to(device)
        self.seq_lens = integers(5000, 16) + 4

    def copy_(self, other: Batch) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))

    def references(self) -> list[torch.Tensor]:
        window = swa.reference_window(self.cu_seqlens, self.seq_lens, 128, num_tokens=64)
        slots = transform.reference_paged(self.topk, self.table, page_size=64, lengths=self.lengths)
        ragged = transform.reference_ragged(self.topk, self.offsets, lengths=self.lengths)
        return [slots, ragged, *window]

    def kernels(self) -> list[torch.Tensor]:
        window = swa_kernels.window(self.cu_seqlens, self.seq_lens, 128, num_tokens=64)
        slots = transform_kernels.paged(self.topk, self.table, page_size=64, lengths=self.lengths)
        ragged = transform_kernels.ragged(self.topk, self.offsets, lengths=self.lengths)
        return [slots, ragged, *window]


def test_in_a_cuda_graph_and_without_waiting():
    batch = Batch(1, "cuda")
    batch.kernels()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = batch.kernels()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for actual, expected in zip(results, Batch(1, "cpu").references(), strict=True):
        cases.same(actual, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = batch.kernels()
    for seed in (2, 3):
        batch.copy_(Batch(seed, "cpu"))
        graph.replay()
        for actual, expected in zip(results, Batch(seed, "cpu").references(), strict=True):
            cases.same(actual, expected)


def test_the_same_bits_every_time():
    batch = Batch(5, "cuda")
    first = batch.kernels()
    for _ in range(20):
        for again, wanted in zip(batch.kernels(), first, strict=True):
            assert torch.equal(again, wanted)
