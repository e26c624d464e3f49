"""One decision for every batch: which attention path, kernel provider and indexer, and why. Pure Python.

`decide`, `partition` and `validate` take shapes, a device profile, settings and the engine's `Constraints`.
"""

from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import BatchPart, Decider, decide, partition, validate
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase

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
