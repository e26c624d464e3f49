"""State of the plugin in one vLLM GPU worker, from the first layer to the last batch.

A worker has its configuration before it has its GPU. Once it has the GPU, and before it builds a layer, `prepare` makes
the planner and runs the kernels once. Anything unsupported is thus found while stock vLLM can still serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nsa_plugin.backends.common.fault import AttendedTokens
from nsa_plugin.backends.common.late import watch
from nsa_plugin.backends.common.paths import VLLM, path_of
from nsa_plugin.backends.common.providers import Providers, device_in_use
from nsa_plugin.backends.common.token_shard import free_memory_of
from nsa_plugin.backends.common.trial import tried
from nsa_plugin.backends.common.warm import (
    PAGE_SIZE,
    warm,
    warm_dense,
    warm_reading,
    warm_selection,
    warm_shard,
    warmed_in,
)
from nsa_plugin.backends.vllm.startup.model import (
    GPU_LAYOUTS,
    check_on_gpu,
    drafts_share_selection,
    is_portable,
    model_shape,
    step_tokens,
)
from nsa_plugin.backends.vllm.startup.serving import VllmServing
from nsa_plugin.backends.vllm.v32 import dcp
from nsa_plugin.backends.vllm.v32.choice import (
    BACKEND,
    BACKEND_SMS,
    BF16_BACKEND,
    BY_KIND,
    SM120_BACKEND,
    SM120_TOPK,
    check_device,
    given_by_kind,
    is_given,
    kept_choice,
    kept_for_draft,
)
from nsa_plugin.backends.vllm.v32.portable import warm_indexer, warm_inputs
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.samples import attends_densely, own_kernels, selection_of, warm_without_logits
from nsa_plugin.backends.vllm.v32.token_shard import open_exchange
from nsa_plugin.decision.dispatch import validate
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import LeftToStockError, PatchError, SettingsError
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8, is_sm120
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.libraries.probe import probe
from nsa_plugin.patches.ledger import TURN_OFF, PatchStatus
from nsa_plugin.settings import FULL

# Libraries bundled with vLLM.
DEEP_GEMM = "deep_gemm"
VENDORED = {DEEP_GEMM: "vllm.third_party.deep_gemm"}
PREFILL_LOGITS = "vllm.gpu-prefill-logits"
"""The ledger's entry that `prefill_selection` needs."""
FORCES_MQA = "attention_config.sparse_mla_force_mqa is set"
NO_EXCHANGE = f"token_shard is on and cannot work here: no layer attends by vLLM's {BACKEND}; allowed here: auto, off"
SHORT, LONG, CONTEXT, MANY = 1024, 4096, 32768, 64
# vLLM's profiling run allocates [tokens, heads, nope + v] for its dense prefill. A dense part here also needs the keys
# with RoPE and a copy of the latent cache entries: about twice the bytes per token.
WORKSPACE_SHARE = 2


@dataclass(kw_only=True)
class GpuServing(VllmServing):
    """State of a GPU worker.

    Attributes:
        vllm_config: of the worker.
        statuses: state of each patch, for the start-up report.
        portable: whether the ledger's entries for the portable path are applied.
        device_profile: probes the machine; called once the worker has its GPU.
        first: whether this is the rank that reports for its engine.
        chose: whether the plugin chose the attention backend.
        place: the worker's device, set before it loads the model.
        opened: whether `open_exchange` was called.
        left_choice: why the plugin left the choice of the attention backend to vLLM; "" if it did not.
        hashing: the thread of `hash_triton`; None if there is none.
    """

    backend: ClassVar[str] = BACKEND
    """vLLM's backend whose layers the plugin plans for."""
    planner_class: ClassVar[type[VllmPlanner]] = VllmPlanner

    vllm_config: Any
    statuses: Sequence[PatchStatus] = ()
    portable: bool = False
    device_profile: Callable[[], DeviceProfile] = probe
    first: bool = True
    chose: bool = False
    providers: Providers | None = None
    planner: VllmPlanner | None = None
    warm_seconds: float = 0.0  # 0: not warmed up yet
    place: torch.device | None = None
    opened: bool = False
    left_choice: str = ""
    hashing: threading.Thread | None = None

    def enter(self, worker: Any) -> None:
        super().enter(worker)
        self.first = worker.rank == 0
        if not self.first and not self.trace.mode.endswith(".jsonl"):
            self.trace.mode = "off"  # all ranks make the same plans

    def planning(self) -> VllmPlanner:
        """Return the planner, made at the first call.

        Raises:
            ShapeError, SettingsError, NoProviderError: the model, the configuration or the machine does not fit.
        """
        if self.planner is None:
            check_on_gpu(self.vllm_config)
            model, settings = self.model(), self.resolved.settings
            device = device_in_use(self.device_profile(), settings)
            self.check(device)
            attended = AttendedTokens.of(settings)
            providers = Providers(model.kv_layout, device.sm, vendored=VENDORED, attended=attended)
            if self.portable:
                device = tried(device, model, providers, torch.device("cuda"))
            planner = self.planner_class(
                model=model,
                device=device,
                settings=settings,
                max_model_len=self.vllm_config.model_config.max_model_len,
                step_tokens=step_tokens(self.vllm_config),
                trace=self.trace,
                metrics=self.metrics,
                request_ids=self.request_ids,
                selects_prefills=self.selects_prefills(model),
                **self.dense_limits(),
            )
            self.validate(planner)
            if self.portable and planner.step_plan(1, 1, 1).indexer.provider == DEEP_GEMM:
                providers.indexer = DEEP_GEMM
            self.planner, self.providers = planner, providers
        return self.planner

    def model(self) -> ModelShape:
        """Return the model's shape on this rank."""
        return model_shape(self.vllm_config, GPU_LAYOUTS)

    def selects_prefills(self, model: ModelShape) -> bool:
        """Return whether prefills may be selected for without logits: they are not merged with those of other ranks.

        On the portable path the plugin selects for every batch (`portable.select`).
        """
        replaced = any(status.patch.name == PREFILL_LOGITS for status in self.statuses)
        return replaced and not self.portable and model.dcp_size == 1

    def check(self, device: DeviceProfile) -> None:
        """Check that the plugin plans for the model's layers on a device."""
        check_device(device, self.backend)
        if is_portable(device.sm) and not self.portable:
            raise PatchError(
                f"vLLM did not report {device.where} before it chose the worker's GPU, so vLLM's indexer is not "
                f"replaced. {TURN_OFF}"
            )

    def dense_limits(self) -> dict[str, Any]:
        """Return the planner's arguments that follow from vLLM's configuration of attention."""
        attention = getattr(self.vllm_config, "attention_config", None)
        return {
            "portable": self.portable,
            # vLLM's sparse layers then pass every query token to `forward_mqa` (0.28 on).
            "no_dense": FORCES_MQA if getattr(attention, "sparse_mla_force_mqa", False) else "",
            "scores_dense": drafts_share_selection(self.vllm_config),
            "workspace_tokens": dense_workspace_tokens(self.vllm_config),
            "split_selection_rows": int(getattr(attention, "indexer_tp_shard_min_rows", 0)),
        }

    def validate(self, planner: VllmPlanner) -> None:
        """Plan the smallest and largest batches, so that errors come before serving."""
        scheduler = self.vllm_config.scheduler_config
        validate(
            planner.model,
            planner.device,
            planner.settings,
            max_tokens=scheduler.max_num_batched_tokens,
            max_decode_tokens=scheduler.max_num_seqs * planner.step_tokens,
            cuda_graph=True,
            constraints=planner.constraints(prefill=True),
            decode_constraints=planner.constraints(prefill=False),
        )

    def loaded(self) -> Providers:
        self.planning()
        assert self.providers is not None
        return self.providers

    def building(self) -> VllmPlanner:
        """Return the planner for a layer that is being built; with the first, find the ranks that plans depend on.

        vLLM measures the memory that building the model takes, so buffers allocated here are counted. With an exchange
        the kernels also run once with all heads.

        Raises:
            SettingsError, PatchError, MismatchError, NoProviderError: see `dcp.open_group`, `open_exchange` and `warm`.
        """
        planner = self.planning()
        if not self.opened and self.place is not None:
            settings = self.resolved.settings
            if planner.model.dcp_size > 1:
                planner.set_dcp(dcp.open_group(self.vllm_config, planner.model, planner.device, settings))
            found = open_exchange(self.vllm_config, planner.model, planner.device, settings, self.place)
            planner.set_exchange(*found)
            if planner.exchange is not None:
                all_heads = replace(planner.model, attn_tp_size=1)
                warm(own_kernels(planner, sharded=True), self.loaded(), all_heads, self.place)
            self.opened = True
        return planner

    def prepare(self, device: torch.device) -> None:
        """Make the planner and warm up, once the worker has its GPU and before it loads the model.

        Raises:
            ShapeError, SettingsError, NoProviderError: see `planning` and `warm`; nothing is changed then.
        """
        planner = self.planning()
        self.place = device
        self.warm(device)
        attention = self.vllm_config.attention_config
        if not is_given(self.vllm_config) and (planner.portable or planner.device.sm in BACKEND_SMS):
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            # vLLM's kernels for SM120 were not compared with the plugin's.
            sm120 = is_sm120(planner.device.sm) and hasattr(AttentionBackendEnum, SM120_BACKEND)
            if sm120 and (planner.model.kv_layout, planner.model.index_topk) == ("v32_fp8", SM120_TOPK):
                return
            self.left_choice = kept_for_draft(self.vllm_config, planner.device.sm)
            if not self.left_choice and hasattr(AttentionBackendEnum, BF16_BACKEND):
                self.left_choice = kept_choice(planner)
            if self.left_choice:
                return
            attention.backend = AttentionBackendEnum[BACKEND]
            self.chose = True

    def warm(self, device: torch.device) -> None:
        """Run every plugin kernel that batches may take with this rank's heads, once per process.

        Raises:
            NoProviderError: a kernel does not run on this device; says which and why.
        """
        if not self.warm_seconds:
            started = time.perf_counter()
            if self.hashing is not None:
                self.hashing.join()  # otherwise the first launch would hash the files, too
            self.run_kernels(device)
            self.warm_seconds = time.perf_counter() - started

    def run_kernels(self, device: torch.device) -> None:
        """Run the plugin's kernels that batches may take with this rank's heads; see `warm`."""
        planner, providers = self.planning(), self.loaded()
        warm(own_kernels(planner), providers, planner.model, device)
        warm_selection(providers, planner.model, device, page_size=PAGE_SIZE)
        warm_reading(providers, planner.model, device)
        warm_without_logits(planner, providers, device)
        if attends_densely(planner):
            warm_dense(providers, planner.model, device)
        if planner.model.dcp_size > 1:
            interleave = self.vllm_config.parallel_config.cp_kv_cache_interleave_size
            warm_shard(providers, planner.model, device, page_size=PAGE_SIZE, interleave=interleave)
        if planner.portable:
            warm_indexer(providers, planner.model, device, planner.step_tokens)
        if planner.device.sm < FIRST_WITH_FP8:
            warm_inputs(providers, planner.model, device)

    def check_layers(self) -> None:
        """Check the layers that vLLM has built.

        vLLM's other backends read the selection of the same indexer, from which a planned batch leaves out the requests
        that the plugin's layers attend densely. So with some layers on another backend, such as a draft's, no request
        is attended densely, and without a layer that the plugin plans for stock vLLM serves.

        Raises:
            LeftToStockError: the plugin plans for no layer; with `strict` "full", not for all.
            SettingsError: token_shard is on, and the user chose a backend whose layers do not reshard.
        """
        planned, others = self.layers()
        settings = self.resolved.settings
        by_user = not self.chose and is_given(self.vllm_config)
        by_user = by_user and not self.planning().portable
        if others and ((planned and settings.strict == FULL) or (by_user and not planned)):
            if not planned and settings.token_shard == "on":
                raise SettingsError(NO_EXCHANGE)
            raise LeftToStockError("; ".join(self.left_layers(others)))
        if planned and others:
            needed = f"layers on vLLM's backend {', '.join(sorted(others))} need every request's selection"
            self.planning().no_dense = self.planning().no_dense or needed
        if planned or by_user:
            return
        by, sm = f"{BY_KIND} is" if given_by_kind(self.vllm_config) else "vLLM chose", self.planning().device.sm
        found = f"{by} {', '.join(sorted(others))}" if others else "it has no sparse layer that the plugin supports"
        # With such a draft model the start would fail then.
        advice = "" if kept_for_draft(self.vllm_config, sm) else f". Select it with {self.option}"
        raise LeftToStockError(
            f"no layer of the model attends by vLLM's {self.backend}, which nsa-plugin plans for: {found}, on "
            f"{self.planning().device.where}{self.left_choice}{advice}"
        )

    def measure(self) -> None:
        """Read the free memory anew: vLLM has loaded the model and allocated its cache, and captures graphs next."""
        if self.planner is not None:
            self.planner.forget_steps()
            self.planner.measure(self.free_memory())

    def settle(self) -> None:
        """Read the free memory anew, now that vLLM has captured its graphs.

        Raises:
            SettingsError: token_shard is on, but no layer has opened the exchange.
        """
        if self.planner is None:
            return
        if self.resolved.settings.token_shard == "on" and self.planner.exchange is None:
            raise SettingsError(NO_EXCHANGE)
        self.planner.measure(self.free_memory())
        watch(self.resolved.settings.trace)

    def free_memory(self) -> Callable[[], int]:
        """Return a function that reads the free memory for plans; see `free_memory_of`."""
        assert self.planner is not None
        return free_memory_of(self.planner.dcp or self.planner.exchange, free_device_memory)

    def layers(self) -> tuple[int, set[str]]:
        """Return the number of layers that the plugin plans for, and the backends of other sparse layers."""
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
        """Whether the plugin plans for any layer."""
        return self.layers()[0] > 0

    def is_running(self) -> bool:
        # Its layers, which a shutdown takes from there.
        return bool(self.vllm_config.compilation_config.static_forward_context) and self.worker() is not None

    @property
    def option(self) -> str:
        """The user's option that selects the backend."""
        return f"{BY_KIND}={self.backend}" if given_by_kind(self.vllm_config) else f"--attention-backend {self.backend}"

    def left(self) -> list[str]:
        """Return a note for each kind of layer that is left to vLLM."""
        _, others = self.layers()
        return self.left_layers(others)

    def left_layers(self, others: set[str]) -> list[str]:
        """Return a note for each backend of layers that are left to vLLM."""
        return [
            f"layers on vLLM's backend {name} are left to vLLM: nsa-plugin plans for {self.option}"
            for name in sorted(others)
        ]

    def facts(self) -> dict[str, str]:
        """Return the execution of sample batches, with reasons, for the start-up report."""
        planner = self.planning()
        planned, _ = self.layers()
        model, longest = planner.model, planner.max_model_len
        found = {
            "model": f"DeepSeek-{model.family.upper()}, index_topk {model.index_topk}, {model.heads_per_rank} of "
            f"{model.num_heads} heads per rank, KV cache {model.kv_layout}",
            "device": planner.device.describe(),
            "attention": f"{planned} layers on vLLM's {self.backend}" + (", the plugin's choice" if self.chose else ""),
        }
        if model.dcp_size > 1:
            found["context parallelism"] = (
                f"{model.dcp_size} ranks share each request's KV cache; a rank attends its part of the selected tokens "
                f"with {model.attended_heads} heads"
            )
        if not planned:
            return found
        for rows, context in ((SHORT, SHORT), (LONG, CONTEXT)):
            rows, context = min(rows, longest), min(context, longest)
            found[f"prefill, {rows} of {context} tokens"] = self.described(planner.prefill_plan(rows, context))
        for requests in (1, MANY):
            plan = planner.step_plan(requests, requests * planner.step_tokens, planner.step_tokens)
            found[f"{plan.phase}, {requests} request{'s' if requests > 1 else ''}"] = self.described(plan)
        return found | warmed_in(self.warm_seconds)

    def described(self, plan: Plan) -> str:
        """Describe a plan and its reasons in one line."""
        if plan.attention is Attention.MHA_ONE_SHOT:
            return f"{plan.attention} by {plan.provider}; {plan.reasons['attention']}"
        own = path_of(VLLM, self.planning().model.kv_layout, plan).own
        text = f"{plan.attention} by {plan.provider}" + (" after dequantisation" if plan.dequantize_kv else "")
        text += ("" if own else ", vLLM's call") + f"; {plan.reasons['provider']}"
        where = "resharded" if plan.token_shard else "heads stay local"
        return f"{text}{selection_of(plan)}; {where}: {plan.reasons['token_shard']}"


def dense_workspace_tokens(vllm_config: Any) -> int:
    """Return how many context tokens one dense part may hold, within the memory of vLLM's profiling run."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    tokens = int(MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config))
    return max(tokens // WORKSPACE_SHARE, int(vllm_config.model_config.hf_text_config.index_topk))


def free_device_memory() -> int:
    """Return the free bytes of the current device, including those that PyTorch has reserved and does not use."""
    return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
