"""Start of a V4 attention backend with plans: checks, sample batches, warm-up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from packaging.version import Version

from nsa_plugin.backends.common.planner import Execution
from nsa_plugin.backends.common.warm import warm_selection
from nsa_plugin.backends.sglang.v4.attention import adopt
from nsa_plugin.backends.sglang.v4.kernels import longest_context
from nsa_plugin.backends.sglang.v4.routes import SglangV4Planner, asked_by_engine, makes_rows
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.backends.sglang.v4.warm import warm_v4
from nsa_plugin.backends.sglang.v32.batch import Batch
from nsa_plugin.backends.sglang.v32.samples import step_routes
from nsa_plugin.decision.dispatch import validate
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.settings import Settings
from nsa_plugin.telemetry import Metrics, Trace

SAMPLES = (1024, 4096, 8192, 16384, 32768)
"""Query tokens of the prefills decided before serving, each without a prefix and with the longest context."""

OWN_HEADS_FIRST = Version("0.5.14")


def begin(
    backend: Any,
    model_runner: Any,
    model: ModelShape,
    device: DeviceProfile,
    settings: Settings,
    *,
    trace: Trace,
    metrics: Metrics | None,
    free_memory: Callable[[], int],
    warmed: bool = False,
) -> tuple[list[str], dict[str, Execution]]:
    """Let a newly built V4 backend take its routes from plans, once its kernels have run.

    Args:
        model: see `v4_routes.v4_shape`.
        trace, metrics, free_memory: see `Planner`.
        warmed: the kernels have run for another backend of the model.

    Returns:
        What falls back to the stock path, and the execution of a few batches by name; for the start-up report.

    Raises:
        SettingsError, NoProviderError, PatchError: it cannot; the caller releases it.
    """
    from sglang.srt.environ import envs
    from sglang.version import __version__

    asked, own = asked_by_engine(envs), makes_rows(envs)
    planner = SglangV4Planner(model, device, settings, trace, metrics, free_memory, asked=asked, engine_makes_rows=own)
    first = Version(__version__) >= OWN_HEADS_FIRST
    notes = adopt(backend, planner, model_runner.server_args, own_heads_first=first)
    state: V4State | None = backend.nsa_plugin
    if state is None:
        return notes, {}
    # A library that a setting names may be on this device without a route under SGLang.
    of_prefill, of_steps = (planner.constraints(prefill=prefill) for prefill in (True, False))
    validate(model, planner.device, settings, constraints=of_prefill, decode_constraints=of_steps)
    routes = sample_routes(planner, longest_context(backend))
    if state.plans_steps:
        steps = step_routes(planner, longest_context(backend), backend.speculative_num_draft_tokens)
        routes |= {f"V4 {name}": route for name, route in steps.items()}
    if not warmed:
        where = torch.device(backend.device)
        warm_v4(routes.values(), state, where)
        warm_selection(state.providers, model, where)
    return notes, routes


def sample_routes(planner: SglangV4Planner, max_context: int) -> dict[str, Execution]:
    """Return the executions of sample prefills, by name."""
    found: dict[str, Execution] = {}
    for rows in SAMPLES:
        for context in dict.fromkeys((min(rows, max_context), max_context)):
            shape = BatchShape.from_lengths(Phase.EXTEND, [min(rows, context)], [context])
            batch = Batch(shape, requests=[("", shape.num_tokens, context)])
            with suppress(NsaPluginError):  # no kernel supports this size, which may never occur
                if route := planner.prefill_execution(batch):
                    found[f"V4 prefill, {shape.num_tokens} of {context} tokens"] = route
    return found
