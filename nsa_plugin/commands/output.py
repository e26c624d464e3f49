"""Output that the commands share: JSON, how much of the rest, and errors."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from argparse import ArgumentParser
from typing import Any


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data instead of tables, on stdout")


def add_verbose(parser: ArgumentParser, what: str) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help=f"also show {what}")


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **data}, indent=2))


def print_error(message: str) -> None:
    """Print to stderr: as it is for a script, wrapped between words where stderr is a terminal."""
    if sys.stderr.isatty():
        # Names of flags and paths stay whole, to be copied.
        wrapped = textwrap.TextWrapper(_columns(), break_long_words=False, break_on_hyphens=False)
        message = "\n".join(wrapped.fill(line) for line in message.splitlines())
    print(message, file=sys.stderr)


def _columns() -> int:
    """The width of the terminal at stderr. `shutil.get_terminal_size` asks for that of stdout, which may be a file."""
    try:
        known = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        known = 0
    return known or shutil.get_terminal_size().columns
