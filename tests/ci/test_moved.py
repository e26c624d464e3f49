"""`ci.moved`: what a new engine version changed under the ledger."""

from __future__ import annotations

import functools
import http.server
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import archive, moved
from ci.archive import ArchiveError, Revision, load
from ci.moved import Change, Moved, compare
from ci.rows import engines
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


GOOD, NEWER = "1" * 40, "abcdef0123" * 4
DAY = (2026, 11, 20)
# Where GitHub's archives have the package: vLLM's, SGLang's.
FOLDERS = {"vllm": "vllm-main/", "sglang": "sglang-main/python/"}


def make_zip(path: Path, files: Mapping[str, str], comment: str) -> Path:
    """An archive as GitHub serves it: the commit is the comment, its time that of every file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            made.writestr(zipfile.ZipInfo(name, (*DAY, 12, 0, 0)), text)
        made.comment = comment.encode()
    return path


def make_tar(path: Path, files: Mapping[str, str], comment: str) -> Path:
    headers = {"comment": comment} if comment else {}
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, pax_headers=headers) as made:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(text.encode()), 1795176000  # 2026-11-20 12:00 UTC
            made.addfile(member, io.BytesIO(text.encode()))
    return path


every_format = pytest.mark.parametrize("make", [make_zip, make_tar])
Make = Callable[[Path, Mapping[str, str], str], Path]


def sources(engine: str, files: Mapping[str, str]) -> dict[str, str]:
    """The files of an archive: the engine's package with these modules, and files beside it."""
    top = FOLDERS[engine].partition("/")[0]
    beside = {f"{top}/setup.py": "", f"{top}/tests/{engine}/__init__.py": "", f"{top}/README.md": "no Python"}
    return beside | {f"{FOLDERS[engine]}{path.replace('toy/', f'{engine}/')}": text for path, text in files.items()}


@every_format
@pytest.mark.parametrize("engine", FOLDERS)
def test_an_archive_has_the_paths_of_the_wheel_and_names_its_commit(make: Make, engine: str, tmp_path: Path) -> None:
    read = load(str(make(tmp_path / "a", sources(engine, NEW), NEWER)), engine)
    assert read.read(f"{engine}/b.py") == NEW["toy/b.py"]
    assert read.read(f"{engine}/gone.py") is None
    assert read.revision == Revision(NEWER, "2026-11-20")


@every_format
@pytest.mark.parametrize("comment", ["", "made by hand"])
def test_a_comment_that_is_no_commit_names_none(make: Make, comment: str, tmp_path: Path) -> None:
    assert load(str(make(tmp_path / "a", sources("vllm", NEW), comment)), "vllm").revision is None


def test_an_archive_is_fetched_from_an_address(tmp_path: Path) -> None:
    make_zip(tmp_path / "main.zip", sources("vllm", NEW), NEWER)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert load(f"{address}/main.zip", "vllm").read("vllm/a.py") == NEW["toy/a.py"]
        with pytest.raises(ArchiveError, match=r"gone\.zip cannot be read.*404"):
            load(f"{address}/gone.zip", "vllm")
        server.shutdown()


@every_format
def test_what_is_no_archive_of_the_engine_is_one_clear_error(make: Make, tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", sources("vllm", NEW), NEWER)
    with pytest.raises(ArchiveError, match=r"no sglang/__init__\.py"):
        load(str(whole), "sglang")
    (tmp_path / "half").write_bytes(whole.read_bytes()[:-200])
    (tmp_path / "page").write_text("<html>not found</html>")
    for name in ("half", "page", "absent"):
        with pytest.raises(ArchiveError, match=f"{name} cannot be read"):
            load(str(tmp_path / name), "vllm")


# The last good commit, and the command.

Run = Callable[..., tuple[int, str]]


@pytest.fixture(params=FOLDERS)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on an archive with these files, against a wheel with the files of OLD: exit status and output."""
    monkeypatch.setenv("COLUMNS", "200")  # no line of the table is broken
    monkeypatch.setattr(archive, "LAST_GOOD", tmp_path / "last_good.json")
    archive.LAST_GOOD.write_text("{}\n")
    paths = {"body": "a:body", "gone": "a:gone"}
    entries = tuple(
        Patch(
            name=name,
            engine=engine,
            need=Need.GPU,
            why="why",
            targets=(Target(path=f"{engine}.{path}", params=("x",)),),
        )
        for name, path in paths.items()
    )
    monkeypatch.setattr(moved, "ENGINES", {engine: SimpleNamespace(ledger=SimpleNamespace(PATCHES=entries))})

    class Files:
        def __init__(self, distribution: str, version: str) -> None: ...

        def __enter__(self) -> Files:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, path: str) -> str | None:
            return OLD.get(path.replace(f"{engine}/", "toy/"))

    monkeypatch.setattr(moved, "Wheel", Files)

    def command(make: Make, files: Mapping[str, str], comment: str, *options: str) -> tuple[int, str]:
        path = make(tmp_path / "archive", sources(engine, files), comment)
        monkeypatch.setattr("sys.argv", ["moved", engine, "--archive", str(path), *options])
        return moved.main(), capsys.readouterr().out

    return command


# `gone` is there, `body` differs.
FOUND = NEW | {"toy/a.py": NEW["toy/a.py"] + "\ndef gone(x):\n    return x\n"}


@every_format
def test_the_commit_is_recorded_if_everything_is_found(make: Make, engine: str, run: Run) -> None:
    status, said = run(make, FOUND, GOOD)
    assert status == 0
    assert "2 objects: 0 seam moved, 1 body changed, 0 not comparable, 1 same" in said
    assert "no last good commit yet" in said
    assert json.loads(archive.LAST_GOOD.read_text()) == {}

    archive.record("other", Revision(NEWER, "2026-01-02"), archive.LAST_GOOD)
    status, said = run(make, FOUND, GOOD, "--record")
    assert (status, f"recorded {GOOD}" in said) == (0, True)
    assert json.loads(archive.LAST_GOOD.read_text()) == {
        engine: {"commit": GOOD, "date": "2026-11-20"},
        "other": {"commit": NEWER, "date": "2026-01-02"},
    }


@every_format
def test_a_moved_seam_names_the_changes_since_the_last_good_commit(make: Make, engine: str, run: Run) -> None:
    status, said = run(make, NEW, NEWER, "--record")
    assert status == 1
    assert f"'gone' of {engine}.a:gone is not there" in said
    assert "no last good commit yet" in said
    assert "/compare/" not in said
    assert json.loads(archive.LAST_GOOD.read_text()) == {}

    archive.record(engine, Revision(GOOD, "2026-11-13"), archive.LAST_GOOD)
    kept = archive.LAST_GOOD.read_text()
    status, said = run(make, NEW, NEWER, "--record")
    assert status == 1
    assert f"last good commit: {GOOD} (2026-11-13)" in said
    owner = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}[engine]
    assert f"https://github.com/{owner}/compare/{GOOD}...{NEWER}" in said
    assert archive.LAST_GOOD.read_text() == kept


@every_format
def test_an_archive_without_a_commit_is_checked_and_not_recorded(make: Make, engine: str, run: Run) -> None:
    status, said = run(make, FOUND, "")
    assert (status, "the archive names no commit" in said) == (0, True)
    status, said = run(make, FOUND, "", "--record")
    assert (status, "names no commit to record" in said) == (2, True)
    assert json.loads(archive.LAST_GOOD.read_text()) == {}
    archive.record(engine, Revision(GOOD, "2026-11-13"), archive.LAST_GOOD)
    status, said = run(make, NEW, "")
    assert (status, "/compare/" in said) == (1, False)


def test_a_definition_that_the_build_adds_to_the_wheel_is_not_comparable(
    engine: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As vLLM's flash_mla_interface.py, which its build copies from FlashMLA.
    module = f"if built:\n    from {engine}.built import body\nelse:\n    def body(x): ...\ndef gone(x): return x\n"
    built = {"toy/__init__.py": "", "toy/a.py": module, "toy/built.py": "def body(x):\n    return 7\n"}
    for path, text in built.items():
        monkeypatch.setitem(OLD, path, text)
    status, said = run(make_zip, {path: built[path] for path in ("toy/__init__.py", "toy/a.py")}, GOOD)
    assert status == 0
    assert "0 body changed, 1 not comparable, 1 same" in said
    assert "the wheel defines it in a file that the archive lacks" in said


def test_record_needs_an_archive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["moved", "vllm", "--record"])
    with pytest.raises(SystemExit, match="2"):
        moved.main()
    assert "--record needs --archive" in capsys.readouterr().err


def test_the_recorded_commits_are_of_known_engines_and_complete() -> None:
    recorded = json.loads(archive.LAST_GOOD.read_text())
    assert set(recorded) <= set(engines()) == set(archive.REPOSITORIES)
    for entry in recorded.values():
        assert Revision(**entry)
