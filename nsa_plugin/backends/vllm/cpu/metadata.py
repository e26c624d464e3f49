"""What both backends lay a batch out by: what vLLM's MLA layer reads of its metadata, under its names, from which
their own metadata derives, and whose row is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch


@dataclass(frozen=True)
class PrefillMetadata:
    """What the layer reads of the rows that it hands to `forward_mha`.

    Attributes:
        use_dense_mha: whether any of them attends densely.
        max_query_len: most rows of a request.
        chunked_context: a layer that finds None lets `forward_mha` write a quantised output (0.24 on).
    """

    use_dense_mha: bool
    max_query_len: int
    chunked_context: str | None


@dataclass(kw_only=True)
class MLAMetadata:
    """A batch's metadata.

    Attributes:
        num_actual_tokens: rows, those that only pad the batch included.
        query_start_loc: int32 [num_reqs + 1]. seq_lens: int32 [num_reqs]. slot_mapping: int64 [rows].
        block_table: int32 [num_reqs, max_pages].
        num_decode_tokens: rows at the front that the layer hands to `forward_mqa`.
        num_decodes, num_prefills: their requests, and the others.
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
    def of(cls, common: Any, **own: Any) -> Self:
        """The metadata of a batch, from vLLM's CommonAttentionMetadata and what is the backend's own."""
        return cls(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            **own,
        )


def owner_of_rows(starts: Sequence[int]) -> np.ndarray:
    """int32 [rows]: the request of each row.

    By numpy: `torch.repeat_interleave` on a host wakes all of torch's threads for two elements, in every step.

    Args:
        starts: the first row of each request, and the end of the last.
    """
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
