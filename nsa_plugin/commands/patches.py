"""``nsa-plugin patches``: the ledger, checked against the installed engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from nsa_plugin.commands.arguments import option, switch
from nsa_plugin.commands.engines import ENGINES, Engine, holds
from nsa_plugin.commands.output import add_json, add_verbose, print_json
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.probe import probe
from nsa_plugin.patches.ledger import Patch
from nsa_plugin.tools.terminal import console, table

EPILOG = """states:
  found       the object is there, with the expected parameters
  missing     it is not, or it changed: the plugin would refuse to start
  not_needed  the engine no longer needs the patch
  unused      not part of this version
  elsewhere   for another kind of device than this one
  -           not checked: no engine is installed, or --version or --no-probe"""

_PROBE_TIMEOUT_S = 600


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 0.32.0") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    add_json(parser)
    add_verbose(parser, "every target, the reason, the upstream reference and when the patch can be removed")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="only this engine")
    option(parser, "--version V", _version, "the targets of this engine version; needs --engine")
    switch(parser, "--no-probe", "do not import the installed engine")


def live_states(engine: Engine, version: Version, patches: list[Patch]) -> dict[str, tuple[str, str]]:
    """State and detail of each patch by name, from a process that imports the engine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "states.json"
        command = [sys.executable, "-m", "nsa_plugin.commands.live", engine.name, str(version), str(file)]
        try:
            done = subprocess.run(
                [*command, *(patch.name for patch in patches)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {p.name: ("missing", f"importing {engine.name} took over {_PROBE_TIMEOUT_S} s") for p in patches}
        if file.is_file():
            return {name: (state, detail) for name, (state, detail) in json.loads(file.read_text()).items()}
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"importing {engine.name} ended the process with {done.returncode}: {last}"
        return {patch.name: ("missing", reason) for patch in patches}


def _states(engine: Engine, version: Version | None, *, live: bool) -> dict[str, tuple[str, str]]:
    """State and detail of each patch by name; `live`: look into the installed engine."""
    patches: tuple[Patch, ...] = engine.ledger.PATCHES
    if version is None:
        return {patch.name: ("-", "") for patch in patches}
    states = {
        patch.name: ("-", "") if patch.target(version) else ("unused", f"not part of {engine.name} {version}")
        for patch in patches
    }
    if not live:
        return states
    others = engine.needs_elsewhere(probe())
    here = [patch for patch in patches if patch.target(version) and patch.need not in others]
    states |= {patch.name: ("elsewhere", others[patch.need]) for patch in patches if patch.need in others}
    return states | live_states(engine, version, here)


def _entry(patch: Patch, version: Version | None, state: tuple[str, str]) -> dict[str, Any]:
    target = patch.target(version) if version else None
    return {
        "name": patch.name,
        "need": str(patch.need),
        "changes": bool(patch.replacement),
        "targets": [asdict(t) for t in patch.targets],
        "target": target.path if target else "",
        "why": patch.why,
        "upstream": patch.upstream,
        "remove_when": patch.remove_when,
        "state": state[0],
        "detail": state[1],
    }


def run(args: argparse.Namespace) -> int:
    if args.version and not args.engine:
        raise SettingsError("--version needs --engine, one of " + ", ".join(ENGINES))
    report: list[dict[str, Any]] = []
    for engine in [ENGINES[args.engine]] if args.engine else ENGINES.values():
        found = engine.installed()
        version = args.version or (found[1] if found else None)
        states = _states(engine, version, live=not (args.version or args.no_probe))
        report.append(
            {
                "engine": engine.name,
                "supported": engine.ledger.SUPPORTED,
                "installed": str(found[1]) if found else "",
                "version": str(version) if version else "",
                "in_range": version is None or holds(engine.ledger.SUPPORTED, version),
                "patches": [_entry(patch, version, states[patch.name]) for patch in engine.ledger.PATCHES],
            }
        )
    ok = all(e["in_range"] and not any(p["state"] == "missing" for p in e["patches"]) for e in report)
    if args.json:
        print_json({"ok": ok, "engines": report})
    else:
        _show(report, verbose=args.verbose)
    return 0 if ok else 1


def _show(report: list[dict[str, Any]], *, verbose: bool) -> None:
    out = console()
    for engine in report:
        version = engine["version"] and f"; targets of {engine['version']}"
        installed = f"installed: {engine['installed']}" if engine["installed"] else "not installed"
        title = f"{engine['engine']}: supported {engine['supported']}, {installed}{version}"
        out.print(title, style="bold")
        if verbose:
            _print_all(out, engine["patches"])
        else:
            out.print(_short_rows(engine["patches"]))
        if not engine["in_range"]:
            out.print(
                f"{engine['engine']} {engine['version']} is outside the supported range {engine['supported']}",
                style="red",
            )
    if not verbose:
        out.print("-v lists each patch with its targets and reasons")


def _short_rows(patches: list[dict[str, Any]]) -> Table:
    """How many patches each need has, and a line for each that is missing or no longer needed."""
    rows = table("", "needed", "patches", "state")
    shown = [patch for patch in patches if patch["state"] not in ("unused", "elsewhere")]
    for need in dict.fromkeys(patch["need"] for patch in shown):
        states = Counter(patch["state"] for patch in shown if patch["need"] == need)
        changed = sum(patch["changes"] for patch in shown if patch["need"] == need)
        counts = ", ".join(f"{changes} {what}" for changes, what in _counts(changed, states.total()) if changes)
        rows.add_row(need, counts, ", ".join(f"{times} {state}" for state, times in states.items() if state != "-"))
    for patch in shown:
        if patch["state"] in ("missing", "not_needed"):
            rows.add_row(patch["name"], patch["state"], patch["detail"])
    if len(patches) > len(shown):
        others = len(patches) - len(shown)
        rows.caption, rows.caption_justify = f"{others} not counted: for another version or device", "left"
    return rows


def _counts(changed: int, total: int) -> tuple[tuple[int, str], ...]:
    return (changed, "changed"), (total - changed, "built on")


def _print_all(out: Console, patches: list[dict[str, Any]]) -> None:
    """Each patch as a heading and indented lines: a column of a table would break the paths of targets."""
    for patch in patches:
        state = {"-": "not checked"}.get(patch["state"], patch["state"])
        out.print(f"\n{patch['name']} ({patch['need']}): {state}", style="red" if state == "missing" else "")
        if patch["state"] in ("missing", "not_needed") and patch["detail"]:
            out.print(Padding.indent(patch["detail"], 4))
        for target in patch["targets"]:
            _print_target(out, target["path"], f"({target['versions'] or 'every version'})")
        lines = [
            "" if patch["changes"] else "built on, not changed",
            patch["why"],
            patch["upstream"] and f"upstream: {patch['upstream']}",
            patch["remove_when"] and f"removed when {patch['remove_when']}",
        ]
        for line in filter(None, lines):
            out.print(Padding.indent(line, 4))
    out.print()


def _print_target(out: Console, path: str, versions: str) -> None:
    """The path is never broken, to be copied: one that is longer than a line runs over its end."""
    if len(path) + len(versions) + 5 <= out.width:
        out.print(f"    {path} {versions}")
    else:
        out.print(f"    {path}", soft_wrap=True)
        out.print(f"      {versions}")
