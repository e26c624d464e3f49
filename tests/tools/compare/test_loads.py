"""Loads selected by name, with the stand-ins for both engines' servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.tools.compare import load
from nsa_plugin.tools.pages import site
from tests.tools.compare.command import Behave, Read, arguments, call, failed

SHORTS = 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the mixed load so that the stand-ins answer quickly."""
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
    text = "".join(site.pages(tmp_path / "records").values())
    assert "| 4 × 20 in, 3 out, behind one of 120 | ttft ms |" in text
    assert "| 4 × 20 in, 3 out, behind one of 120 | long ttft ms |" in text


def test_prompts_with_lengths_in_turn_are_timed_in_one_request(
    fake: Behave, read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_TURNS": 2, "_TURN_LONG": 100, "_TURN_SHORT": 20, "_REPEAT_TURNS": 2}.items():
        monkeypatch.setattr(load, name, value)
    code, out, _ = call(capsys, arguments(tmp_path, fake(), "--case", "turns", "--together"))
    record = read()
    assert (code, failed(record)) == (0, []), out
    (row,) = record["rows"]
    case = row["case"]
    assert (case["requests"], case["prompt"], case["turns"], case["in_one"]) == (4, 60, [100, 20], True)
    assert (row["runs"], case["measure"]) == (2, "input_tokens_per_s")
    assert "4 × 100 and 20 in turn in, 1 out" in "".join(site.pages(tmp_path / "records").values())


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


MIXED = load.SpeedLoad(name="mixed", case="mixed", requests=3, prompt=2, new_tokens=1, repeat=1, long=9)


def test_the_long_ones_time_is_in_no_other_reading() -> None:
    timed = [load._Timed(first=first, tokens=1) for first in (5.0, 1.0, 2.0, 3.0)]
    found = load._readings(MIXED, timed, 1.0)
    assert (found["ttft_ms"], found["long_ttft_ms"]) == (2000.0, 5000.0)


def test_the_short_ones_are_sent_behind_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, float]] = []

    async def stream(session: Any, engine: Any, url: str, body: str, after: float) -> load._Timed:
        sent.append((len(json.loads(body)), after))
        return load._Timed(first=1.0, tokens=1)

    async def flush(*_: Any) -> None:
        pass

    monkeypatch.setattr(load, "_stream", stream)
    monkeypatch.setattr(load, "flush", flush)
    engine: Any = SimpleNamespace(body=lambda prompts, new_tokens, stream: prompts[0])
    load.measure(engine, "", MIXED, 0, 100, 60.0)
    assert sent == [(9, 0.0), *[(2, load._HEAD_START_S)] * 3]
    assert load._HEAD_START_S > 0


def test_a_requests_time_counts_from_its_own_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    async def lines() -> AsyncIterator[bytes]:
        clock[0] += 2.0
        yield b"data: 1"

    @asynccontextmanager
    async def post(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=200, content=lines())

    monkeypatch.setattr(load, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine: Any = SimpleNamespace(generate_path="/", streamed=int)
    session: Any = SimpleNamespace(post=post)
    assert asyncio.run(load._stream(session, engine, "", "{}", 7.0)).first == 2.0
    assert clock[0] == 109.0
