"""Metadata fields that vLLM's MLA layer reads, the base of both backends' metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True)
class PrefillMetadata:
    """Fields of the query tokens that the layer passes to `forward_mha`.

    Attributes:
        use_dense_mha: whether any of them attends densely.
        max_query_len: most query tokens of a request.
        chunked_context: if None, the layer lets `forward_mha` write a quantised output (0.24 on).
    """

    use_dense_mha: bool
    max_query_len: int
    chunked_context: str | None


@dataclass(kw_only=True)
class MLAMetadata:
    """A batch's metadata.

    Attributes:
        num_actual_tokens: query tokens, padding included.
        query_start_loc: int32 [num_reqs + 1]. seq_lens: int32 [num_reqs]. slot_mapping: int64 [query tokens].
        block_table: int32 [num_reqs, max_pages].
        num_decode_tokens: query tokens at the front that the layer passes to `forward_mqa`.
        num_decodes, num_prefills: number of their requests, and of the others.
        prefill: None without a prefill.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    topk_tokens: int
    prefill_max_seq_len: int
    prefill: PrefillMetadata | None

    @classmethod
    def of(cls, common: Any, **more: Any) -> Self:
        """Make a batch's metadata from vLLM's CommonAttentionMetadata and the backend's fields."""
        return cls(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            **more,
        )


def owner_of_rows(starts: Sequence[int]) -> np.ndarray:
    """Return int32 [query tokens]: the request of each.

    Uses numpy, because `torch.repeat_interleave` on a host wakes all of torch's threads even for two elements.

    Args:
        starts: first query token of each request, and the end of the last.
    """
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
