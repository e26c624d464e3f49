"""The start-up report and the trace: what is written is what happened."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_plugin import __version__
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.errors import SettingsError
from nsa_plugin.patches.ledger import Need, Patch, PatchStatus
from nsa_plugin.settings import Settings, resolve
from nsa_plugin.telemetry import StartupReport, Trace, check_files

PATCH = Patch(name="toy.serve", engine="toy", need=Need.ENABLED, targets=(), why="because")
MHA = Plan(
    phase=Phase.EXTEND,
    attention=Attention.MHA_ONE_SHOT,
    provider="reference",
    indexer=IndexerPlan(mode=IndexerMode.STORE_ONLY),
    reasons={"attention": "the longest context, 5 tokens, fits"},
)
SPARSE = Plan(
    phase=Phase.DECODE,
    attention=Attention.SPARSE_DECODE,
    provider="reference",
    indexer=IndexerPlan(mode=IndexerMode.TOPK, provider="reference", rows_per_chunk=4),
    reasons={"attention": "one row a request"},
)


def report(**changes: object) -> StartupReport:
    fields: dict[str, object] = {
        "engine": "toy",
        "engine_version": "1.2",
        "active": True,
        "resolved": resolve(environ={}),
        "statuses": [PatchStatus(patch=PATCH, state="applied", detail="toy:serve")],
        "facts": {"device": "a CPU"},
    }
    return StartupReport(**fields | changes)  # type: ignore[arg-type]


def test_report_says_what_is_on_and_why() -> None:
    text = report().text()
    assert text.splitlines()[0] == f"nsa-plugin {__version__} on toy 1.2: serves DeepSeek sparse attention"
    assert "device: a CPU" in text
    assert "settings: all at their defaults" in text
    assert "patches applied: toy.serve" in text
    assert "note" not in text


def test_report_of_a_plugin_that_stays_out_says_so() -> None:
    assert "stays out" in report(active=False).text()


def test_report_names_the_source_of_every_setting_that_was_given() -> None:
    resolved = resolve(flags={"strict": False}, environ={"NSA_PLUGIN_STRICT": "1", "NSA_PLUGIN_TRACE": "log"})
    text = report(resolved=resolved).text()
    assert "strict=False (the engine's command line)" in text
    assert "trace='log' (the environment)" in text
    assert "note: strict is False from the engine's command line; True from the environment is ignored" in text


def test_report_warns_of_an_injected_fault() -> None:
    faulty = report(resolved=resolve(flags={"fault": "shift_indices"}, environ={}), notes=["strict is off"])
    assert faulty.all_notes()[0] == "strict is off"
    assert "deliberately wrong" in faulty.all_notes()[1]


def test_report_names_what_is_left_to_the_stock_engine(caplog: pytest.LogCaptureFixture) -> None:
    left = report(left=["hisparse is on"])
    assert "  left to the stock engine: hisparse is on" in left.text().splitlines()
    assert left.as_dict()["left_to_stock"] == ["hisparse is on"]
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        left.publish()
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(("notes", "level"), [([], logging.INFO), (["look here"], logging.WARNING)])
def test_report_is_logged_at_the_level_of_its_notes(
    notes: list[str], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        report(notes=notes).publish()
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == report(notes=notes).text()


def test_report_is_written_whole_where_the_setting_says(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("an old report")
    written = report(resolved=resolve(flags={"report": str(path)}, environ={}), notes=["look here"])
    written.publish()
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(written.as_dict()))
    assert data["schema"] == 1
    assert data["pid"] == os.getpid()
    assert data["settings"]["report"] == str(path)
    assert data["sources"]["report"] == "the engine's command line"
    assert data["patches"] == [{"name": "toy.serve", "state": "applied", "detail": "toy:serve", "why": "because"}]
    assert data["notes"] == ["look here"]
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'report' is .*cannot be written.*Allowed: a path in"):
        report(resolved=resolve(flags={"report": str(tmp_path / "absent" / "r.json")}, environ={})).publish()


def test_files_that_cannot_be_written_are_found_before_a_start(tmp_path: Path) -> None:
    for path, error in (
        (tmp_path / "absent" / "t.jsonl", "No such file"),
        (tmp_path / "file" / "t.jsonl", "No such file"),
    ):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(SettingsError, match=f"'trace' is .*cannot be written: {error}"):
            check_files(Settings(trace=str(path)))
    for trace in ("off", "log", str(tmp_path / "t.jsonl"), "here.jsonl"):
        check_files(Settings(trace=trace))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_report_needs_a_folder_to_write_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written beside its file first; a trace that exists is appended to."""
    report, trace = tmp_path / "r.json", tmp_path / "t.jsonl"
    for path in (report, trace):
        path.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    check_files(Settings(trace=str(trace)))
    with pytest.raises(SettingsError, match=r"'report' is .*cannot be written: Permission denied"):
        check_files(Settings(report=str(report)))


def test_trace_off_counts_and_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace()
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        trace.record([(MHA, [("a", 5, 5)]), (SPARSE, [("b", 1, 90)])])
        trace.record([(SPARSE, [("b", 1, 91)])])
    assert trace.counts == {"extend/mha_one_shot/reference": 1, "decode/sparse_decode/reference": 2}
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []


def test_trace_counts_a_plan_without_a_provider() -> None:
    idle = Plan(phase=Phase.IDLE, attention=Attention.NONE, provider="", indexer=IndexerPlan(mode=IndexerMode.NONE))
    trace = Trace()
    trace.record([(idle, [])])
    assert trace.counts == {"idle/none/none": 1}


def test_trace_log_says_each_distinct_plan_once(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(mode="log")
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        for _ in range(3):
            trace.record([(MHA, [("a", 5, 5)]), (SPARSE, [("b", 1, 90)])])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("new plan plan-0: extend/mha_one_shot on reference")
    assert "  attention: the longest context, 5 tokens, fits" in messages[0]
    assert messages[1].startswith("new plan plan-1: decode/sparse_decode")


def of_size(tokens: int, route: str = "decode") -> Plan:
    indexer = replace(SPARSE.indexer, rows_per_chunk=tokens)
    return replace(SPARSE, phase=Phase(route), indexer=indexer, reasons={"indexer": f"{tokens} query tokens"})


@pytest.mark.parametrize("mode", ["off", "log", "trace.jsonl"])
def test_what_a_trace_keeps_does_not_grow_with_the_batches(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plans hold the number of query tokens; a server has batches of thousands of sizes."""
    monkeypatch.chdir(tmp_path)
    trace, kept = Trace(mode=mode), []
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        for tokens in range(1, 3001):
            made = of_size(tokens)
            kept.append(weakref.ref(made))
            trace.record([(made, [("a", 1, 90)])])
    del made
    alive = sum(plan() is not None for plan in kept)
    assert alive <= (1 if mode == "log" else 0)  # the last
    assert len(caplog.records) == (12 if mode == "log" else 0)  # once for every power of two


def test_trace_log_says_again_what_differs_in_more_than_the_query_tokens(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(mode="log")
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        for plan in (of_size(64), of_size(65), of_size(64, "target_verify"), of_size(100), of_size(128)):
            trace.record([(plan, [])])
    said = [record.getMessage().splitlines()[-1] for record in caplog.records]
    assert said == ["  indexer: 64 query tokens", "  indexer: 64 query tokens", "  indexer: 128 query tokens"]


def test_trace_file_holds_every_request_with_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(mode=str(path), rank=3)
    trace.record([(MHA, [("a", 5, 5), ("c", 2, 4)]), (SPARSE, [("b", 1, 90)])])
    trace.record([(MHA, [])])
    trace.record([(SPARSE, [("b", 1, 91)])])
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["step"] == 1
    assert first["pid"] == os.getpid()
    assert first["rank"] == 3
    assert first["requests"] == [
        {"request_id": "a", "q_tokens": 5, "kv_tokens": 5, "plan": "plan-0"},
        {"request_id": "c", "q_tokens": 2, "kv_tokens": 4, "plan": "plan-0"},
        {"request_id": "b", "q_tokens": 1, "kv_tokens": 90, "plan": "plan-1"},
    ]
    assert first["plans"] == {"plan-0": MHA.as_dict(), "plan-1": SPARSE.as_dict()}
    assert second["step"] == 3
    assert second["plans"] == {"plan-0": SPARSE.as_dict()}  # names count within a line


def test_trace_to_a_place_that_cannot_be_written_is_an_error_at_start_up(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "trace.jsonl"
    with pytest.raises(SettingsError, match=r"'trace' is .*absent.*which cannot be written"):
        Trace(mode=str(path))


WRITER = """
import sys
import weakref
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.shapes import Phase
from nsa_plugin.telemetry import Trace
plan = Plan(phase=Phase.IDLE, attention=Attention.NONE, provider="", indexer=IndexerPlan(mode=IndexerMode.NONE))
trace = Trace(mode=sys.argv[1])
for step in range(50):
    trace.record([(plan, [(f"request-{i}", 1, i + 1) for i in range(500)])])
"""


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(entries) == 150
    assert {entry["pid"] for entry in entries} == {writer.pid for writer in writers}
    assert all(len(entry["requests"]) == 500 for entry in entries)


@pytest.mark.parametrize("mode", ["off", "log"])
def test_a_plan_that_comes_again_is_counted_without_being_looked_up(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hashed: list[Plan] = []
    usual = Plan.__hash__

    def hashing(plan: Plan) -> int:
        hashed.append(plan)
        return usual(plan)

    monkeypatch.setattr(Plan, "__hash__", hashing)
    trace = Trace(mode=mode)
    with caplog.at_level(logging.INFO, "nsa_plugin"):
        for _ in range(100):
            trace.record([(SPARSE, [("a", 1, 90)])])
        assert len(hashed) == (2 if mode == "log" else 0)  # to look it up, and to keep it
        trace.record([(replace(SPARSE), [])])  # another object that is equal
        trace.record([(MHA, [])])
        trace.record([(SPARSE, [])])
    assert trace.counts == {"decode/sparse_decode/reference": 102, "extend/mha_one_shot/reference": 1}
    assert len(caplog.records) == (2 if mode == "log" else 0)


def test_a_batch_without_requests_is_no_line_and_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps come without their requests: to write a plan down would be for nothing."""
    path = tmp_path / "trace.jsonl"
    trace = Trace(mode=str(path))
    with monkeypatch.context() as patched:
        patched.setattr(Plan, "as_dict", lambda plan: pytest.fail("nobody reads it"))
        trace.record([(SPARSE, [])])
    assert path.read_text() == ""
    trace.record([(MHA, []), (SPARSE, [("b", 1, 90)])])
    assert set(json.loads(path.read_text())["plans"]) == {"plan-0", "plan-1"}
    assert trace.counts.total() == 3
