"""The stock paths, with libraries that compute what the real ones do, and check what those check."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.indexer import reference_logits
from nsa_plugin.kernels.kv_cache import open_cache
from nsa_plugin.kernels.sparse_mla import reference_decode, reference_prefill
from nsa_plugin.libraries.registry import Registry
from nsa_plugin.tools.bench import stock
from nsa_plugin.tools.bench.cases import SUITES, BenchCase, case
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from tests.tools.bench import fakes
from tests.tools.bench.fakes import RATES, FakeTimer


def sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: None = None,
    topk_length: torch.Tensor | None = None,
    *,
    use_legacy: bool,
) -> tuple[torch.Tensor, ...]:
    assert use_legacy
    assert q.shape[1] in (64, 128)
    assert q.dtype == kv.dtype == torch.bfloat16
    assert indices.dtype == torch.int32
    assert indices.shape[1] == kv.shape[1] == 1
    assert indices.shape[2] % 128 == 0
    result = reference_prefill(q, kv, indices, scale=sm_scale, d_v=d_v, topk_length=topk_length)
    return result.out, result.max_logits, result.lse


def with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: str,
    *,
    softmax_scale: float,
    is_fp8_kvcache: bool,
    indices: torch.Tensor,
    use_legacy: bool,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert is_fp8_kvcache
    assert use_legacy
    assert tile_scheduler_metadata == "metadata"
    assert q.shape[2] in (64, 128)
    layout = {656: "v32_fp8", 584: "v4_fp8"}[k_cache.shape[-1]]

    def cache(records: torch.Tensor) -> Any:
        pages = records.as_strided((records.shape[0], records.shape[1] * records.shape[3]), (records.stride(0), 1))
        return open_cache(pages, layout, records.shape[1])

    extra: dict[str, Any] = {}
    if extra_k_cache is not None:
        extra = {
            "extra_cache": cache(extra_k_cache),
            "extra_indices": extra_indices_in_kvcache,
            "extra_topk_length": extra_topk_length,
        }
    result = reference_decode(
        q, cache(k_cache), indices, scale=softmax_scale, d_v=head_dim_v, topk_length=topk_length, **extra
    )
    return result.out, result.lse


def mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    *,
    clean_logits: bool,
) -> torch.Tensor:
    assert not clean_logits
    return reference_logits(q, *kv, weights, ks, ke)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk: int,
) -> None:
    assert (len(starts), len(out), stride0, stride1) == (num_rows, num_rows, *logits.stride())
    assert ((starts == 0) & (ends == logits.shape[1])).all()
    out.copy_(logits.topk(topk, dim=1).indices)


def fast_topk_v2(score: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    assert topk == 2048
    assert (lengths == score.shape[1]).all()
    return score.topk(topk, dim=1).indices.int()


def ragged_transform(score: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    assert offsets.dtype == lengths.dtype == torch.int32
    return (score.topk(k, dim=1).indices + offsets.unsqueeze(1)).int()


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, functions in {
        "flash_mla": {
            "flash_mla_sparse_fwd": sparse_fwd,
            "flash_mla_with_kvcache": with_kvcache,
            "get_mla_metadata": lambda: ("metadata", None),
        },
        "deep_gemm": {"fp8_mqa_logits": mqa_logits},
        "sgl_kernel": {"fast_topk_v2": fast_topk_v2},
        "vllm._custom_ops": {"top_k_per_row_prefill": top_k_per_row_prefill},
        "flashinfer": {"top_k": lambda x, k: x.topk(k, dim=1), "top_k_ragged_transform": ragged_transform},
    }.items():
        module = ModuleType(name)
        vars(module).update(functions)
        if name == "vllm._custom_ops":  # they call vLLM's operators
            for function in functions:
                monkeypatch.setattr(torch.ops._C, function, object(), raising=False)
        monkeypatch.setitem(sys.modules, name, module)


def run(suite: str, *cases: BenchCase, registry: Registry | None = None) -> Outcome:
    """The stock paths alone: no provider has the name that is asked for."""
    outcome = run_suite(SUITES[suite], cases, fakes.context(registry, "none"), FakeTimer(), RATES, BenchOptions())
    assert outcome.failed == []
    return outcome


class WithReader(Registry):
    """The registry in which the reference stands in for the Triton reader of caches."""

    def load(self, op: str, name: str, **_: Any) -> Any:
        return super().load(op, "reference" if (op, name) == ("kv_cache_read", "triton") else name, **_)


@pytest.mark.parametrize("heads", [3, 65, 128])
def test_padded_prefill_with_and_without_the_copy(heads: int) -> None:
    one = case("sparse_mla_prefill", heads=heads, q=4, kv=130, topk=128, layout="v32_fp8")
    rows = {row["provider"]: row for row in run("sparse-mla-prefill", one, registry=WithReader()).rows}
    assert rows.keys() >= {"flash_mla padded", "flash_mla padded, bf16 copy included"}
    for row in rows.values():
        assert row["baseline"] == "flash_mla padded"
        assert row["max_error"] < 1e-2


def test_padded_decode() -> None:
    one = case("sparse_mla_decode", heads=5, batch=2, s_q=2, kv=100, topk=64, layout="v32_fp8")
    assert run("sparse-mla-decode", one).rows[0]["provider"] == "flash_mla padded"


def test_flash_mla_reads_a_bf16_cache_in_place() -> None:
    """Its prefill kernel takes a decode's query tokens too; the baseline of a decode is FA3 where that is installed."""
    one = case("sparse_mla_prefill", heads=5, q=4, kv=130, topk=128, layout="bf16")
    outcome = run("sparse-mla-prefill-bf16", one)
    assert outcome.rows[0]["provider"] == "flash_mla padded"
    assert "flash_mla padded, bf16 copy included" not in {entry["provider"] for entry in outcome.refused}
    one = case("sparse_mla_decode", heads=5, batch=2, s_q=2, kv=130, topk=128, layout="bf16")
    (row,) = run("sparse-mla-decode-bf16", one).rows
    assert (row["provider"], row["baseline"]) == ("flash_mla padded", "flash_mla padded")
    assert row["max_error"] < 1e-2


@pytest.mark.parametrize("heads", [8, 64])
def test_decode_kernel_of_a_v4_prefill(heads: int) -> None:
    one = case("v4_prefill_route", heads=heads, q=5, kv=600, topk=128, window=64, page_size=64, layout="v4_fp8")
    assert run("v4-prefill", one).rows[0]["provider"] == "flash_mla decode kernel"


def test_indexer_in_one_piece_with_every_selector() -> None:
    rows = run("indexer-topk", case("indexer_topk", heads=32, q=3, kv=2100, topk=2048, budget_mib=1)).rows
    assert [row["provider"] for row in rows][: len(stock.SELECTORS)] == [
        f"deep_gemm in one piece, {name}" for name in stock.SELECTORS
    ]
    assert {row["baseline"] for row in rows} == {"deep_gemm in one piece, sgl_kernel.fast_topk_v2"}


def test_selectors_alone() -> None:
    rows = run("topk", case("topk_rows", q=3, kv=2100, topk=2048)).rows
    assert [row["provider"] for row in rows][: len(stock.SELECTORS)] == list(stock.SELECTORS)
    few = run("topk", case("topk_rows", q=3, kv=210, topk=64))
    assert few.rows[0]["baseline"] == "vllm.top_k_per_row_prefill"
    assert few.refused[0]["reason"] == "fast_topk_v2: topk is 64; it must be 2048"


def test_a_vllm_without_the_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.ops._C, "top_k_per_row_prefill")
    outcome = run("topk", case("topk_rows", q=3, kv=210, topk=64))
    reasons = {entry["provider"]: entry["reason"] for entry in outcome.refused}
    assert reasons["vllm.top_k_per_row_prefill"] == "this build of vLLM has no top_k_per_row_prefill"


def test_sparse_attention_beside_dense_with_their_projections() -> None:
    rows = {
        row["provider"]: row for row in run("mha-one-shot", case("mha_one_shot", heads=2, q=9, kv=9, topk=128)).rows
    }
    assert "up_projection_us" in rows["torch SDPA"]
    assert "absorb_us" in rows["sparse_mla flash_mla padded"]
    assert rows["torch SDPA"]["floor_us"] != rows["sparse_mla flash_mla padded"]["floor_us"]


def test_what_the_libraries_do_not_take_is_refused() -> None:
    cases = {
        "sparse-mla-prefill": ("heads is 129", {"heads": 129, "q": 2, "kv": 130, "topk": 128, "layout": "v32_fp8"}),
        "sparse-mla-decode": (
            "topk is 65; it must be a multiple of 64",
            {"heads": 2, "batch": 1, "s_q": 1, "kv": 90, "topk": 65, "layout": "v32_fp8"},
        ),
        "indexer-topk": (
            "heads is 16; it must be 32 or 64",
            {"heads": 16, "q": 2, "kv": 90, "topk": 8, "budget_mib": 1},
        ),
    }
    for suite, (reason, fields) in cases.items():
        outcome = run(suite, case(SUITES[suite].cases[0].op, **fields))
        assert reason in outcome.refused[0]["reason"]


def test_padding_copies_only_where_it_must() -> None:
    q = torch.ones(2, 64, 4)
    assert stock.pad(q) is q
    padded = stock.pad(q[:, :3])
    assert padded.shape == (2, 64, 4)
    assert padded[:, :3].eq(1).all()
    assert padded[:, 3:].eq(0).all()
    assert [stock.padded_heads(n) for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
    with pytest.raises(KernelArgumentError):
        stock.padded_heads(129)
