"""Batches by route on vLLM's own /metrics.

vLLM answers /metrics in the process of its API server, from prometheus_client's registry there; plans are made in
workers, which are processes of their own, and what those send with a step (`ModelRunnerOutput`, `SchedulerStats`) has
no place for a plugin's counts. So the first worker of an engine counts in a file of prometheus_client's multi-process
format, and:

- with one API server, `collect_here` adds a folder of such files to the registry that this server answers from;
- with several, vLLM itself sets PROMETHEUS_MULTIPROC_DIR and answers from all files of that folder
  (`setup_multiprocess_prometheus`), so the worker's lies there.

Nothing is counted where a worker does not see the folder (Ray on another machine), and /metrics does not show it where
something else than vLLM's Python server answers (VLLM_RUST_FRONTEND_PATH).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsa_plugin.decision.plan import Plan

logger = logging.getLogger("nsa_plugin")
METRIC = "vllm:nsa_plugin_batches"
SAMPLE = f"{METRIC}_total"
TEXT = "Batches that nsa-plugin planned, by phase, attention and kernel library."
CARRIER = "_NSA_PLUGIN_VLLM_COUNTERS"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_ROUTE = ("phase", "attention", "provider")


def collect_here() -> tempfile.TemporaryDirectory[str] | None:
    """Show on this process's /metrics what workers count that are started from now on.

    Returns:
        The folder of their files, to be kept as long as the process; None where vLLM collects such files itself.
    """
    if os.environ.get(MULTIPROCESS):
        return None
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = tempfile.TemporaryDirectory(prefix="nsa_plugin_counters_")
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    os.environ[CARRIER] = folder.name
    return folder


def labels_of(vllm_config: Any) -> dict[str, str]:
    """model_name and engine of this worker, as vLLM's own metrics name them."""
    parallel = vllm_config.parallel_config
    return {
        "model_name": str(vllm_config.model_config.served_model_name),
        "engine": str(getattr(parallel, "data_parallel_index", 0)),
    }


def route_counter(labels: Mapping[str, str]) -> Callable[[Plan], None] | None:
    """A function that counts a batch's plan, or None where nobody would collect it.

    Args:
        labels: more labels, the same for every batch.
    """
    folder = os.environ.get(MULTIPROCESS) or os.environ.get(CARRIER)
    if not folder or not Path(folder).is_dir():
        return None
    # Not prometheus_client.Counter: whether it writes to files is settled when the module is imported, and a worker
    # may have been forked from a process that imported it before the folder was known.
    try:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key
    except ImportError as error:
        logger.warning("nsa-plugin counts no batches: prometheus_client's file format is not where it was: %s", error)
        return None

    # What the collector makes of a file is said by its name up to the first underscore.
    file = MmapedDict(str(Path(folder, f"counter_nsa_plugin_{os.getpid()}.db")))  # type: ignore[no-untyped-call]
    names = [*_ROUTE, *labels]
    counts: dict[tuple[str, str, str], tuple[str, float]] = {}

    def count(plan: Plan) -> None:
        route = (str(plan.phase), str(plan.attention), plan.provider or "none")
        if route not in counts:
            key = mmap_key(METRIC, SAMPLE, names, [*route, *labels.values()], TEXT)
            counts[route] = key, file.read_value(key)[0]  # type: ignore[no-untyped-call]
        key, value = counts[route]
        counts[route] = key, value + 1
        file.write_value(key, value + 1, 0.0)  # type: ignore[no-untyped-call]

    return count
