"""Say what a release of an engine changed under the plugin, from the two versions' wheels; nothing is imported.

``python -m ci.moved vllm`` compares the newest version of ci/matrix.toml with the newest release on the package index;
``python -m ci.moved vllm 0.32.0 0.33.0`` compares two versions. For every object that the ledger changes or builds on:

- seam moved: the newer version lacks it, or it has other parameters. The plugin refuses to start there.
- body changed: its syntax tree differs, comments and docstrings aside. Read the change with --diff.
- not comparable: the ledger looks for another object in each version, or another distribution defines it.

Ends 1 if a seam moved.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import sys
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import Version
from rich.console import Console

from ci.rows import engines
from ci.wheels import Wheel, WheelError, newest
from nsa_plugin.commands.engines import ENGINES
from nsa_plugin.patches.ledger import Patch, Target
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.tools.terminal import table


class Moved(StrEnum):
    """What became of an object between two versions."""

    SEAM = "seam moved"
    BODY = "body changed"
    UNKNOWN = "not comparable"
    SAME = "same"


@dataclass(frozen=True)
class Change:
    """One ledger entry in two versions.

    Attributes:
        patch: the entry.
        target: its target in the newer version.
        moved: the outcome.
        detail: the lookup's error, or how much changed.
        diff: of the two definitions, by line.
    """

    patch: Patch
    target: Target
    moved: Moved
    detail: str = ""
    diff: tuple[str, ...] = ()


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


def text_of(node: ast.AST) -> str:
    """A definition without comments, docstrings and formatting."""
    copied = copy.deepcopy(node)
    for inner in ast.walk(copied):
        body = getattr(inner, "body", None)
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = body[1:] or [ast.Pass()]  # type: ignore[index]
    return ast.unparse(copied)


def report(changes: list[Change], console: Console, *, diff: bool) -> None:
    found = table("What moved", "outcome", "ledger entry", "object", "detail")
    for moved in (Moved.SEAM, Moved.BODY, Moved.UNKNOWN):
        for change in changes:
            if change.moved is moved:
                found.add_row(moved, change.patch.name, change.target.path, change.detail)
    if found.row_count:
        console.print(found)
    if diff:
        for change in changes:
            if change.diff:
                console.print(f"\n{change.patch.name}: {change.target.path}\n  {change.patch.why}")
                console.print("\n".join(change.diff))
    counted = Counter(change.moved for change in changes)
    console.print(f"{len(changes)} objects: " + ", ".join(f"{counted[moved]} {moved}" for moved in Moved))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.moved", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=tuple(engines()))
    parser.add_argument("older", nargs="?", help="default: the newest version of ci/matrix.toml")
    parser.add_argument("newer", nargs="?", help="default: the newest release on the package index")
    parser.add_argument("--diff", action="store_true", help="print the changed definitions")
    args = parser.parse_args()
    engine = engines()[args.engine]
    console = Console(markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        versions = args.older or engine.seams[-1], args.newer or newest(engine.distribution)
        console.print(f"{engine.name}: {versions[0]} -> {versions[1]}")
        if versions[0] == versions[1]:
            return 0
        with Wheel(engine.distribution, versions[0]) as old, Wheel(engine.distribution, versions[1]) as new:
            trees = SourceTree(old.read), SourceTree(new.read)
            changes = compare(ENGINES[engine.name].ledger.PATCHES, *trees, versions)
    except WheelError as error:
        console.print(f"error: {error}")
        return 2
    report(changes, console, diff=args.diff)
    return 1 if any(change.moved is Moved.SEAM for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
