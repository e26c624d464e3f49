"""The source archive of an engine's branch, as GitHub serves it, and the record of the last good commit.

ci/last_good.json holds, by engine, the commit and date of the last archive in which the ledger found everything.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import IO

from ci.rows import ROOT

LAST_GOOD = ROOT / "ci" / "last_good.json"
REPOSITORIES = {
    "vllm": "https://github.com/vllm-project/vllm",
    "sglang": "https://github.com/sgl-project/sglang",
}
# Below the archive's top folder. vLLM's package is in the first, SGLang's in the second.
_SOURCES = ("", "python/")
_TIMEOUT_S = 60


class ArchiveError(Exception):
    """An archive cannot be read, or is not one of the engine."""


@dataclass(frozen=True)
class Revision:
    """A commit of an engine.

    Attributes:
        commit: its full hash.
        date: of the archive's files, YYYY-MM-DD. GitHub gives every file the commit's time.
    """

    commit: str
    date: str


@dataclass(frozen=True)
class Archive:
    """The Python files of an engine's source archive.

    Attributes:
        files: by path as in the engine's wheel ("vllm/engine/arg_utils.py").
        revision: what the archive was made from; None if the archive does not say.
    """

    files: Mapping[str, bytes]
    revision: Revision | None

    def read(self, path: str) -> str | None:
        """The text of a file, or None if the archive does not have it."""
        data = self.files.get(path)
        return None if data is None else data.decode("utf-8")


def load(source: str, package: str) -> Archive:
    """Read an archive into memory.

    Args:
        source: the file name or http(s) address of a zip or tar.gz, with one top folder.
        package: the engine's top-level package.

    Raises:
        ArchiveError: it cannot be fetched or read, or does not have the package.
    """
    try:
        with _opened(source) as file:
            if zipfile.is_zipfile(file):
                members, comment, date = _read_zip(file)
            else:
                file.seek(0)
                members, comment, date = _read_tar(file)
    except (OSError, HTTPException, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
        raise ArchiveError(f"{source} cannot be read as a zip or tar.gz: {error}") from error
    revision = Revision(comment, date) if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", comment) else None
    for folder in _SOURCES:
        for name in members:
            top, _, path = name.partition("/")
            if path == f"{folder}{package}/__init__.py":
                base = f"{top}/{folder}"
                files = {name.removeprefix(base): data for name, data in members.items() if name.startswith(base)}
                return Archive(files, revision)
    raise ArchiveError(f"{source} has no {package}/__init__.py in its top folder or in python/ there")


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    if not source.startswith(("http://", "https://")):
        with Path(source).open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as file, urllib.request.urlopen(source, timeout=_TIMEOUT_S) as answer:
        shutil.copyfileobj(answer, file)
        file.seek(0)
        yield file


_Read = tuple[dict[str, bytes], str, str]  # the Python files by name, the comment, and the newest file's date


def _read_zip(file: IO[bytes]) -> _Read:
    with zipfile.ZipFile(file) as archive:
        wanted = [info for info in archive.infolist() if info.filename.endswith(".py")]
        members = {info.filename: archive.read(info) for info in wanted}
        date = max((info.date_time for info in wanted), default=(0, 0, 0))
        return members, archive.comment.decode("ascii", "replace"), "{:04}-{:02}-{:02}".format(*date[:3])


def _read_tar(file: IO[bytes]) -> _Read:
    members: dict[str, bytes] = {}
    newest = 0.0
    # Once through: to go back in a tar.gz decompresses it again.
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            data = archive.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if data is not None:
                members[member.name] = data.read()
                newest = max(newest, member.mtime)
        comment = archive.pax_headers.get("comment", "")
    return members, comment, f"{datetime.fromtimestamp(newest, UTC):%Y-%m-%d}"


def last_good(engine: str, path: Path) -> Revision | None:
    """The recorded commit of an engine, or None."""
    entry = _load(path).get(engine)
    return Revision(**entry) if entry else None


def record(engine: str, revision: Revision, path: Path) -> None:
    """Put a commit in the place of the engine's recorded one."""
    path.write_text(json.dumps(_load(path) | {engine: asdict(revision)}, indent=1, sort_keys=True) + "\n")


def _load(path: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def compare_address(engine: str, good: Revision, new: Revision) -> str:
    """GitHub's page of the changes between two commits."""
    return f"{REPOSITORIES[engine]}/compare/{good.commit}...{new.commit}"
