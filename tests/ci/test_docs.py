"""The generated parts of the documentation, and that what is written by hand points somewhere."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ci import docs
from ci.rows import Row, engines
from nsa_plugin.settings import Settings

ROW = Row(
    engine="vllm", version="0.32.0", check="run", outcome="ok", detail="3 passed", date="2026-01-02", python="3.11"
)


def test_only_the_part_between_the_markers_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(docs.GENERATORS, "toy", lambda: "new")
    text = "before\n<!-- generated: toy -->\nold\nold\n<!-- end of toy -->\nafter\n"
    made = docs.render(text)
    assert made == "before\n<!-- generated: toy -->\nnew\n<!-- end of toy -->\nafter\n"
    assert docs.render(made) == made


def test_marker_without_a_generator_is_an_error() -> None:
    with pytest.raises(KeyError):
        docs.render("<!-- generated: nothing -->\n<!-- end of nothing -->")


def test_settings_table_has_a_row_for_every_setting() -> None:
    lines = docs.settings_table().splitlines()
    assert len(lines) == 2 + len(Settings.names())
    for name, line in zip(Settings.names(), lines[2:], strict=True):
        assert f"`{name}`" in line
        assert f"`NSA_PLUGIN_{name.upper()}`" in line
        assert line.count("|") == 6


def test_compatibility_table_says_what_was_not_run() -> None:
    table = docs.compatibility_table(
        [ROW, replace(ROW, version="0.31.0", outcome="failed", detail="1 passed, 2 failed")]
    )
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    assert "ok: 3 passed (2026-01-02)" in lines["0.32.0"]
    assert "failed: 1 passed, 2 failed" in lines["0.31.0"]
    assert "not run yet" in lines["0.30.0"]
    assert lines["0.20.0"].split(" | ")[1] == "-"  # it does not run on a CPU
    for engine in engines().values():
        assert set(engine.seams) <= set(lines)


def test_patches_table_names_every_entry() -> None:
    from nsa_plugin.commands.engines import ENGINES

    table = docs.patches_table()
    for engine in ENGINES.values():
        for patch in engine.ledger.PATCHES:
            assert f"`{patch.name}`" in table


def test_every_generated_part_is_used_and_up_to_date() -> None:
    text = "".join(path.read_text() for path in docs.files())
    for name in docs.GENERATORS:
        assert f"<!-- generated: {name} -->" in text
    for path in docs.files():
        assert docs.render(path.read_text()) == path.read_text(), f"{path.name} is out of date: run make docs"


@pytest.mark.parametrize("path", docs.files(), ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(path: docs.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", docs.files(), ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(path: docs.Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (docs.ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", path.read_text()):
        assert target in targets
