"""JSON output of the commands."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data instead of tables, on stdout")


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **data}, indent=2))
