"""What every test runs under."""

import signal

import pytest

from nsa_plugin import measured


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C works, in this process and in those that tests start, even where the run is a background job: a shell
    starts those with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules without measurements, whatever records this checkout has; a test that wants some sets its own."""
    monkeypatch.setattr(measured, "MEASUREMENTS", {})
