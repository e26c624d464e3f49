"""What every test runs under."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C works, in this process and in those that tests start, even where the run is a background job: a shell
    starts those with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
