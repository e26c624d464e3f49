"""The Grafana dashboard and the monitoring page name only metrics, labels and values that exist."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

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
    named = {name for query in queries() for name in re.findall(r"\$\{engine\}:(\w+)", query)}
    assert all("${engine}:" in query for query in queries())
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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus's promtool, a Debian package")
@pytest.mark.parametrize("engine", ENGINES)
def test_prometheus_accepts_every_query_of_the_dashboard(engine: str, tmp_path: Path) -> None:
    values = {"engine": engine, "__rate_interval": "5m", "__range": "1h", "instance": ".*"}
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions = [re.sub(r"\$\{?(\w+)\}?", lambda name: values[name[1]], query) for query in found]
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
