"""`ci.moved`: what a new engine version changed under the ledger."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ci import moved
from ci.moved import Change, Moved, compare
from nsa_plugin.patches.ledger import Kind, Need, Patch, Target
from nsa_plugin.patches.static import SourceTree

OLD = {
    "toy/__init__.py": "",
    "toy/a.py": '''
def same(x):
    """Docstring."""
    return x + 1  # comment

def body(x):
    return x + 1

def gone(x):
    return x

def signed(x, y):
    return x

class Held:
    size = 1
    def run(self):
        return 1
''',
}
NEW = {
    "toy/__init__.py": "",
    "toy/a.py": """
def same(x):
    return (x
            + 1)

def body(x):
    if x:
        return 2
    return x + 1

def signed(x):
    return x

class Held:
    size = 2
    def run(self):
        return 1
""",
    "toy/b.py": "def came(x):\n    return x\n",
}


ENTRIES = {
    "same": ("a:same", ("x",)),
    "body": ("a:body", ("x",)),
    "gone": ("a:gone", ("x",)),
    "signed": ("a:signed", ("x", "y")),
    "class": ("a:Held", ()),
    "method": ("a:Held.run", ("self",)),
    "came": ("b:came", ("x",)),
}


def patch(name: str, path: str, params: tuple[str, ...], versions: str = "") -> Patch:
    kind = Kind.CLASS if path.endswith("Held") else Kind.FUNCTION
    target = Target(path=f"toy.{path}", kind=kind, params=params, versions=versions)
    return Patch(name=name, engine="toy", need=Need.GPU, why=f"why {name}", targets=(target,))


PATCHES = tuple(patch(name, path, params) for name, (path, params) in ENTRIES.items())


def changes() -> dict[str, Change]:
    trees = SourceTree(OLD.get), SourceTree(NEW.get)
    return {change.patch.name: change for change in compare(PATCHES, *trees, ("1.0", "2.0"))}


def test_every_entry_has_its_outcome() -> None:
    assert {name: change.moved for name, change in changes().items()} == {
        "same": Moved.SAME,
        "body": Moved.BODY,
        "gone": Moved.SEAM,
        "signed": Moved.SEAM,
        "class": Moved.BODY,
        "method": Moved.SAME,
        "came": Moved.UNKNOWN,
    }


def test_a_changed_body_is_shown_without_comments_and_formatting() -> None:
    change = changes()["body"]
    assert change.detail == "0 lines gone, 2 new"
    assert [line for line in change.diff[2:] if line[0] in "+-"] == ["+    if x:", "+        return 2"]


def test_an_entry_without_a_target_in_the_newer_version_is_left_out() -> None:
    older = (patch("older", "a:body", ("x",), "<2"),)
    assert compare(older, SourceTree(OLD.get), SourceTree(NEW.get), ("1.0", "2.0")) == []


@pytest.mark.parametrize(("newer", "status"), [("2.0", 1), ("1.5", 0)])
def test_the_command_ends_1_if_a_seam_moved(
    newer: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Files:
        def __init__(self, distribution: str, version: str) -> None:
            self.read = (NEW if version == "2.0" else OLD).get

        def __enter__(self) -> Files:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(moved, "Wheel", Files)
    monkeypatch.setattr(moved, "newest", lambda distribution: newer)
    ledger = SimpleNamespace(PATCHES=PATCHES[:3])
    monkeypatch.setattr(moved, "ENGINES", {"vllm": SimpleNamespace(ledger=ledger)})
    monkeypatch.setattr("sys.argv", ["moved", "vllm", "1.0", "--diff"])
    assert moved.main() == status
    said = capsys.readouterr().out
    if status:
        assert "vllm: 1.0 -> 2.0" in said
        assert "3 objects: 1 seam moved, 1 body changed, 0 not comparable, 1 same" in said
        assert "why body" in said
        assert "+        return 2" in said
    else:
        assert "3 objects: 0 seam moved, 0 body changed, 0 not comparable, 3 same" in said
