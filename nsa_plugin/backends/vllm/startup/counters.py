"""The plugin's metrics on vLLM's /metrics.

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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nsa_plugin.telemetry import Metric, MetricKind, Metrics, Write, show_start

logger = logging.getLogger("nsa_plugin")
ENGINE = "vllm"
FOLDER_VARIABLE = "_NSA_PLUGIN_VLLM_COUNTERS"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# The collector takes a metric's type from its file's name.
_PREFIXES = {
    MetricKind.COUNTER: "counter_nsa_plugin_",
    MetricKind.GAUGE: "gauge_max_nsaplugin",
    MetricKind.HISTOGRAM: "histogram_nsa_plugin_",
}


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


def metrics_of(labels: Mapping[str, str]) -> Metrics | None:
    """Return the metrics of this process's batches, or None if nothing collects them.

    Args:
        labels: labels that are the same for every batch.
    """
    writer = _writer(labels)
    return None if writer is None else Metrics(writer)


def show(engine_version: str, left: Sequence[str]) -> None:
    """Show in /metrics the versions and what is left to the stock engine; nothing if nothing collects it."""
    if (writer := _writer({})) is not None:
        show_start(writer, engine_version, left)


def _writer(labels: Mapping[str, str]) -> FileWriter | None:
    folder = os.environ.get(MULTIPROCESS) or os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return None
    try:
        import prometheus_client.mmap_dict  # noqa: F401
    except ImportError as error:
        logger.warning("nsa-plugin shows no metrics: prometheus_client has changed its file format: %s", error)
        return None
    return FileWriter(folder, labels)


class FileWriter:
    """Writes metrics into this process's files; see `MetricWriter`.

    prometheus_client's metrics decide on import whether they write to files, and a worker may be forked from a process
    that imported it before the folder was known.

    Args:
        folder: of the files.
        labels: labels that are the same for all of this process's samples.
    """

    # By path, with the process's id: two open copies of one file would overwrite each other's samples.
    _files: ClassVar[dict[Path, Any]] = {}

    def __init__(self, folder: str, labels: Mapping[str, str]):
        self._folder, self._labels = folder, labels

    def __call__(self, metric: Metric, labels: Mapping[str, str]) -> Write:
        names, values = [*metric.labels, *self._labels], [labels[name] for name in metric.labels]
        values += self._labels.values()
        sample = metric.of(ENGINE)
        if metric.kind is MetricKind.HISTOGRAM:
            return self._histogram(metric, names, values)
        if metric.kind is MetricKind.COUNTER:
            # The client's name of a counter has no suffix, its sample has one.
            return self._adding(metric, sample.removesuffix("_total"), sample, names, values)
        file, key = self._open(metric), _key(sample, sample, names, values, metric.text)
        return lambda value: file.write_value(key, value, 0.0)

    def _histogram(self, metric: Metric, names: list[str], values: list[str]) -> Write:
        family = metric.of(ENGINE)
        bounds = [*map(str, metric.buckets), "+Inf"]
        # The collector adds up the buckets below one, and counts.
        buckets = [
            self._adding(metric, family, f"{family}_bucket", [*names, "le"], [*values, bound]) for bound in bounds
        ]
        total = self._adding(metric, family, f"{family}_sum", names, values)

        def observe(value: float) -> None:
            buckets[bisect_left(metric.buckets, value)](1)
            total(value)

        return observe

    def _adding(self, metric: Metric, family: str, sample: str, names: list[str], values: list[str]) -> Write:
        file, key = self._open(metric), _key(family, sample, names, values, metric.text)
        known = file.read_value(key)[0]

        def add(amount: float) -> None:
            nonlocal known
            known += amount
            file.write_value(key, known, 0.0)

        return add

    def _open(self, metric: Metric) -> Any:
        from prometheus_client.mmap_dict import MmapedDict

        path = Path(self._folder, f"{_PREFIXES[metric.kind]}{os.getpid()}.db")
        if path not in self._files:
            self._files[path] = MmapedDict(str(path))  # type: ignore[no-untyped-call]
        return self._files[path]


def _key(family: str, sample: str, names: list[str], values: list[str], text: str) -> str:
    from prometheus_client.mmap_dict import mmap_key

    return str(mmap_key(family, sample, names, values, text))  # type: ignore[no-untyped-call]
