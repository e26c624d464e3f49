"""What the commands' arguments share: numbers as argparse's `type`, which name what is allowed where a text is not one,
and the command line as a record has it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


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


def elsewhere(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command as it would be given on another machine.

    Args:
        command: its words; those behind "--" are the engine's.
        options: that say where things lie, each with a value; "--name value" or "--name=value", never shortened.
    """
    words = iter(command)
    kept: list[str] = []
    for word in words:
        if word == "--":
            return [*kept, word, *words]
        name, given, _ = word.partition("=")
        if name not in options:
            kept.append(word)
        elif not given:
            next(words, None)
    return kept
