"""vLLM's V4 batches in terms of plans.

`backends.common.paths` says how a plan is executed. vLLM runs the path over bf16 rows, in chunks of requests, in a
workspace that its profiling run reserved, and calls FlashMLA's decode kernel. The plugin's kernel reads the caches in
place. Decode and verify steps fall back to the stock path, FlashMLA's decode kernel, unless `decode_backend` is
another library. On the portable path, which has no FlashMLA, the plugin's kernels run every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nsa_plugin.backends.common.paths import DECODE_KERNEL, DIRECT, VLLM, path_of, routes_of
from nsa_plugin.backends.common.planner import KERNEL_OPS
from nsa_plugin.backends.common.v4 import LAYOUT
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision.constraints import Constraints, steps_left_to_engine
from nsa_plugin.decision.plan import Plan


@dataclass
class VllmV4Planner(VllmPlanner):
    """The decisions of one vLLM worker process for DeepSeek-V4; see `VllmPlanner`."""

    def constraints(self, *, prefill: bool, rows: int = 0, **more: Any) -> Constraints:
        if not prefill and steps_left_to_engine(self.model.family, self.settings, portable=self.portable):
            more["paths"] = routes_of(VLLM, LAYOUT, prefill=False, only=frozenset({DECODE_KERNEL}))
        # vLLM's profiling run has both workspaces, and vLLM's code cuts the logits into chunks of the whole budget.
        return super().constraints(prefill=prefill, rows=rows, workspace_reserved=True, **more)

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
