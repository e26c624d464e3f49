"""Ask the installed engine itself whether the ledger's targets are there; changes nothing.

Run as ``python -m nsa_plugin.commands.live ENGINE FILE``, a process of its own: importing an engine
takes seconds, logs, and may end the process. FILE receives {patch name: [state, detail]} as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from packaging.version import Version

from nsa_plugin.patches.ledger import Patch, find, load


def state_of(patch: Patch, version: Version) -> tuple[str, str]:
    """(found, missing, not_needed or unused; the detail) of one patch in the live engine."""
    target = patch.target(version)
    if target is None:
        return "unused", f"not part of {patch.engine} {version}"
    try:
        find(target)
    except LookupError as error:
        return "missing", str(error)
    try:
        reason = load(patch.probe)() if patch.probe else None
    except Exception as error:
        return "missing", f"its probe {patch.probe} failed: {error!r}"
    return ("not_needed", reason) if reason else ("found", target.path)


def main(engine: str, version: str, file: str, *names: str) -> None:
    patches = importlib.import_module(f"nsa_plugin.patches.{engine}").PATCHES
    states = {patch.name: state_of(patch, Version(version)) for patch in patches if patch.name in names}
    Path(file).write_text(json.dumps(states))


if __name__ == "__main__":
    main(*sys.argv[1:])
