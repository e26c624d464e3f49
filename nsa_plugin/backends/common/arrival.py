"""Whether the indexer's keys came with KV that an engine did not compute itself.

What transfers KV (LMCache, NIXL, a hierarchical cache) may leave the indexer's cache out, and the answers are then
wrong without an error. So the caches are read: pages that were never written are zero, and no key has the scale zero.
"""

from __future__ import annotations

import torch

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.kernels.kv_cache import open_cache, reference_read_codes
from nsa_plugin.layouts import INDEXER_FP8

CHECKS = 64
"""Requests that are looked at after the start, each at the cost of waiting for the device once."""


class IndexKeysMissingError(NsaPluginError):
    """A request's prefix was transferred without the indexer's keys, so its answer would be wrong."""


def is_readable(pages: torch.Tensor) -> bool:
    """Whether an indexer's cache, [pages, page_size, bytes of a token], has the format that `missing_keys` reads."""
    return bool(pages.numel()) and pages.shape[-1] == INDEXER_FP8.row_bytes and pages.element_size() == 1


def missing_keys(pages: torch.Tensor, slots: torch.Tensor) -> int:
    """Return how many of the tokens at `slots` have no key. Waits for the device.

    Args:
        pages: uint8 [pages, page_size, 132], the indexer's cache of one layer.
        slots: int64 [tokens].

    Returns:
        0 if fewer than a whole page of them, or than all of them, have none.
    """
    cache = open_cache(pages, INDEXER_FP8.name)
    # Page 0 stands for none.
    if not slots.numel() or int(slots.min()) < cache.page_size:
        return 0
    _, scales = reference_read_codes(cache, slots)
    missing = int((scales == 0).sum())
    return missing if missing >= min(len(slots), cache.page_size) else 0
