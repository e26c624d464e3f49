import io

import pytest
from rich.console import Console

from nsa_plugin.tools import terminal as progress
from nsa_plugin.tools.terminal import Steps


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_lines_now_and_then(clock):
    file = io.StringIO()
    with Steps(Console(file=file)).step("Starting") as say:
        for second in range(25):
            clock[0] = second
            say(f"{second} s")
    assert file.getvalue().splitlines() == ["Starting ...", "  10 s", "  20 s", "✓ Starting (24.0 s)"]


def test_a_failed_step_says_so(clock):
    file = io.StringIO()
    with pytest.raises(ValueError, match="no"), Steps(Console(file=file)).step("Starting"):
        raise ValueError("no")
    assert file.getvalue().splitlines()[-1] == "✗ Starting (0.0 s)"


def test_a_terminal_gets_one_line_that_changes():
    file = io.StringIO()
    with Steps(Console(file=file, force_terminal=True, width=40)).step("Starting") as say:
        say("x" * 100)
    assert "✓ Starting" in file.getvalue()
