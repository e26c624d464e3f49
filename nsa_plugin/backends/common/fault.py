"""The deliberate fault `shift_indices`, by which a comparison shows that it notices wrong tokens."""

from __future__ import annotations

import torch


def shifted(indices: torch.Tensor) -> torch.Tensor:
    """Some other token's slot, row or position for each, in the same cache; -1 stays -1."""
    return indices.div(2, rounding_mode="floor")
