"""Restrictions on a decision that do not come from the model, the batch, the device or the settings.

An adapter knows things about its engine that `decide` cannot: which execution paths exist, what the user configured in
the engine itself, how much memory a copy of this batch takes. It passes them in here and never edits a plan afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nsa_plugin.decision.routes import Route
from nsa_plugin.errors import ShapeError
from nsa_plugin.libraries.devices import MIB
from nsa_plugin.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The caller's restrictions on one plan.

    Attributes:
        no_dense: why the batch must not attend densely; "" = it may.
        no_split: why the short requests of a batch with longer ones do not attend densely by themselves; "" = they
            may, and the caller splits the batch.
        paths: the routes that the engine can execute; None = all.
        engine: the engine's name, for the reason of a route outside `paths`.
        no_path: why a library has no path and what runs it instead, by its name, or why one of its routes has none, by
            the route; for others the reason only names the engine.
        preferred: routes that the user configured in the engine itself. They come first, and any other route follows
            if none of them supports the batch. A library named in the plugin's settings goes before them; of its
            routes they come first.
        preferred_by: what asks for them.
        asked_by: the engine's flag, with its value, that set `prefill_backend` or `decode_backend`; "" = none did.
        no_copy: why no route may read a bf16 copy of the cache; "" = one may.
        copy_bytes: bytes that a bf16 copy of the cache takes for this batch; None = not limited.
        copy_budget: bytes that such a copy may take.
        copy_budget_from: where the budget comes from.
        keep_heads: why the ranks keep their heads for every token; "" = they may reshard.
        keep_heads_on: why the ranks keep their heads, by the route that they would otherwise reshard around.
        selection_split: why each rank selects for its share of a prefill's query tokens even if heads stay local; "" =
            every rank then selects for all of them.
        stock_prefill: the stock engine's route for prefills over an fp8 cache, first where no times exist; None = over
            bf16 rows for V4, the usual order for V3.2.
        stock_tokens: up to this many context tokens in all, the stock engine's code selects; 0 = never. Without times
            for the shape it selects for more, too, unless a setting names a library.
        stock_attends_by: the routes that the stock engine's code also attends by where it selects.
        workspace_reserved: the engine has reserved what a DeepSeek-V4 prefill holds besides logits, which then has no
            share of their budget.
        stock_selects_prefills: the stock engine's code selects for every prefill; the plan's library is not called.
    """

    no_dense: str = ""
    no_split: str = ""
    paths: frozenset[Route] | None = None
    engine: str = "the engine"
    no_path: Mapping[str | Route, str] = field(default_factory=dict)
    preferred: frozenset[Route] = frozenset()
    preferred_by: str = ""
    asked_by: str = ""
    no_copy: str = ""
    copy_bytes: int | None = None
    copy_budget: int = 0
    copy_budget_from: str = ""
    keep_heads: str = ""
    keep_heads_on: Mapping[Route, str] = field(default_factory=dict)
    selection_split: str = ""
    stock_prefill: Route | None = None
    stock_tokens: int = 0
    stock_attends_by: frozenset[Route] = frozenset()
    workspace_reserved: bool = False
    stock_selects_prefills: bool = False

    def __post_init__(self) -> None:
        if self.preferred and not self.preferred_by:
            raise ShapeError("preferred routes need preferred_by, the setting that asks for them")

    @property
    def copy_fits(self) -> bool:
        """Whether a bf16 copy of the cache stays within its budget."""
        return self.copy_bytes is None or self.copy_bytes <= self.copy_budget

    @property
    def copy_refusal(self) -> str:
        """Why a route that copies the cache does not fit."""
        return f"a bf16 copy would take {(self.copy_bytes or 0) / MIB:.0f} MiB, over {self.copy_budget_from}"


SHARED_CONTEXT = "the ranks share the context, and a bf16 copy of it would have to be gathered from all of them"
"""`no_copy` with decode context parallelism."""

UNCONSTRAINED = Constraints()


def steps_left_to_engine(family: str, settings: Settings, *, portable: bool) -> str:
    """Why the engine runs its decode, verify and draft steps by its own code; "" = by their plan.

    Args:
        family: of the model, "v4" for DeepSeek-V4.
        portable: the portable path serves, on which the engine has no kernels for them.
    """
    if family == "v4" and settings.decode_backend == "auto" and not portable:
        return "decode_backend is auto: decode, verify and draft steps of DeepSeek-V4 run on the stock path"
    return ""
