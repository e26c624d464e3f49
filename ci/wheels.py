"""Source files of a wheel on the package index, one by one, without fetching the whole wheel.

pip finds the wheel, so that its configuration (index, mirror, credentials) applies. Single members are then read by
HTTP range and kept, so that a second run needs no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from remotezip import RemoteZip, RemoteZipError

from ci.rows import ROOT

CACHE = ROOT / ".cache" / "seams"

# One answer on every machine: the files of interest are the same in all wheels of a version.
_GLIBC = (17, 24, 28, 31, 34, 35)
_PLATFORM = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["--platform=manylinux2014_x86_64"]
_WHEEL = [*_PLATFORM, "--python-version=3.11", "--only-binary=:all:", "--no-deps"]
_PIP = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]


class WheelError(Exception):
    """A wheel cannot be found or read."""


def _pip(*arguments: str) -> str:
    done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WheelError((errors or [done.stderr.strip() or f"pip ended with {done.returncode}"])[-1])
    return done.stdout


def newest(distribution: str) -> str:
    """The newest final release on the package index that has a wheel for Linux on x86-64.

    Raises:
        WheelError: there is none, or the index cannot be reached.
    """
    return str(_resolved(distribution)["metadata"]["version"])


def _resolved(requirement: str) -> dict[str, Any]:
    """What pip would install: `download_info` and `metadata`, as its report has them."""
    with tempfile.TemporaryDirectory() as nowhere:
        # --target: pip looks for another platform's wheels only then; --dry-run installs nothing.
        target = ["--target", nowhere, "--dry-run", "--ignore-installed", "--report", "-"]
        report: dict[str, Any] = json.loads(_pip("install", *target, *_WHEEL, requirement))
    found: dict[str, Any] = report["install"][0]
    return found


class Wheel:
    """The Python files of one version of a distribution.

    Args:
        distribution, version: of a wheel for Linux on x86-64.
        cache: folder that keeps what was read.

    Raises:
        WheelError: from any method, when the wheel cannot be found or read.
    """

    def __init__(self, distribution: str, version: str, cache: Path = CACHE) -> None:
        self.requirement = f"{distribution}=={version}"
        self.folder = cache / f"{distribution}-{version}"
        self._zip: zipfile.ZipFile | None = None
        self._names: frozenset[str] | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def read(self, path: str) -> str | None:
        """The text of a file, or None if the wheel does not have it."""
        if path not in self._index():
            return None
        kept = self.folder / "files" / path
        if not kept.is_file():
            try:
                _write(kept, self._open().read(path))
            except RemoteZipError as error:
                raise WheelError(f"{path} of {self.requirement} cannot be read: {error}") from error
        return kept.read_text(encoding="utf-8")

    def _index(self) -> frozenset[str]:
        """Names of the wheel's Python files."""
        if self._names is None:
            kept = self.folder / "names.json"
            if not kept.is_file():
                names = [name for name in self._open().namelist() if name.endswith(".py")]
                _write(kept, json.dumps(names).encode())
            self._names = frozenset(json.loads(kept.read_text()))
        return self._names

    def _open(self) -> zipfile.ZipFile:
        if self._zip is None:
            url = self._url()
            parts = urlsplit(url)
            try:
                opened = zipfile.ZipFile(unquote(parts.path)) if parts.scheme == "file" else RemoteZip(url)
            except (RemoteZipError, zipfile.BadZipFile):
                opened = zipfile.ZipFile(self._download())  # a server without ranges, or one that only pip can ask
            self._zip = self._exit.enter_context(opened)
        return self._zip

    def _url(self) -> str:
        return str(_resolved(self.requirement)["download_info"]["url"])

    def _download(self) -> Path:
        folder = self.folder / "wheel"
        if not (wheels := list(folder.glob("*.whl"))):
            _pip("download", "--dest", str(folder), *_WHEEL, self.requirement)
            wheels = list(folder.glob("*.whl"))
        return wheels[0]


def _write(path: Path, data: bytes) -> None:
    """Through a temporary name, so that an interrupted run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
