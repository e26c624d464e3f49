"""Records: written and read back whole, checked, and kept apart from those of other commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools import records
from nsa_plugin.tools.bench import record
from nsa_plugin.tools.bench.cases import BenchError
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from tests.tools.bench import fakes
from tests.tools.bench.fakes import HOST, RATES, FakeTimer


def made() -> dict[str, Any]:
    outcome = run_suite(fakes.SUITE, fakes.SCALARS[:2], fakes.context(), FakeTimer({1.0: 400.0}), RATES, BenchOptions())
    outcome.skipped.append(fakes.SCALARS[2])
    return record.as_record(fakes.SUITE, outcome, HOST, ["nsa-plugin", "bench", "scalars"])


def test_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    before = made()
    path = record.write(before, tmp_path)
    assert path == tmp_path / "h200" / "scalars.json"
    assert record.read(tmp_path) == {"h200": [(path, before)]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "words", ["--json /of/one/machine --commit 0123abc", "--json=/of/one/machine --commit=0123abc"]
)
def test_a_records_command_is_nobodys_machine(words: str) -> None:
    given = ["nsa-plugin", "bench", "scalars", *words.split(), "--runs", "7"]
    one = record.as_record(
        fakes.SUITE, run_suite(fakes.SUITE, [], fakes.context(), FakeTimer({}), RATES, BenchOptions()), HOST, given
    )
    assert one["command"] == "nsa-plugin bench scalars --runs 7"


def test_record_has_the_schema_of_the_documentation() -> None:
    one = made()
    assert (one["schema"], one["suite"], one["command"]) == (1, "scalars", "nsa-plugin bench scalars")
    assert one["host"] == HOST
    row = one["rows"][1]
    assert row == {
        "op": "scalar",
        "case": {"q": 1, "kv": 1},
        "provider": "ours",
        "median_us": 100.0,
        "min_us": 50.0,
        "runs": 7,
        "timing": "eager",
        "floor_us": 1.0,
        "extra_mib": 1.5,
        "absorb_us": 100.0,
        "baseline": "stock",
        "baseline_us": 400.0,
        "speedup": 4.0,
        "max_error": 0.0,
    }
    assert one["refused"][0] == {
        "op": "scalar",
        "case": {"q": 1, "kv": 1},
        "provider": "absent",
        "reason": "No module named 'absent'",
    }
    assert one["skipped"] == [{"op": "scalar", "case": {"q": 4, "kv": 1}}]
    json.dumps(one, allow_nan=False)


def test_what_is_wrong_with_a_record_is_said(tmp_path: Path) -> None:
    good = made()
    for broken, message in (
        (good | {"schema": 2}, "schema 1"),
        ({name: value for name, value in good.items() if name != "date"}, "'date' is missing"),
        (good | {"host": {"gpu": "x"}}, "host lacks commit"),
        (good | {"rows": [{"op": "x", "median_us": 1.0}]}, "row 0 lacks baseline"),
        (good | {"rows": [*good["rows"], 1]}, f"row {len(good['rows'])} is not an object"),
        (good | {"host": []}, "'host' is not an object"),
        (good | {"suite": 1}, "'suite' is not a string"),
        ([], "schema 1"),
    ):
        with pytest.raises(BenchError, match=message):
            record.check(broken, "here")
    folder = tmp_path / "h200"
    folder.mkdir()
    for content in (b'{"schema": 1', b"\xff"):
        (folder / "scalars.json").write_bytes(content)
        with pytest.raises(BenchError, match=r"scalars\.json: not JSON"):
            record.read(tmp_path)


def test_record_that_is_not_whole_is_not_written(tmp_path: Path) -> None:
    broken = made()
    del broken["rows"][0]["floor_us"]
    with pytest.raises(BenchError, match="floor_us"):
        record.write(broken, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_records_of_other_commands_are_left_out() -> None:
    root = Path(__file__).parents[3] / "docs" / "benchmarks"
    assert list((root / "cpu").glob("*.json"))
    assert "cpu" not in record.read(root)


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA RTX PRO 6000", "rtx-pro-6000"),
        ("", "gpu"),
    ],
)
def test_host_slug(gpu: str, slug: str) -> None:
    assert records.host_slug(gpu) == slug


def test_commit_says_whether_the_source_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "kernel.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    clean = records.checkout()
    assert len(clean) >= 7
    assert clean.isalnum()
    (tmp_path / "kernel.py").write_text("2")
    assert records.checkout() == f"{clean}+changes"


def test_outcome_of_nothing_makes_no_timing() -> None:
    empty = record.as_record(fakes.SUITE, Outcome(), HOST, [])
    assert not record.is_timing(empty)
    assert not record.is_timing(empty | {"rows": [1]})


def test_reading_records_needs_no_torch() -> None:
    code = (
        "import sys\nfrom nsa_plugin.tools.bench import record\nfrom nsa_plugin.tools.pages import plots, site\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
