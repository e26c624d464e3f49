"""The tables of docs/benchmarks.md: a selection of the records' figures, each with a link to its record's page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from nsa_plugin.tools.bench.cases import RANDOM, describe_fields, selection_of
from nsa_plugin.tools.pages.comparisons import compared, failure
from nsa_plugin.tools.pages.markdown import markdown_table
from nsa_plugin.tools.records import Row, gpu_name

Records = Sequence[tuple[Path, Row]]
NOTHING = "No record is here yet."

UNNAMED_GPU = "H200"
"""The GPU of most records: a table names the others alone."""
_CONTEXT = re.compile(r"-context\d+")
"""A server's longest prompt, in the name of its record."""
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
SHORTEST = 2000
"""Tokens of the shortest prompt in the table of first tokens."""
_MEASURES = {
    "ttft_ms": "first token",
    "long_ttft_ms": "first token of the long prompt",
    "itl_ms": "time between tokens",
    "input_tokens_per_s": "throughput",
    "output_tokens_per_s": "throughput",
    "first_output_tokens_per_s": "throughput, first pass",
}


class Highlight(NamedTuple):
    """Cases of a kernel suite that the summary shows: those of `op` that `where` matches, with random selections.

    Attributes:
        plugin: the providers that the plugin may choose, which the stock path is compared with.
    """

    suite: str
    op: str
    what: str
    where: dict[str, int]
    plugin: tuple[str, ...]


_SPARSE = ("cuda", "triton", "flash_mla decode kernel", "flash_mla padded, bf16 copy included")
_BF16_PREFILL = ("cuda", "triton", "flash_mla padded")
_BF16_DECODE = ("cuda", "triton", "fa3")
_V4 = ("cuda", "triton", "flash_mla decode kernel", "dequantise, combine, flash_mla")
_INDEXER_CASE = {"q": 8192, "kv": 131072, "topk": 2048, "budget_mib": 512}
_CHUNKS = ("", ", 2 chunks", ", 4 chunks")
_RESHARDED = tuple(f"token_shard flash_mla{chunks}" for chunks in _CHUNKS)
_RESHARDED_LAYER = tuple(f"token_shard deep_gemm, flash_mla{chunks}" for chunks in _CHUNKS)
HIGHLIGHTS = (
    Highlight("sparse-mla-prefill", "sparse_mla_prefill", "V3.2 prefill", {"q": 4096, "kv": 65536}, _SPARSE),
    Highlight("sparse-mla-decode", "sparse_mla_decode", "V3.2 decode", {"batch": 128, "s_q": 1}, ("cuda", "triton")),
    Highlight(
        "sparse-mla-prefill-bf16", "sparse_mla_prefill", "V3.2 prefill, bf16", {"q": 4096, "kv": 65536}, _BF16_PREFILL
    ),
    Highlight(
        "sparse-mla-decode-bf16", "sparse_mla_decode", "V3.2 decode, bf16", {"batch": 128, "s_q": 1}, _BF16_DECODE
    ),
    Highlight("v4-prefill", "v4_prefill_route", "V4 prefill", {"q": 8192, "kv": 65536, "page_size": 256}, _V4),
    Highlight("indexer-topk", "indexer_topk", "V3.2 indexer", _INDEXER_CASE, ("cuda", "deep_gemm", "triton")),
    Highlight(
        "token-shard-tp2", "token_shard_layer", "resharded layer, 2 GPUs", {"q": 8192, "kv": 65536}, _RESHARDED_LAYER
    ),
    Highlight(
        "token-shard-tp4", "token_shard_layer", "resharded layer, 4 GPUs", {"q": 8192, "kv": 65536}, _RESHARDED_LAYER
    ),
    Highlight("token-shard-tp2", "token_shard_attention", "resharded decode, 2 GPUs", {"batch": 512}, _RESHARDED),
    Highlight("token-shard-tp4", "token_shard_attention", "resharded decode, 4 GPUs", {"batch": 512}, _RESHARDED),
)


def first_token(served: Records) -> str:
    """Speed-ups of the time to the first token of one prompt alone, by its length; bold where the outcome is clear.

    A figure of two servers of each kind stands for those of one, which may be of a start. Prompts of less than
    `SHORTEST` tokens are on their record's page.
    """
    found = [
        (path, _server(record, row["case"]), row)
        for path, record, rows in _newest(served, alone=True)
        for row in rows
        if row["case"]["prompt"] >= SHORTEST
    ]
    twice = {(server, row["case"]["prompt"]) for _, server, row in found if "again_speedup" in row}
    cells: dict[tuple[Path, str], dict[int, str]] = {}
    for path, server, row in found:
        prompt = row["case"]["prompt"]
        if (server, prompt) not in twice or "again_speedup" in row:
            cells.setdefault((path, server), {})[prompt] = _speedup(row)
    lengths = sorted({prompt for one in cells.values() for prompt in one})
    lines = [[server, *(one.get(n, "-") for n in lengths), _link(path)] for (path, server), one in cells.items()]
    lines.sort(key=_by_server)
    header = ["server", *(f"{length:,}" for length in lengths), "record"]
    return markdown_table(header, lines) if lines else NOTHING


def loads(served: Records) -> str:
    """Speed-ups of the other timed loads: many prompts at once, long answers, short prompts behind a long one.

    Prompts without an answer are shown in a request each; in one request they are on their record's page.
    """
    found: dict[tuple[Path, str], list[str]] = {}
    cells: dict[tuple[Path, str], dict[str, str]] = {}
    for path, record, rows in _newest(served, alone=False):
        for row in rows:
            if row["case"].get("in_one") and row["case"]["new_tokens"] == 1:
                continue
            key = (path, _load(row["case"]))
            found.setdefault(key, [_server(record, row["case"]), key[1]])
            cells.setdefault(key, {})[_MEASURES[row["case"]["measure"]]] = _speedup(row)
    measures = [name for name in dict.fromkeys(_MEASURES.values()) if any(name in one for one in cells.values())]
    lines = [[*start, *(cells[key].get(m, "-") for m in measures), _link(key[0])] for key, start in found.items()]
    lines.sort(key=_by_server)
    return markdown_table(["server", "load", *measures, "record"], lines) if lines else NOTHING


def _by_server(line: Sequence[str]) -> tuple[str, str, int, list[str]]:
    """A line's place in a table: by engine, model, number of heads, and the rest of what names its server."""
    engine, model, served, *rest = line[0].split(", ")
    return engine.partition(" ")[0], model, int(served.split()[0]), [served, *rest]


def limits(served: Records) -> str:
    """The prompts that the stock engine failed at."""
    lines = [
        [
            _server(record, row["case"]),
            _longest(row["baseline_answered"]),
            _tokens(row["baseline_failed_at"]),
            _longest(row["answered"]),
            _link(path),
        ]
        for path, record in served
        for row in record["rows"]
        if row["op"] == "limit"
    ]
    header = ["server", "stock answers up to", "stock fails at", "plugin answers up to", "record"]
    return markdown_table(header, lines) if lines else NOTHING


def _longest(answered: Sequence[int]) -> str:
    return _tokens(max(answered)) if answered else "no length that was tried"


def _tokens(count: int | None) -> str:
    return "no length that was tried" if count is None else f"{count:,} tokens"


def _newest(served: Records, *, alone: bool) -> Iterator[tuple[Path, Row, list[Row]]]:
    """Each record's timed loads, without those that a newer version of the engine was timed with, all else equal.

    The longest prompt that a server allows may differ: what was timed has its own lengths. Servers that attended short
    prompts otherwise than by default are on their records' pages alone.
    """
    served = [(path, record) for path, record in served if not is_dense_if_asked(record)]

    def timed(record: Row) -> list[Row]:
        return [row for row in record["rows"] if row["op"] == "serve" and (row["case"]["requests"] == 1) == alone]

    def same(record: Row, row: Row) -> tuple[str, str]:
        suite = record["suite"].replace(record["engine"].replace(" ", "-"), "").removesuffix("-speed")
        return _CONTEXT.sub("", suite), f"{record['engine'].split()[0]}{on_gpu(record)} {row['case']}"

    versions: dict[tuple[str, str], list[Version]] = {}
    for _, record in served:
        for row in timed(record):
            versions.setdefault(same(record, row), []).append(_version(record))
    for path, record in served:
        yield path, record, [row for row in timed(record) if _version(record) == max(versions[same(record, row)])]


def _version(record: Row) -> Version:
    return Version(record["engine"].split()[1])


def _speedup(row: Row) -> str:
    """The speed-ups of the plugin's servers, bold where the outcome is clear; in brackets a second stock server."""
    shown = " and ".join(f"{one:.2f}×" for one in ratios(row))
    again = _over_stock(row, "baseline_again_")
    return (f"**{shown}**" if clear(row) else shown) + ("" if again is None else f" ({again:.2f}×)")


def ratio(row: Row) -> float:
    """How many times faster the plugin is: in pairs of readings where there are pairs."""
    found = _over_stock(row, "")
    assert found is not None
    return found


def ratios(row: Row) -> list[float]:
    """`ratio` of each server with the plugin."""
    again = _over_stock(row, "again_")
    return [ratio(row)] if again is None else [ratio(row), again]


def _over_stock(row: Row, server: str) -> float | None:
    """As `ratio`, of the server whose keys begin with `server`; None without one."""
    found: float | None = row.get(f"{server}paired_speedup", row.get(f"{server}speedup"))
    return found


def clear(row: Row) -> bool:
    """Whether the readings tell plugin and stock apart.

    They do if the plugin's interquartile range overlaps that of no stock server and the plugin differs from stock by
    more than twice as much as a second stock server does, where one was run. With a second server of the plugin, both
    have to, in the same direction.
    """
    stock = [name for name in ("baseline_", "baseline_again_") if f"{name}q1" in row]
    ours = [name for name in ("", "again_") if f"{name}q1" in row]
    apart = all(
        row[f"{our}q3"] < row[f"{name}q1"] or row[f"{our}q1"] > row[f"{name}q3"] for our in ours for name in stock
    )
    differences = [math.log(_over_stock(row, our) or 1.0) for our in ours]
    least = min(map(abs, differences)) if max(differences) < 0 or min(differences) > 0 else 0.0
    return apart and least > 2 * abs(math.log(_over_stock(row, "baseline_again_") or 1.0))


def _server(record: Row, case: Row) -> str:
    served = heads(case["heads"], record["host"]["gpus"])
    cache = ", bf16 cache" if case.get("kv") == "bf16" else ""
    asked = ", token_shard=on" if reshards_if_asked(record) else ""
    return f"{engine_name(record)}, {model_family(record)}, {served}{cache}{asked}{on_gpu(record)}"


def reshards_if_asked(record: Row) -> bool:
    """Whether the record's server had the setting token_shard=on, and so may do what a plan would not choose."""
    return bool(_settings(record).get("token_shard") == "on")


def is_dense_if_asked(record: Row) -> bool:
    """Whether the record's server was told which short prompts attend densely, or to split prefills."""
    settings = _settings(record)
    return bool(settings.get("mha_max_kv", -1) != -1 or settings.get("split_prefill") == "on")


def _settings(record: Row) -> Row:
    """The plugin's settings in the record's server."""
    plugin: Row = record["servers"].get("plugin", {}) if isinstance(record.get("servers"), dict) else {}
    settings: Row = plugin.get("settings", {})
    return settings


def on_gpu(record: Row) -> str:
    """The record's GPU for the end of a name, unless it is the one that goes without saying."""
    name = gpu_name(record["host"]["gpu"])
    return "" if name == UNNAMED_GPU else f", {name}"


def heads(count: int, gpus: int) -> str:
    """Heads of a GPU, and the GPUs if there are several."""
    return f"{count} heads" + (f" × {gpus} GPUs" if gpus > 1 else "")


def engine_name(record: Row) -> str:
    """The engine's name as it spells it, and its version."""
    name, _, version = record["engine"].partition(" ")
    return f"{ENGINES.get(name, name)} {version}"


def model_family(record: Row) -> str:
    """The family of the model that a comparison served."""
    (architecture,) = record["model"]["architectures"]
    return {"DeepseekV4ForCausalLM": "V4", "GlmMoeDsaForCausalLM": "GLM-5"}.get(architecture, "V3.2")


def _load(case: Row) -> str:
    lengths = " and ".join(f"{tokens:,}" for tokens in case.get("turns", [case["prompt"]]))
    text = f"{case['requests']} prompts of {lengths} tokens" + (" in turn" if "turns" in case else "")
    text += f", {case['new_tokens']:,} out" if case["new_tokens"] > 1 else ""
    text += f", behind one of {case['long']:,}" if "long" in case else ""
    return text + (", in one request" if case.get("in_one") else "")


def _figure(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _link(path: Path) -> str:
    return f"[record](benchmarks/{path.parent.name}/{path.stem}.md)"


STAND_IN = "torch.topk"
"""The top-k of records that were made where no engine was installed."""


def kernels(timed: Records) -> str:
    """The highlights: the stock path and the fastest path that the plugin may choose, per number of heads.

    A case whose fastest path is the stock path itself is left out.
    """
    lines = []
    gpus = {path: on_gpu(record) for path, record in timed}
    for highlight, path, best in highlights(timed):
        if best["provider"] == best["baseline"]:
            continue
        shown = {name: value for name, value in best["case"].items() if name in ("heads", "q", "batch", "kv")}
        lines.append(
            [
                highlight.what + gpus[path],
                describe_fields(shown),
                f"{_figure(best['baseline_us'])} ({best['baseline']})",
                f"{_figure(best['median_us'])} ({best['provider']})",
                f"{best['baseline_us'] / best['median_us']:.2f}×",
                _link(path),
            ]
        )
    header = ["operation", "case", "stock path, µs", "fastest path of the plugin, µs", "speed-up", "record"]
    return markdown_table(header, lines) if lines else NOTHING


def highlights(timed: Records) -> Iterator[tuple[Highlight, Path, Row]]:
    """Each highlight's cases by heads: the record's path, and the row of the fastest path of the plugin.

    A case beside a baseline that no engine runs is left out where another record has it beside an engine's.
    """
    found = list(_highlights(timed))
    by_engines = {(one.what, str(row["case"])) for one, _, row in found if not row["baseline"].endswith(STAND_IN)}
    for one, path, row in found:
        if not row["baseline"].endswith(STAND_IN) or (one.what, str(row["case"])) not in by_engines:
            yield one, path, row


def _highlights(timed: Records) -> Iterator[tuple[Highlight, Path, Row]]:
    for highlight in HIGHLIGHTS:
        for path, record in timed:
            if record["suite"] != highlight.suite:
                continue
            cases: dict[str, list[Row]] = {}
            for row in record["rows"]:
                if selection_of(row["case"]) != RANDOM:
                    continue
                if row["op"] == highlight.op and highlight.where.items() <= row["case"].items():
                    cases.setdefault(str(row["case"]), []).append(row)
            for rows in sorted(cases.values(), key=lambda rows: int(rows[0]["case"]["heads"])):
                ours = [row for row in rows if row["provider"] in highlight.plugin and row["baseline_us"]]
                if ours:
                    yield highlight, path, min(ours, key=lambda row: float(row["median_us"]))


def correctness(served: Records) -> str:
    """How many comparisons passed, by engine version and model, with a link to each that failed."""
    groups: dict[str, list[tuple[Path, Row]]] = {}
    for path, record in served:
        if compared(record):
            pair = f" against {engine_name(record['beside'])}" if "beside" in record else ""
            groups.setdefault(f"{engine_name(record)}{pair}, {model_family(record)}", []).append((path, record))
    lines = []
    for name, records in groups.items():
        failed = [(path, why) for path, record in records if (why := failure(record))]
        links = "; ".join(f"[{why}](benchmarks/{path.parent.name}/{path.stem}.md)" for path, why in failed)
        lines.append([name, f"[{len(records) - len(failed)}](benchmarks/records.md#engine-comparisons)", links or "0"])
    return markdown_table(["compared", "passed", "failed"], lines) if lines else NOTHING
