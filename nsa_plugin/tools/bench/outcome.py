"""The result of a suite: measured rows, and what was refused, failed or skipped. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nsa_plugin.tools.bench.cases import BenchCase


@dataclass
class Outcome:
    """The result of a suite.

    Attributes:
        rows: rows of the record.
        refused: {op, case, provider, reason} of contenders that do not support a case.
        failed: the same for those that raised another error, or whose result is wrong.
        skipped: cases that the time did not allow.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[BenchCase] = field(default_factory=list)
