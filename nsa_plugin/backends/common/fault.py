"""The deliberate fault `shift_indices`, by which a comparison shows that it notices wrong tokens.

`Providers` holds one `AttendedTokens`, made at start. The plugin's kernels are loaded through it; an adapter that calls
a stock kernel passes that kernel's indices through it. Nothing of an engine changes while a batch runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nsa_plugin.settings import Settings


@dataclass(frozen=True)
class AttendedTokens:
    """The tokens that sparse attention reads: those selected, or with the fault others of the same cache.

    Attributes:
        wrong: the fault is on.
    """

    wrong: bool = False

    @classmethod
    def of(cls, settings: Settings) -> AttendedTokens:
        return cls(settings.fault == "shift_indices")

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Slots, rows or positions to attend; -1 stays -1."""
        return shifted(indices) if self.wrong else indices

    def kernel(self, attend: Callable[..., Any], *, named: tuple[str, ...] = ("extra_indices",)) -> Callable[..., Any]:
        """A sparse attention kernel that attends these tokens.

        Args:
            attend: takes its indices as the third argument, or among the keywords `named`.
            named: the keywords that hold indices or None.
        """
        if not self.wrong:
            return attend

        @functools.wraps(attend)
        def attend_others(*args: Any, **given: Any) -> Any:
            moved = (*args[:2], *(self(one) for one in args[2:3]), *args[3:])
            changed = {name: self(given[name]) for name in named if given.get(name) is not None}
            return attend(*moved, **{**given, **changed})

        return attend_others


def shifted(indices: torch.Tensor) -> torch.Tensor:
    """Another token's slot, row or position for each, in the same cache; -1 stays -1."""
    return indices.div(2, rounding_mode="floor")
