"""Plans of sample batches: which kernels a worker warms up, and what its start-up report says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from nsa_plugin.backends.common.paths import VLLM, path_of
from nsa_plugin.backends.common.planner import KERNEL_OPS, SAMPLE_ROWS
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.common.warm import DENSE, warm_unpaged
from nsa_plugin.backends.vllm.v32.routes import VllmPlanner
from nsa_plugin.decision.indexer import is_unpaged
from nsa_plugin.decision.plan import Attention, IndexerMode, Plan
from nsa_plugin.errors import NsaPluginError


def sample_plans(planner: VllmPlanner) -> Iterator[Plan]:
    """Plan decode steps and prefills of many sizes, to find the kernels that batches may take."""
    for rows in SAMPLE_ROWS:
        with suppress(NsaPluginError):  # no kernel supports this size, which may never occur
            yield planner.step_plan(rows, rows, 1)
            if rows <= planner.max_model_len:
                yield planner.prefill_plan(rows, rows)
                yield planner.prefill_plan(rows, planner.max_model_len)


def own_kernels(planner: VllmPlanner, *, sharded: bool = False) -> set[tuple[str, str]]:
    """Return (op, provider) of every sparse plugin kernel that batches of some size take.

    Args:
        sharded: for batches that reshard, whose kernels run with all heads; else for the others.
    """
    layout = planner.model.kv_layout
    return {
        (KERNEL_OPS[plan.attention], plan.provider)
        for plan in sample_plans(planner)
        if plan.attention in KERNEL_OPS and plan.token_shard == sharded and path_of(VLLM, layout, plan).own
    }


def attends_densely(planner: VllmPlanner) -> bool:
    """Whether prompts of some size attend densely with the plugin's kernel."""
    return any(plan.attention is Attention.MHA_ONE_SHOT and plan.provider == DENSE for plan in sample_plans(planner))


def warm_without_logits(planner: VllmPlanner, providers: Providers, device: torch.device) -> None:
    """Run the indexer that keeps no logits, if prefills of some size take it.

    Raises:
        NoProviderError: it does not run on this device; says which and why.
    """
    if any(map(is_unpaged, sample_plans(planner))):
        warm_unpaged(providers, planner.model, device)


def selection_of(plan: Plan) -> str:
    """Describe how a plan's selection is made."""
    if plan.indexer.mode is not IndexerMode.TOPK:
        return ""
    if is_unpaged(plan):
        return f"; selection by {plan.indexer.provider} without logits"
    return f"; logits of {plan.indexer.rows_per_chunk} query tokens at once"
