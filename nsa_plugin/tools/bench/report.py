"""The documentation's tables, from records alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_plugin.tools.bench.cases import SUITES, BenchError, describe_fields
from nsa_plugin.tools.bench.markdown import markdown_table
from nsa_plugin.tools.bench.record import read
from nsa_plugin.tools.bench.tables import grouped
from nsa_plugin.tools.compare import record as comparison
from nsa_plugin.tools.compare.report import overview, section

PART = "benchmarks"
_PART = re.compile(rf"(<!-- generated: {PART} -->\n).*?(<!-- end of {PART} -->)", re.DOTALL)

Row = dict[str, Any]


def rewrite(page: Path, folder: Path) -> bool:
    """Put the tables of `folder`'s records into the page's generated part; whether it changed.

    Raises:
        BenchError: the page has no such part, or a record cannot be read.
    """
    text = page.read_text()
    if not _PART.search(text):
        raise BenchError(f"{page}: it has no part between <!-- generated: {PART} --> and <!-- end of {PART} -->")
    made = _PART.sub(lambda part: f"{part[1]}{render(folder)}\n{part[2]}", text)
    if made != text:
        page.write_text(made)
    return made != text


def render(folder: Path) -> str:
    """The tables of every record in FOLDER/<host>/, as Markdown for a page beside FOLDER: of ops, then of engines."""
    hosts = read(folder)
    parts = []
    for host in sorted(path.name for path in folder.glob("*") if path.is_dir()):
        records, compared = hosts.get(host, []), comparison.read(folder / host)
        if not records and not compared:
            continue
        parts.append(f"## {(records + compared)[0][1]['host']['gpu'] or host}")
        order = list(SUITES)
        known = sorted(records, key=lambda one: (_position(order, one[1]["suite"]), one[1]["suite"]))
        parts += [_suite(path, record, f"{folder.name}/{host}") for path, record in known]
        if compared:
            parts += ["### Comparisons of served models", overview([record for _, record in compared])]
        parts += [section(path, record, f"{folder.name}/{host}") for path, record in compared]
    return "\n\n".join(parts) or "No record is here yet."


def _position(order: list[str], suite: str) -> int:
    suite = suite.removesuffix("-back-to-back")
    return order.index(suite) if suite in order else len(order)


def _suite(path: Path, record: dict[str, Any], folder: str) -> str:
    parts = [f"### {record['suite']}", _provenance(path, record, folder)]
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        parts.append(op_table(op, rows))
        if crossover := crossovers(rows):
            parts.append(crossover)
    for kind in ("refused", "failed"):
        if lines := grouped(record.get(kind, [])):
            parts.append("\n".join([f"{kind.capitalize()}:", "", *(f"- {line}" for line in lines)]))
    if skipped := record.get("skipped"):
        parts.append(f"Not reached within the time of the run: {len(skipped)} cases.")
    if (plot := path.with_suffix(".svg")).is_file():
        parts.append(f"![{record['suite']}]({folder}/{plot.name})")
    return "\n\n".join(parts)


def _provenance(path: Path, record: dict[str, Any], folder: str) -> str:
    host = record["host"]
    libraries = ", ".join(f"{name} {version}" for name, version in host["libraries"].items())
    rates = [f"copy {host['copy_gb_s']} GB/s"] if host.get("copy_gb_s") else []
    rates += [f"bf16 matmul {host['matmul_tflops']} TFLOPS"] if host.get("matmul_tflops") else []
    rates += [f"fp8 matmul {host['fp8_matmul_tflops']} TFLOPS"] if host.get("fp8_matmul_tflops") else []
    said = [f"torch {host['torch']}", f"triton {host['triton']}", libraries, ", ".join(rates)]
    return (
        f"[Record]({folder}/{path.name}) of `{record['command']}`, {record['date']}, "
        f"commit {host['commit'] or 'unknown'}: {'; '.join(part for part in said if part)}."
    )


def op_table(op: str, rows: Sequence[Row]) -> str:
    """One line a case: its floor, each provider's median and speed-up, and how near the best is to the floor."""
    varying, constant = _split_case([row["case"] for row in rows])
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row["case"].items()), {})[row["provider"]] = row
    errors = {name: max(row["max_error"] for row in rows if row["provider"] == name) for name in providers}

    lines = []
    # Cases are measured in the order of their importance, and read in the order of their values.
    for case, by_provider in sorted(cases.items(), key=lambda one: [(isinstance(v, str), v) for _, v in one[0]]):
        best = min(by_provider.values(), key=lambda row: float(row["median_us"]))
        fields = dict(case)
        lines.append(
            [
                *(str(fields.get(name, "")) for name in varying),
                _us(best["floor_us"]),
                *(_cell(by_provider.get(name)) for name in providers),
                f"{best['median_us'] / best['floor_us']:.2f}" if best["floor_us"] else "-",
            ]
        )
    header = [*varying, "floor µs", *providers, "best ÷ floor"]
    caption = f"**{op}**" + (f", {describe_fields(constant)}" if constant else "")
    largest = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    baselines = list(dict.fromkeys(row["baseline"] for row in rows if row["baseline"]))
    compared = f" The speed-up is over {' or '.join(baselines)}." if baselines else ""
    return f"{caption}. Median µs.{compared}\n\n{markdown_table(header, lines)}\n\nLargest error: {largest}."


def _split_case(cases: Sequence[Row]) -> tuple[list[str], Row]:
    """The names of fields that differ between cases, and those that do not with their value."""
    names = list(dict.fromkeys(name for case in cases for name in case))
    values = {name: {case.get(name) for case in cases} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: cases[0][name] for name in names if name not in varying}


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    is_baseline = row["provider"] == row["baseline"]
    notes = [] if row["speedup"] is None or is_baseline else [f"{row['speedup']:.2f}×"]
    notes += [f"{row['extra_mib']:.0f} MiB"] if "extra_mib" in row else []
    notes += [f"+ {_us(row[name])}" for name in ("up_projection_us", "absorb_us") if name in row]
    return _us(row["median_us"]) + (f" ({', '.join(notes)})" if notes else "")


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def crossovers(rows: Sequence[Row]) -> str:
    """Up to which length dense attention with its projection beats sparse attention with its own; "" for other ops."""
    dense_and_sparse: dict[int, dict[int, dict[str, float]]] = {}
    for row in rows:
        for field, kind in (("up_projection_us", "dense"), ("absorb_us", "sparse")):
            if field in row:
                by_length = dense_and_sparse.setdefault(row["case"]["heads"], {})
                best = by_length.setdefault(row["case"]["q"], {})
                best[kind] = min(best.get(kind, float("inf")), row["median_us"] + row[field])
    lines = []
    for heads, by_length in sorted(dense_and_sparse.items()):
        compared = {q: best for q, best in sorted(by_length.items()) if len(best) == 2}
        ahead = [q for q, best in compared.items() if best["dense"] <= best["sparse"]]
        behind = [q for q in compared if q not in ahead]
        if compared:
            lines.append(f"- {heads} heads: {_ahead(ahead, behind)}")
    if not lines:
        return ""
    title = "Where dense attention with its up-projection takes no longer than sparse attention with its absorption:"
    return "\n".join([title, "", *lines])


def _ahead(ahead: Sequence[int], behind: Sequence[int]) -> str:
    if not behind:
        return f"at every length measured, {ahead[0]} to {ahead[-1]} tokens"
    if not ahead:
        return f"at no length measured, {behind[0]} to {behind[-1]} tokens"
    if max(ahead) < min(behind):
        return f"up to {max(ahead)} tokens, not at {min(behind)}"
    return f"at {', '.join(map(str, ahead))} tokens, not at {', '.join(map(str, behind))}"
