"""Dense prefills instead of SGLang's prefill graphs, if the user asks for them.

From 0.5.17 on SGLang captures prefills of up to 2048 tokens (`--cuda-graph-max-bs-prefill`, breakable CUDA graphs) for
models with sparse attention. A captured prefill is always sparse, since its projections are those of absorbed
attention; larger batches run eagerly and may be dense. Whether the graph or dense attention saves more depends on the
batch, so only with `mha_max_kv` set do prefills that the plan makes dense run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsa_plugin.patches.ledger import wrap


def wrap_can_run_graph(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `PrefillCudaGraphRunner.can_run_graph`, the last check of a batch, padded and not yet prepared."""

    def around(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
        if not original(runner, forward_batch):
            return False
        leaves = getattr(runner.model_runner.attn_backend, "nsa_plugin_leaves_graph", None)
        return leaves is None or not leaves(forward_batch)

    return wrap(original, around)
