"""For every ledger entry: an engine whose object is renamed, has other parameters or is gone is refused by one error.

The engine's files are written from the ledger's data, so that a new entry is covered without a new test. The check is
the one that the process runs which parses the engine's command line, before anything starts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from nsa_plugin.errors import PatchError
from nsa_plugin.patches import sglang, vllm
from nsa_plugin.patches.ledger import Ledger, Need, Patch, Target
from nsa_plugin.patches.static import SourceTree
from tests.ledger_engine import files

LEDGERS = {"vllm": vllm, "sglang": sglang}
VERSIONS = {"vllm": ("0.24.0", "0.33.0"), "sglang": ("0.5.16", "0.5.23")}


def refusal(engine: str, version: str, written: dict[str, str]) -> str:
    """The message with which the plugin refuses to start; "" if it starts."""
    data = LEDGERS[engine]
    ledger = Ledger(engine=engine, version=Version(version), supported=data.SUPPORTED, patches=data.PATCHES)
    packages = {"/".join(path.split("/")[:depth]) for path in written for depth in range(1, path.count("/") + 1)}
    tree = SourceTree(({f"{package}/__init__.py": "" for package in packages} | written).get)
    try:
        ledger.check(*Need, look=tree.check)
    except PatchError as error:
        return str(error)
    return ""


def entries() -> list[tuple[str, str, Patch, Target]]:
    found = []
    for engine, versions in VERSIONS.items():
        for version in versions:
            for patch in LEDGERS[engine].PATCHES:
                if (target := patch.target(Version(version))) is not None:
                    found.append((engine, version, patch, target))
    return found


ENTRIES = entries()
TARGETS = {
    (engine, version): [target for one, at, _, target in ENTRIES if (one, at) == (engine, version)]
    for engine, versions in VERSIONS.items()
    for version in versions
}


@pytest.mark.parametrize(("engine", "version"), list(TARGETS))
def test_an_engine_with_every_target_is_accepted(engine: str, version: str) -> None:
    assert refusal(engine, version, files(TARGETS[engine, version])) == ""


@pytest.mark.parametrize(
    ("engine", "version", "patch", "target"), ENTRIES, ids=lambda one: one.name if isinstance(one, Patch) else None
)
def test_an_engine_whose_object_moved_is_refused_by_name(
    engine: str, version: str, patch: Patch, target: Target
) -> None:
    others = [one for one in TARGETS[engine, version] if not one.path.startswith(target.path)]
    renamed = target.path.replace("]", "_moved]") if target.key else f"{target.path}_moved"
    broken = {"gone": files(others), "renamed": files([*others, replace(target, path=renamed)])}
    if target.params:
        rest = [one for one in TARGETS[engine, version] if one.path != target.path]
        broken["re-signed"] = files([*rest, replace(target, params=target.params[:-1])])
    for how, written in broken.items():
        said = refusal(engine, version, written)
        assert said, f"{patch.name} {how}: the plugin would start"
        assert target.attributes[-1] in said, said
        assert version in said
        assert "NSA_PLUGIN_ENABLED=0" in said
