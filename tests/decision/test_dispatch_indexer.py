"""The decision about the indexer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.routes import FLASH_MLA_DECODE
from nsa_plugin.decision.shapes import BatchShape, ModelShape
from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.devices import GIB, MIB, DeviceProfile, synthetic
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import (
    CPU,
    FULL_B200,
    FULL_H200,
    H200,
    LONG,
    OLD_DEEP_GEMM,
    OLD_H200,
    STOCK,
    V4,
    V32,
    V32_FP8,
    VLLM_DEEP_GEMM,
    choose,
    decode,
    extend,
)

pytestmark = pytest.mark.usefixtures("nothing_measured")

# ---------------------------------------------------------------------------------------------------
# The indexer: sglang #13646, #25502, and the out-of-memory failures of #39095 and #37712


@pytest.mark.regression(8)
@pytest.mark.regression(24)
@pytest.mark.parametrize(
    ("rows", "context", "settings", "memory_free", "expected"),
    [
        (4096, 65536, {}, 100 * GIB, 2048),  # 512 MiB over 256 KiB a row
        (1000, 65536, {}, 100 * GIB, 1000),  # fewer rows than fit
        (2048, 65536, {}, 100 * GIB, 2048),  # exactly as many
        (4096, 65536, {"logits_budget_mb": 1000}, 100 * GIB, 2048),  # 4000 rows fit
        (8192, 65536, {"logits_budget_mb": 1024}, 100 * GIB, 4096),
        (4096, 65536, {"logits_budget_mb": 4096}, 1 * GIB, 1024),  # a quarter of what is free
        (4096, 65536, {}, 0, 1),
        (4096, 2**28, {"logits_budget_mb": 1}, 100 * GIB, 1),  # one row is 1 GiB
    ],
)
def test_rows_of_logits_held_at_once(
    rows: int, context: int, settings: dict[str, int], memory_free: int, expected: int
) -> None:
    plan = choose(V32, extend(rows, context), synthetic(90, memory_free=memory_free), **settings)
    assert plan.indexer.rows_per_chunk == expected


def test_the_reason_for_the_rows_names_the_numbers() -> None:
    plan = choose(V32, extend(4096, 65536), logits_budget_mb=1000)
    assert plan.reasons["indexer.rows_per_chunk"] == (
        "the logits of 4000 query tokens, 262144 B each, fit 1000.0 MiB (logits_budget_mb); "
        "rounded down to a power of two"
    )
    plan = choose(V32, extend(4096, 65536), synthetic(90, memory_free=64 * MIB))
    assert "16.0 MiB (a quarter of the free memory)" in plan.reasons["indexer.rows_per_chunk"]
    plan = choose(V32, extend(4, 2**28), logits_budget_mb=1)
    assert (
        "the logits of one query token take 1073741824 B, more than 1.0 MiB" in plan.reasons["indexer.rows_per_chunk"]
    )


def test_decode_logits_are_budgeted_too() -> None:
    # vLLM holds [requests, longest context] in float32 however large it is: here 1024 rows of 640 KiB.
    assert choose(V32, decode(1024, 163840), logits_budget_mb=512).indexer.rows_per_chunk == 512


def test_v4_scores_compressed_keys() -> None:
    # 256 KiB a row, and 8.5 MiB of the 512 for the gathered keys: 2013 rows.
    in_place = Constraints(stock_prefill=FLASH_MLA_DECODE)
    plan = choose(V4, extend(8192, 262144), OLD_H200, in_place)
    assert plan.indexer.rows_per_chunk == 1024
    assert plan.reasons["indexer.rows_per_chunk"] == (
        "the logits of 2013 query tokens, 262144 B each, fit 503.5 MiB "
        "(logits_budget_mb less 8.5 MiB for gathered keys); rounded down to a power of two"
    )
    # A decode gathers no keys.
    assert choose(V4, decode(8192, 262144), FULL_H200).indexer.rows_per_chunk == 2048


def test_memory_of_bf16_rows_is_not_given_to_logits() -> None:
    """DeepSeek-V4: rows, indices, keys and logits together stay within the setting."""
    asked: dict[str, Any] = {"prefill_backend": "flash_mla", "large_q_rows": 1}
    plan = choose(V4, extend(32768, 393216), FULL_H200, **asked)
    assert plan.dequantize_kv
    # 32768 rows and the windows before them, 98304 entries, 64 for a page that begins: 1 KiB each.
    held = (32768 + 128 + 512 + 98304 + 64) / 1024 + 96 + (98304 + 64) * 136 / MIB
    assert (
        f"logits_budget_mb less {held:.1f} MiB for bf16 rows, their indices and gathered keys"
        in (plan.reasons["indexer.rows_per_chunk"])
    )
    assert plan.indexer.rows_per_chunk == 512
    assert held + 512 * 393216 / MIB <= 512
    # A batch without such rows has a larger budget.
    assert choose(V4, extend(32768, 393216), FULL_H200, prefill_backend="cuda").indexer.rows_per_chunk == 1024
    # The budget is at least an eighth.
    plan = choose(V4, extend(32768, 393216), FULL_H200, logits_budget_mb=64, **asked)
    assert plan.indexer.rows_per_chunk == 16
    assert "8.0 MiB (1/8 of logits_budget_mb, since bf16 rows" in plan.reasons["indexer.rows_per_chunk"]
    plan = choose(V4, extend(32768, 393216), synthetic(90, memory_free=64 * MIB))
    assert "16.0 MiB (a quarter of the free memory)" in plan.reasons["indexer.rows_per_chunk"]


@pytest.mark.parametrize(
    ("model", "shape", "device", "expected"),
    [
        (V32, LONG, H200, ("deep_gemm", "")),  # ragged logits are not scheduled
        (V32, decode(8, 5000), H200, ("deep_gemm", "deep_gemm")),
        (V4, extend(12289, 40000), H200, ("deep_gemm", "")),
        (V4, decode(12289, 40000), H200, ("deep_gemm", "deep_gemm")),
        (V32, decode(8, 5000), CPU, ("reference", "")),
        # The plugin schedules for DeepGEMM's SM90 kernel, and scores what DeepGEMM does not support.
        (V32, LONG, FULL_H200, ("deep_gemm", "")),
        (V32, decode(8, 5000), FULL_H200, ("deep_gemm", "triton")),
        (V32, decode(100_000, 5000, cuda_graph=True), FULL_H200, ("deep_gemm", "triton")),
        (V4, decode(32768, 40000), synthetic(90, versions=OLD_DEEP_GEMM), ("deep_gemm", "triton")),
        # The schedule format of vLLM 0.33's copy is unknown, and on SM100 it needs scales that the plugin does not
        # have.
        (V32, decode(8, 5000), synthetic(90, versions=VLLM_DEEP_GEMM), ("deep_gemm", "deep_gemm")),
        (V32, decode(8, 5000), synthetic(100, versions=VLLM_DEEP_GEMM), ("triton", "")),
        (V32, decode(8, 5000), FULL_B200, ("deep_gemm", "deep_gemm")),
        (replace(V32, index_n_heads=16), LONG, FULL_H200, ("triton", "")),
        (replace(V32, index_n_heads=16), decode(8, 5000), FULL_H200, ("triton", "")),
        (replace(V32, index_n_heads=16), decode(8, 5000), FULL_B200, ("deep_gemm", "deep_gemm")),
        (replace(V32, index_head_dim=96), LONG, FULL_H200, ("triton", "")),
        (V32, LONG, synthetic(90, libraries=("flash_mla", "triton")), ("triton", "")),
        (V32_FP8, LONG, synthetic(80), ("triton", "")),
    ],
)
def test_providers_of_logits_and_of_the_schedule(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, expected: tuple[str, str]
) -> None:
    indexer = choose(model, shape, device).indexer
    assert (indexer.provider, indexer.metadata_provider) == expected


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (12288, "the installed DeepGEMM schedules 12288 query tokens"),
        (12289, "12289 query tokens in pieces: the installed DeepGEMM schedules 12288 at once here"),
    ],
)
def test_decodes_beyond_deep_gemms_schedule_run_in_pieces(rows: int, reason: str) -> None:
    plan = choose(V4, decode(rows, 40000), synthetic(90, libraries=STOCK, versions=OLD_DEEP_GEMM))
    assert plan.indexer.metadata_provider == "deep_gemm"
    assert plan.reasons["indexer.metadata_provider"] == reason


def test_a_fallback_of_the_indexer_says_why() -> None:
    plan = choose(replace(V32, index_n_heads=16), LONG, FULL_H200)
    assert plan.reasons["indexer.provider"] == (
        "triton is the first that supports 16 indexer heads on SM90; refused "
        "deep_gemm: supports 32 or 64 indexer heads; the model has 16"
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(V32, index_n_heads=16), r"deep_gemm: supports 32 or 64 indexer heads; the model has 16"),
        (replace(V32, index_head_dim=96), r"deep_gemm: supports heads of .* elements; the model's have \(96,\)"),
    ],
)
def test_an_indexer_that_no_kernel_supports_is_an_error(model: ModelShape, message: str) -> None:
    with pytest.raises(NoProviderError, match=message):
        decide(model, LONG, H200, Settings())


def test_without_deep_gemm_a_gpu_cannot_select() -> None:
    with pytest.raises(NoProviderError, match=r"selects KV tokens for 64 indexer heads .*deep_gemm: not installed"):
        decide(V32, LONG, synthetic(90, libraries=("flash_mla", "fa3")), Settings())
    # A prompt that selects nothing does not need it.
    assert choose(V32, extend(10), synthetic(90, libraries=("fa3",))).provider == "fa3"
