"""Check a timed result against the float32 reference, on a sample of its rows.

A judge takes a result and returns its largest error. It raises `WrongResultError` if the result is not finite or beyond
the tolerance. The reference is computed once for all contenders of a case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from nsa_plugin.tools.bench.workload import WrongResultError

# (absolute, relative): FlashMLA's tolerances, except for the absolute part of a statistic. A row with one key may have
# an lse near 0, which is a long sum in another order.
PREFILL_OUT = (8e-4, 3.01 / 128)
DECODE_OUT = (1e-3, 2.01 / 128)
STATISTIC = (2e-5, 8.01 / 65536)
# Rows with few keys cancel: bfloat16 weights are off by 2**-9 of values up to 1, whatever their sum is.
MHA_OUT = (2e-3, 3.01 / 128)

# A selected logit may be this far below the reference's threshold, as a share of the row's largest logit: libraries sum
# the heads in float32 and in another order.
TOPK_SLACK = 1e-3


class Attended(NamedTuple):
    """The part of an attention result that is judged; dimension 0 has the sampled rows."""

    out: torch.Tensor
    lse: torch.Tensor | None


def close(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> float:
    """The largest absolute difference; infinities must match.

    Raises:
        WrongResultError: wrong shape, a NaN, an unexpected infinity, or a difference beyond the tolerance.
    """
    if actual.shape != expected.shape:
        raise WrongResultError(f"{what} has shape {list(actual.shape)}, not {list(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    same = (actual == expected) & expected.isinf()
    difference = torch.where(same, 0.0, (actual - expected).abs())
    absolute, relative = tolerance
    allowed = torch.where(expected.isinf(), 0.0, absolute + relative * expected.abs())
    wrong = ~(difference <= allowed)  # a NaN is wrong too
    largest = float(difference.nan_to_num(nan=float("inf")).max()) if difference.numel() else 0.0
    if bool(wrong.any()):
        worst = "NaN" if bool(actual.isnan().any()) else f"{largest:.2e}"
        raise WrongResultError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} sampled values are wrong, the worst by {worst} "
            f"(allowed: {absolute:.1e} + {relative:.1e} of the value)"
        )
    return largest


def finite(what: str, tensor: torch.Tensor) -> None:
    """Raise WrongResultError if any value of the whole result, not only of the sample, is not finite."""
    if not bool(tensor.isfinite().all()):
        raise WrongResultError(f"{what} has values that are not finite")


def attention(
    rows: torch.Tensor, expected: Callable[[], Any], tolerance: tuple[float, float]
) -> Callable[[Any], float]:
    """Judge for results with `out` and `lse`; `expected` gives their sampled rows (dimension 0)."""
    reference = cache(expected)

    def judge(result: Any) -> float:
        finite("out", result.out)
        error = close("out", result.out[rows], reference().out, tolerance)
        if result.lse is not None:
            close("lse", result.lse[rows], reference().lse, STATISTIC)
        return error

    return judge


def selected(
    rows: torch.Tensor, logits: Callable[[], torch.Tensor], topk: int, slack: float = TOPK_SLACK
) -> Callable[[Any], float]:
    """Judge for [rows, topk] positions: as many distinct ones as possible, none clearly below the threshold.

    The error is the largest amount by which a selected logit lies below the k-th largest one, as a share of the row's
    largest magnitude.

    Args:
        logits: float32 [sampled rows, keys], every key in range.
    """
    reference = cache(logits)

    def judge(result: torch.Tensor) -> float:
        scores = reference()
        chosen = result[rows].long()
        count = min(topk, scores.shape[1])
        if bool((chosen[:, count:] != -1).any()):
            raise WrongResultError(f"positions after the {count} selected ones are not -1")
        chosen = chosen[:, :count]
        if bool(((chosen < 0) | (chosen >= scores.shape[1])).any()):
            raise WrongResultError(f"selected positions reach from {int(chosen.min())} to {int(chosen.max())}")
        ordered = chosen.sort(1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise WrongResultError("a position is selected twice")
        threshold = scores.topk(count, dim=1).values[:, -1]
        below = (threshold - scores.gather(1, chosen).amin(1)).clamp(min=0)
        error = float((below / scores.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)).max())
        if not error <= slack:
            raise WrongResultError(f"a selected logit is {error:.1e} of its row's largest below the threshold")
        return error

    return judge


def equal(expected: Callable[[], Sequence[torch.Tensor]]) -> Callable[[Any], float]:
    """Judge for integer results, which must equal the reference."""
    reference = cache(lambda: tuple(expected()))

    def judge(result: Any) -> float:
        actual = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        for one, other in zip(actual, reference(), strict=True):
            if one.shape != other.shape or not torch.equal(one.long(), other.long()):
                raise WrongResultError("the indices differ from the reference's")
        return 0.0

    return judge
