"""The Grafana dashboard and the monitoring page name only metrics, labels and values that exist."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci.rows import ROOT
from nsa_plugin.backends.sglang.startup import metrics
from nsa_plugin.backends.vllm.startup import counters
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import Phase

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/monitoring/grafana-dashboard.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ENGINES = ("sglang", "vllm")
METRICS = {
    value
    for module in (metrics, counters)
    for value in vars(module).values()
    if isinstance(value, str) and value.startswith(("sglang:", "vllm:"))
}
LABELS = {"phase", "attention", "provider", "reason", "instance", "le"}
PROVIDED_BY_ENGINE = {"time_to_first_token_seconds", "inter_token_latency_seconds"}


def queries() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return targets + [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]


def test_every_metric_of_the_dashboard_exists_in_both_engines() -> None:
    named = {name for query in queries() for name in re.findall(r"\$\{engine\}:(\w+)", query)}
    assert all("${engine}:" in query for query in queries())
    own = {name for name in named if name.startswith("nsa_plugin_")}
    assert own == {"nsa_plugin_batches_total", "nsa_plugin_left_to_stock"}
    for engine in ENGINES:
        assert {f"{engine}:{name}" for name in own} <= METRICS
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
    named = set(re.findall(r"\b((?:sglang|vllm):nsa_plugin_\w+)", PAGE))
    assert named <= METRICS
    assert METRICS - {counters.METRIC} <= named


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
