"""Triton's interpreter without the work that it repeats: most of the time of interpreted tests is Python's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

LARGE_PROGRAM = 64
"""Rows that one program reads, where tests are not about the reading: the interpreter's time is by the program."""


def patch_triton_once() -> None:
    """Triton replaces its language's functions at each launch, and again in each call of a device function.

    The second time replaces them with the same ones, and takes a fifth of the interpreter's time. A Triton whose
    interpreter looks otherwise is left as it is.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is not None and scope is not None:
        interpreter._patch_lang = _once(patch, scope, tl)


def _once(patch: Callable[[Any], Any], scope: Callable[[], Any], tl: Any) -> Callable[[Any], Any]:
    def patched_once(function: Any) -> Any:
        seen = [one for one in function.__globals__.values() if one is tl or one is tl.core]
        if seen and not any(tl.core.is_builtin(one.load) for one in seen):
            return scope()  # nothing to undo: what the launch has replaced, it puts back
        return patch(function)

    return patched_once


@pytest.fixture
def large_read_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted reads of a cache take up to 64 rows a program; `test_triton_kv_cache` has the sizes that serve."""
    if torch.cuda.is_available():
        return
    from nsa_plugin.kernels.triton import kv_cache

    rows_of = kv_cache._rows_per_program

    def rows_per_program(count: int) -> int:
        return max(rows_of(count), min(LARGE_PROGRAM, 1 << (count - 1).bit_length()))

    monkeypatch.setattr(kv_cache, "_rows_per_program", rows_per_program)
