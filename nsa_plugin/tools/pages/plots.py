"""Plots of records: the time against what varies, and the share of the floor that is reached.

The same record gives the same file: no date, and ids from a fixed salt.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple
from zlib import crc32

from nsa_plugin.tools.bench.cases import BenchError, describe_fields
from nsa_plugin.tools.bench.record import check
from nsa_plugin.tools.records import Row

# The fields that may be an x axis, in the order of the columns, with their labels.
AXES = {
    "q": "query tokens",
    "batch": "sequences",
    "heads": "query heads",
    "kv": "keys",
    "tp": "ranks",
}
# Kernel in a contender's name: what the legend calls it, and its colour in every plot. The last one in a name counts.
_KERNELS = {
    "cuda": ("CUDA", "#1f5fd0"),
    "triton": ("Triton", "#e8710a"),
    "flash_mla": ("FlashMLA", "#1b8a3a"),
    "trtllm": ("TensorRT-LLM (FlashInfer)", "#8e44ad"),
    "fa3": ("FlashAttention 3", "#8c564b"),
    "deep_gemm": ("DeepGEMM", "#0097a7"),
    "reference": ("float32 reference", "#b0a040"),
    "SGLang's sparse route": ("SGLang's sparse prefill", "#d62728"),
    "triton_sparse_mla": ("SGLang's triton_sparse_mla", "#d62728"),
    "triton_bf16_mla_sparse": ("vLLM's triton_bf16_mla_sparse", "#e377c2"),
    "sgl_kernel.fast_topk_v2": ("sgl_kernel top-k", "#d62728"),
    "torch SDPA": ("torch SDPA", "#7f7f7f"),
    "torch.topk": ("torch.topk", "#7f7f7f"),
    "flashinfer.top_k": ("FlashInfer top_k", "#e377c2"),
    "flashinfer.top_k_ragged_transform": ("FlashInfer top_k_ragged_transform", "#b8860b"),
}
_KERNEL = re.compile("|".join(rf"(?<!\w){re.escape(name)}\b" for name in sorted(_KERNELS, key=len, reverse=True)))
_STOCK = re.compile(r"padded|in one piece|decode kernel|^SGLang|^vLLM|^torch|^sgl_kernel|^flashinfer\.|^stock")
_MARKERS = "os^Dv"  # of contenders with the same kernel
_OF_A_GROUP = re.compile(r"(?P<suite>.+)-tp(?P<ranks>\d+)")
_SETTINGS = {"svg.hashsalt": "nsa-plugin", "svg.fonttype": "none", "font.size": 8.0, "axes.grid": True}


class Panel(NamedTuple):
    """A column of a plot: `rows` of one op that differ only in `axis` and in the provider."""

    op: str
    axis: str
    fixed: dict[str, Any]
    rows: list[Row]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """For each op and axis, the cases with the most values of that axis; none with fewer than two.

    If several groups of cases have as many values, the first in the record counts: suites list cases by importance.
    """
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        for axis in AXES:
            groups: dict[tuple[Any, ...], list[Row]] = {}
            for row in rows:
                if row["op"] == op and axis in row["case"]:
                    # If the queries are all the keys, the two vary together; more ranks have fewer heads each.
                    together = {axis, "kv"} if row["case"].get("kv") == row["case"].get("q") else {axis}
                    together |= {"heads"} if axis == "tp" else set()
                    fixed = tuple((name, value) for name, value in row["case"].items() if name not in together)
                    groups.setdefault(fixed, []).append(row)
            if groups:
                fixed, best = max(groups.items(), key=lambda group: len(_values(group[1], axis)))
                if len(_values(best, axis)) > 1:
                    found.append(Panel(op, axis, dict(fixed), best))
    return found


def _values(rows: Sequence[Row], axis: str) -> set[Any]:
    return {row["case"][axis] for row in rows}


def scaling(record: dict[str, Any], folder: Path) -> list[Panel]:
    """Time against ranks, over one suite's records for groups of several sizes.

    Only the record of the largest group has these panels.

    Args:
        folder: the folder of `record` and of SUITE-tp<ranks>.json for the other groups.

    Raises:
        BenchError: one of those files is not a record.
    """
    own = _OF_A_GROUP.fullmatch(record["suite"])
    if own is None:
        return []
    groups = {int(own["ranks"]): record}
    for path in folder.glob(f"{own['suite']}-tp*.json"):
        other = _OF_A_GROUP.fullmatch(path.stem)
        if other is not None and other["suite"] == own["suite"]:
            groups.setdefault(int(other["ranks"]), check(json.loads(path.read_text()), str(path)))
    if max(groups) != int(own["ranks"]):
        return []
    rows = [row for _, found in sorted(groups.items()) for row in found["rows"]]
    return [panel for panel in panels(rows) if panel.axis == "tp"]


def require() -> Any:
    """matplotlib's Figure.

    Raises:
        BenchError: matplotlib is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise BenchError(f"plots need matplotlib ({error}); install it with: pip install matplotlib") from error


def draw(record: dict[str, Any], path: Path) -> bool:
    """Write the record's plot, an SVG, to `path`; False if nothing in the record varies.

    The plot includes the panels of `scaling`, from the other records in the folder of `path`.
    """
    figure_class = require()
    shown = [*panels(record["rows"]), *scaling(record, path.parent)]
    if not shown:
        return False
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context(_SETTINGS):
        figure = figure_class(figsize=(4.2 * max(len(shown), 1.4), 7.2), layout="constrained")
        grid = figure.subplots(2, len(shown), squeeze=False)
        drawn = styles([row["provider"] for panel in shown for row in panel.rows])
        for column, panel in enumerate(shown):
            _draw_panel(panel, drawn, grid[0][column], grid[1][column])
        named = {name: line for axes in grid[0] for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named, loc="outside lower center", ncols=max(1, len(shown)), fontsize=7)
        figure.suptitle(f"{record['suite']}, {record['host']['gpu']}")
        figure.savefig(path, format="svg", metadata={"Date": None})
    return True


def floors(panel: Panel) -> dict[str, dict[int, float]]:
    """The floors over the panel's axis, by their names in the legend.

    There is more than one if providers of different ops compete, because their useful work differs.
    """
    by_provider: dict[str, dict[int, float]] = {}
    for row in sorted(panel.rows, key=lambda row: int(row["case"][panel.axis])):
        by_provider.setdefault(row["provider"], {})[row["case"][panel.axis]] = row["floor_us"]
    kept: dict[str, dict[int, float]] = {}
    for provider, floor in sorted(by_provider.items(), key=lambda one: -len(one[1])):
        if not any(floor.items() <= other.items() for other in kept.values()):
            kept[provider] = floor
    if len(kept) == 1:
        return {"floor": next(iter(kept.values()))}
    return {f"floor of {legend(provider)}": floor for provider, floor in kept.items()}


def legend(provider: str) -> str:
    """A contender's name in a legend: the plugin or the stock path, and its kernels by their usual names."""
    reshards = provider.startswith("token_shard ")
    text = _KERNEL.sub(lambda found: _KERNELS[found[0]][0], provider.removeprefix("token_shard "))
    if reshards:
        return f"this plugin: resharded, {text}"
    dense, sparse, rest = text.rpartition("sparse_mla ")
    return f"{'stock' if _STOCK.search(provider) else 'this plugin'}: {dense}{'sparse, ' if sparse else ''}{rest}"


def styles(providers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each contender is drawn: a colour for the kernel, dashes for stock, markers for the ways to run a kernel."""
    drawn: dict[str, dict[str, Any]] = {}
    ways: Counter[str] = Counter()
    for provider in dict.fromkeys(providers):
        found = _KERNEL.findall(provider)
        colour = _KERNELS[found[-1]][1] if found else f"C{crc32(provider.encode()) % 10}"
        label = legend(provider)
        drawn[provider] = {
            "label": label,
            "color": colour,
            "linestyle": "--" if label.startswith("stock") else "-",
            "marker": _MARKERS[ways[colour] % len(_MARKERS)],
            "markersize": 4,
        }
        ways[colour] += 1
    return drawn


def _draw_panel(panel: Panel, drawn: Mapping[str, Mapping[str, Any]], times: Any, shares: Any) -> None:
    ordered = sorted(panel.rows, key=lambda row: int(row["case"][panel.axis]))
    for provider in dict.fromkeys(row["provider"] for row in panel.rows):
        rows = [row for row in ordered if row["provider"] == provider]
        x = [row["case"][panel.axis] for row in rows]
        times.plot(x, [row["median_us"] for row in rows], **drawn[provider])
        shares.plot(x, [row["floor_us"] / row["median_us"] for row in rows], **drawn[provider])
    for dashes, (name, floor) in zip(cycle((":", "-.", "--")), floors(panel).items(), strict=False):
        times.plot(list(floor), list(floor.values()), color="black", linestyle=dashes, linewidth=1, label=name)
    times.set_title("\n".join([panel.op, *wrap(describe_fields(panel.fixed), 60)]), fontsize=7)
    times.set_ylabel("median µs")
    times.set_yscale("log")
    shares.set_ylabel("floor ÷ time")
    shares.set_ylim(bottom=0)
    ticks = sorted(_values(panel.rows, panel.axis))
    for axes in (times, shares):
        axes.set_xlabel(AXES[panel.axis])
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        axes.xaxis.minorticks_off()
