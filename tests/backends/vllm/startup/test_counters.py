"""The plugin's metrics on vLLM's /metrics: a worker counts, another process answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin import __version__
from nsa_plugin.backends.vllm.startup import counters
from nsa_plugin.backends.vllm.startup.counters import (
    FOLDER_VARIABLE,
    MULTIPROCESS,
    collect_here,
    labels_of,
    metrics_of,
    show,
)
from nsa_plugin.telemetry import BUILD_INFO, DECISION_SECONDS, LEFT_TO_STOCK
from nsa_plugin.tools.serving.common import routes
from tests.backends.fake_vllm.v32 import TRITON, planner

pytest.importorskip("prometheus_client")

LABELS = {"model_name": "model", "engine": "1"}
PROCESS = 'engine="1",model_name="model"'
LEFT = LEFT_TO_STOCK.of("vllm")

# The worker is forked from a process that has imported prometheus_client, as vLLM's are, and ends without a word.
SERVER = f"""
import os
from prometheus_client import REGISTRY, Counter, generate_latest
Counter("vllm:its_own", "vLLM's").inc()
from nsa_plugin.backends.vllm.startup.counters import collect_here, metrics_of
from tests.backends.fake_vllm.v32 import TRITON, planner
folder = collect_here()
print(generate_latest(REGISTRY).decode().count("nsa_plugin"))
if (worker := os.fork()) == 0:
    deciding = planner(device=TRITON, decode_backend="triton")
    deciding.metrics = metrics_of({LABELS!r})
    plan, prefill = deciding.step_plan(4, 4, 1), deciding.prefill_plan(5000, 100_000)
    for _ in range(3):
        deciding.record([(plan, [("", 2, 9)])], 0.0, [4])
    deciding.record([(prefill, [("a", 5000, 100_000)])], 0.0)
    print(prefill.indexer.rows_per_chunk, deciding.logits_budget)
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


def test_a_single_api_server_shows_a_workers_counts():
    before, numbers, text = run(SERVER).split("\n", 2)
    assert before == "0"
    chunk, budget = map(int, numbers.split())
    lines = text.splitlines()
    decode = f'{{attention="sparse_decode",{PROCESS},phase="decode",provider="triton"}}'
    assert f"vllm:nsa_plugin_batches_total{decode} 3.0" in lines
    assert f"vllm:nsa_plugin_query_tokens_total{decode} 12.0" in lines
    assert f"vllm:nsa_plugin_prefill_chunks_total{{{PROCESS}}} {float(-(-5000 // chunk))}" in lines
    shown = next(line for line in lines if line.startswith(f"vllm:nsa_plugin_logits_budget_bytes{{{PROCESS}}} "))
    assert float(shown.rpartition(" ")[2]) == budget
    for name, kind in (
        ("batches_total", "counter"),
        ("logits_budget_bytes", "gauge"),
        ("decision_seconds", "histogram"),
    ):
        assert f"# TYPE vllm:nsa_plugin_{name} {kind}" in lines
    assert "vllm:its_own_total 1.0" in lines
    found = routes(text, "vllm")
    assert found.pop("decode/sparse_decode/triton") == 3
    assert sum(found.values()) == 1


def test_decision_times_are_a_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    made = metrics_of(LABELS)
    assert made is not None
    for seconds in (1e-6, 2e-5, 3e-5, 1.0):
        made.decided(seconds, 2**20)
    text, name = run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)}), DECISION_SECONDS.of("vllm")
    assert f"{name}_count{{{PROCESS}}} 4.0" in text
    assert f"{name}_sum{{{PROCESS}}} 1.00005" in text
    counts = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}_bucket")]
    assert counts == [1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4]
    assert 'le="2e-05"' in text


def test_several_api_servers_show_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    assert collect_here() is None, "vLLM collects the files itself"
    made = metrics_of(LABELS)
    assert made is not None
    made.batch(decode_plan(), 4)
    assert routes(run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)}), "vllm") == {"decode/sparse_decode/triton": 1}


def test_a_second_engine_in_a_process_keeps_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    for _ in range(2):
        made = metrics_of(LABELS)
        assert made is not None
        made.batch(decode_plan(), 4)
    assert routes(run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)}), "vllm") == {"decode/sparse_decode/triton": 2}


def test_versions_and_stock_features_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    show("0.32.0", ["nobody collects it"])
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    for _ in range(2):
        show("0.32.0", ["--enable-dbo", "another cache"])
    text = run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)})
    shown = [line for line in text.splitlines() if line.startswith(LEFT)]
    assert sorted(shown) == [f'{LEFT}{{reason="{reason}"}} 1.0' for reason in ("--enable-dbo", "another cache")]
    assert f"# TYPE {LEFT} gauge" in text
    assert f'{BUILD_INFO.of("vllm")}{{engine_version="0.32.0",version="{__version__}"}} 1.0' in text


def test_the_logits_budget_and_stock_features_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both are gauges of one process, in one file."""
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    made = metrics_of(LABELS)
    assert made is not None
    for budget in (4096, 2048):
        made.decided(1e-5, budget)
        show("0.32.0", [f"reason {budget}"])
    made.decided(1e-5, 1024)
    text = run(SEVERAL_SERVERS, **{MULTIPROCESS: str(tmp_path)})
    assert f"vllm:nsa_plugin_logits_budget_bytes{{{PROCESS}}} 1024.0" in text
    assert f'{LEFT}{{reason="reason 2048"}} 1.0' in text
    assert f'{LEFT}{{reason="reason 4096"}} 1.0' in text


def test_without_a_folder_nothing_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert metrics_of(LABELS) is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "of another machine"))
    assert metrics_of(LABELS) is None


def test_another_file_format_warns_and_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setitem(sys.modules, "prometheus_client.mmap_dict", None)
    monkeypatch.setattr(counters.logger, "propagate", True)
    assert metrics_of(LABELS) is None
    assert "shows no metrics" in caplog.text


def test_the_labels_equal_those_of_vllms_metrics():
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="model"), parallel_config=SimpleNamespace(data_parallel_index=1)
    )
    assert labels_of(vllm_config) == LABELS
