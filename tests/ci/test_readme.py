"""The README: its links work from PyPI, and every address of the project agrees with pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from ci import headline
from ci.rows import ROOT
from nsa_plugin.tools.records import path_of, save

README = (ROOT / "README.md").read_text()
URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
RAW = URLS["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
TARGETS = [*re.findall(r"\]\(([^)\s]+)\)", README), *re.findall(r"^\[[\w-]+\]: (\S+)$", README, re.MULTILINE)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_is_absolute() -> None:
    assert len(TARGETS) > 25
    assert [target for target in TARGETS if not target.startswith("https://")] == []


def test_every_link_to_a_file_of_the_repository_leads_to_one() -> None:
    files = []
    for target in TARGETS:
        for prefix in (f"{URLS['Repository']}/blob/main/", RAW):
            if target.startswith(prefix):
                path, _, anchor = target.removeprefix(prefix).partition("#")
                files.append(ROOT / path)
                assert (ROOT / path).is_file(), target
                assert not anchor or anchor in anchors(ROOT / path), target
    assert len(files) > 20
    assert headline.PICTURE in files


def test_every_workflow_badge_names_a_workflow() -> None:
    badges = re.findall(r"/actions/workflows/([\w.-]+)", README)
    assert badges
    for name in badges:
        assert (ROOT / ".github" / "workflows" / name).is_file()


def test_every_address_of_the_project_agrees_with_pyproject() -> None:
    assert headline.repository() == URLS["Repository"]
    assert all(url.startswith(URLS["Repository"]) for name, url in URLS.items() if name != "Documentation")
    if not (ROOT / ".git").exists():
        pytest.skip("tracked files are known in a checkout only")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    owner, name = URLS["Repository"].removeprefix("https://github.com/").split("/")
    for path in listed.splitlines():
        if path.startswith(("docs/benchmarks/", "tests/")) or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_bytes().decode(errors="ignore")
        for host, found in re.findall(rf"https://(github\.com|raw\.githubusercontent\.com)/([\w-]+)/{name}\b", text):
            assert found == owner, f"{path}: {host}/{found}/{name}"
        for found in re.findall(rf"https://([\w-]+)\.github\.io/{name}\b", text):
            assert f"https://{found}.github.io/{name}/" == URLS["Documentation"], path


def test_the_site_and_the_citation_name_the_same_addresses() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert f"repo_url: {URLS['Repository']}\n" in site
    assert f"site_url: {URLS['Documentation']}\n" in site
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == URLS["Repository"]


def test_the_picture_is_well_formed_and_says_its_figures() -> None:
    root = ET.fromstring(headline.picture())
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    for one in headline.servers():
        assert f"{one.name}: first token " in str(title.text)
    texts = "".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "random weights" in texts
    assert "stock kernel kept" in texts


def test_no_text_of_the_picture_runs_into_another_or_a_bar() -> None:
    """By the widths of a wide font: no text of a line ends behind the start of the next, or of a bar."""
    lines: dict[float, list[tuple[float, float]]] = {}
    root = ET.fromstring(headline.picture())
    for node in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, width, height = (float(node.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        if height == 15:
            lines.setdefault(y + 12, []).append((x, x + width))
    assert sum(map(len, lines.values())) > 20
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        text, size = "".join(node.itertext()), float(node.attrib["font-size"])
        width = len(text) * size * (0.6 if "font-weight" in node.attrib else 0.5)
        start = float(node.attrib["x"])
        lines.setdefault(float(node.attrib["y"]), []).append((start, start + width))
    assert len(lines) > 20
    for texts in lines.values():
        for (_, end), (start, _) in pairwise(sorted(texts)):
            assert end <= start
    # One after the other, in the last column; its own scale leaves room for the figure.
    assert max(end for texts in lines.values() for _, end in texts) <= headline._WIDTH


def test_two_servers_are_drawn_as_their_mean() -> None:
    quartiles = {f"{name}{quartile}": 1.0 for name in ("", "again_", "baseline_") for quartile in ("q1", "q3")}
    row = quartiles | {"speedup": 0.5, "again_speedup": 2.0}
    assert headline._served(row, "128k") == headline.Bar(1.0, False, "128k, mean of 2")


def test_the_table_has_a_line_for_each_server_with_its_layers_and_record() -> None:
    lines = headline.table().splitlines()[2:]
    found = headline.servers()
    assert len(lines) == len(found) >= 7
    for line, one in zip(lines, found, strict=True):
        assert f"| {one.layers} |" in line
        assert one.path.stem in line


def test_of_two_gpus_a_server_has_the_one_with_the_longest_prompt_and_names_it(tmp_path: Path) -> None:
    record = json.loads(headline.servers()[0].path.with_suffix(".json").read_text())
    longest = max(row["case"]["prompt"] for row in record["rows"] if row["op"] == "serve")
    for gpu, kept in (("NVIDIA H200", 8192), ("NVIDIA H100 80GB HBM3", longest)):
        rows = [row for row in record["rows"] if row["op"] != "serve" or row["case"]["prompt"] <= kept]
        made = record | {"host": record["host"] | {"gpu": gpu}, "rows": rows}
        save(made, path_of(made, tmp_path))
    # One that reshards only because it is asked to is left out, whatever its prompts.
    asked = made | {"suite": f"{made['suite']}-token-shard-on", "date": "2100-01-01"}
    settings = record["servers"]["plugin"]["settings"] | {"token_shard": "on"}
    asked["servers"] = record["servers"] | {"plugin": record["servers"]["plugin"] | {"settings": settings}}
    save(asked, path_of(asked, tmp_path))
    (server,) = headline.servers(tmp_path)
    assert server.name.endswith(" heads, H100")
    assert "token-shard" not in server.path.stem
    assert server.path.parent.name == "h100"
    assert server.alone["case"]["prompt"] == longest > 8192


def test_models_with_random_weights_are_said_to_be_so() -> None:
    assert "random weights" in README[README.index("## Figures") : README.index("<!-- generated: headline -->")]
    layers = [one.layers for one in headline.servers()]
    assert f"{min(layers)} to {max(layers)} layers" in README


@pytest.mark.parametrize(("speedup", "apart", "shown"), [(1.5, True, "**1.50×** (2 → 1.33 ms)"), (1.5, False, "1.50×")])
def test_medians_are_shown_where_the_outcome_is_clear(speedup: float, apart: bool, shown: str) -> None:
    median = 2.0 / speedup
    quartiles = {"q1": median, "q3": median, "baseline_q1": 1.9 if apart else 1.0, "baseline_q3": 2.1}
    row = {"speedup": speedup, "median": median, "baseline_median": 2.0, **quartiles}
    assert headline._figure(row, "", " ms") == shown
