"""Which attention backend vLLM's layers get, and whether the plugin plans for it on a device."""

from __future__ import annotations

from typing import Any

from nsa_plugin.backends.vllm.startup.model import BACKEND_MAJORS, draft_is_sparse, is_portable
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision import timings
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.routes import Route
from nsa_plugin.errors import LeftToStockError
from nsa_plugin.libraries.architectures import is_sm120
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile

# vLLM's backend whose implementation and builders the ledger replaces, and the GPUs on which the plugin selects it if
# the user chose none: from 0.25 on vLLM prefers other backends there. On SM100 the plugin leaves the choice to vLLM.
BACKEND = "FLASHMLA_SPARSE"
BACKEND_SMS = (90,)
# vLLM's sparse backend for SM120 (0.33 on), and the selections that it supports.
SM120_BACKEND, SM120_TOPK = "FLASHINFER_MLA_SPARSE_SM120", 2048
# vLLM's first choice on SM90 over a bf16 cache (0.25 on). It pads no heads, as FLASHMLA_SPARSE does.
BF16_BACKEND = "FLASH_ATTN_MLA_SPARSE"
BF16_ROUTE = str(Route(Attention.SPARSE_DECODE, "fa3"))
"""The route that it is for the times of a prefill: every query token is a sequence."""
LONG_CONTEXT = 65536
STANDALONE = "draft_model"
"""vLLM's speculative method with a model of its own."""
KIND = "mla_attention"
"""The kind of V3.2's layers in vLLM's `attention_config.backend_per_kind`, whose entry goes before `backend`."""
BY_KIND = f"attention_config.backend_per_kind[{KIND!r}]"


def given_by_kind(vllm_config: Any) -> bool:
    """Whether the user chose the backend of V3.2's layers in `attention_config.backend_per_kind`."""
    return KIND in (getattr(vllm_config.attention_config, "backend_per_kind", None) or {})


def is_given(vllm_config: Any) -> bool:
    """Whether the user chose the backend of V3.2's layers, before the plugin chooses."""
    return vllm_config.attention_config.backend is not None or given_by_kind(vllm_config)


def kept_for_draft(vllm_config: Any, sm: int) -> str:
    """Return why the choice is left to vLLM for a draft model without sparse attention; "" if it is not.

    vLLM's second model runner builds the draft's layers, too, with the backend that is set for the target, unless
    `attention_backend` of --speculative-config is set; the method draft_model does not read that (0.33). Without one
    vLLM picks each. For V3.2's layers it then picks FLASHMLA_SPARSE on SM90 over an fp8 cache and, with the ledger's
    entries of the portable path, on SM80, SM86 and SM89. On SM120 it never does, and may have no backend for V3.2's
    layers, so leaving the choice would not help.
    """
    if draft_is_sparse(vllm_config) is not False or is_sm120(sm):
        return ""
    speculative = vllm_config.speculative_config
    reason = "the draft model, which has no sparse attention, would get the same backend, so vLLM's choice is kept"
    if getattr(speculative, "method", None) == STANDALONE:
        return f" ({reason})"
    if getattr(speculative, "attention_backend", None) is not None:
        return ""
    return f" ({reason}; with attention_backend of --speculative-config set, nsa-plugin chooses {BACKEND})"


def kept_choice(planner: VllmPlanner) -> str:
    """Return why vLLM's `BF16_BACKEND` is kept: no measurement shows that the plugin's prefills are as fast; "" if not.

    A backend that the settings name, the portable path and an fp8 cache, which that backend does not read, need none.
    """
    model, device, settings = planner.model, planner.device, planner.settings
    if planner.portable or model.kv_layout != "bf16" or {settings.prefill_backend, settings.decode_backend} != {"auto"}:
        return ""
    heads, op = model.attended_heads, Op.SPARSE_MLA_PREFILL
    which = f"{device.where} for {heads} heads and a bf16 cache"
    name = timings.filed(model.kv_layout, (model.index_topk, model.sliding_window))
    if not timings.measured(device.sm, op, name, heads):
        return f" (no times on {which}, so vLLM's choice is kept)"
    if kept := timings.points(device.sm, op, name, heads, BF16_ROUTE):
        rows, time = kept[-1]
        plan = planner.prefill_plan(rows, max(rows, LONG_CONTEXT))
        route = str(Route(plan.attention, plan.provider, plan.dequantize_kv))
        own = timings.points(device.sm, op, name, heads, route)
        if not own or timings.time_at(own, rows) > time:
            return f" (it is the faster one by the times on {which}, so vLLM's choice is kept)"
    return ""


def check_device(device: DeviceProfile, backend: str = BACKEND) -> None:
    """Check that the plugin plans for the layers of vLLM's `backend` on a device.

    Raises:
        LeftToStockError: it does not, or does not support the format of the indexer's cache there.
    """
    if device.kind != "cuda":
        raise LeftToStockError(f"vLLM serves on a GPU, but torch sees no NVIDIA GPU: {device.name}")
    if is_portable(device.sm):
        return
    if device.sm // 10 not in BACKEND_MAJORS:
        raise LeftToStockError(
            f"nsa-plugin plans for vLLM's {backend}, which needs an SM80 or later GPU; this one, {device.name}, is "
            f"{device.where}"
        )
    if device.sm // 10 == 10 and _packs_indexer_scales():
        raise LeftToStockError(
            f"this vLLM packs the scales of the indexer's cache as UE8M0 on {device.where}; nsa-plugin reads float32"
        )


def _packs_indexer_scales() -> bool:
    """Whether vLLM (0.33 on) writes UE8M0 scales into the indexer's cache on SM100."""
    from vllm.utils import deep_gemm

    return hasattr(deep_gemm, "mqa_logits_use_mx_scales")
