"""``nsa-plugin compare``: one model by an engine's own server, stock and with the plugin; see `nsa_plugin.compare`."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from nsa_plugin.commands.output import console
from nsa_plugin.compare import record, report
from nsa_plugin.compare.engine import FAMILIES, V4, V32, CompareError, Engine
from nsa_plugin.compare.lifecycle import speaker
from nsa_plugin.compare.load import SPEED_CASES, loads
from nsa_plugin.compare.measured import Measured
from nsa_plugin.compare.model import (
    SPEC,
    SPEC_V4,
    Spec,
    checkpoint_name,
    edges,
    family_of,
    make_checkpoint,
    row_edges,
    selects_above,
    shown,
    spec_of,
)
from nsa_plugin.compare.rule import CONTROL, PLUGIN, STOCK
from nsa_plugin.compare.runner import ROLES, Comparison
from nsa_plugin.compare.sglang_server import SglangEngine
from nsa_plugin.compare.verdict import judge
from nsa_plugin.compare.vllm_server import VllmEngine
from nsa_plugin.compare.workload import AGREEMENT_CASES, LIMIT, ROWS, until_it_fails, workload

ENGINES: dict[str, Callable[[], Engine]] = {"sglang": SglangEngine, "vllm": VllmEngine}
TAKES_ENGINE_FLAGS = True
MEASURED = "measured.jsonl"
USUAL_CONTEXT = 32000
_EXIT_OK, _EXIT_FAILED, _EXIT_INTERRUPTED, _EXIT_TERMINATED = 0, 1, 130, 143

EPILOG = f"""cases:
  agreement  {", ".join(AGREEMENT_CASES)}
  speed      {", ".join(SPEED_CASES)}

examples:
  nsa-plugin compare sglang --heads 16 --json docs/benchmarks -- --kv-cache-dtype fp8_e4m3
  nsa-plugin compare sglang --heads 16 --together --speed --runs stock,plugin,control,stock-again -- \\
      --kv-cache-dtype fp8_e4m3 --max-total-tokens 262144 --mem-fraction-static 0.8
  nsa-plugin compare sglang --family v4 --speed --context 131072 --prompt-lengths 13000,30000,128000 \\
      --json docs/benchmarks -- --chunked-prefill-size 8192 --swa-full-tokens-ratio 0.5
  nsa-plugin compare sglang --family v4 --stock-fails-at 32768,131072,262144,393216 --json docs/benchmarks -- \\
      --chunked-prefill-size 32768 --mem-fraction-static 0.9
  nsa-plugin compare sglang --model /models/DeepSeek-V3.2 --speed -- --tp 8
  nsa-plugin compare vllm --heads 16 --together --speed --runs stock,plugin,control,stock-again -- \\
      --kv-cache-dtype fp8 --kv-cache-memory-bytes 4G --gpu-memory-utilization 0.2
  nsa-plugin compare sglang --measured work/logs/{MEASURED} --json docs/benchmarks    judge again, measure nothing

What follows -- is given to every server. Servers run one after the other on the same devices, each with all of their
memory. Timed so, they differ by far more than a few per cent, the same server twice as well: with --together all are
alive at the same time and speed is timed in turns. Their memory is then for the flags after -- to divide, because every
server sizes itself as if it were alone. SGLang: bound each cache by --max-total-tokens, and leave --mem-fraction-static
high (0.8): what others take while a server starts counts as that server's own. vLLM: give the cache's size by
--kv-cache-memory-bytes, because its own measurement counts the others too, and a small --gpu-memory-utilization (0.2):
so much of the device must be free when a server starts.

This release refuses vLLM on a GPU, and vLLM on a CPU has no sparse attention to compare with: compare vllm measures
nothing yet, and says so.

What was measured is saved after every step, in LOGS/{MEASURED} and in the record, so that a run that is ended keeps it.

Ends 0 only if the plugin's answers are as near to stock's as stock's own are to each other, the plugin was seen to
serve, and answers that are wrong on purpose (role {CONTROL}) were noticed; 143 if it is terminated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    parser.usage = "nsa-plugin compare ENGINE [options] [-- ENGINE_FLAG ...]"
    parser.add_argument("engine", choices=ENGINES, help="whose server to start: %(choices)s")
    model = parser.add_argument_group("model")
    given = model.add_mutually_exclusive_group()
    given.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint with sparse attention")
    given.add_argument(
        "--heads",
        type=_count,
        metavar="N",
        help="query heads of a checkpoint with seeded random weights, made here "
        f"({SPEC.num_attention_heads}, of v4 {SPEC_V4.num_attention_heads})",
    )
    model.add_argument(
        "--family", choices=FAMILIES, help=f"whose shape it has: DeepSeek-V3.2's or DeepSeek-V4's ({V32})"
    )
    model.add_argument(
        "--layers",
        type=_layers,
        metavar="N",
        help=f"of it ({SPEC.num_hidden_layers}); of v4 a number or their compress ratios "
        f"({','.join(map(str, SPEC_V4.compress_ratios))})",
    )
    model.add_argument("--mtp", action="store_true", help="with a layer for speculative decoding")
    model.add_argument(
        "--context", type=_count, default=USUAL_CONTEXT, metavar="TOKENS", help="longest prompt (%(default)s)"
    )

    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--runs",
        type=_roles,
        metavar="ROLE,...",
        help=f"servers, in this order, of {', '.join(ROLES)} ({STOCK},{PLUGIN},{CONTROL}; {STOCK},{PLUGIN} "
        "without a case of agreement)",
    )
    what.add_argument(
        "--case",
        action="append",
        choices=(*AGREEMENT_CASES, *SPEED_CASES),
        metavar="NAME",
        help="only this one; may be given more than once (all of agreement)",
    )
    what.add_argument("--speed", action="store_true", help="also time the servers: the cases of speed")
    what.add_argument(
        "--prompt-lengths",
        type=_counts,
        default=[],
        metavar="TOKENS,...",
        help="of the single requests that are timed (2000,8192 and the context)",
    )
    what.add_argument(
        "--stock-fails-at",
        type=_counts,
        metavar="TOKENS,...",
        help="nothing but prompts of these lengths, the shortest first, until stock fails: it has to, and the plugin "
        "has to answer the same prompt",
    )
    what.add_argument(
        "--together",
        action="store_true",
        help="start all servers at the same time and time them in turns; the flags after -- must divide the memory",
    )
    what.add_argument("--budget", type=_seconds, default=1500.0, metavar="SECONDS", help="for everything (%(default)g)")
    what.add_argument(
        "--start-timeout", type=_seconds, default=400.0, metavar="SECONDS", help="for a server's start (%(default)g)"
    )
    what.add_argument("--measured", type=Path, metavar="FILE", help="judge what an earlier run saved, and run nothing")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--workdir", type=Path, default=Path("compare-work"), metavar="DIR", help="for the checkpoint (%(default)s)"
    )
    output.add_argument("--logs", type=Path, metavar="DIR", help="for the servers' logs (WORKDIR/logs)")
    output.add_argument("--json", type=Path, metavar="DIR", help="write the record to DIR/<gpu>/")
    output.add_argument("--commit", metavar="HASH", help="commit for the record, where the source is in no checkout")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(number.strip()) for number in text.split(",")]


def _layers(text: str) -> int | tuple[int, ...]:
    if "," not in text:
        return _count(text)
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of compress ratios")
    return tuple(map(int, numbers))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _roles(text: str) -> list[str]:
    roles = [role.strip() for role in text.split(",")]
    for role in roles:
        if role not in ROLES:
            raise argparse.ArgumentTypeError(f"{role!r} is no role; allowed: {', '.join(ROLES)}")
    if len(set(roles)) != len(roles):
        raise argparse.ArgumentTypeError(f"{text!r} names a role twice")
    return roles


def run(args: argparse.Namespace) -> int:
    out = console()
    if args.measured is not None:
        return _judge_again(args, out)
    deadline = time.monotonic() + args.budget
    say = speaker(lambda line: print(line, flush=True))
    logs = args.logs or args.workdir / "logs"
    engine = ENGINES[args.engine]()
    cases = _cases(args)
    facts = _facts(args, engine, cases)
    if not facts["prefix_cache"]:
        cases = [case for case in cases if case != "prefix"]
    if not facts["row_edges"]:
        cases = [case for case in cases if case != ROWS]
    if not cases:
        raise CompareError(f"--case {', '.join(args.case)} has no requests for this model and these flags")
    groups = (
        [until_it_fails(facts["vocab_size"], args.stock_fails_at)]
        if LIMIT in cases
        else workload(
            facts["vocab_size"],
            facts["selects_above"],
            facts["context"],
            cases,
            edges=facts["edges"],
            row_edges=facts["row_edges"],
        )
    )
    agreement = any(case in AGREEMENT_CASES for case in cases)
    runs = args.runs or [STOCK, PLUGIN, *([CONTROL] if agreement else [])]
    measured = Measured(facts=facts, asked={"runs": runs, "cases": cases}, together=args.together)

    for directory in (args.workdir, logs, *([args.json] if args.json else [])):
        _make_directory(directory)
    say(f"{facts['suite']} on {facts['host']['gpu'] or 'no GPU'}, {args.budget:.0f} s for everything")
    comparison = Comparison(
        engine=engine,
        measured=measured,
        model=(args.model or args.workdir / checkpoint_name(_spec(args))).resolve(),
        flags=args.engine_flags,
        groups=groups,
        loads=loads(facts["context"], cases, facts["prompt_lengths"]),
        logs=logs.resolve(),
        deadline=deadline,
        start_timeout=args.start_timeout,
        say=say,
        on_step=lambda: _save(measured, logs, args.json),
    )
    code = _EXIT_FAILED
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        if args.model is None:
            make_checkpoint(_spec(args), comparison.model, say)
        comparison.make(runs)
    except KeyboardInterrupt:
        measured.ended, code = "interrupted", _EXIT_INTERRUPTED
    except SystemExit:
        measured.ended, code = "terminated", _EXIT_TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
    made, path = _save(measured, logs, args.json)
    say(f"saved: {logs / MEASURED}{f', record: {path}' if path else ''}")
    report.print_record(made, out)
    return code if measured.ended else (_EXIT_OK if made["verdict"]["holds"] else _EXIT_FAILED)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM as an exception, so that every `with` and `finally` on the way out does its work."""
    raise SystemExit(_EXIT_TERMINATED)


def _judge_again(args: argparse.Namespace, out: Console) -> int:
    try:
        measured = Measured.load(args.measured)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(f"--measured is {args.measured}, which cannot be read: {error}") from error
    if args.commit is not None:
        measured.facts["host"]["commit"] = args.commit
    made, path = _recorded(measured, args.json)
    if path:
        out.print(f"recorded: {path}")
    report.print_record(made, out)
    return _EXIT_OK if made["verdict"]["holds"] else _EXIT_FAILED


def _save(measured: Measured, logs: Path, folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    measured.save(logs / MEASURED)
    return _recorded(measured, folder)


def _recorded(measured: Measured, folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    """The record, and where it was written."""
    facts = measured.facts
    timed = loads(facts["context"], measured.asked["cases"], facts.get("prompt_lengths", ()))
    made = record.as_record(measured, judge(measured), timed, shlex.split(facts["command"]))
    return made, record.write(made, folder) if folder is not None else None


def _cases(args: argparse.Namespace) -> list[str]:
    """The cases that were asked for.

    Raises:
        CompareError: they do not go together.
    """
    if args.stock_fails_at is None:
        return args.case or [*AGREEMENT_CASES, *(SPEED_CASES if args.speed else ())]
    if args.case or args.speed or args.together:
        raise CompareError(
            "--stock-fails-at goes with none of --case, --speed and --together: stock's server ends by it, and each "
            "server needs all of the memory"
        )
    if args.runs and args.runs != [STOCK, PLUGIN]:
        raise CompareError(f"--stock-fails-at is of {STOCK},{PLUGIN}, in this order, not --runs {','.join(args.runs)}")
    return [LIMIT]


def _facts(args: argparse.Namespace, engine: Engine, cases: Sequence[str]) -> dict[str, Any]:
    """What does not change in the course of the comparison of `cases`.

    Raises:
        CompareError: the engine or the model is not there, or is not what can be compared.
    """
    version = engine.version()
    config = _config(args)
    family = family_of(config)
    facts = engine.facts(args.engine_flags, family)
    heads = config["num_attention_heads"] // facts["attention_tp"]
    kind = str(config.get("model_type", "model")).removeprefix("deepseek_")
    variant = [f"tp{facts['tp']}"] if facts["tp"] > 1 else []
    variant += [f"dp{facts['dp']}"] if facts["dp"] > 1 else []
    variant += facts["variant"]
    context = max(args.stock_fails_at or (args.context,))
    variant += [f"context{context}"] if context > USUAL_CONTEXT else []
    # Another record than that of the same servers' agreement.
    variant += [LIMIT] if LIMIT in cases else []
    variant += ["speed"] if all(case in SPEED_CASES for case in cases) else []
    gpu, driver = _gpu()
    return {
        **facts,
        "suite": "-".join([engine.name, version, kind, f"{heads}heads", facts["kv"], *variant]),
        "engine": f"{engine.name} {version}",
        "family": family,
        "heads": heads,
        "vocab_size": config["vocab_size"],
        "index_topk": config["index_topk"],
        "selects_above": selects_above(config),
        "edges": edges(config),
        "row_edges": row_edges(config, facts.get("chunk")),
        "context": context,
        "prompt_lengths": args.prompt_lengths,
        "flags": args.engine_flags,
        "model": {
            "weights": _MADE[family] if args.model is None else args.model.name,
            **shown(config),
        },
        "command": shlex.join(["nsa-plugin", *sys.argv[1:]]),
        "host": record.describe_host(gpu, driver, facts["tp"], args.commit),
    }


_MADE = {
    V32: "seeded random, see nsa_plugin.demo.checkpoint",
    V4: "seeded random, see nsa_plugin.demo.checkpoint_v4",
}


def _config(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is None:
        config = _spec(args).config()
    else:
        if args.family is not None:
            raise CompareError("--family is of a checkpoint that is made here; --model has its own")
        try:
            config = json.loads((args.model / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise CompareError(f"--model is {args.model}, whose config.json cannot be read: {error}") from error
    for name in ("num_attention_heads", "vocab_size", "index_topk"):
        if not isinstance(config.get(name), int):
            raise CompareError(f"{args.model}/config.json has no {name}: a model with sparse attention is needed")
    longest = config.get("max_position_embeddings") or sys.maxsize
    name = "--stock-fails-at" if args.stock_fails_at else "--context"
    tokens = max(args.stock_fails_at or (args.context,))
    if tokens + 512 > longest:
        raise CompareError(f"{name} is {tokens}; the model's longest position leaves {longest - 512}")
    if args.prompt_lengths and max(args.prompt_lengths) > args.context:
        raise CompareError(f"--prompt-lengths has {max(args.prompt_lengths)}; --context leaves {args.context}")
    return dict(config)


def _spec(args: argparse.Namespace) -> Spec:
    return spec_of(args.family or V32, args.heads, args.layers, mtp=args.mtp)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareError(f"{path} cannot be made: {error}") from error


def _gpu() -> tuple[str, str]:
    """Name and driver of the first GPU, ("", "") without one. Asked of nvidia-smi: torch would take memory there."""
    command: Sequence[str] = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    first = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ","
    name, _, driver = first.partition(",")
    return name.strip(), driver.strip()
