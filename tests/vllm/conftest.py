"""Fixtures for tests with a real vLLM: a checkpoint, its reference, and an engine in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, write_checkpoint
from nsa_plugin.tools.reference import ReferenceModel
from tests.vllm.outcome import SPEC, Outcome, compare

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vllm is not installed here")
    for item in items:
        if item.get_closest_marker("engine_vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(missing)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SPEC)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    return ReferenceModel.load(checkpoint)


@pytest.fixture
def run_engine(checkpoint: Path, reference: Any, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a case on a real engine and compares it with the reference; see `engine_case.py`.

    A test that runs more than one gives each a name, the folder of its files.
    """

    def run(
        rounds: list[list[dict[str, Any]]],
        *,
        plugin: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        spec: CheckpointSpec = SPEC,
        name: str = ".",
        until: Path | None = None,
        **engine: Any,
    ) -> Outcome:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        trace = folder / "trace.jsonl"
        model = checkpoint if spec == SPEC else write_checkpoint(tmp_path / "checkpoint", spec)
        case = {
            "engine": {
                "model": str(model),
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "dtype": "float32",
                "enforce_eager": True,
                "kv_cache_memory_bytes": 1 << 28,
                "max_num_batched_tokens": 128,
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "disable_log_stats": False,
                "additional_config": {"nsa_plugin": {"enabled": True, "trace": str(trace), **(plugin or {})}},
                **engine,
            },
            "rounds": rounds,
            "until": None if until is None else str(until),
        }
        case["engine"] = {name: value for name, value in case["engine"].items() if value is not None}
        (folder / "case.json").write_text(json.dumps(case))
        done = subprocess.run(
            [sys.executable, str(HERE / "engine_case.py"), str(folder / "case.json"), str(folder / "result.json")],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        (folder / "engine.log").write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-4000:]
        result = json.loads((folder / "result.json").read_text())
        judge = reference if spec == SPEC else ReferenceModel.load(model)
        compared = [[compare(judge, answer) for answer in answers] for answers in result["rounds"]]
        lines = trace.read_text().splitlines() if trace.exists() else []
        return Outcome(compared, result["preemptions"], done.stdout, [json.loads(line) for line in lines])

    return run
