"""The decision, rule by rule: the upstream pull requests it follows, and the upstream failures it must not repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.decision import timings
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Attention, IndexerMode, IndexerPlan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings
from tests.decision.dispatch_cases import (
    AFTER_PREFILL,
    B200,
    CPU,
    FULL_B200,
    FULL_H200,
    H200,
    LONG,
    OLD_H200,
    V4,
    V32,
    V32_FP8,
    batch,
    choose,
    decode,
    extend,
    route,
)

pytestmark = pytest.mark.usefixtures("nothing_measured")

RELEASED = timings.TIMINGS  # read before the fixture empties it

OLD_SM120 = synthetic(
    120, versions={"trtllm": ("flashinfer-python", "0.7.0"), "flashinfer_sm120": ("flashinfer-python", "0.7.0")}
)


@pytest.mark.parametrize(
    ("build", "heads", "provider", "reason"),
    [
        (("sgl-deep-gemm", "0.2.5"), 64, "deep_gemm", ""),
        (("vllm", "0.33.0"), 32, "deep_gemm", ""),
        (("sgl-deep-gemm", "0.2.3.post1"), 64, "triton", "sgl-deep-gemm 0.2.3.post1 has no kernels for SM120"),
        (("vllm", "0.32.0"), 64, "triton", "vllm 0.32.0 has no kernels for SM120"),
        (("sgl-deep-gemm", "0.2.5"), 16, "triton", "supports 32 or 64 indexer heads; the model has 16"),
    ],
)
def test_the_indexer_on_sm120(build: tuple[str, str], heads: int, provider: str, reason: str) -> None:
    device = synthetic(120, versions={"deep_gemm": build})
    plan = choose(replace(V32_FP8, index_n_heads=heads), decode(4, 8192), device)
    assert (plan.indexer.provider, plan.indexer.metadata_provider) == (
        provider,
        provider if provider == "deep_gemm" else "",
    )
    assert reason in plan.reasons["indexer.provider"]


# ---------------------------------------------------------------------------------------------------
# Dense attention for short prefills: sglang #12788 (providers), #12964 (fp8)


@pytest.mark.parametrize(
    ("device", "provider"),
    [
        (H200, "fa3"),
        (FULL_H200, "fa3"),
        (synthetic(90, libraries=("cuda", "triton")), "triton"),
        (B200, "trtllm"),
        (synthetic(103), "trtllm"),
        (synthetic(80), "triton"),
        (CPU, "reference"),
    ],
)
@pytest.mark.parametrize("model", [V32, V32_FP8], ids=["bf16", "fp8"])
def test_a_short_prefill_is_dense(device: DeviceProfile, provider: str, model: ModelShape) -> None:
    plan = choose(model, extend(2048), device)
    assert route(plan) == ("mha_one_shot", provider, False, 0)
    # vllm #52512: top-k was skipped and its result was read. Both are skipped together, never apart.
    assert plan.indexer == IndexerPlan(mode=IndexerMode.STORE_ONLY)
    assert plan.reasons["attention"] == "the longest context of 2048 tokens is within mha_max_kv 2048"


@pytest.mark.parametrize(
    ("model", "shape", "dequantize"),
    [
        (V32_FP8, extend(100, 100), False),
        (V32_FP8, extend(100, 900), True),
        (V32_FP8, batch(Phase.EXTEND, [100, 50], [100, 51]), True),
        (V32, extend(100, 900), False),
    ],
    ids=["fp8", "fp8 prefix", "fp8 one prefix", "bf16 prefix"],
)
def test_dense_attention_dequantises_a_prefix(model: ModelShape, shape: BatchShape, dequantize: bool) -> None:
    plan = choose(model, shape)
    assert (plan.attention, plan.dequantize_kv) == (Attention.MHA_ONE_SHOT, dequantize)


@pytest.mark.parametrize(
    ("shape", "settings", "fact"),
    [
        (extend(2049), {}, "the longest context of 2049 tokens exceeds mha_max_kv 2048"),
        (extend(1, 2049), {}, "the longest context of 2049 tokens exceeds mha_max_kv 2048"),
        (extend(600), {"mha_max_kv": 512}, "the longest context of 600 tokens exceeds mha_max_kv 512"),
        (extend(5), {"mha_max_kv": 0}, "mha_max_kv is 0"),
        # sglang #12816: a captured graph replays the decision made at capture.
        (extend(5, cuda_graph=True), {}, "a captured graph cannot branch on lengths"),
        (extend(5, context_parallel=True), {}, "split over a context-parallel group"),
        (
            batch(Phase.EXTEND, [900, 900], attention_workspace_tokens=1799),
            {},
            "1800 context tokens exceed the attention workspace of 1799",
        ),
    ],
    ids=["long", "long prefix", "lower limit", "never", "graph", "context parallel", "workspace"],
)
def test_what_keeps_a_prefill_from_dense_attention(shape: BatchShape, settings: dict[str, Any], fact: str) -> None:
    plan = choose(V32, shape, **settings)
    assert plan.attention is Attention.SPARSE_PREFILL
    assert plan.indexer.mode is IndexerMode.TOPK
    assert plan.reasons["attention"].startswith("not dense: ")
    assert fact in plan.reasons["attention"]


def test_a_workspace_that_just_fits_is_dense() -> None:
    shape = batch(Phase.EXTEND, [900, 900], attention_workspace_tokens=1800)
    assert choose(V32, shape).attention is Attention.MHA_ONE_SHOT


@pytest.mark.parametrize("phase", AFTER_PREFILL)
@pytest.mark.parametrize("device", [H200, B200, CPU], ids=["H200", "B200", "CPU"])
def test_only_a_prefill_is_ever_dense(phase: Phase, device: DeviceProfile) -> None:
    # sglang #12816: with speculative decoding the phase guard was missing and an unfilled selection was read.
    plan = choose(V32_FP8, decode(4, 100, phase), device)
    assert plan.attention is not Attention.MHA_ONE_SHOT
    assert plan.indexer.mode is IndexerMode.TOPK
    assert f"{phase} always selects" in plan.reasons["attention"]


def test_dense_attention_without_its_library_is_sparse_and_says_so() -> None:
    plan = choose(V32, extend(100), synthetic(90, libraries=("flash_mla", "deep_gemm")))
    assert route(plan) == ("sparse_prefill", "flash_mla", False, 64)
    assert "no dense kernel (fa3 mha_one_shot: not installed; trtllm" in plan.reasons["attention"]


def test_dense_attention_needs_head_dims_that_its_kernel_has() -> None:
    plan = choose(replace(V32, v_head_dim=96), extend(100))
    assert plan.attention is Attention.SPARSE_PREFILL
    assert (
        "supports heads of (192, 128), (128, 128) or (256, 256) elements; the model's have (192, 96)"
        in (plan.reasons["attention"])
    )


def test_dense_beyond_index_topk_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"mha_max_kv is 2049; allowed: -1, or 0 to the model's index_topk 2048"):
        decide(V32, decode(1, 5), H200, Settings(mha_max_kv=2049))
    assert choose(V32, extend(2048), mha_max_kv=2048).attention is Attention.MHA_ONE_SHOT


# ---------------------------------------------------------------------------------------------------
# Sparse attention: the provider. sglang #13544 (one decision), #16758 and #17662 (TRT-LLM), #13646 (padding)

PREFILLS: list[tuple[str, ModelShape, DeviceProfile, tuple[str, str, bool, int]]] = [
    ("SM90 bf16", V32, H200, ("sparse_prefill", "flash_mla", False, 64)),
    ("SM90 bf16 64 heads", replace(V32, attn_tp_size=2), H200, ("sparse_prefill", "flash_mla", False, 0)),
    ("SM90 bf16 all heads", replace(V32, attn_tp_size=1), H200, ("sparse_prefill", "flash_mla", False, 0)),
    ("SM90 fp8", V32_FP8, H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM100 bf16, few heads", V32, B200, ("sparse_prefill", "trtllm", False, 0)),
    ("SM100 bf16, 32 heads", replace(V32, attn_tp_size=4), B200, ("sparse_prefill", "flash_mla", False, 128)),
    ("SM100 fp8, short context", V32_FP8, B200, ("sparse_prefill", "flash_mla", True, 128)),
    ("CPU bf16", V32, CPU, ("sparse_prefill", "reference", False, 0)),
    ("CPU fp8", V32_FP8, CPU, ("sparse_prefill", "reference", False, 0)),
    # With the plugin's own kernels: without times they follow the upstream ones; there is a kernel on every GPU.
    ("SM90 fp8 own, 8 heads", replace(V32_FP8, num_heads=64), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 16 heads", V32_FP8, FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 17 heads", replace(V32_FP8, num_heads=136), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, all heads", replace(V32_FP8, attn_tp_size=1), FULL_H200, ("sparse_decode", "flash_mla", False, 0)),
    ("SM90 fp8 own, 256 heads", replace(V32_FP8, num_heads=2048), FULL_H200, ("sparse_prefill", "cuda", False, 0)),
    ("SM90 bf16 own", V32, FULL_H200, ("sparse_prefill", "flash_mla", False, 64)),
    (
        "SM90 fp8 own alone",
        replace(V32_FP8, attn_tp_size=1),
        synthetic(90, libraries=("cuda", "triton")),
        ("sparse_prefill", "cuda", False, 0),
    ),
    ("SM90 bf16 triton alone", V32, synthetic(90, libraries=("triton",)), ("sparse_prefill", "triton", False, 0)),
    ("SM100 fp8 own", V32_FP8, FULL_B200, ("sparse_prefill", "flash_mla", True, 128)),
    ("SM80 fp8 own", V32_FP8, synthetic(80), ("sparse_prefill", "cuda", False, 0)),
    ("SM120 fp8", V32_FP8, synthetic(120), ("sparse_prefill", "flashinfer_sm120", False, 0)),
    (
        "SM120 fp8, 12 heads",
        replace(V32_FP8, num_heads=96),
        synthetic(120),
        ("sparse_prefill", "flashinfer_sm120", False, 16),
    ),
    ("SM120 fp8 own", V32_FP8, synthetic(120, libraries=("cuda", "triton")), ("sparse_prefill", "cuda", False, 0)),
    ("SM120 fp8, old FlashInfer", V32_FP8, OLD_SM120, ("sparse_prefill", "cuda", False, 0)),
    (
        "SM120 fp8, 1000 selected",
        replace(V32_FP8, index_topk=1000),
        synthetic(120),
        ("sparse_prefill", "cuda", False, 0),
    ),
    ("SM120 bf16 own, 8 heads", replace(V32, attn_tp_size=16), synthetic(120), ("sparse_prefill", "cuda", False, 0)),
    ("SM86 bf16 own, 16 heads", V32, synthetic(86), ("sparse_prefill", "cuda", False, 0)),
    ("SM90 bf16 own", V32, synthetic(90, libraries=("cuda", "triton")), ("sparse_prefill", "cuda", False, 0)),
    ("SM90 V4 own, 8 heads", replace(V4, attn_tp_size=8), FULL_H200, ("sparse_prefill", "flash_mla", True, 64)),
    ("SM90 V4 own, all heads", V4, FULL_H200, ("sparse_prefill", "flash_mla", True, 0)),
    ("SM90 V4 own alone", V4, synthetic(90, libraries=("cuda", "triton")), ("sparse_prefill", "cuda", False, 0)),
]


@pytest.mark.parametrize(("model", "device", "expected"), [row[1:] for row in PREFILLS], ids=[r[0] for r in PREFILLS])
def test_sparse_prefill(model: ModelShape, device: DeviceProfile, expected: tuple[str, str, bool, int]) -> None:
    assert route(choose(model, LONG, device)) == expected


DECODES: list[tuple[str, ModelShape, DeviceProfile, tuple[str, str, bool, int]]] = [
    ("SM90 bf16", V32, H200, ("sparse_decode", "fa3", False, 0)),
    (
        "SM90 bf16 without FA3",
        V32,
        synthetic(90, libraries=("flash_mla", "deep_gemm")),
        ("sparse_prefill", "flash_mla", False, 64),
    ),
    ("SM90 fp8", V32_FP8, H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 96 heads", replace(V32_FP8, num_heads=768), H200, ("sparse_decode", "flash_mla", False, 128)),
    ("SM100 bf16", V32, B200, ("sparse_decode", "trtllm", False, 0)),
    ("SM100 fp8", V32_FP8, B200, ("sparse_decode", "flash_mla", False, 64)),
    ("CPU", V32, CPU, ("sparse_decode", "reference", False, 0)),
    ("SM90 fp8 own, 8 heads", replace(V32_FP8, num_heads=64), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 16 heads", V32_FP8, FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 32 heads", replace(V32_FP8, attn_tp_size=4), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 129 heads", replace(V32_FP8, num_heads=1032), FULL_H200, ("sparse_decode", "cuda", False, 0)),
    ("SM90 bf16 own", V32, FULL_H200, ("sparse_decode", "fa3", False, 0)),
    ("SM90 V4 own, 16 heads", replace(V4, attn_tp_size=4), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM100 fp8 own", V32_FP8, FULL_B200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM80 fp8 own", V32_FP8, synthetic(80), ("sparse_decode", "cuda", False, 0)),
    ("SM80 bf16 own", V32, synthetic(80), ("sparse_decode", "cuda", False, 0)),
]


@pytest.mark.parametrize("phase", AFTER_PREFILL)
@pytest.mark.parametrize(("model", "device", "expected"), [row[1:] for row in DECODES], ids=[r[0] for r in DECODES])
def test_sparse_decode(
    phase: Phase, model: ModelShape, device: DeviceProfile, expected: tuple[str, str, bool, int]
) -> None:
    # sglang #17662: target_verify and draft_extend take decode's kernels; no library lacks a phase.
    assert route(choose(model, decode(8, 5000, phase), device)) == expected
    assert route(choose(model, decode(8, 5000, phase, cuda_graph=True), device)) == expected


def test_the_plan_says_why_a_preferred_library_is_not_used() -> None:
    plan = choose(V32_FP8, LONG, B200)
    assert (
        "trtllm sparse_prefill: no sparse_mla_prefill kernel for a v32_fp8 cache on SM100" in plan.reasons["provider"]
    )
    plan = choose(V32, decode(1, 5000), synthetic(90, libraries=("flash_mla", "deep_gemm")))
    assert "refused fa3 sparse_decode: not installed" in plan.reasons["provider"]


@pytest.mark.parametrize(("context", "dequantize"), [(512 * 4096 - 1, True), (512 * 4096, False)])
def test_sm100_dequantises_while_the_context_is_short_for_its_rows(context: int, dequantize: bool) -> None:
    # SGLang's rule on SM100: total context < 512 tokens a query row.
    plan = choose(V32_FP8, extend(4096, context), B200)
    expected = ("sparse_prefill", "flash_mla", True, 128) if dequantize else ("sparse_decode", "flash_mla", False, 64)
    assert route(plan) == expected
    assert (f"{context} context tokens are fewer than 512" in plan.reasons["attention"]) is dequantize


def test_sm100_does_not_branch_on_lengths_in_a_graph() -> None:
    assert route(choose(V32_FP8, extend(64, 4096, cuda_graph=True), B200)) == ("sparse_decode", "flash_mla", False, 64)


def test_the_cuda_kernel_pads_no_heads_and_says_so() -> None:
    plan = choose(V32_FP8, LONG, FULL_H200, prefill_backend="cuda")
    assert plan.reasons["provider"] == "prefill_backend asks for cuda"
    assert plan.reasons["head_padding"] == "cuda supports 16 heads without padding"
    many = choose(replace(V32_FP8, num_heads=2048), LONG, FULL_H200)
    assert "flash_mla sparse_decode: supports 64 or 128 heads; there are 256" in many.reasons["provider"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            replace(V32, index_topk=2000),
            "flash_mla sparse_prefill: supports selections in multiples of 128 tokens; the model's is 2000",
        ),
        (
            replace(V4, kv_layout="bf16", sliding_window=100),
            "flash_mla sparse_prefill: supports selections in multiples of 128 tokens; the model's is 100",
        ),
        (
            replace(V32, kv_lora_rank=64),
            "flash_mla sparse_prefill: supports heads of (576, 512) or (512, 512) elements; the model's have (128, 64)",
        ),
        (replace(V32_FP8, num_heads=2048), "flash_mla sparse_decode: supports 64 or 128 heads; there are 256"),
    ],
    ids=["topk", "window", "dims", "heads"],
)
def test_a_kernel_that_does_not_support_the_model_is_refused(model: ModelShape, reason: str) -> None:
    with pytest.raises(NoProviderError) as error:
        decide(model, LONG, synthetic(90, libraries=("flash_mla", "deep_gemm")), Settings())
    assert reason in str(error.value)


def test_no_library_is_one_error_that_lists_each() -> None:
    with pytest.raises(NoProviderError) as error:
        decide(V32, decode(3, 5000), synthetic(90, libraries=()), Settings())
    message = str(error.value)
    assert message.startswith("no installed kernel library supports decode: 3 requests, 3 query tokens, ")
    for library in ("fa3", "trtllm", "triton", "flash_mla", "reference"):
        assert f"{library} sparse_" in message


# ---------------------------------------------------------------------------------------------------
# Row limits belong to the installed build: sglang #25502


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(11622, ("sparse_decode", "flash_mla", False, 64)), (11623, ("sparse_prefill", "flash_mla", True, 64))],
)
def test_a_prefill_of_too_many_rows_for_the_decode_kernel(rows: int, expected: tuple[str, str, bool, int]) -> None:
    plan = choose(V32_FP8, extend(rows, 70000), OLD_H200)
    assert route(plan) == expected
    assert ("11623 query tokens exceed the 11622" in plan.reasons["attention"]) is (rows == 11623)


def test_a_newer_build_has_no_row_limit() -> None:
    assert route(choose(V32_FP8, extend(32768, 70000))) == ("sparse_decode", "flash_mla", False, 64)


def test_too_many_captured_rows_are_an_error_not_a_crash() -> None:
    with pytest.raises(NoProviderError, match=r"20000 query tokens exceed the 11622.*captured graph cannot read"):
        decide(V32_FP8, decode(20000, 100, cuda_graph=True), OLD_H200, Settings())


# ---------------------------------------------------------------------------------------------------
# Backends requested by the settings


@pytest.mark.parametrize(
    ("model", "shape", "device", "settings", "expected"),
    [
        (V32, decode(8, 5000), H200, {"decode_backend": "flash_mla"}, ("sparse_prefill", "flash_mla", False, 64)),
        (V32, decode(8, 5000), H200, {"decode_backend": "reference"}, ("sparse_decode", "reference", False, 0)),
        (V32, LONG, B200, {"prefill_backend": "flash_mla"}, ("sparse_prefill", "flash_mla", False, 128)),
        (
            replace(V32, attn_tp_size=1),
            LONG,
            B200,
            {"prefill_backend": "trtllm"},
            ("sparse_prefill", "trtllm", False, 0),
        ),
        # The prefill setting does not reach decode, nor the other way round.
        (V32, decode(8, 5000), H200, {"prefill_backend": "flash_mla"}, ("sparse_decode", "fa3", False, 0)),
        (V32, LONG, H200, {"decode_backend": "fa3"}, ("sparse_prefill", "flash_mla", False, 64)),
        (V32_FP8, LONG, FULL_H200, {"prefill_backend": "flash_mla"}, ("sparse_decode", "flash_mla", False, 64)),
        (V32_FP8, LONG, FULL_H200, {"prefill_backend": "triton"}, ("sparse_prefill", "triton", False, 0)),
        (
            replace(V32_FP8, attn_tp_size=1),
            decode(8, 5000),
            FULL_H200,
            {"decode_backend": "cuda"},
            ("sparse_decode", "cuda", False, 0),
        ),
    ],
)
def test_a_requested_library_is_used(
    model: ModelShape,
    shape: BatchShape,
    device: DeviceProfile,
    settings: dict[str, str],
    expected: tuple[str, str, bool, int],
) -> None:
    assert route(choose(model, shape, device, **settings)) == expected


@pytest.mark.parametrize(
    ("model", "shape", "device", "settings", "message"),
    [
        (
            V32,
            decode(8, 5000),
            H200,
            {"decode_backend": "trtllm"},
            r"decode_backend is trtllm, which does not support decode: .*SM100 to SM109; this device is SM90\. "
            r"What works here: fa3, flash_mla, reference",
        ),
        (
            V32_FP8,
            decode(8, 5000),
            H200,
            {"decode_backend": "fa3"},
            r"decode_backend is fa3, .*no sparse_mla_decode kernel for a v32_fp8 cache on SM90 \(it reads bf16\)\. "
            r"What works here: flash_mla, reference",
        ),
        (
            V32,
            LONG,
            CPU,
            {"prefill_backend": "flash_mla"},
            r"prefill_backend is flash_mla, .*needs an NVIDIA GPU.*What works here: reference",
        ),
        (
            V32,
            LONG,
            H200,
            {"prefill_backend": "triton"},
            r"prefill_backend is triton, .*not installed.*What works here: flash_mla, reference",
        ),
        (
            replace(V4, kv_layout="bf16"),
            LONG,
            FULL_H200,
            {"prefill_backend": "cuda"},
            r"prefill_backend is cuda, .*supports heads of \(576, 512\) elements; the model's have \(512, 512\)\. "
            r"What works here: flash_mla, triton, reference",
        ),
        (
            V32,
            decode(2, 5000, Phase.TARGET_VERIFY),
            synthetic(90, libraries=("flash_mla",)),
            {"decode_backend": "fa3"},
            r"decode_backend is fa3, .*not support target_verify: .*not installed\. What works here: flash_mla",
        ),
    ],
)
def test_a_requested_library_that_does_not_support_the_batch_is_an_error(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        decide(model, shape, device, Settings(**settings))


def test_the_reference_runs_on_a_gpu_only_when_asked_for() -> None:
    nothing = synthetic(90, libraries=())
    with pytest.raises(NoProviderError, match="plain torch, chosen on a GPU only if a setting asks for it"):
        decide(V32, LONG, nothing, Settings())
    plan = choose(V32, LONG, nothing, prefill_backend="reference")
    assert (plan.provider, plan.indexer.provider) == ("reference", "reference")
