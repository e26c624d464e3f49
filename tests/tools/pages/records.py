"""A benchmark record with known rows, for tests of the pages and of the bench command."""

from __future__ import annotations

from typing import Any

from tests.tools.bench.fakes import HOST


def row(provider: str, median: float, *, heads: int = 16, q: int = 4096, **more: Any) -> dict[str, Any]:
    return {
        "op": "sparse_mla_prefill",
        "case": {"heads": heads, "q": q, "kv": 65536, "topk": 2048, "layout": "v32_fp8"},
        "provider": provider,
        "median_us": median,
        "min_us": median - 1,
        "runs": 50,
        "timing": "eager",
        "floor_us": 400.0,
        "baseline": "stock",
        "baseline_us": 2400.0,
        "speedup": round(2400 / median, 3),
        "max_error": 2e-4,
    } | more


def one_record(rows: list[dict[str, Any]], suite: str = "sparse-mla-prefill") -> dict[str, Any]:
    case = {"heads": 2, "q": 1}
    return {
        "schema": 1,
        "suite": suite,
        "command": f"nsa-plugin bench {suite}",
        "date": "2026-01-02",
        "host": HOST,
        "rows": rows,
        "refused": [
            {"op": "sparse_mla_prefill", "case": case | {"q": q}, "provider": "fa3", "reason": "layout is v32_fp8"}
            for q in (1, 2)
        ],
        "failed": [{"op": "sparse_mla_prefill", "case": case, "provider": "x", "reason": "wrong result: NaN"}],
        "skipped": [{"op": "sparse_mla_prefill", "case": case}],
    }


ROWS = [
    row("stock", 2400.0),
    row("ours", 800.0),
    row("stock", 300.0, heads=8, baseline_us=300.0, speedup=1.0),
    row("ours", 480.0, heads=8, baseline_us=300.0, speedup=0.625, extra_mib=12.4),
]
