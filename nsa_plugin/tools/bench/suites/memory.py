"""Workloads of the ops that only move bytes: cache writers and readers, and the index kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_plugin.kernels import index_transform, swa_indices
from nsa_plugin.kernels.kv_cache import allocate_cache, gather_rows, reference_write
from nsa_plugin.tools.bench import floors, inputs, judges
from nsa_plugin.tools.bench.cases import BenchCase
from nsa_plugin.tools.bench.suites.sparse_mla import row_bytes
from nsa_plugin.tools.bench.workload import Context, TimedCall, Workload, into

PAGE_SIZE = 64
_SAMPLED_ROWS = 256
# Two correct writers may differ by one step of an fp8 value: an eighth of it, or the smallest subnormal's scale.
_ONE_FP8_STEP = (2e-3, 0.126)
_ONE_BF16_STEP = (1e-6, 2.0**-8)


def kv_cache(case: BenchCase, context: Context) -> Workload:
    device, layout = context.device, case.text("layout")
    count, slots_all, page_size = case.numbers("q", "kv", "page_size")
    cache = inputs.filled_cache(device, layout, slots_all, page_size, 1)
    slots = torch.randperm(cache.num_slots, generator=inputs.generator(device, 2), device=device)[:count]
    sampled = inputs.sample(device, count, _SAMPLED_ROWS)
    if case.op == "kv_cache_read":
        out = torch.empty(count, cache.dim, dtype=torch.bfloat16, device=device)

        def judge_read(result: torch.Tensor) -> float:
            judges.finite("out", result)
            return judges.close("out", result[sampled], gather_rows(cache, slots[sampled]), _ONE_BF16_STEP)

        return Workload(
            work=floors.cache_rows(rows=count, dim=cache.dim, row_bytes=row_bytes(cache)),
            contenders=tuple(context.contenders(case.op, into(out, cache, slots))),
            judge=judge_read,
        )

    rows = inputs.normal(device, 3, count, cache.dim)

    def judge_write(_: Any) -> float:
        own = allocate_cache(layout, -(-len(sampled) // page_size), page_size, device=device)
        places = torch.arange(len(sampled), device=device)
        reference_write(own, rows[sampled], places)
        return judges.close("the cache", gather_rows(cache, slots[sampled]), gather_rows(own, places), _ONE_FP8_STEP)

    return Workload(
        work=floors.cache_rows(rows=count, dim=cache.dim, row_bytes=row_bytes(cache)),
        contenders=tuple(
            context.contenders(
                case.op,
                # Start with zeros: rows that one provider wrote must not pass as the next one's.
                lambda function: _after(lambda: cache.data.zero_(), lambda: function(cache, rows, slots)),
            )
        ),
        judge=judge_write,
    )


def _after(prepare: Callable[[], Any], call: TimedCall) -> TimedCall:
    prepare()
    return call


def index_ops(case: BenchCase, context: Context) -> Workload:
    """One op over indices; a function per op below makes its arguments."""
    work, arguments, keywords, reference = _INDEX_OPS[case.op](case, context.device)
    return Workload(
        work=work,
        contenders=tuple(context.contenders(case.op, lambda function: lambda: function(*arguments, **keywords))),
        judge=judges.equal(lambda: _tensors(reference(*arguments, **keywords))),
        graph=True,
    )


_Prepared = tuple[floors.Work, tuple[Any, ...], dict[str, Any], Callable[..., Any]]


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _paged(case: BenchCase, device: torch.device) -> _Prepared:
    rows, kv, topk, batch = case.numbers("q", "kv", "topk", "batch")
    positions = inputs.selection(device, rows, kv, topk, 1)
    pages = -(-kv // PAGE_SIZE)
    order = torch.randperm(batch * pages, generator=inputs.generator(device, 2), device=device)
    table = order.view(batch, pages).int()
    to_request = (torch.arange(rows, device=device) * batch // rows).int()
    work = floors.index_map(read=rows * topk + batch * pages + rows, written=rows * topk)
    keywords = {"page_size": PAGE_SIZE, "row_to_request": to_request}
    return work, (positions, table), keywords, index_transform.reference_paged


def _ragged(case: BenchCase, device: torch.device) -> _Prepared:
    rows, kv, topk, batch = case.numbers("q", "kv", "topk", "batch")
    positions = inputs.selection(device, rows, kv, topk, 1)
    offsets = (torch.arange(rows, device=device) * batch // rows * kv).int()
    work = floors.index_map(read=rows * topk + rows, written=rows * topk)
    return work, (positions, offsets), {}, index_transform.reference_ragged


def _window(case: BenchCase, device: torch.device) -> _Prepared:
    rows, kv, window, batch = case.numbers("q", "kv", "window", "batch")
    cu_seqlens = torch.arange(0, rows + 1, rows // batch, dtype=torch.int32, device=device)
    seq_lens = torch.full((batch,), kv, dtype=torch.int32, device=device)
    work = floors.index_map(read=2 * batch, written=rows * (window + 1))
    keywords = {"window": window, "num_tokens": rows}
    return work, (cu_seqlens, seq_lens), keywords, swa_indices.reference_window


_INDEX_OPS: dict[str, Callable[[BenchCase, torch.device], _Prepared]] = {
    "index_transform_paged": _paged,
    "index_transform_ragged": _ragged,
    "swa_window_indices": _window,
}
