"""The page of a kernel suite: every measurement of one record of ``nsa-plugin bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_plugin.libraries.architectures import TENSOR_OPERATIONS, name_of, shared_memory_per_block
from nsa_plugin.tools.bench.cases import SUITES, describe_fields
from nsa_plugin.tools.bench.record import BACK_TO_BACK_SUITE, PORTABLE, RIVALS_SUITE, suite_name
from nsa_plugin.tools.bench.tables import grouped
from nsa_plugin.tools.pages.markdown import generated_notice, markdown_table
from nsa_plugin.tools.records import Row

_TOP_K = {"sgl_kernel.fast_topk_v2": "SGLang's", "vllm.top_k_per_row_prefill": "vLLM's"}
"""The engines' top-k kernels, which a suite measures only where the engines are installed."""
HIGHEST_CLOCKS = {"H100 80GB HBM3": (132, 1.98), "H200": (132, 1.98)}
"""SMs and the highest clock that nvidia-smi reports, in GHz, of the GPUs that have emulated others."""


def page(path: Path, record: Row) -> str:
    """The Markdown page of the record at `path`."""
    parts = [generated_notice(path.name), f"# {record['suite']}"]
    if about := about_record(record):
        parts.append(f"{about}. [How to read these tables](../../kernels.md#how-kernels-are-measured).")
    parts.append(_provenance(path, record))
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        host = record["host"]
        limit = (name_of(host["emulates"]), emulated_tflops(host)) if "emulates" in host else None
        parts.append(op_table(op, rows, emulated=limit))
        if crossover := crossovers(rows):
            parts.append(crossover)
    for kind, title in (("refused", "Not supported"), ("failed", "Failed, so not timed")):
        if lines := grouped(record.get(kind, [])):
            parts.append("\n".join([f"{title}:", "", *(f"- {line}" for line in lines)]))
    if skipped := record.get("skipped"):
        parts.append(f"Not measured within the run's time budget: {len(skipped)} cases.")
    if (plot := path.with_suffix(".svg")).is_file():
        parts.append(f"![{record['suite']}]({plot.name})")
    return "\n\n".join(parts) + "\n"


def about_record(record: Row) -> str:
    """What a record's suite measures, and which engines' top-k kernels it was measured with; empty if unknown."""
    about = _resharding(record["rows"]) or describe(record["suite"])
    providers = {row["provider"].rpartition(", ")[2] for row in record["rows"]}
    engines = [name for kernel, name in _TOP_K.items() if kernel in providers]
    return f"{about}; with {' and '.join(engines)} top-k" if about and engines else about


def _resharding(rows: Sequence[Row]) -> str:
    """What a suite measures whose cases are of a group of GPUs; empty for another."""
    case = next((row["case"] for row in rows if "tp" in row["case"]), None)
    if case is None:
        return ""
    return (
        f"Resharding over {case['tp']} GPUs, {case['tp'] * case['heads']} heads in all: each GPU attends with all "
        "heads for its share of the query tokens; baseline: with its own heads for all of them"
    )


def describe(suite: str) -> str:
    """What a suite measures; empty for one that `nsa-plugin bench` does not list."""
    found = SUITES.get(suite_name(suite))
    if found is None:
        return ""
    about = found.about[0].upper() + found.about[1:]
    if suite.startswith(PORTABLE):
        about += "; the plugin's kernels run as on a GPU with less shared memory and no fp8 instructions"
    if BACK_TO_BACK_SUITE in suite:
        about += "; timed call after call, without emptying the L2 cache"
    if suite.endswith(RIVALS_SUITE):
        about += "; beside kernels for few heads that SGLang and vLLM install and do not use by default"
    return about


def position(suite: str) -> tuple[int, str]:
    """A suite's position in the index: the order of `nsa-plugin bench --list`, unknown ones last."""
    order = list(SUITES)
    name = suite_name(suite)
    return (order.index(name) if name in order else len(order), suite)


def _provenance(path: Path, record: Row) -> str:
    host = record["host"]
    libraries = [f"torch {host['torch']}", f"triton {host['triton']}"]
    libraries += [f"{name} {version}" for name, version in host["libraries"].items()]
    rates = [f"copy {host['copy_gb_s']} GB/s"] if host.get("copy_gb_s") else []
    rates += [f"bf16 matmul {host['matmul_tflops']} TFLOPS"] if host.get("matmul_tflops") else []
    rates += [f"fp8 matmul {host['fp8_matmul_tflops']} TFLOPS"] if host.get("fp8_matmul_tflops") else []
    emulated = ""
    if sm := host.get("emulates"):
        held = " and no more blocks on an SM" if host.get("emulates_blocks") else ""
        emulated = (
            f", the plugin's kernels as on SM{sm} ({shared_memory_per_block(sm) >> 10} KiB of shared memory for a "
            f"block{held}, fp8 codes multiplied as float16); the floor is the limit at this GPU's copy and bf16 rates"
        )
        if most := emulated_tflops(host):
            emulated += f"; {name_of(sm)}'s tensor cores, as many and at this GPU's highest clock: {most:.0f} TFLOPS"
    facts = {
        "Record": f"[{path.name}]({path.name}), {record['date']}, commit {host['commit'] or 'unknown'}",
        "Command": f"`{record['command']}`",
        "Device": f"{host['gpu']}{emulated}; measured rates: {', '.join(rates) or 'none'}",
        "Software": ", ".join(libraries),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def emulated_tflops(host: Row) -> float:
    """What the tensor cores of an emulated GPU would do at most, with as many SMs as the real one and at its highest
    clock; 0 if that is not known."""
    found = [sms * ghz for name, (sms, ghz) in HIGHEST_CLOCKS.items() if name in host["gpu"]]
    return found[0] * TENSOR_OPERATIONS.get(host["emulates"], 0) / 1e3 if found else 0.0


def op_table(op: str, rows: Sequence[Row], *, emulated: tuple[str, float] | None = None) -> str:
    """One line for each case: the floor, every provider's median and speed-up, and the best time over the floor.

    Args:
        emulated: the name of an emulated GPU's architecture and its `emulated_tflops`. Then also each provider's
            achieved TFLOPS and its share of the floor's limit, and the plugin's of the emulated tensor cores.
    """
    varying, constant = _split_case([row["case"] for row in rows])
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row["case"].items()), {})[row["provider"]] = row
    errors = {name: max(row["max_error"] for row in rows if row["provider"] == name) for name in providers}

    lines = []
    # Suites list cases by importance; a table is easier to read in the order of the values.
    for case, by_provider in sorted(cases.items(), key=lambda one: [(isinstance(v, str), v) for _, v in one[0]]):
        best = min(by_provider.values(), key=lambda row: float(row["median_us"]))
        fields = dict(case)
        lines.append(
            [
                *(str(fields.get(name, "")) for name in varying),
                _us(best["floor_us"]),
                *(_cell(by_provider.get(name), emulated) for name in providers),
                f"{best['median_us'] / best['floor_us']:.2f}" if best["floor_us"] else "-",
            ]
        )
    header = [*varying, "floor µs", *providers, "best ÷ floor"]
    caption = f"**{op}**" + (f", {describe_fields(constant)}" if constant else "")
    largest = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    baselines = list(dict.fromkeys(row["baseline"] for row in rows if row["baseline"]))
    compared = f" The speed-up is over {' or '.join(baselines)}." if baselines else ""
    return f"{caption}. Median µs.{compared}\n\n{markdown_table(header, lines)}\n\nLargest error: {largest}."


def _split_case(cases: Sequence[Row]) -> tuple[list[str], Row]:
    """The names of the fields that differ between cases, and the fields that do not, with their values."""
    names = list(dict.fromkeys(name for case in cases for name in case))
    values = {name: {case.get(name) for case in cases} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: cases[0][name] for name in names if name not in varying}


def _cell(row: Row | None, emulated: tuple[str, float] | None = None) -> str:
    if row is None:
        return "-"
    is_baseline = row["provider"] == row["baseline"]
    notes = [] if row["speedup"] is None or is_baseline else [f"{row['speedup']:.2f}×"]
    if emulated and "tflops" in row:
        notes += [f"{row['tflops']:.0f} TFLOPS", f"{row['floor_us'] / row['median_us']:.0%} of the limit"]
        name, most = emulated
        if most and row["provider"].startswith(("cuda", "triton")):
            notes.append(f"{row['tflops'] / most:.0%} of {name}'s tensor cores")
    notes += [f"{row['extra_mib']:.0f} MiB"] if "extra_mib" in row else []
    notes += [f"+ {_us(row[name])}" for name in ("up_projection_us", "absorb_us") if name in row]
    return _us(row["median_us"]) + (f" ({', '.join(notes)})" if notes else "")


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def crossovers(rows: Sequence[Row]) -> str:
    """Up to which length dense attention with its up-projection beats sparse attention; "" for other ops."""
    dense_and_sparse: dict[int, dict[int, dict[str, float]]] = {}
    for row in rows:
        for field, kind in (("up_projection_us", "dense"), ("absorb_us", "sparse")):
            if field in row:
                by_length = dense_and_sparse.setdefault(row["case"]["heads"], {})
                best = by_length.setdefault(row["case"]["q"], {})
                best[kind] = min(best.get(kind, float("inf")), row["median_us"] + row[field])
    lines = []
    for heads, by_length in sorted(dense_and_sparse.items()):
        compared = {q: best for q, best in sorted(by_length.items()) if len(best) == 2}
        ahead = [q for q, best in compared.items() if best["dense"] <= best["sparse"]]
        behind = [q for q in compared if q not in ahead]
        if compared:
            lines.append(f"- {heads} heads: {_ahead(ahead, behind)}")
    if not lines:
        return ""
    title = "Dense attention with its up-projection is at least as fast as sparse attention with its absorption:"
    return "\n".join([title, "", *lines])


def _ahead(ahead: Sequence[int], behind: Sequence[int]) -> str:
    if not behind:
        return f"at every length measured, {ahead[0]} to {ahead[-1]} tokens"
    if not ahead:
        return f"at no length measured, {behind[0]} to {behind[-1]} tokens"
    if max(ahead) < min(behind):
        return f"up to {max(ahead)} tokens, not at {min(behind)}"
    return f"at {', '.join(map(str, ahead))} tokens, not at {', '.join(map(str, behind))}"
