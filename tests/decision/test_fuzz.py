"""A slice of the fuzzer's inputs in every test run; `python -m tests.decision.fuzz` runs a million."""

from __future__ import annotations

import pytest

from tests.decision import fuzz, plan_checks


def test_decisions_for_random_inputs_are_within_every_limit() -> None:
    outcomes = fuzz.run(12_000, seed=1)
    # Most inputs are decided; a generator whose inputs are all refused would check nothing.
    assert outcomes["error"] < 6000
    assert {"mha_one_shot", "sparse_prefill", "sparse_decode", "none"} <= set(outcomes)


def test_the_fuzzer_reports_the_input_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_checks, "check_reasons", lambda plan: pytest.fail("a wrong plan"))
    with pytest.raises((AssertionError, pytest.fail.Exception), match="a wrong plan"):
        fuzz.run(50, seed=1)
