"""`nsa-plugin compare --together`: servers that run at the same time and are timed in turns."""

from __future__ import annotations

import json
import signal
import socket
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.compare.measured import Measured
from nsa_plugin.tools.serving.process import free_ports
from tests.tools.compare.command import Behave, Read, arguments, call, failed, spawn, until
from tests.tools.processes import alive

ROLES = "stock,plugin,control,stock-again"
SMALL = ("--case", "single", "--case", "forced")
TIMED = ("--together", *SMALL, "--case", "ttft")
REPEAT = 21  # of one request of 136 tokens
REPEAT_DECODE_IN_ONE = 9


def logged(tmp_path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The servers' actions with their roles, by start time."""
    roles = {}
    for role, server in record["servers"].items():
        words = server["command"].split()
        roles[int(words[words.index("--port") + 1])] = role
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    return sorted(({**line, "role": roles[line["port"]]} for line in lines), key=lambda line: line["began"])


def test_all_are_started_first_asked_one_after_the_other_and_timed_in_turns(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake(), "--together", "--speed", "--runs", ROLES)
    code, out, _ = call(capsys, line)
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert alive(pids) == []

    done = logged(tmp_path, record)
    assert [entry["what"] for entry in done[:4]] == ["listening"] * 4
    assert len({entry["port"] for entry in done[:4]}) == 4

    # No two servers at once: requests may overlap with those of their own server alone.
    requests = done[4:]
    busy: dict[str, Any] = {"role": "", "ended": 0.0}
    for entry in requests:
        assert entry["role"] == busy["role"] or entry["began"] >= busy["ended"]
        busy = max(busy, entry, key=lambda one: float(one["ended"]))

    streamed = [entry for entry in requests if entry["what"] == "stream"]
    whole = [entry for entry in requests if entry["what"] == "generate"]
    # The load of many prompts with an output is timed before those that are streamed.
    decoded = 3 * (REPEAT_DECODE_IN_ONE + 1)
    asked = [entry["role"] for entry in whole if entry["began"] < streamed[0]["began"]][:-decoded]
    assert list(dict.fromkeys(asked)) == ROLES.split(",")
    assert sum(one != other for one, other in pairwise(asked)) == 3  # each is asked once, from its first to its last

    # Of what is timed, three loads are a request of many prompts, which is not streamed.
    in_one = [entry["role"] for entry in whole[len(asked) :]]
    assert len(in_one) == 2 * 3 * (REPEAT + 1) + decoded
    assert all(
        sorted(in_one[place : place + 3]) == ["plugin", "stock", "stock-again"] for place in range(0, len(in_one), 3)
    )
    single = streamed[: 3 * (REPEAT + 1)]  # the load of one request comes first
    order = []
    for repetition in range(REPEAT + 1):
        turn = single[3 * repetition : 3 * repetition + 3]
        assert len({entry["prompt"] for entry in turn}) == 1
        order.append([entry["role"] for entry in turn])
    timed = ["stock", "plugin", "stock-again"]
    assert all(sorted(turn) == sorted(timed) for turn in order)
    assert [turn[0] for turn in order[:6]] == timed * 2
    assert len({entry["prompt"] for entry in single}) == REPEAT + 1

    assert record["timed"] == "in turns"
    serve = [row for row in record["rows"] if row["op"] == "serve"]
    in_one_decode = [row for row in serve if row["case"].get("in_one") and row["case"]["new_tokens"] > 1]
    assert [(row["case"]["measure"], row["runs"]) for row in in_one_decode] == [
        ("output_tokens_per_s", REPEAT_DECODE_IN_ONE),
        ("first_output_tokens_per_s", 1),  # the repetition that warms up
    ]
    assert {row["runs"] for row in serve if row not in in_one_decode} == {REPEAT}
    for row in serve:
        assert row["paired_speedup"] > 0
        assert row["baseline_again_paired_speedup"] > 0
        assert row["runs"] == row["baseline_runs"] == row["baseline_again_runs"]
    assert "Speed, medians, servers timed in turns" in out
    assert "stock again" in out

    # What was saved gives the same record again.
    kept = tmp_path / "work" / "logs" / "measured.jsonl"
    code, _, _ = call(capsys, ["compare", "sglang", "--measured", str(kept), "--json", str(tmp_path / "again")])
    (path,) = (tmp_path / "again").glob("*/*.json")
    assert code == 0
    assert json.loads(path.read_text()) == record


def test_the_second_server_of_the_plugin_is_only_timed(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake(), *TIMED, "--runs", "stock,plugin,control,stock-again,plugin-again")
    code, out, _ = call(capsys, line)
    record = read()
    assert (code, failed(record)) == (0, []), out
    runs = Measured.load(tmp_path / "work" / "logs" / "measured.jsonl").runs
    assert {role for role, run in runs.items() if not run.answers} == {"plugin-again"}
    assert runs["plugin-again"].active
    (row,) = [row for row in record["rows"] if row["op"] == "serve"]
    assert row["again_runs"] == row["runs"] == row["baseline_again_runs"] == REPEAT
    (readings,) = runs["plugin-again"].speed.values()
    assert row["again_median"] == round(statistics.median(readings["ttft_ms"]), 3)
    assert record["suite"].endswith("-two-servers")
    assert "ratios in pairs" in out


def test_a_second_server_that_the_plugin_does_not_serve_is_noticed(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake("inactive"), "--together", "--case", "ttft", "--runs", "stock,plugin,plugin-again")
    code, _, _ = call(capsys, line)
    assert code == 1
    assert failed(read()) == ["the plugin served", "the plugin's second server served"]


def test_agreement_is_that_of_servers_one_after_the_other(
    fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fake()
    found = []
    for more in ((), ("--together",)):
        call(
            capsys, [*arguments(tmp_path, model, "--runs", ROLES, *more), "--logs", str(tmp_path / f"logs{len(more)}")]
        )
        found.append(Measured.load(tmp_path / f"logs{len(more)}" / "measured.jsonl"))
    one_after_the_other, together = found
    assert together.together
    assert not one_after_the_other.together
    assert list(together.runs) == ROLES.split(",")
    assert together.prompts == one_after_the_other.prompts
    for role, run in one_after_the_other.runs.items():
        assert run.done
        assert together.runs[role].done
        assert list(together.runs[role].answers) == list(run.answers)
        assert together.runs[role].answers == run.answers
        assert together.runs[role].routes == run.routes


@pytest.mark.parametrize(
    ("mode", "roles", "errors", "answered"),
    [
        ("dies", "stock,plugin,control", {"plugin": "index_topk is a fruit", "control": "fruit"}, {"stock"}),
        ("inactive", "stock,plugin,control", {"control": "left out: the plugin did not serve"}, {"stock", "plugin"}),
        # The plugin would start for ever: it is not waited for.
        ("stock dies", "plugin,stock", {"stock": "fruit", "plugin": "left out: stock did not start"}, set()),
    ],
)
def test_server_that_does_not_start_or_serve(
    mode: str,
    roles: str,
    errors: dict[str, str],
    answered: set[str],
    fake: Behave,
    pids: Path,
    read: Read,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, fake(mode), *TIMED, "--runs", roles))
    servers = read()["servers"]
    assert code == 1
    assert alive(pids) == []
    assert {role for role, server in servers.items() if server["error"]} == errors.keys()
    for role, error in errors.items():
        assert error in servers[role]["error"]
    kept = Measured.load(tmp_path / "work" / "logs" / "measured.jsonl")
    assert {role for role, run in kept.runs.items() if "single" in run.answers} == answered
    assert {role for role, run in kept.runs.items() if run.speed} == answered
    assert {role for role, run in kept.runs.items() if run.done} == answered
    if mode != "inactive":
        assert "| ValueError: index_topk is a fruit" in out  # the end of the log


@pytest.mark.parametrize("mode", ["crashes timed", "refuses timed"])
def test_server_that_fails_while_it_is_timed_leaves_the_turns_and_keeps_its_readings(
    mode: str, fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake(mode), *TIMED, "--runs", "plugin,stock,control,stock-again")
    code, out, _ = call(capsys, line)
    record = read()
    assert alive(pids) == []
    crashes = mode == "crashes timed"
    assert code == int(crashes)
    assert failed(record) == (["complete"] if crashes else [])
    assert ("an illegal memory access" in record["servers"]["plugin"]["error"]) == crashes
    assert record["servers"]["plugin"]["skipped"] == ["ttft-136"]
    assert "plugin: ttft-136 timed 3 times only" in out or crashes
    (row,) = [row for row in record["rows"] if row["op"] == "serve"]
    # Four were answered, of which the first is not counted.
    assert (row["runs"], row["baseline_runs"], row["baseline_again_runs"]) == (3, REPEAT, REPEAT)
    assert row["paired_speedup"] > 0
    done = {role: run.done for role, run in Measured.load(tmp_path / "work" / "logs" / "measured.jsonl").runs.items()}
    assert done == {"plugin": not crashes, "stock": True, "control": True, "stock-again": True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_run_that_is_ended_while_servers_start_stops_them_all(
    number: signal.Signals, fake: Behave, pids: Path, read: Read, tmp_path: Path
) -> None:
    line = arguments(tmp_path, fake("starts for ever"), "--together")
    process = spawn(line)
    try:
        until(lambda: pids.exists() and len(alive(pids)) == 3)
        process.send_signal(number)
        process.communicate(timeout=120)
    finally:
        process.kill()
    if number is signal.SIGKILL:
        until(lambda: not alive(pids))
        return
    assert alive(pids) == []
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    (check,) = [check for check in read()["verdict"]["checks"] if check["name"] == "complete"]
    assert check["detail"].startswith({signal.SIGTERM: "terminated", signal.SIGINT: "interrupted"}[number])
    assert "plugin was not run" in check["detail"]


@pytest.mark.parametrize("mode", ["hangs", "hangs timed"])
def test_run_that_is_terminated_later_keeps_what_it_measured(
    mode: str, fake: Behave, pids: Path, read: Read, tmp_path: Path
) -> None:
    process = spawn(arguments(tmp_path, fake(mode), "--together", "--case", "single", "--case", "ttft"))
    log = tmp_path / "log"
    try:
        if mode == "hangs":
            assert process.stdout is not None
            assert any("stock: single-again, " in line for line in process.stdout)
        else:  # stock is first in the fifth turn and has its answer when the plugin is asked and hangs
            until(lambda: log.exists() and '"hang"' in log.read_text())
        process.terminate()
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 143
    assert alive(pids) == []
    record = read()
    assert failed(record)[0] == "complete"
    assert [row for row in record["rows"] if row["op"] == "agreement"]
    kept = Measured.load(tmp_path / "work" / "logs" / "measured.jsonl")
    assert not kept.runs["stock"].done
    assert kept.runs["stock"].answers["single"]["p136"].token_ids
    timed = {role: len(run.speed["ttft-136"]["ttft_ms"]) for role, run in kept.runs.items() if run.speed}
    assert timed == ({} if mode == "hangs" else {"stock": 4, "plugin": 3})


def test_budget_that_ends_while_servers_start(
    fake: Behave, pids: Path, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, _ = call(capsys, arguments(tmp_path, fake("starts for ever"), "--together", "--budget", "2"))
    assert code == 1
    assert alive(pids) == []
    servers = read()["servers"]
    assert len(servers) == 3
    assert "was not healthy after 2 s" in servers["stock"]["error"]


def test_ports_are_distinct_free_and_leave_room_above() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = free_ports(40)
        assert len(set(ports)) == 40
        assert taken.getsockname()[1] not in ports
    assert all(port + 10_000 <= 65_535 for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
