"""The plugin's metrics on SGLang's /metrics.

With --enable-metrics SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts a process (`set_prometheus_multiproc_dir`,
called by `_set_envs_and_config` of `srt/entrypoints/engine.py` in 0.5.11 to 0.5.23), and /metrics collects what any of
its processes wrote there (`add_prometheus_middleware`). So a counter made in a scheduler process appears next to
SGLang's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_plugin.telemetry import Metric, MetricKind, Metrics, Write, show_start

ENGINE = "sglang"


def show(server_args: Any, engine_version: str, left: Sequence[str]) -> None:
    """Show on /metrics the versions and what is left to the stock engine; nothing without metrics.

    Call it once per process.
    """
    if _collected(server_args):
        show_start(ClientWriter({}), engine_version, left)


def metrics_of(server_args: Any, labels: Mapping[str, object]) -> Metrics | None:
    """Return the metrics of this process's batches, or None if SGLang serves no metrics. Call it once per process.

    Args:
        server_args: of SGLang.
        labels: labels that are the same for every batch, such as tp_rank.
    """
    return Metrics(ClientWriter(labels)) if _collected(server_args) else None


def _collected(server_args: Any) -> bool:
    return bool(getattr(server_args, "enable_metrics", False)) and "PROMETHEUS_MULTIPROC_DIR" in os.environ


class ClientWriter:
    """Writes metrics with prometheus_client; see `MetricWriter`.

    Args:
        labels: labels that are the same for all of this process's samples.
    """

    def __init__(self, labels: Mapping[str, object]):
        self._labels = {name: str(value) for name, value in labels.items()}
        self._made: dict[str, Any] = {}

    def __call__(self, metric: Metric, labels: Mapping[str, str]) -> Write:
        if metric.name not in self._made:
            self._made[metric.name] = self._make(metric)
        sample, values = self._made[metric.name], {**labels, **self._labels}
        if values:
            sample = sample.labels(**values)
        write: Write = getattr(sample, {"counter": "inc", "gauge": "set", "histogram": "observe"}[metric.kind])
        return write

    def _make(self, metric: Metric) -> Any:
        import prometheus_client  # not at the top: the import reads PROMETHEUS_MULTIPROC_DIR

        name, names = metric.of(ENGINE), (*metric.labels, *self._labels)
        if metric.kind is MetricKind.COUNTER:
            return prometheus_client.Counter(name, metric.text, names)
        if metric.kind is MetricKind.GAUGE:
            return prometheus_client.Gauge(name, metric.text, names, multiprocess_mode="max")
        return prometheus_client.Histogram(name, metric.text, names, buckets=metric.buckets)
