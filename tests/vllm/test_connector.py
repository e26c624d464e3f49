"""KV pages from an external connector: right with the indexer's keys, and what vLLM reveals if they are missing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.outcome import ONE_PROCESS, Outcome

pytestmark = pytest.mark.engine_vllm

PROMPT = random.Random(11).choices(range(250), k=117)  # above index_topk, one chunk
ROUND = [{"ids": PROMPT, "max_tokens": 16}]
Run = Callable[..., Outcome]


def served_twice(run_engine: Run, loads: str, seen: Path) -> tuple[Outcome, dict[str, list[str]]]:
    """A prompt that is computed, then one whose pages the connector loads; and what vLLM told the connector."""
    outcome = run_engine(
        [ROUND, ROUND],
        environ=ONE_PROCESS,
        enable_prefix_caching=False,
        block_size=16,
        kv_transfer_config={
            "kv_connector": "FakeConnector",
            "kv_connector_module_path": "tests.vllm.fake_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"loads": loads, "seen": str(seen)},
        },
    )
    assert [one.cached_tokens for one in outcome.answers] == [0, 112]
    assert all(outcome.answers[0].equal)
    return outcome, json.loads(seen.read_text())


def test_transferred_kv_with_its_index_keys_is_served_right(run_engine: Run, tmp_path: Path) -> None:
    outcome, told = served_twice(run_engine, "all", tmp_path / "seen.json")
    assert all(outcome.answers[1].equal)
    assert outcome.worst() < 1e-2
    assert any("indexer" in name for name in told["registered"])


def test_missing_index_keys_are_not_visible_to_the_plugin(run_engine: Run, tmp_path: Path) -> None:
    """docs/faq.md says so. If this fails, vLLM has begun to tell: then detect it."""
    outcome, told = served_twice(run_engine, "main", tmp_path / "seen.json")
    assert not all(outcome.answers[1].equal)
    assert "KV connector FakeConnector: vLLM does not report" in outcome.log
    for hook in ("loaded", "saved"):
        assert told[hook]
        assert not any("indexer" in name for name in told[hook])
