"""Whether the indexer's keys came with a prefix that SGLang did not compute itself.

LMCache decides itself which of SGLang's buffers it stores, and up to 0.5.23 nothing tells a plugin which. So the slots
of each prefill's prefix are noted, and their keys are read (`common.arrival`) when the next batch is prepared: SGLang
loads a prefix before its batch's forward pass or layer by layer during it. A load that failed leaves KV and keys zero;
SGLang ends that request alone.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_plugin.backends.common.arrival import CHECKS, IndexKeysMissingError, is_readable, missing_keys
from nsa_plugin.backends.sglang.startup.model import argument_of

# Flags of what loads KV into SGLang's pool.
LOADERS = {
    "enable_lmcache": "--enable-lmcache",
    "enable_hierarchical_cache": "--enable-hierarchical-cache",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
}
PAGE_SIZE = 64
"""Tokens of a page of the indexer's cache, whatever the server's page size."""
READ_TOKENS = 4096
"""Tokens whose KV is copied at once."""


class LoadedPrefixes:
    """Looks at the first requests with a prefix.

    Args:
        flag: SGLang's, of what loads KV.
    """

    def __init__(self, flag: str):
        self._flag = flag
        self._left = CHECKS
        self._lengths: Any = None  # of the prefixes of the batch noted last: one object in all of SGLang's copies of it
        self._noted: list[tuple[str, torch.Tensor]] = []  # (request, slots of its prefix), of that batch

    def prefill(self, forward_batch: Any, req_to_token: torch.Tensor) -> None:
        """Note a prefill's prefixes. SGLang may prepare a batch twice, as one of a graph and as an eager one.

        Args:
            forward_batch: with `extend_prefix_lens_cpu`, on the host.
            req_to_token: int [requests that the server allows, context], slots.
        """
        lengths = forward_batch.extend_prefix_lens_cpu
        if not self._left or lengths is self._lengths:
            return
        self._lengths = lengths
        names = getattr(forward_batch, "rids", None) or ()
        for place, tokens in enumerate(map(int, lengths or ())):
            if tokens and len(self._noted) < self._left:
                name = str(names[place]) if place < len(names) else ""
                slots = req_to_token[forward_batch.req_pool_indices[place], :tokens].long()
                self._noted.append((name, slots))

    def look(self, pool: Any, forward_batch: Any = None) -> None:
        """Look at the prefixes that batches before this one noted.

        Args:
            pool: SGLang's, which holds the KV and the indexer's keys.

        Raises:
            IndexKeysMissingError: a page of a prefix, or a whole prefix, has KV but no keys.
        """
        lengths = getattr(forward_batch, "extend_prefix_lens_cpu", None)
        if not self._noted or (lengths is not None and lengths is self._lengths):
            return
        noted, self._noted = self._noted, []
        layer = int(getattr(pool, "start_layer", None) or 0)
        keys = pool.get_index_k_with_scale_buffer(layer)
        in_pages = keys.dim() == 2 and keys.numel() > 0 and keys.shape[1] % PAGE_SIZE == 0
        pages = keys.view(len(keys), PAGE_SIZE, -1) if in_pages else keys
        if not in_pages or not is_readable(pages):
            self._left = 0  # another format of keys
            return
        if keys.is_cuda:
            torch.cuda.synchronize(keys.device)  # SGLang may prepare a batch on another stream than it runs on
        self._left -= len(noted)
        for name, slots in noted:
            # Few prefixes lack keys, so the larger KV is read for those alone.
            if missing_keys(pages, slots) and (
                missing := missing_keys(pages, slots[_has_kv(pool.get_key_buffer(layer), slots)])
            ):
                raise IndexKeysMissingError(
                    f"SGLang has {self._flag}, and the indexer's keys did not come with the KV cache that it loaded: "
                    f"{missing} of the {len(slots)} cached tokens of request {name} have none. Without them the "
                    f"answers are wrong, with the stock engine too. Start without {self._flag}"
                )


def _has_kv(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return bool [tokens], on the slots' device: whether anything was written there.

    Args:
        kv: a layer's cache of any dtype, [..., bytes or values of a token], by slot.
        slots: int64 [tokens].
    """
    rows = kv.view(-1, kv.shape[-1]).view(torch.uint8)  # as bytes: -0.0 was written, too
    return torch.cat([(rows[part] != 0).any(1) for part in slots.split(READ_TOKENS)])


def loaded_prefixes(server_args: Any) -> LoadedPrefixes | None:
    """Return the check for a target model's backend; None if nothing loads KV."""
    flags = [flag for name, flag in LOADERS.items() if argument_of(server_args, name)]
    return LoadedPrefixes(flags[0]) if flags else None
