"""The ledger on a small fake engine: patches are applied all or none, verified on the live object and undone."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from nsa_plugin.errors import PatchError
from nsa_plugin.patches.ledger import (
    Kind,
    Ledger,
    Need,
    Patch,
    Target,
    find,
    is_marked,
    load,
    mark,
    params_missing,
    wrap,
)

ENGINE = """
class Base:
    def inherited(self, x):
        return ("base", x)

class Engine(Base):
    limit = 3

    def __init__(self, model, size=1):
        self.model = model

    def run(self, x, *, scale=1):
        return ("run", x * scale)

    @classmethod
    def build(cls, model):
        return cls(model)

    @staticmethod
    def helper(a, b):
        return a + b

    @property
    def prop(self):
        return "prop"

def serve(host, port):
    return (host, port)

def handler(runner):
    return ("handler", runner)

HANDLERS = {"nsa": handler, "other": max}
not_a_mapping = 3
limit = 5
"""

REPLACEMENTS = """
from nsa_plugin.patches.ledger import wrap

calls = []

def shout(original):
    return wrap(original, lambda inner, *a, **k: ("patched", inner(*a, **k)))

def shout_build(original):
    return classmethod(wrap(original.__func__, lambda inner, cls, model: inner(cls, model + "!")))

def shout_helper(original):
    return staticmethod(wrap(original.__func__, lambda inner, a, b: -inner(a, b)))

def subclass(original):
    return type("Patched", (original,), {"run": lambda self, x: "subclass"})

def broken(original):
    raise RuntimeError("no such kernel")

def unmarkable(original):
    return 7

def needed():
    calls.append("needed")
    return None

def not_needed():
    return "fixed in this version"
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / "fake_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(ENGINE)
    (package / "needs_gpu.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    (tmp_path / "fake_patches.py").write_text(REPLACEMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("fake_engine.core")
    for name in [n for n in sys.modules if n.partition(".")[0] in ("fake_engine", "fake_patches")]:
        del sys.modules[name]


def patch(name: str, path: str, replacement: str = "shout", **changes: Any) -> Patch:
    target = {k: changes.pop(k) for k in ("kind", "params", "versions") if k in changes}
    fields: dict[str, Any] = {"engine": "fake", "need": Need.ENABLED, "why": "for the test"}
    if probe := changes.pop("probe", ""):
        fields["probe"] = f"fake_patches:{probe}"
    return Patch(
        name=f"fake.{name}",
        targets=(Target(path=f"fake_engine.{path}", **target),),
        replacement=f"fake_patches:{replacement}" if replacement else "",
        **fields | changes,
    )


def ledger(*patches: Patch, version: str = "1.2", supported: str = ">=1,<2") -> Ledger:
    return Ledger(engine="fake", version=Version(version), supported=supported, patches=patches)


def snapshot(module: ModuleType) -> dict[str, Any]:
    """Every attribute that a patch of these tests could touch, raw."""
    return {
        **{f"module.{k}": v for k, v in vars(module).items() if not k.startswith("__")},
        **{f"Engine.{k}": v for k, v in vars(module.Engine).items() if k != "__dict__"},
        **{f"Base.{k}": v for k, v in vars(module.Base).items() if k != "__dict__"},
        **{f"HANDLERS.{k}": v for k, v in module.HANDLERS.items()},
    }


# Every kind of replacement, its behaviour, and that undo leaves nothing.
CASES: dict[str, tuple[Patch, Callable[[ModuleType], Any], Any, Any]] = {
    "function": (
        patch("serve", "core:serve", params=("host", "port")),
        lambda m: m.serve("h", 1),
        ("h", 1),
        ("patched", ("h", 1)),
    ),
    "method": (
        patch("run", "core:Engine.run", params=("self", "x", "scale")),
        lambda m: m.Engine("m").run(2, scale=3),
        ("run", 6),
        ("patched", ("run", 6)),
    ),
    "classmethod": (
        patch("build", "core:Engine.build", "shout_build", params=("model",)),
        lambda m: m.Engine.build("m").model,
        "m",
        "m!",
    ),
    "staticmethod": (
        patch("helper", "core:Engine.helper", "shout_helper", params=("a", "b")),
        lambda m: m.Engine("m").helper(1, 2),
        3,
        -3,
    ),
    "inherited method": (
        patch("inherited", "core:Engine.inherited", params=("self", "x")),
        lambda m: (m.Engine("m").inherited(1), m.Base().inherited(1)),
        (("base", 1), ("base", 1)),
        (("patched", ("base", 1)), ("base", 1)),
    ),
    "class": (
        patch("engine", "core:Engine", "subclass", kind=Kind.CLASS, params=("self", "model", "size")),
        lambda m: m.Engine("m").run(1),
        ("run", 1),
        "subclass",
    ),
    "dict entry": (
        patch("handler", "core:HANDLERS[nsa]", params=("runner",)),
        lambda m: (m.HANDLERS["nsa"](1), m.handler(1)),
        (("handler", 1), ("handler", 1)),
        (("patched", ("handler", 1)), ("handler", 1)),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_patch_applies_verifies_and_is_undone(case: str, engine: ModuleType) -> None:
    entry, use, stock, patched = CASES[case]
    before = snapshot(engine)
    assert use(engine) == stock

    book = ledger(entry)
    (status,) = book.install(Need.ENABLED)
    assert status.state == "applied"
    assert status.detail == entry.targets[0].path
    assert use(engine) == patched
    book.verify()

    book.undo()
    assert use(engine) == stock
    assert snapshot(engine) == before
    assert book.statuses == {}


def test_all_cases_together_are_undone_in_reverse(engine: ModuleType) -> None:
    before = snapshot(engine)
    book = ledger(*(entry for entry, *_ in CASES.values() if entry.name != "fake.engine"))
    statuses = book.install(Need.ENABLED)
    assert [s.state for s in statuses] == ["applied"] * len(statuses)
    book.undo()
    assert snapshot(engine) == before


def test_install_twice_applies_once(engine: ModuleType) -> None:
    book = ledger(patch("serve", "core:serve"))
    assert book.install(Need.ENABLED) == book.install(Need.ENABLED)
    assert engine.serve("h", 1) == ("patched", ("h", 1))


def test_only_the_asked_needs_are_installed(engine: ModuleType) -> None:
    book = ledger(
        patch("boot", "core:serve", need=Need.BOOTSTRAP),
        patch("cpu", "core:Engine.run", need=Need.CPU),
        patch("gpu", "core:Engine.inherited", need=Need.GPU),
    )
    assert [s.patch.name for s in book.install(Need.BOOTSTRAP)] == ["fake.boot"]
    assert [s.patch.name for s in book.install(Need.ENABLED, Need.CPU)] == ["fake.boot", "fake.cpu"]
    assert engine.Engine("m").inherited(1) == ("base", 1)


def test_wrapped_function_keeps_its_signature(engine: ModuleType) -> None:
    ledger(patch("run", "core:Engine.run")).install(Need.ENABLED)
    assert list(inspect.signature(engine.Engine.run).parameters) == ["self", "x", "scale"]
    assert engine.Engine.run.__name__ == "run"


REFUSALS = {
    "missing module": (patch("x", "nowhere:serve"), "module fake_engine.nowhere cannot be imported"),
    "module that raises": (patch("x", "needs_gpu:serve"), "libcuda.so.1"),
    "missing attribute": (patch("x", "core:gone"), "'gone' of fake_engine.core:gone is not there"),
    "missing owner": (patch("x", "core:Gone.run"), "'Gone' of fake_engine.core:Gone.run is not there"),
    "missing entry": (patch("x", "core:HANDLERS[dsa]"), "no entry 'dsa', only ['nsa', 'other']"),
    "no mapping": (patch("x", "core:not_a_mapping[a]"), "is a int, not a mapping"),
    "changed parameters": (patch("x", "core:serve", params=("host", "timeout")), "(host, port); expected 'timeout'"),
    "swapped parameters": (patch("x", "core:serve", params=("port", "host")), "expected 'host'"),
    "changed parameters of an entry": (patch("x", "core:HANDLERS[nsa]", params=("model",)), "expected 'model'"),
    "changed constructor": (patch("x", "core:Engine", kind=Kind.CLASS, params=("self", "rank")), "expected 'rank'"),
    "class that became a function": (patch("x", "core:serve", kind=Kind.CLASS), "is a function, not a class"),
    "function that became a value": (patch("x", "core:limit"), "is a int, not callable"),
    "function that became a property": (patch("x", "core:Engine.prop"), "is a property, not callable"),
    "unreadable parameters": (patch("x", "core:HANDLERS[other]", params=("z",)), "its parameters cannot be read"),
    "replacement that raises": (patch("x", "core:serve", "broken"), "RuntimeError('no such kernel')"),
    "replacement that is not there": (patch("x", "core:serve", "absent"), "the patch itself failed"),
    "replacement without a mark": (patch("x", "core:serve", "unmarkable"), "the patch itself failed"),
    "probe that is not there": (patch("x", "core:serve", probe="absent"), "the patch itself failed"),
    "requirement that is not there": (patch("x", "core:gone", ""), "is not there"),
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_refusal_names_everything_and_leaves_nothing(case: str, engine: ModuleType) -> None:
    bad, reason = REFUSALS[case]
    good = patch("good", "core:Engine.run")
    before = snapshot(engine)
    book = ledger(good, patch("required", "core:serve", ""), bad)
    with pytest.raises(PatchError) as caught:
        book.install(Need.ENABLED)
    message = str(caught.value)
    for part in ("fake.x", "fake 1.2", bad.targets[0].path, reason, "Supported: fake >=1,<2", "NSA_PLUGIN_ENABLED=0"):
        assert part in message
    assert "NSA_PLUGIN_STRICT=0" in message
    assert snapshot(engine) == before
    assert book.statuses == {}


def test_refusal_keeps_the_patches_of_an_earlier_call(engine: ModuleType) -> None:
    book = ledger(
        patch("boot", "core:serve", need=Need.BOOTSTRAP), patch("good", "core:Engine.run"), patch("bad", "core:gone")
    )
    book.install(Need.BOOTSTRAP)
    with pytest.raises(PatchError):
        book.install(Need.ENABLED)
    assert engine.serve("h", 1) == ("patched", ("h", 1))
    assert engine.Engine("m").run(1) == ("run", 1)
    assert set(book.statuses) == {"fake.boot"}


@pytest.mark.parametrize("version", ["0.9", "2.0", "3"])
def test_version_outside_the_range_is_refused_before_any_change(version: str, engine: ModuleType) -> None:
    before = snapshot(engine)
    book = ledger(patch("serve", "core:serve"), version=version)
    with pytest.raises(PatchError, match=rf"supports fake >=1,<2; fake {version} is installed"):
        book.install(Need.ENABLED)
    assert snapshot(engine) == before


@pytest.mark.usefixtures("engine")
def test_bootstrap_alone_does_not_refuse_a_version() -> None:
    # It only reads the settings, which decide whether to refuse.
    (status,) = ledger(patch("boot", "core:serve", need=Need.BOOTSTRAP), version="9").install(Need.BOOTSTRAP)
    assert status.state == "applied"


@pytest.mark.usefixtures("engine")
def test_prerelease_and_local_versions_count_as_their_release() -> None:
    for version in ("1.3.dev4", "1.2+cpu", "1.2rc1", "1.2.post1"):
        ledger(version=version).check_version()


def test_version_picks_the_target(engine: ModuleType) -> None:
    renamed = Patch(
        name="fake.renamed",
        engine="fake",
        need=Need.ENABLED,
        targets=(
            Target(path="fake_engine.core:old_name", versions="<1.2"),
            Target(path="fake_engine.core:serve", versions=">=1.2"),
        ),
        replacement="fake_patches:shout",
        why="renamed",
    )
    ledger(renamed).install(Need.ENABLED)
    assert engine.serve("h", 1)[0] == "patched"
    with pytest.raises(PatchError, match="old_name"):
        ledger(renamed, version="1.1").install(Need.ENABLED)


@pytest.mark.usefixtures("engine")
def test_patch_of_other_versions_is_unused() -> None:
    (status,) = ledger(patch("x", "core:gone", versions="<1")).install(Need.ENABLED)
    assert (status.state, status.detail) == ("unused", "not part of fake 1.2")


def test_requirement_is_checked_and_not_changed(engine: ModuleType) -> None:
    before = snapshot(engine)
    (status,) = ledger(patch("x", "core:serve", "", params=("host",))).install(Need.ENABLED)
    assert status.state == "required"
    assert snapshot(engine) == before


def test_probe_that_says_not_needed_leaves_the_engine_alone(engine: ModuleType) -> None:
    before = snapshot(engine)
    (status,) = ledger(patch("x", "core:serve", probe="not_needed")).install(Need.ENABLED)
    assert (status.state, status.detail) == ("not_needed", "fixed in this version")
    assert snapshot(engine) == before


def test_probe_that_says_needed_applies(engine: ModuleType) -> None:
    (status,) = ledger(patch("x", "core:serve", probe="needed")).install(Need.ENABLED)
    assert status.state == "applied"
    assert load("fake_patches:calls") == ["needed"]
    assert engine.serve("h", 1)[0] == "patched"


@pytest.mark.parametrize("case", ["function", "method", "classmethod", "staticmethod", "class", "dict entry"])
def test_verification_detects_a_replaced_object(case: str, engine: ModuleType) -> None:
    entry = CASES[case][0]
    book = ledger(entry)
    book.install(Need.ENABLED)
    owner, name, live = find(entry.targets[0])
    intruder = type("Intruder", (), {}) if case == "class" else lambda *args, **kwargs: None
    if entry.targets[0].kind is Kind.CLASS:
        intruder.__init__ = live.__init__  # type: ignore[misc]
    else:
        intruder.__signature__ = inspect.signature(live)  # type: ignore[union-attr]
    if entry.targets[0].key:
        owner[entry.targets[0].key] = intruder
    else:
        setattr(owner, name, staticmethod(intruder) if inspect.isclass(owner) else intruder)
    with pytest.raises(PatchError, match="something replaced it"):
        book.verify()


def test_subclass_of_a_patched_class_does_not_pass_for_it(engine: ModuleType) -> None:
    entry = CASES["class"][0]
    book = ledger(entry)
    book.install(Need.ENABLED)
    engine.Engine = type("Other", (engine.Engine,), {})
    with pytest.raises(PatchError, match="something replaced it"):
        book.verify()


def test_verification_detects_a_missing_object(engine: ModuleType) -> None:
    book = ledger(patch("serve", "core:serve"))
    book.install(Need.ENABLED)
    del engine.serve
    with pytest.raises(PatchError, match="gone after it was applied"):
        book.verify()


def test_installation_verifies_the_patches_of_an_earlier_call(engine: ModuleType) -> None:
    book = ledger(patch("boot", "core:serve", need=Need.BOOTSTRAP), patch("run", "core:Engine.run"))
    book.install(Need.BOOTSTRAP)
    engine.serve = lambda host, port: None
    with pytest.raises(PatchError, match=r"fake\.boot"):
        book.install(Need.ENABLED)
    assert engine.Engine("m").run(1) == ("run", 1)


def test_check_changes_nothing(engine: ModuleType) -> None:
    before = snapshot(engine)
    ledger(patch("serve", "core:serve"), patch("later", "core:gone", versions=">=1.5")).check(Need.ENABLED)
    assert snapshot(engine) == before
    with pytest.raises(PatchError, match="gone"):
        ledger(patch("x", "core:gone")).check(Need.ENABLED)
    ledger(patch("x", "core:gone")).check(Need.CPU)
    with pytest.raises(PatchError, match="is installed"):
        ledger(version="7").check(Need.ENABLED)


@pytest.mark.parametrize(
    ("expected", "found", "fits"),
    [
        ((), [], True),
        (("a",), ["self", "a"], True),
        (("self", "b"), ["self", "a", "b", "kwargs"], True),
        (("b", "a"), ["a", "b"], False),
        (("a", "a"), ["a", "b"], False),
        (("c",), ["a", "b"], False),
    ],
)
def test_params_missing(expected: tuple[str, ...], found: list[str], fits: bool) -> None:
    assert (params_missing(expected, found) is None) == fits


def test_mark_belongs_to_one_patch() -> None:
    def function() -> None: ...

    mark(function, "fake.a")
    assert is_marked(function, "fake.a")
    assert not is_marked(function, "fake.b")
    assert not is_marked(3, "fake.a")


def test_wrap_calls_around_with_the_original() -> None:
    def original(a: int, b: int = 2) -> int:
        return a + b

    wrapped = wrap(original, lambda inner, a, b=5: inner(a, b) * 10)
    assert wrapped(1) == 60
    assert wrapped.__name__ == "original"


def test_target_path_is_read() -> None:
    target = Target(path="a.b:C.d[key]")
    assert (target.module, target.attributes, target.key) == ("a.b", ["C", "d"], "key")
    assert Target(path="a.b:C.d").key is None
