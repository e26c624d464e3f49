"""The plugin's metrics on SGLang's /metrics."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_plugin import __version__
from nsa_plugin.backends.sglang.startup.metrics import metrics_of
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.telemetry import BATCHES, BUILD_INFO, LEFT_TO_STOCK

NAME, LEFT = BATCHES.of("sglang"), LEFT_TO_STOCK.of("sglang")
# prometheus_client looks for its directory once, when it is imported: so each process is a new one.
SCHEDULER = """
from types import SimpleNamespace
from nsa_plugin.backends.sglang.startup.metrics import metrics_of, show
from nsa_plugin.backends.sglang.v32.batch import Batch, step_batch
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
made = metrics_of(SimpleNamespace(enable_metrics=True), {"tp_rank": 1})
planner = SglangPlanner(ModelShape(attn_tp_size=8), synthetic(90), Settings(decode_backend="triton"), metrics=made)
for _ in range(3):
    planner.step(step_batch(Phase.DECODE, 4, 4, 4096))
planner.step(step_batch(Phase.IDLE, 0, 0, 4096))
shape = BatchShape.from_lengths(Phase.EXTEND, [5000], [100_000])
prefill = planner.prefill(Batch(shape, requests=[("a", 5000, 100_000)])).plan
print(prefill.provider, prefill.attention, prefill.indexer.rows_per_chunk, planner.logits_budget)
show(SimpleNamespace(enable_metrics=False), "0.5.23", ["without metrics"])
show(SimpleNamespace(enable_metrics=True), "0.5.23", ["hisparse is on", "another cache"])
"""
SERVER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_the_server_shows_a_schedulers_counts(tmp_path: Path):
    pytest.importorskip("prometheus_client")
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    provider, attention, chunk, budget = run(SCHEDULER).split()
    text = run(SERVER)
    shown = [line for line in text.splitlines() if line.startswith(LEFT)]
    assert sorted(shown) == [f'{LEFT}{{reason="{reason}"}} 1.0' for reason in ("another cache", "hisparse is on")]
    assert f'{BUILD_INFO.of("sglang")}{{engine_version="0.5.23",version="{__version__}"}} 1.0' in text

    def values(name: str) -> dict[str, float]:
        lines = [line for line in text.splitlines() if line.startswith(f"sglang:nsa_plugin_{name}{{")]
        return {line[line.index("{") : line.rindex(" ")]: float(line.rpartition(" ")[2]) for line in lines}

    labels = '{{attention="{}",phase="{}",provider="{}",tp_rank="1"}}'
    decode, idle = labels.format("sparse_decode", "decode", "triton"), labels.format("none", "idle", "none")
    extend, rank = labels.format(attention, "extend", provider), '{tp_rank="1"}'
    assert values("batches_total") == {decode: 3, idle: 1, extend: 1}
    assert values("query_tokens_total") == {decode: 12, idle: 0, extend: 5000}
    assert values("prefill_chunks_total") == {rank: -(-5000 // int(chunk))}
    assert values("logits_budget_bytes") == {rank: int(budget)}
    assert values("decision_seconds_count") == {rank: 3}  # of steps alike, the first
    assert "# TYPE sglang:nsa_plugin_decision_seconds histogram" in text


@pytest.mark.parametrize(("enabled", "directory"), [(False, True), (True, False)])
def test_without_metrics_nothing_is_counted(
    enabled: bool, directory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if directory:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert metrics_of(SimpleNamespace(enable_metrics=enabled), {}) is None


def test_a_routes_counter_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    client = pytest.importorskip("prometheus_client")
    registry, looked_up = client.CollectorRegistry(), []

    def counting(kind):
        class Registered(kind):
            def __init__(self, *args, **named):
                super().__init__(*args, **named, registry=registry)

            def labels(self, *args, **named):
                looked_up.extend([named["provider"]] if "provider" in named else [])
                return super().labels(*args, **named)

        return Registered

    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(client, name, counting(getattr(client, name)))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    made = metrics_of(SimpleNamespace(enable_metrics=True), {"tp_rank": 1})
    assert made is not None
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
            made.batch(plan, 4)
    # The two of cuda are different plans of one route.
    assert looked_up == ["cuda", "cuda", "triton", "triton"]  # batches and query tokens
    route = {"phase": "decode", "attention": "sparse_decode", "tp_rank": "1"}
    counted = {name: registry.get_sample_value(NAME, route | {"provider": name}) for name in ("cuda", "triton")}
    assert counted == {"cuda": 10, "triton": 5}
    resharded = "sglang:nsa_plugin_resharded_query_tokens_total", {"phase": "decode", "tp_rank": "1"}
    assert registry.get_sample_value(*resharded) is None
    for _ in range(2):
        made.batch(replace(plans[0], token_shard=True), 64)
    assert registry.get_sample_value(*resharded) == 128
