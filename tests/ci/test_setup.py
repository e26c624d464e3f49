"""The set-up script on a small project made here: what it installs, repairs, skips and refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# A build backend that needs nothing: an editable wheel with a .pth file.
BACKEND = """
import os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "nsa_plugin-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("nsa_plugin.pth", os.getcwd())
        info = "nsa_plugin-0.0.1.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: nsa-plugin\\nVersion: 0.0.1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def make_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "ci").mkdir()
    for name in ("setup.sh", "unmet.py", "share.py", "__init__.py"):
        shutil.copy(ROOT / "ci" / name, folder / "ci" / name)
    (folder / "nsa_plugin").mkdir()
    (folder / "nsa_plugin" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    make_wheel(folder / "wheels", "toy", "1.0")
    make_wheel(folder / "wheels", "toy", "2.0")
    make_wheel(folder / "wheels", "other", "1.0")
    make_wheel(folder / "torch" / "torch", "torch", "2.13.0+cpu")
    (folder / "torch" / "torch" / "index.html").write_text(
        '<a href="torch-2.13.0%2Bcpu-py3-none-any.whl">torch-2.13.0+cpu-py3-none-any.whl</a>'
    )
    (folder / "toy.txt").write_text("# a comment\ntoy==1.0\nother==1.0\n")
    (folder / "toy2.txt").write_text("toy==2.0\n")
    (folder / "more.txt").write_text("other==1.0\n")
    (folder / "torch.txt").write_text("torch==2.13.0+cpu\ntoy==1.0\n")
    (folder / "absent.txt").write_text("absent==1.0\n")
    return folder


def setup(project: Path, venv: str, *locks: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHONPATH"))}
    environ |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(project / "wheels")}
    environ |= {"PYTHON": sys.executable, "SETUP_GB": "0"} | changes
    return subprocess.run(
        ["bash", str(project / "ci" / "setup.sh"), venv, *locks],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )


def ask(project: Path, venv: str, code: str) -> str:
    command = [str(project / venv / "bin" / "python"), "-I", "-c", code]  # a PYTHONPATH must not stand in
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


@pytest.fixture(scope="module")
def ready(project: Path) -> str:
    """An environment that was set up once."""
    done = setup(project, ".venv", "toy.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    return ".venv"


def test_locked_versions_and_the_plugin_are_installed(project: Path, ready: str) -> None:
    assert ask(project, ready, "import toy, other; print(toy.version, other.version)") == "1.0 1.0"
    assert ask(project, ready, "import nsa_plugin; print(nsa_plugin.__file__)").startswith(str(project))


def test_second_run_installs_nothing(project: Path, ready: str) -> None:
    log = (project / ready / "setup.log").read_text()
    done = setup(project, ready, "toy.txt")
    assert done.returncode == 0
    assert done.stdout == "setup: .venv is ready\n"
    assert (project / ready / "setup.log").read_text() == log


def test_further_lock_adds_only_what_is_missing(project: Path, ready: str) -> None:
    done = setup(project, ready, "toy.txt", "more.txt")
    assert done.returncode == 0
    assert "installing" not in done.stdout


def test_file_with_another_hash_is_refused(project: Path) -> None:
    good = sha256((project / "wheels" / "toy-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    for digest, code in (("0" * 64, 1), (good, 0)):
        (project / "hashed.txt").write_text(f"toy==1.0 \\\n    --hash=sha256:{digest}\n")
        done = setup(project, ".venv-hash", "hashed.txt", PLUGIN="none")
        assert done.returncode == code, done.stdout + done.stderr
        (site,) = (project / ".venv-hash" / "lib").glob("python*/site-packages")
        assert (site / "toy.py").exists() == (code == 0)


def test_changed_lock_is_followed(project: Path, ready: str) -> None:
    try:
        assert setup(project, ready, "toy2.txt").returncode == 0
        assert ask(project, ready, "import toy; print(toy.version)") == "2.0"
    finally:
        (project / ready / ".done" / "toy.txt").unlink()
        assert setup(project, ready, "toy.txt").returncode == 0
    assert ask(project, ready, "import toy; print(toy.version)") == "1.0"


def test_interrupted_installation_is_repaired(project: Path, ready: str) -> None:
    """What pip leaves when it is killed: metadata that says installed, files that are missing or short."""
    (site,) = (project / ready / "lib").glob("python*/site-packages")
    (site / "toy.py").unlink()
    (project / ready / ".done" / "toy.txt").unlink()
    done = setup(project, ready, "toy.txt")
    assert done.returncode == 0, done.stderr
    assert "installing 1 packages" in done.stdout
    assert ask(project, ready, "import toy; print(toy.version)") == "1.0"


def site_of(project: Path, venv: str) -> Path:
    (site,) = (project / venv / "lib").glob("python*/site-packages")
    return site


def test_packages_of_another_environment_are_linked_not_installed_twice(project: Path, ready: str) -> None:
    """The same versions alone: toy 2.0 is not the other environment's toy 1.0."""
    done = setup(project, ".venv-shared", "more.txt", "toy2.txt", SHARE=ready)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 packages of more.txt are those of .venv" in done.stdout
    assert "installing 1 packages of toy2.txt" in done.stdout
    assert ask(project, ".venv-shared", "import toy, other; print(toy.version, other.version)") == "2.0 1.0"
    assert ask(project, ready, "import toy, other; print(toy.version, other.version)") == "1.0 1.0"
    linked, installed = (site_of(project, ".venv-shared") / name for name in ("other.py", "toy.py"))
    assert linked.samefile(site_of(project, ready) / "other.py")
    assert not installed.samefile(site_of(project, ready) / "toy.py")


def test_another_version_does_not_change_the_environment_that_shares(project: Path, ready: str) -> None:
    assert setup(project, ".venv-moved", "toy.txt", SHARE=ready).returncode == 0
    assert setup(project, ".venv-moved", "toy2.txt", SHARE=ready).returncode == 0
    assert ask(project, ".venv-moved", "import toy; print(toy.version)") == "2.0"
    assert ask(project, ready, "import toy; print(toy.version)") == "1.0"


def test_commands_are_not_shared_and_the_record_does_not_miss_them(project: Path, ready: str) -> None:
    """A command names the Python that it starts, so the other environment's would start the wrong one."""
    site = site_of(project, ready)
    command = project / ready / "bin" / "toy"
    record = site / "toy-1.0.dist-info" / "RECORD"
    before = record.read_text()
    command.write_text("#!/bin/sh\n")
    record.write_text(before + "../../../bin/toy,,10\n")
    try:
        assert setup(project, ".venv-commands", "toy.txt", SHARE=ready).returncode == 0
    finally:
        command.unlink()
        record.write_text(before)
    assert not (project / ".venv-commands" / "bin" / "toy").exists()
    (project / ".venv-commands" / ".done" / "toy.txt").unlink()
    assert "installing" not in setup(project, ".venv-commands", "toy.txt").stdout


def test_incomplete_package_is_not_shared(project: Path, ready: str) -> None:
    source = site_of(project, ready) / "toy.py"
    kept = source.read_bytes()
    source.unlink()
    try:
        done = setup(project, ".venv-whole", "toy.txt", SHARE=ready)
    finally:
        source.write_bytes(kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ask(project, ".venv-whole", "import toy; print(toy.version)") == "1.0"


@pytest.mark.parametrize("other", ["no-such-environment", ""])
def test_without_another_environment_everything_is_installed(other: str, project: Path) -> None:
    venv = f".venv-alone{len(other)}"
    done = setup(project, venv, "more.txt", SHARE=other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing 1 packages of more.txt" in done.stdout


def test_environment_whose_python_is_gone_is_made_again(project: Path, ready: str) -> None:
    shutil.copytree(project / ready, project / ".venv-broken", symlinks=True)
    (project / ".venv-broken" / "bin" / "python").unlink()
    done = setup(project, ".venv-broken", "toy.txt")
    assert done.returncode == 0, done.stderr
    assert ask(project, ".venv-broken", "import toy; print(toy.version)") == "1.0"


def test_torch_comes_from_its_own_index_where_pip_does_not_find_it(project: Path) -> None:
    done = setup(project, ".venv-torch", "torch.txt", TORCH_INDEX=(project / "torch").as_uri(), PIP_NO_INDEX="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pip is not configured to find torch==2.13.0+cpu; asking file://" in done.stdout
    assert ask(project, ".venv-torch", "import torch; print(torch.version)") == "2.13.0+cpu"


@pytest.mark.parametrize(
    ("venv", "lock", "changes", "message"),
    [
        (".venv-a", "toy.txt", {"SETUP_GB": "99999999"}, "MiB free; about 99999999 GB are needed for .venv-a"),
        (".venv-b", "toy.txt", {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python of version 3.11 or later"),
        (".venv", "absent.txt", {}, "pip could not install absent.txt; the whole output is in .venv/setup.log"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_message(
    venv: str, lock: str, changes: dict[str, str], message: str, project: Path, ready: str
) -> None:
    done = setup(project, venv, lock, **changes)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("setup: error:")]
    assert message in error


def test_torch_that_is_nowhere_is_said(project: Path, ready: str) -> None:
    (project / "empty").mkdir()
    done = setup(project, ready, "torch.txt", TORCH_INDEX=(project / "empty").as_uri(), PIP_NO_INDEX="")
    assert done.returncode == 1
    assert "TORCH_INDEX" in done.stderr


def test_machine_without_a_new_enough_python_is_told(project: Path, tmp_path: Path) -> None:
    for name in ("bash", "dirname", "mkdir", "flock", "df", "du", "awk", "cut", "cat"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = setup(project, ".venv-none", "toy.txt", PYTHON="", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no Python of version 3.11 or later on PATH" in done.stderr
    assert "make PYTHON=" in done.stderr
