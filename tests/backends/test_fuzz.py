"""A slice of the fuzzers' batches in every test run; `python -m tests.backends.fuzz{,_sglang,_v4}` run 10,000."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v32 import indexer
from nsa_plugin.backends.vllm.v32 import attention
from tests.backends import fuzz, fuzz_sglang, fuzz_v4

PATHS = {"decode: sparse_decode", "target_verify: sparse_decode", "extend: sparse_prefill", "extend: mha_one_shot"}


def test_random_batches_of_vllm_attend_as_the_reference() -> None:
    seen = {name.partition(" by ")[0] for name in fuzz.run(range(25), seed=2)}
    assert seen >= PATHS | {"steps like the last batch's"}


def test_random_batches_of_sglang_select_and_attend_as_the_reference() -> None:
    seen = fuzz_sglang.run(range(80), seed=0)
    assert {name.partition(" by ")[0] for name in seen} >= PATHS
    # The CUDA kernel takes the mixed batch of an fp8 cache for which SGLang makes no copy.
    assert {"MIXED, extend: sparse_prefill by cuda", "a layer that shares the selection of the one before"} <= set(seen)


def test_random_batches_of_v4_attend_as_a_dense_computation() -> None:
    seen = set(fuzz_v4.run(range(20), seed=0))
    assert seen >= {"vllm, extend: direct", "vllm, extend: bf16 rows", "vllm, extend: decode kernel"}
    assert seen >= {"sglang, extend/sparse_prefill/reference", "sglang, target_verify/sparse_decode/reference"}


def without_a_token(
    q: torch.Tensor, slots: torch.Tensor, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    several = ((slots >= 0).sum(-1) > 1).unsqueeze(-1)
    first = torch.arange(slots.shape[-1]) == 0
    return q, slots.masked_fill(several & first, -1), given


@pytest.mark.parametrize(
    "fault",
    [
        without_a_token,
        lambda q, slots, given: (q, slots.roll(1, 0), given),  # another query token's selection
        lambda q, slots, given: (q.roll(1, 1), slots, given),  # another head's query
        lambda q, slots, given: (q, slots, given | {"scale": given["scale"] * 1.1}),
    ],
    ids=["a token is left out", "other selection", "other head", "other scale"],
)
def test_the_fuzzer_of_vllm_notices_wrong_sparse_attention(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    right = Providers._attended

    def wrong(self: Any, op: str, name: str, q: Any, cache: Any, slots: Any, out: Any, given: Any) -> Any:
        q, slots, given = fault(q, slots, given)
        return right(self, op, name, q, cache, slots, out, given)

    monkeypatch.setattr(Providers, "_attended", wrong)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        fuzz.run(range(6), seed=2)


def test_the_fuzzer_of_vllm_notices_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._slots
    monkeypatch.setattr(attention, "_slots", lambda *given: right(*given).roll(1, 0))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        fuzz.run(range(6), seed=2)


def test_the_fuzzer_of_vllm_notices_wrong_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.keys_and_values

    def of_other_tokens(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = right(*given, **named)
        return k, v.roll(1, 0)

    monkeypatch.setattr(attention, "keys_and_values", of_other_tokens)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        fuzz.run(range(12), seed=2)


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
        fuzz_sglang.run(range(60), seed=0)
