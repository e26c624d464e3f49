"""Workloads of V4: window and selected keys from two paged caches. A prefill includes every step of the path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.kernels.swa_indices import IndexRows
from nsa_plugin.kernels.v4_prefill import PrefillKeys, route
from nsa_plugin.tools.bench import floors, inputs, judges, stock
from nsa_plugin.tools.bench.cases import BenchCase
from nsa_plugin.tools.bench.suites.sparse_mla import D_V, DECODE_KERNEL, PADDED, gather, prefill_by_decode
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, into, with_poisoned

SGLANG = "SGLang's sparse route"
BY_WORKSPACE = "dequantise, combine, {}"

COMPRESS_RATIO = 4  # tokens of an entry of the selected keys' cache, in DeepSeek-V4's CSA layers
_SAMPLED_ROWS = 24


def prefill(case: BenchCase, context: Context) -> Workload:
    """The last `q` tokens of one request of `kv` tokens: a query sees its window and the entries before it."""
    device, layout = context.device, case.text("layout")
    heads, tokens, kv, topk, window, page_size = case.numbers("heads", "q", "kv", "topk", "window", "page_size")
    entries = kv // COMPRESS_RATIO
    # The window cache holds the chunk's tokens and the window before them; the queries are the last tokens.
    cache = context.shared(
        ("window", layout, tokens, page_size),
        lambda: inputs.filled_cache(device, layout, tokens + window, page_size, 1),
    )
    extra_cache = context.shared(
        ("extra", layout, entries, page_size),
        lambda: inputs.filled_cache(device, layout, entries, max(1, page_size // COMPRESS_RATIO), 4),
    )
    positions = torch.arange(kv - tokens, kv, dtype=torch.int32, device=device)
    indices = _windows(positions, window)
    extra = context.shared(
        ("selected", tokens, kv, topk),
        lambda: _compact(inputs.selection(device, tokens, entries, topk, 2, counts=(positions + 1) // COMPRESS_RATIO)),
    )
    q = inputs.normal(device, 3, tokens, heads, cache.dim)
    out = torch.empty(tokens, heads, D_V, dtype=torch.bfloat16, device=device)
    scale = cache.dim**-0.5
    rows = inputs.sample(device, tokens, _SAMPLED_ROWS)
    keys = {"scale": scale, "extra_kv": extra_cache}
    lists = {
        "topk_length": indices.lengths,
        "extra_indices": extra.indices,
        "extra_topk_length": extra.lengths,
    }

    def expected() -> Any:
        sampled = {name: tensor[rows] for name, tensor in lists.items()}
        return reference_prefill(q[rows], cache, indices.indices[rows], **keys, **sampled, out_dtype=torch.float32)

    def decode_kernel() -> TimedCall:
        more = {"topk_length": indices.lengths, "extra_cache": extra_cache, "extra": extra}
        return prefill_by_decode(q, cache, indices.indices, scale, **more)

    def sglang() -> TimedCall:
        # Slot of a position's row in the window's cache; positions before the first query's window have none.
        slots = (torch.arange(kv, device=device) - (kv - tokens) + window).clamp(min=0)
        return stock.SglangSparsePrefill(q, cache, slots, extra_cache, extra.indices, window, scale)

    def by_workspace(attention: Callable[..., Any], out: torch.Tensor | None = out) -> TimedCall:
        window_keys, extra_keys = _keys(cache, indices), _keys(extra_cache, extra)
        needed = window_keys.rows + extra_keys.rows

        def call() -> Any:
            # Allocated in the call, so that its memory counts for this path.
            workspace = torch.empty(needed, cache.dim, dtype=torch.bfloat16, device=device)
            return route(q, window_keys, extra_keys, workspace=workspace, scale=scale, attention=attention, out=out)

        return call if out is None else with_poisoned(out, call)

    def as_served() -> TimedCall:
        # The provider may refuse the case; the timed call is how an engine adapter calls the library.
        context.registry.load("sparse_mla_prefill", "flash_mla", sm=context.sm)
        return by_workspace(stock.flash_mla_rows(), out=None)

    workspaces = context.contenders("sparse_mla_prefill", by_workspace, label=BY_WORKSPACE)
    served = Contender(BY_WORKSPACE.format("flash_mla"), as_served, output_bytes=out.nbytes)
    contenders = (
        Contender(SGLANG, sglang, output_bytes=out.nbytes, kept_bytes=lambda call: call.kept_bytes()),
        Contender(DECODE_KERNEL, decode_kernel, output_bytes=out.nbytes),
        *(served if contender.name == served.name else contender for contender in workspaces),
        *context.contenders("sparse_mla_prefill", into(out, q, cache, indices.indices, **keys, **lists)),
    )
    gathers = [gather(indices.indices, cache), gather(extra.indices, extra_cache)]
    return Workload(
        work=floors.sparse_mla(rows=tokens, heads=heads, d_qk=cache.dim, d_v=D_V, gathers=gathers),
        contenders=contenders,
        judge=judges.attention(rows, expected, judges.DECODE_OUT),
        baselines=(SGLANG, DECODE_KERNEL),
        memory=True,
    )


def decode(case: BenchCase, context: Context) -> Workload:
    """One query token per sequence; every sequence has its own window and its own context of selected keys."""
    device, layout = context.device, case.text("layout")
    heads, batch, kv, topk, window, page_size = case.numbers("heads", "batch", "kv", "topk", "window", "page_size")
    entries = kv // COMPRESS_RATIO
    cache = context.shared(
        ("window", layout, batch, window), lambda: inputs.filled_cache(device, layout, batch * window, page_size, 1)
    )
    extra_cache = context.shared(
        ("extra", layout, batch * entries),
        lambda: inputs.filled_cache(device, layout, batch * entries, max(1, page_size // COMPRESS_RATIO), 4),
    )
    sequence = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
    indices = sequence * window + torch.arange(window, dtype=torch.int32, device=device)
    chosen = context.shared(("own", batch, entries, topk), lambda: inputs.selection(device, batch, entries, topk, 2))
    extra = _compact(torch.where(chosen < 0, -1, chosen + sequence * entries))
    q = inputs.normal(device, 3, batch, 1, heads, cache.dim)
    out = torch.empty(batch, 1, heads, D_V, dtype=torch.bfloat16, device=device)
    scale = cache.dim**-0.5
    rows = inputs.sample(device, batch, _SAMPLED_ROWS)

    keys = {"scale": scale, "extra_cache": extra_cache}
    lists = {"extra_indices": extra.indices.unsqueeze(1), "extra_topk_length": extra.lengths}
    steps = indices.unsqueeze(1)

    def expected() -> Any:
        sampled = {name: tensor[rows] for name, tensor in lists.items()}
        return reference_decode(q[rows], cache, steps[rows], **keys, **sampled, out_dtype=torch.float32)

    def stock_kernel() -> TimedCall:
        return stock.flash_mla_decode(q, cache, steps, scale, extra_cache=extra_cache, extra=extra)

    gathers = [gather(indices, cache), gather(extra.indices, extra_cache)]
    return Workload(
        work=floors.sparse_mla(rows=batch, heads=heads, d_qk=cache.dim, d_v=D_V, gathers=gathers),
        contenders=(
            Contender(PADDED, stock_kernel),
            *context.contenders("sparse_mla_decode", into(out, q, cache, steps, **keys, **lists)),
        ),
        judge=judges.attention(rows, expected, judges.DECODE_OUT),
        baselines=(PADDED,),
        graph=True,
    )


def _windows(positions: torch.Tensor, window: int) -> IndexRows:
    """Windows of queries at consecutive positions, in a cache whose row `window` is the first query's token."""
    lengths = (positions + 1).clamp(max=window)
    first = positions - positions[0] + window - lengths + 1
    place = torch.arange(window, dtype=torch.int32, device=positions.device)
    indices = torch.where(place < lengths.unsqueeze(1), first.unsqueeze(1) + place, -1)
    return IndexRows(indices.int(), lengths.int())


def _compact(indices: torch.Tensor) -> IndexRows:
    """Rows whose valid indices come first. A row counts at least one, possibly invalid, as in SGLang's metadata."""
    return IndexRows(indices, (indices >= 0).sum(1).int().clamp(min=1))


def _keys(cache: PagedCache, indices: IndexRows) -> PrefillKeys:
    """Every page of the cache, which is the context of one request."""
    pages = torch.arange(cache.num_pages, dtype=torch.int32, device=cache.device)
    return PrefillKeys(cache, pages, indices.indices, indices.lengths, page_map=torch.empty_like(pages))
