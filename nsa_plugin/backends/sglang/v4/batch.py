"""Requests of a V4 prefill, and the pages and keys that its layers read; made once a batch.

Everything comes from the lengths that the host has and from tensors of SGLang's metadata of the batch (see
`table.SLOTS`): nothing waits for the device. The pools' maps are not read, because SGLang may change them while the
layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from nsa_plugin.kernels.topk import Request

T = TypeVar("T")

PAGE = 256
"""Tokens of a page of SGLang's V4 caches; it hardcodes them."""

PINNED = 4096
"""Pinned memory is allocated in multiples of this many entries."""


@dataclass(frozen=True)
class Span:
    """Query tokens of one request in a batch.

    Attributes:
        first, end: its query tokens.
        context: all its tokens, the new ones included.
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
        """Number of its pages of 256 tokens."""
        return -(-self.context // PAGE)


def spans(q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[Span, ...]:
    """Return the requests that have query tokens, in order."""
    ends = list(accumulate(q_lens))
    every = zip(q_lens, kv_lens, ends, strict=True)
    return tuple(Span(end - rows, end, context) for rows, context, end in every if rows)


def window_places(requests: Sequence[Span], window: int, page_size: int) -> tuple[list[int], list[int]]:
    """(rows, columns) of the window's indices: one for each page that the batch's windows read.

    Slots are aligned with positions in the request, so one index identifies a page: that of the page's first position
    in the union of the windows. For a new token it is the first index of the token's row, for an older one an index in
    the request's first row.
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
    """Return the number of pages that the windows of a request read."""
    return (request.context - 1) // page_size - max(0, request.prefix - window + 1) // page_size + 1


def workspace_bytes(requests: Sequence[Span], window: int, window_page: int) -> int:
    """Return the bytes of the workspace of bfloat16 rows, for the compress ratio that needs more."""
    pages = sum(window_page_count(request, window, window_page) for request in requests)
    return 1024 * (pages * window_page + sum(request.pages for request in requests) * (PAGE // 4))


@dataclass
class IndexerKeys:
    """Indexer keys of a batch; each request's begin at a page.

    Attributes:
        slots: [keys] int32, slots in the indexer's cache.
        requests: query tokens and keys of each request, as `indexer_topk` takes them.
        ks, ke: [query tokens] int32, first key that each token sees, and the end.
        shared: data that a provider keeps from one layer to the next.
    """

    slots: torch.Tensor
    requests: list[Request]
    ks: torch.Tensor
    ke: torch.Tensor
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prefill:
    """A prefill with a plan.

    Attributes:
        requests: those with query tokens.
        window: tokens of the window.
        tables: of the path over bf16 rows (`rows.Tables`).
        views: of SGLang's indices and lengths; see `kernels.selections`.
        selects: whether the plugin selects instead of SGLang; None until a layer has asked.
    """

    requests: tuple[Span, ...]
    window: int
    tables: Any = None
    views: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    selects: bool | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.requests[-1].end if self.requests else 0

    @property
    def num_pages(self) -> int:
        """Pages of the compressed caches."""
        return sum(request.pages for request in self.requests)

    def window_pages(self, core: Any, page_size: int) -> torch.Tensor:
        """Return [n] int32: pages of the window's cache that the batch reads.

        Args:
            core: SGLang's `DSV4AttnMetadata`.
            page_size: tokens a page of that cache.
        """

        def make() -> torch.Tensor:
            rows, columns = self._places(core.page_table.device, "window", page_size)
            return core.swa_page_indices.flatten(1)[rows, columns].int().div(page_size, rounding_mode="floor")

        return self._once(("window", page_size), make)

    def pages(self, core: Any) -> torch.Tensor:
        """Return [n] int32: pages of the compressed caches that the batch reads."""
        return self._once("pages", lambda: core.page_table[self._places(core.page_table.device, "pages")].int())

    def keys(self, core: Any, lengths: torch.Tensor, page_size: int) -> IndexerKeys:
        """Return the indexer's keys.

        Args:
            core: SGLang's `DSV4AttnMetadata`.
            lengths: [>= query tokens] int32, number of compressed keys that each token sees.
            page_size: keys per page.
        """
        return self._once("keys", lambda: self._indexer_keys(core, lengths, page_size))

    def _indexer_keys(self, core: Any, lengths: torch.Tensor, page_size: int) -> IndexerKeys:
        pages, device = self.pages(core), core.page_table.device
        slots = pages.unsqueeze(1) * page_size + torch.arange(page_size, dtype=torch.int32, device=device)
        starts = [0, *accumulate(request.pages * page_size for request in self.requests)]
        given = zip(self.requests, pairwise(starts), strict=True)
        requests = [(request.first, request.end, start, end) for request, (start, end) in given]
        if len(requests) == 1:
            ks = torch.zeros(self.rows, dtype=torch.int32, device=device)
        else:
            first, counts = put(starts[:-1], [request.rows for request in self.requests], device=device)
            ks = torch.repeat_interleave(first.int(), counts, output_size=self.rows)
        # SGLang's lengths never reach beyond the request's keys.
        return IndexerKeys(slots.flatten(), requests, ks, ks + lengths[: self.rows].flatten().int())

    def _places(self, device: torch.device, which: str, page_size: int = PAGE) -> tuple[torch.Tensor, ...]:
        """Return (rows, columns) of `window_places` or `page_places`; one copy brings both to the device."""
        if page_size != PAGE:
            return tuple(put(*window_places(self.requests, self.window, page_size), device=device))

        def make() -> list[torch.Tensor]:
            lists = window_places(self.requests, self.window, PAGE) + page_places(self.requests)
            return put(*lists, device=device)

        both = self._once("places", make)
        return tuple(both[:2] if which == "window" else both[2:])

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned at the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found


def put(*lists: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Copy lists to a device as int64 tensors, with one asynchronous copy.

    PyTorch caches pinned memory by size, and pinning more can wait for the device, so only a few sizes are used.
    """
    values = [value for one in lists for value in one]
    if device.type == "cuda":
        host = torch.empty(-(-max(len(values), 1) // PINNED) * PINNED, dtype=torch.int64, pin_memory=True)
        host[: len(values)] = torch.tensor(values, dtype=torch.int64)
        there = host[: len(values)].to(device, non_blocking=True)
    else:
        there = torch.tensor(values, dtype=torch.int64, device=device)
    return list(there.split([len(one) for one in lists]))
