"""Every Triton kernel compiles for the GPUs that it is for, and its blocks fit their shared memory; without a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nsa_plugin
from tests.kernels import compile_program

PACKAGE = Path(nsa_plugin.__file__).parent
ROOT = Path(compile_program.__file__).parents[2]


def launched() -> set[str]:
    """Names of the kernels that the package launches: `kernel[grid](...)` of what is defined with `triton.jit`."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    }
    calls = {
        ast.unparse(node.func.value).rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    return defined & calls


@pytest.mark.parametrize("sm", [90, 100])
def test_every_kernel_compiles_and_fits_the_shared_memory(sm: int) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compile_program.__name__, str(sm)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    assert {name.rpartition(".")[2] for name in compiled} == launched()
    too_large = {name: max(sizes) for name, sizes in compiled.items() if max(sizes) > compile_program.SHARED_MEMORY}
    assert too_large == {}
