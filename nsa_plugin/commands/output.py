"""Output that the commands share: JSON, and how much of the rest."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data instead of tables, on stdout")


def add_verbose(parser: ArgumentParser, what: str) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help=f"also show {what}")


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **data}, indent=2))
