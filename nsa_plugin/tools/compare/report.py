"""The tables of a comparison, from its record alone: on a terminal, and as Markdown for the documentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nsa_plugin.commands.output import table
from nsa_plugin.tools.bench.markdown import markdown_table
from nsa_plugin.tools.compare.record import OURS

Row = dict[str, Any]

_AGREEMENT = ("requests", "of", "tokens equal", "answers part", "largest gap", "largest |Δlogprob|", "mean", "rejected")
_SERVE = ("load", "measure", "stock", "nsa-plugin", "times better")
# Further columns of speed, where the record has them: a row's key, and the column's name.
_FURTHER = {
    "paired_speedup": "in pairs",
    "baseline_again_speedup": "stock again",
    "baseline_again_paired_speedup": "stock again, in pairs",
}


def print_record(record: Row, console: Console) -> None:
    """What was measured, then the checks, the verdict last."""
    agreement, serve = _tables(record)
    if agreement:
        shown = table("Agreement", "between", *_AGREEMENT)
        for cells in agreement:
            shown.add_row(*cells)
        console.print(shown)
    if serve:
        shown = table(f"Speed, medians, servers timed {record['timed']}", *_serve_header(record))
        for cells in serve:
            shown.add_row(*cells)
        console.print(shown)
    for load, why in record.get("left_out", {}).items():
        console.print(f"left out: {load}, {why}")
    checks = table("Checks", "", "check", "detail")
    for check in record["verdict"]["checks"]:
        checks.add_row("✓" if check["holds"] else "✗", check["name"], check["detail"])
    console.print(checks)
    console.print(verdict_line(record))


def verdict_line(record: Row) -> str:
    """One sentence: whether all holds."""
    failed = [check["name"] for check in record["verdict"]["checks"] if not check["holds"]]
    if failed:
        return f"✗ FAILED: {'; '.join(failed)}"
    if "beside" in record:
        return (
            f"✓ With the plugin {record['engine']} and {record['beside']['engine']} are as near to each other as "
            "stock, and wrong tokens are noticed."
        )
    if any(row["op"] == "agreement" and row["provider"] == OURS for row in record["rows"]):
        return "✓ The plugin's tokens and log probabilities agree with stock's, and wrong ones are noticed."
    if any(row["op"] == "limit" for row in record["rows"]):
        return "✓ The plugin answers a prompt that stock fails at."
    return "✓ Measured."


def _further(record: Row) -> list[str]:
    """The keys of `_FURTHER` that any of its rows has."""
    return [key for key in _FURTHER if any(key in row for row in record["rows"])]


def _serve_header(record: Row) -> list[str]:
    return [*_SERVE, *(_FURTHER[key] for key in _further(record))]


def _tables(record: Row) -> tuple[list[list[str]], list[list[str]]]:
    agreement, serve = [], []
    further = _further(record)
    for row in record["rows"]:
        case = row["case"]
        if row["op"] == "agreement":
            gap = "-" if not row["parted"] else _nats(row["max_gap"])
            agreement.append(
                [
                    _between(row),
                    case["requests"],
                    str(row["requests"]),
                    f"{row['equal']} of {row['tokens']}" if row["tokens"] else f"{row['positions']} positions",
                    str(row["parted"]),
                    gap,
                    _nats(row["max_error"]),
                    _nats(row["mean_error"]),
                    str(row["rejected"]),
                ]
            )
        elif row["op"] == "serve":
            serve.append(
                [
                    f"{case['requests']} × {case['prompt']} in, {case['new_tokens']} out"
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
    """Whose answers a row of agreement compares."""
    case = row["case"]
    if "beside" in case:  # the first is of the record's own engine, where it is no control
        if "fault" in case:
            return f"control of {case['control']}, plugin"
        return "plugin, plugin" if row["provider"] == OURS else "stock, stock"
    if "fault" in case:
        return "control"
    return "plugin, stock" if row["provider"] == OURS else "stock, itself"


def _nats(value: float | None) -> str:
    return "∞" if value is None else f"{value:.3f}"


_OVERVIEW = ("requests compared", "rejected", "control's requests rejected", "TTFT, times better", "all holds")


def overview(records: Sequence[Row]) -> str:
    """A line for each comparison; those that were timed with the longest prompt's time to the first token."""
    lines = []
    for record in records:
        agreement = [row for row in record["rows"] if row["op"] == "agreement" and row["provider"] == OURS]
        wrong = [row for row in agreement if "fault" in row["case"]]
        right = [row for row in agreement if "fault" not in row["case"]]
        ttft = [row for row in record["rows"] if row["op"] == "serve" and row["case"]["measure"] == "ttft_ms"]
        alone = [row for row in ttft if row["case"]["requests"] == 1]
        longest = max(alone, key=lambda row: row["case"]["prompt"], default=None)
        timed = "-" if longest is None else f"{longest['speedup']:.2f} ({longest['case']['prompt']} tokens)"
        requests, rejected = (str(sum(row[name] for row in right)) for name in ("requests", "rejected"))
        noticed = f"{sum(row['rejected'] for row in wrong)} of {sum(row['requests'] for row in wrong)}"
        holds = "yes" if record["verdict"]["holds"] else "**no**"
        lines.append([f"[{record['suite']}](#{_anchor(record['suite'])})", requests, rejected, noticed, timed, holds])
    return markdown_table(["comparison", *_OVERVIEW], lines)


def _anchor(title: str) -> str:
    """Of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def section(path: Path, record: Row, folder: str) -> str:
    """A record as a section of docs/benchmarks.md.

    Args:
        folder: the record's, as seen from the page.
    """
    commit = record["host"]["commit"] or "unknown"
    parts = [
        f"### {record['suite']}",
        f"[Record]({folder}/{path.name}) of `{record['command']}`, {record['date']}, commit {commit}: {_on(record)}.",
    ]
    if other := record.get("beside"):
        parts.append(
            f"Beside `{other['command']}`, commit {other['host']['commit'] or 'unknown'}: {_on(other)}. Checkpoint "
            f"{record['checkpoint'][:12]}, the same for both, as are the requests."
        )
    agreement, serve = _tables(record)
    if agreement:
        parts.append(markdown_table(["between", *_AGREEMENT], agreement))
    if serve:
        parts.append(f"Speed, medians; servers were timed {record['timed']}.")
        parts.append(markdown_table(_serve_header(record), serve))
    parts += [f"Left out: {load}, {why}." for load, why in record.get("left_out", {}).items()]
    checks = record["verdict"]["checks"]
    parts.append(
        "\n".join(f"- {'holds' if c['holds'] else '**does not hold**'}: {c['name']}: {c['detail']}" for c in checks)
    )
    return "\n\n".join(parts)


def _on(record: Row) -> str:
    """What served, and on what."""
    host = record["host"]
    libraries = ", ".join(f"{name} {version}" for name, version in host["libraries"].items())
    return f"{record['engine']}, {host['gpus']} GPU, torch {host['torch']}{'; ' + libraries if libraries else ''}"
