"""`torchrun --nproc-per-node W -m nsa_plugin.tools.bench.group`: the head/token all-to-all on W GPUs of one host,
against the engines' padded heads and the plugin's kernel for few heads.

Every rank makes every call. A figure is the maximum over the ranks of their medians. Each timed result is compared with
the float32 reference on a sample of its rows. Resharded results are also compared with the same kernel over all heads
without an exchange: `bit_equal` says whether every rank got the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.libraries.registry import REFERENCE, Registry
from nsa_plugin.tools.bench import record, tables
from nsa_plugin.tools.bench.cases import BenchCase, BenchError
from nsa_plugin.tools.bench.floors import Rates
from nsa_plugin.tools.bench.group.group import GroupTimer, gather, measured_rates
from nsa_plugin.tools.bench.group.workloads import ALL_HEADS, GroupSuite, suite
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from nsa_plugin.tools.bench.workload import Context
from nsa_plugin.tools.terminal import console

TIMEOUT = timedelta(minutes=5)  # per collective: kernels compile in between
NO_LIMIT = float("inf")  # ranks that stopped by their own clocks would stop at different cases


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(given)
    if "RANK" not in os.environ:
        raise BenchError("start it with torchrun: torchrun --nproc-per-node 8 -m nsa_plugin.tools.bench.group")
    device = _device(tiny=args.tiny)
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT, **bound)
    try:
        chosen, outcome, rates = measure(args, device)
        if dist.get_rank() == 0:
            _report(given, args, chosen, outcome, rates)
    finally:
        dist.destroy_process_group()
    return 1 if outcome.failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="nsa_plugin.tools.bench.group", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    made.add_argument("--op", action="append", metavar="OP", help="measure only this op; may be given more than once")
    made.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help="the plugin's kernels for few heads, in addition to the others (cuda)",
    )
    made.add_argument(
        "--heads",
        type=int,
        default=ALL_HEADS,
        metavar="N",
        help="query heads of the model, over the ranks (%(default)s)",
    )
    made.add_argument("--runs", type=int, default=30, metavar="N", help="timed runs of each contender (%(default)s)")
    made.add_argument("--tiny", action="store_true", help="small cases, on a CPU too, to see what runs; no record")
    made.add_argument("--json", type=Path, metavar="DIR", help="write the record to DIR/<gpu>/<suite>.json")
    made.add_argument("--commit", metavar="HASH", help="commit for the record, where the source is in no checkout")
    return made


def _device(*, tiny: bool) -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    if not tiny:
        raise BenchError("measuring needs NVIDIA GPUs, and torch sees none; only --tiny runs without one")
    return torch.device("cpu")


def measure(args: argparse.Namespace, device: torch.device) -> tuple[GroupSuite, Outcome, Rates]:
    """Measure what the arguments ask for on the default group; every rank gets the same rows.

    Raises:
        BenchError: an argument is invalid, or not possible with this number of ranks.
    """
    ranks = dist.get_world_size()
    if args.tiny and args.json:
        raise BenchError("--tiny makes no record; leave out --json")
    if args.heads < 1 or args.heads % ranks:
        raise BenchError(f"{ranks} ranks; the number must divide {args.heads} heads")
    chosen = suite(ranks, args.heads)
    cases = [case for case in (chosen.tiny if args.tiny else chosen.cases) if not args.op or case.op in args.op]
    if not cases:
        raise BenchError(f"--op is {args.op}; allowed: {', '.join(dict.fromkeys(case.op for case in chosen.cases))}")
    sm = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
    wanted = args.provider or ["cuda" if device.type == "cuda" else REFERENCE]
    context = Context(device, sm, Registry(), wanted)
    out = console() if dist.get_rank() == 0 else None
    rates = measured_rates(device)
    outcome = run_suite(
        chosen,
        tuple(cases),
        context,
        GroupTimer(device, args.runs),
        rates,
        BenchOptions(NO_LIMIT, None),
        update=lambda text: out.print(text) if out else None,
    )
    _add_exactness(outcome, chosen)
    return chosen, outcome, rates


def _report(given: Sequence[str], args: argparse.Namespace, chosen: GroupSuite, outcome: Outcome, rates: Rates) -> None:
    out, ranks = console(), dist.get_world_size()
    tables.print_outcome(out, chosen.name, outcome)
    compared = [row["bit_equal"] for row in outcome.rows if "bit_equal" in row]
    out.print(f"bit-equal to the same kernel without an exchange: {sum(compared)} of {len(compared)} sharded results")
    if args.json and outcome.rows:
        host = record.describe_host(rates, l2=GroupTimer.l2, commit=args.commit) | {"gpus": ranks}
        command = ["torchrun", "--nproc-per-node", str(ranks), "-m", "nsa_plugin.tools.bench.group", *given]
        made = record.as_record(chosen, outcome, host, command)
        out.print(f"recorded: {record.write(made, args.json)}")


def _add_exactness(outcome: Outcome, chosen: GroupSuite) -> None:
    """Set `bit_equal` of each resharded row: whether it is true on every rank."""
    every = gather(chosen.exact)
    for row in outcome.rows:
        key = (BenchCase(row["op"], tuple(row["case"].items())), row["provider"])
        if key in chosen.exact:
            row["bit_equal"] = all(found.get(key, False) for found in every)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NsaPluginError as error:
        sys.exit(f"error: {error}")
