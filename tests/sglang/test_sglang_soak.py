"""That the soak's environment makes a real SGLang retract requests, and that it would not otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_case import Place, needs_engine, post

from ci.soak.engines import SETUPS

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(900), needs_engine()]
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
# What 0.5.23 does for requests that ignore the end token, and this SGLang may not: it expects every token of theirs.
WHOLE_ANSWERS = {"SGLANG_INIT_NEW_TOKEN_RATIO": "1.0", "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "1.0"}
REQUESTS, PROMPT, ANSWER, POOL = 6, 40, 150, 400


@pytest.mark.parametrize("as_in_a_soak", [True, False])
def test_sglang_retracts_requests_with_the_soaks_environment(as_in_a_soak: bool, tmp_path: Path) -> None:
    (tmp_path / "soak").mkdir()
    environ = SETUPS["sglang"].environ(tmp_path / "soak")
    given = WHOLE_ANSWERS | ({CLIP: environ[CLIP]} if as_in_a_soak else {})
    (tmp_path / "place").mkdir()
    place = Place(tmp_path / "place")
    flags = ("--max-total-tokens", str(POOL), "--max-running-requests", str(REQUESTS))

    def answer(number: int) -> int:
        body = {
            "input_ids": [2 + (7 * number + at) % 200 for at in range(PROMPT)],
            "sampling_params": {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True},
        }
        return len(post(f"{url}/generate", body)["output_ids"])

    with place.server(*flags, **given) as url, ThreadPoolExecutor(REQUESTS) as pool:
        assert list(pool.map(answer, range(REQUESTS))) == [ANSWER] * REQUESTS
        retractions = place.log().count("KV cache pool is full. Retract requests")
    assert (retractions > 0) is as_in_a_soak
