"""Cases of the V4 prefill route, shared by the interpreted tests and the GPU's: made, run and judged on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from nsa_plugin.kernels.kv_cache import PagedCache, open_cache, reference_write
from nsa_plugin.kernels.sparse_mla import PrefillOutput, reference_prefill
from nsa_plugin.kernels.v4_prefill import HEAD_DIM, PrefillKeys, route
from nsa_plugin.layouts import V4_FP8

INVALID = (-(2**31), -123456, -1, 2**31 - 1)


@dataclass
class Half:
    """One cache of a case: `slots` are the indices that the result is defined by."""

    cache: PagedCache
    pages: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor | None

    def keys(self, *, by_slot: bool, index_dtype: torch.dtype = torch.int32) -> PrefillKeys:
        """As the route takes it; with `by_slot` the map has junk entries, some of them places of other pages."""
        indices = (self.slots if by_slot else self.rows()).to(index_dtype)
        keys = PrefillKeys(self.cache, self.pages, indices, self.lengths)
        if not by_slot:
            return keys
        size, most = (self.cache.num_pages,), len(self.pages) + 5
        return replace(keys, page_map=torch.randint(-5, most, size, dtype=torch.int32, device=self.pages.device))

    def rows(self) -> torch.Tensor:
        """The slots as rows of this cache's share of the workspace."""
        size, device = self.cache.page_size, self.pages.device
        places = torch.full((self.cache.num_pages,), -1, dtype=torch.int64, device=device)
        listed = self.pages >= 0
        # Of a page that is listed twice either place will do.
        places[self.pages[listed].long()] = torch.arange(len(self.pages), device=device)[listed]
        valid = (self.slots >= 0) & (self.slots < self.cache.num_slots)
        safe = torch.where(valid, self.slots, 0).long()
        return torch.where(valid, places[safe // size] * size + safe % size, self.slots.long())


@dataclass
class Case:
    q: torch.Tensor
    window: Half
    extra: Half | None
    sink: torch.Tensor | None
    scale: float = 512**-0.5

    @property
    def device(self) -> torch.device:
        return self.q.device

    @cached_property
    def expected(self) -> PrefillOutput:
        """From the caches themselves, in float32."""
        second = {}
        if self.extra is not None:
            second = {
                "extra_kv": self.extra.cache,
                "extra_indices": self.extra.slots,
                "extra_topk_length": self.extra.lengths,
            }
        return reference_prefill(
            self.q,
            self.window.cache,
            self.window.slots,
            scale=self.scale,
            topk_length=self.window.lengths,
            attn_sink=self.sink,
            out_dtype=torch.float32,
            **second,
        )


def make_half(
    tokens: int,
    topk: int,
    page_size: int,
    num_pages: int,
    listed: int,
    seed: int,
    with_lengths: bool,
    device: torch.device | str,
) -> Half:
    """A cache of NaN bytes but for the slots that count; the batch reads `listed` of its pages.

    A tenth of the entries are invalid, and what lies behind a length names NaN memory. The first query
    has no key. The list of pages holds a padding entry, and one page twice.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    pages = torch.randperm(num_pages, generator=generator, device=device)[:listed]
    of_entry = pages[randint(0, listed, tokens, topk)]
    slots = of_entry * page_size + randint(0, page_size, tokens, topk)
    bad = torch.tensor(INVALID, device=device)[randint(0, len(INVALID), tokens, topk)]
    slots = torch.where(torch.rand(tokens, topk, generator=generator, device=device) < 0.1, bad, slots)
    slots[0] = -1
    lengths = None
    counted = slots
    if with_lengths:
        lengths = randint(-1, topk + 2, tokens).int()
        lengths[-1] = topk
        counted = torch.where(torch.arange(topk, device=device) < lengths.unsqueeze(1), slots, -1)
    memory = torch.full((num_pages, V4_FP8.page_bytes(page_size)), 0xFF, dtype=torch.uint8, device=device)
    cache = open_cache(memory, V4_FP8, page_size)
    used = counted[(counted >= 0) & (counted < cache.num_slots)].unique()
    rows = torch.randn(len(used), 512, generator=generator, device=device) / 10
    reference_write(cache, rows.bfloat16(), used)
    padding = torch.tensor([-1], device=device)
    return Half(cache, torch.cat([pages, padding, pages[:1]]).int(), slots, lengths)


def make_case(
    tokens: int,
    heads: int,
    window: tuple[int, int, int, int],
    extra: tuple[int, int, int, int] | None,
    seed: int,
    device: torch.device | str,
    *,
    with_lengths: bool = True,
    with_sink: bool = True,
) -> Case:
    """window, extra: topk, page size, pages of the cache, pages that the batch reads."""
    generator = torch.Generator(device).manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator, device=device).bfloat16()
    sink = torch.randn(heads, generator=generator, device=device) if with_sink else None
    if sink is not None and heads > 1:
        sink[0], sink[1] = math.inf, -math.inf
    second = None if extra is None else make_half(tokens, *extra, seed + 2, with_lengths, device)
    return Case(q, make_half(tokens, *window, seed + 1, with_lengths, device), second, sink)


def check(case: Case, *, by_slot: bool, attention=reference_prefill, surplus: int = 3) -> PrefillOutput:
    """The route over a NaN workspace with `surplus` rows too many, against the reference over the caches."""
    window = case.window.keys(by_slot=by_slot)
    extra = None if case.extra is None else case.extra.keys(by_slot=by_slot, index_dtype=torch.int64)
    needed = window.rows + (0 if extra is None else extra.rows)
    workspace = torch.full((needed + surplus, 512), math.nan, dtype=torch.bfloat16, device=case.device)
    actual = route(
        case.q, window, extra, workspace=workspace, scale=case.scale, attn_sink=case.sink, attention=attention
    )
    assert_close(actual, case.expected)
    assert workspace[needed:].isnan().all()
    return actual


def reference_route(
    q: torch.Tensor, window: PrefillKeys, extra: PrefillKeys | None = None, **options: Any
) -> PrefillOutput:
    """The result of the route in float32, from the caches themselves."""
    second: dict[str, Any] = {}
    if extra is not None:
        second = {"extra_kv": extra.cache, "extra_indices": _slots(extra), "extra_topk_length": extra.lengths}
    return reference_prefill(
        q, window.cache, _slots(window), d_v=HEAD_DIM, topk_length=window.lengths, **options, **second
    )


def _slots(keys: PrefillKeys) -> torch.Tensor:
    """Indices as slots of the cache, -1 where they select none."""
    cache, size = keys.cache, keys.cache.page_size
    indices = keys.indices.long()
    if keys.page_map is None:
        valid = (indices >= 0) & (indices < keys.rows)
        pages = keys.pages[torch.where(valid, indices // size, 0)].long() if len(keys.pages) else indices
        valid &= (pages >= 0) & (pages < cache.num_pages)
        return torch.where(valid, pages * size + indices % size, -1)
    listed = torch.isin(indices // size, keys.pages.long()) & (indices >= 0)
    return torch.where(listed, indices, -1)


def assert_close(actual: PrefillOutput, expected: PrefillOutput) -> None:
    actual = PrefillOutput(*(part.float() for part in actual))
    torch.testing.assert_close(actual.out, expected.out, atol=8e-4, rtol=3.01 / 128)
    pair = actual.out.double().flatten(), expected.out.double().flatten()
    assert 1 - float(torch.nn.functional.cosine_similarity(*pair, dim=0)) < 7e-6
    for part in ("lse", "max_logits"):
        torch.testing.assert_close(getattr(actual, part), getattr(expected, part), atol=1e-6, rtol=8.01 / 65536)
    assert actual.lse[0].isposinf().all()
    assert actual.max_logits[0].isneginf().all()
