"""The registry's providers inside vLLM, which carries some of their libraries inside itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nsa_plugin.backends.providers import Providers

VENDORED = {"deep_gemm": "vllm.third_party.deep_gemm"}


class VllmProviders(Providers):
    """`Providers`, for which vLLM's own copy of a library does where none is installed besides."""

    def load(self, op: str, name: str, heads: int | None = None) -> Callable[..., Any]:
        use_vendored(name)
        return super().load(op, name, heads)


def use_vendored(library: str) -> None:
    """Let a library that vLLM carries inside itself be imported by its own name, unless it is installed besides.

    vLLM looks for the installed one first itself and gets the same module object then.
    """
    inside = VENDORED.get(library)
    if inside is None or library in sys.modules or find_spec(library) is not None:
        return
    try:
        sys.modules[library] = import_module(inside)
    except ImportError:
        return  # the registry says that it is missing
