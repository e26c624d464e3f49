"""The package's structure: import direction, cycles, names, engine imports and module sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "nsa_plugin"
ENGINES = ("sglang", "vllm")
MOST_LINES, MEDIAN_LINES, TOP_LEVEL_MODULES = 600, 180, 7
# Imports go from a layer to an equal or lower one.
# The manifest of kernel libraries is data, from which the settings derive their choices.
MANIFEST = tuple(f"libraries.{name}" for name in ("manifest", "capabilities", "architectures", "upstream"))
LAYERS = (
    ("settings", "switch", "errors", "layouts", *MANIFEST),
    ("libraries", "kernels", "parallel"),
    ("decision", "telemetry"),
    ("backends", "patches", "tools"),
    ("commands", "cli"),
)
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}

# Violations that are still to be mended. A test fails when one of them is gone and still listed here.
KNOWN_CYCLES: set[frozenset[str]] = set()
KNOWN_UPWARD_IMPORTS: set[tuple[str, str]] = set()
KNOWN_DUPLICATE_TYPES: set[str] = set()
KNOWN_ENGINE_IMPORTS: dict[str, set[str]] = {"sglang": {"nsa_plugin.tools.bench.stock"}}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
PATHS = {name_of(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that the tree imports, inside functions too; for `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def dependencies(module: str) -> set[str]:
    """Modules of the package that a module imports. A submodule's import does not count as one of its package."""
    found: set[str] = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom) and node.module in TREES:
            names = {alias.name for alias in node.names}
            submodules = {name for name in names if f"{node.module}.{name}" in TREES}
            found |= {f"{node.module}.{name}" for name in submodules}
            if names - submodules:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in TREES}
    return found - {module}


GRAPH = {module: dependencies(module) for module in TREES}


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.add(frozenset(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def layer_of(module: str) -> int:
    parts = module.split(".")[1:]
    return LAYER[".".join(parts)] if ".".join(parts) in LAYER else LAYER[parts[0]]


def types_of(tree: ast.Module) -> Iterator[str]:
    """Classes and capitalised type aliases at a module's top level."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            bare = name.lstrip("_")
            if bare[:1].isupper() and any(character.islower() for character in bare):
                yield name


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_imports_are_absolute() -> None:
    """The graph knows no other ones."""
    assert {module for module, tree in TREES.items() if any(name.startswith(".") for name in imported(tree))} == set()


def test_there_are_no_import_cycles() -> None:
    assert cycles(GRAPH) == KNOWN_CYCLES


def test_imports_point_one_way() -> None:
    upward = {
        (module, target)
        for module, targets in GRAPH.items()
        for target in targets
        if PACKAGE not in (module, target) and layer_of(target) > layer_of(module)
    }
    assert upward == KNOWN_UPWARD_IMPORTS


def test_no_two_types_share_a_name() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for module, tree in TREES.items():
        for name in types_of(tree):
            modules[name].append(module)
    shared = {name: found for name, found in modules.items() if len(found) > 1}
    assert set(shared) == KNOWN_DUPLICATE_TYPES, shared


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_imported_in_its_backend_alone(engine: str) -> None:
    importing = {
        module for module, tree in TREES.items() if any(name.partition(".")[0] == engine for name in imported(tree))
    }
    assert importing, "the backend imports its engine"
    elsewhere = {module for module in importing if not module.startswith(f"{PACKAGE}.backends.{engine}.")}
    assert elsewhere == KNOWN_ENGINE_IMPORTS.get(engine, set())


def test_the_package_and_its_decision_import_neither_torch_nor_an_engine() -> None:
    modules = [PACKAGE, *(module for module in TREES if module.startswith(f"{PACKAGE}.decision"))]
    program = (
        f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
        "assert not {'torch', 'sglang', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_modules_are_short() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in PATHS.items()}
    assert {module: count for module, count in lines.items() if count > MOST_LINES} == {}
    assert median(lines.values()) < MEDIAN_LINES


@pytest.mark.parametrize("folder", ["tests", "ci", "nsa_plugin/kernels/cuda"])
def test_other_sources_are_short(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".sh")]
    assert files
    assert [path for path in files if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_the_top_level_has_few_modules() -> None:
    top = sorted(path.name for path in (ROOT / PACKAGE).glob("*.py"))
    assert len(top) <= TOP_LEVEL_MODULES, top


def test_no_test_module_imports_another() -> None:
    """Helpers live in conftest fixtures and in modules that hold no tests."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in imported(ast.parse(path.read_text())):
            parts = name.split(".")
            ours = parts[0] in ("tests", "") or (path.parent / f"{parts[0]}.py").exists()
            if ours and any(part.startswith("test_") or part == "conftest" for part in parts):
                found.append((str(path.relative_to(ROOT)), name))
    assert found == []
