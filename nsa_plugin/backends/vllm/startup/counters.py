"""Batches by execution path on vLLM's /metrics.

vLLM's API server answers /metrics from prometheus_client's registry in its process. Plans are made in worker processes,
and the data that workers send with a step (`ModelRunnerOutput`, `SchedulerStats`) has no field for a plugin's counts.
So the first worker of an engine counts in a file of prometheus_client's multi-process format:

- with one API server, `collect_here` adds a folder of such files to that server's registry;
- with several, vLLM sets PROMETHEUS_MULTIPROC_DIR and answers from all files of that folder
  (`setup_multiprocess_prometheus`), so the worker writes there.

Nothing is counted if a worker does not see the folder (Ray on another machine). /metrics does not show the counts if
another server than vLLM's Python one answers (VLLM_RUST_FRONTEND_PATH).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa_plugin.decision.plan import Plan

logger = logging.getLogger("nsa_plugin")
METRIC = "vllm:nsa_plugin_batches"
SAMPLE = f"{METRIC}_total"
TEXT = "Batches that nsa-plugin planned, by phase, attention and kernel library."
FOLDER_VARIABLE = "_NSA_PLUGIN_VLLM_COUNTERS"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_ROUTE = ("phase", "attention", "provider")
LEFT = "vllm:nsa_plugin_left_to_stock"
LEFT_TEXT = "What nsa-plugin leaves to the stock engine, and why."


def collect_here() -> tempfile.TemporaryDirectory[str] | None:
    """Show the counts of workers that start from now on in this process's /metrics.

    Returns:
        The folder of their files, to keep as long as the process lives; None if vLLM collects such files.
    """
    if os.environ.get(MULTIPROCESS):
        return None
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = tempfile.TemporaryDirectory(prefix="nsa_plugin_counters_")
    MultiProcessCollector(REGISTRY, path=folder.name)  # type: ignore[no-untyped-call]
    os.environ[FOLDER_VARIABLE] = folder.name
    return folder


def labels_of(vllm_config: Any) -> dict[str, str]:
    """Return model_name and engine of this worker, as in vLLM's metrics."""
    parallel = vllm_config.parallel_config
    return {
        "model_name": str(vllm_config.model_config.served_model_name),
        "engine": str(getattr(parallel, "data_parallel_index", 0)),
    }


def route_counter(labels: Mapping[str, str]) -> Callable[[Plan], None] | None:
    """Return a function that counts a batch's plan, or None if nothing collects the counts.

    Args:
        labels: labels that are the same for every batch.
    """
    if (opened := _open("counter_nsa_plugin_")) is None:
        return None
    file, mmap_key = opened
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


def show_left(left: Sequence[str]) -> None:
    """Show in /metrics what is left to the stock engine, one sample of 1 for each reason."""
    if not left or (opened := _open("gauge_max_nsaplugin")) is None:
        return
    file, mmap_key = opened
    for reason in left:
        file.write_value(mmap_key(LEFT, LEFT, ["reason"], [reason], LEFT_TEXT), 1.0, 0.0)


def _open(prefix: str) -> tuple[Any, Callable[..., str]] | None:
    """Open this process's file of metrics, with the function that makes its keys; None if nothing collects it.

    Not by prometheus_client's own metrics, which settle on import whether they write to files: a worker may be forked
    from a process that imported it before the folder was known.

    Args:
        prefix: of the file's name, from which the collector takes the metrics' type: "counter_" or "gauge_max_".
    """
    folder = os.environ.get(MULTIPROCESS) or os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return None
    try:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key
    except ImportError as error:
        logger.warning("nsa-plugin shows no metrics: prometheus_client has changed its file format: %s", error)
        return None
    return MmapedDict(str(Path(folder, f"{prefix}{os.getpid()}.db"))), mmap_key  # type: ignore[no-untyped-call]
