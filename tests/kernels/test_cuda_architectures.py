"""The CUDA kernels compile for every architecture that they are offered for, and their blocks fit it; without a GPU.

NVRTC comes with the requirements of development. The launchers load their kernels as on a GPU; instead of being loaded,
a kernel is compiled and checked against the limits of the architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import nsa_plugin
from nsa_plugin.kernels.cuda import (
    build,
    indexer,
    sparse_mla,
    sparse_mla_copy,
    sparse_mla_launch,
    sparse_mla_neighbours,
    sparse_mla_rows,
    sparse_mla_union,
    sparse_mla_wide,
    topk,
)
from nsa_plugin.kernels.topk import CUDA_MAX_TOPK
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import V32_FP8
from nsa_plugin.libraries.architectures import KIB, shared_memory_per_block
from tests.kernels.sparse_mla_cases import facts_of

ARCHITECTURES = (80, 86, 89, 90, 120)
"""SM100 is not one: of the CUDA kernels it has the top-k alone, which Triton's and DeepGEMM's indexers take there."""
REGISTERS = 65536  # of an SM, on each of them
RESERVED = KIB  # of a block's shared memory, for the system; the limit of a block does not include it
SIZED, REGCOUNT = 0x04, 0x2F  # of an entry: it has a size and a value behind its head; registers of a kernel
HEADS = 128
CACHE = Path(nsa_plugin.__file__).parents[1] / ".cache"
CACHED = (
    sparse_mla_copy._load,
    sparse_mla_launch.kernels,
    sparse_mla_neighbours._load,
    sparse_mla_union.kernels,
    sparse_mla_wide.kernel,
)


class Compiled:
    """A kernel compiled for an architecture, in the place of `build.CudaKernel`.

    Attributes:
        registers: of a thread, by the kernel of the source that has most.
        shared: bytes of a block, with the most dynamic shared memory that a launch asks for.
    """

    def __init__(self, sm: int, source: str, name: str, defines: tuple[tuple[str, int], ...], dynamic: int) -> None:
        cubin = build._cubin(source, defines, f"sm_{sm}" + ("a" if sm >= 90 else ""))
        self.dynamic, self.registers, self.defines = dynamic, registers(cubin), dict(defines)
        self.shared = static_shared(cubin, name) + dynamic
        assert self.shared <= shared_memory_per_block(sm), f"{source}: {name} of {dict(defines)} on SM{sm}"

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Any, *, shared_bytes: int = 0) -> None:
        assert shared_bytes <= self.dynamic
        assert 0 < self.registers * block[0] <= REGISTERS


@pytest.fixture
def load_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], DeviceFacts]]:
    """Have `load_kernel` compile for an SM version, whose facts are returned."""
    # A cubin's name says all that it depends on, so that only changed kernels are compiled by the next run.
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build, "_COMPILED", {})

    def load(sm: int) -> DeviceFacts:
        facts = facts_of(sm)
        monkeypatch.setattr(build, "_load", lambda *given: Compiled(sm, *given[:-1]))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(sm, 10))
        for module in (sparse_mla_copy, sparse_mla_neighbours, sparse_mla_union):
            monkeypatch.setattr(module, "facts_of", lambda device: facts)
        return facts

    for cached in CACHED:
        cached.cache_clear()
    yield load
    for cached in CACHED:
        cached.cache_clear()


def sections(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, start, bytes) of each section of an ELF64 file."""
    first, size, count, names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + size * number) for number in range(count)]
    texts = headers[names][4]
    for name, *_, start, length in headers:
        yield cubin[texts + name : cubin.index(b"\0", texts + name)].decode(), start, length


def registers(cubin: bytes) -> int:
    """Registers of a thread, by the kernel that has most: from the entries REGCOUNT of the section .nv.info."""
    found = []
    for name, start, length in sections(cubin):
        if name != ".nv.info":
            continue
        at = start
        while at < start + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            if (form, attribute) == (SIZED, REGCOUNT):
                found.append(struct.unpack_from("<II", cubin, at + 4)[1])
            at += 4 + (value if form == SIZED else 0)
    return max(found)


def static_shared(cubin: bytes, name: str) -> int:
    """Bytes of static shared memory of a kernel: its section, without what is reserved where the file says so."""
    sizes = {section: length for section, _, length in sections(cubin)}
    assert f".text.{name}" in sizes
    return max(0, sizes.get(f".nv.shared.{name}", 0) - RESERVED * (".nv.shared.reserved.0" in sizes))


def check_few_heads(
    sm: int, kernel: tuple[str, str], variant: sparse_mla_launch.FewHeadsVariant, shared: int, defines: dict[str, int]
) -> None:
    """One block has the shared memory that it asks for; as many as the variant says have theirs, and registers."""
    built = sparse_mla_launch.kernels(*kernel, ((variant, shared),), tuple(defines.items()), 0)
    attend, combines = built[variant]
    attend((1, 1, 1), variant.threads, (), shared_bytes=shared)
    for combine in combines.values():
        threads = 32 * sparse_mla_launch.COMBINING
        combine((1, 1, 1), (threads, 1, 1), ())
        assert combine.registers * threads <= REGISTERS
    assert attend.registers * variant.threads[0] * variant.blocks <= REGISTERS
    # An SM has what one block may request, and what is reserved for that block.
    assert (attend.shared + RESERVED) * variant.blocks <= shared_memory_per_block(sm) + RESERVED


@pytest.mark.parametrize(
    ("sm", "layout", "variant"),
    [
        (sm, layout, variant)
        for sm, layout in product(ARCHITECTURES, ("v32_fp8", "v4_fp8"))
        for variant in sparse_mla.possible_variants(HEADS, layout, facts_of(sm))
    ],
)
def test_sparse_mla_compiles_and_fits(
    sm: int, layout: str, variant: sparse_mla.Variant, load_for: Callable[[int], DeviceFacts]
) -> None:
    defines = sparse_mla.definitions(layout, load_for(sm), has_extra=layout == "v4_fp8")
    check_few_heads(sm, (sparse_mla.SOURCE, "attend"), variant, variant.shared_bytes(layout), defines)


@pytest.mark.parametrize(
    ("sm", "variant"),
    [(sm, variant) for sm in ARCHITECTURES for variant in sparse_mla_rows.possible_variants(HEADS, facts_of(sm))],
)
def test_sparse_mla_over_rows_compiles_and_fits(
    sm: int, variant: sparse_mla_rows.RowsVariant, load_for: Callable[[int], DeviceFacts]
) -> None:
    defines = sparse_mla_rows.definitions(load_for(sm))
    check_few_heads(sm, (sparse_mla_rows.SOURCE, "attend_rows"), variant, variant.shared_bytes, defines)


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_architecture_has_the_kernels_of_few_heads(sm: int) -> None:
    for layout in ("v32_fp8", "v4_fp8"):
        assert sparse_mla.possible_variants(HEADS, layout, facts_of(sm))
    assert sparse_mla_rows.possible_variants(HEADS, facts_of(sm))


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("gate", [sparse_mla_launch.NO_GATE, sparse_mla_launch.UNLESS_NEGATIVE])
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_unions_compile_and_fit(sm: int, gate: int, heads: int, load_for: Callable[[int], DeviceFacts]) -> None:
    """With the top-k of the models, and with the largest for which unions are offered."""
    facts = load_for(sm)
    variant, most = sparse_mla_union.variant_for(heads, facts), sparse_mla_union.most_entries(facts)
    defines = sparse_mla.definitions("v32_fp8", facts) | {"GATE": gate}
    for selected in (2048, most // variant.group):
        unite, attend = sparse_mla_union.kernels(selected, variant, tuple(defines.items()), 0)
        table = 4 << sparse_mla_union.table_bits(selected, variant.group)
        unite((1, 1, 1), sparse_mla_union.THREADS, (), shared_bytes=table)
        assert unite.shared - table == sparse_mla_union.STATIC * variant.group // 4
        assert variant.definitions.items() <= attend.defines.items()
        attend((1, 1, 1), variant.threads, (), shared_bytes=variant.shared_bytes(V32_FP8.name))
        assert attend.registers * variant.threads[0] * variant.blocks <= REGISTERS
    assert 4 << sparse_mla_union.table_bits(most // variant.group + 1, variant.group) > facts.shared_memory


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_what_decides_on_unions_compiles_and_fits(sm: int, load_for: Callable[[int], DeviceFacts]) -> None:
    facts = load_for(sm)
    most = sparse_mla_neighbours.limits(facts).heads
    sparse_mla_neighbours._load(most, 2048, False, torch.device("cpu"))
    build.load_kernel(sparse_mla_neighbours.SOURCE, "sample")((1, 1, 1), sparse_mla_neighbours.THREADS, ())
    defines = sparse_mla.definitions("v32_fp8", facts) | {"GATE": sparse_mla_launch.IF_NEGATIVE}
    for heads in (8, most):
        alone = sparse_mla_neighbours.alone(heads, facts)
        check_few_heads(sm, (sparse_mla.SOURCE, "attend"), alone, alone.shared_bytes("v32_fp8"), defines)


@pytest.mark.parametrize("heads", [40, 128])
@pytest.mark.parametrize("sm", [sm for sm in ARCHITECTURES if sm != sparse_mla_launch.HOPPER])
def test_copies_compile_and_fit(sm: int, heads: int, load_for: Callable[[int], DeviceFacts]) -> None:
    facts = load_for(sm)
    sparse_mla_copy._load(heads, False, torch.device("cpu"))
    mark, *others = sparse_mla_copy.copy_kernels()
    mark((1, 1, 1), sparse_mla_copy.THREADS, (), shared_bytes=sparse_mla_copy.MOST_PAGES // 8)
    for kernel in others:
        kernel((1, 1, 1), sparse_mla_copy.THREADS, ())
    rows = sparse_mla_copy.over_copy(heads, facts)
    defines = sparse_mla_copy.row_definitions(facts)
    check_few_heads(sm, (sparse_mla_rows.SOURCE, "attend_rows"), rows, rows.shared_bytes, defines)
    records = sparse_mla_copy.over_records(heads, facts)
    defines = sparse_mla.definitions("v32_fp8", facts) | {"GATE": sparse_mla_launch.IF_NEGATIVE}
    check_few_heads(sm, (sparse_mla.SOURCE, "attend"), records, records.shared_bytes("v32_fp8"), defines)
    assert (rows.heads, records.heads, records.converts) == (64, 64, True)


@pytest.mark.parametrize("sm", [*ARCHITECTURES, 100])
def test_topk_compiles_and_fits(sm: int, load_for: Callable[[int], DeviceFacts]) -> None:
    load_for(sm)
    for selected in (2048, CUDA_MAX_TOPK):
        topk.launch("topk_rows", 1, (), topk.shared_bytes(selected), topk.shared_bytes(CUDA_MAX_TOPK))


@pytest.mark.parametrize("relu", [0, 1, 2])
@pytest.mark.parametrize("heads", indexer.HEADS)
def test_indexer_compiles_and_fits(
    heads: int, relu: int, load_for: Callable[[int], DeviceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of rows, with the scan of a sample of the keys, all keys, and the rows that are scored again."""
    load_for(90)
    monkeypatch.setattr(indexer, "tensor_map", lambda rows, box: None)
    rows, keys, tuning = 16, 32768, indexer.IndexerTuning(relu=relu)
    q, k = (torch.empty(*shape, 128, dtype=torch.float8_e4m3fn) for shape in ((rows, heads), (keys,)))
    inputs = (q, k, torch.empty(keys), torch.empty(rows, heads))
    starts, ends = torch.empty((2, rows), dtype=torch.int32).unbind()
    for selected in (2048, CUDA_MAX_TOPK):
        buffers = indexer._buffers(keys, selected, 1, tuning.step)
        assert buffers.samples
        out = torch.empty((rows, selected), dtype=torch.int32)
        indexer._chunk(inputs, starts, ends, out, slice(0, rows), buffers, tuning)


@pytest.mark.parametrize("heads", sparse_mla_wide.HEADS)
def test_sparse_mla_of_many_heads_compiles_and_fits(heads: int, load_for: Callable[[int], DeviceFacts]) -> None:
    load_for(90)
    block, shared = sparse_mla_wide.block(heads), sparse_mla_wide.shared_bytes(heads)
    sparse_mla_wide.kernel(heads, 0)((1, 1, 1), block, (), shared_bytes=shared)


def test_a_block_that_is_too_large_is_found(load_for: Callable[[int], DeviceFacts]) -> None:
    load_for(86)
    static = Compiled(86, "topk.cu", "topk_rows", (("THREADS", topk.THREADS),), 0).shared
    assert static == 160, "bytes of `Control` of topk.cu"
    most = shared_memory_per_block(86) - static
    build.load_kernel("topk.cu", "topk_rows", defines={"THREADS": topk.THREADS}, max_dynamic_shared=most)
    with pytest.raises(AssertionError, match=r"topk\.cu: topk_rows of .* on SM86"):
        build.load_kernel("topk.cu", "topk_rows", defines={"THREADS": topk.THREADS}, max_dynamic_shared=most + 1)
