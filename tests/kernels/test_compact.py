"""Compacted index rows against a loop."""

import pytest
import torch

from nsa_plugin.kernels.triton import compact as module
from nsa_plugin.kernels.triton.compact import compact

from .oracles import noncontiguous

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; the providers' GPU tests compile it")

SLOTS = 50


def rows(topk, dtype=torch.int32):
    generator = torch.Generator().manual_seed(topk)
    indices = torch.randint(-SLOTS, 2 * SLOTS, (3, 2, topk), generator=generator).to(dtype)
    if topk > 2:
        indices[0, 0] = -1
        indices[0, 1, :3] = torch.tensor([2**31 - 1, -(2**31), SLOTS])
    return indices


def oracle(indices, length, width, fill, empty_index):
    expected, counts = [], []
    for row, end in zip(indices.reshape(-1, indices.shape[-1]).tolist(), length.flatten().tolist(), strict=True):
        kept = [index for index in row[: max(end, 0)] if 0 <= index < SLOTS]
        counts.append(len(kept))
        kept = kept or [empty_index]
        expected.append((kept + [fill] * width)[:width])
    return torch.tensor(expected, dtype=torch.int32).view(len(counts), width), torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("topk", [1, 15, 64, 100])
@pytest.mark.parametrize("with_length", [True, False])
def test_valid_entries_come_first_in_their_order(topk, with_length, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    indices = rows(topk)
    length = torch.tensor([[topk, topk // 2], [0, -5], [topk + 9, 1]])
    actual = compact(indices, length if with_length else None, SLOTS, empty_index=0, multiple=32)
    width = -(-topk // 32) * 32
    every = torch.full((3, 2), topk)
    expected, counts = oracle(indices, length if with_length else every, width, -1, 0)
    assert torch.equal(actual.indices, expected)
    assert torch.equal(actual.counts, counts)


def test_strides_types_and_fill():
    indices, length = rows(40, torch.int64), torch.full((3, 1), 33).expand(3, 2)
    actual = compact(noncontiguous(indices), length, SLOTS, fill=7)
    expected, counts = oracle(indices, length, 40, 7, 7)
    assert torch.equal(actual.indices, expected)
    assert torch.equal(actual.counts, counts)


def test_no_row():
    actual = compact(rows(8)[:0], None, SLOTS)
    assert actual.indices.shape == (0, 8)
    assert actual.counts.shape == (0,)
