"""The demo's report: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nsa_plugin import __version__
from nsa_plugin.tools.compare.demo.pipeline import DemoResult
from nsa_plugin.tools.compare.demo.rule import ReferenceComparison, ReferenceTolerance, control_noticed
from nsa_plugin.tools.compare.demo.trace import RouteSummary
from nsa_plugin.tools.terminal import table

SCHEMA = 1
# Narrower terminals get the reasons below the table.
_WIDTH_FOR_REASONS = 120


def print_report(result: DemoResult, console: Console) -> None:
    """Print the requests, what the run covered, the control, the start-up report, and the verdict last."""
    tolerance = result.tolerance
    wide = console.width >= _WIDTH_FOR_REASONS
    console.print("\nRequests")
    console.print(_requests_table(result.requests, reasons=wide))
    if not wide:
        for request in result.requests:
            console.print(f"{request.name}:")
            for route in request.routes:
                console.print(f"  {_route_text(route)}")
        console.print()
    for request in result.requests:
        if not request.agrees:
            console.print(f"✗ {request.name}: {request.explanation()}")

    console.print("What the run covered")
    checks = Table(box=SIMPLE_HEAD, show_header=False)
    for check in result.checks:
        checks.add_row("✓" if check.holds else "✗", check.name, check.detail)
    console.print(checks)
    if result.options.control:
        console.print("Control: the attended tokens are deliberately wrong, so the tokens must differ")
        control = [
            (
                one.name,
                f"{one.equal} of {one.tokens}",
                f"{one.max_logprob_error:.1e}",
                "✓" if control_noticed([one]) else "✗",
            )
            for one in result.control
        ]
        console.print(table("", "Request", "Tokens equal", "max |Δlogprob|", "Noticed", rows=control))

    console.print("Start-up report of the plugin, as the server logged it")
    console.print(f"\n{result.startup_report['text']}\n", soft_wrap=True)
    console.print(f"Judged as {result.options.dtype}: {_rule(tolerance)}.")
    console.print(verdict(result))


def _rule(tolerance: ReferenceTolerance) -> str:
    rule = f"a token whose log probability is within {tolerance.margin:g} of the best one's is a tie; "
    if tolerance.logprob is None or tolerance.outlier is None:
        return rule + "log probabilities are reported and not judged"
    return rule + (
        f"log probabilities may differ by {tolerance.logprob:g}, and at {tolerance.outlier_share:.0%} of the "
        f"positions by {tolerance.outlier:g}, because rounding may decide between two tokens with nearly equal scores"
    )


def verdict(result: DemoResult) -> str:
    """One line: whether the run passed."""
    requests = result.requests
    equal, ties, total, outliers = (
        sum(getattr(one, name) for one in requests) for name in ("equal", "ties", "tokens", "outliers")
    )
    worst = max((one.max_logprob_error for one in requests), default=0.0)
    summary = f"{equal} of {total} tokens equal{f' and {_ties(ties)}' if ties else ''}, largest |Δlogprob| {worst:.1e}"
    if outliers:
        summary += f", beyond {result.tolerance.logprob:g} at {outliers} position{'s' * (outliers > 1)}"
    if result.failures:
        return f"✗ FAILED: {'; '.join(result.failures)} ({summary})."
    control = "; wrong attention was noticed in every control request" if result.options.control else ""
    return f"✓ All {len(requests)} requests agree with the reference: {summary}{control}."


def _ties(count: int) -> str:
    return "1 tie" if count == 1 else f"{count} ties"


def _route_text(route: RouteSummary) -> str:
    batches = "1 batch" if route.steps == 1 else f"{route.steps} batches"
    tokens = f"{route.q_tokens} query tokens in {batches}"
    return f"{route.phase}: {route.attention} by {route.provider}, {tokens}; {route.reason}"


def _requests_table(requests: Sequence[ReferenceComparison], *, reasons: bool) -> Table:
    made = Table(box=SIMPLE_HEAD, show_lines=reasons, pad_edge=False, collapse_padding=not reasons)
    made.add_column("Request", no_wrap=True)
    for name in ("Prompt", "Output", "Cached"):
        made.add_column(name, justify="right")
    if reasons:
        made.add_column("Route and reason", ratio=1)
    else:
        made.add_column("Route", no_wrap=True)
    made.add_column("Tokens equal", justify="right")
    made.add_column("max |Δlogprob|", justify="right")
    for one in requests:
        ties = f"\n+ {_ties(one.ties)}" if one.ties else ""
        routes = [_route_text(route) if reasons else f"{route.attention} x{route.steps}" for route in one.routes]
        made.add_row(
            one.name,
            *map(str, (one.prompt_tokens, one.tokens, one.cached_tokens)),
            "\n".join(routes),
            f"{'✓' if one.agrees else '✗'} {one.equal} of {one.tokens}{ties}",
            f"{one.max_logprob_error:.1e}",
        )
    return made


def as_dict(result: DemoResult) -> dict[str, Any]:
    """The report as plain data, for JSON."""
    options = {**asdict(result.options), "work_dir": str(result.options.work_dir)}
    return {
        "schema": SCHEMA,
        "command": "demo",
        "version": __version__,
        "ok": result.ok,
        "verdict": verdict(result),
        "options": options,
        "engine": {
            "name": "vllm",
            "version": result.engine_version,
            "command": list(result.command),
            "start_seconds": round(result.start_seconds, 1),
        },
        "tolerance": asdict(result.tolerance),
        "requests": [_as_dict(one) for one in result.requests],
        "checks": [asdict(check) for check in result.checks],
        "control": {
            "ran": result.options.control,
            "holds": control_noticed(result.control) if result.options.control else None,
            "requests": [_as_dict(one) for one in result.control],
        },
        "startup_report": result.startup_report,
    }


def _as_dict(one: ReferenceComparison) -> dict[str, Any]:
    return {**asdict(one), "output_tokens": one.tokens, "agrees": one.agrees}
