"""Say what a release or the main branch of an engine changed under the plugin; nothing is imported.

``python -m ci.moved vllm`` compares the newest version of ci/matrix.toml with the newest release on the package index,
by their wheels; ``python -m ci.moved vllm 0.32.0 0.33.0`` compares two versions. ``python -m ci.moved vllm --archive
https://github.com/vllm-project/vllm/archive/refs/heads/main.zip`` compares a wheel with the source archive of a branch.
For every object that the ledger changes or builds on:

- seam moved: the newer version lacks it, or it has other parameters. The plugin refuses to start there.
- body changed: its syntax tree differs, comments and docstrings aside. Read the change with --diff.
- not comparable: the ledger looks for another object in each version, or another distribution defines it.
  So is a definition in a file that the archive lacks: the engine's build may have added it to the wheel.
- watched: any of the above, for an object of ci/watched.py, which picks a backend or a kernel and is no seam.

Ends 1 if a seam moved. With an archive it then names the changes since the last good commit of ci/last_good.json, the
last in which everything was found; --record keeps a commit there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import sys
from dataclasses import dataclass, replace
from enum import StrEnum

from packaging.version import Version
from rich.console import Console

from ci import archive
from ci.archive import Archive, ArchiveError
from ci.rows import Engine, engines
from ci.watched import Watched, entries
from ci.wheels import Wheel, WheelError, newest
from nsa_plugin.commands.engines import ENGINES
from nsa_plugin.patches.ledger import Patch, Target
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.tools.terminal import table


class Moved(StrEnum):
    """What became of an object between two versions, or a version and an archive."""

    SEAM = "seam moved"
    BODY = "body changed"
    UNKNOWN = "not comparable"
    WATCHED = "watched"
    SAME = "same"


@dataclass(frozen=True)
class Change:
    """One ledger entry or watched object in two versions.

    Attributes:
        patch: the entry, or a `Watched`.
        target: its target in the newer version.
        moved: the outcome of the comparison.
        detail: the lookup's error, or how much changed.
        diff: of the two definitions, by line.
    """

    patch: Patch
    target: Target
    moved: Moved
    detail: str = ""
    diff: tuple[str, ...] = ()

    @property
    def outcome(self) -> Moved:
        """The outcome as it is reported: whatever moved in a watched object is no moved seam."""
        is_watched = isinstance(self.patch, Watched) and self.moved is not Moved.SAME
        return Moved.WATCHED if is_watched else self.moved


def compared(engine: str) -> tuple[Patch, ...]:
    """What is compared of an engine: the entries of its ledger, then the watched objects."""
    return (*ENGINES[engine].ledger.PATCHES, *entries(engine))


def compare(patches: tuple[Patch, ...], old: SourceTree, new: SourceTree, versions: tuple[str, str]) -> list[Change]:
    """Every entry that the newer version has a target for."""
    changes = []
    for patch in patches:
        before, after = (patch.target(Version(version)) for version in versions)
        if after is not None:
            changes.append(_compare_one(patch, before, after, old, new))
    return changes


def _compare_one(patch: Patch, before: Target | None, after: Target, old: SourceTree, new: SourceTree) -> Change:
    try:
        new.check(after)
    except (LookupError, SyntaxError) as error:
        return Change(patch, after, Moved.SEAM, str(error))
    if before is None or before.path != after.path:
        was = "not looked for" if before is None else before.path
        return Change(patch, after, Moved.UNKNOWN, f"in the older version: {was}")
    try:
        there = old.definition(before)
    except LookupError as error:
        return Change(patch, after, Moved.UNKNOWN, f"the older version: {error}")
    here = new.definition(after)
    if there is None or here is None:
        return Change(patch, after, Moved.UNKNOWN, "another distribution defines it")
    older, newer = (text_of(node).splitlines() for node in (there, here))
    diff = tuple(difflib.unified_diff(older, newer, "older", "newer", lineterm=""))
    if not diff:
        return Change(patch, after, Moved.SAME)
    gone, come = (sum(line.startswith(sign) for line in diff[2:]) for sign in "-+")
    return Change(patch, after, Moved.BODY, f"{gone} lines gone, {come} new", diff)


def compare_archive(patches: tuple[Patch, ...], wheel: Wheel, new: Archive, versions: tuple[str, str]) -> list[Change]:
    """Compare a version's wheel with an archive, whose targets are those of the second version."""
    old = SourceTree(wheel.read)
    in_both = SourceTree(lambda path: wheel.read(path) if path in new.files else None)
    changes = compare(patches, old, SourceTree(new.read), versions)
    detail = "the wheel defines it in a file that the archive lacks"
    return [
        replace(change, moved=Moved.UNKNOWN, detail=detail, diff=())
        if change.moved is Moved.BODY and _text(old, change.target) != _text(in_both, change.target)
        else change
        for change in changes
    ]


def _text(tree: SourceTree, target: Target) -> str | None:
    """The text of a target's definition, or None if the tree does not have it."""
    try:
        node = tree.definition(target)
    except LookupError:
        return None
    return None if node is None else text_of(node)


def text_of(node: ast.AST) -> str:
    """A definition without comments, docstrings and formatting."""
    copied = copy.deepcopy(node)
    for inner in ast.walk(copied):
        body = getattr(inner, "body", None)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = body[1:] or [ast.Pass()]  # type: ignore[index]
    return ast.unparse(copied)


def report(changes: list[Change], console: Console, *, diff: bool) -> None:
    """Print what changed, the ledger's objects first, and how many objects have each outcome.

    Args:
        diff: also print the changed definitions.
    """
    found = table("What moved", "outcome", "ledger entry", "object", "detail")
    for moved in (Moved.SEAM, Moved.BODY, Moved.UNKNOWN):
        for change in changes:
            if change.outcome is moved:
                found.add_row(moved, change.patch.name, change.target.path, change.detail)
    to_read = table("Watched, no seam: read the change", "outcome", "what it does", "object", "detail")
    for change in changes:
        if change.outcome is Moved.WATCHED:
            to_read.add_row(Moved.WATCHED, change.patch.why, change.target.path, change.detail)
    for rows in (found, to_read):
        if rows.row_count:
            console.print(rows)
    if diff:
        for change in changes:
            if change.diff:
                console.print(f"\n{change.patch.name}: {change.target.path}\n  {change.patch.why}")
                console.print("\n".join(change.diff))
    ledger = [change.outcome for change in changes if not isinstance(change.patch, Watched)]
    outcomes = (moved for moved in Moved if moved is not Moved.WATCHED)
    console.print(f"{len(ledger)} objects: " + ", ".join(f"{ledger.count(moved)} {moved}" for moved in outcomes))
    if watched := len(changes) - len(ledger):
        console.print(f"{watched} watched: {to_read.row_count} to read, {watched - to_read.row_count} same")


def any_moved(changes: list[Change]) -> bool:
    return any(change.outcome is Moved.SEAM for change in changes)


def check_release(engine: Engine, versions: tuple[str, str], console: Console, *, diff: bool) -> int:
    """Compare two releases and print what moved; the exit status."""
    console.print(f"{engine.name}: {versions[0]} -> {versions[1]}")
    if versions[0] == versions[1]:
        return 0
    with Wheel(engine.distribution, versions[0]) as old, Wheel(engine.distribution, versions[1]) as new:
        trees = SourceTree(old.read), SourceTree(new.read)
        changes = compare(compared(engine.name), *trees, versions)
    report(changes, console, diff=diff)
    return 1 if any_moved(changes) else 0


def check_archive(
    engine: Engine, versions: tuple[str, str], source: str, console: Console, *, diff: bool, keep: bool
) -> int:
    """Compare a release with an archive and print what moved since the last good commit; the exit status.

    Args:
        keep: record the archive's commit if everything is found.
    """
    new = archive.load(source, engine.name)
    commit = f"commit {new.revision.commit} ({new.revision.date})" if new.revision else "the archive names no commit"
    console.print(f"{engine.name}: {versions[0]} -> {source}, {commit}; targets of the ledger for {versions[1]}")
    with Wheel(engine.distribution, versions[0]) as old:
        changes = compare_archive(compared(engine.name), old, new, versions)
    report(changes, console, diff=diff)
    good = archive.last_good(engine.name, archive.LAST_GOOD)
    console.print(f"last good commit: {good.commit} ({good.date})" if good else "no last good commit yet")
    if any_moved(changes):
        if good and new.revision:
            console.print(f"seams moved since: {archive.compare_address(engine.name, good, new.revision)}")
        return 1
    if not keep:
        return 0
    if new.revision is None:
        console.print("error: everything was found, but the archive names no commit to record")
        return 2
    archive.record(engine.name, new.revision, archive.LAST_GOOD)
    console.print(f"everything was found: recorded {new.revision.commit} in {archive.LAST_GOOD}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.moved", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=tuple(engines()))
    parser.add_argument("older", nargs="?", help="default: the newest version of ci/matrix.toml")
    parser.add_argument(
        "newer",
        nargs="?",
        help="default: the newest release on the package index; with --archive the version that the archive counts as "
        "in the ledger, by default the older one",
    )
    parser.add_argument(
        "--archive", metavar="FILE_OR_URL", help="compare with this zip or tar.gz of the engine's sources, from GitHub"
    )
    parser.add_argument("--record", action="store_true", help="keep the archive's commit if everything is found in it")
    parser.add_argument("--diff", action="store_true", help="print the changed definitions")
    args = parser.parse_args()
    if args.record and not args.archive:
        parser.error("--record needs --archive")
    engine = engines()[args.engine]
    console = Console(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    older = args.older or engine.seams[-1]
    try:
        if args.archive:
            versions = older, args.newer or older
            return check_archive(engine, versions, args.archive, console, diff=args.diff, keep=args.record)
        versions = older, args.newer or newest(engine.distribution)
        return check_release(engine, versions, console, diff=args.diff)
    except (WheelError, ArchiveError) as error:
        console.print(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
