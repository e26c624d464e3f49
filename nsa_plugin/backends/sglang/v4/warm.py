"""The kernels of SGLang's V4 execution paths, run once before it serves: see `backends.common.warm`.

Every path runs over small caches of zeros with SGLang's page sizes, so that kernels specialised to a page size are
compiled before the first prompt. FlashMLA's kernels come compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from nsa_plugin.backends.common.paths import BF16_ROWS, DECODE_KERNEL
from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.v4 import RATIOS, LayerCall, warm_calls
from nsa_plugin.backends.common.warm import ROWS, expect_zeros
from nsa_plugin.backends.sglang.v4.batch import PAGE, Prefill, spans
from nsa_plugin.backends.sglang.v4.kernels import attend
from nsa_plugin.backends.sglang.v4.routes import WINDOW, WINDOW_PAGE
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.layouts import INDEXER_FP8, V4_FP8

PAGE_SIZES = {ratio: PAGE // ratio if ratio else WINDOW_PAGE for ratio in RATIOS}

ALL_KEYS = (64, 320, 832)
"""Widths of the selection at ratio 128: one for each variant of the kernel that combines indices."""


def warm_v4(routes: Iterable[Execution], state: V4State, device: torch.device) -> None:
    """Run each path once on a few query tokens, for every compress ratio, and wait for it.

    Args:
        routes: those that call a stock kernel alone are skipped.
        state: an adopted backend's; its batch is dropped.
        device: the backend's.

    Raises:
        NoProviderError: one does not run here; says which and why.
    """
    model = state.planner.model
    padded = max(64, model.heads_per_rank)  # as SGLang's model pads
    for route in {(route.path, route.op, route.plan.provider): route for route in routes}.values():
        if route.path is None or route.path == DECODE_KERNEL:
            continue
        what = f"{route.plan.provider}'s {route.plan.attention} for DeepSeek-V4 ({route.path})"
        for call in warm_calls(model, device, heads=padded, page_sizes=PAGE_SIZES, all_keys=ALL_KEYS):
            expect_zeros(what, partial(_attended, state, route, call))
        if route.path == BF16_ROWS:
            _warm_reading(what, device)
    if state.providers.sm:
        _warm_selection(state, device)


def _attended(state: V4State, route: Execution, call: LayerCall) -> torch.Tensor:
    """Attend a batch of one request, for the rank's heads."""
    rows = call.q.shape[0]
    table = torch.zeros(rows, -(-rows // PAGE), dtype=torch.int32, device=call.q.device)
    core = SimpleNamespace(swa_page_indices=call.window.indices, page_table=table)
    state.prefill = Prefill(spans([rows], [rows]), WINDOW)
    try:
        heads = call.num_heads if state.own_heads_first else call.q.shape[1]
        return attend(state, route, replace(call, core=core, num_heads=heads))[:, : call.num_heads]
    finally:
        state.forget()


def _warm_reading(what: str, device: torch.device) -> None:
    """Read pages of each size, and enough rows that a program reads several at once, as for a longer prompt."""
    from nsa_plugin.kernels.triton.kv_cache import FEW_ROWS, read_pages

    for page_size in PAGE_SIZES.values():
        cache = allocate_cache(V4_FP8, 1, page_size, device=device)
        pages = torch.zeros(FEW_ROWS // page_size + 1, dtype=torch.int32, device=device)
        expect_zeros(what, partial(read_pages, cache, pages))


def _warm_selection(state: V4State, device: torch.device) -> None:
    """Run the kernels around the indexer's logits: reading few and many keys, and turning positions into slots."""
    from nsa_plugin.kernels.triton.kv_cache import FEW_ROWS, read_codes

    def changed() -> torch.Tensor:
        cache = allocate_cache(INDEXER_FP8, 1, PAGE // 4, device=device)
        slots = (torch.zeros(count, dtype=torch.int32, device=device) for count in (PAGE // 4, FEW_ROWS + 1))
        found = [part.view(torch.uint8).any() for some in slots for part in read_codes(cache, some)]
        chosen = torch.arange(state.planner.model.index_topk, dtype=torch.int32, device=device).repeat(ROWS, 1)
        table = torch.arange(PAGE // 4, dtype=torch.int32, device=device).repeat(ROWS, 1)
        transform = state.providers.helper("index_transform_paged")
        return torch.stack([*found, (transform(chosen, table, page_size=PAGE // 4) != chosen).any()])

    expect_zeros("the selection of DeepSeek-V4", changed, "keys of zeros or their slots are not as they were written")
