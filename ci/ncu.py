"""``python -m ci.ncu``: what limits the kernels that miss a goal, measured by Nsight Compute (ncu).

A point is a case of a bench suite and a provider. For each, ncu runs this module with ``--inside``: it makes the case's
inputs, calls the kernel until it is compiled, and lets ncu profile one call. ncu holds the clocks at their base
and empties the caches before each of several replays, so a time here is longer than one of `nsa-plugin bench`.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.rows import ROOT
from nsa_plugin.libraries.architectures import EMULATED
from nsa_plugin.tools import records
from nsa_plugin.tools.bench.cases import SUITES, BenchCase, Suite, Value
from nsa_plugin.tools.bench.record import PORTABLE
from nsa_plugin.tools.pages.markdown import markdown_table

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
    "Occupancy", "LaunchStats",
)  # fmt: skip
MOST_LAUNCHES = 24  # of one call that are profiled
LEAST_PERCENT = 5  # of a call's time, below which a kernel is not listed
TOP_STALLS = 3
METRICS = {
    "duration_us": ("gpu__time_duration.sum", 1e-3),
    "sm_ghz": ("gpc__cycles_elapsed.avg.per_second", 1e-9),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "l1_percent": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1.0),
    "l2_percent": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "shared_kib": ("launch__shared_mem_per_block", 2**-10),
    "blocks": ("launch__grid_size", 1.0),
    "waves": ("launch__waves_per_multiprocessor", 1.0),
}
"""The field of a row: ncu's metric, and what its base unit is multiplied by."""
SPILLING, EXECUTED = "sass__inst_executed_register_spilling", "inst_executed"
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")


@dataclass(frozen=True)
class Point:
    """A case of a suite, by some of its fields, and the provider that runs it.

    A suite's name may begin with `PORTABLE`: the kernel then runs as on SM86, as with `nsa-plugin bench --portable`.
    """

    suite: str
    provider: str
    fields: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        return "-".join((self.suite, self.provider, *(f"{name}{value}" for name, value in self.fields)))

    def of(self) -> Suite:
        """The suite that has the case."""
        return SUITES[self.suite.removeprefix(PORTABLE)]

    def case(self) -> BenchCase:
        """The suite's first case with these fields."""
        return next(case for case in self.of().cases if dict(self.fields).items() <= case.as_dict().items())


def point(suite: str, provider: str, **fields: Value) -> Point:
    return Point(suite, provider, tuple(fields.items()))


RECORD = ROOT / "docs" / "profiles.json"
"""Profiles that the page shows."""
OTHERS = ROOT / "docs" / "profiles-h100.json"
"""Profiles of another GPU, of which the page shows the cases that RECORD lacks."""
EMULATING = ROOT / "docs" / "profiles-portable.json"
"""Profiles of the portable path."""
POINTS = (
    *(point("sparse-mla-decode", "cuda", heads=16, batch=batch) for batch in (1, 8, 32, 128)),
    point("sparse-mla-decode", "cuda", heads=8, batch=128),
    *(point("sparse-mla-prefill", "cuda", heads=heads, q=4096, kv=65536) for heads in (8, 16, 32, 64)),
    *(point("sparse-mla-prefill", "triton", heads=heads, q=4096, kv=65536) for heads in (64, 128)),
    point("sparse-mla-prefill-bf16", "cuda", heads=16, q=4096, kv=65536),
    point("sparse-mla-decode-bf16", "cuda", heads=16, batch=128),
    point("indexer-topk", "cuda", heads=64, q=8192, kv=131072),
    *(point(f"{PORTABLE}sparse-mla-prefill", "cuda", heads=heads, q=4096, kv=65536) for heads in (16, 64)),
)


def rows_of(table: str) -> list[dict[str, Any]]:
    """The kernels of one call that take most of its time, from ncu's raw page as CSV, in the order of their launch.

    Raises:
        ValueError: the table has no kernel.
        KeyError: it lacks a metric of `METRICS`.
    """
    start = table.find('"ID"')
    if start < 0:
        raise ValueError(f"ncu profiled no kernel: {table.strip()[-400:]}")
    launches = list(csv.DictReader(io.StringIO(table[start:])))[1:]  # the first row has the units
    rows = [_row(launch) for launch in launches]
    total = sum(row["duration_us"] for row in rows)
    same: dict[str, dict[str, Any]] = {}
    for row in rows:
        first = same.setdefault(row["kernel"], row | {"launches": 0, "total_us": 0.0})
        first["launches"] += 1
        first["total_us"] = round(first["total_us"] + row["duration_us"], 1)
        if row["duration_us"] > first["duration_us"]:  # the longest launch speaks for a kernel
            first |= row
    for row in same.values():
        row["share_percent"] = round(100 * row["total_us"] / total, 1)
    return [row for row in same.values() if row["share_percent"] >= LEAST_PERCENT]


def _row(launch: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in launch.items():
        try:
            values[name] = float((text or "").replace(",", ""))
        except ValueError:
            continue
    row: dict[str, Any] = {"kernel": launch["Kernel Name"].split("(")[0]}
    for field, (name, scale) in METRICS.items():
        row[field] = round(values[name] * scale, 1)
    row["spilling_percent"] = round(100 * values[SPILLING] / values[EXECUTED], 1)
    stalls = {match[1]: value for name, value in values.items() if (match := STALL.fullmatch(name))}
    total = sum(stalls.values())
    most = sorted(stalls, key=stalls.__getitem__, reverse=True)[:TOP_STALLS]
    row["waits"] = {name: round(100 * stalls[name] / total) for name in most} if total else {}
    return row


def profile(one: Point, folder: Path) -> str:
    """ncu's table of a point; measured unless `folder` has it."""
    kept = folder / f"{one}.csv"
    if not kept.exists():
        command = [
            *("ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"),
            *(word for section in SECTIONS for word in ("--section", section)),
            *("--launch-count", str(MOST_LAUNCHES), "--force-overwrite", "--log-file", str(kept.with_suffix(".part"))),
            *(sys.executable, "-m", "ci.ncu", "--inside", str(one)),
        ]
        subprocess.run(command, check=True)
        kept.with_suffix(".part").rename(kept)
    return kept.read_text()


def inside(one: Point) -> None:
    """Call the point's provider, and have ncu profile the last call."""
    import torch

    from nsa_plugin.kernels.triton.device import emulate
    from nsa_plugin.libraries.registry import Registry
    from nsa_plugin.tools.bench.workload import Context

    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    if one.suite.startswith(PORTABLE):
        sm = EMULATED
        emulate(sm)
    context = Context(torch.device("cuda"), sm, Registry(), [one.provider])
    workload = one.of().build()(one.case(), context)
    call = next(contender for contender in workload.contenders if contender.name == one.provider).load()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def table(path: Path = RECORD, *, besides: Path | None = None) -> str:
    """The record's kernels, one a line; not those of cases that the record `besides` has."""
    record = json.loads(path.read_text())
    known = [_place(row) for row in json.loads(besides.read_text())["rows"]] if besides else []
    lines = []
    for row in record["rows"]:
        if _place(row) in known:
            continue
        case = row["case"]
        waits = ", ".join(f"{name.replace('_', ' ')} {share}%" for name, share in row["waits"].items())
        size = f"batch {case['batch']}" if "batch" in case else f"q {case['q']}"
        shares = [f"{row[f'{name}_percent']:.0f}%" for name in SHARES]
        what = f"{row['suite']}, {row['provider']}, heads {case['heads']}, {size}, kv {case['kv']}"
        time = f"{row['total_us']:,.0f} at {row['sm_ghz']} GHz"
        counts = [f"{row[name]:.0f}" for name in ("blocks", "registers")]
        lines.append([what, f"`{row['kernel']}`", time, *counts, *shares, waits])
    header = ["case", "kernel", "µs", "blocks", "registers", *SHARES.values(), "where its warps are"]
    return markdown_table(header, lines)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["suite"], row["provider"], row["case"]


SHARES = {
    "tensor": "tensor cores",
    "issue": "issue slots",
    "l1": "L1",
    "l2": "L2",
    "dram": "memory",
    "occupancy": "occupancy",
}
"""Shares of a row that the page shows, and their columns."""


def host(folder: Path, commit: str | None) -> dict[str, Any]:
    """This host as a record describes it; as the tables in `folder` were made, if it has them."""
    kept = folder / "host.json"
    if not kept.exists():
        import torch

        found = {"gpu": torch.cuda.get_device_name(), "gpus": 1, **records.software(commit)}
        kept.write_text(json.dumps(found))
    described: dict[str, Any] = json.loads(kept.read_text())
    return described


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ci.ncu", description="Profile the points that miss a goal.")
    parser.add_argument("--work-dir", type=Path, default=Path("ncu-work"), help="keeps ncu's tables (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--commit", help="source commit, where the source is in no checkout")
    parser.add_argument("--only", metavar="TEXT", default="", help="points whose name has it (all)")
    parser.add_argument("--inside", metavar="POINT", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    named = {str(one): one for one in POINTS}
    if given.inside:
        return inside(named[given.inside])
    given.work_dir.mkdir(parents=True, exist_ok=True)
    described, rows, failed = host(given.work_dir, given.commit), [], []
    for name, one in named.items():
        if given.only not in name:
            continue
        try:
            found = rows_of(profile(one, given.work_dir))
        except FileNotFoundError as error:
            sys.exit(f"{error.filename} is not installed: it comes with NVIDIA's CUDA toolkit and with Nsight Compute")
        except (subprocess.CalledProcessError, ValueError, KeyError) as error:
            failed.append(f"{name}: {error}")
            continue
        print(name, *(f"  {row}" for row in found), sep="\n", flush=True)
        about = {"suite": one.suite, "case": one.case().as_dict(), "provider": one.provider}
        rows += [about | row for row in found]
    if given.json and rows:
        made = records.head("profiles", "python -m ci.ncu", described) | {"rows": rows, "failed": failed}
        records.save(made, given.json)
    if failed:
        sys.exit("\n".join(failed))
    return None


if __name__ == "__main__":
    main()
