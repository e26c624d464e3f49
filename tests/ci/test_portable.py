"""The tables of the portable path's speed are those of its records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ci import portable


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A copy of the records that a test may change."""
    for path in portable.RECORDS.glob("portable-sparse-mla-*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def change(path: Path, speeds: dict[str, float], **wanted: Any) -> None:
    """Give the rows of provider `cuda` with these fields of a case other numbers."""
    record = json.loads(path.read_text())
    rows = [row for row in record["rows"] if row["provider"] == "cuda" and wanted.items() <= row["case"].items()]
    assert rows
    for row in rows:
        row.update(speeds)
    path.write_text(json.dumps(record))


def lines(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_prefill_s_range_follows_the_record(records: Path) -> None:
    path = records / "portable-sparse-mla-prefill.json"
    change(path, {"speedup": 0.5, "tflops": 250.4}, heads=64)
    change(path, {"speedup": 0.25, "tflops": 99.6}, heads=64, q=512, selection="random")
    change(path, {"speedup": 0.125}, heads=64, selection="overlap 80%")
    header, _, *rows = lines(portable.prefill_table(records))
    assert header == ["heads a GPU", "fp8 cache", "fp8 cache, neighbours share 95%", "bf16 cache"]
    assert [row[0] for row in rows] == ["8", "16", "32", "64", "128"]
    before = lines(portable.prefill_table())[5]
    assert rows[3] == ["64", "0.25 to 0.50 (100 to 250)", "0.50 (250)", before[3]]


def test_decode_steps_are_by_cache_and_requests(records: Path) -> None:
    change(records / "portable-sparse-mla-decode-bf16.json", {"speedup": 1.5, "tflops": 7}, heads=8, batch=512)
    change(records / "portable-sparse-mla-decode-bf16.json", {"speedup": 1.25, "tflops": 7}, heads=8, batch=128)
    header, _, *rows = lines(portable.decode_table(records))
    assert header == ["heads a GPU", "cache", "1 request", "8 requests", "32", "128 and 512"]
    by_kind = {(row[0], row[1]): row[2:] for row in rows}
    assert len(by_kind) == len(rows) == 10
    assert by_kind["8", "bf16"][3] == "1.25 to 1.50 (7)"


def test_what_no_record_has_is_left_open(records: Path) -> None:
    path = records / "portable-sparse-mla-prefill-bf16.json"
    record = json.loads(path.read_text())
    record["rows"] = [row for row in record["rows"] if row["case"]["heads"] != 128]
    path.write_text(json.dumps(record))
    assert lines(portable.prefill_table(records))[-1][3] == "-"
