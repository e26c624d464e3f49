"""Batches by execution path on SGLang's /metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_plugin.backends.sglang.startup.metrics import LEFT, NAME, route_counter
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import Phase

# prometheus_client looks for its directory once, when it is imported: so each process is a new one.
SCHEDULER = """
from types import SimpleNamespace
from nsa_plugin.backends.sglang.startup.metrics import route_counter, show_left
from nsa_plugin.backends.sglang.v32.batch import step_batch
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.decision.shapes import ModelShape, Phase
count = route_counter(SimpleNamespace(enable_metrics=True), {"tp_rank": 1})
planner = SglangPlanner(ModelShape(attn_tp_size=8), synthetic(90), Settings(decode_backend="triton"), count=count)
for _ in range(3):
    planner.step(step_batch(Phase.DECODE, 4, 4, 4096))
planner.step(step_batch(Phase.IDLE, 0, 0, 4096))
show_left(SimpleNamespace(enable_metrics=False), ["without metrics"])
show_left(SimpleNamespace(enable_metrics=True), ["hisparse is on", "another cache"])
"""
SERVER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_server_sees_what_a_scheduler_counted(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(SCHEDULER)
    text = run(SERVER)
    shown = [line for line in text.splitlines() if line.startswith(LEFT)]
    assert sorted(shown) == [f'{LEFT}{{reason="{reason}"}} 1.0' for reason in ("another cache", "hisparse is on")]
    lines = [line for line in text.splitlines() if line.startswith(NAME)]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    labels = 'attention="{}",phase="{}",provider="{}",tp_rank="1"'
    assert values == {
        f"{NAME}{{{labels.format('sparse_decode', 'decode', 'triton')}}}": 3.0,
        f"{NAME}{{{labels.format('none', 'idle', 'none')}}}": 1.0,
    }


@pytest.mark.parametrize(("enabled", "directory"), [(False, True), (True, False)])
def test_without_metrics_nothing_is_counted(
    enabled: bool, directory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if directory:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert route_counter(SimpleNamespace(enable_metrics=enabled), {}) is None


def test_a_routes_counter_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    client = pytest.importorskip("prometheus_client")
    registry, looked_up = client.CollectorRegistry(), []

    class Counter(client.Counter):
        def __init__(self, *args, **named):
            super().__init__(*args, **named, registry=registry)

        def labels(self, *args, **named):
            looked_up.append(named["provider"])
            return super().labels(*args, **named)

    monkeypatch.setattr(client, "Counter", Counter)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    count = route_counter(SimpleNamespace(enable_metrics=True), {"tp_rank": 1})
    assert count is not None
    plans = [
        Plan(
            phase=Phase.DECODE,
            attention=Attention.SPARSE_DECODE,
            provider=provider,
            indexer=IndexerPlan(mode=IndexerMode.TOPK, rows_per_chunk=rows),
        )
        for provider, rows in (("cuda", 4), ("triton", 4), ("cuda", 8))
    ]
    for _ in range(5):
        for plan in plans:
            count(plan)
    # The two of cuda are different plans of one route.
    assert looked_up == ["cuda", "triton"]
    route = {"phase": "decode", "attention": "sparse_decode", "tp_rank": "1"}
    counted = {name: registry.get_sample_value(NAME, route | {"provider": name}) for name in ("cuda", "triton")}
    assert counted == {"cuda": 10, "triton": 5}
