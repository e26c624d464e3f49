"""`ci.slower`: which cases of a new record are slower than before, and which of them must not be."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ci import slower
from nsa_plugin.tools.bench.cases import BenchError

HOST = {"gpu": "NVIDIA H200", "gpus": 1, "torch": "2.11.0", "triton": "3.6.0", "libraries": {}, "commit": "0123abc"}


def row(provider: str, time: float, speedup: float | None = None, **case: Any) -> dict[str, Any]:
    return {
        "op": "toy_op",
        "case": {"heads": 16, "q": 4096} | case,
        "provider": provider,
        "median_us": time,
        "min_us": time,
        "runs": 5,
        "floor_us": 1.0,
        "max_error": 0.0,
        "baseline": None if speedup is None else "stock",
        "baseline_us": None if speedup is None else time * speedup,
        "speedup": speedup,
    }


def write(path: Path, *rows: dict[str, Any], suite: str = "toy", date: str = "2026-01-02", **host: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schema": 1, "suite": suite, "command": "nsa-plugin bench", "date": date, "host": HOST | host}
    path.write_text(json.dumps(head | {"rows": list(rows)}))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str]]:
    """(exit code, lines) of the program."""
    try:
        code = slower.main([str(word) for word in words])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, (captured.out + captured.err).splitlines()


OLD = [row("stock", 100.0, 1.0), row("cuda", 50.0, 2.0), row("triton", 200.0, 0.5), row("helper", 10.0)]


@pytest.mark.parametrize(
    ("provider", "time", "code", "label"),
    [
        ("cuda", 53.0, 1, "SLOWER, was faster than its baseline: toy, toy_op heads 16, q 4096, cuda: 50.0 -> 53.0 us"),
        ("cuda", 52.0, 0, ""),
        ("cuda", 47.0, 0, "quicker: toy, toy_op heads 16, q 4096, cuda: 50.0 -> 47.0 us"),
        ("cuda", 48.0, 0, ""),
        ("triton", 300.0, 0, "slower: toy, toy_op heads 16, q 4096, triton: 200.0 -> 300.0 us"),
        ("stock", 120.0, 0, "slower: toy, toy_op heads 16, q 4096, stock: 100.0 -> 120.0 us"),
        ("helper", 20.0, 0, "slower: toy, toy_op heads 16, q 4096, helper: 10.0 -> 20.0 us (+100.0%)"),
    ],
)
def test_a_row_that_was_faster_than_its_baseline_must_not_get_slower(
    provider: str, time: float, code: int, label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = [one | {"median_us": time} if one["provider"] == provider else one for one in OLD]
    old_path, new_path = write(tmp_path / "old.json", *OLD), write(tmp_path / "new.json", *new)
    found, lines = run(capsys, old_path, new_path)
    assert found == code
    assert len(lines) == 1 + bool(label)
    assert not label or lines[0].startswith(label)
    assert lines[-1].startswith("4 rows compared: ")


def test_the_noise_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path / "old.json", row("cuda", 50.0, 2.0)), write(tmp_path / "new.json", row("cuda", 53.0, 2.0))
    assert run(capsys, *paths, "--noise", "0.1")[0] == 0
    assert run(capsys, *paths, "--noise", "0")[0] == 1
    for wrong in ("-1", "1", "some"):
        code, lines = run(capsys, *paths, f"--noise={wrong}")
        assert code == 2
        assert "allowed: a number from 0 to below 1" in lines[-1]


def test_the_summary_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = [row("stock", 100.0), row("cuda", 60.0), row("triton", 250.0), row("helper", 5.0)]
    code, lines = run(capsys, write(tmp_path / "old.json", *OLD), write(tmp_path / "new.json", *new))
    assert code == 1
    assert lines[-1] == (
        "4 rows compared: 2 slower and 1 quicker by more than 5%; 1 of the slower ones were faster than their baseline"
    )


@pytest.mark.parametrize(
    ("suite", "host"),
    [("toy", {"gpu": "NVIDIA H100"}), ("toy", {"gpus": 2}), ("toy", {"emulates": 86}), ("other", {})],
)
def test_rows_of_another_gpu_or_suite_are_not_compared(
    suite: str, host: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", row("cuda", 50.0, 2.0))
    new = write(tmp_path / "new.json", row("cuda", 90.0, 2.0), suite=suite, **host)
    code, lines = run(capsys, old, new)
    assert code == 2
    assert "nothing to compare: 1 former and 1 new rows" in lines[-1]


def test_a_case_is_the_same_whatever_the_order_of_its_fields(tmp_path: Path) -> None:
    """Records before the field `selection` are of random selections."""
    other = row("cuda", 60.0) | {"case": {"selection": "random", "q": 4096, "heads": 16}}
    rows = [slower.rows_of([("a", write(tmp_path / "a.json", one).read_text())]) for one in (row("cuda", 50.0), other)]
    (change,) = slower.changes(*rows)
    assert change.growth == pytest.approx(0.2)
    apart = row("cuda", 60.0, selection="neighbours")
    assert slower.changes(rows[0], slower.rows_of([("a", write(tmp_path / "a.json", apart).read_text())])) == []


def test_a_row_that_is_gone_is_named_if_it_was_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old" / "a.json", *OLD)
    write(tmp_path / "old" / "b.json", row("cuda", 1.0, 3.0), suite="not measured again")
    code, lines = run(capsys, old.parent, write(tmp_path / "new.json", row("stock", 100.0, 1.0)))
    assert code == 0
    assert lines[:-1] == [
        "not in the new record, was faster than its baseline: toy, toy_op heads 16, q 4096, cuda",
    ]


def test_folders_may_hold_other_records_and_the_newer_record_counts(tmp_path: Path) -> None:
    write(tmp_path / "h200" / "a.json", row("cuda", 1.0), date="2026-02-01")
    write(tmp_path / "h200" / "b.json", row("cuda", 2.0), date="2026-01-01")
    (tmp_path / "h200" / "compare.json").write_text(json.dumps({"schema": 1, "rows": [{"prompt": 1}]}))
    (found,) = slower.rows_of(slower.from_path(tmp_path)).values()
    assert found["median_us"] == 1.0


@pytest.mark.parametrize(("text", "match"), [("{", "not JSON"), ('{"rows": [{"median_us": 1}]}', "not a record")])
def test_a_broken_record_is_an_error(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BenchError, match=match):
        slower.rows_of(slower.from_path(tmp_path))


def test_former_records_come_from_git(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def git(*words: str) -> None:
        person = ("-c", "user.name=toy", "-c", "user.email=toy@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *person, *words], check=True, capture_output=True)

    git("init")
    path = write(tmp_path / "docs" / "benchmarks" / "h200" / "toy.json", row("cuda", 50.0, 2.0))
    git("add", ".")
    git("commit", "-m", "a record")
    write(path, row("cuda", 90.0, 1.1))
    old, new = slower.rows_of(slower.from_git("HEAD", tmp_path)), slower.rows_of(slower.from_path(path))
    (change,) = slower.changes(old, new)
    assert change.was_faster
    assert slower.report([change], [], 0.05) == 1
    assert "cuda: 50.0 -> 90.0 us (+80.0%), baseline 2.00x -> 1.10x" in capsys.readouterr().out
    with pytest.raises(BenchError, match="git has no docs/benchmarks at absent"):
        list(slower.from_git("absent", tmp_path))


def test_the_repositorys_records_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    records = slower.ROOT / slower.RECORDS
    code, lines = run(capsys, records / "h200", records)
    assert code == 0
    count = int(lines[-1].split()[0])
    assert lines == [
        f"{count} rows compared: 0 slower and 0 quicker by more than 5%; 0 of the slower ones were faster than their "
        "baseline"
    ]
    assert count > 1000


@pytest.mark.parametrize("words", [(), ("a",), ("--git", "HEAD", "a", "b"), ("a", "b"), ("a", "b", "c")])
def test_wrong_arguments_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *words)[0] == 2
