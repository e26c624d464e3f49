"""The deliberate fault `shift_indices`, which shows that a comparison detects wrong tokens.

`Providers` holds one `AttendedTokens`, made at start. It loads the plugin's kernels through it, and adapters pass the
indices of stock kernels through it. Nothing of an engine changes while a batch runs.
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
    """The tokens that sparse attention reads: the selected ones, or with the fault other tokens of the same cache.

    Attributes:
        wrong: whether the fault is on.
    """

    wrong: bool = False

    @classmethod
    def of(cls, settings: Settings) -> AttendedTokens:
        return cls(settings.fault == "shift_indices")

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the slots, rows or positions to attend; -1 stays -1."""
        return shifted(indices) if self.wrong else indices

    def kernel(self, attend: Callable[..., Any], *, named: tuple[str, ...] = ("extra_indices",)) -> Callable[..., Any]:
        """Wrap a sparse attention kernel so that it attends these tokens.

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
    """Replace each slot, row or position by that of another token in the same cache; -1 stays -1."""
    return indices.div(2, rounding_mode="floor")
