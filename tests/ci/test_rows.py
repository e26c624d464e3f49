"""The matrix as data, and the record of what was checked."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci import rows
from ci.rows import ROOT, Row
from nsa_plugin.commands.engines import ENGINES

ROW = Row(
    engine="vllm", version="0.32.0", check="run", outcome="ok", detail="3 passed", date="2026-01-02", python="3.11"
)


@pytest.mark.parametrize("engine", rows.engines().values(), ids=lambda engine: engine.name)
def test_matrix_lies_in_the_supported_range_and_reaches_its_ends(engine: rows.Engine) -> None:
    supported = SpecifierSet(ENGINES[engine.name].ledger.SUPPORTED)
    versions = [Version(version) for version in engine.seams]
    assert all(version in supported for version in versions)
    assert versions == sorted(set(versions))
    low, high = sorted(supported, key=lambda s: Version(s.version))
    assert versions[0].release[:2] == Version(low.version).release[:2]
    below = Version(high.version).release
    assert versions[-1].release[: len(below)] == (*below[:-1], below[-1] - 1)
    assert set(engine.run) <= set(engine.seams)


@pytest.mark.parametrize("engine", rows.engines().values(), ids=lambda engine: engine.name)
def test_locked_version_is_the_newest_that_runs(engine: rows.Engine) -> None:
    assert engine.locked_version() == engine.run[-1]
    assert f"{engine.marker}:" in " ".join(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    )


def test_a_new_row_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "compatibility.json"
    rows.save([ROW, replace(ROW, check="seams")], path)
    rows.save([replace(ROW, outcome="failed")], path)
    assert {(row.check, row.outcome) for row in rows.load(path)} == {("run", "failed"), ("seams", "ok")}


def test_rows_of_versions_that_are_no_longer_listed_go(tmp_path: Path) -> None:
    path = tmp_path / "compatibility.json"
    rows.save([replace(ROW, version="0.1.0"), ROW], path)
    assert rows.load(path) == [ROW]


def test_rows_are_in_the_order_of_their_versions(tmp_path: Path) -> None:
    path = tmp_path / "compatibility.json"
    versions = ["0.5.9", "0.5.13.post1", "0.5.21", "0.5.13", "0.5.18"]
    rows.save([replace(ROW, engine="sglang", version=v, check="seams") for v in versions], path)
    assert [row.version for row in rows.load(path)] == ["0.5.13", "0.5.13.post1", "0.5.18", "0.5.21"]


def test_no_record_is_no_rows(tmp_path: Path) -> None:
    assert rows.load(tmp_path / "absent.json") == []
