"""vLLM's V4 batches in terms of plans.

`backends.common.paths` says how a plan is executed. vLLM runs the path over bf16 rows, in chunks of requests, in a
workspace that its profiling run reserved, and calls FlashMLA's decode kernel. The plugin's kernel reads the caches in
place. Decode and verify steps take the quicker kernel by measured times if there are fewer than 64 heads; others fall
back to the stock path, FlashMLA's decode kernel, unless `decode_backend` is another library. On the portable path,
which has no FlashMLA, the plugin's kernels run every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nsa_plugin.backends.common.paths import DECODE_KERNEL, DIRECT, VLLM, path_of, routes_of
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.common.v4 import LAYOUT
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision import timings
from nsa_plugin.decision.case import count
from nsa_plugin.decision.constraints import Constraints
from nsa_plugin.decision.plan import Plan
from nsa_plugin.libraries.capabilities import Op

PADDED_TO = 64
"""Heads that FlashMLA's decode kernel takes without padding; with as many it is as quick as others, or quicker."""


@dataclass
class VllmV4Planner(VllmPlanner):
    """The decisions of one vLLM worker process for DeepSeek-V4; see `VllmPlanner`."""

    def constraints(self, *, prefill: bool, rows: int = 0, **more: Any) -> Constraints:
        if not prefill and self.steps_left:
            more["paths"] = routes_of(VLLM, LAYOUT, prefill=False, only=frozenset({DECODE_KERNEL}))
        # vLLM's profiling run has both workspaces, and vLLM's code cuts the logits into chunks of the whole budget.
        return super().constraints(prefill=prefill, rows=rows, workspace_reserved=True, **more)

    @property
    def steps_left(self) -> str:
        """Why decode and verify steps run on the stock path; "" = they have plans."""
        if self.portable or self.settings.decode_backend != "auto":
            return ""
        model, heads = self.model, count(self.model.attended_heads, "head")
        what = "decode and verify steps of DeepSeek-V4 run on the stock path"
        if model.attended_heads >= PADDED_TO:
            return f"{what}: there are {heads}, and FlashMLA pads fewer than {PADDED_TO} only"
        filed = timings.filed(model.kv_layout, (model.index_topk, model.sliding_window))
        if timings.measured(self.device.sm, Op.SPARSE_MLA_DECODE, filed, model.attended_heads):
            return ""
        selected = f"{heads} and {model.index_topk} selected tokens on {self.device.where}"
        return f"{what}: no kernel was timed for {selected}"

    def validate(self, *, prefill_rows: int, step_requests: int) -> None:
        """Plan the smallest and largest batches, so that errors come before serving.

        Args:
            prefill_rows: most query tokens of a prefill.
            step_requests: most requests of a step.

        Raises:
            SettingsError, NoProviderError: see `decide`.
        """
        for rows in {1, min(prefill_rows, self.max_model_len)}:
            path(self.prefill_plan(rows, self.max_model_len))
        for requests in {1, step_requests}:
            path(self.step_plan(requests, requests * self.step_tokens, self.step_tokens))


def path(plan: Plan) -> str:
    """Return the execution path of a plan.

    Raises:
        NoProviderError: see `path_of`.
    """
    return path_of(VLLM, LAYOUT, plan).path


def own_kernels(plans: Iterable[Plan]) -> set[tuple[str, str]]:
    """Return (op, provider) of the plugin's kernels that the plans use."""
    return {(KERNEL_OPS[plan.attention], plan.provider) for plan in plans if path(plan) == DIRECT}
