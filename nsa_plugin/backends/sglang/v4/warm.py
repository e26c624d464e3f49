"""The kernels of the V4 routes, run once before SGLang serves: see `warm`.

Every route is run over small caches of zeros with SGLang's page sizes, so that what is specialised to a page size is
built before the first prompt; FlashMLA's own kernels are built already. Kernels that are built anew for some sizes of a
batch are run at a size of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.warm import refusal
from nsa_plugin.backends.sglang.v4.batch import PAGE, Prefill, spans
from nsa_plugin.backends.sglang.v4.kernels import CacheSelection, LayerCall, V4State, attend
from nsa_plugin.backends.sglang.v4.routes import WINDOW, WINDOW_PAGE
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.layouts import INDEXER_FP8, V4_FP8

ROWS = 4

ALL_KEYS = (64, 320, 832)
"""Widths of the selection at 128 : 1, which grow with the context: one of each size that a program combines at once."""


def warm_v4(routes: Iterable[Execution], state: V4State, device: torch.device) -> None:
    """Run each route once on a few rows, of every compress ratio, and wait for it.

    Args:
        routes: those that are the engine's own kernel are left out.
        state: an adopted backend's; its batch is forgotten.
        device: the backend's.

    Raises:
        NoProviderError: one does not run here; says which and why.
    """
    model = state.planner.model
    heads = max(64, model.heads_per_rank)  # what the model hands over
    q = torch.zeros(ROWS, heads, 512, dtype=torch.bfloat16, device=device)
    sink = torch.zeros(heads, dtype=torch.float32, device=device)
    lengths = torch.arange(1, ROWS + 1, dtype=torch.int32, device=device)
    for route in {(route.path, route.op, route.plan.provider): route for route in routes}.values():
        if route.path is None or route.path == DECODE_KERNEL:
            continue
        for ratio, width in ((0, 0), (4, model.index_topk), *((128, width) for width in ALL_KEYS)):
            try:
                state.prefill = Prefill(spans([ROWS], [ROWS]), WINDOW)
                window = _named(WINDOW_PAGE, WINDOW, lengths)
                # Of a compressed cache the rows name nothing yet: a context of a few tokens has no entry.
                extra = _named(PAGE // ratio, width, torch.ones_like(lengths), named=0) if ratio else None
                core = SimpleNamespace(
                    swa_page_indices=window.indices, page_table=torch.zeros(ROWS, 1, dtype=torch.int32, device=device)
                )
                call = LayerCall(q, window, extra, sink, 1.0, model.heads_per_rank, ratio, core)
                right = not bool(attend(state, route, call)[:, : model.heads_per_rank].any())
            except Exception as error:  # a compiler's, the driver's, or CUDA's own
                raise refusal(_in_words(route), repr(error)) from error
            finally:
                state.forget()
            if not right:
                raise refusal(_in_words(route), "attention over a cache of zeros is not zero")
        if route.path == BF16_ROWS:
            _warm_reading(_in_words(route), device)
    if state.providers.sm:
        _warm_selection(state, device)


def _warm_reading(what: str, device: torch.device) -> None:
    """Whole pages of each size, of so many rows that a program reads more of them at once, as for a longer prompt."""
    from nsa_plugin.kernels.triton.kv_cache import FEW_ROWS, read_pages

    for page_size in (WINDOW_PAGE, PAGE // 4, PAGE // 128):
        try:
            cache = allocate_cache(V4_FP8, 1, page_size, device=device)
            pages = torch.zeros(FEW_ROWS // page_size + 1, dtype=torch.int32, device=device)
            right = not bool(read_pages(cache, pages).any())
        except Exception as error:  # as above
            raise refusal(what, repr(error)) from error
        if not right:
            raise refusal(what, "a page of zeros is not zero")


def _warm_selection(state: V4State, device: torch.device) -> None:
    """What surrounds the scores of a selection: the keys' codes, few and many, and the slots of what is selected."""
    from nsa_plugin.kernels.triton.kv_cache import FEW_ROWS, read_codes

    what = "the selection of DeepSeek-V4"
    try:
        cache = allocate_cache(INDEXER_FP8, 1, PAGE // 4, device=device)
        right = True
        for count in (PAGE // 4, FEW_ROWS + 1):
            codes, scales = read_codes(cache, torch.zeros(count, dtype=torch.int32, device=device))
            right = right and not bool(codes.view(torch.uint8).any() or scales.any())
        chosen = torch.arange(state.planner.model.index_topk, dtype=torch.int32, device=device).repeat(ROWS, 1)
        table = torch.arange(PAGE // 4, dtype=torch.int32, device=device).repeat(ROWS, 1)
        slots = state.providers.helper("index_transform_paged")(chosen, table, page_size=PAGE // 4)
        right = right and torch.equal(slots, chosen)
    except Exception as error:  # as above
        raise refusal(what, repr(error)) from error
    if not right:
        raise refusal(what, "keys of zeros or their slots are not as they were written")


def _named(page_size: int, width: int, lengths: torch.Tensor, *, named: int = ROWS) -> CacheSelection:
    """A page of zeros, and rows that name their own slot first, then backwards, as the engine's do."""
    column = torch.arange(width, dtype=torch.int32, device=lengths.device)
    indices = lengths.unsqueeze(1) - 1 - column
    indices = torch.where((indices >= 0) & (lengths.unsqueeze(1) <= named), indices, -1).int()
    return CacheSelection(allocate_cache(V4_FP8, 1, page_size, device=lengths.device), indices, lengths)


def _in_words(route: Execution) -> str:
    return f"{route.plan.provider}'s {route.plan.attention} for DeepSeek-V4 ({route.path})"
