"""Every generated page of the benchmarks: one for each record, an index, and the tables of the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nsa_plugin.tools.bench import record as timings
from nsa_plugin.tools.compare import record as served
from nsa_plugin.tools.pages import comparisons, kernels, summary
from nsa_plugin.tools.pages.markdown import fill, generated_notice, markdown_table

INDEX = "records.md"


def pages(folder: Path) -> dict[Path, str]:
    """The path and the text of every page that is generated as a whole, for the records in FOLDER/<host>/.

    Raises:
        BenchError: a record cannot be read.
    """
    timed, compared = _timed(folder), served.read(folder)
    made = {path.with_suffix(".md"): kernels.page(path, record) for path, record in timed}
    made |= {path.with_suffix(".md"): comparisons.page(path, record) for path, record in compared}
    suites = [
        [f"[{record['suite']}]({_link(path)})", kernels.about_record(record) or "-", record["host"]["gpu"]]
        for path, record in timed
    ]
    parts = [
        generated_notice("the records in this folder"),
        "# All records",
        "Every record has a page with all of its figures. [The summary](../benchmarks.md) says what they mean.",
        "## Kernels",
        markdown_table(["suite", "what it measures", "GPU"], suites) if suites else summary.NOTHING,
        "## Engine comparisons",
        comparisons.overview([(_link(path), record) for path, record in compared]) if compared else summary.NOTHING,
        "## The demo",
        "[The demo's results](../demo.md#results) lists its records.",
    ]
    return made | {folder / INDEX: "\n\n".join(parts) + "\n"}


def generators(folder: Path) -> dict[str, Callable[[], str]]:
    """What writes each generated part of the summary page, by the part's name."""
    return {
        "first-token": lambda: summary.first_token(served.read(folder)),
        "loads": lambda: summary.loads(served.read(folder)),
        "limits": lambda: summary.limits(served.read(folder)),
        "kernel-highlights": lambda: summary.kernels(_timed(folder)),
        "correctness": lambda: summary.correctness(served.read(folder)),
    }


def _link(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}.md"


def _timed(folder: Path) -> summary.Records:
    records = [one for found in timings.read(folder).values() for one in found]
    return sorted(records, key=lambda one: (one[0].parent.name, kernels.position(one[1]["suite"])))


def stale(page: Path, folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Each page that differs from what the records give, with its new text; None for one that has lost its record."""
    made = pages(folder)
    made[page] = fill(page.read_text(), generators(folder))
    for path, new in made.items():
        if not path.is_file() or path.read_text() != new:
            yield path, new
    for path in sorted(folder.glob("*/*.md")):
        if path not in made:
            yield path, None


def rewrite(page: Path, folder: Path) -> list[Path]:
    """Bring the summary `page` and every page in `folder` up to date.

    Returns:
        What was written or removed.

    Raises:
        BenchError: a record cannot be read.
    """
    return apply(dict(stale(page, folder)))


def apply(changes: Mapping[Path, str | None]) -> list[Path]:
    """Write each page's new text, and remove the pages without one; the paths of all."""
    for path, text in changes.items():
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    return list(changes)
