"""What every test runs under."""

import os
import signal

import pytest
import torch

from nsa_plugin.decision import timings
from tests.interpreter import large_read_programs, patch_triton_once

__all__ = ["large_read_programs"]  # a fixture

if not torch.cuda.is_available():
    # Triton kernels run interpreted where there is no GPU. Triton reads this when a kernel is defined: it is said here,
    # before any test module imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    patch_triton_once()

try:
    from hypothesis import settings
except ModuleNotFoundError:  # an environment that has only what the tests of the kernels on a GPU need
    pass
else:
    # Fresh examples at every run, and no limit on how long one takes: that is a matter of the machine. CI asks for the
    # same ones each time, so that a change is not refused for what another one brought.
    settings.register_profile("fresh", deadline=None, print_blob=True)
    settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fresh"))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Ctrl-C works, in this process and in those that tests start, even where the run is a background job: a shell
    starts those with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules without measurements, whatever records this checkout has; a test that wants some sets its own."""
    monkeypatch.setattr(timings, "TIMINGS", {})


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from the environment."""
    for name in [name for name in os.environ if name.startswith("NSA_PLUGIN_")]:
        monkeypatch.delenv(name)
