"""The Grafana dashboard and the monitoring page name only metrics, labels and values that exist."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci.rows import ROOT
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.telemetry import METRICS, MetricKind

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/monitoring/grafana-dashboard.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ENGINES = ("sglang", "vllm")
NAMES = {metric.name for metric in METRICS}
LABELS = {"instance", "le", *itertools.chain.from_iterable(metric.labels for metric in METRICS)}
SUFFIX = re.compile(r"_(bucket|sum|count)$")
PROVIDED_BY_ENGINE = {"time_to_first_token_seconds", "inter_token_latency_seconds"}


def queries() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return targets + [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]


def test_every_metric_of_the_dashboard_exists_in_both_engines() -> None:
    # Either sign: prometheus_client 0.23 and later writes `_` for `:` in OpenMetrics, which Prometheus 2 asks for.
    named = {name for query in queries() for name in re.findall(r'\{__name__=~"\$\{engine\}\[:_\](\w+)"', query)}
    assert all(query.count("${engine}") == query.count("${engine}[:_]") > 0 for query in queries())
    own = {name for name in named if name.startswith("nsa_plugin_")}
    assert {SUFFIX.sub("", name) for name in own} == NAMES
    assert {name.removesuffix("_bucket") for name in named - own} == PROVIDED_BY_ENGINE


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_of_an_installed_engine_exist_there(engine: str) -> None:
    found = find_spec(engine)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{engine} is not installed")
    source = Path(found.submodule_search_locations[0])
    places = {"vllm": ["v1/metrics"], "sglang": ["srt/observability", "srt/metrics"]}[engine]
    files = [path for place in places for path in (source / place).glob("*.py")]
    text = "".join(path.read_text() for path in files)
    for name in PROVIDED_BY_ENGINE:
        assert f"{engine}:{name}" in text


def test_every_label_and_value_in_a_query_exists() -> None:
    values = {"phase": set(map(str, Phase)), "attention": set(map(str, Attention))}
    texts = [*queries(), *re.findall(r"`([^`]*nsa_plugin[^`]*)`", PAGE)]
    used = set()
    for query in texts:
        for label, value in re.findall(r'(\w+)=~?"([^"$]*)"', query):
            assert label in LABELS
            assert set(value.split("|")) <= values[label]
            used.add(label)
        for names in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query):
            assert {name.strip() for name in names.split(",")} <= LABELS
    assert used == {"phase", "attention"}


def test_every_metric_of_the_page_exists_and_every_metric_is_on_it() -> None:
    assert set(re.findall(r"^\| `(nsa_plugin_\w+)` \|", PAGE, re.MULTILINE)) == NAMES
    assert {SUFFIX.sub("", name) for name in re.findall(r":(nsa_plugin_\w+)", PAGE)} <= NAMES


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
        assert (metric.buckets != ()) is (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert not re.search(r"_(ms|us|milliseconds|mb|mib|kb)(_|$)", metric.name)
        assert metric.text.endswith(".")


def test_the_page_lists_every_phase_and_attention() -> None:
    for value in (*Phase, *Attention):
        assert f"`{value}`" in PAGE


def test_panels_are_complete_and_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"]) >= 8
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def filled(query: str, engine: str, interval: str = "5m") -> str:
    """A query with Grafana's variables filled in."""
    values = {"engine": engine, "__rate_interval": interval, "__range": "1h", "instance": ".*"}
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values[name[1]], query)


# A server with samples that the plugin's own writers make, and the engine's two metrics: argument 1 is the engine,
# argument 2 "text" for names with a colon, "openmetrics" for what prometheus_client makes of them there. One process
# stands for the engine's several, and every count grows.
ENGINE = """
import sys, threading, time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
engine, form = sys.argv[1:]
from prometheus_client import REGISTRY, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from nsa_plugin.backends.sglang.startup import metrics as sglang
from nsa_plugin.backends.vllm.startup import counters as vllm
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.backends.sglang.v32.batch import Batch, step_batch
from nsa_plugin.backends.sglang.v32.routes import SglangPlanner
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import MIXED, SPLIT, Metrics, show_start
left = ['a reason with "quotes"', "another"]
if engine == "vllm":
    folder = vllm.collect_here()
    made = vllm.metrics_of({"model_name": "model", "engine": "0"})
    vllm.show("0.33.0", left)
else:
    made = Metrics(sglang.ClientWriter({"tp_rank": 0}))
    show_start(sglang.ClientWriter({}), "0.5.23", left)
times = [Histogram(f"{engine}:{name}", "its own") for name in sys.stdin.read().split()]
planner = SglangPlanner(ModelShape(attn_tp_size=8), synthetic(90), Settings(), metrics=made)
stored = IndexerPlan(mode=IndexerMode.STORE_ONLY)
dense = Plan(phase=Phase.EXTEND, attention=Attention.MHA_ONE_SHOT, provider="fa3", indexer=stored)
def serve_batches():
    for context in range(100_000, 200_000):
        planner.step(step_batch(Phase.DECODE, 4, 4, 4096))
        shape = BatchShape.from_lengths(Phase.EXTEND, [5000], [context])
        plan = planner.prefill(Batch(shape, requests=[("a", 5000, context)])).plan
        made.batch(replace(plan, token_shard=True), 5000)
        made.batch(dense, 500)
        for kind in (SPLIT, MIXED):
            made.combined(kind)
        for one in times:
            one.observe(context % 100 / 100)
        time.sleep(0.1)
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        make = openmetrics.generate_latest if form == "openmetrics" else generate_latest
        kind = openmetrics.CONTENT_TYPE_LATEST if form == "openmetrics" else "text/plain; version=0.0.4"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(make(REGISTRY))
    def log_message(self, *args): pass
server = HTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
threading.Thread(target=serve_batches, daemon=True).start()
server.serve_forever()
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus, a Debian package")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("form", "relabel"), [("text", False), ("openmetrics", False), ("openmetrics", True)])
def test_prometheus_answers_every_query(form: str, relabel: bool, tmp_path: Path) -> None:
    """The dashboard's; and those of the page, where names keep their colon or the page's configuration restores it."""
    pytest.importorskip("prometheus_client.openmetrics.exposition")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PROMETHEUS_", "_NSA_", "NSA_"))}
    running: list[subprocess.Popen[str]] = []
    try:
        for engine in ENGINES:
            command = [sys.executable, "-c", ENGINE, engine, form]
            server = subprocess.Popen(
                command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            running.append(server)
            assert server.stdin is not None
            server.stdin.write(" ".join(PROVIDED_BY_ENGINE))
            server.stdin.close()
        targets = [f"127.0.0.1:{server.stdout.readline().strip()}" for server in running if server.stdout]
        config, port = tmp_path / "prometheus.json", free_port()
        (job,) = yaml.safe_load(PAGE[PAGE.index("```yaml") :].split("```")[1].removeprefix("yaml"))["scrape_configs"]
        job |= {"scrape_interval": "1s", "static_configs": [{"targets": targets}]}
        if not relabel:
            del job["metric_relabel_configs"]
        config.write_text(json.dumps({"scrape_configs": [job]}))
        options = {"config.file": config, "storage.tsdb.path": tmp_path / "data", "log.level": "error"}
        options["web.listen-address"] = f"127.0.0.1:{port}"
        flags = [f"--{name}={value}" for name, value in options.items()]
        running.append(subprocess.Popen(["prometheus", *flags], cwd=tmp_path, text=True))
        found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
        if relabel or form == "text":
            asked = re.findall(r"^\|[^|]*\| `([^`]*:nsa_plugin[^`]*)` \|$", PAGE, re.MULTILINE)
            assert len(asked) > 5
            found += [query.replace("vllm:", "${engine}:").replace("[5m]", "[$__rate_interval]") for query in asked]
        waiting = {filled(query, engine, "20s") for query in found for engine in ENGINES}
        end = time.monotonic() + 60
        while waiting and time.monotonic() < end:
            time.sleep(1)
            waiting = {query for query in waiting if not answered(port, query)}
        assert not waiting
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answered(port: int, query: str) -> bool:
    """Whether Prometheus has a number above 0 for a query."""
    asked = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{asked}", timeout=10) as answer:
            samples = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False  # it has not started yet
    return any(float(sample["value"][1]) > 0 for sample in samples)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool, a Debian package")
@pytest.mark.parametrize("engine", ENGINES)
def test_prometheus_accepts_every_query_of_the_dashboard(engine: str, tmp_path: Path) -> None:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions = [filled(query, engine) for query in found]
    rules = [{"record": f"dashboard:query_{number}", "expr": text} for number, text in enumerate(expressions)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"{len(rules)} rules found" in done.stdout


def test_grafanas_own_types_read_the_dashboard_without_losing_anything() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs Grafana's types, grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    # Grafana's editor keeps a variable's query in a second field, which its types lack.
    expected = json.loads(json.dumps(DASHBOARD))
    for variable in expected["templating"]["list"]:
        variable.pop("definition", None)
    assert lost(expected, read) == []


def lost(expected: Any, found: Any, path: str = "") -> list[str]:
    """Places of `expected` that `found` lacks or has with another value. `found` may have more: defaults."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [(f"{path}/{key}", value, found.get(key, "absent")) for key, value in expected.items()]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [
            (f"{path}/{place}", one, other) for place, (one, other) in enumerate(zip(expected, found, strict=True))
        ]
    else:
        return [] if expected == found else [f"{path}: {expected!r}, {found!r}"]
    return [place for where, one, other in pairs for place in lost(one, other, where)]
