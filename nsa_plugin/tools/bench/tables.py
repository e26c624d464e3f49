"""Terminal output of a run: a table of its measurements, then what was refused, failed or skipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nsa_plugin.tools.bench.cases import SUITES, describe_fields
from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.terminal import table

if TYPE_CHECKING:
    from nsa_plugin.tools.bench.outcome import Outcome

_EXTRAS = {
    "tflops": "TFLOPS",
    "extra_mib": "extra MiB",
    "up_projection_us": "up-projection µs",
    "absorb_us": "absorb µs",
}


def print_suites(console: Console) -> None:
    """Every suite, what it measures, and its cases by op."""
    listed = table("Suites", "suite", "cases", "what it measures")
    for suite in SUITES.values():
        listed.add_row(suite.name, str(len(suite.cases)), suite.about)
    console.print(listed)


def print_rates(console: Console, gpu: str, rates: Rates) -> None:
    fp8 = "not measured" if rates.fp8_matmul_tflops is None else f"{rates.fp8_matmul_tflops:.0f} TFLOPS"
    console.print(
        f"{gpu}: copy {rates.copy_gb_s:.0f} GB/s, bf16 matmul {rates.matmul_tflops:.0f} TFLOPS, fp8 matmul {fp8}"
    )


def print_outcome(console: Console, suite: str, outcome: Outcome) -> None:
    """Print the measurements of a suite and everything that is not among them, with the reason."""
    extras = [name for name in _EXTRAS if any(name in row for row in outcome.rows)]
    columns = ("case", "provider", "median µs", "min µs", "÷ floor", "speed-up", *(_EXTRAS[name] for name in extras))
    shown = table(suite, *columns, "max error")
    before = None
    for row in outcome.rows:
        case = (row["op"], row["case"])
        shown.add_row(
            "" if case == before else f"{row['op']}: {describe_fields(row['case'])}",
            row["provider"],
            f"{row['median_us']:.1f}{' (eager)' if row['timing'] == 'eager' and _in_graphs(outcome) else ''}",
            f"{row['min_us']:.1f}",
            f"{row['median_us'] / row['floor_us']:.2f}" if row["floor_us"] else "-",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            *(str(row.get(name, "")) for name in extras),
            f"{row['max_error']:.1e}",
        )
        before = case
    console.print(shown)
    for title, entries in (("refused", outcome.refused), ("FAILED", outcome.failed)):
        for line in grouped(entries):
            console.print(f"{title}: {line}")
    if outcome.skipped:
        console.print(f"not enough time for {len(outcome.skipped)} cases, from {outcome.skipped[0]}")


def grouped(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Refusals or failures as lines: one for all cases of an op with the same provider and reason."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        key = (entry["op"], entry["provider"], entry["reason"])
        cases.setdefault(key, []).append(describe_fields(entry["case"]))
    return [
        f"{provider} for {op}: {reason} ({found[0] if len(found) == 1 else f'{len(found)} cases'})"
        for (op, provider, reason), found in cases.items()
    ]


def _in_graphs(outcome: Outcome) -> bool:
    return any(row["timing"] == "graph" for row in outcome.rows)
