"""Whether what serves is the stock engine's code: every object that the ledger changes, looked at after a start.

The engine is `tests.ledger_engine.live`, with the plugin's real ledger on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from nsa_plugin.patches.ledger import Ledger, Need, Patch, Target, find
from tests.ledger_engine import Answered


class Given:
    """An argument that nothing but stock code looks into."""

    forward_mode = SimpleNamespace(name="DECODE")


def raw(target: Target) -> Any:
    """The object at a target, as its owner holds it."""
    owner, name, _ = find(target)
    return owner[target.key] if target.key is not None else vars(owner)[name]


def changes(ledger: Ledger, *needs: Need) -> Iterator[tuple[Patch, Target]]:
    """The entries that change something in this version, with their targets."""
    for patch in ledger.patches:
        target = patch.target(ledger.version)
        if patch.replacement and patch.need in needs and target is not None:
            yield patch, target


def replaced(now: Any, stock: Any, given: Mapping[str, Any]) -> str:
    """Call an object that is not the stock one: "" if it only calls the stock one, else what differs.

    Args:
        now, stock: functions, or a class and a subclass of it that the plugin made, every method of which is called.
        given: arguments by name, "self" an instance of `now` for a class; a fresh `Given` for any other.
    """
    if not inspect.isclass(now):
        return _calls(getattr(now, "__func__", now), getattr(stock, "__func__", stock), given)
    if not issubclass(now, stock):
        return "is not a subclass of the stock class"
    ours = now.__mro__[: now.__mro__.index(stock)]
    names = {name for cls in ours for name in vars(cls) if hasattr(stock, name) and not hasattr(object, name)}
    names -= {"__module__", "__dict__", "__weakref__", "__annotations__"}
    said = {name: _calls(getattr(now, name), getattr(stock, name), given) for name in sorted(names)}
    assert names, "a class that overrides nothing"
    return "; ".join(f"{name} {words}" for name, words in said.items() if words)


def _calls(now: Callable[..., Any], stock: Callable[..., Any], given: Mapping[str, Any]) -> str:
    names = list(inspect.signature(stock).parameters)
    arguments = {name: given[name] if name in given else Given() for name in names}
    positional = [arguments.pop("self")] if "self" in arguments else []
    if "cls" in arguments:
        positional = [arguments.pop("cls")]
    Answered.calls.clear()
    answer = now(*positional, **arguments)
    if len(Answered.calls) != 1:
        return f"calls the stock function {len(Answered.calls)} times"
    (called,) = Answered.calls
    # A bool says no more of an answer than whether it is true, and what writes returns nothing.
    if answer is not called and answer is not None and answer is not True:
        return f"returns {answer!r} instead of what the stock function returns"
    passed = dict(zip(names, positional, strict=False)) | arguments
    differ = [name for name in names if called.arguments[name] is not passed[name]]
    return f"passes other {', '.join(differ)}" if differ else ""
