"""Dense prefills beside SGLang's prefill graphs, by choice.

From 0.5.17 on SGLang captures prefills of up to 2048 tokens (`--cuda-graph-max-bs-prefill`, breakable CUDA graphs) for
models with sparse attention, and a captured prefill is always sparse: its projections are those of absorbed attention.
A batch of more tokens runs eagerly, and takes dense attention as before. What a graph saves of a short prefill and what
dense attention saves have to be weighed, so a graph is left only where the user gives `mha_max_kv`: then batches that
the plan makes dense run eagerly, as any batch that no graph was captured for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_plugin.patches.ledger import wrap


def wrap_can_run_graph(original: Callable[..., bool]) -> Callable[..., bool]:
    """For `PrefillCudaGraphRunner.can_run_graph`, the last word on a batch that is padded and not yet prepared."""

    def around(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
        if not original(runner, forward_batch):
            return False
        leaves = getattr(runner.model_runner.attn_backend, "nsa_plugin_leaves_graph", None)
        return leaves is None or not leaves(forward_batch)

    return wrap(original, around)
