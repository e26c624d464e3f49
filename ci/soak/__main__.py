"""``python -m ci.soak``: see `ci.soak`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ci.soak.engines import SETUPS
from ci.soak.judge import judge
from ci.soak.report import as_record, print_report
from ci.soak.run import Options, run_soak
from nsa_plugin.commands.signals import EXIT_CANNOT_RUN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, sigterm_raises
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.tools import records
from nsa_plugin.tools.terminal import Steps

_COLUMNS = 80
EPILOG = """exit codes: 0 every check passed; 1 a check failed or the server did, and the output says which and why;
2 the soak cannot run here; 130 interrupted. No server is left behind."""


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m ci.soak", description=__doc__.splitlines()[0], epilog=EPILOG)
    made.add_argument("--engine", choices=tuple(SETUPS), default="vllm-cpu", help="(%(default)s)")
    made.add_argument("--minutes", type=_minutes, metavar="N", help="of load (60 on a CPU, 10 on a GPU)")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="of the requests (%(default)s)")
    made.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint (a small one with random weights)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    made.add_argument("--commit", metavar="SHA", help="of the source, where it is in no checkout")
    made.add_argument("--work-dir", type=Path, metavar="DIR", help="for the checkpoint and the log (a temporary one)")
    made.add_argument("flags", nargs="*", metavar="-- FLAG", help="more flags of the engine")
    return made


def main(words: list[str]) -> int:
    args = parser().parse_args(words)
    setup = SETUPS[args.engine]
    console = Console(width=_COLUMNS, markup=False, highlight=False, emoji=False)
    work_dir = (args.work_dir or Path(tempfile.mkdtemp(prefix="nsa-plugin-soak-"))).resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    options = Options(
        replace(setup), args.minutes or setup.minutes, args.seed, work_dir, args.flags, args.model, args.commit
    )
    code = EXIT_CANNOT_RUN
    try:
        with sigterm_raises():
            finished = run_soak(options, Steps(console))
        checks = judge(finished.soak)
        print_report(finished, checks, console)
        record = as_record(finished, options, checks, ["python", "-m", "ci.soak", *records.portable(words, _LOCAL)])
        if args.json:
            records.save(record, args.json)
        code = EXIT_OK if record["ok"] else EXIT_FAILED
        failed = [check.name for check in checks if not check.holds]
        console.print("The soak passed." if record["ok"] else f"The soak FAILED: {', '.join(failed)}")
    except NsaPluginError as error:
        console.print(f"error: {error}")
    except KeyboardInterrupt:
        console.print("interrupted; no server is left")
        code = EXIT_INTERRUPTED
    if args.work_dir is None and code in (EXIT_OK, EXIT_INTERRUPTED):
        shutil.rmtree(work_dir, ignore_errors=True)
    else:
        console.print(f"The checkpoint and the server's log are in {work_dir}")
    return code


_LOCAL = ("--json", "--work-dir", "--model")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
