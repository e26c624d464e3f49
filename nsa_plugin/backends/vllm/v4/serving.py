"""State of the plugin in one vLLM worker that serves DeepSeek-V4: `GpuServing` with V4's plans and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from nsa_plugin.backends.common.paths import DIRECT
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.v4 import LayerCall, attend_in_place, warm_calls
from nsa_plugin.backends.common.warm import ROWS, expect_zeros, warm_selection
from nsa_plugin.backends.vllm.startup.model import check_portable_v4, is_portable, v4_shape
from nsa_plugin.backends.vllm.v4.batch import COLUMNS
from nsa_plugin.backends.vllm.v4.routes import VllmV4Planner, own_kernels, path
from nsa_plugin.backends.vllm.v32.portable import warm_indexer
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.backends.vllm.v32.samples import sample_plans, selection_of, warm_without_logits
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.decision.constraints import steps_left_to_engine
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import SettingsError
from nsa_plugin.libraries.devices import DeviceProfile

BACKENDS = ("FLASHMLA_SPARSE_DSV4", "V4_FLASHMLA_SPARSE")
"""vLLM's names of the backend for whose layers the plugin plans: since 0.23, and before."""

PAGE_SIZES = {0: 64, 4: 64, 128: 2}
"""Slots of a page by compress ratio, 0 for the window's cache: vLLM's blocks have 256 tokens."""
ALL_KEYS = (128, 256, 512, 1024, 2048)
"""Widths of the selection at ratio 128: each power of two that the transform is compiled for."""
STEP_TOKENS = 1
"""Query tokens that the indexer takes for a sequence: a step's see different numbers of compressed keys."""


@dataclass(kw_only=True)
class V4Serving(GpuServing):
    """State of a worker that serves DeepSeek-V4."""

    backend: ClassVar[str] = BACKENDS[0]
    planner_class: ClassVar[type[VllmPlanner]] = VllmV4Planner

    def planning(self) -> VllmV4Planner:
        planner = super().planning()
        assert isinstance(planner, VllmV4Planner)
        return planner

    def model(self) -> ModelShape:
        return v4_shape(self.vllm_config)

    def check(self, device: DeviceProfile) -> None:
        if self.resolved.settings.token_shard == "on":
            raise SettingsError(
                "token_shard is on and cannot work here: nsa-plugin does not reshard DeepSeek-V4 under vLLM; "
                "allowed here: auto, off"
            )
        # An emulated GPU has the kernels of the real one.
        if is_portable(device.sm) and self.resolved.settings.portable != "on":
            check_portable_v4(device.sm)
        super().check(device)

    def dense_limits(self) -> dict[str, Any]:
        return {"portable": self.portable}

    def validate(self, planner: VllmPlanner) -> None:
        assert isinstance(planner, VllmV4Planner)
        scheduler = self.vllm_config.scheduler_config
        planner.validate(prefill_rows=scheduler.max_num_batched_tokens, step_requests=scheduler.max_num_seqs)

    def prepare(self, device: torch.device) -> None:
        """As `GpuServing.prepare`; V4's layers choose their backend."""
        self.planning()
        self.warm(device)

    def run_kernels(self, device: torch.device) -> None:
        planner, providers = self.planning(), self.loaded()
        warm_v4(own_kernels(sample_plans(planner)), providers, planner.model, device)
        warm_selection(providers, planner.model, device, page_size=PAGE_SIZES[4])
        warm_slots(providers, planner.model, device)
        warm_without_logits(planner, providers, device)
        if planner.portable:
            warm_indexer(providers, planner.model, device, STEP_TOKENS)

    def layers(self) -> tuple[int, set[str]]:
        planned, others = 0, set()
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            if not hasattr(layer, "swa_cache_layer"):
                continue
            name = str(layer.get_attn_backend().get_name())
            if name in BACKENDS and self.planner is not None:
                planned += 1
            else:
                others.add(name)
        return planned, others

    def left(self) -> list[str]:
        found = super().left()
        why = steps_left_to_engine("v4", self.resolved.settings, portable=self.portable)
        return [*found, why] if why and self.layers()[0] else found

    def described(self, plan: Plan) -> str:
        taken = path(plan)
        own = "" if taken == DIRECT else ", vLLM's FlashMLA"
        text = f"{taken} by {plan.provider}{own}; {plan.reasons['provider']}"
        return text + selection_of(plan)


def warm_v4(kernels: set[tuple[str, str]], providers: Providers, model: ModelShape, device: torch.device) -> None:
    """Run each kernel once on a few query tokens, for every compress ratio, and wait for it.

    Args:
        kernels: (op, provider) of sparse attention.

    Raises:
        NoProviderError: one does not run here; says which and why.
    """

    def attended(op: str, name: str, call: LayerCall) -> torch.Tensor:
        out = torch.full_like(call.q, float("nan"))  # to detect a kernel that writes nothing
        attend_in_place(providers, op, name, call, out)
        return out

    for op, name in sorted(kernels):
        calls = warm_calls(model, device, heads=model.heads_per_rank, page_sizes=PAGE_SIZES, all_keys=(COLUMNS,))
        for call in calls:
            expect_zeros(f"{name}'s {op} for DeepSeek-V4", partial(attended, op, name, call))


def warm_slots(providers: Providers, model: ModelShape, device: torch.device) -> None:
    """As `warm_v4`, for the kernel that turns positions into slots, at every width that it is compiled for.

    Raises:
        NoProviderError: as `warm_v4`.
    """
    transform = providers.helper("index_transform_paged")
    ones = torch.ones(ROWS, dtype=torch.int32, device=device)
    owners = torch.zeros_like(ones)
    for ratio, widths in ((4, (model.index_topk,)), (128, ALL_KEYS)):
        for width in widths:
            # Position 0 of page 0 is slot 0.
            chosen, table = (torch.zeros(ROWS, width, dtype=torch.int32, device=device) for _ in range(2))
            given = {"page_size": PAGE_SIZES[ratio], "row_to_request": owners, "lengths": ones}
            expect_zeros("the slots of DeepSeek-V4", partial(transform, chosen, table, **given))
