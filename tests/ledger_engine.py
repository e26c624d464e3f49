"""An engine written from a ledger's data: an object for each target, so that a new entry needs no new stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import pytest

from nsa_plugin.patches.ledger import Kind, Target


@dataclass
class Node:
    """An object of a written module: its kind, its parameters, a class's attributes, a mapping's entries."""

    kind: Kind = Kind.CLASS
    params: tuple[str, ...] = ()
    children: dict[str, Node] = field(default_factory=dict)
    entries: dict[str, Node] = field(default_factory=dict)
    body: str = "..."

    def lines(self, name: str, indent: str = "") -> Iterable[str]:
        if self.entries:
            yield f"{indent}{name} = {{}}"
            for key, node in self.entries.items():
                yield from node.lines(f"make_{key}", indent)
                yield f"{indent}{name}[{key!r}] = make_{key}"
        elif self.kind is Kind.VALUE:
            yield f"{indent}{name} = 1"
        elif self.kind is Kind.FUNCTION:
            yield f"{indent}def {name}({', '.join(self.params)}): {self.body}"
        else:
            yield f"{indent}class {name}:"
            yield f"{indent}    def __init__({', '.join(dict.fromkeys(('self', *self.params)))}): ..."
            for child, node in self.children.items():
                yield from node.lines(child, indent + "    ")


def merged(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """All parameters of both, each one's in its order."""
    names, place = list(first), 0
    for name in second:
        if name not in names:
            names.insert(place, name)
        place = names.index(name) + 1
    return tuple(names)


def files(targets: Iterable[Target], body: str = "...") -> dict[str, str]:
    """Files of an engine that has these targets, by path.

    Args:
        body: of every function.
    """
    modules: dict[str, dict[str, Node]] = {}
    for target in targets:
        place = modules.setdefault(target.module, {})
        *owners, name = target.attributes
        for owner in owners:
            place = place.setdefault(owner, Node()).children
        node = place.setdefault(name, Node())
        if target.key is not None:
            node = node.entries.setdefault(target.key, Node())
        node.kind, node.params, node.body = target.kind, merged(node.params, target.params), body
    written = {}
    for module, nodes in modules.items():
        lines = [line for name, node in nodes.items() for line in node.lines(name)]
        written[f"{module.replace('.', '/')}.py"] = "\n".join(lines)
    return written


@dataclass(eq=False)
class Answered:
    """What a function of a live engine returns: its arguments, by name. `calls` has every answer of all functions."""

    arguments: dict[str, Any]
    calls: ClassVar[list[Answered]] = []

    def __post_init__(self) -> None:
        self.calls.append(self)


def live(targets: Iterable[Target], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules of an engine that has these targets, imported, by name. Each function returns an `Answered`."""
    modules = {}
    for path, source in files(targets, "return __answered__(dict(locals()))").items():
        name = path.removesuffix(".py").replace("/", ".")
        module = modules[name] = ModuleType(name)
        vars(module)["__answered__"] = Answered
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    return modules
