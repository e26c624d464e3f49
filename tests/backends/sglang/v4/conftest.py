"""The route over rows without its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa_plugin.backends.common.fault import shifted
from nsa_plugin.backends.common.paths import BF16_ROWS, DIRECT
from nsa_plugin.backends.sglang.v4 import rows as v4_rows
from nsa_plugin.kernels.v4_prefill import combined_width
from tests.backends.fake_sglang.v4 import (
    LAYERS,
)
from tests.kernels.v4_prefill_cases import reference_route

# A chunk of a long request, a fresh one too short for a compressed entry, and one whose rows cross a page.
MIXED = ((4, 700), (3, 3), (4, 258))
VARIABLE = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
JIT = "SGLANG_OPT_USE_JIT_INDEXER_METADATA"

# The settings that lead to a route, whatever was measured.
SETTINGS: dict[str, dict[str, Any]] = {
    DIRECT: {"prefill_backend": "reference"},
    BF16_ROWS: {"prefill_backend": "flash_mla", "large_q_rows": 1},
}
EVERY_LAYER = pytest.mark.parametrize("layer_id", LAYERS)
pytestmark = pytest.mark.usefixtures("nothing_measured", "by_reference")


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route over rows by its reference, which takes the same pages and indices; the kernels have their own file."""
    filled: list[tuple[torch.Tensor, Any]] = []

    def filling(workspace: torch.Tensor, *keys: Any, again: bool, mapped: bool) -> None:
        assert len(workspace) == sum(part.rows for part in keys)
        assert mapped or not again
        filled[:] = [(workspace, keys)]

    def combining(*keys: Any, out: torch.Tensor, again: bool) -> Any:
        assert out.shape == (len(keys[0].indices), combined_width(*(part.indices.shape[1] for part in keys)))
        return [replace(part, indices=part.indices.clone(), lengths=part.lengths.clone()) for part in keys]

    def attending(
        q: torch.Tensor, workspace: torch.Tensor, keys: Any, *, attention: Any, out: Any = None, **more: Any
    ) -> Any:
        of, caches = filled[0]
        assert of is workspace
        attention(q)  # a test counts the calls
        # What another layer combined is attended in this one's caches.
        own = [replace(part, cache=one.cache) for part, one in zip(keys, caches, strict=True)]
        if hasattr(attention, "__wrapped__"):  # the fault's kernel, which shifts what it is given
            own = [replace(part, indices=shifted(part.indices)) for part in own]
        return reference_route(q, *own, out=out, **more)

    monkeypatch.setattr(v4_rows, "fill", filling)
    monkeypatch.setattr(v4_rows, "combine", combining)
    monkeypatch.setattr(v4_rows, "attend_rows", attending)
