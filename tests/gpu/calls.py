"""Record an engine's calls while its tests run under the plugin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def record(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[[tuple[Any, ...]], None]) -> None:
    """Let a function tell `note` its positional arguments before it runs, until the test ends.

    Args:
        owner: the module or class that has it under `name`.
    """
    function = getattr(owner, name)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        note(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, recorded)
