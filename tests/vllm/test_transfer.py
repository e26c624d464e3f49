"""One vLLM instance computes a prompt's KV, and another one loads it, with connectors of vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.serving.process import free_ports
from tests.vllm.outcome import ONE_PROCESS, SPEC, Outcome, assert_right, prompt, transfer

pytestmark = pytest.mark.engine_vllm

PROMPT = prompt(117, 11)  # above index_topk, one chunk
LOADED = 112  # its whole pages
ROUND = [{"ids": PROMPT, "max_tokens": 16}]
Run = Callable[..., Outcome]


def test_index_keys_that_another_instance_did_not_transfer_end_this_one(run_engine: Run, tmp_path: Path) -> None:
    def run(name: str, keys: bool) -> Outcome:
        files = transfer("FileConnector", "tests.vllm.file_connector", shared_storage_path=str(tmp_path), keys=keys)
        return run_engine([ROUND], name=name, environ=ONE_PROCESS, **files)

    saved, loaded = run("saves", True), run("loads", True)
    assert [outcome.answers[0].cached_tokens for outcome in (saved, loaded)] == [0, LOADED]
    assert loaded.trace[0]["requests"][0]["q_tokens"] == len(PROMPT) - LOADED
    assert_right(saved)
    assert_right(loaded)
    missing = f"KV connector FileConnector did not transfer the indexer's keys: {LOADED} of the {LOADED} cached tokens"
    with pytest.raises(AssertionError, match=missing):
        run("loads without keys", False)
    ended = tmp_path / "loads without keys"
    assert len((ended / "trace.jsonl").read_text().splitlines()) == 2  # batches, with a wrong token each
    assert not (ended / "result.json").exists()


def test_nixl_transfers_the_index_keys(run_engine: Run, tmp_path: Path) -> None:
    """Two instances at a time: the first keeps the prompt's pages for the second to read."""
    pytest.importorskip("nixl", reason="nixl is not installed here")
    known, done = tmp_path / "computes" / "result.json", tmp_path / "done"
    ports = free_ports(2)

    def run(name: str, port: int, until: Path | None = None, **request: Any) -> Outcome:
        environ = ONE_PROCESS | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        rounds = [[ROUND[0] | request]]
        return run_engine(rounds, name=name, until=until, environ=environ, **transfer("NixlConnector"))

    with ThreadPoolExecutor() as pool:
        computes = pool.submit(run, "computes", ports[0], done, max_tokens=1, transfer={"do_remote_decode": True})
        try:
            while not known.exists():
                assert not computes.done(), computes.exception()
                time.sleep(0.1)
            pages = json.loads(known.read_text())["rounds"][0][0]["transfer"]
            loaded = run("loads", ports[1], transfer=pages)
        finally:
            done.touch()
    assert loaded.trace[0]["requests"][0]["q_tokens"] == 1
    assert_right(computes.result())
    assert_right(loaded)


def test_vllms_connector_of_files_ends_at_the_indexers_keys_which_it_did_not_save(
    run_engine: Run, tmp_path: Path
) -> None:
    """vLLM's own error. If the connector saves the keys one day: compare the tokens instead."""
    store = tmp_path / "store"
    files = transfer("ExampleConnector", shared_storage_path=str(store))
    assert_right(run_engine([ROUND], name="saves", environ=ONE_PROCESS, **files))
    names = {path.name for path in store.glob("*/*")}
    assert names == {f"model.layers.{layer}.self_attn.attn.safetensors" for layer in range(SPEC.num_hidden_layers)}
    with pytest.raises(AssertionError, match=r"FileNotFoundError: .*\.indexer\.k_cache\.safetensors"):
        run_engine([ROUND], name="loads", environ=ONE_PROCESS, **files)
    assert not (tmp_path / "loads" / "result.json").exists()


def test_the_connector_that_only_fills_caches_for_benchmarks_is_served(run_engine: Run) -> None:
    outcome = run_engine([ROUND], environ=ONE_PROCESS, **transfer("DecodeBenchConnector"))
    assert outcome.trace[0]["requests"][0]["q_tokens"] == 1  # of the prompt: the rest is made up
    assert outcome.total() == ROUND[0]["max_tokens"]
