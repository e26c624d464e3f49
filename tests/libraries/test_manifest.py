"""The manifest: every entry is complete, and names what exists."""

from __future__ import annotations

import importlib

import pytest

from nsa_plugin.layouts import FAMILY_LAYOUTS
from nsa_plugin.libraries.architectures import SHARED_MEMORY_PER_BLOCK
from nsa_plugin.libraries.capabilities import LATEST_SM, Capability, KernelLibrary, Op, spans
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.libraries.manifest import MANIFEST, supporting
from nsa_plugin.libraries.registry import OPS

ENTRIES = [pytest.param(library, id=name) for name, library in MANIFEST.items()]


def test_an_entry_is_filed_under_its_name() -> None:
    assert [library.name for library in MANIFEST.values()] == list(MANIFEST)


@pytest.mark.parametrize("library", ENTRIES)
def test_every_fact_has_a_source(library: KernelLibrary) -> None:
    assert library.kernels
    for fact in (*library.kernels, *library.row_limits):
        assert fact.source, fact


@pytest.mark.parametrize("library", ENTRIES)
def test_targets_are_ops_and_layouts_are_of_a_family(library: KernelLibrary) -> None:
    assert set(library.targets) <= set(OPS)
    known = {layout for layouts in FAMILY_LAYOUTS.values() for layout in layouts}
    assert {layout for kernel in library.kernels for layout in kernel.layouts} <= known


@pytest.mark.parametrize("library", ENTRIES)
def test_the_assumed_build_is_one_that_the_probe_would_accept(library: KernelLibrary) -> None:
    assert library.assumed[0] in {name for host in library.hosts for name in host.distributions}


@pytest.mark.parametrize("library", ENTRIES)
def test_a_row_limit_without_a_build_comes_last_and_is_the_strictest(library: KernelLibrary) -> None:
    """An unknown build must not get more rows than a known one."""
    smem = SHARED_MEMORY_PER_BLOCK[90]
    for op in {limit.op for limit in library.row_limits}:
        limits = [limit for limit in library.row_limits if limit.op == op]
        assert [bool(limit.distribution) for limit in limits] == [True] * (len(limits) - 1) + [False]
        unknown = limits[-1].rows(smem)
        assert unknown is not None
        assert all(rows is None or rows >= unknown for rows in (limit.rows(smem) for limit in limits))


@pytest.mark.parametrize(
    ("name", "architectures"),
    [
        ("flash_mla", {90, 100, 103}),
        ("deep_gemm", {90, 100, 103, 120, 121}),
        ("fa3", {90}),
        ("trtllm", {100, 103}),
        ("cuda", {80, 86, 87, 89, 90, 120, 121}),
        ("triton", None),
        ("reference", None),
    ],
)
def test_architectures_of_the_providers(name: str, architectures: set[int] | None) -> None:
    assert MANIFEST[name].architectures == architectures


def test_libraries_by_op() -> None:
    assert supporting(Op.SPARSE_MLA_PREFILL) == (
        "flash_mla", "trtllm", "flashinfer_sm120", "cuda", "triton", "reference",
    )  # fmt: skip
    assert supporting(Op.SPARSE_MLA_DECODE) == (
        "flash_mla", "fa3", "trtllm", "flashinfer_sm120", "cuda", "triton", "reference",
    )  # fmt: skip
    assert supporting(Op.TOKEN_SHARD) == ("triton",)


def test_the_limits_of_the_provider_modules_are_the_manifests() -> None:
    """The provider refuses a head count by its own constant, so that it can be used without a device profile."""
    flash_mla = importlib.import_module("nsa_plugin.kernels.providers.flash_mla")
    kernels = MANIFEST["flash_mla"].kernels
    assert {kernel.head_counts for kernel in kernels if kernel.sm_min == 90} == {flash_mla.HEADS}
    deep_gemm = importlib.import_module("nsa_plugin.kernels.providers.deep_gemm")
    indexers = [kernel for kernel in MANIFEST["deep_gemm"].kernels if kernel.op is Op.INDEXER_TOPK]
    assert {kernel.sm_min // 10: kernel.head_counts for kernel in indexers} == deep_gemm.HEADS
    dims = {kernel.sm_min // 10: tuple(dim for (dim,) in kernel.dims) for kernel in indexers}
    assert dims == deep_gemm.HEAD_DIMS
    sm120 = importlib.import_module("nsa_plugin.kernels.providers.flashinfer_sm120")
    for kernel in MANIFEST["flashinfer_sm120"].kernels:
        assert (kernel.head_counts, kernel.topk_multiple) == (sm120.HEADS, sm120.TOPK_MULTIPLE)


@pytest.mark.parametrize("sm", SHARED_MEMORY_PER_BLOCK)
def test_a_synthetic_device_has_its_architectures_limits(sm: int) -> None:
    assert synthetic(sm).smem_per_block == SHARED_MEMORY_PER_BLOCK[sm]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(90, 90)], "SM90"),
        ([(100, 109), (90, 90), (90, 90)], "SM90, SM100 to SM109"),
        ([(80, LATEST_SM)], "SM80 and later"),
        ([(0, LATEST_SM)], "any device"),
    ],
)
def test_architectures_in_words(ranges: list[tuple[int, int]], words: str) -> None:
    kernels = [Capability(op=Op.MHA_ONE_SHOT, sm_min=low, sm_max=high) for low, high in ranges]
    assert spans(kernels) == words
