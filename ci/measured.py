"""The times that decisions compare, from the records of `nsa-plugin bench`.

``python -m ci.measured`` writes nsa_plugin/decision/timings.json from docs/benchmarks; ``--check`` ends 1 if it is out
of date. The times are medians. If several cases have the same heads and query tokens, the one with the longest context
counts (of a prefill, up to `COPIED_CONTEXT`), then the one with the largest page, then the latest record's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ci.rows import ROOT
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import FLASH_MLA_DECODE, Route
from nsa_plugin.decision.timings import COPIED_CONTEXT, SELECTIONS, TimingKey, Timings, filed, selected_from
from nsa_plugin.decision.token_shard import ATTENTION, CHUNKS, STEPS, group_op, in_chunks, reshard_label
from nsa_plugin.layouts import BF16
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.tools.bench.cases import RANDOM, selection_of
from nsa_plugin.tools.bench.record import BACK_TO_BACK, read

RECORDS = ROOT / "docs" / "benchmarks"
TIMINGS = ROOT / "nsa_plugin" / "decision" / "timings.json"

# SM versions of the GPUs whose records count. Another GPU of the same version has other proportions, so its records
# count only for what these have not measured at all.
GPUS = {"NVIDIA H200": 90}
STAND_INS = {"NVIDIA H100 80GB HBM3": 90}
# Of these the reasons name the GPU.
STAND_IN_OPS = (str(Op.SPARSE_MLA_PREFILL), str(Op.SPARSE_MLA_DECODE))

_PREFILL = {name: Route(Attention.SPARSE_PREFILL, name) for name in ("cuda", "triton")}
_DECODE = {name: Route(Attention.SPARSE_DECODE, name) for name in ("cuda", "triton")}
_COPIED = Route(Attention.SPARSE_PREFILL, "flash_mla", dequantize_kv=True)

# Which route each provider of a record is. FlashMLA's times are those of the stock calls: as in an engine, they
# leave out its schedule, which is made once for all layers. Providers that no route of a batch is are left out:
# FlashMLA over bfloat16 rows that somebody else has made, for one.
ROUTES: dict[str, dict[str, Route]] = {
    "sparse_mla_prefill": _PREFILL
    | {"flash_mla decode kernel": FLASH_MLA_DECODE, "flash_mla padded, bf16 copy included": _COPIED},
    "sparse_mla_decode": _DECODE | {"flash_mla padded": FLASH_MLA_DECODE},
    "v4_prefill_route": _PREFILL
    | {"flash_mla decode kernel": FLASH_MLA_DECODE, "dequantise, combine, flash_mla": _COPIED},
}
# Of a bf16 cache FlashMLA reads the rows in place, with its prefill kernel in decode too.
_IN_PLACE = {"flash_mla padded": Route(Attention.SPARSE_PREFILL, "flash_mla")}
_FA3 = Route(Attention.SPARSE_DECODE, "fa3")
BF16_ROUTES: dict[str, dict[str, Route]] = {
    # No route of a batch is FA3's of a prefill: vLLM's choice of a backend is compared with it.
    "sparse_mla_prefill": _PREFILL | _IN_PLACE | {"fa3, a sequence for each query token": _FA3},
    "sparse_mla_decode": _DECODE | _IN_PLACE | {"fa3": _FA3},
}
DENSE = {name: Route(Attention.MHA_ONE_SHOT, name) for name in ("fa3", "triton")}
# What the op mha_one_shot times dense attention against, by the layout of the cache.
BESIDE: dict[str, dict[str, Route]] = {
    "v32_fp8": {
        "sparse_mla cuda": _PREFILL["cuda"],
        "sparse_mla triton": _PREFILL["triton"],
        "sparse_mla flash_mla padded": _COPIED,
    },
    "bf16": {"sparse_mla flash_mla padded": Route(Attention.SPARSE_PREFILL, "flash_mla")},
}

# The indexers that a decision compares.
INDEXERS = ("cuda", "deep_gemm", "triton")

# Resharding, measured by `python -m nsa_plugin.tools.bench.group`: the label of a prefill, in one piece or more, and of
# a decode, in one. A prefill's bf16 rows are made beforehand; the decision adds their copy.
RESHARDED = {in_chunks("token_shard flash_mla", chunks): reshard_label(_COPIED, chunks) for chunks in CHUNKS}
RESHARDED |= {in_chunks("token_shard cuda", chunks): reshard_label(_PREFILL["cuda"], chunks) for chunks in CHUNKS}
RESHARDED["token_shard flash_mla decode kernel"] = reshard_label(FLASH_MLA_DECODE)
RESHARDED_STEPS = {
    "token_shard flash_mla": reshard_label(FLASH_MLA_DECODE),
    "token_shard cuda": reshard_label(_DECODE["cuda"]),
}

# (op, layout, label, heads, rows, microseconds, rank of the case among those of the same rows)
Measured = tuple[str, str, str, int, int, float, tuple[int, int]]


def _of_row(row: dict[str, Any]) -> Iterator[Measured]:
    """The times that a row of a record gives; none if no decision compares it."""
    op, case, provider = row["op"], row["case"], row["provider"]
    if op in ROUTES:
        layout = case["layout"]
        if op != "sparse_mla_decode" and case["kv"] > COPIED_CONTEXT:  # decisions add what a longer context takes
            return
        if selection_of(case) != RANDOM:  # no decision knows what its batch's selections share
            return
        routes = (BF16_ROUTES if layout == BF16.name else ROUTES).get(op, {})
        under = filed(layout, (case["topk"], case.get("window", 0)))
        if provider in routes and under:
            need = Op.SPARSE_MLA_DECODE if op == "sparse_mla_decode" else Op.SPARSE_MLA_PREFILL
            rows = case["q"] if "q" in case else case["batch"] * case["s_q"]
            rank = case["kv"], case.get("page_size", 0)
            yield str(need), under, str(routes[provider]), case["heads"], rows, row["median_us"], rank
    elif op == ATTENTION:
        layout, step = case["layout"], "batch" in case
        label = (RESHARDED_STEPS if step else RESHARDED).get(provider)
        if label is not None and SELECTIONS.get(layout) == (case["topk"], 0):
            of_group = group_op(STEPS if step else ATTENTION, case["tp"])
            rows = case["batch"] * case["s_q"] if step else case["q"]
            yield of_group, layout, label, case["heads"], rows, row["median_us"], (case["kv"], 0)
    elif op == Op.INDEXER_TOPK:
        if provider in INDEXERS:  # of several budgets the largest counts
            selected = selected_from(case["topk"], case["kv"])
            yield op, selected, provider, case["heads"], case["q"], row["median_us"], (case["budget_mib"], 0)
    elif op == "mha_one_shot":
        for layout, beside in BESIDE.items():
            route = (DENSE | beside).get(provider)
            # A prefix was not measured.
            if route is None or case["q"] != case["kv"] or case["topk"] != SELECTIONS[layout][0]:
                continue
            # Each with the projection that only it needs.
            projection = row["up_projection_us" if route in DENSE.values() else "absorb_us"]
            yield op, layout, str(route), case["heads"], case["q"], row["median_us"] + projection, (case["kv"], 0)


def collect(folder: Path) -> tuple[Timings, dict[TimingKey, str]]:
    """The table of a folder's records, sorted, and the GPU of the times that a stand-in has measured.

    Raises:
        BenchError: a record cannot be read.
    """
    own, more = _collected(folder, GPUS), {}
    gpus: dict[TimingKey, str] = {}
    for gpu, sm in STAND_INS.items():
        for key, times in _collected(folder, {gpu: sm}).items():
            if key not in own and key[1] in STAND_IN_OPS:
                more[key], gpus[key] = times, _short(gpu)
    return dict(sorted((own | more).items())), gpus


def _short(gpu: str) -> str:
    """A GPU's name without its maker and its memory."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def _collected(folder: Path, gpus: Mapping[str, int]) -> Timings:
    """The table of the records of some GPUs, by their names, sorted."""
    chosen: dict[tuple[TimingKey, str, int, int], tuple[tuple[int, int], str, float]] = {}
    for records in read(folder).values():
        for _, record in records:
            sm = gpus.get(record["host"]["gpu"])
            host = record["host"]
            if sm is None or host.get("l2") == BACK_TO_BACK or host.get("emulates"):
                continue
            for row in record["rows"]:
                for op, layout, label, heads, rows, time, rank in _of_row(row):
                    place = (sm, op, layout), label, heads, rows
                    found = rank, record["date"], time
                    if place not in chosen or found[:2] >= chosen[place][:2]:
                        chosen[place] = found
    table: Timings = {}
    for (key, label, heads, rows), (_, _, time) in sorted(chosen.items()):
        by_heads = table.setdefault(key, {}).setdefault(label, {})
        by_heads[heads] = (*by_heads.get(heads, ()), (rows, float(f"{time:.4g}")))
    return table


def render(table: Timings, stand_ins: Mapping[TimingKey, str]) -> str:
    """The JSON file: a row of points a line, so that a change of one time is a change of one line."""
    gpus = {str(sm): _short(gpu) for gpu, sm in GPUS.items()}
    rows = [
        {"sm": sm, "op": op, "layout": layout, "route": route, "heads": heads, "points": points}
        | ({"gpu": stand_ins[sm, op, layout]} if (sm, op, layout) in stand_ins else {})
        for (sm, op, layout), by_route in table.items()
        for route, by_heads in by_route.items()
        for heads, points in by_heads.items()
    ]
    about = "Microseconds of one call, points as [query tokens, microseconds]. Made by: python -m ci.measured"
    listed = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    times = f"[\n{listed}\n ]" if rows else "[]"
    return f'{{\n "about": {json.dumps(about)},\n "gpus": {json.dumps(gpus)},\n "times": {times}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.measured", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; end 1 if the file is out of date")
    args = parser.parse_args()
    made, name = render(*collect(RECORDS)), TIMINGS.relative_to(ROOT)
    if TIMINGS.exists() and TIMINGS.read_text() == made:
        return 0
    if args.check:
        print(f"{name}: not what docs/benchmarks gives; run: make docs", file=sys.stderr)
        return 1
    TIMINGS.write_text(made)
    print(f"rewrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
