"""The benchmark record of a comparison.

    {"schema": 1, "suite", "command", "date", "kind": "comparison",
     "host": {"gpu", "gpus", "driver", "cpus", "torch", "triton", "libraries", "commit"},
     "engine", "model": {...}, "engine_flags": [...], "context", "left_out": {load: why},
     "timed": "in turns" | "one after the other" | null, "tolerance": {...},
     "rows": [{"op": "agreement", "case": {"heads", "kv", ..., "requests"}, "provider", "baseline", "tokens", "equal",
               "parted", "max_gap", "max_error", "mean_error", "rejected", "each": [...]},
              {"op": "serve", "case": {..., "requests", "prompt", "new_tokens", "measure", "in_one", "long",
                                          "turns"},
               "provider", "median", "q1", "q3", "best", "runs",
               "baseline", "baseline_median", "baseline_q1", "baseline_q3", "baseline_best", "baseline_runs",
               "speedup", "paired_speedup", "baseline_again_median", "baseline_again_q1", ...,
               "baseline_again_speedup", "baseline_again_paired_speedup",
               "again_median", "again_q1", ..., "again_speedup", "again_paired_speedup"},
              {"op": "limit", "case", "provider", "answered", "failed_at", "error", "baseline", "baseline_answered",
               "baseline_failed_at", "baseline_error"}],
     "servers": {role: {"command", "start_seconds", "routes", "planned", "combined", "resharded", "built_late",
                        "active", "settings", "skipped", "fell", "error"}},
     "verdict": {"holds", "checks": [{"name", "holds", "detail"}]}}

A suite's name has the engine, the model, and what differs from the defaults: engine flags, then plugin settings. Times
are in milliseconds and throughputs in tokens a second, as `measure` says; q1 and q3 are the quartiles over the
repetitions. `speedup`, the ratio of the medians, is above 1 if the plugin is better. `paired_speedup` exists if servers
were timed in turns: the median over the repetitions of the ratio of the two readings. Keys that begin with
`baseline_again` belong to a second stock server, and those that begin with `again` to a second one with the plugin;
their speed-ups are over the first stock server. Differences of log probabilities are in nats; null stands for infinity.
A `limit` row is about longer and longer prompts: those that were answered, and the first that was not (null without
one).

A cross-engine record (`cross_engine`) has the same form, only agreement rows, and the keys "beside", "checkpoint" and
"requests".
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_plugin.settings import Settings
from nsa_plugin.tools import records
from nsa_plugin.tools.compare.load import SpeedLoad, left_out
from nsa_plugin.tools.compare.measured import AGAIN, PLUGIN, PLUGIN_AGAIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.rule import Compared, mean
from nsa_plugin.tools.compare.tolerance import Tolerance
from nsa_plugin.tools.compare.verdict import Verdict, climb
from nsa_plugin.tools.compare.workload import CONCURRENT, LIMIT
from nsa_plugin.tools.records import Row

KIND = "comparison"
OURS = "nsa-plugin"
IN_TURNS, ONE_AFTER_THE_OTHER = "in turns", "one after the other"
# Settings that change no decision, or that the comparison sets itself.
_NOT_DECIDED_BY = ("enabled", "strict", "trace", "report", "fault")
# Options that name local paths, and the commit, which the host part has.
_WHERE = ("--workdir", "--logs", "--json", "--commit", "--measured", "--beside")
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^/\s'\"]+/)+")


def describe_host(gpu: str, driver: str, gpus: int, commit: str | None) -> dict[str, Any]:
    """The host part, without using the GPU: the servers need all of its memory.

    Args:
        gpu, driver: as nvidia-smi reports them; "" without one.
        commit: source commit; None: read it from the checkout.
    """
    cpus = len(os.sched_getaffinity(0))  # that the servers may run on, as this process may
    return {"gpu": gpu, "gpus": gpus if gpu else 0, "driver": driver, "cpus": cpus, **records.software(commit)}


def as_record(measured: Measured, verdict: Verdict, loads: Sequence[SpeedLoad]) -> dict[str, Any]:
    """The record of the measurements so far."""
    case = case_of(measured)
    rows = [*agreement_rows(verdict, case, STOCK), *_limit(measured, case), *_serve(measured, loads, case)]
    return {
        **head(measured),
        "left_out": left_out(measured.facts["context"], measured.asked["cases"]),
        "timed": _timed(measured),
        **judged(verdict, rows, servers(measured)),
    }


def judged(verdict: Verdict, rows: list[Row], servers: dict[str, Any]) -> dict[str, Any]:
    """The part of a record with its results."""
    return {
        "tolerance": {name: round(value, 5) for name, value in asdict(verdict.tolerance).items()},
        "rows": rows,
        "servers": servers,
        "verdict": {"holds": verdict.holds, "checks": [asdict(check) for check in verdict.checks]},
    }


def head(measured: Measured) -> dict[str, Any]:
    """The part of a record that describes the comparison, without its results."""
    facts = measured.facts
    given = _given(measured)
    words = [f"{name}-{value}".replace("_", "-") for name, value in given.items()]
    environ = [f"NSA_PLUGIN_{name.upper()}={value}" for name, value in given.items()]
    command = shlex.join([*environ, *records.portable(shlex.split(facts["command"]), _WHERE)])
    return {
        **records.head("-".join([facts["suite"], *words]), command, facts["host"]),
        "kind": KIND,
        "engine": facts["engine"],
        "model": facts["model"],
        "engine_flags": facts["flags"],
        "context": facts["context"],
    }


def is_named(measured: Measured) -> bool:
    """Whether the record's name is known: the plugin's server reports the settings in it once it is up."""
    run = measured.runs.get(PLUGIN)
    return PLUGIN not in measured.asked["runs"] or (run is not None and (bool(run.report) or bool(run.error)))


def case_of(measured: Measured) -> dict[str, Any]:
    """The part of `case` that all rows of a record share."""
    return {name: measured.facts[name] for name in ("heads", "kv", "tp", "dp")}


def _given(measured: Measured) -> dict[str, Any]:
    """Settings of the plugin's server that affect decisions and differ from the defaults, by name."""
    run = measured.runs.get(PLUGIN)
    settings = {} if run is None else run.report.get("settings", {})
    usual = asdict(Settings())
    return {name: value for name, value in settings.items() if name not in _NOT_DECIDED_BY and value != usual.get(name)}


def agreement_rows(verdict: Verdict, case: dict[str, Any], baseline: str) -> list[Row]:
    """A row for each group of requests of each comparison in the verdict; `baseline` is the plugin's counterpart."""
    sides: list[tuple[Sequence[Compared], dict[str, str], str, str]] = [
        (verdict.own, {}, STOCK, STOCK),
        (verdict.plugin, {}, OURS, baseline),
    ]
    for engine, control in verdict.controls.items():
        wrong = {"fault": "shift_indices", **({"control": engine} if engine else {})}
        sides.append((control, wrong, OURS, baseline))
    return [
        {
            "op": "agreement",
            "case": {**case, **more, "requests": group},
            "provider": provider,
            "baseline": against,
            **_agreement(group, [one for one in compared if one.group == group], verdict.tolerance),
        }
        for compared, more, provider, against in sides
        for group in dict.fromkeys(one.group for one in compared)
    ]


def _agreement(group: str, ones: Sequence[Compared], allowed: Tolerance) -> Row:
    rejected = [one for one in ones if not allowed.holds(one)]
    gaps = [one.gap for one in ones if one.gap is not None]
    return {
        "requests": len(ones),
        "tokens": sum(one.tokens for one in ones),
        "equal": sum(one.equal for one in ones),
        "parted": len(gaps),
        "max_gap": _number(max(gaps, default=None)),
        "positions": sum(one.positions for one in ones),
        "max_error": _number(max(one.largest for one in ones)),
        "mean_error": _number(mean(ones)),
        "rejected": len(rejected),
        "each": [
            {
                "name": one.name,
                "prompt": one.prompt,
                "tokens": one.tokens,
                "equal": one.equal,
                "gap": _number(one.gap),
                "max_error": _number(one.largest),
                "mean_error": _number(one.mean),
                "agrees": allowed.holds(one),
                **({"problem": one.problem} if one.problem else {}),
            }
            # The concurrent requests are many: only the rejected ones.
            for one in (rejected if group.startswith(CONCURRENT) else ones)
        ],
    }


def _limit(measured: Measured, case: dict[str, Any]) -> list[Row]:
    """The row for prompts that were meant to make stock fail, if there were any."""
    if LIMIT not in measured.prompts:
        return []
    climbs = (climb(measured, PLUGIN), climb(measured, STOCK))
    ours, theirs = (asdict(one) | {"error": _nameless(one.error)} for one in climbs)
    row = {"op": LIMIT, "case": {**case, "requests": LIMIT}, "provider": OURS, **ours, "baseline": STOCK}
    return [row | _named("baseline", theirs)]


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return round(value, 5) if value is not None and math.isfinite(value) else None


def _timed(measured: Measured) -> str | None:
    if not any(run.speed for run in measured.runs.values()):
        return None
    return IN_TURNS if measured.together else ONE_AFTER_THE_OTHER


def _serve(measured: Measured, loads: Sequence[SpeedLoad], case: dict[str, Any]) -> list[Row]:
    """A row for each measure of each load that both stock and the plugin were timed with."""
    rows = []
    for load in loads:
        for measure in load.measures:
            ours, theirs, *repeated = (
                measured.runs[role].speed.get(load.name, {}).get(measure, []) if role in measured.runs else []
                for role in (PLUGIN, STOCK, AGAIN, PLUGIN_AGAIN)
            )
            if not ours or not theirs:
                continue
            higher = measure.endswith("_per_s")
            what = {"requests": load.requests, "prompt": load.prompt, "new_tokens": load.new_tokens, "measure": measure}
            what |= {"in_one": True} if load.in_one else {}
            what |= {"long": load.long} if load.long else {}
            what |= {"turns": list(load.turns)} if load.turns else {}
            row = {
                "op": "serve",
                "case": {**case, **what},
                "provider": OURS,
                **_summary(ours, higher),
                "baseline": STOCK,
                **_named("baseline", _summary(theirs, higher)),
                **_speedups(ours, theirs, higher, paired=measured.together),
            }
            for name, readings in zip(("baseline_again", "again"), repeated, strict=True):
                if readings:
                    row |= _named(name, _summary(readings, higher))
                    row |= _named(name, _speedups(readings, theirs, higher, paired=measured.together))
            rows.append(row)
    return rows


def _summary(values: Sequence[float], higher: bool) -> dict[str, float]:
    """Statistics of a server's repetitions.

    Args:
        higher: whether more is better.
    """
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    shown = {"median": median, "q1": q1, "q3": q3, "best": max(values) if higher else min(values)}
    return {name: round(value, 3) for name, value in shown.items()} | {"runs": len(values)}


def _speedups(ours: Sequence[float], theirs: Sequence[float], higher: bool, *, paired: bool) -> dict[str, float]:
    def speedup(our: float, their: float) -> float:
        return our / their if higher else their / our

    found = {"speedup": speedup(statistics.median(ours), statistics.median(theirs))}
    if paired:
        # A server that failed during a load has fewer readings; equal positions are the same repetition.
        pairs = zip(ours, theirs, strict=False)
        found["paired_speedup"] = statistics.median(speedup(our, their) for our, their in pairs)
    return {name: round(value, 4) for name, value in found.items()}


def _named(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _nameless(text: str) -> str:
    """The text with only the last part of each absolute path."""
    return _FOLDERS.sub("", text)


def servers(measured: Measured) -> dict[str, Any]:
    """The part of a record about each server, by role."""
    return {role: _server(run) for role, run in measured.runs.items()}


def _server(run: Run) -> dict[str, Any]:
    made = {"command": _nameless(run.command), "start_seconds": run.start_seconds, "error": _nameless(run.error)}
    made |= {"fell": _nameless(run.fell)} if run.fell else {}
    made |= {"skipped": run.skipped}
    if run.report or run.role in (PLUGIN, PLUGIN_AGAIN):
        settings = run.report.get("settings", {})
        made |= {"active": run.active, "routes": run.routes, "planned": run.planned}
        made |= {"combined": run.combined} if run.combined else {}
        made |= {"resharded": run.resharded} if run.resharded else {}
        made |= {} if run.built_late is None else {"built_late": run.built_late}
        made["settings"] = {name: _nameless(one) if isinstance(one, str) else one for name, one in settings.items()}
        made["report"] = _nameless(run.report.get("text", ""))
    return made


def is_comparison(record: Any) -> bool:
    """Whether a record was made by this command."""
    return isinstance(record, dict) and record.get("kind") == KIND and record.get("schema") == records.SCHEMA


def write(record: dict[str, Any], folder: Path) -> Path:
    """Write the record whole, or not at all, to FOLDER/<host>/<suite>.json."""
    path = records.path_of(record, folder)
    records.save(record, path)
    return path


def read(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The comparison records in FOLDER/<host>/*.json, sorted by host and name."""
    records = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]
    return [(path, record) for path, record in records if is_comparison(record)]
