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

    def is_running(self) -> bool | None:
        """Return whether the engine that this is of is still there; None: that does not show."""
        return None

    def request_ids(self, common: Any = None) -> list[str]:
        """Return the ids of a batch's requests, in batch order; "" or none where vLLM does not say.

        Args:
            common: the batch's CommonAttentionMetadata. vLLM's second model runner (the usual one on a GPU since 0.29)
                keeps no batch; from 0.30 on the metadata has the requests' places in the runner's table.
        """
        runner = getattr(self.worker(), "model_runner", None)
        batch = getattr(runner, "input_batch", None)
        if batch is not None:
            return list(getattr(batch, "req_ids", ()))
        ids, places = getattr(getattr(runner, "req_states", None), "index_to_req_id", None), _places(common)
        return [] if ids is None else [ids.get(place, "") for place in places]


def _places(common: Any) -> list[int]:
    places = getattr(common, "req_idx", None)
    return [] if places is None else [int(place) for place in places]


@dataclass(kw_only=True)
class CpuServing(VllmServing):
    """State of a CPU worker, complete before the worker is built.

    Attributes:
        model, device: inputs of decisions.
    """

    model: ModelShape
    device: DeviceProfile
