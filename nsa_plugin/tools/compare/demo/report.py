"""The demo's report: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from nsa_plugin import __version__
from nsa_plugin.tools.compare.demo.pipeline import GROUP, DemoResult
from nsa_plugin.tools.compare.demo.trace import RouteSummary
from nsa_plugin.tools.compare.measured import Run
from nsa_plugin.tools.compare.rule import Compared
from nsa_plugin.tools.compare.tolerance import ReferenceTolerance
from nsa_plugin.tools.compare.verdict import tokens_rejected
from nsa_plugin.tools.terminal import table

SCHEMA = 1
# Narrower terminals get the reasons below the table.
_WIDTH_FOR_REASONS = 120


def print_report(result: DemoResult, console: Console) -> None:
    """Print the requests, what the run covered, the control, the start-up report, and the verdict last."""
    tolerance, routes = result.tolerance, {one.name: result.trace.routes(one.name) for one in result.requests}
    wide = console.width >= _WIDTH_FOR_REASONS
    console.print("\nRequests")
    console.print(_requests_table(result, routes, reasons=wide))
    if not wide:
        for name, taken in routes.items():
            console.print(f"{name}:")
            for route in taken:
                console.print(f"  {_route_text(route)}")
        console.print()
    for one in result.verdict.plugin:
        if not tolerance.holds(one):
            console.print(f"✗ {one.name}: {tolerance.explain(one)}")

    console.print("What the run covered")
    checks = Table(box=SIMPLE_HEAD, show_header=False)
    for check in result.coverage:
        checks.add_row("✓" if check.holds else "✗", check.name, check.detail)
    console.print(checks)
    if result.options.control:
        console.print("Control: the attended tokens are deliberately wrong, so the tokens must differ")
        control = [
            (
                one.name,
                f"{one.equal} of {one.tokens}",
                f"{one.largest:.1e}",
                "✓" if tokens_rejected(one, tolerance) else "✗",
            )
            for one in result.verdict.controls[""]
        ]
        console.print(table("", "Request", "Tokens equal", "max |Δlogprob|", "Noticed", rows=control))

    console.print("Start-up report of the plugin, as the server logged it")
    console.print()
    for line in result.plugin.report["text"].splitlines():
        text = line.lstrip()
        console.print(Padding.indent(text, 2 * (len(line) - len(text))))
    console.print()
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
    requests, tolerance = result.verdict.plugin, result.tolerance
    equal, total = sum(one.equal for one in requests), sum(one.tokens for one in requests)
    ties, outliers = sum(map(tolerance.ties, requests)), sum(map(tolerance.outliers, requests))
    worst = max((one.largest for one in requests), default=0.0)
    summary = f"{equal} of {total} tokens equal{f' and {_ties(ties)}' if ties else ''}, largest |Δlogprob| {worst:.1e}"
    if outliers:
        summary += f", beyond {tolerance.logprob:g} at {outliers} position{'s' * (outliers > 1)}"
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


def _requests_table(result: DemoResult, routes: Mapping[str, Sequence[RouteSummary]], *, reasons: bool) -> Table:
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
    answers, tolerance = result.plugin.answers[GROUP], result.tolerance
    for one in result.verdict.plugin:
        tied = tolerance.ties(one)
        ties = f"\n+ {_ties(tied)}" if tied else ""
        taken = [_route_text(route) if reasons else f"{route.attention} x{route.steps}" for route in routes[one.name]]
        made.add_row(
            one.name,
            *map(str, (one.prompt, one.tokens, answers[one.name].cached_tokens)),
            "\n".join(taken),
            f"{'✓' if tolerance.holds(one) else '✗'} {one.equal} of {one.tokens}{ties}",
            f"{one.largest:.1e}",
        )
    return made


def as_dict(result: DemoResult) -> dict[str, Any]:
    """The report as plain data, for JSON."""
    options = {**asdict(result.options), "work_dir": str(result.options.work_dir)}
    control, tolerance = result.verdict.controls[""], result.tolerance
    noticed = bool(control) and all(tokens_rejected(one, tolerance) for one in control)
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
            "start_seconds": result.plugin.start_seconds,
        },
        "tolerance": asdict(tolerance),
        "requests": [
            _as_dict(one, result, result.plugin, result.trace.routes(one.name)) for one in result.verdict.plugin
        ],
        "checks": [asdict(check) for check in result.coverage],
        "control": {
            "ran": result.options.control,
            "holds": noticed if result.options.control else None,
            "requests": [_as_dict(one, result, result.control) for one in control],
        },
        "startup_report": result.plugin.report,
    }


def _as_dict(one: Compared, result: DemoResult, run: Run, routes: Sequence[RouteSummary] = ()) -> dict[str, Any]:
    tolerance, answer = result.tolerance, run.answers[GROUP][one.name]
    return {
        "name": one.name,
        "purpose": next(request.purpose for request in result.requests if request.name == one.name),
        "prompt_tokens": one.prompt,
        "cached_tokens": answer.cached_tokens,
        "seconds": round(answer.seconds, 3),
        "routes": [asdict(route) for route in routes],
        "tokens": one.tokens,
        "output_tokens": one.tokens,
        "equal": one.equal,
        "ties": tolerance.ties(one),
        "outliers": tolerance.outliers(one),
        "max_logprob_error": one.largest,
        "wrong": [asdict(at) for at in tolerance.wrong(one)],
        "problem": one.problem,
        "agrees": tolerance.holds(one),
    }
