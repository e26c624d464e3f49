"""python -m nsa_plugin.tools.bench.overhead [--json DIR] [--engine ENGINE]: the plugin's CPU time, on any machine.

Measures a decision, a planned step and the entry point. Times are of this machine's CPU; the decisions are those of an
H200 with every kernel library. The record says which CPU; it has no GPU times. With --engine, the entry point is also
called in a process that has imported what this installed engine has by then, off and not enabled.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from nsa_plugin.backends.common.paths import SGLANG
from nsa_plugin.backends.common.planner import Planner
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision import BatchShape, Decider, ModelShape, Phase, decide
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.tools import records

MODEL = ModelShape(num_heads=128, attn_tp_size=8, kv_layout="v32_fp8")


class StepPlanner(Planner):
    """What SGLang's planners do in a decode step."""

    engine = SGLANG


# Prints the milliseconds of the entry point in a fresh interpreter that has what an engine has imported by then.
ENTRY = """
import argparse, dataclasses, inspect, logging, re, time
start = time.perf_counter()
from nsa_plugin.backends.vllm import register
register()
print((time.perf_counter() - start) * 1e3)
"""

# The same beside an installed engine: what it imports before it loads plugins does not count.
BESIDE = """
import contextlib, sys, time
with contextlib.redirect_stdout(sys.stderr):
    import {before}
    start = time.perf_counter()
    from nsa_plugin.backends.{engine} import register
    register()
    took = time.perf_counter() - start
print(took * 1e3)
"""
LOADS_PLUGINS = {"sglang": "sglang.srt.plugins, sglang.srt.server_args", "vllm": "vllm.entrypoints.cli.serve"}
"""Modules of each engine that its server has imported when it loads plugins. More of the engine counts where imported.
vLLM's has imported the worker's base class, which the entry point patches."""


def decode(number: int) -> BatchShape:
    """A decode step of 32 requests; every number gives another context."""
    longest = 4096 + number
    return BatchShape(
        phase=Phase.DECODE,
        num_requests=32,
        num_tokens=32,
        max_kv_len=longest,
        total_kv_len=32 * longest,
        cuda_graph=True,
    )


def prefill(number: int) -> BatchShape:
    """A prefill of two requests; every number gives another length."""
    rows = 4096 + number
    return BatchShape(
        phase=Phase.EXTEND, num_requests=2, num_tokens=rows, max_kv_len=4096 + rows, total_kv_len=8192 + rows
    )


def prompt(number: int) -> SimpleNamespace:
    """vLLM's metadata of a batch of one prompt; every number gives another length."""
    rows = 4096 + number
    return SimpleNamespace(
        num_reqs=1,
        num_actual_tokens=rows,
        query_start_loc_cpu=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([rows], dtype=torch.int32),
    )


def timed(name: str, call: Callable[[int], object], runs: int) -> dict[str, Any]:
    """Microseconds of `call`, which gets the number of its run; the first tenth is not counted."""
    times = []
    for number in range(runs + runs // 10):
        start = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - start) * 1e6)
    counted = times[runs // 10 :]
    return {
        "what": name,
        "p50_us": round(median(counted), 1),
        "p99_us": round(quantiles(counted, n=100)[98], 1),
        "runs": runs,
    }


def entry_point(name: str, code: str, runs: int, **environ: str) -> dict[str, Any]:
    """Milliseconds that a fresh interpreter reports, its own start excluded."""
    times = []
    dropped = ("NSA_PLUGIN_", "PYTHONDONTWRITEBYTECODE")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    with TemporaryDirectory() as compiled:  # as pip leaves a package: compiled
        clean["PYTHONPYCACHEPREFIX"] = compiled
        for _ in range(runs + 1):  # the first compiles
            done = subprocess.run(
                [sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, check=True
            )
            times.append(float(done.stdout.split()[-1]))
    return {"what": name, "p50_ms": round(median(times[1:]), 1), "max_ms": round(max(times[1:]), 1), "runs": runs}


def measure(runs: int, starts: int, engine: str | None = None) -> list[dict[str, Any]]:
    """The rows of a record, with those beside an installed engine."""
    device, settings = synthetic(90), Settings()
    decider = Decider(MODEL, device, settings)
    planner = StepPlanner(MODEL, device, settings)
    planner.step_execution_of(decode(0))
    batches = VllmPlanner(MODEL, device, settings, max_model_len=65536)
    bounds = torch.arange(33, dtype=torch.int32)
    # vLLM makes new metadata for every batch; here it differs in nothing but the tensor.
    steps = [
        SimpleNamespace(query_start_loc_cpu=bounds.clone(), num_actual_tokens=32) for _ in range(runs + runs // 10)
    ]
    prompts = [prompt(number) for number in range(runs + runs // 10)]
    rows = [
        timed("plan of a new shape, decode step", lambda number: decider.decide(decode(number)), runs),
        timed("plan of a new shape, prefill", lambda number: decider.decide(prefill(number)), runs),
        timed(
            "the same by decide() alone, decode step",
            lambda number: decide(MODEL, decode(number), device, settings),
            runs,
        ),
        timed(
            "the same by decide() alone, prefill", lambda number: decide(MODEL, prefill(number), device, settings), runs
        ),
        timed("decode step of a size seen before, SGLang", lambda number: planner.step_again(decode(number)), runs),
        timed("decode steps like the last batch's, vLLM", lambda number: batches.split(steps[number]), runs),
        # The batch's other builders get the same answer without looking again.
        timed("batch of one prompt of a new length, vLLM", lambda number: batches.split(prompts[number]), runs),
    ]
    rows.append(entry_point("vLLM's entry point without vLLM, switched off", ENTRY, starts, NSA_PLUGIN_ENABLED="0"))
    if engine:
        code = BESIDE.format(before=LOADS_PLUGINS[engine], engine=engine)
        rows.append(entry_point(f"entry point in {engine}, not enabled", code, starts))
        rows.append(entry_point(f"entry point in {engine}, switched off", code, starts, NSA_PLUGIN_ENABLED="0"))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the plugin's CPU time, without an engine.")
    parser.add_argument("--runs", type=int, default=5000, help="of each decision (%(default)s)")
    parser.add_argument("--starts", type=int, default=7, help="of each entry point (%(default)s)")
    parser.add_argument("--engine", choices=LOADS_PLUGINS, help="also measure in a process of this installed engine")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write DIR/overhead.json")
    parser.add_argument("--commit", help="source commit, where the source is in no checkout")
    given = parser.parse_args(argv)
    rows = measure(given.runs, given.starts, given.engine)
    for row in rows:
        unit = "us" if "p50_us" in row else "ms"
        worst = row.get("p99_us", row.get("max_ms"))
        print(f"{row['what']:<48} {row[f'p50_{unit}']:>8} {unit}  ({'p99' if unit == 'us' else 'max'} {worst})")
    if given.json:
        host = {"cpu": records.processor(), "python": platform.python_version(), **records.software(given.commit)}
        made = records.head("overhead", "python -m nsa_plugin.tools.bench.overhead", host) | {"rows": rows}
        records.save(made, given.json / "overhead.json")


if __name__ == "__main__":
    main()
