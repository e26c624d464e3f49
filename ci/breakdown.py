"""``python -m ci.breakdown ENGINE -- FLAGS``: where the GPU's time goes until the first token of one prompt.

The stock engine's server and the plugin's are started one after the other. Each answers two prompts of every length as
a warm-up, then those that are timed. With ``--host``, py-spy then samples the server's stacks while it answers prompts.
Finally the engine's own profiler records the kernels of one more prompt, by CUPTI, without stacks or shapes. Each
length makes a record. A loop in Python that is timed beside the prompts tells a slower server from a slower host.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import statistics
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ci.rows import ROOT
from ci.served import add_arguments, checkpoint_of, parse, report_file, server_spec
from ci.stacks import HostError, Sampler, sampled
from nsa_plugin.commands.arguments import natural, positive, positives
from nsa_plugin.commands.compare_options import ENGINES
from nsa_plugin.tools import records
from nsa_plugin.tools.compare.measured import PLUGIN, STOCK
from nsa_plugin.tools.compare.record import describe_host
from nsa_plugin.tools.compare.workload import random_tokens
from nsa_plugin.tools.pages.markdown import markdown_table
from nsa_plugin.tools.pages.summary import engine_name
from nsa_plugin.tools.serving.client import send
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.process import Server, ServerSpec
from nsa_plugin.tools.serving.requests import PromptRequest, RequestGroup

RECORDS = ROOT / "docs" / "first-token"
"""Records that the page shows."""
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LISTED = 40  # kernels of a server that a record names, those that take most time
FEW_MS = 100  # below it the tables have a decimal of the times to the first token
WARM_UPS, ANSWER_S, TRACE_S = 2, 120.0, 120.0
LOOP, LOOPS = 200_000, 5  # rounds of the loop that times the host, and how many of its times the median is of
Prompts = Sequence[tuple[int, ...]]
OTHER = "everything else"
# The part of a layer that a kernel belongs to, by the first pattern that its name has.
PARTS = (
    ("experts", re.compile(r"moe|expert|grouped_topk|topk_(softmax|sigmoid)|group_gemm", re.IGNORECASE)),
    ("indexer", re.compile(r"indexer|mqa_logits|topk|top_k|radix", re.IGNORECASE)),
    ("attention", re.compile(r"attend|attn|attention|sparse_mla|mla|flash|fmha|dequantize", re.IGNORECASE)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|splitk|matmul", re.IGNORECASE)),
)
ALL_PARTS = (*(part for part, _ in PARTS), OTHER)
COLUMNS = [*ALL_PARTS, "idle", "from first to last", "first token"]  # of the tables


def part_of(kernel: str) -> str:
    """The part of the model that a kernel belongs to."""
    return next((part for part, pattern in PARTS if pattern.search(kernel)), OTHER)


def summary(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A trace's time on the GPU.

    Args:
        events: of a Chrome trace, whose times are in microseconds.

    Returns:
        span_ms from the first kernel's start to the last one's end, busy_ms while any ran, and the kernels by time.

    Raises:
        CompareError: there is no kernel.
    """
    found = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("cat") in ON_GPU and event.get("ph") == "X"
    )
    if not found:
        raise CompareError("the profiler recorded no kernel")
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    first = until = found[0][0]
    busy = 0.0
    for start, end, name in found:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        times[name] += end - start
        calls[name] += 1
    most = sorted(times, key=times.__getitem__, reverse=True)
    parts: dict[str, float] = defaultdict(float)
    for name, us in times.items():
        parts[part_of(name)] += us
    return {
        "span_ms": _ms(until - first),
        "busy_ms": _ms(busy),
        "parts": {part: _ms(parts[part]) for part in ALL_PARTS},
        "kernels": [{"name": name, "calls": calls[name], "ms": _ms(times[name])} for name in most[:LISTED]],
    }


def _ms(us: float) -> float:
    return round(us / 1e3, 2)


def profiler_flags(engine: str, folder: Path) -> list[str]:
    """The engine's flags without which its server does not profile."""
    if engine != "vllm":
        return []
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_with_stack": False,
    }
    return ["--profiler-config", json.dumps(config)]


def post(url: str, body: Mapping[str, Any] | None = None) -> None:
    """POST JSON, and wait for the reply."""
    request = urllib.request.Request(
        url, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TRACE_S) as response:
        response.read()


def trace_in(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that the engine writes into a folder, once it is complete.

    Raises:
        CompareError: it is not there in time.
    """
    until = time.monotonic() + TRACE_S
    while time.monotonic() < until:
        for path in sorted(folder.rglob("*.json.gz")):
            try:
                with gzip.open(path, "rt") as file:
                    return list(json.load(file)["traceEvents"])
            except (EOFError, ValueError, OSError):
                continue  # still being written
        time.sleep(0.5)
    raise CompareError(f"no trace in {folder} after {TRACE_S:.0f} s")


def trace_folder(role: str, work: Path) -> Path:
    return (work / f"{role}-trace").resolve()


def ask(engine: ServedEngine, role: str, url: str, prompt: tuple[int, ...]) -> float:
    """Seconds until the first token of a prompt.

    Raises:
        CompareError: there is none.
    """
    request = PromptRequest(name="prompt", prompt=prompt, new_tokens=1)
    group = RequestGroup(name="prompt", case="prompt", how="one by one", requests=(request,), top=1)
    start = time.perf_counter()
    answer = send(engine, url, group, ANSWER_S)["prompt"]
    if answer.error:
        raise CompareError(f"{role}: {answer.error}")
    return time.perf_counter() - start


def loop_ms() -> float:
    """Milliseconds of a fixed loop in this process, which a slower server does not prolong and a slower host does."""

    def once() -> float:
        start = time.perf_counter()
        total = 0
        for number in range(LOOP):
            total += number % 7
        return time.perf_counter() - start

    return _ms(statistics.median(once() for _ in range(LOOPS)) * 1e6)


class Readings(NamedTuple):
    """Milliseconds until the first token of each prompt but the warm-ups, and of `loop_ms` after them."""

    prompts: list[float]
    loop: float

    @property
    def median(self) -> float:
        return round(statistics.median(self.prompts), 2)


def readings_of(engine: ServedEngine, role: str, url: str, prompts: Prompts) -> Readings:
    return Readings([_ms(ask(engine, role, url, prompt) * 1e6) for prompt in prompts][WARM_UPS:], loop_ms())


def start(
    engine: ServedEngine, role: str, spec: ServerSpec, prompts: Mapping[int, Prompts]
) -> tuple[float, dict[int, Readings]]:
    """Start and stop the server of a role.

    Args:
        prompts: by their length, the warm-ups and those that are timed.

    Returns:
        seconds of the start, and by length the readings of its prompts.
    """
    with Server(spec) as server:
        found = {tokens: readings_of(engine, role, server.url, some) for tokens, some in prompts.items()}
    return round(server.start_seconds, 1), found


def profile(
    engine: ServedEngine,
    role: str,
    spec: ServerSpec,
    prompts: Mapping[int, Prompts],
    work: Path,
    sampler: Sampler | None = None,
) -> dict[int, dict[str, Any]]:
    """Start the server of a role and measure its start, its times to the first token, its host and one prefill.

    Args:
        prompts: by their length, the warm-ups, those that are timed unprofiled, and the one that is profiled.
        sampler: samples the host's stacks; None samples nothing.

    Returns:
        a row for each length.
    """
    report_file(work).unlink(missing_ok=True)
    with Server(spec) as server:
        found = {tokens: _profiled(engine, role, server, some, work, sampler) for tokens, some in prompts.items()}
    row: dict[str, Any] = {"server": role, "start_s": round(server.start_seconds, 1)}
    if (report := report_file(work)).exists():
        row["warm_up"] = json.loads(report.read_text())["facts"].get("warm-up", "none")
    return {tokens: row | measured for tokens, measured in found.items()}


def _profiled(
    engine: ServedEngine, role: str, server: Server, prompts: Prompts, work: Path, sampler: Sampler | None
) -> dict[str, Any]:
    """What `profile` measures with prompts of one length."""
    folder = trace_folder(role, work)
    for old in folder.rglob("*.json.gz"):
        old.unlink()
    *unprofiled, last = prompts
    url = server.url
    readings = readings_of(engine, role, url, unprofiled)
    host = {}
    if sampler:
        # Prompts made before, so that the server does not wait for new ones. Each empties the prefix cache.
        again = itertools.cycle(unprofiled)
        stacks = work / f"{role}-{len(last)}-host.txt"
        host = sampled(sampler, server.pids(), lambda: ask(engine, role, url, next(again)), stacks)
    post(f"{url}/start_profile", {"output_dir": str(folder), "activities": ["GPU"]})
    ask(engine, role, url, last)
    post(f"{url}/stop_profile")
    return {
        "first_token_ms": readings.median,
        "readings_ms": readings.prompts,
        "loop_ms": readings.loop,
        **summary(trace_in(folder)),
        **host,
    }


def table(record: Mapping[str, Any]) -> str:
    """Milliseconds of each part, one server a line, and the seconds of its start. Parts that overlap count twice."""
    lines = [[row["server"], *_times(row), f"{row['start_s']:,.1f} s"] for row in record["rows"]]
    return markdown_table([record["engine"], *COLUMNS, "start"], lines)


def _times(row: Mapping[str, Any]) -> list[str]:
    parts = [f"{row['parts'][part]:,.0f}" for part in ALL_PARTS]
    kernels = [f"{ms:,.0f}" for ms in (row["span_ms"] - row["busy_ms"], row["span_ms"])]
    return [*parts, *kernels, _first_token(row.get("starts_ms", [row["first_token_ms"]]))]


def _first_token(medians: Sequence[float]) -> str:
    """The median of the starts' medians, in milliseconds, and their range if there are several."""
    digits = 0 if min(medians) >= FEW_MS else 1
    middle, least, most = (f"{ms:,.{digits}f}" for ms in (statistics.median(medians), min(medians), max(medians)))
    return f"{middle} ({least} to {most})" if len(medians) > 1 else middle


def page_table(folder: Path = RECORDS) -> str:
    """The records of a folder, longest prompts first, one server a line."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = []
    for record in sorted(found, key=lambda record: -record["tokens"]):
        model = f"{record['family'].upper()}, {record['heads']} heads"
        what = f"{engine_name(record)}, {model}, {record['tokens']:,} tokens"
        lines += [[what, row["server"], *_times(row)] for row in record["rows"]]
    return markdown_table(["prompt", "server", *COLUMNS], lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ci.breakdown",
        description="Profile the prefill of one prompt of each length.",
        epilog="-- FLAGS of the engine",
    )
    add_arguments(parser, heads=16, workdir="breakdown-work")
    parser.add_argument(
        "--tokens", type=positives, default="100000", metavar="TOKENS,...", help="lengths of the prompts (%(default)s)"
    )
    parser.add_argument(
        "--readings", type=positive, default=1, help="prompts timed unprofiled; their median counts (%(default)s)"
    )
    parser.add_argument(
        "--starts", type=positive, default=1, help="starts of each server, the last one profiled (%(default)s)"
    )
    parser.add_argument(
        "--host",
        type=natural,
        default=0,
        metavar="SECONDS",
        help="sample the server's stacks with py-spy (from PY_SPY or the PATH) for so long (off)",
    )
    given, flags = parse(parser, argv)
    try:
        sampler = Sampler.found(given.host) if given.host else None
    except HostError as error:
        parser.error(f"--host: {error}")
    engine = ENGINES[given.engine]()
    named = f"{engine.name} {engine.version()}"
    checkpoint, vocab = checkpoint_of(given)
    lengths = list(dict.fromkeys(given.tokens))
    count = WARM_UPS + given.readings + 1
    prompts = {
        tokens: [random_tokens(f"breakdown/{number}", tokens, vocab) for number in range(count)] for tokens in lengths
    }
    specs = {}
    for role in (STOCK, PLUGIN):
        folder = trace_folder(role, given.workdir)
        folder.mkdir(parents=True, exist_ok=True)
        specs[role] = server_spec(engine, role, checkpoint, [*flags, *profiler_flags(engine.name, folder)], given)
    # Servers of one kind may differ from start to start, by where the host runs them. The first start fills the caches.
    before: dict[str, list[tuple[float, dict[int, Readings]]]] = {role: [] for role in specs}
    for _ in range(given.starts - 1):
        for role, one in specs.items():
            before[role].append(start(engine, role, one, {tokens: some[:-1] for tokens, some in prompts.items()}))
    last = {role: profile(engine, role, one, prompts, given.workdir, sampler) for role, one in specs.items()}
    host = describe_host(*records.gpu_and_driver(), 1, given.commit)
    for tokens in lengths:
        rows = []
        for role, found in last.items():
            row = found[tokens]
            starts_s = [*(took for took, _ in before[role]), row["start_s"]]
            starts_ms = [*(readings[tokens].median for _, readings in before[role]), row["first_token_ms"]]
            loops_ms = [*(readings[tokens].loop for _, readings in before[role]), row["loop_ms"]]
            rows.append(row | {"starts_s": starts_s, "starts_ms": starts_ms, "loops_ms": loops_ms})
        suite = f"first-token-{engine.name}-{given.family}-{given.heads}heads-{tokens}"
        what = {"engine": named, "family": given.family, "heads": given.heads, "tokens": tokens, "flags": flags}
        record = records.head(suite, "python -m ci.breakdown", host) | what | {"starts": given.starts, "rows": rows}
        if given.json:
            records.save(record, given.json / f"{suite}.json")
        print(f"{tokens:,} tokens\n{table(record)}")
        for row in rows:
            if "host_error" in row:
                print(f"{row['server']}: host not sampled: {row['host_error']}", file=sys.stderr)


if __name__ == "__main__":
    main()
