"""Workloads of the indexer: logits with top-k under a memory budget, and top-k alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_plugin.kernels.indexer import fold_weights, quantize, reference_logits, reference_paged_logits
from nsa_plugin.layouts import INDEXER_FP8
from nsa_plugin.tools.bench import floors, inputs, judges, stock
from nsa_plugin.tools.bench.cases import BenchCase
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, with_poisoned

HEAD_DIM = 128
PAGE_SIZE = 64  # the only page size that DeepGEMM supports
_SAMPLED_ROWS = 8


def indexer_topk(case: BenchCase, context: Context) -> Workload:
    """Every query sees every key: the worst case for a chunk of this size."""
    device = context.device
    heads, rows, keys, topk = (case.number(name) for name in ("heads", "q", "kv", "topk"))
    k, k_scale = quantize(inputs.normal(device, 1, keys, HEAD_DIM))
    k_scale = k_scale.squeeze(1)
    q, q_scale = quantize(inputs.normal(device, 2, rows, heads, HEAD_DIM))
    gates = inputs.normal(device, 3, rows, heads, dtype=torch.float32)
    weights = fold_weights(gates, q_scale, HEAD_DIM**-0.5 * heads**-0.5)
    ks = torch.zeros(rows, dtype=torch.int32, device=device)
    ke = torch.full_like(ks, keys)
    out = torch.empty(rows, topk, dtype=torch.int32, device=device)
    # The budget covers a row's logits and the integers of its selection.
    rows_per_chunk = max(1, case.number("budget_mib") * 2**20 // (4 * (keys + topk)))

    sampled = inputs.sample(device, rows, _SAMPLED_ROWS)
    judge = judges.selected(
        sampled,
        lambda: reference_logits(q[sampled], k, k_scale, weights[sampled], ks[sampled], ke[sampled]),
        topk,
    )

    def in_one_piece(name: str) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            logits = stock.deep_gemm_logits(q, k, k_scale, weights, ks, ke)
            select = stock.LibraryTopK(name, rows, keys, topk, device)
            return with_poisoned(out, lambda: out.copy_(select(logits())))

        return load

    whole = {f"deep_gemm in one piece, {name}": in_one_piece(name) for name in stock.SELECTORS}
    return Workload(
        work=floors.indexer_topk(rows=rows, keys=keys, heads=heads, dim=HEAD_DIM, topk=topk, scored=rows * keys),
        contenders=(
            *(Contender(name, load) for name, load in whole.items()),
            *context.contenders(
                "indexer_topk",
                lambda function: with_poisoned(
                    out,
                    lambda: function(q, k, k_scale, weights, ks, ke, topk, rows_per_chunk=rows_per_chunk, out=out),
                ),
            ),
        ),
        judge=judge,
        baselines=tuple(whole),
        memory=True,
    )


def paged(case: BenchCase, context: Context) -> Workload:
    """A decode step: one query token per sequence, with its keys in the paged cache."""
    device = context.device
    heads, batch, keys, topk = (case.number(name) for name in ("heads", "batch", "kv", "topk"))
    pages = -(-keys // PAGE_SIZE)
    cache = context.shared(
        ("indexer", batch, pages),
        lambda: inputs.filled_cache(device, INDEXER_FP8.name, batch * pages * PAGE_SIZE, PAGE_SIZE, 1),
    )
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    q, q_scale = quantize(inputs.normal(device, 2, batch, heads, HEAD_DIM))
    gates = inputs.normal(device, 3, batch, heads, dtype=torch.float32)
    weights = fold_weights(gates, q_scale, HEAD_DIM**-0.5 * heads**-0.5)
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
            rows=batch, keys=batch * keys, heads=heads, dim=HEAD_DIM, topk=topk, scored=batch * keys
        ),
        contenders=(
            Contender(name, in_one_piece),
            *context.contenders(
                "indexer_topk_paged",
                lambda function: with_poisoned(
                    out, lambda: function(q, cache, weights, seq_lens, table, topk, out=out)
                ),
            ),
        ),
        judge=judge,
        baselines=(name,),
        graph=True,
    )


def topk_rows(case: BenchCase, context: Context) -> Workload:
    device = context.device
    rows, keys, topk = (case.number(name) for name in ("q", "kv", "topk"))
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
            *context.contenders(
                "topk_rows",
                lambda function: with_poisoned(out, lambda: function(logits, ks, ke, topk, out=out)),
            ),
        ),
        # The logits are inputs, so the selection must be exact except for ties.
        judge=judges.selected(sampled, lambda: logits[sampled], topk, slack=0.0),
        baselines=tuple(stock.SELECTORS),
        memory=True,
    )
