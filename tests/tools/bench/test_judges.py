"""Judges notice what is wrong, and give the error of what is right."""

from __future__ import annotations

import pytest
import torch

from nsa_plugin.tools.bench import judges
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.workload import WrongResultError, with_poisoned

ROWS = torch.tensor([0, 2])


def attended(scale: float = 1.0) -> Attended:
    return Attended(torch.ones(3, 2, 4) * scale, torch.zeros(3, 2))


def judge_of_ones() -> judges.Callable[[Attended], float]:
    return judges.attention(ROWS, lambda: Attended(torch.ones(2, 2, 4), torch.zeros(2, 2)), (1e-2, 0.0))


def test_error_within_the_tolerance_is_returned() -> None:
    assert judge_of_ones()(attended(1.005)) == pytest.approx(0.005, rel=1e-3)
    assert judge_of_ones()(Attended(torch.ones(3, 2, 4), None)) == 0


@pytest.mark.parametrize("row", [0, 2])
def test_error_beyond_the_tolerance_is_wrong(row: int) -> None:
    result = attended()
    result.out[row, 1, 3] = 1.02
    with pytest.raises(WrongResultError, match="1 of 16 sampled values"):
        judge_of_ones()(result)


def test_nan_outside_the_sample_is_wrong() -> None:
    result = attended()
    result.out[1, 0, 0] = float("nan")
    with pytest.raises(WrongResultError, match="not finite"):
        judge_of_ones()(result)


def test_lse_counts() -> None:
    result = attended()
    result.lse[2, 1] = 1e-3
    with pytest.raises(WrongResultError, match="lse"):
        judge_of_ones()(result)


def test_infinities_must_be_the_same() -> None:
    inf = torch.tensor([float("inf"), 1.0])
    assert judges.close("lse", inf, inf.clone(), (0.0, 0.0)) == 0
    for other in (torch.tensor([1.0, 1.0]), -inf, torch.tensor([float("nan"), 1.0])):
        with pytest.raises(WrongResultError):
            judges.close("lse", other, inf, (1e-3, 1e-3))
        with pytest.raises(WrongResultError):
            judges.close("lse", inf, other, (1e-3, 1e-3))


def test_shape_must_be_the_same() -> None:
    with pytest.raises(WrongResultError, match=r"\[2\], not \[3\]"):
        judges.close("out", torch.ones(2), torch.ones(3), (1.0, 1.0))


LOGITS = torch.tensor([[1.0, 5.0, 3.0, 4.0], [2.0, 2.0, 0.0, -8.0]])


@pytest.mark.parametrize("second", [[0, 1, -1], [1, 0, -1]])
def test_any_order_of_the_right_set_is_right(second: list[int]) -> None:
    judge = judges.selected(torch.tensor([0, 1]), lambda: LOGITS, 2)
    assert judge(torch.tensor([[3, 1, -1], second])) == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2, -1], "2.0e-01 of its row's largest below"),
        ([1, 1, -1], "twice"),
        ([1, 4, -1], "reach from 1 to 4"),
        ([1, -1, -1], "reach from -1 to 1"),
        ([1, 3, 0], "not -1"),
    ],
)
def test_wrong_selection_is_noticed(row: list[int], message: str) -> None:
    judge = judges.selected(torch.tensor([0]), lambda: LOGITS[:1], 2)
    with pytest.raises(WrongResultError, match=message):
        judge(torch.tensor([row]))


def test_selection_may_lie_a_rounding_below_the_threshold() -> None:
    close_logits = torch.tensor([[1.0, 1.0 - 5e-4, 0.5]])
    judge = judges.selected(torch.tensor([0]), lambda: close_logits, 1)
    assert judge(torch.tensor([[1]])) == pytest.approx(5e-4, rel=1e-3)
    with pytest.raises(WrongResultError):
        judges.selected(torch.tensor([0]), lambda: close_logits, 1, slack=0.0)(torch.tensor([[1]]))


def test_integers_must_be_equal() -> None:
    judge = judges.equal(lambda: [torch.tensor([1, 2]), torch.tensor([3])])
    assert judge((torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3]))) == 0
    with pytest.raises(WrongResultError):
        judge((torch.tensor([1, 2]), torch.tensor([4])))


def test_what_a_call_does_not_write_shows() -> None:
    values, indices = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    assert with_poisoned(values, lambda: 5)() == 5
    with_poisoned(indices, lambda: None)
    assert values.isnan().all()
    assert (indices == -(2**31)).all()
