"""The generated parts of the documentation, and that what is written by hand points somewhere."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ci import docs
from ci.rows import Row, engines
from ci.support import CONFIGURATIONS, Handling
from nsa_plugin import errors
from nsa_plugin.cli import _parser, main
from nsa_plugin.settings import Settings
from nsa_plugin.tools.records import SCHEMA, path_of, save

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
    assert lines["0.20.0"].split(" | ")[1:3] == ["not run", "no: vLLM refuses MLA on a CPU"]
    assert lines["0.5.11"].split(" | ")[1] == "not run<br>no: V4, which SGLang has from 0.5.12 on"
    for engine in engines().values():
        assert set(engine.seams) <= set(lines)


def test_the_gpu_column_is_made_from_the_records_that_passed(tmp_path: Path) -> None:
    v32, v4, glm5 = "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"
    for gpu, name, architecture, holds in (
        ("H200", "v32-16heads", v32, True),
        ("H200", "v32-16heads-mtp", v32, True),
        ("H200", "v4-64heads", v4, False),
        ("H200", "glm5-8heads", glm5, True),
        ("H100 80GB HBM3", "v32-16heads", v32, True),
        ("H200", "v32-8heads-speed", v32, False),  # stopped; compared no answers
        ("H200", "v32-64heads-speed", v32, True),
    ):
        record = {
            "kind": "comparison",
            "schema": SCHEMA,
            "engine": "vllm 0.33.0",
            "suite": f"vllm-0.33.0-{name}",
            "host": {"gpu": f"NVIDIA {gpu}"},
            "model": {"architectures": [architecture]},
            "verdict": {
                "holds": holds,
                "checks": [{"name": "the plugin agrees, request by request", "holds": holds, "detail": ""}],
            },
            "rows": [{"op": "serve" if "speed" in name else "agreement", "provider": "nsa-plugin"}],
        }
        save(record, path_of(record, tmp_path))
    (tmp_path / "h200" / "topk.json").write_text(json.dumps({"suite": "topk"}))
    records = docs.gpu_records(tmp_path)
    assert {key: sorted(found) for key, found in records.items()} == {
        ("vllm", "0.33.0"): ["GLM-5", "V3.2", "V3.2, H100"],
    }
    cell = docs._on_gpu(records["vllm", "0.33.0"])
    assert cell == (
        "GLM-5: [vllm-0.33.0-glm5-8heads](benchmarks/h200/vllm-0.33.0-glm5-8heads.md)<br>"
        "V3.2: [vllm-0.33.0-v32-16heads](benchmarks/h200/vllm-0.33.0-v32-16heads.md) and 1 more<br>"
        "V3.2, H100: [vllm-0.33.0-v32-16heads](benchmarks/h100/vllm-0.33.0-v32-16heads.md)"
    )
    assert docs._on_gpu({}) == "not run"
    failed = docs.gpu_records(tmp_path, passed=False)["vllm", "0.33.0"]
    assert docs._on_gpu({}, failed) == (
        "V4: failed its tolerance (kept for the record), "
        "[vllm-0.33.0-v4-64heads](benchmarks/h200/vllm-0.33.0-v4-64heads.md)"
    )


def test_overhead_has_a_column_for_every_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(name: str, cpu: str, **rows: tuple[float, float]) -> None:
        made = [{"what": what, "p50_us": median, "p99_us": worst} for what, (median, worst) in rows.items()]
        made.append({"what": f"entry of {name}", "p50_ms": 10, "max_ms": 14})
        save({"host": {"cpu": cpu}, "rows": made}, tmp_path / "cpu" / f"overhead{name}.json")

    write("-fast", "fast", plan=(13.7, 39.3))
    write("-more", "slow", plan=(25.0, 50.0))  # the same CPU with another engine
    write("", "slow", plan=(22.4, 49.4))
    monkeypatch.setattr(docs, "RECORDS", tmp_path)
    assert docs.overhead_table().splitlines() == [
        "| what | fast: median, 99th percentile | slow: median, 99th percentile |",
        "| --- | --- | --- |",
        "| plan | 13.7, 39.3 µs | 22.4, 49.4 µs |",
        "| entry of -fast | 10, 14 ms | not measured |",
        "| entry of -more | not measured | 10, 14 ms |",
        "| entry of  | not measured | 10, 14 ms |",
    ]


def test_the_support_page_names_every_configuration() -> None:
    table = docs.support_table()
    for one in CONFIGURATIONS:
        assert f"| {one.what} | {one.given} | {one.outcome} |" in table


def test_patches_table_names_every_entry() -> None:
    from nsa_plugin.commands.engines import ENGINES

    table = docs.patches_table()
    for engine in ENGINES.values():
        for patch in engine.ledger.PATCHES:
            assert f"`{patch.name}`" in table


def test_every_generated_part_is_used() -> None:
    text = "".join(path.read_text() for path in docs.files())
    for name in docs.GENERATORS:
        assert f"<!-- generated: {name} -->" in text


def test_every_generated_part_and_page_is_up_to_date() -> None:
    assert list(docs.stale()) == [], "run: make docs"


def test_the_performance_summary_stays_short_and_every_record_has_a_page() -> None:
    assert len(docs.SUMMARY.read_text().splitlines()) <= 160
    for record in docs.RECORDS.glob("h*/*.json"):
        assert record.with_suffix(".md").is_file()


def test_a_page_that_lost_its_record_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "gone.md").write_text("<!-- Generated by `python -m ci.docs`. -->")
    monkeypatch.setattr(docs, "RECORDS", tmp_path)
    assert docs.stale()[tmp_path / "h200" / "gone.md"] is None


PAGES = sorted({*docs.files(), *(docs.ROOT / "docs").rglob("*.md")})


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(docs.ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path.resolve()), f"{target}#{anchor}"


@pytest.mark.parametrize("path", docs.files(), ids=lambda path: path.name)
def test_every_make_target_that_is_named_exists(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (docs.ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", path.read_text()):
        assert target in targets


def test_every_page_is_in_the_navigation() -> None:
    navigation = (docs.ROOT / "mkdocs.yml").read_text()
    for path in (docs.ROOT / "docs").glob("*.md"):
        assert f"{path.name}\n" in navigation


def test_the_list_of_engine_bugs_is_complete_and_names_existing_tests() -> None:
    page = (docs.ROOT / "docs" / "regressions.md").read_text()
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == list(range(1, 29))
    sources = "".join(path.read_text() for path in (docs.ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    referenced = set(re.findall(r"`(test_\w+)`", page))
    assert len(referenced) > 50
    assert referenced <= defined


def commands(page: Path) -> list[list[str]]:
    """The `nsa-plugin` commands in a page's code blocks, up to what goes to an engine; shell variables are left out."""
    found = []
    for block in re.findall(r"^ *```\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.search(
                r"(?:^|/|[\"\s])nsa-plugin ((?:doctor|explain|patches|demo|bench|compare)\b.*)", line
            ):
                words = shlex.split(command[1].rstrip('"'), comments=True)
                words = words[: words.index("--")] if "--" in words else words
                found.append([word for word in words if not word.startswith("$")])
    return found


@pytest.mark.parametrize("page", docs.files(), ids=lambda page: page.name)
def test_every_command_has_flags_that_exist(page: Path) -> None:
    for words in commands(page):
        args, unknown = _parser(words[0]).parse_known_args(words)
        assert (args.command, unknown) == (words[0], [])


def test_commands_are_found_in_the_pages() -> None:
    found = [words[0] for page in docs.files() for words in commands(page)]
    assert {"doctor", "explain", "bench", "compare"} <= set(found)
    assert len(found) >= 20


EXPLAINED = {" ".join(words): words for page in docs.files() for words in commands(page) if words[0] == "explain"}


@pytest.mark.parametrize("command", EXPLAINED)
def test_every_decision_that_a_page_asks_for_is_made(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXPLAINED[command]) == 0
    assert "attention" in capsys.readouterr().out


@pytest.mark.parametrize("page", docs.files(), ids=lambda page: page.name)
def test_every_file_of_the_repository_that_is_named_exists(page: Path) -> None:
    for named in re.findall(r"`((?:nsa_plugin|tests|ci|docs)/[\w/.-]+)`", page.read_text()):
        assert (docs.ROOT / named).exists(), named


ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
LEFT = errors.LeftToStockError.__name__


def name_of(node: ast.AST | None) -> str:
    """The last part of a dotted name; "" of anything else."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def text_of(node: ast.AST) -> str | None:
    """A string, with the values of an f-string left out; None of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def makers(trees: list[ast.Module]) -> dict[str, str]:
    """What makes an error, by its name: the classes, and the functions that return one."""
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {name: name for name in ERRORS} | {
        function.name: name_of(function.returns) for function in functions if name_of(function.returns) in ERRORS
    }


def messages(trees: list[ast.Module]) -> Iterator[tuple[str, set[str]]]:
    """Every string of the package's errors, and the classes of the errors that say it.

    They are those of the smallest expression or statement around the string that makes errors. A constant of a module
    is what the errors say that name it.
    """
    made = makers(trees)
    constants = {
        name_of(node.targets[0]): text
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and (text := text_of(node.value)) is not None
    }

    def visit(node: ast.AST, kinds: set[str]) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, ast.Call) and name_of(node.func) in made:
            kinds = {made[name_of(node.func)]}
        elif isinstance(node, ast.stmt):
            calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
            kinds = {made[name_of(call.func)] for call in calls if name_of(call.func) in made}
        text = constants.get(name_of(node)) if isinstance(node, ast.Name | ast.Attribute) else text_of(node)
        if text is not None and kinds:
            yield text, kinds
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.Expr) and text_of(child.value) is not None):  # a docstring
                yield from visit(child, kinds)

    for tree in trees:
        for statement in tree.body:
            yield from visit(statement, set())


@functools.cache
def said() -> list[tuple[str, set[str]]]:
    """The messages of the package's errors, and those that `CONFIGURATIONS` has."""
    trees = [ast.parse(path.read_text()) for path in (docs.ROOT / "nsa_plugin").rglob("*.py")]
    known = {Handling.STOCK: {LEFT}, Handling.REFUSED: {"refused"}}
    return [*messages(trees), *((one.says, known[one.outcome]) for one in CONFIGURATIONS if one.outcome in known)]


def quoted(title: str) -> list[str]:
    """Patterns of the messages that the table under a heading of troubleshooting.md quotes."""
    page = (docs.ROOT / "docs" / "troubleshooting.md").read_text()
    section = page[page.index(f"## {title}\n") :].split("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    found = [one for cell in cells for one in re.findall(r"`[^`]+`(?: \.\.\. `[^`]+`)*", cell)]
    return [".*".join(map(re.escape, re.findall(r"`([^`]+)`", one))) for one in found]


REFUSED, LEFT_OUT = quoted("The engine refuses to start"), quoted("Left to the stock engine")


@pytest.mark.parametrize("message", [*REFUSED, *LEFT_OUT])
def test_troubleshooting_has_each_message_under_what_it_does(message: str) -> None:
    found = [kinds for text, kinds in said() if re.search(message, text, re.DOTALL)]
    assert found, "no error says so"
    kinds = set.union(*found)
    assert kinds == {LEFT} if message in LEFT_OUT else LEFT not in kinds


def test_troubleshooting_quotes_messages() -> None:
    assert len(REFUSED) > 10
    assert len(LEFT_OUT) > 6


def test_the_class_of_the_error_around_a_message_is_found() -> None:
    source = """
OUTSIDE = "a constant"
def refusal(why: str) -> NoProviderError:
    \"\"\"Say a docstring.\"\"\"
    return NoProviderError(f"it is {why}, so it ends")
def check(one):
    for what in ("in a loop", "too"):
        if one:
            raise LeftToStockError(f"left because of {what}")
    log("in no error")
    raise refusal("given to a function")
def other():
    raise SettingsError(OUTSIDE)
"""
    found: dict[str, set[str]] = {}
    for text, kinds in messages([ast.parse(source)]):
        found.setdefault(text, set()).update(kinds)
    assert found["a constant"] == {"SettingsError"}
    assert found["it is \0, so it ends"] == {"NoProviderError"}
    assert found["in a loop"] == found["left because of \0"] == {LEFT}
    assert found["given to a function"] == {"NoProviderError"}
    assert "in no error" not in found
    assert "Say a docstring." not in found
