"""Batches by execution path on SGLang's /metrics.

With --enable-metrics SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts a process (`set_prometheus_multiproc_dir`,
called by `_set_envs_and_config` of `srt/entrypoints/engine.py` in 0.5.11 to 0.5.23), and /metrics collects what any of
its processes wrote there (`add_prometheus_middleware`). So a counter made in a scheduler process appears beside
SGLang's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_plugin.decision.plan import Plan

NAME = "sglang:nsa_plugin_batches_total"
_ROUTE = ("phase", "attention", "provider")


LEFT = "sglang:nsa_plugin_left_to_stock"


def show_left(server_args: Any, left: Sequence[str]) -> None:
    """Show on /metrics what is left to the stock engine, one sample of 1 for each reason; nothing without metrics."""
    if not left or not _collected(server_args):
        return
    from prometheus_client import Gauge  # not before: it looks for the directory when it is imported

    gauge = Gauge(LEFT, "What nsa-plugin leaves to the stock engine, and why.", ["reason"], multiprocess_mode="max")
    for reason in left:
        gauge.labels(reason=reason).set(1)


def _collected(server_args: Any) -> bool:
    return bool(getattr(server_args, "enable_metrics", False)) and "PROMETHEUS_MULTIPROC_DIR" in os.environ


def ranks(model_runner: Any) -> dict[str, int]:
    """Return tp_rank, pp_rank and, under data parallelism, dp_rank of this process, as in SGLang's metrics.

    The runner has them until 0.5.15, its `ps` from 0.5.16 on, and SGLang's process context after 0.5.20.
    """
    holder = next((one for one in (model_runner, getattr(model_runner, "ps", None)) if hasattr(one, "tp_rank")), None)
    if holder is None:
        from sglang.srt.runtime_context import get_parallel

        holder = get_parallel()
    found = {name: getattr(holder, name, None) for name in ("tp_rank", "pp_rank", "dp_rank")}
    return {name: int(rank) for name, rank in found.items() if rank is not None}


def route_counter(server_args: Any, labels: Mapping[str, object]) -> Callable[[Plan], None] | None:
    """Return a function that counts a batch's plan, or None if SGLang serves no metrics. Call it once per process.

    Args:
        server_args: of SGLang.
        labels: labels that are the same for every batch, such as tp_rank.
    """
    if not _collected(server_args):
        return None
    from prometheus_client import Counter  # not at the top: the import reads PROMETHEUS_MULTIPROC_DIR

    text = "Batches that nsa-plugin planned, by phase, attention and kernel library."
    counter = Counter(NAME, text, labelnames=(*_ROUTE, *labels))
    constant = {name: str(value) for name, value in labels.items()}
    increments: dict[str, Callable[[], None]] = {}

    def count(plan: Plan) -> None:
        increment = increments.get(plan.route)
        if increment is None:
            route = (str(plan.phase), str(plan.attention), plan.provider or "none")
            child = counter.labels(**dict(zip(_ROUTE, route, strict=True)), **constant)
            increment = increments[plan.route] = child.inc
        increment()

    return count
