"""The tables of docs/older-gpus.md: how fast attention is on the portable path, by the records of an emulated GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.chosen import HEADS
from ci.rows import ROOT
from nsa_plugin.tools.bench.cases import RANDOM, selection_of
from nsa_plugin.tools.bench.record import check
from nsa_plugin.tools.bench.suites.sparse_mla import PADDED
from nsa_plugin.tools.pages.markdown import markdown_table

RECORDS = ROOT / "docs" / "benchmarks" / "h200"
CACHES = {"fp8": "", "bf16": "-bf16"}
"""KV caches, and what they add to a suite's name."""
PREFILLS = {
    "fp8 cache": ("fp8", RANDOM),
    "fp8 cache, neighbours share 95%": ("fp8", "overlap 95%"),
    "bf16 cache": ("bf16", RANDOM),
}
REQUESTS = {"1 request": (1,), "8 requests": (8,), "32": (32,), "128 and 512": (128, 512)}


def prefill_table(records: Path = RECORDS) -> str:
    """Prefills: the speed of provider `cuda`, FlashMLA's with padded heads being 1, and TFLOPS."""
    columns = [
        [row for row in _rows(records, "prefill", cache) if selection_of(row["case"]) == selection]
        for cache, selection in PREFILLS.values()
    ]
    lines = [[str(heads), *(_cell(rows, heads) for rows in columns)] for heads in HEADS]
    return markdown_table(["heads a GPU", *PREFILLS], lines)


def decode_table(records: Path = RECORDS) -> str:
    """Decode steps, of one query token a request and of two, like `prefill_table`."""
    lines = []
    for cache in CACHES:
        decode = _rows(records, "decode", cache)
        columns = [[row for row in decode if row["case"]["batch"] in counts] for counts in REQUESTS.values()]
        lines += [[str(heads), cache, *(_cell(rows, heads) for rows in columns)] for heads in HEADS]
    return markdown_table(["heads a GPU", "cache", *REQUESTS], lines)


def _rows(records: Path, phase: str, cache: str) -> list[dict[str, Any]]:
    path = records / f"portable-sparse-mla-{phase}{CACHES[cache]}.json"
    record = check(json.loads(path.read_text(encoding="utf-8")), str(path))
    return [row for row in record["rows"] if row["provider"] == "cuda" and row["baseline"] == PADDED]


def _cell(rows: Sequence[dict[str, Any]], heads: int) -> str:
    """The least and the greatest: "0.66 to 0.68 (213 to 219)"."""
    found = [row for row in rows if row["case"]["heads"] == heads]
    if not found:
        return "-"
    return f"{_span([row['speedup'] for row in found], '.2f')} ({_span([row['tflops'] for row in found], '.0f')})"


def _span(numbers: Sequence[float], form: str) -> str:
    least, most = f"{min(numbers):{form}}", f"{max(numbers):{form}}"
    return least if least == most else f"{least} to {most}"
