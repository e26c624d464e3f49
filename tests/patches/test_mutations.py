"""For every target of the ledger: an engine whose object is renamed, has other parameters or is gone is refused.

The engine's files are written from the ledger's data, so that a new entry is covered without a new test. The check is
the one of the process that parses the engine's command line, before anything starts. It reads files, except those of
modules that a strict start of vLLM has already loaded: these it looks up live, which the last tests do with modules
that are written, imported and then changed.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from ci.rows import engines
from nsa_plugin.errors import PatchError
from nsa_plugin.patches import sglang, vllm
from nsa_plugin.patches.ledger import Kind, Ledger, Need, Patch, Target, find
from nsa_plugin.patches.static import SourceTree, check_installed
from tests.ledger_engine import files

LEDGERS = {"vllm": vllm, "sglang": sglang}
VERSIONS = {name: sorted(map(Version, engine.seams)) for name, engine in engines().items()}
"""Every version of ci/matrix.toml, which has all that the ledger supports."""


def refusal(engine: str, version: Version, written: dict[str, str]) -> str:
    """The message with which the plugin refuses to start; "" if it starts."""
    data = LEDGERS[engine]
    ledger = Ledger(engine=engine, version=version, supported=data.SUPPORTED, patches=data.PATCHES)
    packages = {"/".join(path.split("/")[:depth]) for path in written for depth in range(1, path.count("/") + 1)}
    tree = SourceTree(({f"{package}/__init__.py": "" for package in packages} | written).get)
    try:
        ledger.check(*Need, look=tree.check)
    except PatchError as error:
        return str(error)
    return ""


TARGETS = {
    (engine, version): [target for patch in LEDGERS[engine].PATCHES if (target := patch.target(version)) is not None]
    for engine, versions in VERSIONS.items()
    for version in versions
}


def entries() -> list[tuple[str, Version, Patch, Target]]:
    """Every target of every entry, with the newest version that has it."""
    found = []
    for engine, versions in VERSIONS.items():
        for patch in LEDGERS[engine].PATCHES:
            newest = {target: version for version in versions if (target := patch.target(version)) is not None}
            found += [(engine, version, patch, target) for target, version in newest.items()]
    return found


ENTRIES = entries()


def label(one: object) -> str | None:
    """What an entry's tests are called: the entry, the version and the engine."""
    return one.name if isinstance(one, Patch) else None if isinstance(one, Target) else str(one)


@pytest.mark.parametrize("engine", LEDGERS)
def test_no_target_of_the_ledger_is_left_out(engine: str) -> None:
    changed = {(patch.name, target) for one, _, patch, target in ENTRIES if one == engine}
    assert changed == {(patch.name, target) for patch in LEDGERS[engine].PATCHES for target in patch.targets}


@pytest.mark.parametrize(("engine", "version"), list(TARGETS), ids=label)
def test_an_engine_with_every_target_is_accepted(engine: str, version: Version) -> None:
    assert refusal(engine, version, files(TARGETS[engine, version])) == ""


@pytest.mark.parametrize(("engine", "version", "patch", "target"), ENTRIES, ids=label)
def test_an_engine_whose_object_moved_is_refused_by_name(
    engine: str, version: Version, patch: Patch, target: Target
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
        assert str(version) in said
        assert "NSA_PLUGIN_ENABLED=0" in said


# What a strict start of vLLM has loaded is looked up live.
TOY = "toy_live"
LIVE = (
    Target(path=f"{TOY}.engine.serve:serve", params=("host", "port")),
    Target(path=f"{TOY}.engine.registry:HANDLERS[nsa]", params=("runner", "batch")),
    Target(path=f"{TOY}.engine.core:Engine", kind=Kind.CLASS, params=("self", "model", "size")),
    Target(path=f"{TOY}.engine.core:Engine.run", params=("self", "batch")),
    Target(path=f"{TOY}.limits:LIMIT", kind=Kind.VALUE),
)


def toy_ledger() -> Ledger:
    patches = tuple(
        Patch(name=f"toy.{target.path}", engine=TOY, need=Need.GPU, targets=(target,), why="a test") for target in LIVE
    )
    return Ledger(engine=TOY, version=Version("1.2"), supported=">=1", patches=patches)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed engine with every target of `LIVE`, of which this process has loaded all modules."""
    for path, text in files(LIVE).items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for folder in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for target in LIVE:
        importlib.import_module(target.module)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == TOY]:
        del sys.modules[name]


def with_params(kind: Kind, params: tuple[str, ...]) -> object:
    """A function, or a class whose `__init__` has these parameters."""
    function = eval(f"lambda {', '.join(params)}: None")
    return type("Changed", (), {"__init__": function}) if kind is Kind.CLASS else function


def change(target: Target, how: str) -> None:
    """Change the live object of a target."""
    owner, name, original = find(target)
    key = name if target.key is None else target.key
    take, put = (delattr, setattr) if target.key is None else (dict.__delitem__, dict.__setitem__)
    take(owner, key)
    if how == "renamed":
        put(owner, f"{key}_moved", original)
    if how == "re-signed":
        put(owner, key, with_params(target.kind, target.params[:-1]))


CHANGES = [
    *((target, how) for target in LIVE for how in ("removed", "renamed")),
    *((target, "re-signed") for target in LIVE if target.params),
]


@pytest.mark.parametrize(("target", "how"), CHANGES, ids=lambda one: getattr(one, "path", one))
def test_a_changed_object_of_a_loaded_module_is_refused_by_name(toy: None, target: Target, how: str) -> None:
    check_installed(toy_ledger(), Need.GPU, live=True)
    change(target, how)
    check_installed(toy_ledger(), Need.GPU, live=False)  # its file is as it was
    with pytest.raises(PatchError) as error:
        check_installed(toy_ledger(), Need.GPU, live=True)
    said = str(error.value)
    assert target.path in said
    assert (target.params[-1] if how == "re-signed" else target.key or target.attributes[-1]) in said
    assert "1.2" in said
    assert "NSA_PLUGIN_ENABLED=0" in said


@pytest.mark.parametrize("target", LIVE, ids=lambda target: target.path.partition(":")[2])
def test_a_changed_file_counts_where_its_module_is_not_loaded(toy: None, target: Target, tmp_path: Path) -> None:
    (path,) = files([target])
    (tmp_path / path).write_text("")
    check_installed(toy_ledger(), Need.GPU, live=True)
    del sys.modules[target.module]
    with pytest.raises(PatchError, match=re.escape(target.attributes[0])):
        check_installed(toy_ledger(), Need.GPU, live=True)
    assert target.module not in sys.modules
