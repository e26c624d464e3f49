"""The runner of the matrix: what counts as a pass, and which engine a run really imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ci import matrix
from ci.rows import engines

VLLM = engines()["vllm"]


@pytest.mark.parametrize(
    ("body", "passed", "counts"),
    [
        ("def test_a(): pass\ndef test_b(): pass\n", True, "2 passed"),
        ("def test_a(): pass\ndef test_b(): assert 0\n", False, "1 passed, 1 failed"),
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('x')\n", True, "1 passed, 1 skipped"),
        ("import pytest\ndef test_a(): pytest.skip('x')\n", False, "0 passed, 1 skipped"),
        ("", False, "0 passed"),
        ("import nothing_like_this\n", False, "0 passed, 1 failed"),
    ],
)
def test_outcome_of_a_pytest_run(body: str, passed: bool, counts: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(body)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True)
    assert matrix.outcome_of(report) == (passed, counts)


def test_run_that_left_no_report_failed(tmp_path: Path) -> None:
    assert matrix.outcome_of(tmp_path / "absent.xml") == (False, "pytest left no report")


def test_locked_version_needs_no_folder() -> None:
    assert matrix.install_beside(VLLM, VLLM.locked_version()) is None


def test_other_version_is_first_on_the_path_and_settings_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("NSA_PLUGIN_STRICT", "0")
    environ = matrix.environment(tmp_path)
    assert environ["PYTHONPATH"].split(":") == [str(tmp_path), "/elsewhere"]
    assert "NSA_PLUGIN_STRICT" not in environ
    assert matrix.environment(None)["PYTHONPATH"] == "/elsewhere"


def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Any:
    """An engine whose environment is this one and whose other versions are in folders made here."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "python_of", lambda engine: sys.executable)
    info = tmp_path / "beside" / f"toyengine-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toyengine\nVersion: {version}\n")
    monkeypatch.setattr(matrix, "install_beside", lambda engine, version: tmp_path / "beside")
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  toy: of the engine\n")
    (tmp_path / "tests" / "test_toy.py").write_text(
        "import pytest\nfrom importlib.metadata import version\n"
        "@pytest.mark.toy\ndef test_version(): assert version('toyengine') == '1.2'\n"
        "def test_unmarked(): assert 0\n"
    )
    return replace(VLLM, name="toy", run_distribution="toyengine", tests="tests", marker="toy")


def test_run_of_a_version_counts_its_marked_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = matrix.run_version(toy(tmp_path, monkeypatch, "1.2"), "1.2", Console(file=StringIO()))
    assert row.outcome == "ok"
    assert row.detail.startswith("1 passed in ")


def test_run_that_would_import_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = matrix.run_version(toy(tmp_path, monkeypatch, "1.3"), "1.2", Console(file=StringIO()))
    assert (row.outcome, row.detail) == ("failed", "the environment imports 1.3 instead")


@pytest.mark.parametrize("arguments", [["--version", "9.9"], ["--engine", "tgi"], ["--check", "walk"]])
def test_bad_usage_ends_2(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ci.matrix", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error:" in done.stderr
