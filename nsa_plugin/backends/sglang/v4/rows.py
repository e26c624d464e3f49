"""Attention of a V4 prefill over bfloat16 rows under SGLang, with tables that the layers of a batch share.

All layers of a batch read the same pages, the same window indices and the same positions in the workspace. So the page
maps are made once a batch, and the combined indices once for all layers of ratio 0 and once for all of ratio 128, as in
SGLang's `SparsePrefillChunkCache`. Layers of ratio 4 select KV tokens separately, so their indices are combined in each
layer. A layer dequantises the pages of its caches into the workspace, then attends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

import torch

from nsa_plugin.backends.common.v4 import CacheSelection, LayerCall
from nsa_plugin.backends.sglang.v4.batch import PAGE, Prefill
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.decision.v4_memory import INDICES_BYTES
from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.swa_indices import IndexRows
from nsa_plugin.kernels.v4_prefill import HEAD_DIM, PrefillKeys, attend_rows, combine, combined_width, fill
from nsa_plugin.kernels.workspace import Workspace

SELECTED = 4
"""The compress ratio whose layers select KV tokens separately."""


@dataclass
class Table:
    """Tables that the layers of one compress ratio share in a batch.

    Attributes:
        named: selections of the first such layer; the other layers differ only in their caches.
        keys: the same, as the kernels take them.
        workspace: [rows, 512] bfloat16, of exactly these pages.
        combined: [query tokens at once, width] int32.
        rows: query rows of the batch.
        kept: no other ratio writes to `combined`, so the next layer reads the same indices.
        mapped: a layer has written the page maps.
        filled: a layer of this ratio has filled the workspace.
        indices: the combined indices, once a layer has made them and if `kept`.
    """

    named: tuple[CacheSelection, ...]
    keys: tuple[PrefillKeys, ...]
    workspace: torch.Tensor
    combined: torch.Tensor
    rows: int
    kept: bool
    mapped: bool
    filled: bool = False
    indices: IndexRows | None = None

    def is_of(self, named: tuple[CacheSelection, ...], rows: int) -> bool:
        """Whether a layer has the tensors and the number of query tokens that the table was made for."""
        return rows == self.rows and all(
            one.indices is other.indices
            and one.lengths is other.lengths
            and one.cache.num_pages == other.cache.num_pages
            for one, other in zip(named, self.named, strict=True)
        )


@dataclass
class Tables:
    """The tables of one batch.

    Attributes:
        rows: query tokens.
        widths: of the combined indices, by compress ratio.
        whole: the buffer has room for the indices of all ratios; else the ratios use it in turn.
        made: tables by compress ratio.
        maps: page maps of the window and the compressed caches, by name and number of pages.
    """

    rows: int
    widths: dict[int, int]
    whole: bool
    made: dict[int, Table] = field(default_factory=dict)
    maps: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


def over_rows(state: V4State, call: LayerCall) -> torch.Tensor:
    """Dequantise the layer's pages to bfloat16 rows, then attend over them.

    Query tokens are attended in parts if the combined indices exceed their budget, which happens only when a query
    token reads thousands of keys (ratio 128, long contexts).

    Raises:
        NoProviderError: the batch is not a prefill.
    """
    if state.prefill is None:
        raise NoProviderError("a route over bf16 rows was taken for a batch that is no prefill")
    q, table = call.q, _table(state, state.prefill, call)
    own = zip(table.keys, _parts(call), strict=True)
    keys = tuple(one if one.cache is part.cache else replace(one, cache=part.cache) for one, part in own)
    fill(table.workspace, *keys, again=table.filled, mapped=table.mapped)
    table.filled = table.mapped = True
    attention = state.providers.attended.kernel(state.rows_attention)
    attend = partial(attend_rows, scale=call.scale, attn_sink=call.attn_sink, attention=attention)
    step = table.combined.shape[0]
    if step >= q.shape[0]:
        # With a single part, return the kernel's output without a copy.
        return attend(q, table.workspace, _indices(table, keys)).out
    out = q.new_empty(*q.shape[:-1], HEAD_DIM)
    for first in range(0, q.shape[0], step):
        some = slice(first, min(first + step, q.shape[0]))
        into = table.combined[: some.stop - some.start]
        indices = combine(*(one.of(some) for one in keys), out=into, again=True)
        attend(q[some], table.workspace, indices, out=out[some])
    return out


def _indices(table: Table, keys: tuple[PrefillKeys, ...]) -> IndexRows:
    if table.indices is not None:
        return table.indices
    indices = combine(*keys, out=table.combined, again=True)
    if table.kept:
        table.indices = indices
    return indices


def _parts(call: LayerCall) -> tuple[CacheSelection, ...]:
    return (call.window,) if call.extra is None else (call.window, call.extra)


def _table(state: V4State, prefill: Prefill, call: LayerCall) -> Table:
    named, rows = _parts(call), call.q.shape[0]
    tables: Tables | None = prefill.tables
    if tables is None or tables.rows != rows:
        tables = prefill.tables = _tables(call, rows)
    known = tables.made.get(call.ratio)
    if known is not None and known.is_of(named, rows):
        return known
    width = combined_width(*(part.indices.shape[1] for part in named))
    if tables.whole and tables.widths.get(call.ratio) != width:
        # The buffer was laid out for another width.
        tables.whole = False
        tables.made.clear()
    scratch, device = state.workspace, call.q.device
    window, *extra = named
    pages = [prefill.window_pages(call.core, window.cache.page_size), *(prefill.pages(call.core) for _ in extra)]

    # A page has one number in all compressed caches, so their maps are the same.
    names = [(name, part.cache.num_pages) for name, part in zip(("v4_window_map", "v4_extra_map"), named, strict=False)]
    mapped = all(name in tables.maps for name in names)
    for name, num_pages in names:
        if (name, num_pages) not in tables.maps:
            tables.maps[name, num_pages] = scratch.get(name, (num_pages,), torch.int32, device)
    both = tuple(
        PrefillKeys(part.cache, listed, part.indices, part.lengths, tables.maps[name])
        for part, listed, name in zip(named, pages, names, strict=True)
    )
    needed = most = sum(part.rows for part in both)
    if SELECTED in tables.widths:  # one buffer for all ratios, which never grows within the batch
        most = max(most, both[0].rows + prefill.num_pages * (PAGE // SELECTED))
    workspace = scratch.get("v4_rows", (most, HEAD_DIM), torch.bfloat16, device)[:needed]
    combined = _combined(scratch, tables, call.ratio, width, device)
    kept = tables.whole and call.ratio != SELECTED
    table = tables.made[call.ratio] = Table(named, both, workspace, combined, rows, kept, mapped)
    return table


def _tables(call: LayerCall, rows: int) -> Tables:
    window = int(call.window.indices.shape[1])
    widths = {0: combined_width(window)}
    for ratio, name in ((SELECTED, "c4_sparse_page_indices"), (128, "c128_page_indices")):
        slots: torch.Tensor | None = getattr(call.core, name, None)
        if slots is not None:
            widths[ratio] = combined_width(window, int(slots.shape[-1]))
    return Tables(rows, widths, 4 * rows * sum(widths.values()) <= INDICES_BYTES)


def _combined(scratch: Workspace, tables: Tables, ratio: int, width: int, device: torch.device) -> torch.Tensor:
    """[query tokens at once, width] int32: the ratio's part of the buffer, or as much of it as the budget allows."""
    rows = tables.rows
    if not tables.whole:
        step = max(1, min(rows, INDICES_BYTES // (4 * width)))
        return scratch.get("v4_combined", (step, width), torch.int32, device)
    flat = scratch.get("v4_combined", (rows * sum(tables.widths.values()),), torch.int32, device)
    start = rows * sum(tables.widths[other] for other in takewhile(lambda other: other != ratio, tables.widths))
    return flat[start : start + rows * width].view(rows, width)
