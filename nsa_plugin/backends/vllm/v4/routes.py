"""From a Plan to who carries a DeepSeek-V4 batch under vLLM.

A prefill has the three carriers of `backends.v4`. vLLM's own route over bfloat16 rows is left to vLLM, by chunks of
requests in a workspace that its profiling run has set aside; FlashMLA's decode kernel is called by vLLM's function for
it; what is read in place otherwise is the plugin's kernel. Decode and verify steps are vLLM's own, which is FlashMLA's
decode kernel, unless `decode_backend` names another library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nsa_plugin.backends.common.v4 import DECODE_KERNEL, DIRECT, carrier_name, runnable
from nsa_plugin.backends.vllm.v32.routes import Planner
from nsa_plugin.decision.plan import Attention, Plan
from nsa_plugin.errors import NoProviderError

OPS = {Attention.SPARSE_PREFILL: "sparse_mla_prefill", Attention.SPARSE_DECODE: "sparse_mla_decode"}


@dataclass
class V4Planner(Planner):
    """The decisions of one worker process; see `Planner`."""

    def __post_init__(self) -> None:
        self.prefill_device = runnable(self.device)
        self.step_device = runnable(self.device, (DECODE_KERNEL,) if self.settings.decode_backend == "auto" else ())

    def validate(self, *, prefill_rows: int, step_requests: int) -> None:
        """Raise before serving what a batch would raise.

        Args:
            prefill_rows: most rows of a prefill.
            step_requests: most requests of a step.

        Raises:
            SettingsError, NoProviderError: see `decide`.
        """
        for rows in {1, min(prefill_rows, self.max_model_len)}:
            carrier_of(self.prefill_plan(rows, self.max_model_len))
        for requests in {1, step_requests}:
            carrier_of(self.step_plan(requests, requests * self.step_tokens, self.step_tokens))


def carrier_of(plan: Plan) -> str:
    """One of `backends.v4.CARRIERS`' names.

    Raises:
        NoProviderError: nobody carries the plan; `runnable` keeps it from being made.
    """
    name = carrier_name(plan)
    if name is None:
        after = " after dequantisation" if plan.dequantize_kv else ""
        raise NoProviderError(f"nsa-plugin has no route under vLLM for {plan.provider}'s {plan.attention}{after} of V4")
    return name


def own_kernels(plans: Iterable[Plan]) -> set[tuple[str, str]]:
    """(op, provider) of the plugin's kernels that the plans take."""
    return {(OPS[plan.attention], plan.provider) for plan in plans if carrier_of(plan) == DIRECT}
