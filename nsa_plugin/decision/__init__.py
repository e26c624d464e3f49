"""One decision for every batch: which attention path, kernel provider and indexer, and why. Pure Python.

`decide`, `partition` and `validate` take shapes, a device profile, settings and the engine's `Constraints`.

Names are imported when first used: an engine's main process reads settings and needs no decision.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_plugin.decision.constraints import Constraints
    from nsa_plugin.decision.dispatch import BatchPart, Decider, decide, partition, validate
    from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
    from nsa_plugin.decision.routes import Route
    from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase

_NAMES = {
    "constraints": "Constraints",
    "dispatch": "BatchPart Decider decide partition validate",
    "plan": "Attention IndexerMode IndexerPlan Plan",
    "routes": "Route",
    "shapes": "BatchShape ModelShape Phase",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Attention",
    "BatchPart",
    "BatchShape",
    "Constraints",
    "Decider",
    "IndexerMode",
    "IndexerPlan",
    "ModelShape",
    "Phase",
    "Plan",
    "Route",
    "decide",
    "partition",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
