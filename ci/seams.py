"""Check the ledger's targets in the wheels of every engine version of the matrix, without importing an engine.

``python -m ci.seams`` checks all of them and exits with 1 if one fails. The first run needs the package index; what it
read is kept in .cache/seams.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from packaging.version import Version
from rich.console import Console

from ci.rows import Engine, Row, add_options, checked, chosen
from ci.wheels import Wheel, WheelError
from nsa_plugin.commands.engines import ENGINES, check, holds
from nsa_plugin.patches.ledger import Need
from nsa_plugin.patches.static import SourceTree

CHECK = "seams"
JOBS = 4  # versions checked at once; more would be impolite to the index


def check_version(engine: Engine, version: str) -> Row:
    """Look up every target that the ledger has for this version."""
    ledger = ENGINES[engine.name].ledger
    if not holds(ledger.SUPPORTED, Version(version)):
        return checked(engine, version, CHECK, False, f"outside the supported range {ledger.SUPPORTED}")
    try:
        with Wheel(engine.distribution, version) as wheel:
            found = check(SourceTree(wheel.read), ledger.PATCHES, Version(version), set(Need))
    except WheelError as error:
        return checked(engine, version, CHECK, False, str(error))
    missing = [f"{patch.name}: {reason}" for patch, reason in found if reason]
    return checked(engine, version, CHECK, not missing, "; ".join(missing) or f"{len(found)} objects")


def check_all(wanted: Sequence[tuple[Engine, str]], console: Console) -> list[Row]:
    """Check these versions and print each result."""
    rows: list[Row] = []
    with ThreadPoolExecutor(JOBS) as pool:
        for row in pool.map(check_version, *zip(*wanted, strict=True)):
            rows.append(row)
            console.print(f"{len(rows):3} of {len(wanted)}  {row.engine} {row.version}: {row.outcome}, {row.detail}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.seams", description=__doc__.splitlines()[0])
    add_options(parser)
    wanted = chosen(parser.parse_args(), CHECK)
    if not wanted:
        parser.error("no version of ci/matrix.toml is chosen")
    rows = check_all(wanted, Console(markup=False, highlight=False, soft_wrap=True))
    failed = [row for row in rows if row.outcome != "ok"]
    print(f"{len(rows) - len(failed)} of {len(rows)} versions passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
