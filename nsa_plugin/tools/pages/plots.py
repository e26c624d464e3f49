"""Plots of records: the time against what varies, and the share of the floor that is reached.

The same record gives the same file: no date, and ids from a fixed salt.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
        raise BenchError(
            f"plots need matplotlib ({error}); install it with: pip install 'nsa-plugin[bench]'"
        ) from error


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
        figure = figure_class(figsize=(4.2 * len(shown), 6.4), layout="constrained")
        grid = figure.subplots(2, len(shown), squeeze=False)
        for column, panel in enumerate(shown):
            _draw_panel(panel, grid[0][column], grid[1][column])
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
    return {f"floor of {provider}": floor for provider, floor in kept.items()}


def _draw_panel(panel: Panel, times: Any, shares: Any) -> None:
    for provider in dict.fromkeys(row["provider"] for row in panel.rows):
        rows = sorted(
            (row for row in panel.rows if row["provider"] == provider), key=lambda row: int(row["case"][panel.axis])
        )
        x = [row["case"][panel.axis] for row in rows]
        times.plot(x, [row["median_us"] for row in rows], marker="o", markersize=3, label=provider)
        shares.plot(x, [row["floor_us"] / row["median_us"] for row in rows], marker="o", markersize=3, label=provider)
    for name, floor in floors(panel).items():
        times.plot(list(floor), list(floor.values()), color="black", linestyle=":", linewidth=1, label=name)
    times.set_title(f"{panel.op}\n{describe_fields(panel.fixed)}", fontsize=7)
    times.set_ylabel("median µs")
    times.set_yscale("log")
    times.legend(fontsize=6)
    shares.set_ylabel("floor ÷ time")
    shares.set_ylim(bottom=0)
    for axes in (times, shares):
        axes.set_xlabel(AXES[panel.axis])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(_values(panel.rows, panel.axis)), map(str, sorted(_values(panel.rows, panel.axis))))
