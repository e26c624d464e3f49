"""The generated documentation: the parts between markers in the Markdown files, and the benchmark pages.

``python -m ci.docs`` rewrites them; ``--check`` ends 1 if one is out of date.

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ci import breakdown, chosen, fits, headline, ncu, portable, regressions
from ci.rows import ROOT, Engine, Row, engines, load, reasons
from ci.soak.report import runs_table
from ci.support import CONFIGURATIONS
from nsa_plugin.backends.common.paths import SGLANG, VLLM
from nsa_plugin.backends.vllm.startup.model import is_portable
from nsa_plugin.commands.engines import ENGINES
from nsa_plugin.layouts import BF16, INDEXER_FP8, V32_FP8
from nsa_plugin.libraries.architectures import EVIDENCE
from nsa_plugin.libraries.capabilities import V32_ROW, Capability, spans
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.registry import OPS, REFERENCE, Provider, Registry
from nsa_plugin.settings import BACKEND_OPS, ENV_PREFIX, Settings
from nsa_plugin.tools.compare.record import read as read_comparisons
from nsa_plugin.tools.pages import site
from nsa_plugin.tools.pages.comparisons import compared, failure
from nsa_plugin.tools.pages.markdown import fill, markdown_table
from nsa_plugin.tools.pages.summary import model_family, on_gpu

SUMMARY = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "docs" / "benchmarks"


def settings_table() -> str:
    rows = [
        [
            f"`{field.name}`",
            f"`{ENV_PREFIX}{field.name.upper()}`",
            f"`{field.default}`" if field.default != "" else "empty",
            Settings.allowed(field.name),
            field.metadata["doc"],
        ]
        for field in fields(Settings)
    ]
    return markdown_table(["setting", "environment", "default", "allowed", "what it does"], rows)


def compatibility_table(results: list[Row] | None = None) -> str:
    done = {row.key: row for row in (load() if results is None else results)}
    served, failed = gpu_records(), gpu_records(passed=False)
    parts = []
    for engine in engines().values():
        rows = []
        for version in sorted({*engine.run, *engine.seams}, key=engine.seams.index):
            key = engine.name, version
            on_gpus = _on_gpu(served.get(key, {}), failed.get(key, {}), reasons(engine.no_gpu, version))
            cells = [_cell(done.get((*key, check)), _no(engine, version, check)) for check in _CHECKS]
            rows.append([version, on_gpus, *cells])
        header = ["version", "served on a GPU", *_CHECKS.values()]
        parts.append(f"### {engine.name}\n\n" + markdown_table(header, rows))
    return "\n\n".join(parts)


def gpu_records(folder: Path = RECORDS, *, passed: bool = True) -> dict[tuple[str, str], dict[str, list[Path]]]:
    """The comparisons of answers by (engine, version), and by model family and GPU.

    An H200 is not named.

    Args:
        passed: those that passed every check, or else those that failed one, with what failed behind the family.
    """
    found: dict[tuple[str, str], dict[str, list[Path]]] = {}
    for path, record in read_comparisons(folder):
        if compared(record) and record["verdict"]["holds"] is passed:
            engine, version = record["engine"].split()
            served = model_family(record) + on_gpu(record)
            if not passed:
                served = f"{served}: {failure(record)}"
            found.setdefault((engine, version), {}).setdefault(served, []).append(path)
    return found


def _on_gpu(
    served: dict[str, list[Path]], failed: dict[str, list[Path]] | None = None, cannot: Sequence[str] = ()
) -> str:
    """Each family with its first record, whose name is the shortest; then every record that failed."""
    cells = []
    for family, paths in sorted(served.items()):
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        cells.append(f"{family}: {_link(min(paths, key=lambda path: len(path.stem)))}{more}")
    for family, paths in sorted((failed or {}).items()):
        cells.append(f"{family}, {', '.join(map(_link, sorted(paths)))}")
    return "<br>".join([*(cells or ["not run"]), *(f"no: {reason}" for reason in cannot)])


def _link(record: Path) -> str:
    return f"[{record.stem}](benchmarks/{record.parent.name}/{record.stem}.md)"


_CHECKS = {"run": "served on a CPU", "seams": "objects the plugin changes or builds on"}


def _no(engine: Engine, version: str, check: str) -> str:
    """Why a version is not checked; "" if it is."""
    if version in getattr(engine, check):
        return ""
    found = reasons(engine.no_run, version)
    if len(found) != 1:
        raise ValueError(f"ci/matrix.toml: {engine.name} {version} is not run, and no_run has {len(found)} reasons")
    return f"no: {found[0]}"


def _cell(row: Row | None, no: str) -> str:
    if no:
        return no
    if row is None:
        return "not run yet"
    return f"{row.outcome}: {row.detail} ({row.date})"


def patches_table() -> str:
    parts = []
    for engine in ENGINES.values():
        rows = [
            [
                f"`{patch.name}`",
                str(patch.need),
                "<br>".join(f"`{t.path}` {t.versions}" for t in patch.targets),
                patch.why,
                patch.upstream or "-",
                patch.remove_when or ("-" if patch.replacement else "built on, not changed"),
            ]
            for patch in engine.ledger.PATCHES
        ]
        header = ["patch", "when", "target", "why", "upstream", "can go when"]
        parts.append(f"### {engine.name} {engine.ledger.SUPPORTED}\n\n" + markdown_table(header, rows))
    return "\n\n".join(parts)


def support_table() -> str:
    """What is left to each stock engine, and what is refused."""
    parts = []
    for engine in (SGLANG, VLLM):
        rows = [[one.what, one.given, str(one.outcome), one.why] for one in CONFIGURATIONS if one.engine == engine]
        parts.append(f"## {engine}\n\n" + markdown_table(["configuration", "given by", "outcome", "because"], rows))
    return "\n\n".join(parts)


def overhead_table() -> str:
    """What the plugin takes of the CPU, from the records of `nsa_plugin.tools.bench.overhead`.

    A column for each CPU, which may have a record for each engine.
    """
    columns: dict[str, dict[str, str]] = {}
    for path in sorted((RECORDS / "cpu").glob("overhead*.json")):
        record = json.loads(path.read_text())
        cells = columns.setdefault(f"{record['host']['cpu']}: median, 99th percentile", {})
        for row in record["rows"]:
            call = "p50_us" in row
            times = f"{row['p50_us']}, {row['p99_us']} µs" if call else f"{row['p50_ms']}, {row['max_ms']} ms"
            cells[row["what"]] = times
    names = dict.fromkeys(name for cells in columns.values() for name in cells)
    rows = [[name, *(cells.get(name, "not measured") for cells in columns.values())] for name in names]
    return markdown_table(["what", *columns], rows)


def agreement_table() -> str:
    """How far the served tokens agree with the reference, from the records in docs/benchmarks/cpu."""
    rows = []
    for path in sorted((RECORDS / "cpu").glob("vllm-*.json")):
        record = json.loads(path.read_text())
        groups: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for row in record["rows"]:
            groups["fault" in row["case"]].append(row)
        right, wrong = groups[False], groups[True]
        case = right[0]["case"]
        how = [f"tp {case['tp']}", *(name.replace("_", " ") for name in ("compile", "small_cache") if case[name])]
        rows.append(
            [
                case["engine"],
                case["model"].partition(",")[0],
                case["dtype"],
                ", ".join(how),
                _tokens(right),
                f"{max(row['max_error'] for row in right):.1e}",
                _tokens(wrong) if wrong else "not run",
                f"[record](benchmarks/cpu/{path.name}), {record['date']}",
            ]
        )
    counted = ["tokens equal", "largest |Δlogprob|", "tokens equal in the control"]
    header = ["engine", "model", "dtype", "how", *counted, "record"]
    return markdown_table(header, rows)


def _tokens(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['equal'] for row in rows)} of {sum(row['tokens'] for row in rows)}"


def kernels_table() -> str:
    """Tables of the ops with their references, of the other providers' limits, and of the kernel libraries."""
    registry, ops, providers = Registry(), [], []
    for op, target in OPS.items():
        module, _, function = target.partition(":")
        documented = getattr(importlib.import_module(module), function).__doc__
        summary = documented.strip().splitlines()[0].removesuffix(" Contract: see the module.")
        ops.append([f"`{op}`", summary, f"`{module}`"])
        providers += [
            [f"`{op}`", provider.name, *limits]
            for provider in registry.providers(op)
            if provider.name != REFERENCE
            for limits in _limits(provider)
        ]
    libraries = [
        [
            library.name,
            "<br>".join(f"`{host.module}` from {', '.join(host.distributions)}" for host in library.hosts),
            ", ".join(f"`{name}`" for name, op in BACKEND_OPS.items() if library.supports(op)) or "-",
            ", ".join(f"`{module}`" for module in library.requires) or "-",
        ]
        for library in MANIFEST.values()
    ]
    return "\n\n".join(
        [
            markdown_table(["op", "result", "contract"], ops),
            markdown_table(["op", "provider", "GPUs", "cache layouts", "heads", "top-k"], providers),
            markdown_table(["kernel library", "installed as", "value of", "the providers import"], libraries),
        ]
    )


def _limits(provider: Provider) -> list[list[str]]:
    """GPUs, layouts, heads and top-k of the provider's kernels for its op, of which those with the same limits share a
    line."""
    # The paged form of the indexer has the limits of the ragged one.
    op = provider.op.removesuffix("_paged")
    kernels = [kernel for kernel in MANIFEST[provider.name].kernels if kernel.op == op]
    if not kernels:
        sms = "any" if provider.sms is None else ", ".join(f"SM{sm}" for sm in sorted(provider.sms))
        return [[sms, "-", "-", "-"]]
    same: dict[tuple[str, str, str], list[Capability]] = {}
    for kernel in kernels:
        heads = "any" if kernel.heads_given(1) == 1 and not kernel.head_counts else kernel.heads_in_words
        topk = "any" if kernel.topk_multiple == 1 else f"multiples of {kernel.topk_multiple}"
        same.setdefault((", ".join(kernel.layouts) or "-", heads, topk), []).append(kernel)
    layouts: dict[tuple[str, str, str], list[str]] = {}
    for (layout, heads, topk), those in same.items():
        layouts.setdefault((spans(those), heads, topk), []).append(layout)
    return [[gpus, ", ".join(dict.fromkeys(names)), heads, topk] for (gpus, heads, topk), names in layouts.items()]


def tested_table() -> str:
    """What was compiled, emulated and run for each class of GPU that the portable path is for."""
    rows = [
        [
            f"SM{sm}: {one.gpus}",
            one.compiled,
            one.emulated or "no",
            one.run or "no",
        ]
        for sm, one in EVIDENCE.items()
        if is_portable(sm)
    ]
    return markdown_table(["class", "compiled in the tests", "emulated", "run on it"], rows)


KV_GIB = (10, 20, 40)


def kv_memory_table() -> str:
    """Bytes of a token's KV cache by format, and what fits in some sizes of memory of one GPU."""
    latent = {"fp8": V32_FP8.row_bytes, "bf16": BF16.row_bytes(V32_ROW[0])}
    rows = []
    for model, served in fits.MODELS.items():
        layers, indexers = served.num_layers, served.selecting
        for dtype, row_bytes in latent.items():
            token = layers * row_bytes + indexers * INDEXER_FP8.row_bytes
            tokens = [gib * (1 << 30) // token for gib in KV_GIB]
            rows.append(
                [
                    f"{model}, {layers} layers" + (f", {indexers} with an indexer" if indexers < layers else ""),
                    dtype,
                    f"{token:,}",
                    *(f"{count // 1000 * 1000:,} ({count >> 15})" for count in tokens),
                ]
            )
    header = ["model", "cache", "bytes a token", *(f"tokens in {gib} GiB (requests of 32K)" for gib in KV_GIB)]
    return markdown_table(header, rows)


GENERATORS: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "compatibility": compatibility_table,
    "patches": patches_table,
    "support": support_table,
    "agreement": agreement_table,
    "overhead": overhead_table,
    "kernels": kernels_table,
    "kv-memory": kv_memory_table,
    "fits": fits.table,
    "tested": tested_table,
    "portable-prefill": portable.prefill_table,
    "portable-decode": portable.decode_table,
    "chosen": chosen.table,
    "headline": headline.table,
    "profiles": ncu.table,
    "first-token-parts": breakdown.page_table,
    "profiles-h100": partial(ncu.table, ncu.OTHERS, besides=ncu.RECORD),
    "profiles-portable": partial(ncu.table, ncu.EMULATING),
    "regressions": regressions.table,
    "soak": runs_table,
    **site.generators(RECORDS),
}


def render(text: str) -> str:
    """The text with every generated part made anew.

    Raises:
        KeyError: a marker names no generator.
    """
    return fill(text, GENERATORS)


def files() -> list[Path]:
    """Every page that is written by hand; some have generated parts."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def stale() -> dict[Path, str | None]:
    """What is out of date: each page's path and its new text, None for a page whose record is gone."""
    found: dict[Path, str | None] = dict(site.stale(SUMMARY, RECORDS))
    for path in files():
        text = path.read_text()
        if (made := render(text)) != text:
            found[path] = made
    picture = headline.picture()
    if not headline.PICTURE.is_file() or headline.PICTURE.read_text() != picture:
        found[headline.PICTURE] = picture
    return found


def write() -> list[Path]:
    """Rewrite what is out of date; the files that changed."""
    return site.apply(stale())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.docs", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; end 1 if a part is out of date")
    args = parser.parse_args()
    try:
        found = stale()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not args.check:
        for path in site.apply(found):
            print(f"rewrote {path.relative_to(ROOT)}")
        return 0
    for path in found:
        print(f"{path.relative_to(ROOT)} is out of date; run: make docs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
