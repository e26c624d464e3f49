"""Times for decisions in the tests of resharding, so that prefills reshard in a given number of pieces."""

from __future__ import annotations

from itertools import product

from nsa_plugin.decision import timings
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import Route
from nsa_plugin.decision.token_shard import ATTENTION, CHUNKS, group_op, reshard_label

LAYOUTS = ("bf16", "v32_fp8")
ROUTES = tuple(
    Route(attention, library, dequantize_kv=copied)
    for attention, library, copied in product(
        (Attention.SPARSE_PREFILL, Attention.SPARSE_DECODE), ("reference", "flash_mla"), (False, True)
    )
)


def quickest_in(chunks: int, ranks: int, heads: int, topk: int) -> None:
    """Make resharding in this many pieces the quickest of every route; for a process that ends afterwards."""
    times = {
        reshard_label(route, number): {heads: ((1, 1.0 if number == chunks else 2.0),)}
        for route, number in product(ROUTES, CHUNKS)
    }
    timings.TIMINGS = {(90, group_op(ATTENTION, ranks), layout): times for layout in LAYOUTS}
    timings.SELECTIONS = dict.fromkeys(LAYOUTS, (topk, 0))
