"""Batches by execution path on vLLM's /metrics: a worker counts, another process answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.vllm.startup import counters
from nsa_plugin.backends.vllm.startup.counters import (
    FOLDER_VARIABLE,
    LEFT,
    MULTIPROCESS,
    SAMPLE,
    collect_here,
    labels_of,
    route_counter,
    show_left,
)
from nsa_plugin.tools.serving.common import routes
from tests.backends.fake_vllm.v32 import TRITON, planner

pytest.importorskip("prometheus_client")

LABELS = {"model_name": "model", "engine": "1"}

# The worker is forked from a process that has imported prometheus_client, as vLLM's are, and ends without a word.
SERVER = f"""
import os
from prometheus_client import REGISTRY, Counter, generate_latest
Counter("vllm:its_own", "vLLM's").inc()
from nsa_plugin.backends.vllm.startup.counters import collect_here, route_counter
from tests.backends.fake_vllm.v32 import TRITON, planner
folder = collect_here()
print(generate_latest(REGISTRY).decode().count("nsa_plugin"))
if (worker := os.fork()) == 0:
    deciding = planner(device=TRITON, decode_backend="triton")
    deciding.count = route_counter({LABELS!r})
    plan = deciding.step_plan(4, 4, 1)
    for _ in range(3):
        deciding.count(plan)
    os._exit(0)
assert os.waitpid(worker, 0)[1] == 0
print(generate_latest(REGISTRY).decode())
"""
SEVERAL_SERVERS = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def run(code: str, **environ: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in (MULTIPROCESS, FOLDER_VARIABLE)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MULTIPROCESS, FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def decode_plan(requests: int = 4) -> Any:
    return planner(device=TRITON, decode_backend="triton").step_plan(requests, requests, 1)


def test_the_one_api_server_shows_what_a_worker_counted():
    before, _, text = run(SERVER).partition("\n")
    assert before == "0"
    line = 'attention="sparse_decode",engine="1",model_name="model",phase="decode",provider="triton"'
    assert f"{SAMPLE}{{{line}}} 3.0" in text.splitlines()
    assert "# TYPE vllm:nsa_plugin_batches_total counter" in text
    assert "vllm:its_own_total 1.0" in text
    assert routes(text, "vllm") == {"decode/sparse_decode/triton": 3}


def test_several_api_servers_show_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    assert collect_here() is None, "vLLM collects the files itself"
    count = route_counter(LABELS)
    assert count is not None
    count(decode_plan())
    assert routes(run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)}), "vllm") == {"decode/sparse_decode/triton": 1}


def test_a_second_engine_in_a_process_goes_on_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    for _ in range(2):
        count = route_counter(LABELS)
        assert count is not None
        count(decode_plan())
    assert routes(run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)}), "vllm") == {"decode/sparse_decode/triton": 2}


def test_what_is_left_to_vllm_is_shown_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    show_left(["nobody collects it"])
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    show_left([])
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        show_left(["--enable-dbo", "another cache"])
    text = run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)})
    shown = [line for line in text.splitlines() if line.startswith(LEFT)]
    assert sorted(shown) == [f'{LEFT}{{reason="{reason}"}} 1.0' for reason in ("--enable-dbo", "another cache")]
    assert f"# TYPE {LEFT} gauge" in text


def test_without_a_folder_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert route_counter(LABELS) is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "of another machine"))
    assert route_counter(LABELS) is None


def test_another_file_format_warns_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setitem(sys.modules, "prometheus_client.mmap_dict", None)
    monkeypatch.setattr(counters.logger, "propagate", True)
    assert route_counter(LABELS) is None
    assert "shows no metrics" in caplog.text


def test_the_labels_equal_those_of_vllms_metrics():
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="model"), parallel_config=SimpleNamespace(data_parallel_index=1)
    )
    assert labels_of(vllm_config) == LABELS
