"""Sliding windows of DeepSeek-V4: the positions that each query token attends, left-compact.

Op `swa_window_indices`. A V4 layer attends the last `window` tokens and, with a compress_ratio of 4 or 128, selected
entries of a compressed cache (`v4_prefill` combines the two). The query at position p attends the min(p + 1, window)
positions that end with p; `index_transform` turns them into slots.

Sources: SGLang `srt/layers/attention/dsv4/sparse_prefill_utils.py`; vLLM
`models/deepseek_v4/common/ops/cache_utils.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.index_transform import rows_to_requests

OP = "swa_window_indices"


class IndexRows(NamedTuple):
    """indices [tokens, width] int32, left-compact and padded with -1; lengths [tokens] int32."""

    indices: torch.Tensor
    lengths: torch.Tensor


def reference_window(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, window: int, *, num_tokens: int) -> IndexRows:
    """Positions of each query's sliding window. Contract: see the module.

    The queries of a request are its last tokens.

    Args:
        cu_seqlens_q: [requests + 1] int, cumulative query rows from 0.
        seq_lens: [requests] int, context of each request, its queries included.
        window: tokens of the window.
        num_tokens: rows of the result; those after the last request have length 0.

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or a request has more queries than context.
    """
    check_window(cu_seqlens_q, seq_lens, window)
    if not bool((cu_seqlens_q.diff() <= seq_lens).all()):
        raise KernelArgumentError(f"{OP}: seq_lens is {seq_lens.tolist()}; a request has more queries")
    request = rows_to_requests(cu_seqlens_q, num_tokens).long()
    # The last row of a request is at its last position; padded rows are at -1.
    rows_left = _of_request(cu_seqlens_q[1:].long(), request) - torch.arange(num_tokens, device=seq_lens.device)
    position = torch.where(request < 0, -1, _of_request(seq_lens.long(), request) - rows_left)
    lengths = (position + 1).clamp(max=window)
    column = torch.arange(window, device=seq_lens.device)
    indices = torch.where(column < lengths.unsqueeze(1), (position - lengths + 1).unsqueeze(1) + column, -1)
    return IndexRows(indices.int(), lengths.int())


def check_window(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, window: int) -> int:
    """Check shapes, dtypes and devices; return the number of requests."""
    check_tensor(OP, "cu_seqlens_q", cu_seqlens_q, ("requests + 1",), dtypes=INDEX_DTYPES)
    requests = len(cu_seqlens_q) - 1
    require(requests >= 0, OP, "cu_seqlens_q is empty; it starts with 0")
    check_tensor(OP, "seq_lens", seq_lens, (requests,), dtypes=INDEX_DTYPES, device=cu_seqlens_q.device)
    require(window > 0, OP, f"window is {window}; it is at least 1")
    return requests


def _of_request(values: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """values[request], and 0 for padded rows."""
    if values.numel() == 0:
        return torch.zeros_like(request)
    return torch.where(request < 0, 0, values[request.clamp(min=0)])
