"""A slice of the fuzzers' batches in every test run; `python -m tests.backends.fuzz{,_sglang,_v4}` run 10,000."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from nsa_plugin.backends.sglang.v32 import indexer
from tests.backends import fuzz, fuzz_sglang, fuzz_v4

PATHS = {"decode: sparse_decode", "target_verify: sparse_decode", "extend: sparse_prefill", "extend: mha_one_shot"}


def test_random_batches_of_vllm_attend_as_the_reference() -> None:
    seen = {name.partition(" by ")[0] for name in fuzz.run(25, seed=2)}
    assert seen >= PATHS | {"steps like the last batch's"}


def test_random_batches_of_sglang_select_and_attend_as_the_reference() -> None:
    assert {name.partition(" by ")[0] for name in fuzz_sglang.run(80, seed=0)} >= PATHS


def test_random_batches_of_v4_attend_as_a_dense_computation() -> None:
    seen = set(fuzz_v4.run(20, seed=0))
    assert seen >= {"vllm, extend: direct", "vllm, extend: bf16 rows", "vllm, extend: decode kernel"}
    assert seen >= {"sglang, extend/sparse_prefill/reference", "sglang, target_verify/sparse_decode/reference"}


@pytest.mark.parametrize("check", [fuzz_v4.of_vllm, fuzz_v4.of_sglang])
def test_the_fuzzer_of_v4_notices_wrong_tokens(check: Callable[..., set[str]]) -> None:
    def several() -> None:
        for number in range(8):
            check(Random(f"0:{number}"), fault="shift_indices")

    with pytest.raises(AssertionError):
        several()


def test_the_fuzzer_notices_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    right = indexer._transformed

    def shifted(*given: Any) -> torch.Tensor:
        found: torch.Tensor = right(*given)
        return torch.where(found > 0, found - 1, found)

    monkeypatch.setattr(indexer, "_transformed", shifted)
    with pytest.raises(AssertionError, match="query token"):
        fuzz_sglang.run(60, seed=0)
