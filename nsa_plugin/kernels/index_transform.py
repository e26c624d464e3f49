"""From the indexer's logical positions to what attention reads: cache slots, or rows of a ragged buffer.

Ops `index_transform_paged` and `index_transform_ragged`, and helpers that map query rows to requests and requests to
slots.

The indexer names tokens by their position in the request, 0 to length - 1, padded with -1. Attention reads either a
slot of the paged cache,

    paged    page_table[request, position // page_size] * page_size + position % page_size

or, where the keys of the batch lie one request after the other, a row of that buffer,

    ragged   position + offset of the row's request

A negative position stays -1. So does a position beyond the row's length or the page table, one on an unassigned page
(negative table entry), and every entry of a padded row. Nothing else maps to -1, and -1 never becomes a slot. Results
are int32: slots and rows are counts of tokens.

Sources: SGLang `kernels/ops/attention/dsa/transform_index.py`; vLLM
`v1/attention/backends/mla/sparse_utils.py` (`triton_convert_req_index_to_global_index`).
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.checks import INDEX_DTYPES, check_tensor, require

PAGED, RAGGED = "index_transform_paged", "index_transform_ragged"


def reference_paged(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    row_to_request: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of logical positions. Contract: see the module.

    Args:
        topk_indices: [rows, topk] int32 or int64, positions within the row's request.
        page_table: [requests, pages] int32 or int64: the pages of each request, in order. A table of
            single tokens (SGLang's) has page_size 1.
        page_size: tokens a page.
        row_to_request: [rows] int: the table row of each query row, -1 for a padded row (see
            `rows_to_requests`). None: the table is expanded, row i of it is for query row i.
        lengths: [rows] int: a row's positions lie below this; None: below the table's width.
        out: [rows, topk] int32, contiguous: where the slots are written.

    Returns:
        [rows, topk] int32 slots; `out` where it is given.

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or row_to_request names a row the table lacks.
    """
    out = check_paged(topk_indices, page_table, page_size, row_to_request, lengths, out)
    rows, device = len(topk_indices), topk_indices.device
    if row_to_request is None:
        row_to_request = torch.arange(rows, device=device)
    largest = int(row_to_request.max()) if rows else -1
    require(largest < page_table.shape[0], PAGED, f"row_to_request has {largest}; page_table has no such row")

    limits = torch.full((rows,), page_table.shape[1] * page_size, device=device)
    if lengths is not None:
        limits = torch.minimum(limits, lengths.long())
    limits = torch.where(row_to_request < 0, 0, limits)
    positions = topk_indices.long()
    valid = (positions >= 0) & (positions < limits.unsqueeze(1))
    if not bool(valid.any()):
        return out.fill_(-1)
    safe = torch.where(valid, positions, 0)
    pages = page_table[row_to_request.clamp(min=0).long().unsqueeze(1), safe // page_size].long()
    return out.copy_(torch.where(valid & (pages >= 0), pages * page_size + safe % page_size, -1))


def reference_ragged(
    topk_indices: torch.Tensor, offsets: torch.Tensor, *, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of a ragged key buffer of logical positions. Contract: see the module.

    Args:
        topk_indices: [rows, topk] int32 or int64, positions within the row's request.
        offsets: [rows] int: where the keys of the row's request start in the buffer.
        lengths: [rows] int: a row's positions lie below this; None: no limit.

    Returns:
        [rows, topk] int32 rows of the buffer.
    """
    check_ragged(topk_indices, offsets, lengths)
    positions = topk_indices.long()
    valid = positions >= 0
    if lengths is not None:
        valid &= positions < lengths.unsqueeze(1)
    return torch.where(valid, positions + offsets.unsqueeze(1), -1).int()


def check_paged(
    topk_indices: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    row_to_request: torch.Tensor | None,
    lengths: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Check all that needs no value of a tensor; return `out` or a new, uninitialised one."""
    check_tensor(PAGED, "topk_indices", topk_indices, ("rows", "topk"), dtypes=INDEX_DTYPES)
    (rows, topk), device = topk_indices.shape, topk_indices.device
    check_tensor(PAGED, "page_table", page_table, ("requests", "pages"), dtypes=INDEX_DTYPES, device=device)
    require(page_size > 0, PAGED, f"page_size is {page_size}; a page holds at least 1 token")
    if row_to_request is None:
        enough = page_table.shape[0] >= rows
        require(enough, PAGED, f"page_table has {page_table.shape[0]} rows for {rows} rows of topk_indices")
    for name, tensor in (("row_to_request", row_to_request), ("lengths", lengths)):
        if tensor is not None:
            check_tensor(PAGED, name, tensor, (rows,), dtypes=INDEX_DTYPES, device=device)
    if out is None:
        return torch.empty((rows, topk), dtype=torch.int32, device=device)
    check_tensor(PAGED, "out", out, (rows, topk), dtypes=(torch.int32,), device=device)
    require(out.is_contiguous(), PAGED, f"out has strides {out.stride()}; it is written as contiguous rows")
    return out


def check_ragged(topk_indices: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Check shapes, dtypes and devices."""
    check_tensor(RAGGED, "topk_indices", topk_indices, ("rows", "topk"), dtypes=INDEX_DTYPES)
    for name, tensor in (("offsets", offsets), ("lengths", lengths)):
        if tensor is not None:
            check_tensor(RAGGED, name, tensor, topk_indices.shape[:1], dtypes=INDEX_DTYPES, device=topk_indices.device)


def rows_to_requests(cu_seqlens_q: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows] int32: the request of each query row, -1 for rows behind the last request.

    Args:
        cu_seqlens_q: [requests + 1] int, cumulative rows, starting at 0.
        num_rows: rows, padding included.
    """
    check_tensor("rows_to_requests", "cu_seqlens_q", cu_seqlens_q, ("requests + 1",), dtypes=INDEX_DTYPES)
    row = torch.arange(num_rows, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    # The number of requests that end at or before a row is the index of the one it belongs to.
    request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    return torch.where(row < cu_seqlens_q[-1], request, -1).int()


def request_slots(
    page_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of every token of every request, one request after the other.

    Args:
        page_table: [requests, pages] int; the first ceil(seq_len / page_size) entries of a row are read.
        seq_lens: [requests] int, tokens a request; 0 for none.
        page_size: tokens a page.

    Returns:
        slots [sum of seq_lens] int64 and cu_seqlens [requests + 1] int32.

    Raises:
        KernelArgumentError: a request is longer than its page table.
    """
    op = "request_slots"
    check_tensor(op, "page_table", page_table, ("requests", "pages"), dtypes=INDEX_DTYPES)
    device = page_table.device
    check_tensor(op, "seq_lens", seq_lens, (page_table.shape[0],), dtypes=INDEX_DTYPES, device=device)
    cu_seqlens = torch.zeros(len(seq_lens) + 1, dtype=torch.int64, device=device)
    cu_seqlens[1:] = seq_lens.cumsum(0)
    capacity = page_table.shape[1] * page_size
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    require(longest <= capacity, op, f"seq_lens has {longest} tokens; page_table holds {capacity} a request")
    token = torch.arange(int(cu_seqlens[-1]), device=device)
    request = rows_to_requests(cu_seqlens, len(token)).long()
    position = token - cu_seqlens[request]
    slots = page_table[request, position // page_size].long() * page_size + position % page_size
    return slots, cu_seqlens.int()
