"""Norms, RoPE and the indexer's fp8 queries: the reference by hand, and Triton against it."""

from __future__ import annotations

import math

import pytest
import torch

from nsa_plugin.kernels import mla_inputs
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.indexer import quantize
from nsa_plugin.kernels.triton import mla_inputs as kernels

ROPE, POSITIONS = 64, 500


def table(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def positions(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, POSITIONS, (rows,), generator=torch.Generator().manual_seed(seed))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def strided(values: torch.Tensor) -> torch.Tensor:
    """The same values inside a wider tensor of NaN, as an engine's slices of a projection are."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 24), float("nan"), dtype=values.dtype)
    wide[..., 8 : 8 + values.shape[-1]] = values
    return wide[..., 8 : 8 + values.shape[-1]]


def test_rotation_by_hand():
    cos_sin = table()
    q = random(3, 2, ROPE, dtype=torch.float32)
    where = torch.tensor([0, 7, 499])
    found = mla_inputs.reference_rope(q, where, cos_sin)
    assert torch.equal(found[0], q[0])  # position 0
    for pair in (0, 5, 31):
        angle = float(where[1]) * 10000.0 ** (-2 * pair / ROPE)
        x, y = q[1, 1, 2 * pair].item(), q[1, 1, 2 * pair + 1].item()
        assert found[1, 1, 2 * pair].item() == pytest.approx(x * math.cos(angle) - y * math.sin(angle), abs=1e-5)
        assert found[1, 1, 2 * pair + 1].item() == pytest.approx(y * math.cos(angle) + x * math.sin(angle), abs=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_each_pairs_length_and_the_values_behind(interleaved: bool):
    k = random(5, 128, dtype=torch.float32)
    weight, bias = torch.ones(128), torch.zeros(128)
    found = mla_inputs.reference_indexer_keys(
        k, positions(5, 1), table(), weight, bias, eps=1e-6, interleaved=interleaved
    )
    normed = torch.nn.functional.layer_norm(k, (128,), eps=1e-6)
    torch.testing.assert_close(found[:, ROPE:], normed[:, ROPE:])
    shape = (5, 32, 2) if interleaved else (5, 2, 32)
    axis = 2 if interleaved else 1
    torch.testing.assert_close(
        found[:, :ROPE].reshape(shape).norm(dim=axis), normed[:, :ROPE].reshape(shape).norm(dim=axis)
    )
    assert not torch.allclose(found[:, :ROPE], normed[:, :ROPE])


def every_other(values: torch.Tensor) -> torch.Tensor:
    """Values that do not follow each other in memory."""
    return values[::2]


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize(("q_dim", "kv_dim"), [(1536, 512), (96, 512), (2048, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_and_rope(rows: int, q_dim: int, kv_dim: int, dtype: torch.dtype):
    arguments = (
        strided(random(rows, q_dim, seed=rows, dtype=dtype, scale=3.0)),
        strided(random(rows, kv_dim, seed=rows + 1, dtype=dtype, scale=0.01)),
        strided(random(rows, ROPE, seed=rows + 2, dtype=dtype)),
        every_other(positions(2 * rows, rows)),
        table(dtype=dtype),
        every_other(random(2 * q_dim, seed=3, dtype=dtype)),
        every_other(random(2 * kv_dim, seed=4, dtype=dtype)),
    )
    eps = {"q_eps": 1e-6, "kv_eps": 1e-5}
    wanted = mla_inputs.reference_norm_rope(*arguments, **eps)
    found = kernels.norm_rope(*arguments, **eps)
    assert [one.dtype for one in found] == [dtype, torch.float32, torch.float32]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_of_the_indexer(rows: int, interleaved: bool, dtype: torch.dtype):
    k = strided(random(rows, 128, seed=rows, dtype=dtype, scale=20.0))
    weight, bias = (every_other(random(256, seed=seed, dtype=torch.float32)) for seed in (8, 9))
    arguments = (k, every_other(positions(2 * rows, 2)), table(), weight, bias)
    wanted = mla_inputs.reference_indexer_keys(*arguments, eps=1e-6, interleaved=interleaved)
    found = kernels.indexer_keys(*arguments, eps=1e-6, interleaved=interleaved)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "heads"), [(0, 4), (1, 64), (5, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
def test_queries_of_the_indexer(rows: int, heads: int, interleaved: bool, scale: float):
    q = strided(random(rows, heads, 128, seed=rows, scale=scale))
    weights = strided(random(rows, heads, seed=rows + 1))
    arguments = (q, weights, every_other(positions(2 * rows, 3)), table())
    codes, folded = kernels.indexer_queries(*arguments, scale=0.011, interleaved=interleaved)
    wanted, wanted_folded = mla_inputs.reference_indexer_queries(*arguments, scale=0.011, interleaved=interleaved)
    torch.testing.assert_close(folded, wanted_folded, rtol=1e-6, atol=0)
    # A product rounded in another place moves a value to the next code at most.
    steps = (codes.view(torch.uint8).int() & 0x7F) - (wanted.view(torch.uint8).int() & 0x7F)
    assert steps.numel() == 0 or (steps.abs().max() <= 1 and (steps != 0).float().mean() < 0.02)
    if scale == 1.0 and rows:
        assert codes.view(torch.uint8).unique().numel() > 20


def test_codes_without_rotation_equal_the_quantisers():
    q, where = random(4, 8, 128, dtype=torch.float32), torch.zeros(4, dtype=torch.int64)
    codes, folded = kernels.indexer_queries(q, torch.ones(4, 8), where, table(), scale=1.0, interleaved=False)
    wanted, scales = quantize(q, 128)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(folded, scales.squeeze(-1))


@pytest.mark.parametrize(("rows", "heads"), [(0, 1), (1, 128), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rope(rows: int, heads: int, dtype: torch.dtype):
    q = strided(random(rows, heads, ROPE, seed=rows, dtype=dtype))
    where, cos_sin = every_other(positions(2 * rows, 5)), table()
    wanted = mla_inputs.reference_rope(q, where, cos_sin)
    found = kernels.rope(q, where, cos_sin)
    torch.testing.assert_close(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [mla_inputs, kernels])
def test_wrong_arguments_are_named(module: object):
    name = "reference_rope" if module is mla_inputs else "rope"
    rope = getattr(module, name)
    with pytest.raises(KernelArgumentError, match="cos_sin rotates 64 of 32 values"):
        rope(random(2, 1, 32), positions(2, 0), torch.zeros(9, 64)[:, :64])
    with pytest.raises(KernelArgumentError, match="positions"):
        rope(random(2, 1, ROPE), positions(3, 0), table())
