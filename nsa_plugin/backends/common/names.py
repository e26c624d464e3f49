"""What an engine's function calls, by the names that it looks up."""

from __future__ import annotations

import inspect
from typing import Any


def engine_names(original: Any) -> dict[str, Any]:
    """The globals of the module that a function or classmethod of the engine's is from, whatever is wrapped around."""
    names: dict[str, Any] = inspect.unwrap(original).__globals__
    return names
