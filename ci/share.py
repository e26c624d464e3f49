"""Hard-link the packages of a lock file from another environment, so that two environments do not store them twice.

Run ``python -m ci.share OTHER LOCK`` with this environment's Python; OTHER must have the same Python version. Commands
(`bin/`) are not linked, because each names the Python that it starts. The record here leaves them out.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from ci.unmet import entries, found, pins, whole

SITE = Path(sysconfig.get_path("purelib"))


def share(distribution: metadata.Distribution, site: Path) -> None:
    """Link the distribution's files. Its record comes last: until then pip and `whole` see that it is incomplete."""
    kept = [entry for entry in entries(distribution) if not entry.file.startswith("..")]
    record = next(SITE / entry.file for entry in kept if entry.file.endswith(".dist-info/RECORD"))
    for target in (SITE / entry.file for entry in kept):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if target != record:
            os.link(site / target.relative_to(SITE), target)
    record.write_text("".join(entry.line for entry in kept))


def main(other: Path, lock: Path) -> None:
    site = other.resolve() / SITE.relative_to(Path(sys.prefix).resolve())
    shared = [pin for pin in pins(lock) if not whole(pin) and whole(pin, site)]
    for pin in shared:
        distribution = found(pin, site)
        assert distribution is not None  # as it is whole
        share(distribution, site)
    if shared:
        print(f"{len(shared)} packages of {lock} are those of {other}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
