"""vLLM's indexer for DeepSeek-V4 with plans: `v32.indexer` over a compressed cache.

An entry of the compressed cache covers 4 tokens, and a query token at position p sees (p + 1) // 4 entries. The chunks
of a prefill's logits and the top-k are as for V3.2. vLLM scores all query tokens of a step at once, [query tokens,
max_model_len / 4] float32. If that exceeds the budget, the plugin selects instead and treats each query token as a
request with the number of entries that it sees. Their lengths and block table are in buffers of the builder, whose
addresses captured graphs keep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nsa_plugin.backends.vllm.v32.indexer import ATTRIBUTE, StepSelection, over_budget, planned_indexer_builder
from nsa_plugin.backends.vllm.v32.metadata import Planning, rows_one_by_one
from nsa_plugin.backends.vllm.v32.routes import Split, VllmPlanner


def planned_v4_indexer_builder(stock: type, planning: Planning) -> type:
    """Make a subclass of vLLM's builder of the indexer's metadata that takes large steps out.

    Args:
        stock: DeepseekV32IndexerMetadataBuilder, or `planned_indexer_builder` of it.
        planning: called once for each builder.
    """
    # V4's backend inherits V3.2's builder, which the plugin may have replaced already.
    there = stock.build.__module__ == planned_indexer_builder.__module__  # type: ignore[attr-defined]
    planned = stock if there else planned_indexer_builder(stock, planning)

    class Builder(planned):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.nsa_plugin_v4: VllmPlanner | None = planning()
            if self.nsa_plugin_v4 is None:
                return
            scheduler = self.vllm_config.scheduler_config
            captured = getattr(self.vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
            steps = scheduler.max_num_seqs * self.nsa_plugin_v4.step_tokens
            self.nsa_plugin_rows = max(scheduler.max_num_batched_tokens, steps, int(captured))
            self.nsa_plugin_lengths = torch.zeros(self.nsa_plugin_rows, dtype=torch.int32, device=self.device)
            self.nsa_plugin_table: torch.Tensor | None = None

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            planner = self.nsa_plugin_v4
            split = None if planner is None else planner.split(common_attn_metadata)
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            if split is None or not over_budget(split) or not metadata.num_decode_tokens:
                return metadata
            return _without_steps(self, metadata, split, common_attn_metadata)

    Builder.__name__ = Builder.__qualname__ = f"V4{planned.__name__}"
    return Builder


def _without_steps(builder: Any, metadata: Any, split: Split, common: Any) -> Any:
    """Return vLLM's metadata for the prefills alone, with the steps' selection as an attribute."""
    assert split.steps is not None
    table = common.block_table_tensor
    if builder.nsa_plugin_table is None:
        shape = (builder.nsa_plugin_rows, table.shape[1])
        builder.nsa_plugin_table = torch.zeros(shape, dtype=torch.int32, device=table.device)
    requests, rows = int(metadata.num_decodes), int(metadata.num_decode_tokens)
    lengths, pages = builder.nsa_plugin_lengths[:rows], builder.nsa_plugin_table[:rows, : table.shape[1]]
    owner, behind = rows_one_by_one(split.starts[: requests + 1])  # without padding
    owner, behind = _to(owner, table), _to(behind, table)
    seen = common.seq_lens[:requests][owner] - behind
    lengths.zero_()
    lengths[: len(owner)] = (seen // builder.compress_ratio).clamp_(min=0)
    pages[: len(owner)] = table[:requests][owner]
    changed = replace(metadata, num_decodes=0, num_decode_tokens=0, decode=None)
    setattr(changed, ATTRIBUTE, StepSelection(split.steps, rows, lengths, pages))
    return changed


def _to(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not like.is_cuda:
        return values
    return values.pin_memory().to(like.device, non_blocking=True)
