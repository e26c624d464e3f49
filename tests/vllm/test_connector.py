"""KV pages from an external connector: served right with the indexer's keys, and not without them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.outcome import ONE_PROCESS, Outcome, transfer

pytestmark = pytest.mark.engine_vllm

PROMPT = random.Random(11).choices(range(250), k=117)  # above index_topk, one chunk
ROUND = [{"ids": PROMPT, "max_tokens": 16}]
Run = Callable[..., Outcome]


def served(run_engine: Run, rounds: list[list[dict[str, Any]]], loads: str, seen: Path) -> Outcome:
    """A prompt is computed, and later the connector loads its pages."""
    fake = transfer("FakeConnector", "tests.vllm.fake_connector", loads=loads, seen=str(seen))
    return run_engine(rounds, environ=ONE_PROCESS, **fake)


def test_transferred_kv_with_its_index_keys_is_served_right(run_engine: Run, tmp_path: Path) -> None:
    outcome = served(run_engine, [ROUND, ROUND], "all", tmp_path / "seen.json")
    assert [one.cached_tokens for one in outcome.answers] == [0, 112]
    assert all(all(one.equal) for one in outcome.answers)
    assert outcome.worst() < 1e-2
    assert "KV connector FakeConnector: vLLM does not report" in outcome.log
    told = json.loads((tmp_path / "seen.json").read_text())
    assert any("indexer" in name for name in told["registered"])


def test_missing_index_keys_end_the_server_and_vllm_does_not_say_that_they_are_missing(
    run_engine: Run, tmp_path: Path
) -> None:
    """The plugin looks at the caches. If the last part fails, vLLM has begun to tell: then refuse at start."""
    # vLLM would use the first prompt's pages again, whose keys are there; this one takes them.
    other = {"ids": random.Random(12).choices(range(250), k=144), "max_tokens": 16}
    with pytest.raises(AssertionError, match="KV connector FakeConnector did not transfer the indexer's keys"):
        served(run_engine, [ROUND, [other, *ROUND]], "main", tmp_path / "seen.json")
    told = json.loads((tmp_path / "seen.json").read_text())
    for hook in ("loaded", "saved"):
        assert told[hook]
        assert not any("indexer" in name for name in told[hook])
