"""What enabling the plugin does with each configuration that an engine serves, for the docs and the tests.

The data are `support.toml`. The adapters decide at start-up; a test starts every configuration of this table and
compares outcome and reason.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Handling(StrEnum):
    """Outcome of enabling the plugin with a configuration."""

    STOCK = "left to the stock engine"
    PARTLY = "partly left to the stock engine"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration that the plugin does not serve, or not in full.

    Attributes:
        engine: SGLang or vLLM.
        what: the feature.
        given: how a user or the engine turns it on.
        outcome: what the plugin does, unless `strict` is `full`, which refuses what is left to the stock engine.
        says: words of the message in the log and in the start-up report.
        why: the reason, for the docs.
    """

    engine: str
    what: str
    given: str
    outcome: Handling = Handling.STOCK
    says: str
    why: str


def _read(path: Path) -> tuple[Configuration, ...]:
    return tuple(
        Configuration(engine=engine, **{**entry, "outcome": Handling(entry.get("outcome", Handling.STOCK))})
        for engine, entries in tomllib.loads(path.read_text()).items()
        for entry in entries
    )


CONFIGURATIONS = _read(Path(__file__).with_suffix(".toml"))
