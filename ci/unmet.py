"""Print the requirements of a lock file that are not completely installed here, one a line.

pip takes a distribution for installed even if its installation was interrupted, so every file of a distribution's
record is checked, with its size.
"""

from __future__ import annotations

import csv
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


def pins(lock: Path) -> list[str]:
    """Each requirement of a lock file with its hashes, in one line."""
    lines = (line.partition("#")[0].strip() for line in lock.read_text().replace("\\\n", " ").splitlines())
    return [" ".join(line.split()) for line in lines if line]


class Entry(NamedTuple):
    """A line of a distribution's record: a file, relative to site-packages, and its size if there is one."""

    file: str
    size: str
    line: str


def found(pin: str, site: Path | None = None) -> metadata.Distribution | None:
    """The distribution of a pin if its version is installed, here or in the given site-packages."""
    name, _, version = pin.split()[0].partition("==")
    where = sys.path if site is None else [str(site)]
    for distribution in metadata.distributions(name=re.sub(r"[-_.]+", "-", name), path=where):
        return distribution if distribution.version == version else None
    return None


def entries(distribution: metadata.Distribution) -> list[Entry]:
    """Read here because `distribution.files` leaves out what is missing, from Python 3.12 on."""
    lines = (distribution.read_text("RECORD") or "").splitlines(keepends=True)
    return [Entry(file, size, line) for (file, _, size), line in zip(csv.reader(lines), lines, strict=True)]


def whole(pin: str, site: Path | None = None) -> bool:
    """Whether every file of a pin's distribution is there, here or in the given site-packages."""
    distribution = found(pin, site)
    if distribution is None:
        return False
    record = entries(distribution)
    return bool(record) and all(_complete(Path(str(distribution.locate_file(entry.file))), entry) for entry in record)


def _complete(path: Path, entry: Entry) -> bool:
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return not entry.size or int(entry.size) == size or entry.file.endswith(".pyc")  # Python rewrites those


if __name__ == "__main__":
    print("\n".join(pin for pin in pins(Path(sys.argv[1])) if not whole(pin)))
