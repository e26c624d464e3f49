"""Workloads of sparse prefill and sparse decode from a V3.2 cache, fp8 or bf16."""

from __future__ import annotations

from typing import Any

import torch

from nsa_plugin.kernels.cuda import sparse_mla_neighbours, sparse_mla_union
from nsa_plugin.kernels.kv_cache import PagedCache, gather_rows
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.kernels.triton.device import is_emulating
from nsa_plugin.layouts import Fp8Layout
from nsa_plugin.libraries.architectures import shared_memory_per_block
from nsa_plugin.tools.bench import floors, inputs, judges, rivals, stock
from nsa_plugin.tools.bench.cases import BenchCase, selection_of
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.selections import SELECTIONS, neighbouring
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, into

PADDED = "flash_mla padded"
WITH_COPY = "flash_mla padded, bf16 copy included"
DECODE_KERNEL = "flash_mla decode kernel"
# Not providers: `cuda` chooses between them and single query tokens.
UNIONS, NEIGHBOURS = "cuda, unions", "cuda, unions where neighbours share"
FA3 = "fa3"
SINGLE_TOKENS = "fa3, a sequence for each query token"  # vLLM's FLASH_ATTN_MLA_SPARSE

D_V = 512
PAGE_SIZE = 64
_SAMPLED_ROWS = 24
_CONVERTED_ROWS = 8192  # of a cache, in float32, at once


def row_bytes(cache: PagedCache) -> int:
    """Bytes of a row of the cache."""
    layout = cache.layout
    return layout.row_bytes if isinstance(layout, Fp8Layout) else layout.row_bytes(cache.dim)


def bf16_rows(cache: PagedCache) -> torch.Tensor:
    """The whole cache as bf16 rows [num_slots, dim], the input of FlashMLA's prefill kernel. A view of a bf16 cache."""
    if not isinstance(cache.layout, Fp8Layout):
        return cache.data.view(cache.num_slots, cache.dim)
    rows = torch.empty(cache.num_slots, cache.dim, dtype=torch.bfloat16, device=cache.device)
    for start in range(0, cache.num_slots, _CONVERTED_ROWS):
        slots = torch.arange(start, min(start + _CONVERTED_ROWS, cache.num_slots), device=cache.device)
        rows[slots] = gather_rows(cache, slots).bfloat16()
    return rows


def gather(indices: torch.Tensor, cache: PagedCache) -> floors.Gather:
    """What a call with these indices reads from the cache."""
    selected = int((indices >= 0).sum())
    distinct = inputs.distinct_rows(indices, cache.num_slots)
    return floors.Gather(selected=selected, distinct=distinct, row_bytes=row_bytes(cache), width=indices.numel())


def selected(device: torch.device, selection: str, sequences: int, tokens: int, kv: int, topk: int) -> torch.Tensor:
    """[sequences * tokens, topk] int32: keys of the last `tokens` query tokens of requests of `kv` tokens each.

    Args:
        selection: one of `SELECTIONS`. Random selections are from all kv keys, not only from those before a token.
    """
    locality = SELECTIONS[selection]
    if locality is None:
        return inputs.selection(device, sequences * tokens, kv, topk, 2)
    positions = torch.arange(kv - tokens, kv, device=device).repeat(sequences)
    return neighbouring(positions, topk, 2, locality, torch.arange(sequences, device=device).repeat_interleave(tokens))


def prefill_by_decode(
    q: torch.Tensor, cache: PagedCache, indices: torch.Tensor, scale: float, **more: Any
) -> TimedCall:
    """A prefill by FlashMLA's decode kernel: every query token is a sequence. `more` goes to the kernel."""
    attend = stock.flash_mla_decode(q.unsqueeze(1), cache, indices.unsqueeze(1), scale, **more)

    def call() -> Attended:
        result = attend()
        return Attended(result.out.squeeze(1), result.lse.squeeze(-1))

    return call


def decode_by_prefill(q: torch.Tensor, cache: PagedCache, indices: torch.Tensor, scale: float) -> TimedCall:
    """A decode by FlashMLA's prefill kernel, which reads bf16 rows: every query token is a row."""
    attend = stock.flash_mla_prefill(q.flatten(0, 1), bf16_rows(cache), indices.flatten(0, 1), scale)

    def call() -> Attended:
        result = attend()
        return Attended(result.out.view(*q.shape[:3], D_V), result.lse.view(q.shape[:3]).transpose(1, 2))

    return call


def prefill(case: BenchCase, context: Context) -> Workload:
    device, layout, selection = context.device, case.text("layout"), selection_of(case.as_dict())
    heads, q_rows, kv, topk = case.numbers("heads", "q", "kv", "topk")
    cache = context.shared(("cache", layout, kv), lambda: inputs.filled_cache(device, layout, kv, PAGE_SIZE, 1))
    chosen = (selection, q_rows, kv, topk)
    indices = context.shared(("indices", *chosen), lambda: selected(device, selection, 1, q_rows, kv, topk))
    taken = context.shared(("taken", layout, *chosen), lambda: gather(indices, cache))
    q = inputs.normal(device, 3, q_rows, heads, cache.dim)
    out = torch.empty(q_rows, heads, D_V, dtype=torch.bfloat16, device=device)
    scale = cache.dim**-0.5

    rows = inputs.sample(device, q_rows, _SAMPLED_ROWS)
    judge = judges.attention(
        rows,
        lambda: reference_prefill(q[rows], cache, indices[rows], scale=scale, out_dtype=torch.float32),
        judges.PREFILL_OUT,
    )

    def rows_of_cache() -> torch.Tensor:
        return context.shared(("rows", layout, kv), lambda: bf16_rows(cache))

    def padded() -> TimedCall:
        return stock.flash_mla_prefill(q, rows_of_cache(), indices, scale)

    shared = shared_memory_per_block(context.sm) if context.sm and is_emulating() else None

    def rival(union: int) -> Contender:
        return Contender(
            rivals.sglang_name(union),
            lambda: rivals.sglang_triton(q, rows_of_cache(), indices, scale, union=union, shared_memory=shared),
        )

    def padded_with_copy() -> TimedCall:
        workspace = torch.empty(cache.num_slots, cache.dim, dtype=torch.bfloat16, device=device)
        slots = torch.arange(cache.num_slots, device=device)
        attend = stock.flash_mla_prefill(q, workspace, indices, scale)
        # The plugin's reader makes the copy. It is at least as fast as an engine's, which favours the stock path.
        read = context.registry.load("kv_cache_read", "triton", sm=context.sm)

        def call() -> object:
            read(cache, slots, out=workspace)
            return attend()

        return call

    def united() -> TimedCall:
        return into(out, q, cache, indices, scale=scale)(sparse_mla_union.prefill)

    def single_tokens() -> TimedCall:
        attend = context.registry.load("sparse_mla_decode", FA3, sm=context.sm)

        def call() -> Attended:
            result = attend(q.unsqueeze(1), cache, indices.unsqueeze(1), scale=scale, out=out.unsqueeze(1))
            return Attended(result.out.squeeze(1), result.lse.squeeze(-1))

        return call

    def by_neighbours() -> TimedCall:
        return into(out, q, cache, indices, scale=scale)(sparse_mla_neighbours.prefill)

    of_layout: tuple[Contender, ...] = (Contender(SINGLE_TOKENS, single_tokens),)
    unions: list[Contender] = []
    if isinstance(cache.layout, Fp8Layout):
        by_decode = Contender(DECODE_KERNEL, lambda: prefill_by_decode(q, cache, indices, scale))
        of_layout = (Contender(WITH_COPY, padded_with_copy), by_decode)
        if not context.wanted or "cuda" in context.wanted:
            unions += [Contender(UNIONS, united), Contender(NEIGHBOURS, by_neighbours)]
    return Workload(
        work=floors.sparse_mla(rows=q_rows, heads=heads, d_qk=cache.dim, d_v=D_V, gathers=[taken], statistics=2),
        contenders=(
            Contender(PADDED, padded),
            *of_layout,
            *map(rival, rivals.UNIONS),
            Contender(rivals.VLLM_NAME, lambda: rivals.vllm_triton(q, rows_of_cache(), indices, scale)),
            *context.contenders("sparse_mla_prefill", into(out, q, cache, indices, scale=scale)),
            *unions,
        ),
        judge=judge,
        baselines=(PADDED,),
    )


def decode(case: BenchCase, context: Context) -> Workload:
    device, layout, selection = context.device, case.text("layout"), selection_of(case.as_dict())
    heads, batch, s_q, kv, topk = case.numbers("heads", "batch", "s_q", "kv", "topk")
    # Every sequence owns kv slots, so that no two share a row.
    cache = context.shared(
        ("cache", layout, batch * kv), lambda: inputs.filled_cache(device, layout, batch * kv, PAGE_SIZE, 1)
    )

    def own_slots() -> torch.Tensor:
        chosen = selected(device, selection, batch, s_q, kv, topk).view(batch, s_q, topk)
        first = torch.arange(batch, device=device, dtype=torch.int32).view(batch, 1, 1) * kv
        return torch.where(chosen < 0, -1, chosen + first)

    shape = (selection, batch, s_q, kv, topk)
    indices = context.shared(("indices", *shape), own_slots)
    taken = context.shared(("taken", layout, *shape), lambda: gather(indices, cache))
    q = inputs.normal(device, 3, batch, s_q, heads, cache.dim)
    out = torch.empty(batch, s_q, heads, D_V, dtype=torch.bfloat16, device=device)
    scale = cache.dim**-0.5

    rows = inputs.sample(device, batch, max(1, _SAMPLED_ROWS // s_q))
    judge = judges.attention(
        rows,
        lambda: reference_decode(q[rows], cache, indices[rows], scale=scale, out_dtype=torch.float32),
        judges.DECODE_OUT,
    )
    fp8 = isinstance(cache.layout, Fp8Layout)
    padded = stock.flash_mla_decode if fp8 else decode_by_prefill
    return Workload(
        work=floors.sparse_mla(rows=batch * s_q, heads=heads, d_qk=cache.dim, d_v=D_V, gathers=[taken]),
        contenders=(
            Contender(PADDED, lambda: padded(q, cache, indices, scale)),
            *context.contenders("sparse_mla_decode", into(out, q, cache, indices, scale=scale)),
        ),
        judge=judge,
        baselines=(PADDED,) if fp8 else (FA3, PADDED),
        graph=True,
    )
