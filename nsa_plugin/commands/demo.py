"""``nsa-plugin demo``: a real engine serves a small model through the plugin, and every token is checked."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from nsa_plugin.commands.arguments import option, positive, switch
from nsa_plugin.commands.signals import (
    EXIT_CANNOT_RUN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    sigterm_raises,
)
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools import records
from nsa_plugin.tools.checkpoints.v32 import DTYPES
from nsa_plugin.tools.compare.demo.pipeline import MODELS, CannotRunError, DemoOptions, run_pipeline
from nsa_plugin.tools.compare.demo.record import as_record
from nsa_plugin.tools.compare.demo.report import SCHEMA, as_dict, print_report
from nsa_plugin.tools.terminal import Steps, console

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR)

EPILOG = """Starts `vllm serve` on this machine's CPU with the plugin enabled, sends
requests that take every execution path, and compares each token and log
probability with an independent model in plain torch. Then a second server,
which attends to wrong tokens on purpose, must fail the same comparison.

exit codes:
  0    every request agrees, every execution path was taken, and the control
       was noticed
  1    one of these checks failed, or the server failed; the output says which
       and why
  2    bad usage, or the demo cannot run here (no vLLM CPU build, no disk
       space)
  130  interrupted (Ctrl-C); 143: terminated. No server is left behind"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = DemoOptions(work_dir=Path())
    model = parser.add_argument_group("model")
    shapes = "the checkpoint's shape: DeepSeek-V3.2's or GLM-5's (%(default)s)"
    model.add_argument("--family", choices=MODELS, default=defaults.family, help=shapes)
    model.add_argument(
        "--dtype", choices=DTYPES, default=defaults.dtype, help="of weights and arithmetic (%(default)s)"
    )
    option(model, "--index-topk N", int, "KV tokens selected per query token (%(default)s)", defaults.index_topk)
    option(model, "--seed N", int, "of weights and prompts (%(default)s)", defaults.seed)

    server = parser.add_argument_group("server")
    chunk = "most tokens in a batch; longer prompts are split into chunks (%(default)s)"
    option(server, "--max-num-batched-tokens N", int, chunk, defaults.max_num_batched_tokens)
    tp = "ranks that share the heads (%(default)s)"
    option(server, "--tensor-parallel-size N", positive, tp, defaults.tensor_parallel_size)
    server.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=defaults.compile,
        help="use torch.compile; the start takes longer",
    )
    small = "use a KV cache for little more than one request, so that requests are preempted"
    switch(server, "--small-cache", small)
    option(server, "--port N", _port, "on 127.0.0.1 (a free one)", defaults.port)
    limit = "limit for the server's start, and for all requests (%(default)g)"
    option(server, "--timeout SECONDS", _timeout, limit, defaults.timeout)

    output = parser.add_argument_group("output")
    option(output, "--json FILE", str, "write the report as JSON; - for stdout")
    option(output, "--record FILE.json", _record_path, "write the agreement as a benchmark record")
    option(output, "--work-dir DIR", Path, "directory for the checkpoint, logs and traces (a temporary one)")
    switch(output, "--keep", "keep the temporary work directory")
    output.add_argument(
        "--skip-control", dest="control", action="store_false", help="do not start the second, wrong server"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo. The exit code is one of those in `EPILOG`."""
    # Before torch is loaded: its threads must not spin while the server works.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    out = console(stderr=args.json == "-")
    work_dir: Path | None = None
    code = EXIT_CANNOT_RUN
    try:
        with sigterm_raises():
            try:
                # Open the outputs first, so that minutes of work do not end at a path that cannot be written.
                with _json_file(args.json) as file:
                    record = _record_file(args.record)
                    work_dir = (args.work_dir or Path(tempfile.mkdtemp(prefix="nsa-plugin-demo-"))).resolve()
                    options = {one.name: getattr(args, one.name) for one in fields(DemoOptions)}
                    code, data = _run(DemoOptions(**options | {"work_dir": work_dir}), out)
                    if file is not None:
                        json.dump(data, file, indent=2)
                        file.write("\n")
                    if record is not None and "requests" in data:
                        made = as_record(data, [Path(sys.argv[0]).name, *sys.argv[1:]])
                        records.save(made, record, indent=2)
            except KeyboardInterrupt:
                out.print("interrupted; no server is left")
                code = EXIT_INTERRUPTED
            except SystemExit:
                out.print("terminated; no server is left")
                code = EXIT_TERMINATED
            except OSError as error:
                if error.errno not in _CANNOT_WRITE:
                    raise
                out.print(f"error: cannot write {error.filename or work_dir}: {error.strerror}")
                code = EXIT_CANNOT_RUN
    finally:
        if work_dir is not None:
            if args.work_dir is None and not args.keep and code != EXIT_FAILED:
                shutil.rmtree(work_dir, ignore_errors=True)
            else:
                out.print(f"The checkpoint, logs and traces are in {work_dir}")
    return code


def _run(options: DemoOptions, out: Console) -> tuple[int, dict[str, Any]]:
    """Exit code, and the report as data."""
    try:
        result = run_pipeline(options, Steps(out))
    except NsaPluginError as error:
        cannot_run = isinstance(error, CannotRunError)
        out.print(f"error: {error}" if cannot_run else f"✗ FAILED: {error}")
        code = EXIT_CANNOT_RUN if cannot_run else EXIT_FAILED
        return code, {"schema": SCHEMA, "command": "demo", "ok": False, "error": str(error)}
    print_report(result, out)
    return EXIT_OK if result.ok else EXIT_FAILED, as_dict(result)


def _json_file(path: str | None) -> AbstractContextManager[TextIO | None]:
    if path is None or path == "-":
        return nullcontext(sys.stdout if path else None)
    return open(path, "w")


def _record_file(path: str | None) -> Path | None:
    """The file to write, in a directory that is writable.

    Raises:
        OSError: the directory does not exist or is not writable.
    """
    if path is None:
        return None
    with tempfile.TemporaryFile(dir=Path(path).parent):
        return Path(path)


def _record_path(text: str) -> str:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .json")
    return text


def _timeout(text: str) -> float:
    return float(positive(text))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)
