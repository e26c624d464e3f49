"""The record of a demo run has the form of those in docs/benchmarks."""

from __future__ import annotations

from typing import Any

from nsa_plugin.tools.compare.demo.record import as_record


def outcome(**options: Any) -> dict[str, Any]:
    request = {"name": "above-topk", "tokens": 24, "equal": 23, "ties": 1, "max_logprob_error": 2.5e-5}
    wrong = request | {"equal": 3, "ties": 0, "max_logprob_error": 7.0}
    given = {"family": "v3.2", "dtype": "float32", "tensor_parallel_size": 1, "compile": False, "small_cache": False}
    return {
        "options": given | options,
        "engine": {"name": "vllm", "version": "0.32.0"},
        "requests": [request],
        "control": {"requests": [wrong]},
    }


def test_a_record_has_a_row_a_request_and_says_which_are_the_control() -> None:
    record = as_record(outcome(), ["nsa-plugin", "demo"])
    assert record["schema"] == 1
    assert record["suite"] == "vllm-0.32.0-v32-float32-tp1"
    assert record["command"] == "nsa-plugin demo"
    assert record["host"]["torch"]
    right, wrong = record["rows"]
    assert (right["op"], right["equal"], right["tokens"], right["max_error"]) == ("agreement", 23, 24, 2.5e-5)
    assert "fault" not in right["case"]
    assert wrong["case"]["fault"] == "shift_indices"
    assert wrong["equal"] == 3


def test_the_suite_names_the_variant() -> None:
    record = as_record(outcome(dtype="bfloat16", compile=True, small_cache=True, tensor_parallel_size=2), [])
    assert record["suite"] == "vllm-0.32.0-v32-bfloat16-tp2-compile-small-cache"
    assert record["rows"][0]["case"]["tp"] == 2
    record = as_record(outcome(family="glm"), [])
    assert record["suite"] == "vllm-0.32.0-glm5-float32-tp1"
    assert record["rows"][0]["case"]["model"].startswith("GLM-5, ")
