"""A slice of the fuzzer's batches in every test run; `python -m tests.backends.fuzz` runs 10,000."""

from __future__ import annotations

from tests.backends import fuzz


def test_random_batches_attend_as_the_reference() -> None:
    seen = fuzz.run(25, seed=2)
    assert {name.partition(" by ")[0] for name in seen} >= {
        "decode: sparse_decode",
        "target_verify: sparse_decode",
        "extend: sparse_prefill",
        "extend: mha_one_shot",
    }
