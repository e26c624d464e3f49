"""Whether the indexer's keys came with KV that a connector transferred.

A KV connector (LMCache, NIXL, disaggregated prefill) may transfer the attention layers' caches alone. vLLM gives every
cache to `register_kv_caches`, and what a connector does with each is its own: no version of vLLM up to 0.33 says. Its
hooks for a layer are never called for the indexer, and load errors name blocks, not layers.

So the caches are read (`common.arrival`). A request that is new to this worker and has a prefix is noted. Connectors
load before or during the forward pass, and one that could not load lets vLLM fail the request or compute the prefix
again. vLLM knows that once it has the batch's result, and by then it has prepared further batches with the request
(asynchronous scheduling, pipeline parallelism). So the request is looked at in the first batch that vLLM prepares with
the result known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from nsa_plugin.backends.common.arrival import CHECKS, IndexKeysMissingError, is_readable, missing_keys
from nsa_plugin.kernels.index_transform import request_slots

KEPT = 8
"""Times the batches ahead for which a noted request that is not scheduled is kept."""

FILLS = "DecodeBenchConnector"
"""vLLM's connector for benchmarks of decode: it transfers nothing, and fills the indexer's cache with zeros."""


class Arrival:
    """Looks at the first requests with a prefix.

    Args:
        connector: name of the KV connector.
        cache: returns [pages, page_size, 132] uint8, the indexer's cache of one layer, or None before there is one.
        ahead: a batch's result is known before the batch that follows it by so many is prepared.
    """

    def __init__(self, connector: str, cache: Callable[[], torch.Tensor | None], ahead: int = 1):
        self._connector, self._cache, self._ahead = connector, cache, ahead
        self._left = CHECKS
        self._batches = 0
        self._recent: deque[frozenset[str]] = deque(maxlen=ahead)
        self._noted: dict[str, tuple[int, int]] = {}  # request: (its prefix in tokens, number of its first batch)

    def batch(
        self,
        names: Callable[[], Sequence[str]],
        starts: Sequence[int],
        kv_lens: Callable[[], Sequence[int]],
        block_table: torch.Tensor,
    ) -> None:
        """Look at requests that an earlier batch noted, and note this one's. Called once for each batch.

        Args:
            names: returns the ids of the batch's requests, in batch order; "" or none where they are not known.
            starts: first query token of each request and the end of the last.
            kv_lens: returns the whole context of each request, in tokens; may wait for the device, so it is called only
                if a request is new or noted.
            block_table: [requests or more, pages] int32.

        Raises:
            IndexKeysMissingError: a page of a prefix, or a whole prefix, has no keys.
        """
        if not self._left:
            return
        self._batches += 1
        given = names()
        running, before = frozenset(given), frozenset().union(*self._recent)
        self._recent.append(running)
        if not self._noted and running <= before:
            return
        self._batch(given, before, [end - start for start, end in pairwise(starts)], kv_lens(), block_table)

    def _batch(
        self,
        names: Sequence[str],
        before: frozenset[str],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        block_table: torch.Tensor,
    ) -> None:
        places = {name: place for place, name in enumerate(names) if name and place < len(q_lens) and q_lens[place]}
        computed = {name: kv_lens[place] - q_lens[place] for name, place in places.items()}
        for name, (tokens, first) in list(self._noted.items()):
            age = self._batches - first
            if name not in computed:
                if age > KEPT * self._ahead:
                    del self._noted[name]
            # A request with fewer computed tokens is one whose transfer failed.
            elif computed[name] < tokens or age >= self._ahead:
                del self._noted[name]
                if computed[name] >= tokens and self._left:
                    self._left -= 1
                    self._look(name, block_table[places[name]], tokens)
        for name, tokens in computed.items():
            if tokens > 0 and name not in before and name not in self._noted:
                self._noted[name] = tokens, self._batches

    def _look(self, name: str, pages: torch.Tensor, tokens: int) -> None:
        found = self._cache()
        if found is None or not is_readable(found):
            self._left = 0  # another format of keys
            return
        slots, _ = request_slots(pages[None], torch.tensor([tokens], device=pages.device), found.shape[1])
        if missing := missing_keys(found, slots):
            raise IndexKeysMissingError(
                f"KV connector {self._connector} did not transfer the indexer's keys: {missing} of the {tokens} "
                f"cached tokens of request {name} have none, and without them the answers are wrong, with the "
                "stock engine too. Use a connector that transfers every cache which vLLM registers"
            )


def connector_of(vllm_config: Any) -> str:
    """Return vLLM's KV connector that transfers KV; "" without one, or with one that only fills the caches."""
    found = str(getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector", None) or "")
    return "" if found == FILLS else found


def arrival_of(vllm_config: Any, layer_names: Sequence[str]) -> Arrival | None:
    """Return the check for an indexer's metadata builder.

    None without a KV connector, with one that only fills the caches, or where ranks share a cache.
    """
    connector = connector_of(vllm_config)
    parallel = getattr(vllm_config, "parallel_config", None)
    shared = getattr(parallel, "decode_context_parallel_size", 1) > 1
    if not connector or shared or not layer_names:
        return None

    def cache() -> torch.Tensor | None:
        layer = vllm_config.compilation_config.static_forward_context.get(layer_names[0])
        found = getattr(layer, "kv_cache", None)
        if isinstance(found, (list, tuple)):  # one for each virtual engine, in earlier versions
            found = found[0] if found else None
        return found if isinstance(found, torch.Tensor) and found.numel() else None

    # vLLM's `max_concurrent_batches` is this at most: one for each pipeline stage, one more that is scheduled.
    return Arrival(str(connector), cache, ahead=1 + int(getattr(parallel, "pipeline_parallel_size", 1)))
