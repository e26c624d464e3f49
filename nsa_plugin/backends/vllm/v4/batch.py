"""A DeepSeek-V4 batch under its plans: made by vLLM's builder of the sliding window's metadata, read by every layer.

vLLM makes one `DeepseekSparseSWAMetadata` a batch for each group of window caches, and every layer is handed the one of
its own. `planned_swa_builder` leaves a `V4Batch` on it, with what its layers share: whose row is whose, the slots of
the window, the lengths of the compressed keys, the slots of those of compress ratio 128, and FlashMLA's schedules.
Everything comes from vLLM's tensors of the batch and from what the host knows; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import CacheSelection
from nsa_plugin.backends.vllm.v32.metadata import Planning
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner, host_lengths
from nsa_plugin.decision.plan import Plan
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.patches.ledger import TURN_OFF

ATTRIBUTE = "nsa_plugin_v4"

COLUMNS = 128
"""FlashMLA takes selections in multiples of so many entries."""


@dataclass
class V4Batch:
    """A batch under its plans.

    Attributes:
        planner, providers: of this process.
        metadata: vLLM's `DeepseekSparseSWAMetadata` of the batch, decodes first.
        steps: the plan of its decode or verify rows; None without any.
        prefill: the plan of its prefills; None without any.
        prefill_rows: the prefills' rows, of the batch's; rows behind the last request are nobody's.
        longest: most context tokens of one of its prefills.
        schedules: FlashMLA's, of its prefills, by compress ratio.
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

    @property
    def num_prefill_rows(self) -> int:
        return int(self.prefill_rows.stop - self.prefill_rows.start)

    @property
    def owners(self) -> torch.Tensor:
        """int32 [prefill rows]: the request of each."""
        owners: torch.Tensor = self.metadata.token_to_req_indices[self.prefill_rows]
        return owners

    def step_owners(self) -> torch.Tensor:
        """int32 [step rows]: the request of each, -1 for rows that only pad. A graph may capture this."""
        rows, found = int(self.metadata.num_decode_tokens), self.metadata.token_to_req_indices
        found = found[:rows]  # shorter where rows pad
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
        """int32 [prefill rows]: the compressed keys that each row may see.

        Args:
            positions: int64 [>= prefill rows], of the tokens in their requests.
        """
        if ratio not in self._lengths:
            self._lengths[ratio] = ((positions[: self.num_prefill_rows] + 1) // ratio).int()
        return self._lengths[ratio]

    def slots(
        self, ratio: int, chosen: torch.Tensor, block_table: torch.Tensor, page_size: int, lengths: torch.Tensor
    ) -> torch.Tensor:
        """int32 [prefill rows, topk]: where the prefills' selected keys lie.

        Args:
            ratio: compress ratio. Of 128 all keys are selected, so its layers with one block table have one answer.
            chosen: int32 [prefill rows, topk], positions among the request's compressed keys, -1 behind the last.
            block_table: [requests, pages] of the compressed cache.
            page_size: its entries a page.
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
    """vLLM's builder of the window's metadata, with a `V4Batch` on what it builds.

    Args:
        stock: DeepseekSparseSWAMetadataBuilder.
        planning: asked once for each builder.
        providers: those of this process; asked with a planner only.
    """

    class Builder(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            planner = planning()
            self.nsa_plugin: VllmPlanner | None = planner
            if planner is not None and self.decode_threshold != planner.step_tokens:
                raise PatchError(
                    f"vLLM counts requests of up to {self.decode_threshold} rows as steps; the configuration says "
                    f"{planner.step_tokens}. {TURN_OFF}"
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
    """The batch of vLLM's metadata, under its plans.

    Args:
        metadata: DeepseekSparseSWAMetadata.
        common: vLLM's CommonAttentionMetadata that it was built from.

    Raises:
        PatchError: vLLM takes other rows as steps than the plans.
    """
    split = planner.split(common)
    rows = int(metadata.num_decode_tokens)
    if metadata.num_prefills and (split.num_steps, split.step_rows) != (metadata.num_decodes, rows):
        raise PatchError(
            f"vLLM takes {metadata.num_decodes} requests of {rows} rows as steps, the plans {split.num_steps} of "
            f"{split.step_rows}. {TURN_OFF}"
        )
    longest = 0
    if split.sparse is not None:
        lengths = host_lengths(common)
        longest = max(lengths[request] for request in split.sparse_requests)
    behind = max(rows, split.starts[-1])
    return V4Batch(planner, providers, metadata, split.steps, split.sparse, slice(rows, behind), longest)
