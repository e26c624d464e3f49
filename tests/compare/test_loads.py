"""Loads that are asked for by name, with the stand-ins for both engines' servers."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from nsa_plugin.bench import report
from nsa_plugin.compare import load
from tests.compare.command import Behave, Read, arguments, call, failed

SHORTS = 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixed load as the stand-ins are quick to answer it."""
    sizes = {"_LONG": 120, "_SHORTS": SHORTS, "_SHORT": 20, "_MIXED_OUTPUT": 3, "_REPEAT_MIXED": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(load, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_short_requests_are_timed_behind_a_long_one(
    engine: str, fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = arguments(tmp_path, fake(), "--case", "mixed", "--together", engine=engine)
    code, out, _ = call(capsys, line)
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert record["suite"].endswith("-speed")
    assert record["left_out"] == {}
    rows = {row["case"]["measure"]: row for row in record["rows"]}
    assert rows.keys() == {"ttft_ms", "long_ttft_ms"}
    for row in rows.values():
        assert (row["case"]["requests"], row["case"]["prompt"], row["case"]["long"]) == (SHORTS, 20, 120)
        assert (row["runs"], row["baseline_runs"]) == (2, 2)
        assert row["paired_speedup"] > 0
    text = report.render(tmp_path / "records")
    assert "| 4 × 20 in, 3 out, behind one of 120 | ttft ms |" in text
    assert "| 4 × 20 in, 3 out, behind one of 120 | long ttft ms |" in text


@pytest.mark.usefixtures("small")
def test_the_long_one_is_the_first_that_a_server_takes_in(
    fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, arguments(tmp_path, fake(), "--case", "mixed", "--runs", "stock"))
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    entries.sort(key=lambda entry: entry["began"])
    rounds = [
        [entry["length"] for entry in group]
        for what, group in groupby(entries, lambda one: one["what"])
        if what == "stream"
    ]
    assert rounds == [[120, *[20] * SHORTS]] * 3  # one of them warms up


def test_output_tokens_have_a_record_that_names_them(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, arguments(tmp_path, fake(), "--case", "decode", "--output-tokens", "5"))
    record = read()
    assert (code, failed(record)) == (0, []), out
    assert record["suite"] == "sglang-0.5.16-v32-16heads-bf16-out5-speed"
    assert {row["case"]["new_tokens"] for row in record["rows"]} == {5}
    streams = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {entry["new_tokens"] for entry in streams if entry["what"] == "stream"} == {5}
    # What was saved is judged by the same loads.
    kept = tmp_path / "work" / "logs" / "measured.jsonl"
    code, _, _ = call(capsys, ["compare", "sglang", "--measured", str(kept), "--json", str(tmp_path / "again")])
    (path,) = (tmp_path / "again").glob("*/*.json")
    assert (code, json.loads(path.read_text())) == (0, record)
