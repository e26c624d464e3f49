"""The record of a soak, and its table of 80 columns."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ci.rows import ROOT
from ci.soak.judge import MIB, OBJECTS, PRESSURE, plugin_objects, quantile
from ci.soak.measured import End, Kind, Sample, Soak
from ci.soak.run import Finished, Options
from nsa_plugin.tools import records
from nsa_plugin.tools.compare.verdict import Check
from nsa_plugin.tools.pages.markdown import markdown_table
from nsa_plugin.tools.terminal import table

RECORDS = ROOT / "docs" / "soak"
_POINTS = 120  # of memory in a record


def as_record(finished: Finished, options: Options, checks: Sequence[Check], command: Sequence[str]) -> dict[str, Any]:
    """The soak as data for JSON: figures and checks, without the single requests."""
    soak = finished.soak
    step = max(1, len(soak.memory) // _POINTS)
    return {
        "schema": 1,
        "kind": "soak",
        "ok": not finished.problem and all(check.holds for check in checks),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(command),
        "engine": f"{options.setup.engine.name} {finished.version}",
        "server": [word for word in finished.command[1:] if not word.startswith("/")],
        "host": {"processor": records.processor(), "cores": os.cpu_count(), **records.software(options.commit)},
        "minutes": soak.minutes,
        "seed": options.seed,
        "start_seconds": round(finished.start_seconds, 1),
        "problem": finished.problem,
        "checks": [asdict(check) for check in checks],
        "requests": {kind: dict(counts) for kind, counts in outcomes(soak).items()},
        "latency_s": latencies(soak),
        "preemptions": soak.preemptions,
        "routes": dict(soak.routes),
        "probes": {
            "compared": len(soak.repeats),
            "tokens": sum(one.tokens for one in soak.repeats),
            "same": sum(one.same for one in soak.repeats),
            "max_logprob_error": max((one.logprob_error for one in soak.repeats), default=None),
            "split": [asdict(one) for one in soak.repeats if one.same < one.tokens],
        },
        "memory": [asdict(one) for one in soak.memory[::step]],
        "ending": vars(soak.ending) | {"in_flight": dict(soak.ending.in_flight)} if soak.ending else None,
    }


def outcomes(soak: Soak) -> dict[Kind, Counter[str]]:
    """Requests by kind and by how they ended."""
    found: dict[Kind, Counter[str]] = {}
    for one in soak.sent:
        found.setdefault(one.kind, Counter())[str(one.end)] += 1
    return {kind: found[kind] for kind in Kind if kind in found}


def latencies(soak: Soak) -> dict[str, dict[str, float]]:
    """Median, 99th percentile and largest latency in seconds of answered requests."""
    answered = [one for one in soak.sent if one.end is End.ANSWERED]
    values = {
        "answer": [one.seconds for one in answered],
        "first token of a stream": [one.first_token for one in answered if one.first_token],
        "refusal": [one.seconds for one in soak.sent if one.end is End.REFUSED],
    }
    return {
        name: {"p50": quantile(given, 0.5), "p99": quantile(given, 0.99), "max": max(given)}
        for name, given in values.items()
        if given
    }


def runs_table(folder: Path = RECORDS) -> str:
    """The recorded runs, for docs/soak.md."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        sent: Counter[str] = Counter()
        for counts in record["requests"].values():
            sent.update(counts)
        probes, ending = record["probes"], record["ending"]
        rows.append(
            [
                f"{record['engine']}, {record['minutes']:g} minutes",
                _verdict(record),
                ", ".join(f"{count} {end}" for end, count in sent.most_common()),
                "none counted" if record["preemptions"] is None else str(record["preemptions"]),
                f"{probes['same']} of {probes['tokens']}",
                _range([one["rss"] for one in record["memory"]]),
                f"ended after {ending['seconds']:g} s, {len(ending['left'])} processes left",
                f"[record](soak/{path.name}), {record['date']}",
            ]
        )
    header = ["run", "checks", "requests", "preemptions", "tokens the same", "host memory", "worker killed", "record"]
    return markdown_table(header, rows)


def _verdict(record: dict[str, Any]) -> str:
    """How a run was judged, and which checks that have changed since judge it otherwise.

    That of cache pressure passed a server whose counter of preemptions had no sample, which SGLang's has only after the
    first. That of the plugin's objects compared medians, whatever the garbage collector had not yet freed.
    """
    memory = [Sample(**one) for one in record["memory"]]
    objects = plugin_objects(Soak(minutes=record["minutes"], margin=0.0, split_share=0.0, memory=memory))
    now = {PRESSURE: bool(record["preemptions"]), OBJECTS: objects.holds}
    changed = [
        f'"{name}" {"passes" if now[name] else "fails"}'
        for name, held in ((check["name"], check["holds"]) for check in record["checks"])
        if held != now.get(name, held)
    ]
    verdict = "passed" if record["ok"] else "failed"
    return f"{verdict}; by the current checks {', '.join(changed)}" if changed else verdict


def _range(sizes: Sequence[int]) -> str:
    first, most, last = (size / MIB for size in (sizes[0], max(sizes), sizes[-1]))
    return f"{first:.0f} MiB at first, {most:.0f} at most, {last:.0f} at last"


def print_report(finished: Finished, checks: Sequence[Check], console: Console) -> None:
    soak = finished.soak
    requests = table("Requests", "kind", "sent", "how they ended")
    for kind, counts in outcomes(soak).items():
        ends = ", ".join(f"{count} {end}" for end, count in counts.most_common())
        requests.add_row(kind, str(counts.total()), ends)
    console.print(requests)
    seconds = table("Seconds", "from sending to", "p50", "p99", "max")
    for name, figures in latencies(soak).items():
        seconds.add_row(name, *(f"{figures[key]:.2f}" for key in ("p50", "p99", "max")))
    console.print(seconds)
    if soak.memory:
        values = _range([one.rss for one in soak.memory])
        console.print(f"Host memory of {soak.memory[-1].processes} processes: {values}\n")
    judged = table("Checks", "", "check", "what was seen")
    for check in checks:
        judged.add_row("✓" if check.holds else "✗", check.name, check.detail)
    console.print(judged)
    if finished.problem:
        console.print(f"✗ {finished.problem}")
