"""``python -m ci.starts ENGINE -- FLAGS``: how much longer a start and a decode step take with the plugin.

Servers that are started alike differ by more than the plugin adds, so one pair says little. Each pair starts a server
of the stock engine and one with the plugin, one after the other, and in the other order than the pair before. Both
answer the same requests, one at a time: the load `steps` of `nsa-plugin compare`. A pair that does not count comes
first and fills the caches.

The settings are the environment's. With ``NSA_PLUGIN_DECODE_BACKEND=flash_mla`` the steps run the engine's kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ci.served import add_arguments, checkpoint_of, parse, report_file, server_spec
from nsa_plugin.commands.arguments import positive
from nsa_plugin.commands.compare_options import ENGINES
from nsa_plugin.tools import records
from nsa_plugin.tools.compare import load
from nsa_plugin.tools.compare.measured import PLUGIN, STOCK
from nsa_plugin.tools.compare.record import describe_host
from nsa_plugin.tools.pages.markdown import markdown_table
from nsa_plugin.tools.pages.summary import engine_name
from nsa_plugin.tools.serving.engine import ServedEngine
from nsa_plugin.tools.serving.process import Server, ServerSpec

CONTEXT = 4096
ANSWERS_S = 120.0
COLUMNS = ("servers", "pairs", "start, stock", "longer with the plugin", "decode step, stock", "with the plugin")


class Reading(NamedTuple):
    """Of one server: seconds of its start, milliseconds of a decode step (the median of each answer), and what the
    plugin reports of its warm-up."""

    start_s: float
    steps_ms: list[float]
    warm_up: str = ""


def reading_of(engine: ServedEngine, spec: ServerSpec, answers: int, vocab: int) -> Reading:
    """Start a server and time its start and its steps; the first answer warms it up."""
    (steps,) = load.loads(CONTEXT, [load.STEPS])
    with Server(spec) as server:
        found = [load.measure(engine, server.url, steps, number, vocab, ANSWERS_S) for number in range(answers + 1)]
    return Reading(round(server.start_seconds, 2), [round(one["itl_ms"], 4) for one in found[1:]])


class Mean(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float


def mean_of(values: Sequence[float]) -> Mean:
    """Of at least two values."""
    return Mean(statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5)


def differences(record: Mapping[str, Any]) -> tuple[Mean, Mean]:
    """Seconds that a start takes longer with the plugin, and a step's time over stock's, each over all pairs."""
    pairs = list(zip(*(record["servers"][role] for role in (STOCK, PLUGIN)), strict=True))
    longer = [ours["start_s"] - stock["start_s"] for stock, ours in pairs]
    ratios = [statistics.median(ours["steps_ms"]) / statistics.median(stock["steps_ms"]) for stock, ours in pairs]
    return mean_of(longer), mean_of(ratios)


def line_of(record: dict[str, Any]) -> list[str]:
    """A record in a line; behind ± the standard error of the mean over the pairs."""
    longer, ratio = differences(record)
    stock = record["servers"][STOCK]
    start = statistics.mean(one["start_s"] for one in stock)
    step = statistics.mean(statistics.median(one["steps_ms"]) for one in stock)
    chosen = ", ".join(f"{name.removeprefix('NSA_PLUGIN_').lower()}={value}" for name, value in record["set"].items())
    what = [engine_name(record), record["family"].upper(), f"{record['heads']} heads", *([chosen] if chosen else [])]
    return [
        ", ".join(what),
        str(len(stock)),
        f"{start:.1f} s",
        f"{longer.value:+.2f} ± {longer.error:.2f} s",
        f"{step:.3f} ms",
        f"{ratio.value - 1:+.2%} ± {ratio.error:.2%}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ci.starts",
        description="Time starts and decode steps of pairs of servers, stock and with the plugin.",
        epilog="-- FLAGS of the engine",
    )
    add_arguments(parser, heads=64, workdir="starts-work")
    parser.add_argument("--pairs", type=positive, default=8, help="pairs that count, at least 2 (%(default)s)")
    parser.add_argument("--answers", type=positive, default=3, help="timed answers of each server (%(default)s)")
    given, flags = parse(parser, argv)
    if given.pairs < 2:
        parser.error("--pairs is 1; a standard error needs at least 2")
    engine = ENGINES[given.engine]()
    checkpoint, vocab = checkpoint_of(given)
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NSA_PLUGIN_")}
    report = report_file(given.workdir)
    specs = {role: server_spec(engine, role, checkpoint, flags, given) for role in (STOCK, PLUGIN)}
    host = describe_host(*records.gpu_and_driver(), 1, given.commit)
    suite = f"starts-{engine.name}-{given.family}-{given.heads}heads"
    servers: dict[str, list[dict[str, Any]]] = {role: [] for role in specs}
    what: dict[str, Any] = {"engine": f"{engine.name} {engine.version()}", "family": given.family, "heads": given.heads}
    what |= {"flags": flags, "set": chosen, "servers": servers}
    record = records.head(suite, "python -m ci.starts", host) | what
    for pair in range(given.pairs + 1):
        order = [STOCK, PLUGIN] if pair % 2 else [PLUGIN, STOCK]
        report.unlink(missing_ok=True)
        readings = {role: reading_of(engine, specs[role], given.answers, vocab) for role in order}
        said = json.loads(report.read_text()) if report.exists() else {}
        if not said.get("active"):
            parser.exit(1, f"the plugin does not serve; see {specs[PLUGIN].log}\n")
        readings[PLUGIN] = readings[PLUGIN]._replace(warm_up=said.get("facts", {}).get("warm-up", "none"))
        print(f"pair {pair}: {readings}", flush=True)
        if not pair:
            continue
        for role, reading in readings.items():
            servers[role].append(reading._asdict())
        if pair > 1:
            print(markdown_table(COLUMNS, [line_of(record)]), flush=True)
            if given.json:
                records.save(record, given.json / f"{suite}.json")


if __name__ == "__main__":
    main()
