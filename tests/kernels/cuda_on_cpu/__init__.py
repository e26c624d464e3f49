"""The plugin's CUDA kernels for older GPUs, compiled by g++ and run on a CPU: slowly, and the same source.

Only `instructions.cuh` is replaced, by functions that do what the PTX instructions do, and what CUDA C++ has without
includes is in `threads.h`. Kernels for SM90, which need bulk copies, clusters or warpgroups, are not run so. Memory
that a kernel may not read is the caller's to poison; its shared memory is full of NaN at first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_plugin.kernels.cuda import build

HERE = Path(__file__).parent
SOURCES = Path(build.__file__).parent
CACHE = Path(__file__).parents[3] / ".cache" / "cuda-on-cpu"
FLAGS = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-fpermissive")
COMPILER = shutil.which("g++")
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
"""Shared memory whose size the launch gives."""

OUTCOMES = (
    "done",
    "threads of a block wait for each other",
    "a block writes beyond its shared memory",
    "the rows of a matrix share banks",
)
"""What `launch` of threads.h returns."""

edits: list[tuple[str, str]] = []
"""What is replaced in the source and its headers, by what: to see that a test notices."""


class KernelOnCpu:
    """A kernel, called as a `CudaKernel` is."""

    def __init__(self, source: str, name: str, defines: tuple[tuple[str, int], ...]) -> None:
        self.name = name
        self._run = getattr(_library(source, name, defines), f"run_{name}")

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cluster: None = None,
    ) -> None:
        values = build.values_of(args)
        pointers = build.pointers_to(values)
        outcome = self._run(pointers, *map(ctypes.c_uint, (*grid, *block, shared_bytes)))
        assert not outcome, f"{self.name}: {OUTCOMES[outcome]}"


def load_kernel(
    source: str, name: str, *, defines: Mapping[str, int] | None = None, max_dynamic_shared: int = 0
) -> KernelOnCpu:
    """Stands in for `build.load_kernel`."""
    return KernelOnCpu(source, name, tuple(sorted((defines or {}).items())))


def _edited(path: Path, made: set[tuple[str, str]]) -> str:
    """A file's text for a CPU, with those edits made that it has a place for; they are added to `made`."""
    text = DYNAMIC.sub(r"\1* const \2 = (\1*)shared_memory;", path.read_text())
    for edit in [one for one in edits if one[0] in text]:
        assert text.count(edit[0]) == 1, edit
        text = text.replace(*edit)
        made.add(edit)
    return text


def _library(source: str, name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """The kernel with these definitions; compiled, unless an earlier run has."""
    assert COMPILER is not None
    made: set[tuple[str, str]] = set()
    headers = [path for path in sorted(SOURCES.glob("*.cuh")) if path.name != "instructions.cuh"]
    texts = {path.name: _edited(path, made) for path in (*headers, HERE / "instructions.cuh", HERE / "threads.h")}
    text = _edited(SOURCES / source, made)
    texts["kernel.cpp"] = f"""#include "threads.h"
{text}
extern "C" int run_{name}(void** args, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared_bytes) {{
    return launch({name}, args, {{gx, gy, gz}}, {{bx, by, bz}}, shared_bytes);
}}
"""
    assert made == set(edits), "an edit has no place"
    key = hashlib.sha256(repr((texts, defines, FLAGS)).encode()).hexdigest()[:32]
    return _compiled(f"{Path(source).stem}-{name}-{key}.so", tuple(texts.items()), defines)


@functools.cache
def _compiled(name: str, texts: tuple[tuple[str, str], ...], defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    made = CACHE / name
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            for file, text in texts:
                (Path(folder) / file).write_text(text)
            options = [f"-D{key}={value}" for key, value in defines]
            library = Path(folder) / "kernel.so"
            line = [COMPILER, *FLAGS, *options, str(Path(folder) / "kernel.cpp"), "-o", str(library)]
            subprocess.run(line, check=True)
            os.replace(library, made)
    return ctypes.CDLL(str(made))
