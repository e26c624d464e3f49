"""Number types for argparse. Each error message says which values are allowed."""

from __future__ import annotations

import argparse


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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
