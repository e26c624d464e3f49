"""The list of engine bugs: made from the tests' markers, and complete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci import docs, regressions
from ci.regressions import FAILURES, Failure, Guard, guards, table

FAILED = {1: Failure("it breaks", "vllm #1"), 2: Failure("it is slow", "sglang #2", vllm="no such code")}
FIRST = Guard(1, "", "test_first", "tests/kernels/test_a.py")
SECOND = Guard(2, "", "test_second", "tests/backends/sglang/v4/test_b.py")


def test_every_failure_has_a_test_or_a_reason_for_each_engine() -> None:
    rows = table().splitlines()[2:]
    assert [int(row.split(" | ")[0].strip("| ")) for row in rows] == list(FAILURES) == list(range(1, 29))


def test_a_failure_that_loses_its_last_test_is_noticed() -> None:
    found = list(guards())
    alone = [number for number, failure in FAILURES.items() if not (failure.sglang and failure.vllm)]
    for number in alone:
        with pytest.raises(ValueError, match=f"failure {number} .* has neither a test nor a reason for"):
            table([guard for guard in found if guard.number != number])


def test_a_test_outside_an_engines_folder_counts_for_both() -> None:
    made = table([FIRST, SECOND], FAILED).splitlines()
    assert made[2] == "| 1 | it breaks | vllm #1 | `test_first` | `test_first` |"
    assert made[3] == "| 2 | it is slow | sglang #2 | `test_second` | no such code |"
    with pytest.raises(ValueError, match=r"failure 2 .* for sglang"):
        table([FIRST], FAILED)


def test_tests_with_the_same_note_stand_together() -> None:
    noted = [Guard(1, note, f"test_{name}", FIRST.path) for note, name in (("CPU", "c"), ("", "a"), ("CPU", "b"))]
    assert "| `test_a`; CPU: `test_b`, `test_c` |" in table([*noted, SECOND], FAILED)


def test_an_unknown_number_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"test_a\.py: test_first names failure 3"):
        table([Guard(3, "", FIRST.test, FIRST.path)], FAILED)


def test_markers_are_read_from_the_files(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "vllm" / "test_c.py"
    file.parent.mkdir(parents=True)
    file.write_text('@pytest.mark.regression(4, "CPU")\n@pytest.mark.regression(5)\ndef test_it(): ...\n')
    assert sorted(guards(tmp_path)) == [
        Guard(4, "CPU", "test_it", "tests/vllm/test_c.py"),
        Guard(5, "", "test_it", "tests/vllm/test_c.py"),
    ]
    assert next(guards(tmp_path)).engines == ["vllm"]


@pytest.mark.parametrize("arguments", ["", "'4'", "4, 5", "4, 'CPU', 'more'", "number=4", "NUMBER"])
def test_a_marker_that_cannot_be_read_is_an_error(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_c.py").write_text(f"@pytest.mark.regression({arguments})\ndef test_it(): ...\n")
    with pytest.raises(ValueError, match=r"test_c\.py:1"):
        list(guards(tmp_path))


def test_the_check_of_the_documentation_ends_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(docs.GENERATORS, "regressions", lambda: table([], FAILED))
    monkeypatch.setattr(sys, "argv", ["ci.docs", "--check"])
    assert docs.main() == 1
    assert f"mark a test with @{regressions.MARKER}(1)" in capsys.readouterr().err
