"""Terminal output of the commands: tables, a console of a sensible width, and the steps of a long run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# A file or pipe has no width, and reasons are long sentences.
_WIDTH_OF_A_FILE = 150
_HEARTBEAT_SECONDS = 10.0

Update = Callable[[str], None]


def console(*, stderr: bool = False) -> Console:
    """A console that prints text unchanged: reasons may contain brackets, which rich would read as markup."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if known else _WIDTH_OF_A_FILE)


def table(title: str, *columns: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table whose first column never wraps and whose last column takes the rest of the line."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=position == 0)
    for row in rows:
        made.add_row(*row)
    return made


class Steps:
    """The steps of a long run: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console):
        self.console = console

    @contextmanager
    def step(self, title: str) -> Iterator[Update]:
        """Run one step. Yields a function that reports progress; a step that fails is reported and re-raised."""
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
