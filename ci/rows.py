"""The engine matrix as data: what is to be checked (matrix.toml) and what was (docs/compatibility.json)."""

from __future__ import annotations

import argparse
import json
import platform
import tomllib
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "compatibility.json"
CHECKS = ("run", "seams")


@dataclass(frozen=True)
class Engine:
    """One engine of matrix.toml; the fields are explained there."""

    name: str
    distribution: str
    run_distribution: str
    venv: str
    lock: str
    tests: str
    marker: str
    run: tuple[str, ...]
    seams: tuple[str, ...]
    no_run: dict[str, str] = field(default_factory=dict)
    no_gpu: dict[str, str] = field(default_factory=dict)

    def locked_version(self) -> str:
        """The version that the lock file installs."""
        for line in (ROOT / self.lock).read_text().splitlines():
            if line.startswith(f"{self.run_distribution}=="):
                return line.split()[0].partition("==")[2]
        raise ValueError(f"{self.lock} does not pin {self.run_distribution}")


@dataclass(frozen=True)
class Row:
    """The result of one check of one engine version.

    Attributes:
        check: one of `CHECKS`.
        outcome: "ok" or "failed".
        detail: what was counted, or the first failure.
        date: UTC, YYYY-MM-DD.
        python: version that did the check.
    """

    engine: str
    version: str
    check: str
    outcome: str
    detail: str
    date: str
    python: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.engine, self.version, self.check


def reasons(ranges: dict[str, str], version: str) -> list[str]:
    """Of reasons by version range, those that concern a version."""
    return [reason for versions, reason in ranges.items() if SpecifierSet(versions).contains(version)]


def checked(engine: Engine, version: str, check: str, ok: bool, detail: str) -> Row:
    """A row of today, by this Python."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return Row(engine.name, version, check, "ok" if ok else "failed", detail, today, platform.python_version())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `chosen` reads."""
    parser.add_argument("--engine", choices=tuple(engines()), help="only this engine")
    parser.add_argument("--version", action="append", metavar="V", help="only this version; may be repeated")


def chosen(args: argparse.Namespace, check: str) -> list[tuple[Engine, str]]:
    """The engine versions of a check that the options leave."""
    return [
        (engine, version)
        for engine in engines().values()
        for version in getattr(engine, check)
        if args.engine in (None, engine.name) and (not args.version or version in args.version)
    ]


def engines(path: Path = ROOT / "ci" / "matrix.toml") -> dict[str, Engine]:
    data: dict[str, dict[str, Any]] = tomllib.loads(path.read_text())
    return {
        name: Engine(name=name, **fields | {check: tuple(fields[check]) for check in CHECKS})
        for name, fields in data.items()
    }


def load(path: Path = RESULTS) -> list[Row]:
    if not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def save(new: list[Row], path: Path = RESULTS) -> None:
    """Put new rows in the place of older ones of the same check; rows of versions no longer listed go."""
    wanted = {(e.name, version, check) for e in engines().values() for check in CHECKS for version in getattr(e, check)}
    rows = {row.key: row for row in [*load(path), *new] if row.key in wanted}
    ordered = sorted(rows.values(), key=lambda row: (row.engine, row.check, _parts(row.version)))
    path.write_text(json.dumps({"schema": 1, "rows": [asdict(row) for row in ordered]}, indent=1) + "\n")


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.replace("post", "").split(".")]
