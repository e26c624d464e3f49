"""Models, devices and batches for the tests of the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsa_plugin.decision.constraints import UNCONSTRAINED, Constraints
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import DeviceProfile, synthetic
from nsa_plugin.settings import Settings

V32 = ModelShape(attn_tp_size=8)  # 16 heads a rank
V32_FP8 = replace(V32, kv_layout="v32_fp8")
V4 = ModelShape(family="v4", num_heads=64, index_topk=512, kv_layout="v4_fp8", sliding_window=128, index_n_heads=64)
# Libraries that the engines install, and the plugin's.
STOCK = ("flash_mla", "deep_gemm", "fa3", "trtllm")
H200 = synthetic(90, libraries=STOCK)
B200 = synthetic(100, libraries=STOCK)
CPU = synthetic(0)
FULL_H200 = synthetic(90)
FULL_B200 = synthetic(100)
OLD_FLASH_MLA = {"flash_mla": ("sglang-kernel", "0.4.5")}
OLD_DEEP_GEMM = {"deep_gemm": ("sgl-deep-gemm", "0.1.3")}
VLLM_DEEP_GEMM = {"deep_gemm": ("vllm", "0.33.0")}
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
    "token_shard_chunks",
    "stock_attention",
    "stock_selection",
    "indexer",
    "indexer.provider",
    "indexer.rows_per_chunk",
    "indexer.metadata_provider",
}


def batch(phase: Phase, q_lens: list[int], kv_lens: list[int] | None = None, **flags: Any) -> BatchShape:
    return BatchShape.from_lengths(phase, q_lens, q_lens if kv_lens is None else kv_lens, **flags)


def extend(rows: int, context: int | None = None, **flags: Any) -> BatchShape:
    return batch(Phase.EXTEND, [rows], [rows if context is None else context], **flags)


def decode(requests: int, context: int, phase: Phase = Phase.DECODE, **flags: Any) -> BatchShape:
    return batch(phase, [1] * requests, [context] * requests, **flags)


def choose(
    model: ModelShape,
    shape: BatchShape,
    device: DeviceProfile = H200,
    constraints: Constraints = UNCONSTRAINED,
    **settings: Any,
) -> Plan:
    plan = decide(model, shape, device, Settings(**settings), constraints)
    assert set(plan.reasons) == FIELDS
    assert all(plan.reasons.values())
    return plan


def route(plan: Plan) -> tuple[str, str, bool, int]:
    return str(plan.attention), plan.provider, plan.dequantize_kv, plan.head_padding


LONG = extend(4096, 65536)
