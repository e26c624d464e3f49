"""A DeepSeek-V4 batch with its plans, made with vLLM's sliding-window metadata and read by every layer.

vLLM makes one `DeepseekSparseSWAMetadata` per batch and group of window caches, and passes each layer that of its
group. `planned_swa_builder` adds a `V4Batch` with the data that the layers share: the request of each query token, the
window's slots, the lengths of the compressed keys, the slots at ratio 128, and FlashMLA's schedules. Everything comes
from vLLM's tensors of the batch and from host data; nothing waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from nsa_plugin.backends.common.paths import DIRECT
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import CacheSelection
from nsa_plugin.backends.vllm.v4.routes import path
from nsa_plugin.backends.vllm.v32.metadata import Planning
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner, host_lengths
from nsa_plugin.decision.plan import Plan
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.patches.ledger import TURN_OFF

ATTRIBUTE = "nsa_plugin_v4"

COLUMNS = 128
"""FlashMLA requires a selection's width to be a multiple of this."""


@dataclass
class V4Batch:
    """A batch with its plans.

    Attributes:
        planner, providers: of this process.
        metadata: vLLM's `DeepseekSparseSWAMetadata` of the batch, decodes first; a weak reference, because it holds
            the batch, whose tensors would otherwise wait for the garbage collector.
        steps: the plan of its decode or verify steps; None without any.
        prefill: the plan of its prefills; None without any.
        prefill_rows: the prefills' query tokens in the batch; padding follows them.
        longest: context tokens of its longest prefill.
        schedules: FlashMLA's schedules of the prefills, by compress ratio.
    """

    planner: VllmPlanner
    providers: Providers
    metadata: Any
    steps: Plan | None
    prefill: Plan | None
    prefill_rows: slice
    longest: int
    schedules: dict[int, Any] = field(default_factory=dict)
    _window: tuple[torch.Tensor, torch.Tensor] | None = None
    _lengths: dict[int, torch.Tensor] = field(default_factory=dict)
    _slots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @cached_property
    def steps_in_place(self) -> bool:
        """Whether the plugin's kernel attends the steps, in both caches."""
        return self.steps is not None and path(self.steps) == DIRECT

    @property
    def num_prefill_rows(self) -> int:
        return int(self.prefill_rows.stop - self.prefill_rows.start)

    @property
    def owners(self) -> torch.Tensor:
        """int32 [prefill tokens]: the request of each."""
        owners: torch.Tensor = self.metadata.token_to_req_indices[self.prefill_rows]
        return owners

    def step_owners(self) -> torch.Tensor:
        """int32 [step tokens]: the request of each, -1 for padding. A graph may capture this."""
        rows, found = int(self.metadata.num_decode_tokens), self.metadata.token_to_req_indices
        found = found[:rows]  # shorter if the batch is padded
        owners = torch.full((rows,), -1, dtype=torch.int32, device=found.device)
        owners[: len(found)] = torch.where(self.metadata.is_valid_token[: len(found)], found, -1)
        return owners

    def window(self, cache: PagedCache) -> CacheSelection:
        """The prefills' slots in a layer's window cache."""
        if self._window is None:
            given = getattr(self.metadata, "prefill_swa_indices", None)  # since 0.24
            if given is None:
                self._window = self._window_slots()
            else:
                rows = self.num_prefill_rows
                self._window = given[:rows].flatten(1), self.metadata.prefill_swa_lens[:rows]
        return CacheSelection(cache, *self._window)

    def _window_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, first = self.metadata, int(self.metadata.num_decodes)
        starts = metadata.query_start_loc[first:] - metadata.query_start_loc[first]
        rows = self.num_prefill_rows
        positions = self.providers.helper("swa_window_indices")(
            starts, metadata.seq_lens[first:], self.planner.model.sliding_window, num_tokens=rows
        )
        transform = self.providers.helper("index_transform_paged")
        slots = transform(
            positions.indices, metadata.block_table, page_size=int(metadata.block_size), row_to_request=self.owners
        )
        return slots, positions.lengths

    def lengths(self, ratio: int, positions: torch.Tensor) -> torch.Tensor:
        """int32 [prefill tokens]: number of compressed keys that each token sees.

        Args:
            positions: int64 [>= prefill tokens], in their requests.
        """
        if ratio not in self._lengths:
            self._lengths[ratio] = ((positions[: self.num_prefill_rows] + 1) // ratio).int()
        return self._lengths[ratio]

    def slots(
        self, ratio: int, chosen: torch.Tensor, block_table: torch.Tensor, page_size: int, lengths: torch.Tensor
    ) -> torch.Tensor:
        """int32 [prefill tokens, topk]: slots of the prefills' selected keys.

        Args:
            ratio: compress ratio. At 128 all keys are selected, so layers with the same block table share the result.
            chosen: int32 [prefill tokens, topk], positions among the request's compressed keys, padded with -1.
            block_table: [requests, pages] of the compressed cache.
            page_size: its entries per page.
            lengths: see `lengths`.
        """
        key = ratio, block_table.data_ptr()
        if ratio == 128 and key in self._slots:
            return self._slots[key]
        if ratio == 128:
            keys = -(-max(1, self.longest // ratio) // COLUMNS) * COLUMNS
            chosen = chosen[:, :keys]
        transform = self.providers.helper("index_transform_paged")
        found: torch.Tensor = transform(
            chosen, block_table, page_size=page_size, row_to_request=self.owners, lengths=lengths
        )
        if ratio == 128:
            self._slots[key] = found
        return found


def planned_swa_builder(stock: type, planning: Planning, providers: Callable[[], Providers]) -> type:
    """Make a subclass of vLLM's builder of the window's metadata that adds a `V4Batch`.

    Args:
        stock: DeepseekSparseSWAMetadataBuilder.
        planning: called once for each builder.
        providers: returns those of this process; called only if there is a planner.
    """

    class Builder(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            planner = planning()
            self.nsa_plugin: VllmPlanner | None = planner
            if planner is not None and self.decode_threshold != planner.step_tokens:
                raise PatchError(
                    f"vLLM counts requests of up to {self.decode_threshold} query tokens as steps; the configuration "
                    f"says {planner.step_tokens}. {TURN_OFF}"
                )

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **more: Any
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **more)
            if self.nsa_plugin is not None:
                batch = v4_batch(self.nsa_plugin, providers(), metadata, common_attn_metadata)
                setattr(metadata, ATTRIBUTE, batch)
            return metadata

    Builder.__name__ = Builder.__qualname__ = f"Planned{stock.__name__}"
    return Builder


def v4_batch(planner: VllmPlanner, providers: Providers, metadata: Any, common: Any) -> V4Batch:
    """Make the plans of a batch.

    Args:
        metadata: DeepseekSparseSWAMetadata.
        common: vLLM's CommonAttentionMetadata that it was built from.

    Raises:
        PatchError: vLLM and the plans disagree on which query tokens are steps.
    """
    split = planner.split(common)
    rows = int(metadata.num_decode_tokens)
    if metadata.num_prefills and (split.num_steps, split.step_rows) != (metadata.num_decodes, rows):
        raise PatchError(
            f"vLLM takes {metadata.num_decodes} requests of {rows} query tokens as steps, the plans {split.num_steps} "
            f"of {split.step_rows}. {TURN_OFF}"
        )
    longest = 0
    if split.sparse is not None:
        lengths = host_lengths(common)
        longest = max(lengths[request] for request in split.sparse_requests)
    behind = max(rows, split.starts[-1])
    return V4Batch(planner, providers, weakref.proxy(metadata), split.steps, split.sparse, slice(rows, behind), longest)
