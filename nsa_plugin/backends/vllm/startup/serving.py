"""State of the plugin in one vLLM worker process; `v32.serving` and `v4.serving` extend it for GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa_plugin.backends.vllm.startup.counters import labels_of, metrics_of
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import ResolvedSettings
from nsa_plugin.telemetry import Metrics, Trace


@dataclass(kw_only=True)
class VllmServing:
    """State of a CPU or GPU worker.

    Attributes:
        resolved: the settings.
        trace: where plans are recorded.
        metrics: None except in rank 0, since all ranks make the same plans.
        worker: vLLM's worker, or None before there is one.
    """

    resolved: ResolvedSettings
    trace: Trace
    metrics: Metrics | None = None
    worker: Callable[[], Any] = lambda: None

    def enter(self, worker: Any) -> None:
        """Take vLLM's worker, once it is built and knows its rank."""
        self.worker = weakref.ref(worker)
        self.trace.rank = worker.rank
        if worker.rank == 0:
            self.metrics = metrics_of(labels_of(worker.vllm_config))

    def request_ids(self) -> list[str]:
        """Return the ids of the running batch's requests, in batch order."""
        batch = getattr(getattr(self.worker(), "model_runner", None), "input_batch", None)
        return list(getattr(batch, "req_ids", ()))


@dataclass(kw_only=True)
class CpuServing(VllmServing):
    """State of a CPU worker, complete before the worker is built.

    Attributes:
        model, device: inputs of decisions.
    """

    model: ModelShape
    device: DeviceProfile
