"""Kernels of the plugin that are built after the warm-up: compiled, or read from a cache that has them.

A request waits for each, so there should be none once a server is ready. With the trace on the log names them, and
`nsa-plugin compare` fails if one was built while it measured.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from nsa_plugin.kernels.cuda import build

logger = logging.getLogger("nsa_plugin")

PACKAGE = __name__.partition(".")[0]


@functools.cache
def watch() -> None:
    """From now on log each kernel of the plugin that this process builds."""
    build.when_loaded(_say)
    try:
        knobs = import_module("triton.knobs").compilation
        before = knobs.listener
    except (ImportError, AttributeError):  # no Triton, or one before 3.4
        return

    def listener(*, src: Any, **given: Any) -> None:
        function: Any = getattr(src, "fn", None)
        if str(getattr(function, "__module__", "")).startswith(f"{PACKAGE}."):
            _say(function.__name__)
        if before is not None:
            before(src=src, **given)

    knobs.listener = listener


def _say(name: str) -> None:
    logger.info("kernel %s was built after the warm-up", name)
