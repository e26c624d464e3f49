"""The benchmark record of a comparison, and how a record is told from those of other commands.

    {"schema": 1, "suite", "command", "date", "kind": "comparison",
     "host": {"gpu", "gpus", "driver", "torch", "triton", "libraries", "commit"},
     "model": {...}, "engine_flags": [...], "tolerance": {...},
     "rows": [{"op": "agreement", "case": {"heads", "kv", ..., "requests"}, "provider", "baseline", "tokens", "equal",
               "parted", "max_gap", "max_error", "mean_error", "rejected", "each": [...]},
              {"op": "serve", "case": {..., "requests", "prompt", "new_tokens", "measure"}, "provider", "median",
               "best", "runs", "baseline", "baseline_median", "baseline_best", "speedup"}],
     "servers": {role: {"command", "start_seconds", "routes", "planned", "active", "settings", "skipped", "error"}},
     "verdict": {"holds", "checks": [{"name", "holds", "detail"}]}}

Times are in milliseconds and throughputs in tokens a second, as `measure` says; `speedup` is above 1 where the plugin
is better. Differences of log probabilities are in nats; null stands for one that is infinite.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa_plugin.bench.record import LIBRARIES, checkout, host_slug, version
from nsa_plugin.compare.load import Load
from nsa_plugin.compare.measured import Measured, Run
from nsa_plugin.compare.rule import AGAIN, PLUGIN, STOCK, Compared, Tolerance, mean
from nsa_plugin.compare.verdict import Verdict
from nsa_plugin.compare.workload import CONCURRENT

SCHEMA = 1
KIND = "comparison"
OURS = "nsa-plugin"


def describe_host(gpu: str, driver: str, gpus: int, commit: str | None) -> dict[str, Any]:
    """The host part, without a look at the GPU: the servers need all of it.

    Args:
        gpu, driver: as nvidia-smi names them; "" without one.
        commit: of the source; None: the checkout's own.
    """
    return {
        "gpu": gpu,
        "gpus": gpus if gpu else 0,
        "driver": driver,
        "torch": version("torch"),
        "triton": version("triton"),
        "libraries": {name: found for name in LIBRARIES if (found := version(name))},
        "commit": checkout() if commit is None else commit,
    }


def as_record(measured: Measured, verdict: Verdict, loads: Sequence[Load], command: Sequence[str]) -> dict[str, Any]:
    """The record of what was measured so far."""
    facts = measured.facts
    case = {"heads": facts["heads"], "kv": facts["kv"], "tp": facts["tp"], "dp": facts["dp"]}
    allowed = verdict.tolerance
    rows = _agreement(verdict.own, case, allowed, provider=STOCK)
    rows += _agreement(verdict.plugin, case, allowed, provider=OURS)
    rows += _agreement(verdict.control, case | {"fault": "shift_indices"}, allowed, provider=OURS)
    rows += _serve(measured, loads, case)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "suite": facts["suite"],
        "command": " ".join(command),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "host": facts["host"],
        "engine": facts["engine"],
        "model": facts["model"],
        "engine_flags": facts["flags"],
        "context": facts["context"],
        "tolerance": {name: round(value, 5) for name, value in asdict(allowed).items()},
        "rows": rows,
        "servers": {role: _server(run) for role, run in measured.runs.items()},
        "verdict": {"holds": verdict.holds, "checks": [asdict(check) for check in verdict.checks]},
    }


def _agreement(compared: Iterable[Compared], case: dict[str, Any], allowed: Tolerance, provider: str) -> list[Any]:
    groups: dict[str, list[Compared]] = {}
    for one in compared:
        groups.setdefault(one.group, []).append(one)
    rows = []
    for group, ones in groups.items():
        rejected = [one for one in ones if not allowed.holds(one)]
        # Where there are many, those that are not as they should be.
        shown = rejected if group.startswith(CONCURRENT) else ones
        gaps = [one.gap for one in ones if one.gap is not None]
        rows.append(
            {
                "op": "agreement",
                "case": {**case, "requests": group},
                "provider": provider,
                "baseline": STOCK,
                "requests": len(ones),
                "tokens": sum(one.tokens for one in ones),
                "equal": sum(one.equal for one in ones),
                "parted": len(gaps),
                "max_gap": _number(max(gaps)) if gaps else None,
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
                        "gap": None if one.gap is None else _number(one.gap),
                        "max_error": _number(one.largest),
                        "mean_error": _number(one.mean),
                        "agrees": allowed.holds(one),
                        **({"problem": one.problem} if one.problem else {}),
                    }
                    for one in shown
                ],
            }
        )
    return rows


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 5) if math.isfinite(value) else None


def _serve(measured: Measured, loads: Sequence[Load], case: dict[str, Any]) -> list[Any]:
    """A row a measure of each load that stock and the plugin were both timed with."""
    stock, plugin, again = (measured.runs.get(role) for role in (STOCK, PLUGIN, AGAIN))
    rows = []
    for load in loads:
        for measure in load.measures:
            ours, theirs, repeated = (
                run.speed.get(load.name, {}).get(measure, []) if run is not None else []
                for run in (plugin, stock, again)
            )
            if not ours or not theirs:
                continue
            higher = measure.endswith("_per_s")
            best = max if higher else min
            ratio = statistics.median(theirs) / statistics.median(ours)
            row = {
                "op": "serve",
                "case": {
                    **case,
                    "requests": load.requests,
                    "prompt": load.prompt,
                    "new_tokens": load.new_tokens,
                    "measure": measure,
                },
                "provider": OURS,
                "median": round(statistics.median(ours), 3),
                "best": round(best(ours), 3),
                "runs": len(ours),
                "baseline": STOCK,
                "baseline_median": round(statistics.median(theirs), 3),
                "baseline_best": round(best(theirs), 3),
                "speedup": round(1 / ratio if higher else ratio, 4),
            }
            if repeated:
                row["baseline_again_median"] = round(statistics.median(repeated), 3)
            rows.append(row)
    return rows


def _server(run: Run) -> dict[str, Any]:
    return {
        "command": run.command,
        "start_seconds": run.start_seconds,
        "error": run.error,
        "skipped": run.skipped,
        **(
            {
                "active": run.active,
                "routes": run.routes,
                "planned": run.planned,
                "settings": run.report.get("settings", {}),
                "report": run.report.get("text", ""),
            }
            if run.report or run.role == PLUGIN
            else {}
        ),
    }


def is_comparison(record: Any) -> bool:
    """Whether a record is one of this command."""
    return isinstance(record, dict) and record.get("kind") == KIND and record.get("schema") == SCHEMA


def write(record: dict[str, Any], folder: Path) -> Path:
    """Write the record whole, or not at all, to FOLDER/<host>/<suite>.json."""
    path = folder / host_slug(record["host"]["gpu"]) / f"{record['suite']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)
    return path


def read(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The records of comparisons in FOLDER/*.json, in the order of their names."""
    records = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return [(path, record) for path, record in records if is_comparison(record)]
