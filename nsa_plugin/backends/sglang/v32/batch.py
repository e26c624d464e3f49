"""Read SGLang's batches (0.5.11 to 0.5.23). Names that changed between versions appear only here.

Only values on the host are read, the lists and tensors that end in ``_cpu``: nothing waits for the device.

- Prefills are planned by their lengths. Padding that MLP-sync adds belongs to no request; a padded request has no query
  tokens.
- Decode, verify and draft steps are planned by their number of query tokens, with contexts as long as the server
  allows. Such a step may be captured, so nothing may depend on its lengths, and it takes the same kernel whether its
  batch size was captured or not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nsa_plugin.backends.common.planner import step_shape
from nsa_plugin.decision.shapes import BatchShape, Phase

# SGLang's ForwardMode -> phase. DRAFT_EXTEND was merged into DRAFT_EXTEND_V2 after 0.5.13. The plugin does not support
# the others: SPLIT_PREFILL, DLLM_EXTEND, PREBUILT.
PHASES = {
    "EXTEND": Phase.EXTEND,
    "MIXED": Phase.EXTEND,
    "DECODE": Phase.DECODE,
    "IDLE": Phase.IDLE,
    "TARGET_VERIFY": Phase.TARGET_VERIFY,
    "DRAFT_EXTEND": Phase.DRAFT_EXTEND,
    "DRAFT_EXTEND_V2": Phase.DRAFT_EXTEND,
}


# Phases with several query tokens per request.
_OF_DRAFTS = frozenset({Phase.TARGET_VERIFY, Phase.DRAFT_EXTEND})
MAX_STEPS = 1024
"""Steps of different sizes that are cached: every replay of a captured step asks again."""


@dataclass(frozen=True)
class Batch:
    """A batch and its requests.

    Attributes:
        shape: input of the plan.
        mixed: in mode MIXED, a prefill with decode steps; each step is a request with one query token.
        in_graph: a prefill that SGLang captures or replays in pieces, around attention.
        made_up: SGLang made it for a rank without requests, which runs a prefill because other ranks do.
        requests: (id, query tokens, context in tokens) of each request, as far as the host knows; for the trace.
    """

    shape: BatchShape
    mixed: bool = False
    in_graph: bool = False
    made_up: bool = False
    requests: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def has_steps(self) -> bool:
        """Whether it is a prefill with requests of one query token after others, as decode steps in it are."""
        return self.shape.phase is Phase.EXTEND and any(
            rows == 1 and context > 1 and self.shape.num_tokens > 1 for _, rows, context in self.requests
        )

    @property
    def q_lens(self) -> tuple[int, ...]:
        return tuple(rows for _, rows, _ in self.requests)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(context for *_, context in self.requests)


def phase_of(forward_mode: Any) -> Phase | None:
    """Return the phase of a ForwardMode, or None if the plugin does not support it."""
    return PHASES.get(forward_mode.name)


def prefill_batch(forward_batch: Any, *, in_graph: bool = False) -> Batch:
    """Read a prefill.

    Args:
        forward_batch: with `seq_lens_cpu` (a tensor on the host) and `extend_seq_lens_cpu` (a list), which SGLang's
            metadata also needs.
        in_graph: see `Batch`.

    Raises:
        ShapeError: the lengths contradict each other.
    """
    kv_lens = list(map(int, forward_batch.seq_lens_cpu.tolist()))
    q_lens = list(map(int, forward_batch.extend_seq_lens_cpu))
    # MLP-sync pads the context lengths but not the list of query lengths.
    q_lens += [0] * (len(kv_lens) - len(q_lens))
    shape = BatchShape.from_lengths(
        Phase.EXTEND,
        q_lens,
        kv_lens,
        context_parallel=getattr(forward_batch, "attn_cp_metadata", None) is not None,
        attention_workspace_tokens=int(forward_batch.get_max_chunk_capacity()),
    )
    names = request_names(forward_batch, len(kv_lens))
    requests = list(zip(names, q_lens, kv_lens, strict=True))
    mixed = forward_batch.forward_mode.name == "MIXED"
    made_up = getattr(getattr(forward_batch, "_original_forward_mode", None), "name", "") == "IDLE"
    return Batch(shape, mixed=mixed, in_graph=in_graph, made_up=made_up, requests=requests)


class ShortPrompts:
    """A prefill's requests with contexts of at most `limit` tokens, as SGLang's rules on dense attention read them."""

    def __init__(self, forward_batch: Any, limit: int):
        self._whole = forward_batch
        self.seq_lens_cpu = forward_batch.seq_lens_cpu[forward_batch.seq_lens_cpu <= limit]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def step_batch(phase: Phase, requests: int, rows: int, max_context: int, names: Sequence[str] = ()) -> Batch:
    """Make a decode, verify or draft step, captured or not.

    Args:
        requests: number of requests, padded ones included.
        rows: query tokens of all requests.
        max_context: most tokens of a request that the server allows; taken as every context's length.
        names: ids of the requests, as far as known.
    """
    batch = _step_batch(phase, requests, rows, max_context)
    if not names or not batch.shape.num_tokens:
        return batch
    each, longest = rows // requests, batch.shape.max_kv_len
    return Batch(batch.shape, requests=[(name, each, longest) for name in names])


@functools.lru_cache(MAX_STEPS)
def _step_batch(phase: Phase, requests: int, rows: int, max_context: int) -> Batch:
    """`step_batch` without names: one shared object per size, so do not add to its requests."""
    if phase is Phase.IDLE or rows == 0:
        return Batch(BatchShape(phase=Phase.IDLE))
    return Batch(step_shape(phase, requests, rows, max_context))


def eager_step(forward_batch: Any, phase: Phase, draft_tokens: int | None, max_context: int) -> Batch:
    """Read a step whose metadata is made outside a graph; see `step_batch`.

    Args:
        draft_tokens: query tokens of a request that is verified or drafted (speculative_num_draft_tokens).
    """
    requests = int(forward_batch.batch_size)
    names, lengths = request_names(forward_batch, requests), getattr(forward_batch, "extend_seq_lens_cpu", None)
    if phase is Phase.DRAFT_EXTEND and lengths is not None:
        return step_batch(phase, requests, sum(map(int, lengths)), max_context, names)
    return captured_step(phase, requests, draft_tokens, max_context, names)


def captured_step(
    phase: Phase, requests: int, draft_tokens: int | None, max_context: int, names: Sequence[str] = ()
) -> Batch:
    """Make a step as a graph has it, each request with its full number of query tokens; see `step_batch`.

    Args:
        draft_tokens: see `eager_step`.
    """
    each = (draft_tokens or 1) if phase in _OF_DRAFTS else 1
    return step_batch(phase, requests, requests * each, max_context, names)


def request_names(forward_batch: Any, requests: int) -> list[str]:
    """Return the ids of the requests; "" for padded ones."""
    names = list(map(str, getattr(forward_batch, "rids", None) or ()))[:requests]
    return names + [""] * (requests - len(names))
