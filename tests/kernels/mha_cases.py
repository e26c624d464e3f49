"""Cases of ragged dense attention, for the interpreter and for a GPU."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nsa_plugin.kernels import mha

PADDING = 5

# (queries, keys) of each request.
REQUESTS = {
    "a fresh prompt": [(70, 70)],
    "a prefix beside fresh prompts": [(3, 131), (1, 1), (33, 64), (16, 16)],
    "no rows, no keys": [(0, 7), (0, 0), (20, 20), (3, 0), (0, 9)],
    "more rows than keys": [(40, 6), (5, 5)],
    "single rows": [(1, 1)] * 9 + [(1, 80)],
    "no request": [],
}

LARGE_REQUESTS = {
    "ragged": [(1, 1), (129, 129), (1000, 1000), (63, 2047), (2, 4096), (257, 300)],
    "with empty ones": [(0, 100), (300, 300), (7, 0), (0, 0), (512, 1024), (0, 3)],
    "more rows than keys": [(200, 77), (64, 64)],
}


class Case(NamedTuple):
    """Arguments of `mha` in order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def cumulative(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=device)


def make(
    requests: list[tuple[int, int]],
    heads: int,
    *,
    d_qk: int = 192,
    d_v: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = PADDING,
    device: str = "cpu",
    filler: float = math.nan,
) -> Case:
    """Normal values, v's an eighth as wide; the rows behind the last request, in q, k and v, are `filler`.

    Kernels round probabilities to the inputs' type: two wide values of v that cancel would show just that.
    """
    generator = torch.Generator().manual_seed(heads + len(requests))
    rows, keys = (sum(request[i] for request in requests) for i in (0, 1))

    def rand(count: int, dim: int, width: float = 1.0) -> torch.Tensor:
        values = torch.randn(count + padding, heads, dim, generator=generator) * width
        values[count:] = filler
        return values.to(dtype).to(device)

    return Case(
        rand(rows, d_qk),
        rand(keys, d_qk),
        rand(keys, d_v, 0.125),
        cumulative([sq for sq, _ in requests], device),
        cumulative([sk for _, sk in requests], device),
    )


def check(
    actual: mha.MhaOutput, case: Case, *, atol: float = 8e-4, rtol: float = 3.01 / 128, **options: object
) -> None:
    """Compare with the reference in float32; infinities and NaN must agree exactly."""
    expected = mha.reference(*case, scale=case.scale, out_dtype=torch.float32, return_lse=True, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(actual.out.float(), expected.out, atol=atol, rtol=rtol)
    if expected.out.any():
        pair = actual.out.double().flatten(), expected.out.double().flatten()
        assert 1 - float(torch.nn.functional.cosine_similarity(*pair, dim=0)) < 7e-6
    if actual.lse is not None:
        torch.testing.assert_close(actual.lse, expected.lse, atol=1e-6, rtol=8.01 / 65536)
