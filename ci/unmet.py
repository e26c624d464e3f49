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


def pins(lock: Path) -> list[str]:
    """Each requirement of a lock file with its hashes, in one line."""
    lines = (line.partition("#")[0].strip() for line in lock.read_text().replace("\\\n", " ").splitlines())
    return [" ".join(line.split()) for line in lines if line]


def whole(pin: str) -> bool:
    name, _, version = pin.split()[0].partition("==")
    try:
        distribution = metadata.distribution(re.sub(r"[-_.]+", "-", name))
    except metadata.PackageNotFoundError:
        return False
    record = distribution.read_text("RECORD")
    if distribution.version != version or not record:
        return False
    # Read here because `distribution.files` leaves out what is missing, from Python 3.12 on.
    for file, _, size in csv.reader(record.splitlines()):
        try:
            found = Path(str(distribution.locate_file(file))).stat().st_size
        except OSError:
            return False
        if size and int(size) != found and not file.endswith(".pyc"):  # Python rewrites those
            return False
    return True


if __name__ == "__main__":
    print("\n".join(pin for pin in pins(Path(sys.argv[1])) if not whole(pin)))
