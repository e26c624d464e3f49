"""The documentation site: its navigation is complete, and the hooks that adapt GitHub's Markdown to it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import docs, site
from ci.rows import ROOT
from nsa_plugin.cli import main
from nsa_plugin.tools.bench.record import read
from nsa_plugin.tools.pages.markdown import generated_notice

NAVIGATION = (ROOT / "mkdocs.yml").read_text()
STYLES = (ROOT / "docs" / "site.css").read_text()


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


def test_a_plot_links_to_itself() -> None:
    image = '<img alt="x" src="../a.svg" />'
    assert site.on_page_content(f"<p>{image}</p>") == (
        f'<p><span class="plot"><a href="../a.svg">{image}</a></span></p>'
    )


def test_long_names_may_break() -> None:
    made = site.breakable('<td><code>a.b:C_d --x-y 0.5.11 aBc</code> a.b <a href="a.b/c">token_shard</a></td>')
    assert made == (
        '<td><code>a.<wbr>b:<wbr>C_d --x-<wbr>y 0.5.11 a<wbr>Bc</code> a.b <a href="a.b/c">token_<wbr>shard</a></td>'
    )


def test_column_heads_may_break_and_stay_whole_as_labels() -> None:
    made = site.on_page_content(
        "<table><thead><tr>\n<th>triton_sparse_mla, flash_mla</th></tr></thead><tr><td>1</td></tr></table>"
    )
    assert "<th>triton_<wbr>sparse_<wbr>mla, flash_mla</th>" in made
    assert '<td data-label="triton_sparse_mla, flash_mla">1</td>' in made


@pytest.mark.parametrize(
    ("source", "hidden"),
    [("benchmarks/h200/topk.md", ["toc"]), ("benchmarks/records.md", None), ("compare.md", None)],
)
def test_a_record_has_the_width_of_the_page_and_its_heading_as_title(source: str, hidden: list[str] | None) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source), meta={})
    text = f"{generated_notice('x.json')}\n\n# topk\n"
    made = site.on_page_markdown(text, page=page, config=SimpleNamespace(repo_url="https://r"))
    assert page.meta.get("hide") == hidden
    assert made.startswith("# topk") is source.startswith("benchmarks/")


def test_no_button_covers_code_on_a_narrow_screen() -> None:
    _, _, narrow = STYLES.partition("@media screen and (max-width: 44.9375em)")
    assert re.search(r"\.md-code__nav \{\s*display: none;", narrow)


@pytest.mark.parametrize("page", docs.files(), ids=lambda page: page.name)
def test_lists_are_written_so_that_the_site_reads_them_as_github_does(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", r"\1```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^ {1,3}(```|\|)", text, re.MULTILINE), "a block in a list is indented by four spaces"
    for before, line in pairwise(text.splitlines()):
        if re.match(r"(- |\d+\. )", line):
            assert not before or re.match(r"(- |\d+\. |  )", before), f"an empty line comes before a list: {line}"


def test_the_navigation_names_existing_pages_and_every_kernel_suite() -> None:
    pages = re.findall(r": ([\w/.-]+\.md)$", NAVIGATION, re.MULTILINE)
    assert len(pages) == len(set(pages)) > 40
    for page in pages:
        assert (ROOT / "docs" / page).is_file(), page
    suites = [path for records in read(docs.RECORDS).values() for path, _ in records]
    assert suites
    for path in suites:
        page = path.with_suffix(".md").relative_to(ROOT / "docs").as_posix()
        assert page in pages
        # In one of the groups of kernel suites, by a name in words: the suite's is on the page.
        assert re.search(rf"\n {{14}}- [A-Z0-9][\w .,'-]+: {page}\n", NAVIGATION), page


def test_the_kernel_suites_are_in_groups() -> None:
    _, _, after = NAVIGATION.partition("- Kernel suites:")
    suites, _, _ = after.partition("- Compare your own model")
    groups = re.split(r"^ {10}- (.+):\n", suites, flags=re.MULTILINE)[1:]
    names, members = groups[::2], groups[1::2]
    assert names == ["H200", "H100", "Portable path", "Resharding"]
    for name, listed in zip(names, members, strict=True):
        for host, suite in re.findall(r"benchmarks/(\w+)/([\w-]+)\.md", listed):
            kind = "Portable path" if suite.startswith("portable-") else host.upper()
            assert name == ("Resharding" if suite.startswith("token-shard-") else kind)


@pytest.mark.parametrize(
    ("ranks", "batch", "provider", "resharded"),
    [
        (8, "--phase extend --q-tokens 8192 --max-kv 65536", "cuda", False),
        (8, "--phase decode --requests 64 --max-kv 8192 --cuda-graph", "cuda", False),
        (4, "--phase extend --q-tokens 1024 --max-kv 8192", "cuda", False),
        (4, "--phase extend --q-tokens 2048 --max-kv 65536", "flash_mla", True),
        (4, "--phase extend --q-tokens 8192 --max-kv 65536", "flash_mla", True),
        (4, "--phase decode --requests 64 --max-kv 8192 --cuda-graph", "cuda", False),
        (4, "--phase decode --requests 512 --max-kv 8192 --cuda-graph", "cuda", False),
        (2, "--phase extend --q-tokens 2048 --max-kv 8192", "flash_mla", False),
        (2, "--phase extend --q-tokens 8192 --max-kv 65536", "flash_mla", True),
        (1, "--phase extend --q-tokens 8192 --max-kv 65536", "flash_mla", False),
        (1, "--phase decode --requests 64 --max-kv 8192 --cuda-graph", "flash_mla", False),
    ],
)
def test_the_deployment_page_says_what_is_decided(
    ranks: int, batch: str, provider: str, resharded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"explain --json --sm 90 --kv-dtype fp8_e4m3 --tp {ranks} {batch}"
    assert main(command.split()) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["provider"], plan["token_shard"]) == (provider, resharded)
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert re.search(rf"^\| TP 8.*\| {128 // ranks}\b", page, re.MULTILINE)
