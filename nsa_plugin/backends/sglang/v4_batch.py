"""A V4 prefill's requests, and the pages and keys that its layers read: made once a batch, used by every layer.

Everything comes from the lengths that the host has and from tensors of SGLang's metadata of the batch (see
`v4_table.CORE`): nothing waits for the device, and nothing of the pools' maps is read, which SGLang may change while
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

RATIOS = (0, 4, 128)


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


def workspace_bytes(requests: Sequence[Span], window: int, window_page: int) -> int:
    """Bytes of the bfloat16 rows that a prefill over a workspace holds at once, of the larger compress ratio."""
    pages, _ = window_places(requests, window, window_page)
    return 1024 * (len(pages) * window_page + sum(request.pages for request in requests) * (PAGE // 4))


@dataclass
class Keys:
    """A batch's keys of the indexer, each request's at a page's start.

    Attributes:
        slots: [keys] int32 in the cache of compressed keys.
        requests: rows and keys of each request, as `indexer_topk` takes them.
        ks, ke: [rows] int32: what each row may see of them.
    """

    slots: torch.Tensor
    requests: list[Request]
    ks: torch.Tensor
    ke: torch.Tensor


@dataclass
class Prefill:
    """A prefill under a plan.

    Attributes:
        requests: those that have rows.
        window: tokens of the window.
    """

    requests: tuple[Span, ...]
    window: int
    _window_pages: dict[int, torch.Tensor] = field(default_factory=dict)
    _pages: torch.Tensor | None = None
    _keys: Keys | None = None

    @property
    def rows(self) -> int:
        return self.requests[-1].end if self.requests else 0

    def window_pages(self, core: Any, page_size: int) -> torch.Tensor:
        """[n] int32: the pages of the window's cache that the batch reads.

        Args:
            core: SGLang's `DSV4AttnMetadata`.
            page_size: tokens a page of that cache.
        """
        if page_size not in self._window_pages:
            slots = _at(core.swa_page_indices, *window_places(self.requests, self.window, page_size))
            self._window_pages[page_size] = slots.div(page_size, rounding_mode="floor")
        return self._window_pages[page_size]

    def pages(self, core: Any) -> torch.Tensor:
        """[n] int32: the pages of the compressed caches that the batch reads."""
        if self._pages is None:
            self._pages = _at(core.page_table, *page_places(self.requests))
        return self._pages

    def keys(self, core: Any, lengths: torch.Tensor, page_size: int) -> Keys:
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
            counts = _put([request.rows for request in self.requests], device)
            ks = torch.repeat_interleave(_put(starts[:-1], device), counts, output_size=self.rows)
            # A row sees no key behind its request's: the lengths are the engine's, and are at most these.
            self._keys = Keys(slots.flatten(), requests, ks, ks + lengths[: self.rows].flatten().int())
        return self._keys


def _put(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int32 on a device, not waited for."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _at(table: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
    """[n] int32: the entries of a table [rows, columns] or [rows, 1, columns]."""
    places = torch.tensor([rows, columns], dtype=torch.int64, pin_memory=table.device.type == "cuda")
    row, column = places.to(table.device, non_blocking=True)
    return table.flatten(1)[row, column].int()
