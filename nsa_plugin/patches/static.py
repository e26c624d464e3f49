"""Find the ledger's targets in the syntax trees of an engine's source files, without importing them.

A process in which part of the engine is loaded may look that part up live instead (`check_installed`).

`ledger.find` needs a live engine. This reads files, so it can also check versions that cannot run here: those not
installed, and those that need a GPU to import. It follows imports inside the engine, re-exports, base classes, aliases
and registration decorators, and treats everything outside the engine's files as unknown.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from nsa_plugin.patches.ledger import Kind, Ledger, Need, Target, find, params_missing

Reader = Callable[[str], str | None]
"""Return the text of a file by its path in the wheel ("vllm/engine/arg_utils.py"), None if there is no such file."""

_NOT_CALLABLE = ("property", "cached_property")


@dataclass(frozen=True)
class _Module:
    name: str
    is_package: bool
    tree: ast.Module


@dataclass(frozen=True)
class _Class:
    module: _Module
    node: ast.ClassDef


@dataclass(frozen=True)
class _Instance:
    of: _Class


@dataclass(frozen=True)
class _Function:
    node: ast.AST
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Value:
    """An object of which only the expression is known."""

    module: _Module
    node: ast.AST


@dataclass(frozen=True)
class _Outside:
    """An object of another distribution."""

    name: str


_Object = _Module | _Class | _Instance | _Function | _Value | _Outside
_Binding = tuple[ast.AST, bool]  # the statement or alias that binds a name, and whether it is unconditional


class SourceTree:
    """An engine's source files.

    Args:
        read: see `Reader`; called once for each file.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._modules: dict[str, _Module | None] = {}

    def check(self, target: Target) -> None:
        """Check a target in the files, as `ledger.find` does in the live engine.

        Raises:
            LookupError: the target does not exist or differs from what is expected; says what differs.
        """
        self._check_kind(target, self._find(target))

    def definition(self, target: Target) -> ast.AST | None:
        """Return the syntax tree of a target: a function, a class, or a value's expression.

        Returns:
            None if it is not defined in the engine's files.

        Raises:
            LookupError: the target does not exist.
        """
        found = self._find(target)
        if isinstance(found, _Instance):
            found = found.of
        if isinstance(found, _Module):
            return found.tree
        return None if isinstance(found, _Outside) else found.node

    def _find(self, target: Target) -> _Object:
        module = self._module(target.module)
        if module is None:
            raise LookupError(f"module {target.module} is not there")
        found: _Object = module
        for part in target.attributes:
            inner = self._attribute(found, part)
            if inner is None:
                raise LookupError(f"{part!r} of {target.path} is not there{self._beyond(found)}")
            found = inner
        if target.key is not None:
            entry = self._entry(found, target.attributes[-1], module, target.key)
            if entry is None:
                raise LookupError(f"{target.path}: no entry {target.key!r} is written in {target.module}")
            found = entry
        return found

    def _check_kind(self, target: Target, found: _Object) -> None:
        if target.kind is Kind.VALUE:
            return
        if isinstance(found, _Outside):
            raise LookupError(f"{target.path} comes from {found.name}, which is not among the engine's files")
        if target.kind is Kind.CLASS and not isinstance(found, _Class):
            raise LookupError(f"{target.path} is not a class")
        made_by_call = isinstance(found, _Value) and isinstance(found.node, ast.Call)
        if not isinstance(found, (_Function, _Class)) and not made_by_call:
            raise LookupError(f"{target.path} is not callable")
        if target.params:
            parameters = self._init(found) if isinstance(found, _Class) else getattr(found, "parameters", None)
            if parameters is None:
                raise LookupError(f"{target.path}: its parameters cannot be read from the engine's files")
            if missing := params_missing(target.params, list(parameters)):
                raise LookupError(f"{target.path}: {missing}")

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = None
            stem = name.replace(".", "/")
            for path, is_package in ((f"{stem}/__init__.py", True), (f"{stem}.py", False)):
                if (text := self._read(path)) is not None:
                    self._modules[name] = _Module(name, is_package, ast.parse(text, path))
                    break
        return self._modules[name]

    def _attribute(self, owner: _Object, name: str) -> _Object | None:
        if isinstance(owner, _Module):
            return self._global(owner, name, frozenset())
        if isinstance(owner, _Class):
            return self._member(owner, name, bound=False)
        if isinstance(owner, _Instance):
            return self._member(owner.of, name, bound=True)
        return None

    def _global(self, module: _Module, name: str, seen: frozenset[tuple[str, str]]) -> _Object | None:
        """Resolve a name in a module; `seen` stops circular imports."""
        if (module.name, name) in seen:
            return None
        seen |= {(module.name, name)}
        bound = (self._bound(module, binding, name, seen) for binding in _in_order(_bindings(module.tree.body, name)))
        known = [found for found in bound if found is not None]
        if known:
            # `try: from elsewhere import x`, `except ImportError: def x(): ...`: prefer the one that can be read.
            return next((found for found in known if not isinstance(found, _Outside)), known[0])
        for statement in _statements(module.tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                source = self._module(_absolute(module, statement))
                if source and (found := self._global(source, name, seen)) is not None:
                    return found
        return self._module(f"{module.name}.{name}") if module.is_package else None

    def _bound(self, module: _Module, binding: ast.AST, name: str, seen: frozenset[tuple[str, str]]) -> _Object | None:
        if isinstance(binding, ast.ClassDef):
            return _Class(module, binding)
        if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _Function(binding, _parameters(binding.args))
        if isinstance(binding, ast.ImportFrom):
            source = _absolute(module, binding)
            original = next(alias.name for alias in binding.names if (alias.asname or alias.name) == name)
            return self._imported(source, original, seen)
        if isinstance(binding, ast.Import):
            alias = next(a for a in binding.names if (a.asname or a.name.partition(".")[0]) == name)
            full = alias.name if alias.asname else name
            return self._module(full) or _Outside(full)
        return self._evaluate(module, binding, seen)

    def _imported(self, source: str, name: str, seen: frozenset[tuple[str, str]]) -> _Object | None:
        module = self._module(source)
        if module is not None:
            return self._global(module, name, seen) or self._module(f"{source}.{name}")
        # A missing module of the engine leaves the name undefined; another package's module is unknown.
        return None if self._module(source.partition(".")[0]) else _Outside(f"{source}.{name}")

    def _evaluate(self, module: _Module, node: ast.AST, seen: frozenset[tuple[str, str]]) -> _Object | None:
        """Resolve the right side of an assignment, as far as its text allows."""
        if isinstance(node, ast.Name):
            return self._global(module, node.id, seen) or _Value(module, node)
        if isinstance(node, ast.Attribute):
            owner = self._evaluate(module, node.value, seen)
            return (self._attribute(owner, node.attr) if owner else None) or _Value(module, node)
        if isinstance(node, ast.Lambda):
            return _Function(node, _parameters(node.args))
        if isinstance(node, ast.Call):
            made = self._evaluate(module, node.func, seen)
            return _Instance(made) if isinstance(made, _Class) else _Value(module, node)
        return _Value(module, node)

    def _member(self, owner: _Class, name: str, *, bound: bool) -> _Object | None:
        for cls in self._lineage(owner):
            if not isinstance(cls, _Class):
                continue
            for binding in _in_order(_bindings(cls.node.body, name)):
                if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    return _method(cls.module, binding, bound=bound)
                # A name on the right may be an earlier one of the class body.
                if isinstance(binding, ast.Name) and binding.id != name:
                    sibling = self._member(cls, binding.id, bound=bound)
                    if sibling is not None:
                        return sibling
                if (found := self._bound(cls.module, binding, name, frozenset())) is not None:
                    return found
        return None

    def _lineage(self, owner: _Class) -> Iterator[_Class | _Outside]:
        """Yield the class and its bases, nearest first."""
        yield owner
        for base in owner.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self._evaluate(owner.module, expression, frozenset())
            if isinstance(found, _Class) and found.node is not owner.node:
                yield from self._lineage(found)
            else:
                yield _Outside(ast.unparse(expression))

    def _beyond(self, found: _Object) -> str:
        """Name, for the error, the bases outside the files, which may have the attribute."""
        if not isinstance(found, _Class):
            return ""
        outside = sorted({cls.name for cls in self._lineage(found) if isinstance(cls, _Outside)} - {"object", "ABC"})
        return f" (its bases outside the engine cannot be read: {', '.join(outside)})" if outside else ""

    def _init(self, owner: _Class) -> tuple[str, ...] | None:
        for cls in self._lineage(owner):
            if not isinstance(cls, _Class):
                return None
            for statement in _statements(cls.node.body):
                if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                    return _parameters(statement.args)
            if "dataclass" in map(_called_name, cls.node.decorator_list):
                return ("self", *self._dataclass_fields(cls))
        return ("self",)

    def _dataclass_fields(self, owner: _Class) -> list[str]:
        positional: dict[str, None] = {}
        keyword: dict[str, None] = {}
        lineage = [cls for cls in self._lineage(owner) if isinstance(cls, _Class)]
        for cls in reversed(lineage):
            decorator = next((d for d in cls.node.decorator_list if _called_name(d) == "dataclass"), None)
            if decorator is None:
                continue
            all_keyword = _has_keyword(decorator, "kw_only", True)
            for statement in _statements(cls.node.body):
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                if "ClassVar" in ast.unparse(statement.annotation) or _has_keyword(statement.value, "init", False):
                    continue
                kind = keyword if all_keyword or _has_keyword(statement.value, "kw_only", True) else positional
                kind[statement.target.id] = None
        return [*positional, *keyword]

    def _entry(self, found: _Object, name: str, module: _Module, key: str) -> _Object | None:
        """Find an entry of a mapping: written in it, assigned to it, or registered by a decorator."""
        home = found.module if isinstance(found, _Value) else module
        if isinstance(found, _Value) and isinstance(found.node, ast.Dict):
            for key_node, value in zip(found.node.keys, found.node.values, strict=True):
                if isinstance(key_node, ast.Constant) and key_node.value == key:
                    return self._evaluate(home, value, frozenset())
                if key_node is None:
                    inner = self._evaluate(home, value, frozenset())
                    if inner and (entry := self._entry(inner, name, home, key)) is not None:
                        return entry
        functions = (node for node in ast.walk(home.tree) if isinstance(node, ast.FunctionDef))
        registrars = {function.name for function in functions if _stores_into(function, name)}
        for statement in _statements(home.tree.body):
            if isinstance(statement, ast.Assign) and any(_is_item(t, name, key) for t in statement.targets):
                return self._evaluate(home, statement.value, frozenset())
            if isinstance(statement, ast.Expr) and _registers(statement.value, registrars, key):
                return self._evaluate(home, statement.value.args[-1], frozenset())  # type: ignore[attr-defined]
            if any(_registers(d, registrars, key) for d in getattr(statement, "decorator_list", [])):
                return self._bound(home, statement, getattr(statement, "name", ""), frozenset())
        return None


def installed(package: str) -> SourceTree | None:
    """Return the source files of an installed top-level package without importing it; None if there is none."""
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0]).parent

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return SourceTree(read)


def check_installed(ledger: Ledger, *needs: Need, live: bool = False) -> None:
    """Check every target of the given needs in the installed engine's files; imports nothing of the engine.

    Args:
        live: look targets up in the modules that this process has already loaded, and read files for the others only.
            Parsing the files takes most of the check's time.

    Raises:
        PatchError: see `Ledger.check`.
    """
    files = installed(ledger.engine)
    assert files is not None
    look = _live_if_loaded(files.check) if live else files.check
    with _uncollected():
        ledger.check(*needs, look=look)
        del look, files  # the trees go while nothing walks them


def _live_if_loaded(otherwise: Callable[[Target], None]) -> Callable[[Target], object]:
    return lambda target: find(target) if is_loaded(target.module) else otherwise(target)


def is_loaded(module: str) -> bool:
    """Whether this process has imported a module."""
    return sys.modules.get(module) is not None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, which walks a syntax tree's many objects again and again while it grows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class body, including those under if, try and with."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from _statements(statement.body)
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _statements(statement.body)
            for handler in statement.handlers:
                yield from _statements(handler.body)
            yield from _statements(statement.orelse + statement.finalbody)
        elif isinstance(statement, ast.With):
            yield from _statements(statement.body)


def _bindings(body: list[ast.stmt], name: str) -> Iterator[_Binding]:
    plain = {id(statement) for statement in body}
    for statement in _statements(body):
        unconditional = id(statement) in plain
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            overload = "overload" in map(_called_name, statement.decorator_list)
            if statement.name == name and not overload:
                yield statement, unconditional
        elif isinstance(statement, ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in statement.names):
                yield statement, unconditional
        elif isinstance(statement, ast.Import):
            if any((alias.asname or alias.name.partition(".")[0]) == name for alias in statement.names):
                yield statement, unconditional
        elif isinstance(statement, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in statement.targets) and not _made_over(
                statement.value, name
            ):
                yield statement.value, unconditional
        elif (
            isinstance(statement, ast.AnnAssign)
            and statement.value is not None  # an annotation alone makes no attribute
            and isinstance(statement.target, ast.Name)
            and statement.target.id == name
        ):
            yield statement.value, unconditional


def _made_over(node: ast.expr, name: str) -> bool:
    """Whether the node is the object `name` or a call on it: X = X, X = decorate(X), X = defstruct("X",
    namespace=vars(X)). Such an object is taken to keep its attributes."""
    if isinstance(node, ast.Call):
        return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
    return isinstance(node, ast.Name) and node.id == name


def _in_order(bindings: Iterator[_Binding]) -> list[ast.AST]:
    """Put the last unconditional binding first, then the others as written: which branch runs is unknown."""
    found = list(bindings)
    last = [node for node, unconditional in found if unconditional][-1:]
    return last + [node for node, _ in found if node not in last]


def _absolute(module: _Module, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.name.split(".")
    up = statement.level - 1 if module.is_package else statement.level
    return ".".join(parts[: len(parts) - up] + ([statement.module] if statement.module else []))


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """Names in the order of `inspect.signature`."""
    groups: list[ast.arg | None] = [*arguments.posonlyargs, *arguments.args, arguments.vararg]
    groups += [*arguments.kwonlyargs, arguments.kwarg]
    return tuple(argument.arg for argument in groups if argument)


def _method(module: _Module, node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> _Object:
    decorators = set(map(_called_name, node.decorator_list))
    if decorators.intersection(_NOT_CALLABLE):
        return _Value(module, node)
    parameters = _parameters(node.args)
    takes_owner = "classmethod" in decorators or (bound and "staticmethod" not in decorators)
    return _Function(node, parameters[1:] if takes_owner else parameters)


def _called_name(node: ast.expr) -> str:
    """The last part of a decorator's name, called or not."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has_keyword(node: ast.expr | None, name: str, value: bool) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in node.keywords)


def _registers(node: ast.expr, registrars: set[str], key: str) -> bool:
    """Whether the node is a call such as `register("key")` or `Registry.register("key", handler)`."""
    if not (isinstance(node, ast.Call) and node.args and _called_name(node) in registrars):
        return False
    return isinstance(node.args[0], ast.Constant) and node.args[0].value == key


def _is_item(node: ast.expr, mapping: str, key: str | None = None) -> bool:
    """Whether the node is `mapping[key]`, with any key for None."""
    if not (isinstance(node, ast.Subscript) and _called_name(node.value) == mapping):
        return False
    return key is None or (isinstance(node.slice, ast.Constant) and node.slice.value == key)


def _stores_into(function: ast.FunctionDef, mapping: str) -> bool:
    return any(
        isinstance(node, ast.Assign) and any(_is_item(target, mapping) for target in node.targets)
        for node in ast.walk(function)
    )
