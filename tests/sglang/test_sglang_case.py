"""The start of a server for the tests with a real SGLang, with a program in SGLang's place."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import sglang_case
from sglang_case import Place

from tests.tools.processes import alive

# Fails as often as it is told, as SGLang does whose first request to itself takes too long; then it answers. Each start
# writes what SGLang with the plugin and the witness would, and leaves a process behind.
SERVER = """
import http.server, json, os, subprocess, sys
from pathlib import Path

starts = Path("starts")
start = len(starts.read_text().split()) + 1 if starts.exists() else 1
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with starts.open("a") as file:
    file.write(f"{left.pid}\\n")
with open(os.environ["WITNESS_FILE"], "a") as file:
    file.write(json.dumps({"event": "loaded", "start": start}) + "\\n")
if start == 1:
    Path("report.json").write_text(json.dumps({"start": start}))
if start <= int(os.environ["FAILS"]):
    print(os.environ["SAYS"], flush=True)
    sys.exit(3)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
TOO_SLOW = "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1'): Read timed out. (read timeout=10)"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "server.py").write_text(SERVER)
    monkeypatch.setattr(sglang_case, "server_command", lambda model: ["server.py"])
    return Place(tmp_path)


def left(place: Place, processes: int) -> bool:
    """Whether so many of the starts' processes are left; one that was killed takes a moment to end."""
    deadline = time.monotonic() + 60
    while len(alive(place.folder / "starts")) > processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(alive(place.folder / "starts")) == processes


def test_a_server_that_was_too_slow_once_is_started_again_without_a_trace_of_the_first_start(place: Place) -> None:
    with place.server(FAILS="1", SAYS=TOO_SLOW) as url:
        assert url.startswith("http://127.0.0.1:")
        assert [one["start"] for one in place.seen("loaded")] == [2]
        assert not place.report_file.exists()  # the second start wrote none
        assert left(place, 1)
    assert "ReadTimeout" not in place.log()
    assert left(place, 0)


@pytest.mark.parametrize(
    ("fails", "says", "starts"), [("9", TOO_SLOW, 2), ("1", "SettingsError: unknown nsa-plugin setting", 1)]
)
def test_a_server_that_ends_otherwise_or_again_fails_the_test(place: Place, fails: str, says: str, starts: int) -> None:
    ended = pytest.raises(AssertionError, match=rf"the server ended with 3:\n{says[:13]}")
    with ended, place.server(FAILS=fails, SAYS=says):
        pass
    assert len((place.folder / "starts").read_text().split()) == starts
    assert left(place, 0)
    assert json.loads(place.witness_file.read_text())["start"] == starts  # one record, the last start's
