"""Recording of DeepSeek-V4's planned steps under SGLang, in the trace and the metrics.

A captured step attends by the plan of its capture, so a replay only records it. Steps have plans if `decode_backend`
names a library; `attention` executes them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nsa_plugin.backends.sglang.v4.kernels import longest_context
from nsa_plugin.backends.sglang.v4.state import V4State
from nsa_plugin.backends.sglang.v32 import batch as batches
from nsa_plugin.decision.shapes import Phase


def eager(backend: Any, forward_batch: Any) -> None:
    """Record a step that runs eagerly; ignore other batches and those without a plan.

    Args:
        backend: SGLang's, adopted or not.
    """
    if (phase := planned(backend, forward_batch.forward_mode)) is not None:
        draft, longest = backend.speculative_num_draft_tokens, longest_context(backend)
        backend.nsa_plugin.planner.step(batches.eager_step(forward_batch, phase, draft, longest))


def replayed(original: Callable[..., Any], self: Any, forward_batch: Any, in_capture: bool = False, **more: Any) -> Any:
    """Around `init_forward_metadata_out_graph` (0.5.13 on), at capture and before every replay."""
    # A rank without requests replays a graph of decode rows.
    mode = getattr(forward_batch, "actual_forward_mode", forward_batch.forward_mode)
    _drop_prefill(self, mode)
    if not in_capture:
        _captured(self, mode, int(forward_batch.batch_size), forward_batch)
    return original(self, forward_batch, in_capture, **more)


def replayed_by_size(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `init_forward_metadata_replay_cuda_graph` (0.5.12), before every replay; the backend has its batch."""
    if self.nsa_plugin is not None:
        given = _signature(original).bind(self, *args, **kwargs).arguments
        batch = self._replay_forward_batch
        _drop_prefill(self, given["forward_mode"])
        idle = batch is not None and batches.phase_of(batch.forward_mode) is Phase.IDLE
        _captured(self, batch.forward_mode if idle else given["forward_mode"], given["bs"], batch)
    return original(self, *args, **kwargs)


_signature = functools.cache(inspect.signature)


def _drop_prefill(backend: Any, mode: Any) -> None:
    """Free what the layers of the last prefill shared: no step reads it, and it would stay through all replays.

    An eager prefill may pass here, too, with its plan made: so SGLang's base class prepares one.
    """
    state: V4State | None = backend.nsa_plugin
    if state is not None and batches.phase_of(mode) is not Phase.EXTEND:
        state.forget()


def _captured(backend: Any, mode: Any, requests: int, forward_batch: Any) -> None:
    """Record a step that a graph replays for `requests` requests."""
    if (phase := planned(backend, mode)) is not None:
        draft, longest = backend.speculative_num_draft_tokens, longest_context(backend)
        # Only a trace file has the requests, and every replay comes here.
        listed = backend.nsa_plugin.planner.trace.is_file
        names = batches.request_names(forward_batch, requests) if listed else ()
        backend.nsa_plugin.planner.step(batches.captured_step(phase, requests, draft, longest, names))


def planned(backend: Any, mode: Any) -> Phase | None:
    """Return the phase of a step that has a plan, None for any other batch."""
    state: V4State | None = backend.nsa_plugin
    if state is None or not state.plans_steps:
        return None
    phase = batches.phase_of(mode)
    return None if phase in (Phase.EXTEND, Phase.IDLE) else phase
