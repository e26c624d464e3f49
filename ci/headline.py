"""The README's picture and its table of figures, from the records alone.

Both show each server that was timed: engine, model and heads, from the newest engine version with timings. A figure is
bold, or its bar full, if the readings tell plugin and stock apart (`summary.clear`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from packaging.version import Version

from ci.rows import ROOT
from nsa_plugin.decision.sparse import NEARLY_EQUAL
from nsa_plugin.tools.bench.record import read as read_timings
from nsa_plugin.tools.compare.record import read as read_comparisons
from nsa_plugin.tools.pages import summary
from nsa_plugin.tools.pages.markdown import markdown_table

RECORDS = ROOT / "docs" / "benchmarks"
PICTURE = ROOT / "docs" / "speed.svg"
DECODE = "output_tokens_per_s"
REQUESTS = 32
"""At once, in most records of output tokens a second."""


@cache
def repository() -> str:
    """The repository's address, from `[project.urls]` of pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"])


def file_url(path: str) -> str:
    """The page of a file of the repository."""
    return f"{repository()}/blob/main/{path}"


class Server(NamedTuple):
    """The timings of one server.

    Attributes:
        engine, version, model, heads, gpus, layers: what was served; heads of one GPU.
        gpu: ", H100" and so on; "" for the GPU of most records.
        alone: the row of the longest single prompt.
        decode: the row of the output tokens a second, in one request if it was timed so, or None.
        path: the record of `alone`.
    """

    engine: str
    version: str
    model: str
    heads: int
    gpus: int
    layers: int
    gpu: str
    alone: dict[str, Any]
    decode: dict[str, Any] | None
    path: Path

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.model}, {summary.heads(self.heads, self.gpus)}{self.gpu}"


def servers(folder: Path = RECORDS) -> list[Server]:
    """Every server with a timed single prompt, by heads, GPUs, model and engine, of the records in FOLDER/<host>/.

    Those that reshard or attend densely because a setting says so are left out: by themselves they would do what is
    quicker.
    """
    groups: dict[tuple[Any, ...], dict[str, list[tuple[Path, dict[str, Any]]]]] = {}
    for path, record in read_comparisons(folder):
        if summary.reshards_if_asked(record) or summary.is_dense_if_asked(record):
            continue
        engine, version = record["engine"].split()
        for row in record["rows"]:
            if row["op"] == "serve":
                key = (row["case"]["heads"], record["host"]["gpus"], summary.model_family(record), engine)
                groups.setdefault(key, {}).setdefault(version, []).append((path, record))
                break
    found = []
    for (heads, gpus, model, engine), versions in sorted(groups.items()):
        for version in sorted(versions, key=Version, reverse=True):
            timed = [(path, record, row) for path, record in versions[version] for row in record["rows"]]
            timed = [one for one in timed if one[2]["op"] == "serve"]
            alone = [one for one in timed if one[2]["case"]["requests"] == 1]
            if not alone:
                continue
            # The record with the longest prompt; of several, the newest. Other figures are of the same GPU.
            path, record, row = max(alone, key=lambda one: (one[2]["case"]["prompt"], one[1]["date"], one[0].stem))
            gpu = summary.on_gpu(record)
            timed = [one for one in timed if summary.on_gpu(one[1]) == gpu]
            # Streamed, a small model's tokens wait for the server's HTTP.
            decode = _row(timed, path, DECODE, lambda case: bool(case.get("in_one")))
            decode = decode or _row(timed, path, DECODE, lambda case: True)
            layers = record["model"]["num_hidden_layers"]
            name = summary.ENGINES.get(engine, engine)
            found.append(Server(name, version, model, heads, gpus, layers, gpu, row, decode, path))
            break
    return found


def _row(
    timed: Iterable[tuple[Path, dict[str, Any], dict[str, Any]]],
    path: Path,
    measure: str,
    fits: Callable[[dict[str, Any]], bool],
) -> dict[str, Any] | None:
    """The row of a measure for a load without a long prompt: of the record at `path` if it has one, else the newest."""
    rows = [
        (one, record, row)
        for one, record, row in timed
        if row["case"]["measure"] == measure and "long" not in row["case"] and fits(row["case"])
    ]
    best = max(rows, key=lambda one: (one[0] == path, one[1]["date"], -one[2]["case"]["new_tokens"]), default=None)
    return best[2] if best else None


def table() -> str:
    """Every server's figures, with links to the records."""
    lines = [
        [
            f"{one.engine} {one.version}, {one.name.partition(', ')[2]}",
            str(one.layers),
            _figure(one.alone, f"{one.alone['case']['prompt']:,} tokens", " ms"),
            _figure(one.decode, _requests(one.decode), ""),
            f"[record]({file_url(one.path.with_suffix('.md').relative_to(ROOT).as_posix())})",
        ]
        for one in servers()
    ]
    load = f"{REQUESTS} × 4,096 in, 256 out: output tokens/s"
    header = ["server", "layers", "time to first token, one prompt", load, "record"]
    return markdown_table(header, lines) if lines else summary.NOTHING


def _requests(row: dict[str, Any] | None) -> str:
    """What a figure says of a load with another number of requests than the column."""
    requests = row["case"]["requests"] if row else REQUESTS
    return "" if requests == REQUESTS else f"{requests} requests"


def _figure(row: dict[str, Any] | None, what: str, unit: str) -> str:
    """The speed-up, with the medians where the readings tell the two apart."""
    if row is None:
        return "-"
    shown = " and ".join(f"{ratio:.2f}×" for ratio in summary.ratios(row))
    if not summary.clear(row):
        return shown + (f" ({what})" if what else "")
    medians = f"{_number(row['baseline_median'])} → {_number(row['median'])}{unit}"
    return f"**{shown}** ({what}{', ' if what else ''}{medians})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


# The picture. Widths in SVG units, which are pixels where it is shown at its own size.
_WIDTH, _LABEL, _COLUMN, _LINE = 860, 268, 304, 25
_MOST = 2.25  # the speed-up at a column's right end, less the space for the figure
_FULL, _PALE, _STOCK, _TEXT, _SOFT = "#0f766e", "#99d5cd", "#6b7280", "#1f2937", "#5b6472"


class Bar(NamedTuple):
    """A speed-up over stock. clear: the readings tell the two apart. note: what was measured, after the figure."""

    speedup: float
    clear: bool
    note: str = ""


Line = tuple[str, Bar | None, Bar | None]


def served_lines(found: Iterable[Server]) -> list[Line]:
    """Each server: its name, and the bars of its first token and of its output tokens a second."""
    return [
        (
            one.name,
            _served(one.alone, f"{one.alone['case']['prompt'] // 1000}k"),
            _served(one.decode, _requests(one.decode)) if one.decode else None,
        )
        for one in found
    ]


def _served(row: dict[str, Any], note: str) -> Bar:
    """Of two servers with the plugin, the geometric mean."""
    ratios = summary.ratios(row)
    notes = [note, f"mean of {len(ratios)}" if len(ratios) > 1 else ""]
    return Bar(geometric_mean(ratios), summary.clear(row), ", ".join(filter(None, notes)))


def kernel_lines(folder: Path = RECORDS) -> list[Line]:
    """V3.2's prefill and decode kernel by heads: the fastest path that the plugin may choose, stock's among them.

    Only of the GPU that most records are of.
    """
    bars: dict[int, dict[str, Bar]] = {}
    timed = [one for records in read_timings(folder).values() for one in records if not summary.on_gpu(one[1])]
    for highlight, _, best in summary.highlights(timed):
        if highlight.what in _KERNELS:
            kept = bars.setdefault(best["case"]["heads"], {})
            speedup = best["baseline_us"] / best["median_us"]
            # Where no path of the plugin is faster, `auto` keeps the stock kernel.
            bar = Bar(speedup, speedup > 1 + NEARLY_EQUAL) if speedup > 1 else Bar(1.0, False, "stock kernel kept")
            kept[highlight.what] = max(kept.get(highlight.what, bar), bar)
    prefill, decode = _KERNELS
    return [(f"{heads} heads", kept.get(prefill), kept.get(decode)) for heads, kept in sorted(bars.items())]


_KERNELS = ("V3.2 prefill", "V3.2 decode")  # of `summary.HIGHLIGHTS`


def picture() -> str:
    """An SVG: speed-ups over stock, served and of the attention kernels alone. The same records give the same file."""
    found = servers()
    served, kernels = served_lines(found), kernel_lines()
    layers = sorted({one.layers for one in found})
    small = f"{layers[0]} to {layers[-1]} layers" if layers else "small models"
    others = ", or the GPU named" if any(one.gpu for one in found) else ""
    parts = [
        _text(16, 30, f"Speed-up over the stock engine on NVIDIA {summary.UNNAMED_GPU}{others}", 17, weight=600),
        *(_rect(16, 44, 12, 12, _FULL), _text(34, 54, "this plugin", 12)),
        *(_rect(116, 44, 12, 12, _PALE), _text(134, 54, "this plugin, within the noise of the runs", 12)),
        *(_path(390, 43, 57), _text(398, 54, "stock engine = 1", 12)),
        _text(526, 54, f"served: {small}, random weights", 12),
    ]
    sections = (
        ("Served", "time to first token, by prompt length", f"tokens a second, {REQUESTS} × 4,096 in, 256 out", served),
        ("V3.2's kernels alone", "prefill, 4,096 query tokens", "decode, 128 requests", kernels),
    )
    y = 88
    for title, *columns, lines in sections:
        parts += _section(y, title, columns, lines)
        y += 12 + _LINE * len(lines) + 34
    height = y - 20
    about = "; ".join(_said(line) for line in (*served, *kernels))
    font = "-apple-system,Segoe UI,Roboto,Liberation Sans,Helvetica,Arial,sans-serif"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'width="{_WIDTH}" height="{height}" font-family="{font}">',
            "<!-- Generated by `python -m ci.docs` from the records. Do not edit. -->",
            f"<title>Speed-up of this plugin over the stock engine. {escape(about)}</title>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _section(y: int, title: str, columns: Sequence[str], lines: Sequence[Line]) -> list[str]:
    starts = (_LABEL, _LABEL + _COLUMN)
    parts = [_text(16, y, title, 12, weight=600)]
    for x, column in zip(starts, columns, strict=True):
        parts.append(_text(x, y, column, 12, weight=600))
        parts.append(_path(x + _scale(1.0), y + 8, y + 12 + _LINE * len(lines)))
    for number, (name, *bars) in enumerate(lines):
        top = y + 12 + _LINE * number
        parts.append(_text(16, top + 15, name, 12))
        for x, bar in zip(starts, bars, strict=True):
            parts += _bar(x, top, bar)
    return parts


def _bar(x: int, top: int, bar: Bar | None) -> list[str]:
    if bar is None:
        return [_text(x, top + 14, "not measured", 11, fill=_SOFT)]
    width = _scale(bar.speedup)
    figure = f"{bar.speedup:.2f}×"
    note = f'<tspan dx="4" fill="{_SOFT}" font-weight="400">{escape(bar.note)}</tspan>' if bar.note else ""
    weight = ' font-weight="600"' if bar.clear else ""
    return [
        _rect(x, top + 3, width, 15, _FULL if bar.clear else _PALE),
        f'<text x="{x + max(width, _scale(1.0)) + 6}" y="{top + 15}" font-size="12" fill="{_TEXT}"{weight}>'
        f"{figure}{note}</text>",
    ]


def _scale(speedup: float) -> int:
    return round(min(speedup, _MOST) / _MOST * (_COLUMN - 60))


def _path(x: int, top: int, bottom: int) -> str:
    return f'<path d="M{x} {top}V{bottom}" stroke="{_STOCK}" stroke-width="2"/>'


def _rect(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}"/>'


def _text(x: int, y: int, text: str, size: int, *, weight: int = 400, fill: str = _TEXT) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{bold}>{escape(text)}</text>'


def _said(line: Line) -> str:
    name, prefill, decode = line
    served = ("first token", "tokens a second") if "," in name else ("prefill", "decode")
    words = zip(served, (prefill, decode), strict=True)
    return f"{name}: " + ", ".join(f"{word} {bar.speedup:.2f}×" for word, bar in words if bar)
