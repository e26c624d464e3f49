"""State of the plugin on SGLang's V4 attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.v4.batch import Prefill
from nsa_plugin.backends.sglang.v4.flash_mla import sparse_prefill
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner
from nsa_plugin.kernels.kv_cache import PagedCache, open_cache
from nsa_plugin.kernels.v4_prefill import RowsAttention
from nsa_plugin.kernels.workspace import Workspace
from nsa_plugin.layouts import CacheLayout


@dataclass
class V4State:
    """The planner, the kernels, and what the layers of one batch share.

    Attributes:
        own_heads_first: the model pads the rank's heads for FlashMLA at the end (from 0.5.14 on).
        rows_attention: FlashMLA's kernel over the bf16 rows of a workspace.
        plans_steps: decode, verify and draft steps have plans too.
        route: execution path of the prefill that was prepared last; None = the stock path.
        prefill: that prefill's requests.
        schedules: FlashMLA's scheduling metadata for that batch, by compress ratio.
        workspace: memory for the bf16 rows, the combined indices and the page maps.
        caches: the layers' caches, by (layer, which); SGLang keeps them as long as it runs.
    """

    planner: SglangV4Planner
    providers: Providers
    own_heads_first: bool = True
    rows_attention: RowsAttention = sparse_prefill
    plans_steps: bool = False
    route: Execution | None = None
    prefill: Prefill | None = None
    schedules: dict[int, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    caches: dict[tuple[int, str], PagedCache] = field(default_factory=dict)

    def cache(
        self, layer_id: int, which: str, buffer: torch.Tensor, layout: CacheLayout, page_size: Callable[[], int]
    ) -> PagedCache:
        """Open a layer's cache at its first batch, and again if SGLang has moved it."""
        known = self.caches.get((layer_id, which))
        moved = known is None or known.data.data_ptr() != buffer.data_ptr() or known.num_pages != buffer.shape[0]
        if known is None or moved or known.data.stride(0) != buffer.stride(0):
            known = self.caches[layer_id, which] = open_cache(buffer, layout, page_size())
        return known

    def forget(self) -> None:
        """Drop the last prefill."""
        self.route = self.prefill = None
        self.schedules.clear()
