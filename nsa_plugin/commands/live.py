"""Check in the imported engine whether the ledger's targets exist; change nothing.

`patches` runs ``python -m nsa_plugin.commands.live ENGINE VERSION FILE PATCH...`` as a separate process, because
importing an engine takes seconds, writes to the log and may end the process. FILE receives
{patch name: [state, detail]} as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from packaging.version import Version

from nsa_plugin.patches.ledger import Patch, find, load


def state_of(patch: Patch, version: Version) -> tuple[str, str]:
    """(state, detail) of a patch in the imported engine; the state is found, missing, not_needed or unused."""
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
