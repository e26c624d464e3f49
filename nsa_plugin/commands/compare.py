"""``nsa-plugin compare``: serve one model with a stock engine and with the plugin, and compare the answers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nsa_plugin.commands.arguments import given
from nsa_plugin.commands.compare_options import ENGINES, MEASURED, MEASURING, USUAL_CONTEXT, add_arguments, fill_in
from nsa_plugin.commands.signals import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, sigterm_raises
from nsa_plugin.tools import records
from nsa_plugin.tools.compare import cross_engine, model, record, report
from nsa_plugin.tools.compare.lifecycle import speaker
from nsa_plugin.tools.compare.load import DECODE, MIXED, SPEED_CASES, decode_prompt, left_out, loads
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, PLUGIN_AGAIN, STOCK, Measured
from nsa_plugin.tools.compare.role_server import RoleServer
from nsa_plugin.tools.compare.runner import EngineComparison
from nsa_plugin.tools.compare.verdict import judge
from nsa_plugin.tools.compare.workload import AGREEMENT_CASES, LIMIT, MIXED_CHUNK, ROWS, until_it_fails, workload
from nsa_plugin.tools.serving.common import switches
from nsa_plugin.tools.serving.engine import GLM, V4, V32, CompareError, ServedEngine
from nsa_plugin.tools.terminal import console

__all__ = ["TAKES_ENGINE_FLAGS", "add_arguments", "run"]

TAKES_ENGINE_FLAGS = True
# Tokens kept for the answer to the longest prompt and for draft tokens of speculative decoding.
_ANSWER = 512
# Facts that decide the lengths of the prompts.
_LENGTHS = ("selects_above", "context", "edges", "row_edges")


def run(args: argparse.Namespace) -> int:
    out = console()
    logs = args.logs or args.workdir / "logs"
    if args.beside is not None and args.measured is None and args.beside.resolve() == (logs / MEASURED).resolve():
        raise CompareError(f"--beside is {args.beside}, and this run would overwrite it; choose another --logs")
    # Read it before measuring anything, so that a file that cannot be compared fails at once.
    other = None if args.beside is None else _read("--beside", args.beside, beside=True)
    if args.measured is not None:
        measured = _read("--measured", args.measured, beside=other is not None)
        _check_measured(args, measured)
        if args.commit is not None:
            measured.facts["host"]["commit"] = args.commit
        if other is not None:
            cross_engine.check_same(measured, other)
        return _report(measured, other, args.json, out)
    fill_in(args)
    deadline = time.monotonic() + args.budget
    say = speaker(lambda line: print(line, flush=True))
    engine = ENGINES[args.engine]()
    cases = _cases(args)
    facts = _facts(args, engine, cases)
    if not facts["prefix_cache"]:
        cases = [case for case in cases if case != "prefix"]
    if not facts["row_edges"]:
        cases = [case for case in cases if case != ROWS]
    if not facts.get("mixed_chunk"):
        cases = [case for case in cases if case != MIXED_CHUNK]
    if not cases:
        raise CompareError(f"--case {', '.join(args.case)} has no requests for this model and these flags")
    groups = (
        [until_it_fails(facts["vocab_size"], args.stock_fails_at)]
        if LIMIT in cases
        else workload(cases=cases, **{name: facts[name] for name in _LENGTHS}, vocab_size=facts["vocab_size"])
    )
    runs = args.runs or [STOCK, PLUGIN, *([CONTROL] if set(cases) & set(AGREEMENT_CASES) else [])]
    measured = Measured(facts=facts, asked={"runs": runs, "cases": cases}, together=args.together)

    for directory in filter(None, (args.workdir, logs, args.json)):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CompareError(f"cannot create {directory}: {error.strerror or error}") from error
    say(f"{facts['suite']} on {facts['host']['gpu'] or 'no GPU'}, {args.budget:.0f} s for everything")

    def save() -> None:
        measured.save(logs / MEASURED)
        # Before its name is known, the record could overwrite another one.
        if args.json is not None and record.is_named(measured):
            record.write(_record(measured), args.json)

    checkpoint = (args.model or args.workdir / model.checkpoint_name(_spec(args))).resolve()
    place: dict[str, Any] = {"model": checkpoint, "logs": logs.resolve()}
    comparison = EngineComparison(
        engine=engine,
        measured=measured,
        new_server=partial(RoleServer, engine=engine, flags=args.engine_flags, say=say, **place),
        groups=groups,
        loads=loads(facts["context"], cases, facts["prompt_lengths"], facts["output_tokens"]),
        deadline=deadline,
        start_timeout=args.start_timeout,
        say=say,
        on_step=save,
    )
    try:
        with sigterm_raises():
            if args.model is None:
                model.make_checkpoint(_spec(args), checkpoint, say)
            facts["checkpoint"] = model.digest(checkpoint)
            if other is not None:
                cross_engine.check_same(measured, other)
            comparison.make(runs)
    except KeyboardInterrupt:
        measured.ended, code = "interrupted", EXIT_INTERRUPTED
    except SystemExit:
        measured.ended, code = "terminated", EXIT_TERMINATED
    save()
    say(f"saved: {logs / MEASURED}")
    # Without a checkpoint the run ended before any request.
    ended = _report(measured, other if "checkpoint" in facts else None, args.json, out)
    return code if measured.ended else ended


def _read(option: str, path: Path, *, beside: bool) -> Measured:
    """What an earlier run saved.

    Args:
        beside: another engine's answers are compared with it.

    Raises:
        CompareError: the file is missing or has another format.
    """
    try:
        measured = Measured.load(path)
        measured.check_facts(beside=beside)
        return measured
    except OSError as error:
        raise CompareError(f"{option} is {path}, which cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompareError(f"{option} is {path}, which is not a file that compare saved: {error}") from error


def _check_measured(args: argparse.Namespace, measured: Measured) -> None:
    """Check that --measured has a file of the command's engine, and comes with no option that it would ignore.

    Raises:
        CompareError: another engine's file, or such an option.
    """
    engine = str(measured.facts["engine"])
    if engine.split()[:1] != [args.engine]:
        raise CompareError(
            f"--measured is {args.measured}, which was measured with {engine}; compare {args.engine} takes a file that "
            f"was measured with {args.engine}"
        )
    if found := given(args, MEASURING) + (["flags after --"] if args.engine_flags else []):
        raise CompareError(
            f"--measured cannot be combined with {', '.join(found)}: it judges what a run saved and starts no server; "
            "allowed: --beside and the output options"
        )


def _record(measured: Measured) -> dict[str, Any]:
    facts = measured.facts
    # Files saved by earlier releases have neither.
    prompts, output_tokens = facts.get("prompt_lengths", ()), facts.get("output_tokens")
    timed = loads(facts["context"], measured.asked["cases"], prompts, output_tokens)
    return record.as_record(measured, judge(measured), timed)


def _report(measured: Measured, other: Measured | None, folder: Path | None, out: Console) -> int:
    """Write and print the record and, with another engine's answers, the cross-engine record. Returns the exit code."""
    made = [_record(measured)]
    if other is not None:
        made.append(cross_engine.as_record(measured, other, cross_engine.judge(measured, other)))
    for one in made:
        if folder is not None:
            out.print(f"recorded: {record.write(one, folder)}")
        report.print_record(one, out)
    return EXIT_OK if all(one["verdict"]["holds"] for one in made) else EXIT_FAILED


def _cases(args: argparse.Namespace) -> list[str]:
    """The requested cases.

    Raises:
        CompareError: they cannot be combined.
    """
    if args.stock_fails_at is None:
        cases = args.case or [*AGREEMENT_CASES, *(SPEED_CASES if args.speed else ())]
        if args.output_tokens and DECODE not in cases:
            raise CompareError(f"--output-tokens is for the case {DECODE}, which is not among {', '.join(cases)}")
        if args.beside and not any(case in AGREEMENT_CASES for case in cases):
            raise CompareError(f"--beside is for agreement cases, not for {', '.join(cases)}")
        if PLUGIN_AGAIN in (args.runs or ()) and not any(case in SPEED_CASES for case in cases):
            raise CompareError(f"--runs has {PLUGIN_AGAIN}, which is only timed; add --speed or a speed case")
        # Unless --case selects it, it is left out where it does not fit, and the record says so.
        if MIXED in (args.case or ()) and (reasons := left_out(args.context, cases)):
            raise CompareError(f"--case {MIXED}: {'; '.join(reasons.values())}")
        return cases
    if args.case or args.speed or args.together or args.beside:
        raise CompareError(
            "--stock-fails-at cannot be combined with --case, --speed, --together or --beside: it makes stock's "
            "server fail, and each server needs all of the memory"
        )
    if args.runs and args.runs != [STOCK, PLUGIN]:
        raise CompareError(f"--stock-fails-at runs {STOCK},{PLUGIN} in this order, not {','.join(args.runs)}")
    return [LIMIT]


def _facts(args: argparse.Namespace, engine: ServedEngine, cases: Sequence[str]) -> dict[str, Any]:
    """What does not change during the comparison of `cases`.

    Raises:
        CompareError: the engine or the model is missing, or cannot be compared.
    """
    version = engine.version()
    config = _config(args)
    family = model.family_of(config)
    facts = engine.facts(args.engine_flags, family)
    _check_lengths(args, cases, config, facts["max_len"])
    heads = config["num_attention_heads"] // facts["attention_tp"]
    kind = str(config.get("model_type", "model")).removeprefix("deepseek_").replace("glm_moe_dsa", "glm5")
    variant = ["full-width"] if args.full_width else []
    variant += [f"{args.quantization}-weights"] if args.quantization else []
    variant += [f"{name}{facts[name]}" for name in ("tp", "dp") if facts[name] > 1]
    variant += facts["variant"]
    context = max(args.stock_fails_at or (args.context,))
    variant += [f"context{context}"] if context > USUAL_CONTEXT else []
    variant += [f"out{args.output_tokens}"] if args.output_tokens else []
    # A record apart from that of the same servers' agreement.
    variant += [LIMIT] if LIMIT in cases else []
    variant += ["speed"] if all(case in SPEED_CASES for case in cases) else []
    # Two servers of each kind say more than one, and seldom have all cases: both records stay.
    variant += ["two-servers"] if PLUGIN_AGAIN in (args.runs or ()) else []
    gpu, driver = records.gpu_and_driver()
    return {
        **facts,
        "suite": "-".join([engine.name, version, kind, f"{heads}heads", facts["kv"], *variant]),
        "engine": f"{engine.name} {version}",
        "family": family,
        "heads": heads,
        "vocab_size": config["vocab_size"],
        "index_topk": config["index_topk"],
        "selects_above": model.selects_above(config),
        "edges": model.edges(config),
        "row_edges": model.row_edges(config, facts.get("chunk")),
        "context": context,
        "prompt_lengths": args.prompt_lengths,
        "output_tokens": args.output_tokens,
        "flags": args.engine_flags,
        "model": {"weights": _MADE[family] if args.model is None else args.model.name, **model.shown(config)},
        "command": shlex.join([*switches(engine.name, os.environ), "nsa-plugin", *sys.argv[1:]]),
        "host": record.describe_host(gpu, driver, facts["tp"], args.commit),
    }


_MADE = {
    family: f"seeded random, see nsa_plugin.tools.checkpoints.{module}"
    for family, module in ((V32, "v32"), (GLM, "v32"), (V4, "v4"))
}


def _config(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is None:
        config = _spec(args).config()
    else:
        if args.family is not None:
            raise CompareError("--family is for checkpoints made here; --model has its own")
        if args.full_width:
            raise CompareError("--full-width is for checkpoints made here; --model has its own widths")
        if args.quantization:
            raise CompareError("--quantization is for checkpoints made here; --model has its own weights")
        path = args.model / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.strerror) or error
            raise CompareError(f"--model is {args.model}, whose config.json cannot be read: {why}") from error
        model.check(config, path)
    return dict(config)


def _check_lengths(args: argparse.Namespace, cases: Sequence[str], config: dict[str, Any], max_len: int | None) -> None:
    """Check that the requested lengths fit the model and the servers.

    Args:
        max_len: the longest context in tokens by the engine's flags; None: the model's.

    Raises:
        CompareError: a length does not fit.
    """
    longest, whose = config.get("max_position_embeddings") or sys.maxsize, "the model's longest position"
    if max_len is not None and max_len < longest:
        longest, whose = max_len, f"the longest context by the flags, {max_len},"
    name = "--stock-fails-at" if args.stock_fails_at else "--context"
    tokens = max(args.stock_fails_at or (args.context,))
    if tokens + _ANSWER > longest:
        raise CompareError(f"{name} is {tokens}; {whose} allows {longest - _ANSWER}")
    if args.prompt_lengths and max(args.prompt_lengths) > args.context:
        raise CompareError(f"--prompt-lengths has {max(args.prompt_lengths)}; --context allows {args.context}")
    left = longest - decode_prompt(args.context)
    if DECODE in cases and args.output_tokens and args.output_tokens > left:
        raise CompareError(f"--output-tokens is {args.output_tokens}; {whose} allows {left}")


def _spec(args: argparse.Namespace) -> model.Spec:
    return model.spec_of(
        args.family or V32,
        args.heads,
        args.layers,
        mtp=args.mtp,
        full_width=args.full_width,
        quantization=args.quantization,
    )
