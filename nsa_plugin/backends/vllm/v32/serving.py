"""What one worker process of vLLM on a GPU works with, from the first layer that is built to the last batch.

The worker knows its configuration before it has chosen its GPU. Once it has, and before it builds a layer, the planner
is made and the kernels run once (`prepare`), so that whatever does not fit is known while vLLM can still serve by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.paths import VLLM, path_of
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.token_shard import free_memory_of
from nsa_plugin.backends.common.warm import warm, warm_selection
from nsa_plugin.backends.vllm.startup.model import GPU_LAYOUTS, check_on_gpu, model_shape, step_tokens
from nsa_plugin.backends.vllm.startup.serving import VllmServing
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.token_shard import open_exchange
from nsa_plugin.decision.dispatch import validate
from nsa_plugin.decision.plan import Attention, IndexerMode, Plan
from nsa_plugin.errors import LeftToStockError, NsaPluginError, SettingsError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.probe import probe
from nsa_plugin.patches.ledger import PatchStatus
from nsa_plugin.settings import FULL

# What vLLM carries inside itself.
VENDORED = {"deep_gemm": "vllm.third_party.deep_gemm"}
# vLLM's backend whose implementation and builders the ledger replaces, and the GPUs on which the plugin takes it where
# the user gave none: from 0.25 on vLLM prefers others there, one by the cache's format. On SM100 it is vLLM's choice.
BACKEND = "FLASHMLA_SPARSE"
BACKEND_SMS = (90,)
# The GPUs that vLLM takes this backend on, by the major part of their SM version (its `supports_compute_capability`).
BACKEND_MAJORS = (9, 10)
SHORT, LONG, CONTEXT, MANY = 1024, 4096, 32768, 64
# Rows of the batches that kernels are looked up for: what is chosen may change with their number.
ROWS = tuple(1 << power for power in range(14))
# vLLM's profiling run holds [tokens, heads, nope + v] for its own dense prefill; a dense part here holds the keys with
# their RoPE and a copy of the latent rows besides, about twice that a token.
WORKSPACE_SHARE = 2


@dataclass(kw_only=True)
class GpuServing(VllmServing):
    """One a worker process.

    Attributes:
        vllm_config: the worker's.
        statuses: what became of each patch, for the start-up report.
        device_profile: what the machine has; asked once the GPU is chosen.
        first: whether this is the rank that speaks for its engine.
        chose: whether the attention backend is the plugin's choice.
        place: the worker's device, once it is about to load its model.
        opened: whether the exchange of heads for tokens was asked for.
    """

    backend: ClassVar[str] = BACKEND
    """vLLM's backend whose layers attend by plans."""

    vllm_config: Any
    statuses: Sequence[PatchStatus] = ()
    device_profile: Callable[[], DeviceProfile] = probe
    first: bool = True
    chose: bool = False
    providers: Providers | None = None
    planner: VllmPlanner | None = None
    warmed: bool = False
    place: torch.device | None = None
    opened: bool = False

    def enter(self, worker: Any) -> None:
        super().enter(worker)
        self.first = worker.rank == 0
        if not self.first and not self.trace.mode.endswith(".jsonl"):
            self.trace.mode = "off"  # the ranks decide alike

    def planning(self) -> VllmPlanner:
        """The planner, made at the first call.

        Raises:
            ShapeError, SettingsError, NoProviderError: the model, the configuration or the machine does not fit.
        """
        if self.planner is None:
            check_on_gpu(self.vllm_config)
            model, device = model_shape(self.vllm_config, GPU_LAYOUTS), self.device_profile()
            check_device(device)
            scheduler, limit = self.vllm_config.scheduler_config, step_tokens(self.vllm_config)
            planner = VllmPlanner(
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
            validate(
                model,
                device,
                settings,
                max_tokens=scheduler.max_num_batched_tokens,
                max_decode_tokens=scheduler.max_num_seqs * limit,
                cuda_graph=True,
                constraints=planner.constraints(prefill=True),
                decode_constraints=planner.constraints(prefill=False),
            )
            attended = AttendedTokens.of(settings)
            self.providers = Providers(model.kv_layout, device.sm, vendored=VENDORED, attended=attended)
            self.planner = planner
        return self.planner

    def loaded(self) -> Providers:
        self.planning()
        assert self.providers is not None
        return self.providers

    def building(self) -> VllmPlanner:
        """The planner for a layer of the model that is being built; with the first, the exchange of heads for tokens.

        Here and not before, so that vLLM, which measures what building the model takes, counts the buffers. Where ranks
        exchange, the kernels run with all heads, too.

        Raises:
            SettingsError, PatchError, MismatchError, NoProviderError: see `open_exchange` and `warm`.
        """
        planner = self.planning()
        if not self.opened and self.place is not None:
            settings = self.resolved.settings
            found = open_exchange(self.vllm_config, planner.model, planner.device, settings, self.place)
            planner.set_exchange(*found)
            if planner.exchange is not None:
                all_heads = replace(planner.model, attn_tp_size=1)
                warm(own_kernels(planner, sharded=True), self.loaded(), all_heads, self.place)
            self.opened = True
        return planner

    def prepare(self, device: torch.device) -> None:
        """The worker has chosen its GPU and is about to load its model.

        Raises:
            ShapeError, SettingsError, NoProviderError: see `planning` and `warm`; nothing is changed then.
        """
        planner = self.planning()
        self.place = device
        self.warm(device)
        attention = self.vllm_config.attention_config
        if attention.backend is None and planner.device.sm in BACKEND_SMS:
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            attention.backend = AttentionBackendEnum[BACKEND]
            self.chose = True

    def warm(self, device: torch.device) -> None:
        """Run every kernel of the plugin's that batches may take with a rank's own heads, once in the process.

        Raises:
            NoProviderError: one does not run here; says which and why.
        """
        if not self.warmed:
            self.run_kernels(device)
            warm_selection(self.loaded(), self.planning().model, device)
            self.warmed = True

    def run_kernels(self, device: torch.device) -> None:
        """Run the attention kernels of the plugin's that batches may take with a rank's own heads; see `warm`."""
        planner = self.planning()
        warm(own_kernels(planner), self.loaded(), planner.model, device)

    def check_layers(self) -> None:
        """vLLM has built its model. If none of it attends by plans, stock vLLM serves it.

        Raises:
            LeftToStockError: no layer attends by plans, and the user asked for no other backend; with `strict` "full",
                some layer does not.
        """
        planned, others = self.layers()
        asked_for = not self.chose and self.vllm_config.attention_config.backend is not None
        if self.resolved.settings.strict == FULL and others and (planned or asked_for):
            raise LeftToStockError(f"layers on vLLM's backend {', '.join(sorted(others))} are left to the stock engine")
        if planned or asked_for:
            return
        found = f"vLLM chose {', '.join(sorted(others))}" if others else "it has no sparse layer that nsa-plugin knows"
        raise LeftToStockError(
            f"no layer of the model attends by vLLM's {self.backend}, which nsa-plugin plans for: {found}, on "
            f"{self.planning().device.where}. --attention-backend {self.backend} asks for it"
        )

    def measure(self) -> None:
        """vLLM has loaded the model and allocated its cache, and captures graphs next: plan with what is free now."""
        if self.planner is not None:
            self.planner.forget_steps()
            self.planner.measure(free_memory_of(self.planner.exchange, free_device_memory))

    def settle(self) -> None:
        """vLLM has allocated its cache and captured its graphs: what is free from now on is what batches have.

        Raises:
            SettingsError: token_shard is on, and no layer has asked for the exchange.
        """
        if self.planner is None:
            return
        if self.resolved.settings.token_shard == "on" and self.planner.exchange is None:
            raise SettingsError(
                f"token_shard is on and cannot work here: no layer attends by vLLM's {BACKEND}; allowed here: auto, off"
            )
        self.planner.measure(free_memory_of(self.planner.exchange, free_device_memory))

    def layers(self) -> tuple[int, set[str]]:
        """How many layers of the model attend by plans, and the names of the other sparse ones' backends."""
        planned, others = 0, set()
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            impl = getattr(layer, "impl", None)
            if getattr(impl, "nsa_plugin", None) is not None:
                planned += 1
            elif getattr(layer, "use_sparse", False):
                others.add(layer.attn_backend.get_name())
        return planned, others

    @property
    def active(self) -> bool:
        """Whether any batch takes its route from a plan."""
        return self.layers()[0] > 0

    def notes(self) -> list[str]:
        """What stays vLLM's own although the plugin is on."""
        _, others = self.layers()
        return [
            f"layers on vLLM's backend {name} stay vLLM's own: nsa-plugin plans for --attention-backend {BACKEND}"
            for name in sorted(others)
        ]

    def facts(self) -> dict[str, str]:
        """What a few batches take, and why; for the start-up report."""
        planner = self.planning()
        planned, _ = self.layers()
        model, longest = planner.model, planner.max_model_len
        found = {
            "model": f"DeepSeek-{model.family.upper()}, index_topk {model.index_topk}, {model.heads_per_rank} heads a "
            f"rank of {model.num_heads}, KV cache {model.kv_layout}",
            "device": planner.device.describe(),
            "attention": f"{planned} layers on vLLM's {self.backend}" + (", the plugin's choice" if self.chose else ""),
        }
        if not planned:
            return found
        for rows, context in ((SHORT, SHORT), (LONG, CONTEXT)):
            rows, context = min(rows, longest), min(context, longest)
            found[f"prefill, {rows} of {context} tokens"] = self.in_words(planner.prefill_plan(rows, context))
        for requests in (1, MANY):
            plan = planner.step_plan(requests, requests * planner.step_tokens, planner.step_tokens)
            found[f"{plan.phase}, {requests} request{'s' if requests > 1 else ''}"] = self.in_words(plan)
        return found

    def in_words(self, plan: Plan) -> str:
        """A plan and the reason for it, in a line."""
        if plan.attention is Attention.MHA_ONE_SHOT:
            return f"{plan.attention} by {plan.provider}; {plan.reasons['attention']}"
        own = path_of(VLLM, self.planning().model.kv_layout, plan).own
        text = f"{plan.attention} by {plan.provider}" + (" after dequantisation" if plan.dequantize_kv else "")
        text += ("" if own else ", vLLM's own call") + f"; {plan.reasons['provider']}"
        if plan.indexer.mode is IndexerMode.TOPK:
            text += f"; logits of {plan.indexer.rows_per_chunk} rows at once"
        return text + f"; {'resharded' if plan.token_shard else 'heads stay local'}: {plan.reasons['token_shard']}"


def check_device(device: DeviceProfile, backend: str = BACKEND) -> None:
    """Check that vLLM has layers of `backend` on a device; only those attend by plans.

    The plugin's own kernels may well run there, so no look-up of a kernel would fail.

    Raises:
        LeftToStockError: it has none, or its indexer's cache has a format that the plugin does not read.
    """
    if device.kind != "cuda":
        raise LeftToStockError(f"vLLM serves on a GPU, and torch sees no NVIDIA GPU here: {device.name}")
    if device.sm // 10 not in BACKEND_MAJORS:
        raise LeftToStockError(
            f"nsa-plugin plans for vLLM's {backend}, which needs an SM90 or SM100 GPU (H100, H200, B200); this one, "
            f"{device.name}, is {device.where}"
        )
    if device.sm // 10 == 10 and _packs_indexer_scales():
        raise LeftToStockError(
            f"this vLLM packs the scales of the indexer's cache as UE8M0 on {device.where}; nsa-plugin reads float32"
        )


def _packs_indexer_scales() -> bool:
    """Whether vLLM (0.33 on) writes UE8M0 scales into the indexer's cache on SM100."""
    from vllm.utils import deep_gemm

    return hasattr(deep_gemm, "mqa_logits_use_mx_scales")


def dense_workspace_tokens(vllm_config: Any) -> int:
    """Context tokens that one dense part may hold; within what vLLM's profiling run sets aside for its own."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    tokens = int(MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config))
    return max(tokens // WORKSPACE_SHARE, int(vllm_config.model_config.hf_text_config.index_topk))


def free_device_memory() -> int:
    """Free bytes of the current device, those that PyTorch holds and does not use included."""
    return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def own_kernels(planner: VllmPlanner, *, sharded: bool = False) -> set[tuple[str, str]]:
    """(op, provider) of every sparse kernel of the plugin's that batches of some size take.

    Args:
        sharded: of the batches whose ranks trade heads for tokens, which have all heads; else of the others.
    """
    plans: list[Plan] = []
    for rows in ROWS:
        with suppress(NsaPluginError):  # a size that nothing carries, and that need never come
            plans.append(planner.step_plan(rows, rows, 1))
            if rows <= planner.max_model_len:
                plans.append(planner.prefill_plan(rows, rows))
                plans.append(planner.prefill_plan(rows, planner.max_model_len))
    layout = planner.model.kv_layout
    return {
        (KERNEL_OPS[plan.attention], plan.provider)
        for plan in plans
        if plan.attention in KERNEL_OPS and plan.token_shard == sharded and path_of(VLLM, layout, plan).own
    }
