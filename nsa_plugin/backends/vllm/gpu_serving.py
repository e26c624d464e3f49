"""What one worker process of vLLM on a GPU works with, from the first layer that is built to the last batch.

The worker knows its configuration before it has chosen its GPU, and its cache's format only once the first attention
layer has been built, so the planner is made then, and the kernels run once when the first metadata builder is made:
before vLLM captures a graph, and after it has loaded the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_plugin.backends.vllm.gpu_providers import VllmProviders
from nsa_plugin.backends.vllm.gpu_routes import Carrier, Planner, carrier_of
from nsa_plugin.backends.warm import warm, warm_selection
from nsa_plugin.devices import DeviceProfile, probe
from nsa_plugin.dispatch import validate
from nsa_plugin.errors import NsaPluginError, SettingsError, ShapeError
from nsa_plugin.patches.ledger import TURN_OFF
from nsa_plugin.plan import Attention, IndexerMode, Plan
from nsa_plugin.settings import ResolvedSettings
from nsa_plugin.shapes import ModelShape
from nsa_plugin.telemetry import Trace

# vLLM's --kv-cache-dtype by the layout that the FlashMLA-sparse backend keeps then: any fp8 becomes fp8_ds_mla.
LAYOUTS = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "fp8_ds_mla": "v32_fp8",
    "fp8": "v32_fp8",
    "fp8_e4m3": "v32_fp8",
}
SHORT, LONG, CONTEXT, MANY = 1024, 4096, 32768, 64
# Rows of the batches that kernels are looked up for: what is chosen may change with their number.
ROWS = tuple(1 << power for power in range(14))
# vLLM's profiling run holds [tokens, heads, nope + v] for its own dense prefill; a dense part here holds the keys with
# their RoPE and a copy of the latent rows besides, about twice that a token.
WORKSPACE_SHARE = 2


@dataclass
class GpuServing:
    """One a worker process.

    Attributes:
        resolved: the settings.
        vllm_config: the worker's.
        request_ids: ids of the running batch's requests.
        count: called with every plan, for metrics.
        device_profile: what the machine has; asked once the GPU is chosen.
    """

    resolved: ResolvedSettings
    vllm_config: Any
    request_ids: Callable[[], Sequence[str]] = tuple
    count: Callable[[Plan], None] | None = None
    device_profile: Callable[[], DeviceProfile] = probe
    trace: Trace = field(default_factory=Trace)
    providers: VllmProviders | None = None
    planner: Planner | None = None
    warmed: bool = False

    def planning(self) -> Planner:
        """The planner, made at the first call.

        Raises:
            ShapeError, SettingsError, NoProviderError: the model, the configuration or the machine does not fit.
        """
        if self.planner is None:
            refuse(self.vllm_config)
            model, device = model_shape(self.vllm_config), self.device_profile()
            scheduler, limit = self.vllm_config.scheduler_config, step_tokens(self.vllm_config)
            planner = Planner(
                model=model,
                device=device,
                settings=self.resolved.settings,
                max_model_len=self.vllm_config.model_config.max_model_len,
                step_tokens=limit,
                workspace_tokens=dense_workspace_tokens(self.vllm_config),
                trace=self.trace,
                count=self.count,
                request_ids=self.request_ids,
            )
            settings = self.resolved.settings
            validate(model, planner.prefill_device, settings, max_tokens=scheduler.max_num_batched_tokens)
            most = scheduler.max_num_seqs * limit
            validate(model, planner.step_device, settings, max_decode_tokens=most, cuda_graph=True)
            self.providers = VllmProviders(model.kv_layout, device.sm)
            self.planner = planner
        return self.planner

    def loaded(self) -> VllmProviders:
        self.planning()
        assert self.providers is not None
        return self.providers

    def warm(self, device: torch.device) -> None:
        """Run every kernel of the plugin's that batches may take, once in the process.

        Raises:
            NoProviderError: one does not run here; says which and why.
        """
        if self.warmed:
            return
        planner, providers = self.planning(), self.loaded()
        warm(own_kernels(planner), providers, planner.model, device)
        warm_selection(providers, planner.model, device)
        self.warmed = True

    def settle(self) -> None:
        """vLLM has allocated its cache and captured its graphs: what is free from now on is what batches have."""
        if self.planner is not None:
            self.planner.free_memory = free_device_memory

    def facts(self) -> dict[str, str]:
        """What a few batches take, and why; for the start-up report."""
        planner = self.planning()
        model, longest = planner.model, planner.max_model_len
        found = {
            "model": f"index_topk {model.index_topk}, {model.heads_per_rank} heads a rank of {model.num_heads}, "
            f"KV cache {model.kv_layout}",
            "device": planner.device.describe(),
        }
        for rows, context in ((SHORT, SHORT), (LONG, CONTEXT)):
            rows, context = min(rows, longest), min(context, longest)
            plan = planner.prefill_plan(rows, context)
            found[f"prefill, {rows} of {context} tokens"] = in_words(plan, model.kv_layout)
        for requests in (1, MANY):
            plan = planner.step_plan(requests, requests * planner.step_tokens, planner.step_tokens)
            found[f"{plan.phase}, {requests} request{'s' if requests > 1 else ''}"] = in_words(plan, model.kv_layout)
        return found


def refuse(vllm_config: Any) -> None:
    """Raise what keeps the plugin from serving a configuration of vLLM on a GPU.

    Raises:
        SettingsError: names the flag.
    """
    architectures: list[str] = getattr(vllm_config.model_config.hf_config, "architectures", None) or []
    if others := [name for name in architectures if "V4" in name]:
        raise SettingsError(f"nsa-plugin serves DeepSeek-V3.2's attention here, not {others[0]}'s. {TURN_OFF}")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"nsa-plugin does not carry {flag} {getattr(parallel, name)}. {TURN_OFF}")
    attention = getattr(vllm_config, "attention_config", None)
    for name, what in (("use_fp4_indexer_cache", "an fp4 indexer cache"), ("hisparse_config", "hisparse")):
        if getattr(attention, name, None):
            raise SettingsError(f"nsa-plugin does not carry {what}. {TURN_OFF}")


def model_shape(vllm_config: Any) -> ModelShape:
    """The model as one rank of the tensor-parallel group sees it.

    Raises:
        ShapeError: the cache's format is none that the plugin reads.
    """
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in LAYOUTS:
        raise ShapeError(
            f"--kv-cache-dtype is {cache_dtype}; nsa-plugin reads {', '.join(sorted(LAYOUTS))} here. {TURN_OFF}"
        )
    return ModelShape.from_config(
        vllm_config.model_config.hf_text_config,
        attn_tp_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_layout=LAYOUTS[cache_dtype],
    )


def step_tokens(vllm_config: Any) -> int:
    """Most rows of a request in a decode or verify step: 1 and the speculated ones."""
    speculative = vllm_config.speculative_config
    return 1 + (int(speculative.num_speculative_tokens or 0) if speculative is not None else 0)


def dense_workspace_tokens(vllm_config: Any) -> int:
    """Context tokens that one dense part may hold; within what vLLM's profiling run sets aside for its own."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    tokens = int(MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config))
    return max(tokens // WORKSPACE_SHARE, int(vllm_config.model_config.hf_text_config.index_topk))


def free_device_memory() -> int:
    """Free bytes of the current device, those that PyTorch holds and does not use included."""
    return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def own_kernels(planner: Planner) -> set[tuple[str, str]]:
    """(op, provider) of every sparse kernel of the plugin's that batches of some size take."""
    plans: list[Plan] = []
    for rows in ROWS:
        with suppress(NsaPluginError):  # a size that nothing carries, and that need never come
            plans.append(planner.step_plan(rows, rows, 1))
            if rows <= planner.max_model_len:
                plans.append(planner.prefill_plan(rows, rows))
                plans.append(planner.prefill_plan(rows, planner.max_model_len))
    layout = planner.model.kv_layout
    ops = {Attention.SPARSE_PREFILL: "sparse_mla_prefill", Attention.SPARSE_DECODE: "sparse_mla_decode"}
    return {
        (ops[plan.attention], plan.provider)
        for plan in plans
        if plan.attention in ops and carrier_of(plan, layout) is Carrier.PROVIDER
    }


def in_words(plan: Plan, layout: str) -> str:
    """A plan and the reason for it, in a line."""
    if plan.attention is Attention.MHA_ONE_SHOT:
        return f"{plan.attention} by {plan.provider}; {plan.reasons['attention']}"
    own = carrier_of(plan, layout) is Carrier.PROVIDER
    text = f"{plan.attention} by {plan.provider}" + (" after dequantisation" if plan.dequantize_kv else "")
    text += ("" if own else ", vLLM's own call") + f"; {plan.reasons['provider']}"
    if plan.indexer.mode is IndexerMode.TOPK:
        text += f"; logits of {plan.indexer.rows_per_chunk} rows at once"
    return text
