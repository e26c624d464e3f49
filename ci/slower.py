"""Compare new records of `nsa-plugin bench` with former ones: which cases got slower, which quicker.

    python -m ci.slower OLD NEW            # folders or files of records
    python -m ci.slower --git REV [NEW]    # the records of a git revision and, unless NEW names others, docs/benchmarks

Rows are compared if both have the suite, the case, the provider and the GPU. The exit code is 1 if a row that was
faster than its baseline got slower by more than the noise, and 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.rows import ROOT
from nsa_plugin.tools.bench import record
from nsa_plugin.tools.bench.cases import BenchCase, BenchError, selection_of

RECORDS = "docs/benchmarks"
Row = dict[str, Any]
Where = tuple[str, int, int, str]
"""GPU, number of GPUs, the SM version that a portable suite emulates (0: none), and suite."""
Key = tuple[Where, str, tuple[tuple[str, Any], ...], str]


@dataclass(frozen=True)
class Change:
    """A row that the former and the new records have."""

    where: Where
    old: Row
    new: Row

    @property
    def growth(self) -> float:
        """The change of the median: 0.1 for one that is 10 % longer."""
        return float(self.new["median_us"]) / float(self.old["median_us"]) - 1

    @property
    def was_faster(self) -> bool:
        """Whether the former median was below the baseline's."""
        return was_faster(self.old)

    def slower(self, noise: float) -> bool:
        return self.growth > noise

    def quicker(self, noise: float) -> bool:
        return 1 / (1 + self.growth) - 1 > noise

    def __str__(self) -> str:
        speedups = " -> ".join(f"{row['speedup']:.2f}x" for row in (self.old, self.new) if row["speedup"] is not None)
        times = f"{self.old['median_us']:.1f} -> {self.new['median_us']:.1f} us ({self.growth:+.1%})"
        return f"{describe(self.where, self.old)}: {times}" + (f", baseline {speedups}" if speedups else "")


def was_faster(row: Row) -> bool:
    """Whether a row's median is below its baseline's; False without a baseline."""
    return row["speedup"] is not None and row["speedup"] > 1


def describe(where: Where, row: Row) -> str:
    """A row as text: its suite, case and provider."""
    return f"{where[-1]}, {BenchCase(row['op'], tuple(row['case'].items()))}, {row['provider']}"


def from_path(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of a record's file, or of every JSON file in a folder.

    Raises:
        BenchError: the path does not exist.
    """
    if not path.exists():
        raise BenchError(f"{path}: no such file or folder")
    for file in [path] if path.is_file() else sorted(path.rglob("*.json")):
        yield str(file), file.read_text()


def from_git(revision: str, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Name and text of every JSON file in docs/benchmarks at a revision.

    Raises:
        BenchError: git does not know the revision, or it has no such folder.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", revision, "--", RECORDS]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise BenchError(f"git has no {RECORDS} at {revision}: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".json") else None
            if file is not None:
                yield f"{revision}:{member.name}", file.read().decode()


def rows_of(files: Iterable[tuple[str, str]]) -> dict[Key, Row]:
    """The rows of all timing records among the files; of two with the same key the newer one's.

    Raises:
        BenchError: a file is not JSON, or a timing record does not have the schema.
    """
    found: list[dict[str, Any]] = []
    for name, text in files:
        try:
            read = json.loads(text)
        except json.JSONDecodeError as error:
            raise BenchError(f"{name}: not JSON: {error}") from error
        if record.is_timing(read):
            found.append(record.check(read, name))
    rows: dict[Key, Row] = {}
    for read in sorted(found, key=lambda read: str(read["date"])):
        host = read["host"]
        where = (str(host["gpu"]), int(host["gpus"]), int(host.get("emulates") or 0), str(read["suite"]))
        rows |= {key_of(where, row): row for row in read["rows"]}
    return rows


def key_of(where: Where, row: Row) -> Key:
    """What makes two rows comparable. A case without the field `selection` is one of a random selection."""
    fields = row["case"] | {"selection": selection_of(row["case"])}
    return where, str(row["op"]), tuple(sorted(fields.items())), str(row["provider"])


def changes(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> list[Change]:
    """Every row that both have, those that got slower most first."""
    both = [Change(key[0], row, new[key]) for key, row in old.items() if key in new]
    return sorted(both, key=lambda change: -change.growth)


def gone(old: Mapping[Key, Row], new: Mapping[Key, Row]) -> list[str]:
    """Rows that were faster than their baseline and that the new record of their suite does not have."""
    measured = {key[0] for key in new}
    return [
        describe(key[0], row) for key, row in old.items() if key not in new and key[0] in measured and was_faster(row)
    ]


def report(found: list[Change], missing: list[str], noise: float) -> int:
    """Print what changed by more than the noise; return the exit code."""
    slower = [change for change in found if change.slower(noise)]
    quicker = [change for change in reversed(found) if change.quicker(noise)]
    lost = [change for change in slower if change.was_faster]
    for label, listed in (("SLOWER, was faster than its baseline", lost), ("slower", slower), ("quicker", quicker)):
        for change in listed:
            if label != "slower" or not change.was_faster:
                print(f"{label}: {change}")
    for row in missing:
        print(f"not in the new record, was faster than its baseline: {row}")
    print(
        f"{len(found)} rows compared: {len(slower)} slower and {len(quicker)} quicker by more than {noise:.0%}; "
        f"{len(lost)} of the slower ones were faster than their baseline"
    )
    return 1 if lost else 0


def _noise(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number from 0 to below 1")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.slower", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORDS", help="OLD and NEW; with --git only NEW")
    parser.add_argument("--git", metavar="REV", help="take the former records from docs/benchmarks at this revision")
    parser.add_argument(
        "--noise",
        type=_noise,
        default=0.05,
        metavar="X",
        help="share of the median, 0 to 1, that is noise (default 0.05)",
    )
    args = parser.parse_args(argv)
    if args.git is None and len(args.records) != 2:
        parser.error("name two folders or files of records, OLD and NEW, or --git REV")
    if args.git is not None and len(args.records) > 1:
        parser.error("with --git name at most one folder or file of records, NEW")
    try:
        old = rows_of(from_path(args.records[0]) if args.git is None else from_git(args.git))
        new = rows_of(from_path(args.records[-1] if args.records else ROOT / RECORDS))
    except BenchError as error:
        parser.error(str(error))
    found = changes(old, new)
    if not found:
        parser.error(f"nothing to compare: {len(old)} former and {len(new)} new rows have no row of one GPU in common")
    return report(found, gone(old, new), args.noise)


if __name__ == "__main__":
    sys.exit(main())
