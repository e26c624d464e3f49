"""DeepSeek-V4's two kinds of keys in one row of indices: the sliding window, then the selected (extra) ones.

Ops `swa_window_indices` and `swa_combine_indices`. A V4 layer attends the last `window` tokens and, with
a compress_ratio of 4 or 128, top-k entries of a compressed cache. An attention kernel that takes one
KV tensor sees both as one flat buffer `[swa; extra]`:

    window     of the query at position p:   the min(p + 1, window) positions that end with p
    combined   [swa_indices[:swa_length], extra_indices[:extra_length] + extra_offset, -1 ...]

where `extra_offset` is the row at which the extra half starts. Both halves are left-compact, and so is the
result: its length is swa_length + extra_length, followed by -1. A negative index stays -1. The width is a multiple of
`alignment` (FlashMLA's prefill takes
top-k in steps of 128).

Sources: SGLang `srt/layers/attention/dsv4/sparse_prefill_utils.py`; vLLM
`models/deepseek_v4/common/ops/cache_utils.py` (`combine_topk_swa_indices`). Those put the selected
keys first; attention does not depend on the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_plugin.kernels.checks import INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.index_transform import check_requests, rows_to_requests


class IndexRows(NamedTuple):
    """indices [tokens, width] int32, left-compact and padded with -1; lengths [tokens] int32."""

    indices: torch.Tensor
    lengths: torch.Tensor


def reference_window(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
    *,
    num_tokens: int,
    bases: torch.Tensor | None = None,
    gather_lens: torch.Tensor | None = None,
) -> IndexRows:
    """Indices of each query's sliding window. Contract: see the module.

    The queries of a request are its last tokens. Without `bases` and `gather_lens` the indices are
    logical positions, for `index_transform` to turn into slots. With them they are rows of a buffer
    that holds the last `gather_lens[r]` tokens of request r from row `bases[r]` on.

    Args:
        cu_seqlens_q: [requests + 1] int, cumulative query rows from 0.
        seq_lens: [requests] int, context of each request, its queries included.
        window: tokens of the window.
        num_tokens: rows of the result; those behind the last request have length 0.
        bases, gather_lens: [requests] int, both or neither.

    Raises:
        KernelArgumentError: shapes or dtypes are wrong, a request has more queries than context, or a
            buffer holds less than the windows of its request's queries.
    """
    op = "swa_window_indices"
    requests = check_requests(op, cu_seqlens_q, seq_lens)
    require(window > 0, op, f"window is {window}; it is at least 1")
    require((bases is None) == (gather_lens is None), op, "bases and gather_lens go together")
    shift = torch.zeros(requests, dtype=torch.int64, device=seq_lens.device)
    if bases is not None and gather_lens is not None:
        for name, tensor in (("bases", bases), ("gather_lens", gather_lens)):
            check_tensor(op, name, tensor, (requests,), dtypes=INDEX_DTYPES, device=seq_lens.device)
        needed = torch.minimum(seq_lens, cu_seqlens_q.diff() + (window - 1))
        enough = (gather_lens >= needed) & (gather_lens <= seq_lens)
        if not bool(enough.all()):
            raise KernelArgumentError(
                f"{op}: gather_lens is {gather_lens.tolist()}; the windows need {needed.tolist()}"
            )
        shift = bases.long() - (seq_lens - gather_lens)

    request = rows_to_requests(cu_seqlens_q, num_tokens).long()
    # The last row of a request is at its last position; padded rows are at -1.
    behind = _of_request(cu_seqlens_q[1:].long(), request) - torch.arange(num_tokens, device=seq_lens.device)
    position = torch.where(request < 0, -1, _of_request(seq_lens.long(), request) - behind)
    lengths = (position + 1).clamp(max=window)
    column = torch.arange(window, device=seq_lens.device)
    first = position - lengths + 1 + _of_request(shift, request)
    indices = torch.where(column < lengths.unsqueeze(1), first.unsqueeze(1) + column, -1)
    return IndexRows(indices.int(), lengths.int())


def reference_combine(
    swa: IndexRows,
    extra: IndexRows,
    *,
    extra_offset: int | torch.Tensor,
    alignment: int = 128,
    out: torch.Tensor | None = None,
) -> IndexRows:
    """One row of indices from both halves. Contract: see the module.

    Args:
        swa: indices [tokens, w] int32 or int64 and lengths [tokens]; lengths beyond w count as w.
        extra: indices [tokens, k] and lengths [tokens]; k may be 0.
        extra_offset: added to every valid extra index; a number, or [tokens] int one a row.
        alignment: the result's width is w + k rounded up to a multiple of this.
        out: [tokens, width] int32, where to put the indices; overwritten whole.

    Raises:
        KernelArgumentError: a shape or dtype is wrong.
    """
    op = "swa_combine_indices"
    check_tensor(op, "swa.indices", swa.indices, ("tokens", "w"), dtypes=INDEX_DTYPES)
    tokens, device = swa.indices.shape[0], swa.indices.device
    check_tensor(op, "extra.indices", extra.indices, (tokens, "k"), dtypes=INDEX_DTYPES, device=device)
    for name, lengths in (("swa.lengths", swa.lengths), ("extra.lengths", extra.lengths)):
        check_tensor(op, name, lengths, (tokens,), dtypes=INDEX_DTYPES, device=device)
    require(alignment > 0, op, f"alignment is {alignment}; it is at least 1")
    width = -(-(swa.indices.shape[1] + extra.indices.shape[1]) // alignment) * alignment
    if out is None:
        out = torch.empty((tokens, width), dtype=torch.int32, device=device)
    check_tensor(op, "out", out, (tokens, width), dtypes=(torch.int32,), device=device)
    offset = torch.as_tensor(extra_offset, device=device).expand(tokens).unsqueeze(1)

    swa_length = swa.lengths.clamp(0, swa.indices.shape[1])
    extra_length = extra.lengths.clamp(0, extra.indices.shape[1])
    shifted = torch.where(extra.indices >= 0, extra.indices + offset, -1)
    out.fill_(-1)
    _place(out, swa.indices.clamp(min=-1), swa_length, torch.zeros_like(swa_length))
    _place(out, shifted, extra_length, swa_length)
    return IndexRows(out, (swa_length + extra_length).int())


def _place(out: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor) -> None:
    """Write the first lengths[i] entries of each row of `indices` into `out` from column starts[i] on."""
    column = torch.arange(indices.shape[1], device=out.device)
    row, column = (column < lengths.unsqueeze(1)).nonzero(as_tuple=True)
    out[row, starts[row].long() + column] = indices[row, column].to(out.dtype)


def _of_request(values: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """values[request], and 0 for padded rows."""
    if values.numel() == 0:
        return torch.zeros_like(request)
    return torch.where(request < 0, 0, values[request.clamp(min=0)])
