"""Options with a value, and number types whose error messages say which values are allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any

_Arguments = argparse.ArgumentParser | argparse._ArgumentGroup


def option(group: _Arguments, flag: str, kind: Callable[[str], Any], text: str, default: Any = None) -> None:
    """Add an option with a value.

    Args:
        flag: the option and the name of its value, "--budget SECONDS".
        kind: makes the value from its text.
        text: the help; "%(default)s" stands for the default.
    """
    name, _, metavar = flag.partition(" ")
    group.add_argument(name, type=kind, metavar=metavar, default=default, help=text)


def switch(group: _Arguments, flag: str, text: str) -> None:
    """Add an option without a value."""
    group.add_argument(flag, action="store_true", help=text)


def given(args: argparse.Namespace, options: Iterable[str]) -> list[str]:
    """Those of the options that the user gave, if they have no default; 0 counts as not given."""
    return [name for name in options if getattr(args, name.removeprefix("--").replace("-", "_"))]


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def positives(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas."""
    return [positive(number.strip()) for number in text.split(",")]


def seconds(text: str) -> float:
    """A finite number above 0."""
    return above_zero(text, "seconds")


def above_zero(text: str, unit: str, end: float = math.inf) -> float:
    """A number above 0 and below `end`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < end:
        below = f" and below {end:,.0f}" if end < math.inf else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0{below}")
    return value


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
