"""Shows where a long run is: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_HEARTBEAT_SECONDS = 10.0

Update = Callable[[str], None]


class Steps:
    """Reports the steps of a run to `console`."""

    def __init__(self, console: Console):
        self.console = console

    @contextmanager
    def step(self, title: str) -> Iterator[Update]:
        """One step. The function it gives says how far the step is; a failed step says so and re-raises."""
        started = time.monotonic()
        try:
            if self.console.is_terminal:
                with self.console.status(title) as status:
                    yield lambda text: status.update(f"{title}: {text}"[: self.console.width - 4])
            else:
                self.console.print(f"{title} ...")
                yield self._heartbeat()
        except BaseException:
            self.console.print(f"✗ {title} ({time.monotonic() - started:.1f} s)")
            raise
        self.console.print(f"✓ {title} ({time.monotonic() - started:.1f} s)")

    def _heartbeat(self) -> Update:
        said = time.monotonic()

        def update(text: str) -> None:
            nonlocal said
            if time.monotonic() - said >= _HEARTBEAT_SECONDS:
                said = time.monotonic()
                self.console.print(f"  {text}")

        return update
