"""Estimate the device memory, in bytes, that a DeepSeek-V4 prefill takes in addition to the engine's.

A prefill over bfloat16 rows (`kernels.v4_prefill`) keeps the rows of the pages that it reads, for all layers, and the
combined indices of some query rows. The selection of any prefill keeps the indexer's gathered keys of one layer. These
are upper bounds from the lengths of a batch, for any page size.

Pure: no torch, no engine, no I/O.
"""

from __future__ import annotations

from nsa_plugin.decision.shapes import BatchShape, ModelShape
from nsa_plugin.libraries.devices import MIB

ROWS_BYTES = 304 * MIB
"""Most that the bfloat16 rows of a prefill may take; with more, the caches are read in place where that can be."""
INDICES_BYTES = 96 * MIB
"""Most that the combined indices of the query rows that are attended at once take."""

PAGE = 256
"""Tokens of the largest page of an engine's caches."""
COMPRESSION = 4
"""Tokens of an entry that the indexer scores: the lowest compress ratio."""

_ROW_BYTES = 2 * 512
_SCALE_BYTES = _SLOT_BYTES = 4


def rows_bytes(model: ModelShape, batch: BatchShape) -> int:
    """Upper bound of the bfloat16 rows, for a layer of the lowest compress ratio, which has the most."""
    # A request's windows lie together; neither they nor its entries fill their first and last pages.
    window = batch.num_tokens + batch.num_requests * (model.sliding_window + 2 * PAGE)
    padded = batch.total_kv_len + batch.num_requests * PAGE
    return _ROW_BYTES * (min(window, padded) + padded // COMPRESSION)


def keys_bytes(model: ModelShape, batch: BatchShape) -> int:
    """Upper bound of the indexer keys gathered for a layer: fp8 codes, a scale and a slot each."""
    keys = (batch.total_kv_len + batch.num_requests * PAGE) // COMPRESSION
    return keys * (model.index_head_dim + _SCALE_BYTES + _SLOT_BYTES)


def held_bytes(model: ModelShape, batch: BatchShape, *, over_rows: bool) -> int:
    """Upper bound of all that a prefill keeps while its logits are computed.

    Args:
        over_rows: its route brings the pages to bfloat16 rows.
    """
    held = keys_bytes(model, batch)
    return held + rows_bytes(model, batch) + INDICES_BYTES if over_rows else held
