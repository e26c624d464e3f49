"""Run every contender of every case: each is refused, fails, or is measured and judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.libraries.registry import RegistryError
from nsa_plugin.tools.bench.cases import BenchCase, BenchError, Suite
from nsa_plugin.tools.bench.floors import Rates, floor_us, gather_us
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.timing import Timer, Timing
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, WrongResultError

# Errors that mean "this case is not supported"; any other error is a failure.
REFUSALS = (KernelArgumentError, NoProviderError, RegistryError, ImportError)

_LONGEST_SECONDS = 0.2  # of one contender of one case


@dataclass(frozen=True)
class BenchOptions:
    """How much to measure.

    Attributes:
        seconds: for the suite, without compilation; cases beyond it are listed.
        runs: of each contender; None: as many as fit.
    """

    seconds: float = 60.0
    runs: int | None = None


def run_suite(
    suite: Suite,
    cases: tuple[BenchCase, ...],
    context: Context,
    timer: Timer,
    rates: Rates,
    options: BenchOptions,
    *,
    update: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Measure `cases` of a suite.

    Args:
        update: called with the current position.
        clock: in seconds; limits the run to `options.seconds`.

    Raises:
        BenchError: a case's inputs cannot be made, so there is nothing to measure.
    """
    outcome, build = Outcome(), suite.build()
    began, compiling = clock(), 0.0
    for position, case in enumerate(cases):
        if clock() - began - compiling > options.seconds:
            outcome.skipped += cases[position:]
            break
        update(f"{position + 1} of {len(cases)}: {case}")
        try:
            workload = build(case, context)
        except RuntimeError as error:  # out of memory, or a device that an earlier kernel has broken
            raise BenchError(f"{case}: its inputs cannot be made: {_first_line(error)}") from error
        measured = []
        for contender in workload.contenders:
            update(f"{position + 1} of {len(cases)}: {case}: {contender.name}")
            row, first_call = _measure(case, workload, contender, timer, rates, options, outcome, clock)
            compiling += first_call
            measured += [row] if row else []
        outcome.rows += _compared(measured, workload.baselines)
    context.forget()
    return outcome


def _measure(
    case: BenchCase,
    workload: Workload,
    contender: Contender,
    timer: Timer,
    rates: Rates,
    options: BenchOptions,
    outcome: Outcome,
    clock: Callable[[], float],
) -> tuple[dict[str, Any] | None, float]:
    """(the row, or None if there is none; seconds of loading and the first call)."""
    about = {"op": case.op, "case": case.as_dict(), "provider": contender.name}
    judge = contender.judge or workload.judge
    began = clock()
    try:
        call = contender.load()
        result = call()
        first_call = clock() - began
    except REFUSALS as error:
        outcome.refused.append(about | {"reason": _first_line(error)})
        return None, clock() - began
    except Exception as error:  # a library's error must not stop the other contenders
        outcome.failed.append(about | {"reason": f"{type(error).__name__}: {_first_line(error)}"})
        return None, clock() - began
    try:
        largest = judge(result)
        del result
        extra = _extra_mib(contender, call, timer) if workload.memory else None
        timing = timer.time(call, graph=workload.graph, seconds=_LONGEST_SECONDS, runs=options.runs)
        # Judge again after many runs in a row: a race shows here.
        largest = max(largest, judge(timing.result))
        extra_time = _time_extra(contender, timer, options)
    except WrongResultError as wrong:
        outcome.failed.append(about | {"reason": f"wrong result: {wrong}"})
        return None, first_call
    except RuntimeError as failure:
        outcome.failed.append(about | {"reason": f"{type(failure).__name__}: {_first_line(failure)}"})
        return None, first_call
    row = about | _timed(timing, contender.work or workload.work, rates)
    if extra is not None:
        row["extra_mib"] = round(extra, 1)
    return row | extra_time | {"max_error": _rounded(largest)}, first_call


def _extra_mib(contender: Contender, call: TimedCall, timer: Timer) -> float:
    """MiB that a contender needs besides the case's inputs and output, including what it keeps between calls."""
    return timer.extra_mib(call) + (contender.kept_bytes(call) - contender.output_bytes) / 2**20


def _timed(timing: Timing, work: Any, rates: Rates) -> dict[str, Any]:
    fields = {
        "median_us": _rounded(timing.median_us),
        "min_us": _rounded(timing.min_us),
        "runs": timing.runs,
        "timing": timing.how,
        "floor_us": _rounded(floor_us(work, rates)),
    }
    if work.flops:
        fields["tflops"] = _rounded(work.flops / timing.median_us * 1e-6)
    gathered = gather_us(work, rates)
    return fields if gathered is None else fields | {"gather_us": _rounded(gathered)}


def _time_extra(contender: Contender, timer: Timer, options: BenchOptions) -> dict[str, Any]:
    if contender.extra_call is None:
        return {}
    name, call = contender.extra_call
    timing = timer.time(call, graph=False, seconds=_LONGEST_SECONDS / 4, runs=options.runs)
    return {name: _rounded(timing.median_us)}


def _compared(rows: list[dict[str, Any]], baselines: tuple[str, ...]) -> list[dict[str, Any]]:
    """Add the first measured baseline to each row; without one the three fields are None."""
    by_name = {row["provider"]: row for row in rows}
    baseline = next((name for name in baselines if name in by_name), None)
    for row in rows:
        time_us = by_name[baseline]["median_us"] if baseline else None
        row["baseline"] = baseline
        row["baseline_us"] = time_us
        row["speedup"] = round(time_us / row["median_us"], 3) if time_us else None
    return rows


def _rounded(value: float) -> float:
    """Four significant digits: two runs do not agree on more."""
    return float(f"{value:.4g}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
