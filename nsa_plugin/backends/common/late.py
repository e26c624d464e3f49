"""Kernels of the plugin that are built once an engine has captured its graphs: compiled, or read from a cache.

A request waits for each, so the warm-up and the captures should have built all. With the trace on the log names them,
and `nsa-plugin compare` fails if one was built while it measured.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

from nsa_plugin.kernels.cuda import build

logger = logging.getLogger("nsa_plugin")

PACKAGE = __name__.partition(".")[0]


def watch(trace: str) -> None:
    """Log each kernel of the plugin that this process builds from now on, with the setting `trace` on."""
    if trace != "off":
        _watch()


@functools.cache
def _watch() -> None:
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
    build.when_loaded(_say)
    logger.info("kernels that are built from now on are named here")


def _say(name: str) -> None:
    logger.info("kernel %s was built while serving", name)
