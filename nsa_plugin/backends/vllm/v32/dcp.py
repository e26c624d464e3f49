"""Decode context parallelism under vLLM on a GPU: the ranks that share every request's KV cache.

vLLM's `--decode-context-parallel-size N` (0.29 on, over an fp8 cache) gives each of N tensor-parallel ranks the tokens
of every request in turns of `--cp-kv-cache-interleave-size`, in the latent cache and in the indexer's. A batch's query
tokens are on every rank. What is exchanged:

    indexer    each rank selects the top-k of its own keys. The candidates of all ranks are gathered with their logits,
               and each rank takes the same top-k of them: positions in all ranks' tokens. vLLM does this for what it
               selects for, `DcpGroup.merge` for the decode steps that the plugin selects for
    attention  vLLM gathers the absorbed queries of all ranks' heads; each rank attends those of the selected tokens
               that it holds, and returns the lse; vLLM merges the parts by it and each rank keeps its own heads
    dense      attention over the tokens of the batch, and over a cached prefix gathered from all ranks

A rank without a selected token returns 0 with an lse of -inf, which has no weight in the merge. Ranks whose plans
differ would wait for each other forever: plans depend on the free memory, so the least of all ranks counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from nsa_plugin.backends.common.token_shard import least, planned_from
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import PatchError
from nsa_plugin.kernels.shard_indices import KvShard
from nsa_plugin.kernels.topk import Selector
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.exchange import require_agreement
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.settings import Settings

GROUP = "vllm.distributed.parallel_state", "get_dcp_group"
"""The function that returns vLLM's coordinator of these ranks."""


@dataclass(frozen=True)
class DcpGroup:
    """The ranks that share this rank's KV caches.

    Attributes:
        shard: this rank's part of every request.
        group: vLLM's coordinator.
    """

    shard: KvShard
    group: Any

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks; waits until every rank has called."""
        return least(self.group.cpu_group, number)

    def interleaved(self, tokens: int) -> DcpGroup:
        """Return the same ranks, each with `tokens` tokens in turn.

        With a KV connector vLLM settles that number once it knows the caches, after the layers are built.
        """
        return self if tokens == self.shard.interleave else replace(self, shard=replace(self.shard, interleave=tokens))

    def longest(self, tokens: int) -> int:
        """Return the most of a request's `tokens` that a rank holds; the same on every rank."""
        return replace(self.shard, rank=0).length(tokens)

    def in_order(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Gather cache rows from every rank: [tokens, dim], in the order of the tokens.

        Args:
            rows: [n, dim], this rank's; n is the same on every rank.
            order: int64 [tokens], see `DensePiece.order`.
        """
        gathered: torch.Tensor = self.group.all_gather(rows.contiguous(), dim=0)
        return gathered[order]

    def merge(self, selected: torch.Tensor, logits: torch.Tensor) -> None:
        """Replace each rank's selection of its own keys by that of all ranks' keys; the same on every rank.

        Args:
            selected: int32 [rows, topk], positions among this rank's tokens, -1 behind them; overwritten with
                positions among all ranks' tokens.
            logits: float32 [rows, topk] of each, -inf for -1.
        """
        shard, topk = self.shard, selected.shape[1]
        turn = torch.div(selected, shard.interleave, rounding_mode="floor") * shard.ranks + shard.rank
        token = torch.where(selected < 0, -1, turn * shard.interleave + selected % shard.interleave)
        candidates = torch.stack([logits, token.int().view(torch.float32)], dim=-1)
        gathered: torch.Tensor = self.group.all_gather(candidates, dim=1)
        # Stable, so that every rank takes the same of equal logits.
        order = gathered[..., 0].sort(dim=1, descending=True, stable=True).indices[:, :topk]
        selected.copy_(gathered[..., 1].contiguous().view(torch.int32).gather(1, order))


class LogitsOfSelected:
    """A `topk_rows` that also keeps the logits of what it selects.

    Args:
        select: the `topk_rows` that selects.
        out: int32 [rows, topk], of whose rows each call writes some.
    """

    def __init__(self, select: Selector, out: torch.Tensor) -> None:
        self._select, self._out = select, out
        self.logits = torch.full(out.shape, float("-inf"), dtype=torch.float32, device=out.device)

    def __call__(
        self, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, topk: int, out: torch.Tensor
    ) -> torch.Tensor:
        self._select(logits, starts, ends, topk, out=out)
        first = (out.data_ptr() - self._out.data_ptr()) // (self._out.stride(0) * self._out.element_size())
        found = logits.gather(1, (out + starts.unsqueeze(1)).clamp(min=0).long())
        # A logit that is not a number counts as the least, as in the selection.
        number = torch.finfo(torch.float32).min
        found = found.nan_to_num_(nan=number, neginf=number).masked_fill_(out < 0, float("-inf"))
        self.logits[first : first + len(out)] = found
        return out


def open_group(vllm_config: Any, model: ModelShape, device: DeviceProfile, settings: Settings) -> DcpGroup:
    """Return the ranks that share this rank's KV caches, once they agree on what their plans depend on.

    All ranks call this in the same order.

    Raises:
        PatchError: vLLM's group is not as expected.
        MismatchError: the ranks would decide differently.
    """
    module, name = GROUP
    group = getattr(import_module(module), name)()
    if group.world_size != model.dcp_size:
        raise PatchError(
            f"vLLM's group of context parallelism has {group.world_size} ranks, but --decode-context-parallel-size is "
            f"{model.dcp_size}. {TURN_OFF}"
        )
    interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size)
    shard = KvShard(group.world_size, group.rank_in_group, interleave)
    numbers = {"tokens that a rank holds in turn": interleave, **planned_from(model, device, settings)}
    what = "decode context parallelism"
    require_agreement(group.cpu_group, torch.device("cpu"), tuple(numbers), tuple(numbers.values()), what=what)
    return DcpGroup(shard, group)
