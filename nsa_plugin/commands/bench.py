"""``nsa-plugin bench``: time ops across kernel providers and shapes on this machine's GPU, and report the records."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nsa_plugin.commands.arguments import given, option, positive, seconds, switch
from nsa_plugin.libraries.architectures import EMULATED
from nsa_plugin.libraries.registry import OPS, REFERENCE, Registry
from nsa_plugin.tools.bench.cases import SUITES, BenchError, Suite, selected_suites
from nsa_plugin.tools.terminal import console

REPORT = "report"
RECORDS = Path("docs/benchmarks")
BUDGET = 60.0
MEASURING = ("--provider", "--budget", "--runs", "--back-to-back", "--portable", "--tiny", "--json", "--commit")
REPORTING = ("--records", "--plots")

_SUITES = textwrap.fill(", ".join(SUITES), 80, initial_indent="suites: ", break_on_hyphens=False)
EPILOG = f"""{_SUITES}

examples:
  nsa-plugin bench --list
  nsa-plugin bench sparse-mla-prefill --provider triton
  every suite, one record each ({RECORDS}/<gpu>/<suite>.json):
  nsa-plugin bench --json {RECORDS}
  the portable path on this GPU, beside the stock path:
  nsa-plugin bench --portable sparse-mla-prefill sparse-mla-decode indexer-topk
  {RECORDS}.md, and a page and a plot for each record:
  nsa-plugin bench report --plots

Every timed result is compared with the float32 reference on a sample of its
rows. A contender that does not support a case is listed with the reason. One
that fails or is wrong is listed without figures, and the command ends with 1.
Without a GPU only --list and report work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{EPILOG}\n\n{parser.epilog}"
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"what to measure (every suite), or {REPORT}: what was recorded"
    )
    switch(parser, "--list", "list the suites and measure nothing")
    measure = parser.add_argument_group("measuring")
    measure.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only this provider and the stock path; may be given more than once "
        f"(every registered one but {REFERENCE})",
    )
    # Options have no default here, so that one given where it does nothing is noticed.
    option(measure, "--budget SECONDS", seconds, f"for a suite, without compilation ({BUDGET:g})")
    option(measure, "--runs N", positive, "of each contender (as many as fit into 0.2 s)")
    back_to_back = "call after call without emptying the L2 cache, as published figures are measured"
    switch(measure, "--back-to-back", f"{back_to_back}; makes a separate record, which decides nothing")
    portable = f"the plugin's kernels as on SM{EMULATED}: 99 KiB of shared memory, no fp8 instructions"
    switch(measure, "--portable", f"{portable}; makes a separate record, which decides nothing")
    switch(measure, "--tiny", "small cases, to see what runs; they make no record")
    option(measure, "--json DIR", Path, "write a record of each suite to DIR/<gpu>/")
    option(measure, "--commit HASH", str, "commit for the record, where the source is in no checkout")
    report = parser.add_argument_group(REPORT)
    option(report, "--records DIR", Path, f"where the records are ({RECORDS})")
    switch(report, "--plots", "also draw an SVG next to each record; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    if REPORT in args.suites:
        if args.suites != [REPORT]:
            raise BenchError(f"{REPORT} takes no suites")
        if found := given(args, ("--list", *MEASURING)):
            raise BenchError(f"{REPORT} takes {' and '.join(REPORTING)}; leave out {found[0]}")
        return _report(args.records or RECORDS, plots=args.plots)
    if found := given(args, REPORTING):
        raise BenchError(f"{found[0]} belongs to: nsa-plugin bench {REPORT}")
    suites = selected_suites(args.suites)
    if args.list:
        if found := given(args, MEASURING):
            raise BenchError(f"--list measures nothing; leave out {found[0]}")
        from nsa_plugin.tools.bench.tables import print_suites

        print_suites(console())
        return 0
    if args.portable and args.back_to_back:
        raise BenchError("--portable and --back-to-back make different records; leave one out")
    if args.tiny and args.json:
        raise BenchError("--tiny makes no record; leave out --json")
    _check_providers(args.provider)
    return _measure(suites, args)


def _check_providers(wanted: Iterable[str]) -> None:
    registry = Registry()
    known = {provider.name for op in OPS for provider in registry.providers(op)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise BenchError(f"--provider is {unknown[0]!r}; allowed: {', '.join(sorted(known))}")


def _measure(suites: list[Suite], args: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError as error:
        raise BenchError("measuring needs torch, which is not installed") from error
    if not torch.cuda.is_available():
        raise BenchError("measuring needs an NVIDIA GPU, and torch sees none; --list and report work without one")

    from nsa_plugin.kernels.triton.device import emulate
    from nsa_plugin.tools.bench import record, tables
    from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
    from nsa_plugin.tools.bench.timing import CudaTimer, measure_rates
    from nsa_plugin.tools.bench.workload import Context
    from nsa_plugin.tools.terminal import Steps

    out = console()
    steps = Steps(out)
    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    if args.portable:
        if sm < EMULATED:
            raise BenchError(f"--portable needs an SM{EMULATED} or later GPU; this one is SM{sm}")
        sm = EMULATED
        emulate(sm)
    context = Context(torch.device("cuda", torch.cuda.current_device()), sm, Registry(), args.provider)
    timer = CudaTimer(back_to_back=args.back_to_back)
    with steps.step("the device's own rates"):
        rates = measure_rates(timer)
    tables.print_rates(out, torch.cuda.get_device_name(), rates)
    host = record.describe_host(rates, l2=timer.l2, commit=args.commit)
    if args.portable:
        host |= {"emulates": sm, "emulates_blocks": True}
        # The emulated GPU multiplies no fp8: its products run as float16.
        rates = replace(rates, fp8_matmul_tflops=rates.matmul_tflops)
    failed = []
    for suite in suites:
        with steps.step(suite.name) as update:
            cases = suite.tiny if args.tiny else suite.cases
            outcome = run_suite(
                suite, cases, context, timer, rates, BenchOptions(args.budget or BUDGET, args.runs), update=update
            )
        tables.print_outcome(out, suite.name, outcome)
        torch.cuda.empty_cache()
        if outcome.failed:
            failed.append(suite.name)
        if args.json and outcome.rows:
            made = record.as_record(suite, outcome, host, ["nsa-plugin", *sys.argv[1:]])
            out.print(f"recorded: {record.write(made, args.json)}")
        elif args.json:
            out.print(f"not recorded: nothing of {suite.name} could be measured")
    if failed:
        out.print(f"✗ wrong or failed in {', '.join(failed)}; see FAILED above")
    return 1 if failed else 0


def _report(folder: Path, *, plots: bool) -> int:
    from nsa_plugin.tools.bench.record import read
    from nsa_plugin.tools.pages import plots as drawing
    from nsa_plugin.tools.pages.site import rewrite

    if not folder.is_dir():
        raise BenchError(f"--records is {folder}, which is no directory")
    folder = folder.resolve()  # "." has no name
    if not folder.name:
        raise BenchError(f"--records is {folder}, which has no page beside it; allowed: a folder below it")
    page = folder.with_name(f"{folder.name}.md")
    if plots:
        drawing.require()
        for records in read(folder).values():
            for path, record in records:
                if drawing.draw(record, path.with_suffix(".svg")):
                    print(f"drew {path.with_suffix('.svg')}")
    if not page.is_file():
        raise BenchError(f"{page} does not exist; its tables are written from the records")
    changed = rewrite(page, folder)
    for path in changed:
        print(f"{'rewrote' if path.exists() else 'removed'} {path}")
    if not changed:
        print(f"up to date: {page} and the pages in {folder}")
    return 0
