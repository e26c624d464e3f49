"""A V4 prefill's requests, and the pages and keys that its layers read: made once a batch, used by every layer.

Everything comes from the lengths that the host has and from tensors of SGLang's metadata of the batch (see
`table.SLOTS`): nothing waits for the device, and nothing of the pools' maps is read, which SGLang may change while
the layers run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from nsa_plugin.kernels.topk import Request

PAGE = 256
"""Tokens of a page of SGLang's V4 caches; it hardcodes them."""

PINNED = 4096
"""Entries of pinned memory that are taken at once: of a few requests of any length."""


@dataclass(frozen=True)
class Span:
    """A request's part of a batch.

    Attributes:
        first, end: its rows.
        context: its tokens, the new ones included.
    """

    first: int
    end: int
    context: int

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def prefix(self) -> int:
        """Tokens before its first row."""
        return self.context - self.rows

    @property
    def pages(self) -> int:
        """Pages of 256 tokens that it has."""
        return -(-self.context // PAGE)


def spans(q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[Span, ...]:
    """The requests that have rows, in order."""
    ends = list(accumulate(q_lens))
    every = zip(q_lens, kv_lens, ends, strict=True)
    return tuple(Span(end - rows, end, context) for rows, context, end in every if rows)


def window_places(requests: Sequence[Span], window: int, page_size: int) -> tuple[list[int], list[int]]:
    """(rows, columns) of the window's indices, one for each page that the batch's windows reach into.

    A request's slots are aligned with its positions, so every page of it is named by the index of its first position
    within the windows' union: of a new token its own row's first, of an older one an index of the request's first row.
    """
    rows: list[int] = []
    columns: list[int] = []
    for request in requests:
        first = max(0, request.prefix - window + 1)
        for page in range(first // page_size, (request.context - 1) // page_size + 1):
            position = max(first, page * page_size)
            older = request.prefix - position
            rows.append(request.first + max(0, -older))
            columns.append(max(0, older))
    return rows, columns


def page_places(requests: Sequence[Span]) -> tuple[list[int], list[int]]:
    """(rows, columns) of the page table: every page of every request."""
    rows = [request.first for request in requests for _ in range(request.pages)]
    return rows, [page for request in requests for page in range(request.pages)]


def window_page_count(request: Span, window: int, page_size: int) -> int:
    """Pages that the windows of a request's rows reach into."""
    return (request.context - 1) // page_size - max(0, request.prefix - window + 1) // page_size + 1


def workspace_bytes(requests: Sequence[Span], window: int, window_page: int) -> int:
    """Bytes of the bfloat16 rows that a prefill over a workspace holds at once, of the larger compress ratio."""
    pages = sum(window_page_count(request, window, window_page) for request in requests)
    return 1024 * (pages * window_page + sum(request.pages for request in requests) * (PAGE // 4))


@dataclass
class IndexerKeys:
    """A batch's keys of the indexer, each request's at a page's start.

    Attributes:
        slots: [keys] int32 in the cache of compressed keys.
        requests: rows and keys of each request, as `indexer_topk` takes them.
        ks, ke: [rows] int32: what each row may see of them.
        shared: what a provider keeps from one layer to the next: its plan and its ranges are the batch's.
    """

    slots: torch.Tensor
    requests: list[Request]
    ks: torch.Tensor
    ke: torch.Tensor
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prefill:
    """A prefill under a plan.

    Attributes:
        requests: those that have rows.
        window: tokens of the window.
        tables: of the route over bf16 rows (`v4_rows.Tables`).
        views: of the engine's indices and lengths, see `v4_kernels.named`.
        selects: whether the plan's selection takes the place of the engine's, once a layer has asked.
    """

    requests: tuple[Span, ...]
    window: int
    tables: Any = None
    views: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    selects: bool | None = None
    _window_pages: dict[int, torch.Tensor] = field(default_factory=dict)
    _pages: torch.Tensor | None = None
    _keys: IndexerKeys | None = None
    _lists: dict[str, torch.Tensor] | None = None

    @property
    def rows(self) -> int:
        return self.requests[-1].end if self.requests else 0

    @property
    def num_pages(self) -> int:
        """Pages of the compressed caches."""
        return sum(request.pages for request in self.requests)

    def window_pages(self, core: Any, page_size: int) -> torch.Tensor:
        """[n] int32: the pages of the window's cache that the batch reads.

        Args:
            core: SGLang's `DSV4AttnMetadata`.
            page_size: tokens a page of that cache.
        """
        if page_size not in self._window_pages:
            rows, columns = self._places(core.page_table.device, "window", page_size)
            slots = core.swa_page_indices.flatten(1)[rows, columns].int()
            self._window_pages[page_size] = slots.div(page_size, rounding_mode="floor")
        return self._window_pages[page_size]

    def pages(self, core: Any) -> torch.Tensor:
        """[n] int32: the pages of the compressed caches that the batch reads."""
        if self._pages is None:
            rows, columns = self._places(core.page_table.device, "pages")
            self._pages = core.page_table[rows, columns].int()
        return self._pages

    def keys(self, core: Any, lengths: torch.Tensor, page_size: int) -> IndexerKeys:
        """The indexer's keys.

        Args:
            core: as before.
            lengths: [>= rows] int32: the compressed keys that each row may see.
            page_size: keys a page.
        """
        if self._keys is None:
            pages, device = self.pages(core), core.page_table.device
            slots = pages.unsqueeze(1) * page_size + torch.arange(page_size, dtype=torch.int32, device=device)
            starts = [0, *accumulate(request.pages * page_size for request in self.requests)]
            given = zip(self.requests, starts, starts[1:], strict=False)
            requests = [(request.first, request.end, start, end) for request, start, end in given]
            if len(requests) == 1:
                ks = torch.zeros(self.rows, dtype=torch.int32, device=device)
            else:
                first, counts = put(starts[:-1], [request.rows for request in self.requests], device=device)
                ks = torch.repeat_interleave(first.int(), counts, output_size=self.rows)
            # A row sees no key behind its request's: the lengths are the engine's, and are at most these.
            self._keys = IndexerKeys(slots.flatten(), requests, ks, ks + lengths[: self.rows].flatten().int())
        return self._keys

    def _places(self, device: torch.device, which: str, page_size: int = PAGE) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, columns) of `window_places` or `page_places`, both of which are copied at once."""
        if page_size != PAGE:
            rows, columns = put(*window_places(self.requests, self.window, page_size), device=device)
            return rows, columns
        if self._lists is None:
            window, pages = window_places(self.requests, self.window, PAGE), page_places(self.requests)
            copied = put(*window, *pages, device=device)
            self._lists = dict(
                zip(("window rows", "window columns", "pages rows", "pages columns"), copied, strict=True)
            )
        return self._lists[f"{which} rows"], self._lists[f"{which} columns"]


def put(*lists: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Lists as int64 tensors on a device, by one copy that is not waited for.

    The host's side is of few sizes: pinned memory is kept by its size, and to pin some anew can wait for the device.
    """
    values = [value for one in lists for value in one]
    if device.type == "cuda":
        host = torch.empty(-(-max(len(values), 1) // PINNED) * PINNED, dtype=torch.int64, pin_memory=True)
        host[: len(values)] = torch.tensor(values, dtype=torch.int64)
        there = host[: len(values)].to(device, non_blocking=True)
    else:
        there = torch.tensor(values, dtype=torch.int64, device=device)
    return list(there.split([len(one) for one in lists]))
