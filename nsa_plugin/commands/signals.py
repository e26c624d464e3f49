"""Exit codes, and SIGTERM as an exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_OK, EXIT_FAILED, EXIT_CANNOT_RUN, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that every `with` and `finally` cleans up."""
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)
