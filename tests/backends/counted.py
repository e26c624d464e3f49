"""Stands in for `Metrics`: the plans that were counted, and their query tokens."""

from __future__ import annotations

from typing import Any


class Counted(list[Any]):
    """The plans, in order.

    Attributes:
        tokens: query tokens of each.
        budgets: of the indexer's logits, one for each batch.
        kinds: of the prefills with requests of two kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.budgets: list[int] = []
        self.kinds: list[str] = []

    def batch(self, plan: Any, tokens: int) -> None:
        self.append(plan)
        self.tokens.append(tokens)

    def combined(self, kind: str) -> None:
        self.kinds.append(kind)

    def decided(self, seconds: float, budget: int) -> None:
        assert seconds >= 0
        self.budgets.append(budget)
