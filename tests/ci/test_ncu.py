"""Profiles of kernels: ncu's tables, and the page made from them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ci import ncu
from nsa_plugin.tools.bench.cases import SUITES

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTED = (ncu.SPILLING, ncu.EXECUTED, *map(STALLED.format, ("wait", "barrier")))
COLUMNS = ("ID", "Kernel Name", *(name for name, _ in ncu.METRICS.values()), *COUNTED)


def line(*values: object) -> str:
    return ",".join(f'"{value}"' for value in values) + "\n"


def launch(number: int, kernel: str, nanoseconds: int, *, registers: int = 96) -> str:
    values = {name: "50.04" for name in COLUMNS} | {"ID": number, "Kernel Name": kernel}
    values |= {"gpu__time_duration.sum": f"{nanoseconds:,}", "gpc__cycles_elapsed.avg.per_second": "1,349,831,212.86"}
    values |= {"launch__registers_per_thread": registers, "launch__shared_mem_per_block": "2,048"}
    values |= {ncu.SPILLING: "30", ncu.EXECUTED: "2,000"}
    values |= {STALLED.format("wait"): "1.5", STALLED.format("barrier"): "0.5"}
    return line(*(values[name] for name in COLUMNS))


def as_table(*launches: str) -> str:
    return "==PROF== Connected\n" + line(*COLUMNS) + line(*("" for _ in COLUMNS)) + "".join(launches)


def test_kernels_of_a_call_with_their_longest_launch() -> None:
    scan, other = "scan(int *, int)", "void fill<int>(int)"
    found = ncu.rows_of(as_table(launch(0, scan, 3000), launch(1, other, 100), launch(2, scan, 17_000, registers=168)))
    (row,) = found  # the other takes less than a twentieth
    assert (row["kernel"], row["launches"], row["total_us"], row["duration_us"]) == ("scan", 2, 20.0, 17.0)
    assert (row["registers"], row["shared_kib"], row["sm_ghz"], row["tensor_percent"]) == (168, 2.0, 1.3, 50.0)
    assert row["waits"] == {"wait": 75, "barrier": 25}
    assert (row["spilling_percent"], row["share_percent"]) == (1.5, 99.5)


def test_a_call_without_a_kernel_is_no_row() -> None:
    with pytest.raises(ValueError, match="profiled no kernel: ==ERROR== no permission"):
        ncu.rows_of("==ERROR== no permission")


def test_points_are_cases_of_suites() -> None:
    assert len({str(one) for one in ncu.POINTS}) == len(ncu.POINTS)
    for one in ncu.POINTS:
        assert one.case() in SUITES[one.suite.removeprefix("portable-")].cases
    assert {one.case().as_dict()["heads"] for one in ncu.POINTS if one.suite == "portable-sparse-mla-prefill"} == {
        16,
        64,
    }


NCU = """#!{python}
import sys
words = sys.argv[1:]
assert words[-2:] == ["--inside", {name!r}] and "--profile-from-start" in words
open(words[words.index("--log-file") + 1], "w").write({text!r})
"""


def test_a_point_is_measured_once_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ncu.POINTS[0]
    program = tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable, name=str(one), text=as_table(launch(0, "attend(int)", 9000))))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ncu, "POINTS", (one,))
    work, record = tmp_path / "work", tmp_path / "profiles.json"
    work.mkdir()
    (work / "host.json").write_text('{"gpu": "NVIDIA H200"}')
    ncu.main(["--work-dir", str(work), "--json", str(record)])
    program.unlink()
    ncu.main(["--work-dir", str(work), "--json", str(record)])  # from the table that was kept
    monkeypatch.setattr(ncu, "POINTS", (one, ncu.point("portable-sparse-mla-prefill", "cuda", heads=64)))
    ncu.main(["--work-dir", str(work), "--json", str(record), "--only", str(one)])  # ncu is gone
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["kernel"], row["total_us"], row["case"]) == ("attend", 9.0, one.case().as_dict())
    heading, _, shown = ncu.table(record).splitlines()
    assert "tensor cores" in heading
    assert "| 9 at 1.3 GHz | 50 | 96 | 50% |" in shown
    # Of another record the page shows what this one lacks.
    assert len(ncu.table(record, besides=record).splitlines()) == 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": [row | {"provider": "triton"}]}))
    assert len(ncu.table(other, besides=record).splitlines()) == 3


def test_without_ncu_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host.json").write_text('{"gpu": "NVIDIA H200"}')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^ncu is not installed"):
        ncu.main(["--work-dir", str(tmp_path)])


def test_a_point_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ncu.POINTS[0]
    (tmp_path / "host.json").write_text('{"gpu": "NVIDIA H200"}')
    (tmp_path / f"{one}.csv").write_text("==ERROR== no permission")
    monkeypatch.setattr(ncu, "POINTS", (one,))
    with pytest.raises(SystemExit, match=f"{one}: ncu profiled no kernel"):
        ncu.main(["--work-dir", str(tmp_path), "--json", str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()
