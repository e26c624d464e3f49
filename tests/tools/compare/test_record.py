"""The speed rows of a record, from readings made by hand."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nsa_plugin.tools.compare.load import SpeedLoad
from nsa_plugin.tools.compare.measured import Measured, Run
from nsa_plugin.tools.compare.record import as_record, describe_host
from nsa_plugin.tools.compare.report import print_record
from nsa_plugin.tools.compare.verdict import judge
from nsa_plugin.tools.pages.comparisons import overview, page

LOAD = SpeedLoad(name="x", case="prefill", requests=2, prompt=100, new_tokens=1, repeat=5)
FACTS = {"heads": 16, "kv": "bf16", "tp": 1, "dp": 1, "suite": "s", "engine": "e", "model": {}, "flags": []}
FACTS |= {"command": "nsa-plugin compare sglang"}
HOST = {"gpu": "", "gpus": 0, "driver": "", "torch": "2", "triton": "3", "libraries": {}, "commit": "0123abc"}


def record(together: bool, **speed: dict[str, list[float]]) -> dict[str, Any]:
    """The record of runs with these readings of `LOAD`, by role."""
    named = {role.replace("_", "-"): readings for role, readings in speed.items()}
    one = Measured(
        facts=FACTS | {"context": 200, "index_topk": 64, "host": HOST},
        asked={"runs": list(named), "cases": ["prefill"]},
        together=together,
        runs={role: Run(role=role, speed={"x": readings} if readings else {}) for role, readings in named.items()},
    )
    return as_record(one, judge(one), [LOAD])


def test_readings_of_one_repetition_are_paired_where_they_were_timed_in_turns() -> None:
    # The host becomes slower from repetition to repetition: the ratio of each stays what it is.
    stock, plugin = [10.0, 12.0, 20.0, 30.0, 90.0], [5.0, 6.0, 16.0, 20.0, 80.0]
    made = record(True, stock={"ttft_ms": stock}, plugin={"ttft_ms": plugin})
    (row,) = made["rows"]
    assert made["timed"] == "in turns"
    assert (row["median"], row["baseline_median"], row["speedup"]) == (16, 20, 1.25)
    assert row["paired_speedup"] == 1.5
    assert (row["q1"], row["q3"], row["best"], row["runs"]) == (6, 20, 5, 5)
    assert (row["baseline_q1"], row["baseline_q3"], row["baseline_best"], row["baseline_runs"]) == (12, 30, 10, 5)
    assert not [name for name in row if "again" in name]


def test_a_second_server_of_the_plugin_has_keys_of_its_own_over_the_first_stock_server() -> None:
    readings = {"stock": [10.0, 20.0, 30.0], "plugin": [10.0, 10.0, 10.0], "plugin_again": [20.0, 20.0, 60.0]}
    (row,) = record(True, **{role: {"ttft_ms": found} for role, found in readings.items()})["rows"]
    assert (row["median"], row["speedup"], row["paired_speedup"]) == (10, 2, 2)
    assert (row["again_median"], row["again_q1"], row["again_q3"], row["again_best"]) == (20, 20, 40, 20)
    assert (row["again_speedup"], row["again_paired_speedup"], row["again_runs"]) == (1, 0.5, 3)
    assert not [name for name in row if name.startswith("baseline_again")]


def test_more_is_better_of_a_throughput() -> None:
    name = "input_tokens_per_s"
    again = {name: [100.0, 50.0, 100.0]}
    made = record(True, stock={name: [100.0, 200.0, 400.0]}, plugin={name: [200.0, 300.0, 400.0]}, stock_again=again)
    (row,) = made["rows"]
    assert (row["speedup"], row["paired_speedup"], row["best"]) == (1.5, 1.5, 400)
    assert (row["baseline_again_median"], row["baseline_again_q1"]) == (100, 75)
    assert (row["baseline_again_speedup"], row["baseline_again_paired_speedup"]) == (0.5, 0.25)


def test_the_speed_table_of_a_terminal_has_ratios_in_pairs_alone_and_whole_words_in_80_columns() -> None:
    readings = {
        "stock": [10000.0, 20000.0, 30000.0],
        "plugin": [10000.0, 10000.0, 10000.0],
        "stock_again": [10000.0, 25000.0, 60000.0],
        "plugin_again": [20000.0, 20000.0, 60000.0],
    }
    made = record(True, **{role: {"ttft_ms": found} for role, found in readings.items()})
    made["rows"][0] |= {"speedup": 7.77, "baseline_again_speedup": 8.88, "again_speedup": 9.99}
    out = io.StringIO()
    print_record(made, Console(file=out, width=80))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    heading, _, rest = shown.partition("─")
    assert "ratios in pairs" in heading
    for word in ("measure", "nsa-plugin", "better", "plugin", "again"):
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", heading), word
    assert re.findall(r"\d+\.\d+", rest.partition("Checks")[0]) == ["20000.0", "10000.0", "2.00", "0.80", "0.50"]


def test_the_speed_table_of_servers_one_after_the_other_has_the_ratios_of_medians() -> None:
    readings = {"stock": [10.0, 20.0, 30.0], "plugin": [5.0, 5.0, 5.0], "plugin_again": [20.0, 40.0, 60.0]}
    out = io.StringIO()
    print_record(
        record(False, **{role: {"ttft_ms": found} for role, found in readings.items()}), Console(file=out, width=80)
    )
    shown = out.getvalue()
    assert "in pairs" not in shown
    assert "plugin again" in shown
    assert re.findall(r"\d+\.\d+", shown.partition("Checks")[0]) == ["20.0", "5.0", "4.00", "0.50"]


def test_repetitions_that_one_server_was_not_timed_with_have_no_pair() -> None:
    (row,) = record(True, stock={"ttft_ms": [10.0, 20.0, 30.0]}, plugin={"ttft_ms": [5.0]})["rows"]
    assert (row["runs"], row["baseline_runs"]) == (1, 3)
    assert (row["paired_speedup"], row["speedup"]) == (2, 4)
    assert (row["q1"], row["median"], row["q3"]) == (5, 5, 5)


def test_readings_one_after_the_other_are_not_paired() -> None:
    made = record(False, stock={"ttft_ms": [10.0, 20.0]}, plugin={"ttft_ms": [10.0, 10.0]})
    (row,) = made["rows"]
    assert made["timed"] == "one after the other"
    assert row["speedup"] == 1.5
    assert "paired_speedup" not in row


@pytest.mark.parametrize("together", [False, True])
def test_nothing_timed(together: bool) -> None:
    made = record(together, stock={}, plugin={})
    assert made["timed"] is None
    assert made["rows"] == []


def test_tables_have_the_columns_that_there_are_readings_for() -> None:
    stock, plugin, again = ({"ttft_ms": [value]} for value in (20.0, 10.0, 16.0))
    path = Path("s.json")
    whole = page(path, record(True, stock=stock, plugin=plugin, stock_again=again))
    assert "Medians; servers were timed in turns." in whole
    assert (
        "| load | measure | stock | nsa-plugin | times better | in pairs | stock again | stock again, in pairs |"
        in whole
    )
    assert "| 2 × 100 in, 1 out | ttft ms | 20.0 | 10.0 | 2.00 | 2.00 | 1.25 | 1.25 |" in whole
    bare = page(path, record(False, stock=stock, plugin=plugin))
    assert "| load | measure | stock | nsa-plugin | times better |\n" in bare
    assert "timed one after the other." in bare


def test_a_record_says_on_how_many_cpus_the_servers_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    host = describe_host("NVIDIA H200", "1", 2, "0123abc")
    assert (host["gpu"], host["gpus"], host["cpus"]) == ("NVIDIA H200", 2, 3)
    readings = {"ttft_ms": [1.0] * 5}
    shown = record(True, stock=readings, plugin=readings)
    without = page(tmp_path / "s.json", shown)
    shown["host"] = HOST | host
    assert "e on 2 NVIDIA H200 and 3 CPUs, torch" in page(tmp_path / "s.json", shown)
    assert "CPUs" not in without


def test_a_record_says_nothing_of_where_things_lie() -> None:
    command = "nsa-plugin compare sglang --heads 8 --logs /var/x/logs --json=/var/x --beside /var/y -- --json a"
    report = {
        "text": "report='/var/x/plugin.json' (the environment); 1/2",
        "settings": {"report": "/var/x/plugin.json"},
    }
    stock = Run(role="stock", command="/usr/bin/python3 -m a --model-path /var/x/model --host 127.0.0.1", report=report)
    one = Measured(
        facts=FACTS | {"context": 200, "index_topk": 64, "host": HOST, "command": command},
        asked={"runs": ["stock"], "cases": ["prefill"]},
        runs={"stock": stock},
    )
    made = as_record(one, judge(one), [LOAD])
    assert made["command"] == "nsa-plugin compare sglang --heads 8 -- --json a"
    server = made["servers"]["stock"]
    assert server["command"] == "python3 -m a --model-path model --host 127.0.0.1"
    assert server["settings"] == {"report": "plugin.json"}
    assert server["report"] == "report='plugin.json' (the environment); 1/2"


def test_the_overview_has_a_line_for_each_comparison() -> None:
    timed = record(True, stock={"ttft_ms": [10.0, 20.0]}, plugin={"ttft_ms": [5.0, 8.0]})
    for row in timed["rows"]:
        row["case"]["requests"] = 1
    agreement = {
        "op": "agreement",
        "provider": "nsa-plugin",
        "requests": 10,
        "rejected": 1,
        "case": {"requests": "single"},
    }
    control = agreement | {"rejected": 9, "case": {"requests": "single", "fault": "shift_indices"}}
    own = agreement | {"provider": "stock", "rejected": 5}
    made = {
        "suite": "a-1.2",
        "verdict": {"holds": True, "checks": []},
        "rows": [agreement, own, control, *timed["rows"]],
    }
    check = {"name": "the plugin served", "holds": False, "detail": ""}
    broken = {"suite": "b", "verdict": {"holds": False, "checks": [check]}, "rows": []}
    lines = overview([("h200/a.md", made), ("h200/b.md", broken)]).splitlines()[2:]
    assert lines == [
        "| [a-1.2](h200/a.md) | passed its tolerance | 10 | 1 | 9 of 10 | 2.31 (100 tokens) |",
        '| [b](h200/b.md) | **failed one check (kept for the record): "the plugin served"** | - | - | - | - |',
    ]


def test_a_suite_and_its_command_name_the_settings_that_decide_otherwise() -> None:
    usual = {"enabled": True, "trace": "log", "logits_budget_mb": 512, "decode_backend": "auto"}
    suites, commands = [], []
    for settings in (usual, usual | {"decode_backend": "triton", "logits_budget_mb": 64}):
        one = Measured(
            facts=FACTS | {"context": 200, "index_topk": 64, "host": HOST},
            asked={"runs": ["plugin"], "cases": ["prefill"]},
            runs={"plugin": Run(role="plugin", report={"settings": settings})},
        )
        made = as_record(one, judge(one), [LOAD])
        suites.append(made["suite"])
        commands.append(made["command"])
    assert suites == ["s", "s-logits-budget-mb-64-decode-backend-triton"]
    given = "NSA_PLUGIN_LOGITS_BUDGET_MB=64 NSA_PLUGIN_DECODE_BACKEND=triton"
    assert commands == ["nsa-plugin compare sglang", f"{given} nsa-plugin compare sglang"]
