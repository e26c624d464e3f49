"""The engines' few-head kernels, with modules that check what the real ones do and compute with the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.kernels.triton import device
from nsa_plugin.tools.bench import rivals
from nsa_plugin.tools.bench.cases import SUITES, case
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from tests.tools.bench import fakes
from tests.tools.bench.fakes import RATES, FakeTimer

UNIONS: list[int] = []
TILES: list[dict[str, tuple[int, int, int]]] = []


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    topk_length: torch.Tensor,
    union: int,
    **tile: tuple[int, int, int],
) -> torch.Tensor:
    assert q.dtype == kv.dtype == torch.bfloat16
    assert indices.dtype == topk_length.dtype == torch.int32
    assert topk_length.tolist() == [(row >= 0).sum() for row in indices]
    UNIONS.append(union)
    TILES.append(tile)
    return reference_prefill(q, kv, indices, scale=sm_scale, d_v=d_v).out


def bf16_interface(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512, block_dpe: int = 64
) -> tuple[torch.Tensor, ...]:
    assert kv.shape[1] == indices.shape[1] == 1
    assert indices.shape[2] % 16 == 0
    result = reference_prefill(q, kv.squeeze(1), indices.squeeze(1), scale=sm_scale, d_v=d_v)
    return result.out, result.max_logits, result.lse * 2


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "needs_cuda", lambda q: None)
    for name, functions in {
        rivals.SGLANG_MODULE: {"sparse_mla_prefill": sparse_mla_prefill},
        rivals.VLLM_MODULE: {"triton_bf16_mla_sparse_interface": bf16_interface},
    }.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:n]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(sys.modules[name]).update(functions)


def measured(heads: int, topk: int = 32) -> tuple[dict[str, Any], dict[str, str]]:
    UNIONS.clear()
    one = case("sparse_mla_prefill", heads=heads, q=5, kv=90, topk=topk, layout="v32_fp8", selection="overlap 80%")
    outcome = run_suite(
        SUITES["sparse-mla-prefill"], (one,), fakes.context(None, "none"), FakeTimer(), RATES, BenchOptions()
    )
    assert outcome.failed == []
    refused = {entry["provider"]: entry["reason"] for entry in outcome.refused}
    return {row["provider"]: row for row in outcome.rows}, refused


@pytest.mark.parametrize(("heads", "unions"), [(4, {4}), (8, {2, 4}), (16, {2}), (32, set()), (6, set())])
def test_rivals_are_judged_and_refuse_unions_that_the_engine_would_drop(
    engines: None, heads: int, unions: set[int]
) -> None:
    rows, refused = measured(heads)
    assert rows.keys() == {rivals.VLLM_NAME, *map(rivals.sglang_name, {0} | unions)}
    assert set(UNIONS) == {0} | unions
    for union in {2, 4} - unions:
        assert refused[rivals.sglang_name(union)].startswith(f"triton_sparse_mla: heads is {heads} with unions of")


@pytest.mark.parametrize(
    ("heads", "union", "tile"),
    [
        (8, 0, {"config": (64, 8, 2)}),
        (16, 0, {"config": (64, 8, 2)}),
        (17, 0, {"config": (32, 8, 2)}),
        (64, 0, {"config": (16, 8, 2)}),
        (8, 2, {"union_config": (64, 8, 2)}),
        (8, 4, {"union_config": (32, 8, 2)}),
        (16, 2, {"union_config": (32, 8, 2)}),
    ],
)
def test_sglangs_tile_fits_the_gpu_that_is_emulated(
    engines: None, heads: int, union: int, tile: dict[str, tuple[int, int, int]]
) -> None:
    TILES.clear()
    q, rows = torch.zeros(4, heads, 576, dtype=torch.bfloat16), torch.zeros(9, 576, dtype=torch.bfloat16)
    given = q, rows, torch.zeros(4, 16, dtype=torch.int32), 0.1
    for shared_memory in (None, 227 << 10, 99 << 10):
        rivals.sglang_triton(*given, union=union, shared_memory=shared_memory)()
    assert [{}, {}, tile] == TILES


def test_sglangs_kernel_fits_no_emulated_gpu_with_more_than_64_heads(engines: None) -> None:
    q, rows = torch.zeros(4, 65, 576, dtype=torch.bfloat16), torch.zeros(9, 576, dtype=torch.bfloat16)
    given = q, rows, torch.zeros(4, 16, dtype=torch.int32), 0.1
    rivals.sglang_triton(*given, union=0, shared_memory=100 << 10)
    with pytest.raises(KernelArgumentError, match="heads is 65; no tile of SGLang's fits 99 KiB of shared memory"):
        rivals.sglang_triton(*given, union=0, shared_memory=99 << 10)


@pytest.mark.parametrize(
    ("sm", "emulated", "small"), [(None, False, False), (90, False, False), (86, True, True), (86, False, False)]
)
def test_the_tile_is_sglangs_choice_on_a_gpu_that_is_not_emulated(
    engines: None, monkeypatch: pytest.MonkeyPatch, sm: int | None, emulated: bool, small: bool
) -> None:
    monkeypatch.setattr(device, "_emulated", None)
    device.emulate(sm if emulated else None)
    TILES.clear()
    one = case("sparse_mla_prefill", heads=16, q=5, kv=90, topk=32, layout="v32_fp8", selection="overlap 80%")
    workload = SUITES["sparse-mla-prefill"].build()(one, replace(fakes.context(), sm=sm))
    (contender,) = (each for each in workload.contenders if each.name == rivals.sglang_name(0))
    contender.load()()
    assert [{"config": (64, 8, 2)} if small else {}] == TILES


def test_topk_that_an_engine_does_not_take(engines: None) -> None:
    rows, refused = measured(8, topk=24)
    assert rows.keys() == {rivals.sglang_name(0)}
    assert "topk is 24; unions need a power of two" in refused[rivals.sglang_name(2)]
    assert "topk is 24; it must be a multiple of 16" in refused[rivals.VLLM_NAME]


def test_without_a_gpu_or_an_engine_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = torch.zeros(2, 8, 576), torch.zeros(9, 576), torch.zeros(2, 16, dtype=torch.int32), 0.1
    with pytest.raises(KernelArgumentError, match="q is on cpu"):
        rivals.vllm_triton(*arguments)
    monkeypatch.setattr(rivals, "needs_cuda", lambda q: None)
    monkeypatch.setitem(sys.modules, rivals.SGLANG_MODULE, None)
    with pytest.raises(ImportError, match=f"sglang is not installed with {rivals.SGLANG_MODULE}"):
        rivals.sglang_triton(*arguments, union=0)

    def fail(name: str) -> ModuleType:
        raise AttributeError("no such driver")

    monkeypatch.setattr(rivals, "import_module", fail)
    with pytest.raises(ImportError, match="vllm cannot be imported: AttributeError: no such driver"):
        rivals.vllm_triton(*arguments)


def test_unions_are_measured_with_the_cuda_kernels_alone() -> None:
    (one,) = SUITES["sparse-mla-prefill"].tiny[:1]
    names = {}
    for wanted in ((), ("cuda",), ("triton",)):
        workload = SUITES["sparse-mla-prefill"].build()(one, fakes.context(None, *wanted))
        names[wanted] = {contender.name for contender in workload.contenders}
    unions = {"cuda, unions", "cuda, unions where neighbours share"}
    assert unions <= names[()]
    assert unions <= names["cuda",]
    assert not unions & names["triton",]
