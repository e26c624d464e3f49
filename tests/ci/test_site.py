"""The documentation site: its navigation is complete, and the hooks that adapt GitHub's Markdown to it."""

from __future__ import annotations

import re

from ci import docs, site
from ci.rows import ROOT
from nsa_plugin.tools.bench.record import read

NAVIGATION = (ROOT / "mkdocs.yml").read_text()


def test_a_link_out_of_the_docs_folder_leads_to_the_repository() -> None:
    text = "[a](../CONTRIBUTING.md#check) [b](cli.md#bench) [c](https://host/x) [d](#here) [e](benchmarks/a.json)"
    assert site.absolute_links(text, "docs", "https://host/repo") == (
        "[a](https://host/repo/blob/main/CONTRIBUTING.md#check) [b](cli.md#bench) [c](https://host/x) [d](#here) "
        "[e](benchmarks/a.json)"
    )
    deeper = site.absolute_links("[a](../../kernels.md) [b](../../../LICENSE)", "docs/benchmarks/h200", "https://r")
    assert deeper == "[a](../../kernels.md) [b](https://r/blob/main/LICENSE)"


def test_each_cell_says_its_column() -> None:
    head = '<thead><tr><th>a &amp; "b"</th><th></th><th style="x"><code>c</code></th></tr></thead>'
    row = '<tr>\n<td>1</td><td>2</td><td style="y">3</td>\n</tr>'
    made = site.labelled(f"<table>{head}{row}</table>")
    assert '<td data-label="a &amp; &quot;b&quot;">1</td><td>2</td><td data-label="c" style="y">3</td>' in made


def test_the_navigation_names_existing_pages_and_every_kernel_suite() -> None:
    pages = re.findall(r": ([\w/.-]+\.md)$", NAVIGATION, re.MULTILINE)
    assert len(pages) == len(set(pages)) > 40
    for page in pages:
        assert (ROOT / "docs" / page).is_file(), page
    suites = [path for records in read(docs.RECORDS).values() for path, _ in records]
    assert suites
    for path in suites:
        assert path.with_suffix(".md").relative_to(ROOT / "docs").as_posix() in pages
