"""The decision, rule by rule: the upstream pull requests it follows, and the upstream failures it must not repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin import measured
from nsa_plugin.capabilities import Capability, Op
from nsa_plugin.devices import GIB, MIB, DeviceProfile, synthetic
from nsa_plugin.dispatch import Part, decide, partition, validate
from nsa_plugin.errors import NoProviderError, SettingsError, ShapeError
from nsa_plugin.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import BatchShape, ModelShape, Phase

V32 = ModelShape(attn_tp_size=8)  # 16 heads a rank
V32_FP8 = replace(V32, kv_layout="v32_fp8")
V4 = ModelShape(family="v4", num_heads=64, index_topk=512, kv_layout="v4_fp8", sliding_window=128, index_n_heads=64)
# What the engines bring, and what the plugin brings besides.
STOCK = ("flash_mla", "deep_gemm", "fa3", "trtllm")
H200 = synthetic(90, libraries=STOCK)
B200 = synthetic(100, libraries=STOCK)
CPU = synthetic(0)
FULL_H200 = synthetic(90)
FULL_B200 = synthetic(100)
OLD_FLASH_MLA = {"flash_mla": ("sglang-kernel", "0.4.5")}
OLD_DEEP_GEMM = {"deep_gemm": ("sgl-deep-gemm", "0.1.3")}
OLD_H200 = synthetic(90, libraries=STOCK, versions=OLD_FLASH_MLA)
TOKEN_SHARD = {"triton": (Capability(op=Op.TOKEN_SHARD, layouts=(), sm_min=90, sm_max=109),)}
SHARDING_H200 = synthetic(90, libraries=(*STOCK, "triton"), kernels=TOKEN_SHARD)
SPECULATIVE = (Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND)
AFTER_PREFILL = (Phase.DECODE, *SPECULATIVE)

FIELDS = {
    "phase",
    "attention",
    "provider",
    "dequantize_kv",
    "head_padding",
    "token_shard",
    "indexer",
    "indexer.provider",
    "indexer.rows_per_chunk",
    "indexer.metadata_provider",
}


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules without measurements, whatever records this checkout has; a test that wants some sets its own."""
    monkeypatch.setattr(measured, "MEASUREMENTS", {})


def batch(phase: Phase, q_lens: list[int], kv_lens: list[int] | None = None, **flags: Any) -> BatchShape:
    return BatchShape.from_lengths(phase, q_lens, q_lens if kv_lens is None else kv_lens, **flags)


def extend(rows: int, context: int | None = None, **flags: Any) -> BatchShape:
    return batch(Phase.EXTEND, [rows], [rows if context is None else context], **flags)


def decode(requests: int, context: int, phase: Phase = Phase.DECODE, **flags: Any) -> BatchShape:
    return batch(phase, [1] * requests, [context] * requests, **flags)


def choose(model: ModelShape, shape: BatchShape, device: DeviceProfile = H200, **settings: Any) -> Plan:
    plan = decide(model, shape, device, Settings(**settings))
    assert set(plan.reasons) == FIELDS
    assert all(plan.reasons.values())
    return plan


def route(plan: Plan) -> tuple[str, str, bool, int]:
    return str(plan.attention), plan.provider, plan.dequantize_kv, plan.head_padding


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
        # sglang #12816: a captured graph replays whatever was decided at capture.
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
        "takes heads of (192, 128) or (128, 128) or (256, 256) elements; the model's have (192, 96)"
        in (plan.reasons["attention"])
    )


def test_dense_beyond_index_topk_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"mha_max_kv is 2049; allowed: -1, or 0 to the model's index_topk 2048"):
        decide(V32, decode(1, 5), H200, Settings(mha_max_kv=2049))
    assert choose(V32, extend(2048), mha_max_kv=2048).attention is Attention.MHA_ONE_SHOT


# ---------------------------------------------------------------------------------------------------
# Sparse attention: who carries it. sglang #13544 (one decision), #16758 and #17662 (TRT-LLM), #13646 (padding)

LONG = extend(4096, 65536)
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
    # With the plugin's own kernels: few heads are not padded, and there is a kernel on every GPU.
    ("SM90 fp8 own, 8 heads", replace(V32_FP8, num_heads=64), FULL_H200, ("sparse_prefill", "cuda", False, 0)),
    ("SM90 fp8 own, 12 heads", replace(V32_FP8, num_heads=96), FULL_H200, ("sparse_prefill", "cuda", False, 0)),
    ("SM90 fp8 own, 16 heads", V32_FP8, FULL_H200, ("sparse_prefill", "cuda", False, 0)),
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
    ("SM80 fp8 own", V32_FP8, synthetic(80), ("sparse_prefill", "triton", False, 0)),
    ("SM120 bf16 own", V32, synthetic(120), ("sparse_prefill", "triton", False, 0)),
    ("SM90 V4 own, 8 heads", replace(V4, attn_tp_size=8), FULL_H200, ("sparse_prefill", "cuda", False, 0)),
    ("SM90 V4 own, all heads", V4, FULL_H200, ("sparse_decode", "flash_mla", False, 0)),
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
    ("SM90 fp8 own, 8 heads", replace(V32_FP8, num_heads=64), FULL_H200, ("sparse_decode", "cuda", False, 0)),
    ("SM90 fp8 own, 16 heads", V32_FP8, FULL_H200, ("sparse_decode", "cuda", False, 0)),
    ("SM90 fp8 own, 32 heads", replace(V32_FP8, attn_tp_size=4), FULL_H200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM90 fp8 own, 129 heads", replace(V32_FP8, num_heads=1032), FULL_H200, ("sparse_decode", "cuda", False, 0)),
    ("SM90 bf16 own", V32, FULL_H200, ("sparse_decode", "fa3", False, 0)),
    ("SM90 V4 own, 16 heads", replace(V4, attn_tp_size=4), FULL_H200, ("sparse_decode", "cuda", False, 0)),
    ("SM100 fp8 own", V32_FP8, FULL_B200, ("sparse_decode", "flash_mla", False, 64)),
    ("SM80 fp8 own", V32_FP8, synthetic(80), ("sparse_decode", "triton", False, 0)),
]


@pytest.mark.parametrize("phase", AFTER_PREFILL)
@pytest.mark.parametrize(("model", "device", "expected"), [row[1:] for row in DECODES], ids=[r[0] for r in DECODES])
def test_sparse_decode(
    phase: Phase, model: ModelShape, device: DeviceProfile, expected: tuple[str, str, bool, int]
) -> None:
    # sglang #17662: target_verify and draft_extend take decode's kernels; no library lacks a phase.
    assert route(choose(model, decode(8, 5000, phase), device)) == expected
    assert route(choose(model, decode(8, 5000, phase, cuda_graph=True), device)) == expected


def test_the_plan_says_why_a_preferred_library_was_not_taken() -> None:
    plan = choose(V32_FP8, LONG, B200)
    assert (
        "trtllm sparse_prefill: no sparse_mla_prefill kernel for a v32_fp8 cache on SM100" in plan.reasons["provider"]
    )
    plan = choose(V32, decode(1, 5000), synthetic(90, libraries=("flash_mla", "deep_gemm")))
    assert "refused fa3 sparse_decode: not installed" in plan.reasons["provider"]


@pytest.mark.parametrize(
    ("context", "dequantize"),
    [(512 * 4096 - 1, True), (512 * 4096, False)],
)
def test_sm100_dequantises_while_the_context_is_short_for_its_rows(context: int, dequantize: bool) -> None:
    # SGLang's rule on SM100: total context < 512 tokens a query row.
    plan = choose(V32_FP8, extend(4096, context), B200)
    expected = ("sparse_prefill", "flash_mla", True, 128) if dequantize else ("sparse_decode", "flash_mla", False, 64)
    assert route(plan) == expected
    assert (f"{context} context tokens are fewer than 512" in plan.reasons["attention"]) is dequantize


def test_sm100_does_not_branch_on_lengths_in_a_graph() -> None:
    assert route(choose(V32_FP8, extend(64, 4096, cuda_graph=True), B200)) == (
        "sparse_decode",
        "flash_mla",
        False,
        64,
    )


def test_the_plugins_own_kernel_pads_no_heads_and_says_so() -> None:
    plan = choose(V32_FP8, LONG, FULL_H200)
    assert plan.reasons["provider"] == "cuda is the first that carries the batch on SM90"
    assert plan.reasons["head_padding"] == "cuda takes 16 heads as they are"
    many = choose(replace(V32_FP8, num_heads=2048), LONG, FULL_H200)
    assert "flash_mla sparse_decode: takes 64 or 128 heads; there are 256" in many.reasons["provider"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            replace(V32, index_topk=2000),
            "flash_mla sparse_prefill: takes selections in multiples of 128 tokens; the model's is 2000",
        ),
        (
            replace(V4, kv_layout="bf16", sliding_window=100),
            "flash_mla sparse_prefill: takes selections in multiples of 128 tokens; the model's is 100",
        ),
        (
            replace(V32, kv_lora_rank=64),
            "flash_mla sparse_prefill: takes heads of (576, 512) or (512, 512) elements; the model's have (128, 64)",
        ),
        (
            replace(V32_FP8, num_heads=2048),
            "flash_mla sparse_decode: takes 64 or 128 heads; there are 256",
        ),
    ],
    ids=["topk", "window", "dims", "heads"],
)
def test_a_kernel_that_does_not_take_the_model_is_refused(model: ModelShape, reason: str) -> None:
    with pytest.raises(NoProviderError) as error:
        decide(model, LONG, synthetic(90, libraries=("flash_mla", "deep_gemm")), Settings())
    assert reason in str(error.value)


def test_no_library_is_one_error_that_lists_each() -> None:
    with pytest.raises(NoProviderError) as error:
        decide(V32, decode(3, 5000), synthetic(90, libraries=()), Settings())
    message = str(error.value)
    assert message.startswith("no installed kernel library carries decode: 3 requests, 3 query rows, ")
    for library in ("fa3", "trtllm", "triton", "flash_mla", "reference"):
        assert f"{library} sparse_" in message


# ---------------------------------------------------------------------------------------------------
# Row limits belong to the installed build: sglang #25502


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (11622, ("sparse_decode", "flash_mla", False, 64)),
        (11623, ("sparse_prefill", "flash_mla", True, 64)),
    ],
)
def test_a_prefill_of_too_many_rows_for_the_decode_kernel(rows: int, expected: tuple[str, str, bool, int]) -> None:
    plan = choose(V32_FP8, extend(rows, 70000), OLD_H200)
    assert route(plan) == expected
    assert ("11623 query rows exceed the 11622" in plan.reasons["attention"]) is (rows == 11623)


def test_a_newer_build_has_no_row_limit() -> None:
    assert route(choose(V32_FP8, extend(32768, 70000))) == ("sparse_decode", "flash_mla", False, 64)


def test_too_many_captured_rows_are_an_error_not_a_crash() -> None:
    with pytest.raises(NoProviderError, match=r"20000 query rows exceed the 11622.*captured graph cannot read"):
        decide(V32_FP8, decode(20000, 100, cuda_graph=True), OLD_H200, Settings())


# ---------------------------------------------------------------------------------------------------
# DeepSeek-V4: sglang #25502


@pytest.mark.parametrize(
    ("rows", "device", "settings", "expected"),
    [
        (11622, OLD_H200, {}, ("sparse_decode", "flash_mla", False, 0)),
        (11623, OLD_H200, {}, ("sparse_prefill", "flash_mla", True, 0)),
        (32768, H200, {}, ("sparse_decode", "flash_mla", False, 0)),
        (4096, H200, {"large_q_rows": 4096}, ("sparse_decode", "flash_mla", False, 0)),
        (4097, H200, {"large_q_rows": 4096}, ("sparse_prefill", "flash_mla", True, 0)),
        (100, CPU, {}, ("sparse_prefill", "reference", False, 0)),
    ],
    ids=["old limit", "past it", "new build", "setting", "past the setting", "CPU"],
)
def test_v4_prefill(
    rows: int, device: DeviceProfile, settings: dict[str, Any], expected: tuple[str, str, bool, int]
) -> None:
    assert route(choose(V4, extend(rows, 40000), device, **settings)) == expected


def test_v4_is_never_dense() -> None:
    plan = choose(V4, extend(100))
    assert plan.attention is Attention.SPARSE_DECODE
    assert "family v4 attends to a window and to compressed keys" in plan.reasons["attention"]


@pytest.mark.parametrize("phase", AFTER_PREFILL)
def test_v4_decode_ignores_large_q_rows(phase: Phase) -> None:
    plan = choose(V4, decode(64, 5000, phase), large_q_rows=16)
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)


def test_v4_keeps_one_kernel_in_a_graph() -> None:
    plan = choose(V4, extend(4097, 40000, cuda_graph=True), large_q_rows=4096)
    assert route(plan) == ("sparse_decode", "flash_mla", False, 0)


def test_v4_pads_its_heads_too() -> None:
    plan = choose(replace(V4, attn_tp_size=8), extend(12000, 40000), OLD_H200)
    assert route(plan) == ("sparse_prefill", "flash_mla", True, 64)
    on_sm100 = choose(replace(V4, attn_tp_size=8), extend(5000, 40000), B200, large_q_rows=4096)
    assert route(on_sm100) == ("sparse_prefill", "flash_mla", True, 128)


def test_v4_large_q_rows_beyond_the_build_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"large_q_rows is 12000; allowed: 0 to 11622"):
        decide(V4, decode(1, 5), OLD_H200, Settings(large_q_rows=12000))
    assert choose(V4, extend(12000, 40000), large_q_rows=12000).attention is Attention.SPARSE_DECODE


# ---------------------------------------------------------------------------------------------------
# Backends that the settings name


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
def test_a_named_library_is_taken(
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
            r"decode_backend is trtllm and cannot carry decode: .*SM100 to SM109; this device is SM90\. "
            r"What works here: fa3, flash_mla, reference",
        ),
        (
            V32_FP8,
            decode(8, 5000),
            H200,
            {"decode_backend": "fa3"},
            r"decode_backend is fa3 .*no sparse_mla_decode kernel for a v32_fp8 cache on SM90\. "
            r"What works here: flash_mla, reference",
        ),
        (
            V32,
            LONG,
            CPU,
            {"prefill_backend": "flash_mla"},
            r"prefill_backend is flash_mla .*needs an NVIDIA GPU.*What works here: reference",
        ),
        (
            V32,
            LONG,
            H200,
            {"prefill_backend": "triton"},
            r"prefill_backend is triton .*not installed.*What works here: flash_mla, reference",
        ),
        (
            V32,
            LONG,
            FULL_H200,
            {"prefill_backend": "cuda"},
            r"prefill_backend is cuda .*no sparse_mla_prefill kernel for a bf16 cache on SM90\. "
            r"What works here: flash_mla, triton, reference",
        ),
        (
            V32,
            decode(2, 5000, Phase.TARGET_VERIFY),
            synthetic(90, libraries=("flash_mla",)),
            {"decode_backend": "fa3"},
            r"decode_backend is fa3 and cannot carry target_verify: .*not installed\. What works here: flash_mla",
        ),
    ],
)
def test_a_named_library_that_cannot_is_an_error(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        decide(model, shape, device, Settings(**settings))


def test_the_reference_runs_on_a_gpu_only_when_asked_for() -> None:
    nothing = synthetic(90, libraries=())
    with pytest.raises(NoProviderError, match="plain torch, taken on a GPU only where a setting asks for it"):
        decide(V32, LONG, nothing, Settings())
    plan = choose(V32, LONG, nothing, prefill_backend="reference")
    assert (plan.provider, plan.indexer.provider) == ("reference", "reference")


# ---------------------------------------------------------------------------------------------------
# The indexer: sglang #13646, #25502, and the out-of-memory failures of #39095 and #37712


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
        "4000 rows of 262144 B of logits fit 1000.0 MiB (logits_budget_mb), rounded down to a power of two"
    )
    plan = choose(V32, extend(4096, 65536), synthetic(90, memory_free=64 * MIB))
    assert "16.0 MiB (a quarter of the free memory)" in plan.reasons["indexer.rows_per_chunk"]
    plan = choose(V32, extend(4, 2**28), logits_budget_mb=1)
    assert "the logits of one row take 1073741824 B, more than 1.0 MiB" in plan.reasons["indexer.rows_per_chunk"]


def test_decode_logits_are_budgeted_too() -> None:
    # vLLM holds [requests, longest context] in float32 however large it is: here 1024 rows of 640 KiB.
    assert choose(V32, decode(1024, 163840), logits_budget_mb=512).indexer.rows_per_chunk == 512


def test_v4_scores_compressed_keys() -> None:
    assert choose(V4, extend(8192, 262144), OLD_H200).indexer.rows_per_chunk == 2048


@pytest.mark.parametrize(
    ("model", "shape", "device", "expected"),
    [
        (V32, LONG, H200, ("deep_gemm", "")),  # ragged logits are not scheduled
        (V32, decode(8, 5000), H200, ("deep_gemm", "deep_gemm")),
        (V4, extend(12289, 40000), H200, ("deep_gemm", "deep_gemm")),
        (V32, decode(8, 5000), CPU, ("reference", "")),
        # The plugin schedules for DeepGEMM's kernel of SM90, and scores what DeepGEMM does not take.
        (V32, LONG, FULL_H200, ("deep_gemm", "")),
        (V32, decode(8, 5000), FULL_H200, ("deep_gemm", "triton")),
        (V32, decode(100_000, 5000, cuda_graph=True), FULL_H200, ("deep_gemm", "triton")),
        (V4, extend(32768, 40000), synthetic(90, versions=OLD_DEEP_GEMM), ("deep_gemm", "triton")),
        (V32, decode(8, 5000), FULL_B200, ("deep_gemm", "deep_gemm")),
        (replace(V32, index_n_heads=16), LONG, FULL_H200, ("triton", "")),
        (replace(V32, index_n_heads=16), decode(8, 5000), FULL_H200, ("triton", "")),
        (replace(V32, index_n_heads=16), decode(8, 5000), FULL_B200, ("deep_gemm", "deep_gemm")),
        (replace(V32, index_head_dim=96), LONG, FULL_H200, ("triton", "")),
        (V32, LONG, synthetic(90, libraries=("flash_mla", "triton")), ("triton", "")),
        (V32_FP8, LONG, synthetic(80), ("triton", "")),
    ],
)
def test_who_scores_and_who_schedules(
    model: ModelShape, shape: BatchShape, device: DeviceProfile, expected: tuple[str, str]
) -> None:
    indexer = choose(model, shape, device).indexer
    assert (indexer.provider, indexer.metadata_provider) == expected


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (12288, "12288 rows are within what the installed DeepGEMM schedules"),
        (12289, "12289 rows go in pieces: the installed DeepGEMM schedules 12288 at once here"),
    ],
)
def test_what_deep_gemm_cannot_schedule_at_once_goes_in_pieces(rows: int, reason: str) -> None:
    plan = choose(V4, extend(rows, 40000), synthetic(90, libraries=STOCK, versions=OLD_DEEP_GEMM))
    assert plan.indexer.metadata_provider == "deep_gemm"
    assert plan.reasons["indexer.metadata_provider"] == reason


def test_a_fallback_of_the_indexer_says_why() -> None:
    plan = choose(replace(V32, index_n_heads=16), LONG, FULL_H200)
    assert plan.reasons["indexer.provider"] == (
        "triton is the first that scores 16 indexer heads on SM90; better ones refused: "
        "deep_gemm: takes 32 or 64 indexer heads; the model has 16"
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(V32, index_n_heads=16), r"deep_gemm: takes 32 or 64 indexer heads; the model has 16"),
        (replace(V32, index_head_dim=96), r"deep_gemm: takes heads of .* elements; the model's have \(96,\)"),
    ],
)
def test_an_indexer_that_no_kernel_takes_is_an_error(model: ModelShape, message: str) -> None:
    with pytest.raises(NoProviderError, match=message):
        decide(model, LONG, H200, Settings())


def test_without_deep_gemm_a_gpu_cannot_select() -> None:
    with pytest.raises(NoProviderError, match=r"selects tokens for 64 indexer heads .*deep_gemm: not installed"):
        decide(V32, LONG, synthetic(90, libraries=("flash_mla", "fa3")), Settings())
    # A prompt that selects nothing does not need it.
    assert choose(V32, extend(10), synthetic(90, libraries=("fa3",))).provider == "fa3"


# ---------------------------------------------------------------------------------------------------
# Trading heads for tokens


@pytest.mark.parametrize(
    ("model", "shape", "device", "mode", "reason"),
    [
        (V32, LONG, H200, "auto", "no token_shard kernels"),
        (V32, LONG, SHARDING_H200, "off", "token_shard is off"),
        (replace(V32, attn_tp_size=1), LONG, SHARDING_H200, "auto", "attn_tp_size is 1"),
        (V32, extend(4096, 65536, context_parallel=True), SHARDING_H200, "auto", "context-parallel group already"),
        (V32, extend(511, 65536), SHARDING_H200, "auto", "511 query rows are fewer than the 512"),
        (V32, extend(7, 65536), SHARDING_H200, "on", "7 query rows are fewer than the 8"),
        (replace(V32, attn_tp_size=2), LONG, SHARDING_H200, "auto", "takes 64 heads without padding"),
        (V32, LONG, replace(SHARDING_H200, nvlink=False), "auto", "over NVLink"),
        # The plugin's own kernel pads none, so there is nothing to win.
        (V32_FP8, LONG, synthetic(90, kernels=TOKEN_SHARD), "auto", "cuda takes 16 heads without padding"),
    ],
)
def test_heads_are_kept(model: ModelShape, shape: BatchShape, device: DeviceProfile, mode: str, reason: str) -> None:
    plan = choose(model, shape, device, token_shard=mode)
    assert not plan.token_shard
    assert reason in plan.reasons["token_shard"]


def test_heads_are_traded_where_they_would_be_padded() -> None:
    plan = choose(V32, LONG, SHARDING_H200)
    assert plan.token_shard
    assert route(plan) == ("sparse_prefill", "flash_mla", False, 0)
    assert plan.reasons["token_shard"] == (
        "8 ranks take 512 of 4096 query rows each with all 128 heads instead of 16 padded to 64"
    )


def test_sharding_is_forced_where_it_can_work() -> None:
    assert choose(V32, extend(8, 65536), SHARDING_H200, token_shard="on").token_shard
    assert choose(V32_FP8, decode(512, 5000), SHARDING_H200).token_shard
    assert choose(V32, LONG, replace(SHARDING_H200, nvlink=False), token_shard="on").token_shard
    own = choose(V32_FP8, LONG, synthetic(90, kernels=TOKEN_SHARD), token_shard="on")
    assert own.token_shard
    assert route(own) == ("sparse_decode", "flash_mla", False, 0)  # its 128 heads are not few
    assert own.reasons["token_shard"].endswith("with all 128 heads instead of 16")
    assert choose(replace(V32, attn_tp_size=2), LONG, SHARDING_H200, token_shard="on").token_shard  # unpadded
    assert not choose(V32, extend(100), SHARDING_H200, token_shard="on").token_shard  # dense


def test_sharding_brings_rows_under_a_limit() -> None:
    # 80000 rows are too many for the decode kernel on one rank; an eighth of them is not.
    device = synthetic(90, libraries=(*STOCK, "triton"), versions=OLD_FLASH_MLA, kernels=TOKEN_SHARD)
    assert route(choose(V32_FP8, extend(80000), device)) == ("sparse_decode", "flash_mla", False, 0)
    assert route(choose(V32_FP8, extend(80000), OLD_H200)) == ("sparse_prefill", "flash_mla", True, 64)


@pytest.mark.parametrize(
    ("model", "device", "reason"),
    [(V32, H200, "no token_shard kernels"), (replace(V32, attn_tp_size=1), SHARDING_H200, "attn_tp_size is 1")],
)
def test_sharding_forced_where_it_cannot_work_is_an_error(
    model: ModelShape, device: DeviceProfile, reason: str
) -> None:
    with pytest.raises(SettingsError, match=rf"token_shard is on and cannot work here: .*{reason}.*: auto, off"):
        decide(model, LONG, device, Settings(token_shard="on"))


# ---------------------------------------------------------------------------------------------------
# Nothing to do


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape(phase=Phase.IDLE),
        BatchShape(phase=Phase.EXTEND),  # vllm #51486: no rows reached the kernel
        batch(Phase.EXTEND, [0], [500]),
        BatchShape(phase=Phase.DECODE, cuda_graph=True),
    ],
)
@pytest.mark.parametrize("device", [H200, synthetic(90, libraries=())], ids=["H200", "bare H200"])
def test_no_rows_no_kernels(shape: BatchShape, device: DeviceProfile) -> None:
    plan = choose(V32, shape, device)
    assert route(plan) == ("none", "", False, 0)
    assert plan.indexer == IndexerPlan(mode=IndexerMode.NONE)


def test_rows_without_a_context_are_carried() -> None:
    # vllm #51970: a graph is captured with lengths of 0; nothing may divide by them.
    shape = BatchShape(phase=Phase.DECODE, num_requests=8, num_tokens=8, cuda_graph=True)
    assert choose(V32_FP8, shape).indexer.rows_per_chunk == 8


# ---------------------------------------------------------------------------------------------------
# Splitting a prefill


def split(parts: tuple[Part, ...]) -> list[tuple[tuple[int, ...], str]]:
    return [(part.requests, str(part.plan.attention)) for part in parts]


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "flags", "expected"),
    [
        ([100, 4000, 200], [100, 4000, 300], {}, [((0, 2), "mha_one_shot"), ((1,), "sparse_prefill")]),
        ([100, 200], [100, 300], {}, [((0, 1), "mha_one_shot")]),
        ([4000, 5000], [4000, 5000], {}, [((0, 1), "sparse_prefill")]),
        ([1, 1], [2048, 2049], {}, [((0,), "mha_one_shot"), ((1,), "sparse_prefill")]),
        (
            [900, 900, 900, 1500],
            [900, 900, 900, 1500],
            {"attention_workspace_tokens": 1800},
            [((0, 1), "mha_one_shot"), ((2,), "mha_one_shot"), ((3,), "mha_one_shot")],
        ),
        (
            [1900, 900, 1801, 5000],
            [1900, 900, 1801, 5000],
            {"attention_workspace_tokens": 1800},
            [((1,), "mha_one_shot"), ((0, 2, 3), "sparse_prefill")],
        ),
        ([100, 4000], [100, 4000], {"context_parallel": True}, [((0, 1), "sparse_prefill")]),
        ([100, 4000], [100, 4000], {"cuda_graph": True}, [((0, 1), "sparse_prefill")]),
        ([0, 100, 0], [50, 100, 9000], {}, [((1,), "mha_one_shot"), ((0, 2), "none")]),
        ([0, 0], [50, 0], {}, [((0, 1), "none")]),
        ([], [], {}, []),
    ],
    ids=[
        "mixed",
        "short",
        "long",
        "boundary",
        "workspace groups",
        "workspace too small for one",
        "context parallel",
        "graph",
        "rows missing",
        "no rows",
        "no requests",
    ],
)
def test_partition(
    q_lens: list[int], kv_lens: list[int], flags: dict[str, Any], expected: list[tuple[tuple[int, ...], str]]
) -> None:
    parts = partition(V32, q_lens, kv_lens, Phase.EXTEND, H200, Settings(), **flags)
    assert split(parts) == expected
    for part in parts:
        assert part.plan == decide(V32, part.batch, H200, Settings())


@pytest.mark.parametrize("phase", [*AFTER_PREFILL, Phase.IDLE])
def test_only_a_prefill_is_split(phase: Phase) -> None:
    parts = partition(V32, [1, 1, 0], [100, 9000, 5], phase, H200, Settings())
    assert [part.requests for part in parts] == [(0, 1, 2)]
    assert parts[0].plan.attention is not Attention.MHA_ONE_SHOT


def test_without_a_dense_kernel_nothing_is_split() -> None:
    device = synthetic(90, libraries=("flash_mla", "deep_gemm"))
    parts = partition(V32, [100, 4000], [100, 4000], Phase.EXTEND, device, Settings())
    assert split(parts) == [((0, 1), "sparse_prefill")]


def test_partition_refuses_lengths_that_cannot_be() -> None:
    with pytest.raises(ShapeError, match="request 1 has 9 rows and a context of 3"):
        partition(V32, [1, 9], [1, 3], Phase.EXTEND, H200, Settings())


# ---------------------------------------------------------------------------------------------------
# Before serving


@pytest.mark.parametrize("model", [V32, V32_FP8, V4], ids=["v3.2 bf16", "v3.2 fp8", "v4"])
@pytest.mark.parametrize(
    "device",
    [H200, B200, CPU, OLD_H200, FULL_H200, FULL_B200, synthetic(80)],
    ids=["H200", "B200", "CPU", "old H200", "H200 and own", "B200 and own", "A100 and own"],
)
def test_what_is_installed_serves(model: ModelShape, device: DeviceProfile) -> None:
    validate(model, device, Settings(), max_tokens=32768, cuda_graph=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mha_max_kv": 4096}, "mha_max_kv is 4096"),
        ({"decode_backend": "trtllm"}, "decode_backend is trtllm"),
        ({"prefill_backend": "trtllm"}, "prefill_backend is trtllm"),
        ({"token_shard": "on"}, "token_shard is on"),
        (
            {"prefill_backend": "trtllm", "decode_backend": "triton"},
            "prefill_backend is trtllm.* decode_backend is triton",
        ),
    ],
)
def test_settings_that_no_batch_satisfies_are_found_at_start_up(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        validate(V32, H200, Settings(**settings))


def test_an_error_is_told_once() -> None:
    with pytest.raises(SettingsError) as error:
        validate(V32, H200, Settings(mha_max_kv=4096))
    assert str(error.value).count("mha_max_kv is 4096") == 1


def test_missing_libraries_are_found_at_start_up() -> None:
    with pytest.raises(NoProviderError, match=r"carries extend: .*carries decode: "):
        validate(V32, synthetic(90, libraries=("deep_gemm",)), Settings())
    # Rows that only a prefill of this size has.
    old = synthetic(90, libraries=("flash_mla", "deep_gemm"), versions=OLD_FLASH_MLA)
    named = Settings(prefill_backend="flash_mla", decode_backend="flash_mla")
    validate(V32_FP8, old, named, max_tokens=32768)
    validate(V32_FP8, old, named, max_decode_tokens=20000)
    with pytest.raises(NoProviderError, match="20000 query rows exceed the 11622"):
        validate(V32_FP8, old, Settings(), max_decode_tokens=20000, cuda_graph=True)
    with pytest.raises(NoProviderError, match="takes 64 or 128 heads; there are 256"):
        validate(replace(V32_FP8, num_heads=2048), old, Settings())
