"""Check the ledger's targets in the wheels of every engine version of the matrix; nothing is imported.

``python -m ci.seams`` checks all of them and ends 1 if one does not hold. Needs the package index the
first time; afterwards everything is in .cache/seams.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from packaging.version import Version
from rich.console import Console

from ci.rows import Engine, Row, engines
from ci.wheels import Wheel, WheelError
from nsa_plugin.commands.engines import ENGINES, check, holds
from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.static import SourceTree

JOBS = 4  # versions looked at at once; more would be impolite to the index


def check_version(engine: Engine, version: str) -> Row:
    """Look up every target that the ledger has for this version."""
    ledger = ENGINES[engine.name].ledger
    if not holds(ledger.SUPPORTED, Version(version)):
        return _row(engine, version, False, f"outside the supported range {ledger.SUPPORTED}")
    try:
        with Wheel(engine.distribution, version) as wheel:
            found = check(SourceTree(wheel.read), ledger.PATCHES, Version(version), set(Need))
    except WheelError as error:
        return _row(engine, version, False, str(error))
    missing = [f"{patch.name}: {reason}" for patch, reason in found if reason]
    return _row(engine, version, not missing, "; ".join(missing) or f"{len(found)} objects")


def _row(engine: Engine, version: str, ok: bool, detail: str) -> Row:
    return Row(
        engine=engine.name,
        version=version,
        check="seams",
        outcome="ok" if ok else "failed",
        detail=detail,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        python=platform.python_version(),
    )


def check_all(chosen: Iterable[tuple[Engine, str]], console: Console) -> list[Row]:
    chosen = list(chosen)
    rows: list[Row] = []
    with ThreadPoolExecutor(JOBS) as pool:
        for row in pool.map(check_version, *zip(*chosen, strict=True)):
            rows.append(row)
            console.print(f"{len(rows):3} of {len(chosen)}  {row.engine} {row.version}: {row.outcome}, {row.detail}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.seams", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=tuple(engines()), help="only this engine")
    parser.add_argument("--version", action="append", metavar="V", help="only this version; may be repeated")
    args = parser.parse_args()
    chosen = [
        (engine, version)
        for engine in engines().values()
        for version in engine.seams
        if args.engine in (None, engine.name) and (not args.version or version in args.version)
    ]
    if not chosen:
        parser.error("no version of ci/matrix.toml is chosen")
    rows = check_all(chosen, Console(markup=False, highlight=False, soft_wrap=True))
    failed = [row for row in rows if row.outcome != "ok"]
    print(f"{len(rows) - len(failed)} of {len(rows)} versions hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
