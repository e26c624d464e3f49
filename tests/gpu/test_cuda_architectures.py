"""The CUDA kernels compiled for every architecture that they are offered for: where NVRTC is installed, without a GPU.

CUDA builds of PyTorch include NVRTC; the CPU builds of CI do not, and there these tests are skipped. `make test-gpu`
runs them too.
"""

from __future__ import annotations

import struct

import pytest

from nsa_plugin.kernels.cuda import (
    build,
    indexer,
    nvrtc,
    sparse_mla,
    sparse_mla_launch,
    sparse_mla_neighbours,
    sparse_mla_rows,
    sparse_mla_union,
    sparse_mla_wide,
)
from nsa_plugin.kernels.cuda.topk import THREADS
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.libraries.architectures import shared_memory_per_block

ARCHITECTURES = (80, 86, 89, 90, 120)
REGISTERS = 65536  # of an SM, on each of them
SIZED, REGCOUNT = 0x04, 0x2F  # of an entry: it has a size and a value behind its head; registers of a kernel
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.pathfinder")
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def registers(cubin: bytes) -> int:
    """Registers of a thread, by the kernel that has most: from the entries REGCOUNT of the section .nv.info (ELF64)."""
    first, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, first + size * number) for number in range(count)]
    texts = sections[names][4]
    found = []
    for name, *_, start, length in sections:
        if cubin[texts + name : cubin.index(b"\0", texts + name)] != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (SIZED, REGCOUNT):
                found.append(struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (value if form == SIZED else 0)
    return max(found)


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_sparse_mla_compiles_and_fits(sm: int, layout: str) -> None:
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    variants = sparse_mla.possible_variants(128, layout, facts)
    assert variants
    for variant in variants:
        defines = sparse_mla.definitions(layout, facts, has_extra=layout == "v4_fp8") | variant.definitions
        cubin = build._cubin(sparse_mla.SOURCE, tuple(sorted(defines.items())), f"sm_{sm}" + ("a" if sm >= 90 else ""))
        assert 0 < registers(cubin) * variant.threads[0] * variant.blocks <= REGISTERS


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_sparse_mla_over_rows_compiles_and_fits(sm: int) -> None:
    facts = DeviceFacts(sms=100, architecture=sm, shared_memory=shared_memory_per_block(sm))
    variants = sparse_mla_rows.VARIANTS if sm == 90 else sparse_mla_rows.possible_variants(128, facts)
    assert variants
    for variant in variants:
        defines = tuple(sorted((sparse_mla_rows.definitions(facts) | variant.definitions).items()))
        cubin = build._cubin(sparse_mla_rows.SOURCE, defines, f"sm_{sm}" + ("a" if sm >= 90 else ""))
        assert 0 < registers(cubin) * variant.threads[0] * variant.blocks <= REGISTERS


@pytest.mark.parametrize("gate", [sparse_mla_launch.NO_GATE, sparse_mla_launch.SHARING])
def test_unions_compile_and_fit(gate: int) -> None:
    facts = DeviceFacts(sms=100, architecture=90, shared_memory=shared_memory_per_block(90))
    variant = sparse_mla_union.VARIANT
    defines = sparse_mla.definitions("v32_fp8", facts) | variant.definitions | {"GATE": gate}
    cubin = build._cubin(sparse_mla.SOURCE, tuple(sorted(defines.items())), "sm_90a")
    assert 0 < registers(cubin) * variant.threads[0] * variant.blocks <= REGISTERS
    unite = (("GATE", gate), ("GROUP", sparse_mla_union.GROUP), ("STEPS", sparse_mla_union.steps(2048)))
    assert registers(build._cubin(sparse_mla_union.SOURCE, unite, "sm_90a")) > 0


def test_what_decides_on_unions_compiles_and_fits() -> None:
    facts = DeviceFacts(sms=100, architecture=90, shared_memory=shared_memory_per_block(90))
    variant = sparse_mla_neighbours.ALONE
    defines = sparse_mla.definitions("v32_fp8", facts) | variant.definitions | {"GATE": sparse_mla_launch.NOT_SHARING}
    cubin = build._cubin(sparse_mla.SOURCE, tuple(sorted(defines.items())), "sm_90a")
    assert 0 < registers(cubin) * variant.threads[0] * variant.blocks <= REGISTERS
    assert registers(build._cubin(sparse_mla_neighbours.SOURCE, (), "sm_90a")) > 0


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_topk_compiles(sm: int) -> None:
    assert registers(build._cubin("topk.cu", (("THREADS", THREADS),), f"sm_{sm}" + ("a" if sm >= 90 else ""))) > 0


@pytest.mark.parametrize(("source", "sample"), [(indexer.SCAN, 0), (indexer.SCAN, 1), (indexer.REDO, 0)])
@pytest.mark.parametrize("relu", [0, 1, 2])
@pytest.mark.parametrize("heads", indexer.HEADS)
def test_indexer_compiles_and_fits(heads: int, relu: int, source: str, sample: int) -> None:
    defines = indexer.definitions(source, indexer.IndexerTuning(relu=relu), heads=heads, sample=sample)
    cubin = build._cubin(source, tuple(sorted(defines.items())), "sm_90a")
    assert 0 < registers(cubin) * indexer.BLOCKS[source][0] <= REGISTERS


@pytest.mark.parametrize("heads", sparse_mla_wide.HEADS)
def test_sparse_mla_of_many_heads_compiles_and_fits(heads: int) -> None:
    cubin = build._cubin(sparse_mla_wide.SOURCE, tuple(sorted(sparse_mla_wide.definitions(heads).items())), "sm_90a")
    assert 0 < registers(cubin) * sparse_mla_wide.block(heads)[0] <= REGISTERS
