"""How commands print: rich tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# Where the output is no terminal it has no width of its own; reasons are long sentences.
_WIDTH_OF_A_FILE = 150


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data instead of tables, on stdout")


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **data}, indent=2))


def console() -> Console:
    """A console that prints text as it is: reasons hold brackets and numbers of their own."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(markup=False, highlight=False, emoji=False, width=None if known else _WIDTH_OF_A_FILE)


def table(title: str, *columns: str) -> Table:
    """A table whose first column is never broken and whose last takes what is left of the line."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=position == 0)
    return made
