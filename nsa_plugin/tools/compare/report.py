"""Tables of a comparison, made from its record alone, and their output on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from nsa_plugin.tools.compare.record import OURS
from nsa_plugin.tools.records import Row
from nsa_plugin.tools.terminal import table

AGREEMENT_COLUMNS = (
    "requests",
    "of",
    "tokens equal",
    "answers diverge",
    "largest gap",
    "largest |Δlogprob|",
    "mean",
    "rejected",
)
_SERVE = ("load", "measure", "stock", "nsa-plugin", "times better")
# More columns of speed, if the record has them: a row's key, and the column's name.
_FURTHER = {
    "paired_speedup": "in pairs",
    "baseline_again_speedup": "stock again",
    "baseline_again_paired_speedup": "stock again, in pairs",
    "again_speedup": "plugin again",
    "again_paired_speedup": "plugin again, in pairs",
}
# A column of ratios in pairs, and the column that it takes the place of where room is short.
_REPLACES = {
    "in pairs": "times better",
    "stock again, in pairs": "stock again",
    "plugin again, in pairs": "plugin again",
}


def print_record(record: Row, console: Console) -> None:
    """Print what was measured, then the checks, and the verdict last."""
    agreement, serve = tables(record)
    if agreement:
        console.print(table("Agreement", "between", *AGREEMENT_COLUMNS, rows=agreement))
    if serve:
        console.print(_speed(record, serve))
    for load, why in record.get("left_out", {}).items():
        console.print(f"left out: {load}, {why}")
    checks = [("✓" if one["holds"] else "✗", one["name"], one["detail"]) for one in record["verdict"]["checks"]]
    console.print(table("Checks", "", "check", "detail", rows=checks))
    console.print(verdict_line(record))


def _speed(record: Row, serve: Sequence[Sequence[str]]) -> Table:
    """The speed table for a terminal of 80 columns: of a ratio that was taken in pairs, that one alone."""
    columns = serve_columns(record)
    replaced = {_REPLACES[name] for name in columns if name in _REPLACES}
    shown = [place for place, name in enumerate(columns) if name not in replaced]
    made = table(
        f"Speed, medians, servers timed {record['timed']}" + (", ratios in pairs" if replaced else ""),
        *(_REPLACES.get(columns[place], columns[place]) for place in shown),
        rows=[[row[place] for place in shown] for row in serve],
    )
    made.columns[0].no_wrap = False
    for column in made.columns[2:]:  # figures and words stay whole
        column.min_width = max(map(len, [*str(column.header).split(), *map(str, column.cells)]))
    return made


def verdict_line(record: Row) -> str:
    """One sentence: whether every check passed."""
    failed = [check["name"] for check in record["verdict"]["checks"] if not check["holds"]]
    if failed:
        return f"✗ FAILED: {'; '.join(failed)}"
    if "beside" in record:
        return (
            f"✓ With the plugin {record['engine']} and {record['beside']['engine']} match each other as closely as "
            "the two stock engines do, and wrong tokens are noticed."
        )
    if any(row["op"] == "agreement" and row["provider"] == OURS for row in record["rows"]):
        return "✓ The plugin's tokens and log probabilities agree with stock's, and wrong ones are noticed."
    if any(row["op"] == "limit" for row in record["rows"]):
        return "✓ The plugin answers a prompt at which stock fails."
    return "✓ Measured."


def _further(record: Row) -> list[str]:
    """The keys of `_FURTHER` that any row has."""
    return [key for key in _FURTHER if any(key in row for row in record["rows"])]


def serve_columns(record: Row) -> list[str]:
    """Columns of the speed table."""
    return [*_SERVE, *(_FURTHER[key] for key in _further(record))]


def tables(record: Row) -> tuple[list[list[str]], list[list[str]]]:
    """Cells of the agreement table and of the speed table."""
    agreement, serve = [], []
    further = _further(record)
    for row in record["rows"]:
        case = row["case"]
        if row["op"] == "agreement":
            agreement.append(
                [
                    _between(row),
                    case["requests"],
                    str(row["requests"]),
                    f"{row['equal']} of {row['tokens']}" if row["tokens"] else f"{row['positions']} positions",
                    str(row["parted"]),
                    _nats(row["max_gap"]) if row["parted"] else "-",
                    _nats(row["max_error"]),
                    _nats(row["mean_error"]),
                    str(row["rejected"]),
                ]
            )
        elif row["op"] == "serve":
            serve.append(
                [
                    f"{case['requests']} × {_lengths(case)} in, {case['new_tokens']} out"
                    + (", in one request" if case.get("in_one") else "")
                    + (f", behind one of {case['long']}" if "long" in case else ""),
                    case["measure"].replace("_per_s", "/s").replace("_", " "),
                    f"{row['baseline_median']:.1f}",
                    f"{row['median']:.1f}",
                    f"{row['speedup']:.2f}",
                    *(f"{row[key]:.2f}" if key in row else "-" for key in further),
                ]
            )
    return agreement, serve


def _between(row: Row) -> str:
    """The two sides that an agreement row compares."""
    case = row["case"]
    if "beside" in case:  # a cross-engine comparison
        if "fault" in case:
            return f"control of {case['control']}, plugin"
        return "plugin, plugin" if row["provider"] == OURS else "stock, stock"
    if "fault" in case:
        return "control"
    return "plugin, stock" if row["provider"] == OURS else "stock, itself"


def _nats(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3f}"


def _lengths(case: Row) -> str:
    """Tokens of a load's prompts: "2000", or "3000 and 1000 in turn"."""
    turns = case.get("turns")
    return f"{' and '.join(map(str, turns))} in turn" if turns else str(case["prompt"])
