"""Names that an engine's function looks up."""

from __future__ import annotations

import inspect
from typing import Any


def engine_names(original: Any) -> dict[str, Any]:
    """Return the globals of the module that defines an engine's function or classmethod, wrapped or not."""
    names: dict[str, Any] = inspect.unwrap(original).__globals__
    return names
