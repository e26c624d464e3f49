"""Workloads of the indexer: logits with top-k under a memory budget, and top-k alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_plugin.kernels.indexer import reference_logits, reference_paged_logits
from nsa_plugin.layouts import INDEXER_FP8
from nsa_plugin.tools.bench import floors, inputs, judges, stock
from nsa_plugin.tools.bench.cases import BenchCase
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, into, with_poisoned

PAGE_SIZE = 64  # the only page size that DeepGEMM supports
_SAMPLED_ROWS = 8


def indexer_topk(case: BenchCase, context: Context) -> Workload:
    """Every query sees every key: the worst case for a chunk of this size."""
    device = context.device
    heads, rows, keys, topk = case.numbers("heads", "q", "kv", "topk")
    made = inputs.indexer(device, 1, rows, keys, heads)
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    rows_per_chunk = inputs.budgeted_rows(case.number("budget_mib"), keys, topk)
    sampled = inputs.sample(device, rows, _SAMPLED_ROWS)
    judge = judges.selected(sampled, lambda: reference_logits(*made.rows(sampled)), topk)

    def in_one_piece(name: str) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            logits = stock.deep_gemm_logits(*made)
            select = stock.LibraryTopK(name, rows, keys, topk, device)
            return with_poisoned(out, lambda: out.copy_(select(logits())))

        return load

    whole = {f"deep_gemm in one piece, {name}": in_one_piece(name) for name in stock.SELECTORS}
    return Workload(
        work=floors.indexer_topk(
            rows=rows, keys=keys, heads=heads, dim=inputs.INDEX_DIM, topk=topk, scored=rows * keys
        ),
        contenders=(
            *(Contender(name, load) for name, load in whole.items()),
            *context.contenders("indexer_topk", into(out, *made, topk, rows_per_chunk=rows_per_chunk)),
        ),
        judge=judge,
        baselines=tuple(whole),
        memory=True,
    )


def paged(case: BenchCase, context: Context) -> Workload:
    """A decode step: one query token per sequence, with its keys in the paged cache."""
    device = context.device
    heads, batch, keys, topk = case.numbers("heads", "batch", "kv", "topk")
    pages = -(-keys // PAGE_SIZE)
    cache = context.shared(
        ("indexer", batch, pages),
        lambda: inputs.filled_cache(device, INDEXER_FP8.name, batch * pages * PAGE_SIZE, PAGE_SIZE, 1),
    )
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    q, weights = inputs.index_queries(device, 2, batch, heads)
    q, seq_lens = q.unsqueeze(1), torch.full((batch,), keys, dtype=torch.int32, device=device)
    out = torch.empty(batch, topk, dtype=torch.int32, device=device)
    sampled = inputs.sample(device, batch, _SAMPLED_ROWS)
    judge = judges.selected(
        sampled,
        lambda: reference_paged_logits(
            q[sampled], cache, weights[sampled], seq_lens[sampled], table[sampled], max_len=keys
        ),
        topk,
    )

    def in_one_piece() -> TimedCall:
        logits = stock.deep_gemm_paged_logits(q, cache, weights, seq_lens, table, keys)
        select = stock.LibraryTopK("torch.topk", batch, keys, topk, device)
        return with_poisoned(out, lambda: out.copy_(select(logits())))

    name = "deep_gemm in one piece, torch.topk"
    return Workload(
        work=floors.indexer_topk(
            rows=batch, keys=batch * keys, heads=heads, dim=inputs.INDEX_DIM, topk=topk, scored=batch * keys
        ),
        contenders=(
            Contender(name, in_one_piece),
            *context.contenders("indexer_topk_paged", into(out, q, cache, weights, seq_lens, table, topk)),
        ),
        judge=judge,
        baselines=(name,),
        graph=True,
    )


def topk_rows(case: BenchCase, context: Context) -> Workload:
    device = context.device
    rows, keys, topk = case.numbers("q", "kv", "topk")
    logits = inputs.normal(device, 1, rows, keys, dtype=torch.float32)
    ks = torch.zeros(rows, dtype=torch.int32, device=device)
    ke = torch.full_like(ks, keys)
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    sampled = inputs.sample(device, rows, _SAMPLED_ROWS)

    def library(name: str) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            select = stock.LibraryTopK(name, rows, keys, topk, device)
            return lambda: select(logits)

        return load

    return Workload(
        work=floors.topk_rows(rows=rows, keys=keys, topk=topk),
        contenders=(
            *(Contender(name, library(name)) for name in stock.SELECTORS),
            *context.contenders("topk_rows", into(out, logits, ks, ke, topk)),
        ),
        # The logits are inputs, so the selection must be exact except for ties.
        judge=judges.selected(sampled, lambda: logits[sampled], topk, slack=0.0),
        baselines=tuple(stock.SELECTORS),
        memory=True,
    )
