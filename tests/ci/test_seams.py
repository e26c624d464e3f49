"""Reading an engine's wheel: from a server with ranges, from one without, from a file; and what is made of it."""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import seams
from ci.rows import engines
from ci.wheels import Wheel, WheelError
from nsa_plugin.commands import engines as known
from nsa_plugin.patches.ledger import Need, Patch, Target

FILES = {
    "toy/__init__.py": "",
    "toy/core.py": "def serve(host, port): ...\n",
    "toy/kernel.cu": "not Python",
    "toy-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.2\n",
    "toy-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "toy-1.2.dist-info/RECORD": "",
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """A package index with one project, and byte ranges if `ranges` says so."""

    ranges = True
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers.get('Range', 'whole')}")
        wanted = self.headers.get("Range")
        if not (wanted and self.ranges and self.path.endswith(".whl")):
            return super().do_GET()
        data = (Path(self.directory) / Path(self.path).name).read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        end = min(int(last) + 1, len(data)) if first and last else len(data)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(data[start:end])
        return None

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    folder = tmp_path / "index"
    (folder / "toy").mkdir(parents=True)
    name = "toy-1.2-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, text in FILES.items():
            wheel.writestr(path, text)
        wheel.writestr("toy/large.bin", bytes(range(256)) * 4000)
    (folder / "toy" / "index.html").write_text(f'<a href="../{name}">{name}</a>')

    class Server(Handler):
        asked: list[str] = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    yield Server
    server.shutdown()
    server.server_close()


def test_files_are_read_by_range_and_kept(index: type[Handler], tmp_path: Path) -> None:
    with Wheel("toy", "1.2", tmp_path / "cache") as wheel:
        assert wheel.read("toy/core.py") == FILES["toy/core.py"]
        assert wheel.read("toy/__init__.py") == ""
        assert wheel.read("toy/gone.py") is None
        assert wheel.read("toy/kernel.cu") is None  # no Python
    index.asked.clear()
    with Wheel("toy", "1.2", tmp_path / "cache") as wheel:
        assert wheel.read("toy/core.py") == FILES["toy/core.py"]
        assert wheel.read("toy/gone.py") is None
    assert index.asked == []


def test_server_without_ranges_is_asked_for_the_whole_wheel(index: type[Handler], tmp_path: Path) -> None:
    index.ranges = False
    with Wheel("toy", "1.2", tmp_path / "cache") as wheel:
        assert wheel.read("toy/core.py") == FILES["toy/core.py"]
    assert index.asked[-1].endswith("whole")


def test_wheel_in_a_folder_is_read_there(index: type[Handler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with Wheel("toy", "1.2", tmp_path / "cache") as wheel:
        assert wheel.read("toy/core.py") == FILES["toy/core.py"]
    assert index.asked == []


@pytest.mark.usefixtures("index")
def test_version_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with Wheel("toy", "9.9", tmp_path / "cache") as wheel, pytest.raises(WheelError, match=r"toy==9\.9"):
        wheel.read("toy/core.py")


def test_row_of_a_version(index: type[Handler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(name: str, path: str, *params: str) -> Patch:
        return Patch(name=name, engine="toy", need=Need.GPU, why="w", targets=(Target(path=path, params=params),))

    ledger = type(sys)("nsa_plugin.patches.toy")
    ledger.SUPPORTED = ">=1,<2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ledger.__name__, ledger)
    monkeypatch.setitem(known.ENGINES, "toy", known.Engine("toy", ("toy",), "", ""))
    monkeypatch.setattr(seams, "Wheel", functools.partial(Wheel, cache=tmp_path / "cache"))
    engine = next(iter(engines().values())).__class__("toy", "toy", "toy", "", "", "", "", ("1.2",), ("1.2",))

    ledger.PATCHES = (patch("toy.a", "toy.core:serve", "host", "port"),)  # type: ignore[attr-defined]
    row = seams.check_version(engine, "1.2")
    assert (row.outcome, row.detail, row.check) == ("ok", "1 objects", "seams")

    ledger.PATCHES = (*ledger.PATCHES, patch("toy.b", "toy.core:serve", "timeout"))  # type: ignore[attr-defined]
    row = seams.check_version(engine, "1.2")
    assert row.outcome == "failed"
    assert row.detail.startswith("toy.b: toy.core:serve: its parameters are (host, port); expected 'timeout'")

    row = seams.check_version(engine, "1.9")
    assert (row.outcome, "toy==1.9" in row.detail) == ("failed", True)
    row = seams.check_version(engine, "2.0")
    assert (row.outcome, row.detail) == ("failed", "outside the supported range >=1,<2")
    assert json.loads((tmp_path / "cache" / "toy-1.2" / "names.json").read_text()) == ["toy/__init__.py", "toy/core.py"]
