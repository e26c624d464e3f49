"""Every Triton kernel compiles for every architecture since Ampere, and its blocks fit the GPU; without a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import nsa_plugin
from nsa_plugin.kernels.triton.tiles import mha_tile, tiles_of
from nsa_plugin.libraries.architectures import EMULATED, FIRST_WITH_FP8, shared_memory_per_block
from nsa_plugin.libraries.capabilities import MHA_DIMS
from tests.kernels import compile_program

SPILLED = 2048
"""Bytes of spilled registers of a thread; more is a tile that is too large for the architecture."""

WITH_WGMMA = {"_ragged_logits", "_paged_logits", "_mha_kernel", "sparse_mla_kernel"}
"""Kernels that multiply by warpgroups on SM90, unless it emulates another GPU."""
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


def entries(sm: int) -> set[tuple[str, tuple[int, ...]]]:
    """Kernel and tile of each entry of an SM version's line; of dense attention those that its widths reach."""
    line, shared = tiles_of(sm), shared_memory_per_block(sm)
    dense = {
        mha_tile(sm, shared, *dims, dtype.itemsize, rows)
        for dims, (rows, dtype) in product(MHA_DIMS, compile_program.DENSE_INPUTS)
    }
    return {
        *(("sparse_mla_kernel", tile[:-1]) for tile in line.sparse_mla),
        *(("_mha_kernel", tuple(tile)) for tile in dense),
        ("_ragged_logits", tuple(line.logits[1:])),
        ("_paged_logits", tuple(line.paged_logits[1:])),
    }


def compiled_for(*sm: int) -> dict[str, list[dict[str, Any]]]:
    """By kernel, what a block of each compilation needs. A second SM version is the one that is emulated."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compile_program.__name__, *map(str, sm)]
    # A minute of one core with an empty cache of Triton's, and ten where others have most of the machine.
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_kernel_compiles_and_a_block_fits_the_gpu(sm: int) -> None:
    compiled = compiled_for(sm)
    assert {name.rpartition(".")[2] for name in compiled} == launched()
    blocks = [(name, block) for name, kinds in compiled.items() for block in kinds]
    assert [one for one in blocks if one[1]["shared"] > shared_memory_per_block(sm)] == []
    # A multiprocessor has 65536 registers, and a launch fails where one block needs more.
    assert [one for one in blocks if one[1]["registers"] * one[1]["threads"] > 1 << 16] == []
    spilled = {name: max(block["spilled"] for block in kinds) for name, kinds in compiled.items()}
    assert max(spilled.values()) <= SPILLED, spilled
    tiles = {(name.rpartition(".")[2], tuple(block["tile"].values())) for name, block in blocks}
    assert entries(sm) - tiles == set(), "not compiled: entries of the table of tiles"
    packed = {name.rpartition(".")[2] for name, block in blocks if block["packed"]}
    assert packed == ({"_paged_logits"} if sm < FIRST_WITH_FP8 else set())
    warpgroups = {name.rpartition(".")[2] for name, block in blocks if block["wgmma"]}
    assert warpgroups == (WITH_WGMMA if sm == 90 else set())


def test_an_emulated_gpu_has_no_warpgroup_instructions() -> None:
    """And as much shared memory as the GPU that is emulated."""
    compiled = compiled_for(90, EMULATED)
    blocks = [(name, block) for name, kinds in compiled.items() for block in kinds]
    assert [one for one in blocks if one[1]["wgmma"]] == []
    assert [one for one in blocks if one[1]["shared"] > shared_memory_per_block(EMULATED)] == []
