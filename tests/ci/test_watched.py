"""`ci.watched`: objects that `ci.moved` lists for a person to read, and that never fail it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import archive, moved, watched
from ci.moved import Change, Moved, any_moved, compare
from ci.rows import engines
from nsa_plugin.commands.engines import ENGINES
from nsa_plugin.patches.ledger import Need, Patch, Target
from nsa_plugin.patches.static import SourceTree

OLD = {
    "vllm/__init__.py": "",
    "vllm/a.py": """
def seam(x):
    return x

def same(x):
    return x

def body(x):
    return x

def gone(x):
    return x

from elsewhere import outside

class Names:
    A = "a"
    B = "b"
""",
}
NEW = {
    "vllm/__init__.py": "",
    "vllm/a.py": """
def seam(x):
    return x

def same(x):
    # A comment.
    return x

def body(x, y):
    return x

def came(x):
    return x

from elsewhere import outside

class Names:
    A = "a"
    B = "c"
""",
}
TABLE = {
    "a:same": "picks same",
    "a:body": "picks body",
    "a:gone": "picks gone",
    "a:came": "picks came",
    "a:outside": "picks outside",
    "a:Names": "names each",
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "WATCHED", {"vllm": TABLE})


def changes() -> dict[str, Change]:
    trees = SourceTree(OLD.get), SourceTree(NEW.get)
    found = compare(watched.entries("vllm"), *trees, ("1.0", "2.0"))
    return {change.target.path.removeprefix("vllm.a:"): change for change in found}


def test_only_an_unchanged_object_is_not_listed() -> None:
    found = changes()
    assert {name for name, change in found.items() if change.outcome is Moved.WATCHED} == set(found) - {"same"}
    assert found["same"].outcome is Moved.SAME


def test_the_detail_says_how_an_object_moved() -> None:
    found = changes()
    assert found["body"].detail == "1 lines gone, 1 new"
    assert found["Names"].detail == "1 lines gone, 1 new"
    assert found["gone"].detail == "'gone' of vllm.a:gone is not there"
    assert found["came"].detail == "the older version: 'came' of vllm.a:came is not there"
    assert found["outside"].detail == "another distribution defines it"


def test_a_watched_object_is_no_seam_and_a_ledger_entry_is() -> None:
    assert not any_moved(list(changes().values()))
    entry = Patch(name="vllm.gone", engine="vllm", need=Need.GPU, why="why", targets=(Target(path="vllm.a:gone"),))
    assert any_moved(compare((entry,), SourceTree(OLD.get), SourceTree(NEW.get), ("1.0", "2.0")))


# The command.

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on these files, as a wheel or an archive, with one ledger entry: exit status and output."""
    monkeypatch.setenv("COLUMNS", "200")  # no line of the table is broken
    monkeypatch.setattr(archive, "LAST_GOOD", tmp_path / "last_good.json")
    archive.LAST_GOOD.write_text("{}\n")
    entry = Patch(name="vllm.seam", engine="vllm", need=Need.GPU, why="why", targets=(Target(path="vllm.a:seam"),))
    monkeypatch.setattr(moved, "ENGINES", {"vllm": SimpleNamespace(ledger=SimpleNamespace(PATCHES=(entry,)))})

    def command(files: Mapping[str, str], *options: str, in_archive: bool) -> tuple[int, str]:
        class Files:
            def __init__(self, distribution: str, version: str) -> None:
                self.read = (files if version == "2.0" else OLD).get

            def __enter__(self) -> Files:
                return self

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(moved, "Wheel", Files)
        arguments = ["1.0", "2.0"]
        if in_archive:
            with zipfile.ZipFile(tmp_path / "main.zip", "w") as made:
                for name, text in files.items():
                    made.writestr(f"vllm-main/{name}", text)
                made.comment = b"1" * 40
            arguments = ["1.0", "--archive", str(tmp_path / "main.zip")]
        monkeypatch.setattr("sys.argv", ["moved", "vllm", *arguments, *options])
        return moved.main(), capsys.readouterr().out

    return command


both = pytest.mark.parametrize("in_archive", [False, True], ids=["wheel", "archive"])


@both
def test_the_command_lists_what_to_read_and_ends_0(run: Run, in_archive: bool) -> None:
    status, said = run(NEW, in_archive=in_archive)
    assert status == 0
    assert "1 objects: 0 seam moved, 0 body changed, 0 not comparable, 1 same" in said
    assert "6 watched: 5 to read, 1 same" in said
    assert "What moved" not in said
    listed = {line.split()[3]: line for line in said.splitlines() if line.strip().startswith("watched ")}
    rest = ["body", "gone", "came", "outside"]
    assert set(listed) == {"vllm.a:Names", *(f"vllm.a:{name}" for name in rest)}
    assert all(f"picks {name} " in listed[f"vllm.a:{name}"] for name in rest)
    assert "names each" in listed["vllm.a:Names"]


@both
def test_the_diff_of_a_watched_object_is_printed(run: Run, in_archive: bool) -> None:
    _, said = run(NEW, "--diff", in_archive=in_archive)
    assert "watched: vllm.a:body\n  picks body\n" in said
    assert "+def body(x, y):" in said


@both
def test_without_a_change_there_is_nothing_to_read(run: Run, in_archive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "WATCHED", {"vllm": {"a:same": "picks same"}})
    status, said = run(NEW, in_archive=in_archive)
    assert status == 0
    assert "1 watched: 0 to read, 1 same" in said
    assert "Watched, no seam" not in said


@both
def test_a_moved_seam_still_ends_1(run: Run, in_archive: bool) -> None:
    moved_seam = {path: text.replace("def seam", "def renamed") for path, text in NEW.items()}
    status, said = run(moved_seam, in_archive=in_archive)
    assert status == 1
    assert "1 objects: 1 seam moved" in said
    assert "6 watched: 5 to read" in said


def test_the_commit_of_an_archive_is_recorded_although_a_watched_object_is_gone(run: Run) -> None:
    status, _ = run(NEW, "--record", in_archive=True)
    assert (status, json.loads(archive.LAST_GOOD.read_text())["vllm"]["commit"]) == (0, "1" * 40)


def test_a_watched_definition_that_the_build_adds_to_the_wheel_is_said_to_be_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "def seam(x): ...\nif built:\n    from vllm.built import body\nelse:\n    def body(x): ...\n"
    monkeypatch.setitem(OLD, "vllm/a.py", module)
    monkeypatch.setitem(OLD, "vllm/built.py", "def body(x):\n    return 7\n")
    monkeypatch.setattr(watched, "WATCHED", {"vllm": {"a:body": "picks body"}})
    status, said = run({"vllm/__init__.py": "", "vllm/a.py": module}, in_archive=True)
    assert (status, "1 watched: 1 to read" in said) == (0, True)
    assert "the wheel defines it in a file that the archive lacks" in said


# The table.


def test_every_engine_has_watched_objects_beside_those_of_its_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert set(watched.WATCHED) == set(engines())
    for name in engines():
        in_ledger = {target.path for patch in ENGINES[name].ledger.PATCHES for target in patch.targets}
        paths = {patch.targets[0].path for patch in watched.entries(name)}
        assert paths
        assert not paths & in_ledger
