"""SGLang's environment switches, answered for one call without a change of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ANSWER = "nsa_plugin_answer"
"""Attribute of a steered `EnvField`: the context variable that holds its answer."""


def steer(field: Any) -> None:
    """Let `answering` decide what `field.get()` returns; call it once, at start-up.

    SGLang reads its switches with `envs.NAME.get()` on one shared object. Outside `answering`, `get` returns what it
    returned before.

    Args:
        field: an `EnvField` of SGLang's `environ.envs`; None where this version has no such switch.
    """
    if field is None or hasattr(field, _ANSWER):
        return
    answer: ContextVar[bool | None] = ContextVar(field.name, default=None)
    read = field.get

    def get() -> Any:
        forced = answer.get()
        return read() if forced is None else forced

    field.get = get
    setattr(field, _ANSWER, answer)


@contextmanager
def answering(field: Any, value: bool) -> Iterator[None]:
    """Make a steered switch answer `value` in this thread; a switch that this version does not have is left alone."""
    if field is None:
        yield
        return
    answer: ContextVar[bool | None] = getattr(field, _ANSWER)
    before = answer.set(value)
    try:
        yield
    finally:
        answer.reset(before)
