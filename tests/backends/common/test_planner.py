"""What the planner of both engines keeps from one batch to the next."""

from __future__ import annotations

import pytest

from nsa_plugin.backends.common import planner as planner_module
from nsa_plugin.backends.common.paths import SGLANG
from nsa_plugin.backends.common.planner import Planner, step_shape
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings


class StepPlanner(Planner):
    engine = SGLANG


def step(requests: int) -> BatchShape:
    return step_shape(Phase.DECODE, requests, requests, 8192)


def test_the_plans_of_steps_that_are_kept_are_bounded_and_the_first_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs may have captured the first; a later size is decided each time it comes."""
    monkeypatch.setattr(planner_module, "MAX_STEPS", 3)
    planner = StepPlanner(ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8"), synthetic(90), Settings())
    captured = [planner.step_execution_of(step(requests)) for requests in (8, 4, 2)]
    later = [planner.step_execution_of(step(requests)) for requests in range(9, 400)]
    assert len(planner._steps) == 3
    assert [planner.step_execution_of(step(requests)) for requests in (8, 4, 2)] == captured
    assert all(planner.step_execution_of(step(n)) is kept for n, kept in zip((8, 4, 2), captured, strict=True))
    again = planner.step_execution_of(step(9))
    assert again is not later[0]
    assert again == later[0]
