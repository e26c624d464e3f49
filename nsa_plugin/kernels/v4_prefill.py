"""DeepSeek-V4 prefill with many query tokens: dequantise once, combine the indices, attend bfloat16 rows.

The op of a V4 layer is `sparse_mla_prefill` over two paged fp8 caches: the sliding window's, and with a compress_ratio
of 4 or 128 the compressed one's. Attention straight from fp8 records converts a record again for every query that
selects it. Neighbouring queries select much the same records, so with enough queries it is cheaper to dequantise the
pages that the batch reads into bfloat16 rows once, and to attend these with a kernel for bfloat16 rows:

    workspace = [rows of the window's pages; rows of the extra pages]      in the order of `pages`
    combined  = [window_indices[:window_length], extra_indices[:extra_length], -1 ...]  as workspace rows
    result    = attention(q, workspace, combined, window_length + extra_length, attn_sink)

`fill` writes the workspace, `combine` the indices and `attend_rows` the output; `route` runs all three. They take each
cache as `PrefillKeys`, whose indices are either slots of the cache, translated through a map from pages to places in
the workspace, or rows of that cache's share of the workspace: `place * page_size + position` for the page at
`pages[place]`. Nothing waits for the device: no value of a tensor is read on the host.

Memory: the caller's workspace, the combined indices (4 * query rows * width bytes, or the caller's buffer), the
caller's maps (4 bytes a page of a cache, never cleared), and what the attention needs. Both halves of the workspace are
written in place; nothing is concatenated. Only the device knows which tokens read which pages, so a workspace that is
too small is an error rather than several passes.

Sources: SGLang pull request 25502 and `srt/layers/attention/dsv4/sparse_prefill_utils.py`; vLLM
`models/deepseek_v4/common/ops/cache_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nsa_plugin.kernels.checks import FLOAT_DTYPES, INDEX_DTYPES, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import PrefillOutput
from nsa_plugin.kernels.swa_indices import IndexRows

if TYPE_CHECKING:
    from nsa_plugin.kernels.triton.v4_prefill import RowsPart

OP = "v4_prefill_route"
HEAD_DIM = 512  # values of a query, of a key and of a value


class RowsAttention(Protocol):
    """Attention over a flat KV tensor; `reference_prefill` and its providers are."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        *,
        scale: float,
        d_v: int,
        topk_length: torch.Tensor | None,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> PrefillOutput: ...


@dataclass(frozen=True)
class PrefillKeys:
    """The keys of one cache that the queries attend.

    Attributes:
        cache: a paged cache of rows of 512 values, any layout (V4's: v4_fp8).
        pages: [n] int32 or int64: the pages that the batch reads, in the order of the workspace. An index into a page
            that is not listed becomes -1. A page listed twice takes its room twice; a negative entry takes room but
            has no rows, so that a list can be padded to a number known on the host.
        indices: [tokens, topk] int32 or int64: slots of the cache if `page_map` is given, else rows of the cache's
            share of the workspace. Negative or out of range: no key.
        lengths: [tokens] int: entries of each row that count; None: all.
        page_map: [>= cache.num_pages] int32: the caller's buffer for the map from pages to places, contents arbitrary;
            one for each of two caches.
    """

    cache: PagedCache
    pages: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None = None
    page_map: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the workspace that the pages take."""
        return self.pages.shape[0] * self.cache.page_size

    def of(self, tokens: slice) -> PrefillKeys:
        """The keys of some of the queries."""
        lengths = None if self.lengths is None else self.lengths[tokens]
        return replace(self, indices=self.indices[tokens], lengths=lengths)


def combined_width(window_topk: int, extra_topk: int = 0, alignment: int = 128) -> int:
    """Columns of the combined indices: the sum of both, rounded up to a multiple of `alignment`."""
    return -(-(window_topk + extra_topk) // alignment) * alignment


def route(
    q: torch.Tensor,
    window: PrefillKeys,
    extra: PrefillKeys | None = None,
    *,
    workspace: torch.Tensor,
    scale: float,
    attention: RowsAttention,
    attn_sink: torch.Tensor | None = None,
    alignment: int = 128,
    combined: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> PrefillOutput:
    """Attention of a V4 layer's queries: `fill`, `combine` and `attend_rows`. Contract: see the module.

    Args:
        q: [tokens, heads, 512].
        window, extra, workspace: as of `fill`.
        scale: factor of the logits.
        attention: the kernel over the workspace.
        attn_sink: [heads] float32.
        alignment, combined: `alignment` and `out` of `combine`.
        out: [tokens, heads, 512], where to put the output.
        out_dtype: dtype of a new output; default q's.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device, or the workspace is too small.
    """
    check_tensor(OP, "q", q, ("tokens", "heads", HEAD_DIM), dtypes=FLOAT_DTYPES)
    _check_keys(window, extra, q.shape[0], q.device)
    fill(workspace, window, extra)
    keys = (window,) if extra is None else (window, extra)
    return attend_rows(
        q,
        workspace[: sum(part.rows for part in keys)],
        combine(*keys, alignment=alignment, out=combined),
        scale=scale,
        attention=attention,
        attn_sink=attn_sink,
        out=out,
        out_dtype=out_dtype,
    )


def fill(
    workspace: torch.Tensor,
    window: PrefillKeys,
    extra: PrefillKeys | None = None,
    *,
    again: bool = False,
    mapped: bool = False,
) -> None:
    """Write the rows of both caches' listed pages to the workspace, and the maps from pages to places.

    Args:
        workspace: [>= window.rows + extra.rows, 512], contiguous; rows after these are not written.
        window: the sliding window's keys.
        extra: the compressed cache's keys; None for a layer without one.
        again: skip the checks: called before with the same arguments, or with caches of the same form.
        mapped: the maps already have these pages.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device, or the workspace is too small.
    """
    if not again:
        _check_keys(window, extra, window.indices.shape[0], workspace.device)
        needed = window.rows + (0 if extra is None else extra.rows)
        _check_workspace(workspace, needed, workspace.device)
    # Triton is imported here: this module states a contract and is read where there is none.
    from nsa_plugin.kernels.triton.kv_cache import read_pages
    from nsa_plugin.kernels.triton.v4_prefill import map_pages

    first = 0
    for keys in (window,) if extra is None else (window, extra):
        rows = keys.rows
        if not rows:
            continue
        if keys.page_map is not None and not mapped:
            map_pages(keys.pages, keys.page_map[: keys.cache.num_pages])
        share = workspace[first : first + rows].view(-1, keys.cache.page_size, HEAD_DIM)
        read_pages(keys.cache, keys.pages, out=share)
        first += rows


def combine(
    window: PrefillKeys,
    extra: PrefillKeys | None = None,
    *,
    alignment: int = 128,
    out: torch.Tensor | None = None,
    again: bool = False,
) -> IndexRows:
    """Combine the indices of all query rows; `fill` has written the maps.

    The result depends on pages, indices and lengths, not on the contents of the caches: layers can share it.

    Args:
        window, extra: as given to `fill`, or of some of the query rows.
        alignment: the width is a multiple of this; FlashMLA takes multiples of 128.
        out: [tokens, combined_width(...)] int32: the caller's buffer.
        again: as of `fill`.

    Raises:
        KernelArgumentError: an argument has the wrong shape, dtype or device.
    """
    tokens, device = window.indices.shape[0], window.indices.device
    if not again:
        require(alignment > 0, OP, f"alignment is {alignment}; it is at least 1")
        _check_keys(window, extra, tokens, device)
    width = combined_width(window.indices.shape[1], 0 if extra is None else extra.indices.shape[1], alignment)
    if out is None:
        out = torch.empty((tokens, width), dtype=torch.int32, device=device)
    check_tensor(OP, "combined", out, (tokens, width), dtypes=(torch.int32,), device=device)
    from nsa_plugin.kernels.triton.v4_prefill import combine_rows

    return combine_rows(_part(window), None if extra is None else _part(extra), out)


def attend_rows(
    q: torch.Tensor,
    workspace: torch.Tensor,
    selected: IndexRows,
    *,
    scale: float,
    attention: RowsAttention,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> PrefillOutput:
    """Attention of query rows over their selected workspace rows. Checks only what `attention` checks.

    Args:
        q: [tokens, heads, 512].
        workspace: [rows, 512], only the pages' rows.
        selected: the rows of each query, from `combine`.
        scale, attention, attn_sink, out, out_dtype: as of `route`.
    """
    if q.numel() == 0 or len(workspace) == 0 or selected.indices.shape[1] == 0:
        return _nothing(q, out, out_dtype)
    return attention(
        q,
        workspace,
        selected.indices,
        scale=scale,
        d_v=HEAD_DIM,
        topk_length=selected.lengths,
        attn_sink=attn_sink,
        out=out,
        out_dtype=out_dtype,
    )


def _part(keys: PrefillKeys) -> RowsPart:
    from nsa_plugin.kernels.triton.v4_prefill import RowsPart

    cache = keys.cache
    return RowsPart(keys.indices, keys.lengths, keys.pages, keys.page_map, cache.num_pages, cache.page_size)


def _nothing(q: torch.Tensor, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> PrefillOutput:
    """The result of queries without a key."""
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    statistics = torch.full((2, *q.shape[:2]), float("-inf"), dtype=torch.float32, device=q.device)
    return PrefillOutput(out.zero_(), statistics[0], statistics[1].neg_())


def _check_keys(window: PrefillKeys, extra: PrefillKeys | None, tokens: int, device: torch.device) -> None:
    for name, keys in (("window", window), ("extra", extra)):
        if keys is None:
            continue
        require(
            keys.cache.dim == HEAD_DIM, OP, f"{name}.cache has rows of {keys.cache.dim} values; expected {HEAD_DIM}"
        )
        require(keys.cache.device == device, OP, f"{name}.cache is on {keys.cache.device}; expected {device}")
        common: dict[str, Any] = {"dtypes": INDEX_DTYPES, "device": device}
        check_tensor(OP, f"{name}.indices", keys.indices, (tokens, "topk"), **common)
        check_tensor(OP, f"{name}.pages", keys.pages, ("n",), **common)
        if keys.lengths is not None:
            check_tensor(OP, f"{name}.lengths", keys.lengths, (tokens,), **common)
        if keys.page_map is not None:
            common["dtypes"] = (torch.int32,)
            check_tensor(OP, f"{name}.page_map", keys.page_map, ("num_pages",), **common)
            held, pages = len(keys.page_map), keys.cache.num_pages
            require(held >= pages, OP, f"{name}.page_map has {held} entries; the cache has {pages} pages")
    if extra is not None and window.page_map is not None and extra.page_map is not None:
        same = window.page_map.data_ptr() == extra.page_map.data_ptr() and extra.cache.num_pages > 0
        require(not same, OP, "extra.page_map is window.page_map; each cache needs its own")


def _check_workspace(workspace: torch.Tensor, needed: int, device: torch.device) -> None:
    check_tensor(OP, "workspace", workspace, ("rows", HEAD_DIM), dtypes=FLOAT_DTYPES, device=device)
    require(workspace.is_contiguous(), OP, f"workspace has strides {workspace.stride()}; it must be contiguous")
    row_bytes = HEAD_DIM * workspace.element_size()
    if len(workspace) < needed:
        raise KernelArgumentError(
            f"{OP}: workspace has {len(workspace) * row_bytes} bytes ({len(workspace)} rows); "
            f"the listed pages need {needed * row_bytes} bytes ({needed} rows)"
        )
