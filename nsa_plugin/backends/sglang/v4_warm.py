"""The kernels of the V4 routes, run once before SGLang serves: see `warm`.

Every route is run over small caches of zeros with SGLang's page sizes, so that what is specialised to a page size is
built before the first prompt; FlashMLA's own kernels are built already.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch

from nsa_plugin.backends.sglang.routes import Route
from nsa_plugin.backends.sglang.v4_batch import PAGE, RATIOS, Prefill, spans
from nsa_plugin.backends.sglang.v4_kernels import Call, Named, V4State, attend
from nsa_plugin.backends.sglang.v4_routes import WINDOW, WINDOW_PAGE
from nsa_plugin.backends.v4 import DECODE_KERNEL
from nsa_plugin.backends.warm import refusal
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.layouts import V4_FP8

ROWS = 4


def warm_v4(routes: Iterable[Route], state: V4State, device: torch.device) -> None:
    """Run each route once on a few rows, of every compress ratio, and wait for it.

    Args:
        routes: of prefills; those that are the engine's own kernel are left out.
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
    for route in {(route.impl, route.plan.provider): route for route in routes}.values():
        if route.impl is None or route.impl == DECODE_KERNEL:
            continue
        for ratio in RATIOS:
            try:
                state.prefill = Prefill(spans([ROWS], [ROWS]), WINDOW)
                window = _named(WINDOW_PAGE, WINDOW, lengths)
                # Of a compressed cache the rows name nothing yet: a context of a few tokens has no entry.
                width = model.index_topk if ratio == 4 else 64
                extra = _named(PAGE // ratio, width, torch.ones_like(lengths), named=0) if ratio else None
                core = SimpleNamespace(
                    swa_page_indices=window.indices, page_table=torch.zeros(ROWS, 1, dtype=torch.int32, device=device)
                )
                call = Call(q, window, extra, sink, 1.0, model.heads_per_rank, ratio, core)
                right = not bool(attend(state, route, call)[:, : model.heads_per_rank].any())
            except Exception as error:  # a compiler's, the driver's, or CUDA's own
                raise refusal(_in_words(route), repr(error)) from error
            finally:
                state.forget()
            if not right:
                raise refusal(_in_words(route), "attention over a cache of zeros is not zero")


def _named(page_size: int, width: int, lengths: torch.Tensor, *, named: int = ROWS) -> Named:
    """A page of zeros, and rows that name their own slot first, then backwards, as the engine's do."""
    column = torch.arange(width, dtype=torch.int32, device=lengths.device)
    indices = lengths.unsqueeze(1) - 1 - column
    indices = torch.where((indices >= 0) & (lengths.unsqueeze(1) <= named), indices, -1).int()
    return Named(allocate_cache(V4_FP8, 1, page_size, device=lengths.device), indices, lengths)


def _in_words(route: Route) -> str:
    return f"{route.plan.provider}'s {route.plan.attention} for DeepSeek-V4 ({route.impl})"
