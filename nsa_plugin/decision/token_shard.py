"""Resharding heads to tokens (Ulysses-style): whether a batch's ranks do it, in how many pieces, and who takes what.

The head/token all-to-all itself is `nsa_plugin.parallel.token_shard`. Every rank must come to the same answer, or the
ranks wait for each other in an exchange. So the answers depend only on the model, the batch, the settings and the
measured times, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from nsa_plugin.decision import timings
from nsa_plugin.decision.case import Case, count
from nsa_plugin.decision.indexer import selection_us
from nsa_plugin.decision.plan import Plan, Reason
from nsa_plugin.decision.routes import OPS, Route
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.decision.sparse import (
    COPY_BYTES,
    COPY_RATE,
    NEARLY_EQUAL,
    compared,
    estimate,
    head_padding,
    pick_sparse,
)
from nsa_plugin.decision.timings import TimeEstimate
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.partition import Partition, Weights, by_cost, by_count
from nsa_plugin.settings import Settings

PHASES = (Phase.EXTEND, Phase.DECODE, Phase.TARGET_VERIFY)
"""Phases that may reshard. Draft steps continue from the selection of an earlier step, made by other ranks."""

ATTENTION, STEPS = "token_shard_attention", "token_shard_steps"
"""The ops under which the times of a prefill, whose query tokens share keys, and of a decode are filed."""

CHUNKS = (1, 2, 4)
"""Numbers of pieces that a resharded prefill is measured in, and may be split into."""

# Only for the balance between the ranks, never for a choice: roughly what kernels and links of a Hopper GPU reach.
LINK_BYTES_A_US = 400_000
BF16_MACS_A_US = 300_000_000
FP8_MACS_A_US = 2 * BF16_MACS_A_US
PICOSECONDS = 1_000_000  # in a microsecond
BF16_BYTES = 2


def impossible(model: ModelShape, device: DeviceProfile) -> str | None:
    """Why no batch of this configuration can reshard; None if one can."""
    if model.attn_tp_size == 1:
        return "attn_tp_size is 1, so this rank already has every head"
    if model.dcp_size > 1:
        return f"decode context parallelism gathers the heads of {count(model.dcp_size, 'rank')}"
    if model.family != "v3.2":
        return f"only DeepSeek-V3.2 attention is resharded, and the model's family is {model.family}"
    if not device.providers(Op.TOKEN_SHARD):
        return "there are no token_shard kernels for this engine and device"
    return None


def never(model: ModelShape, device: DeviceProfile, settings: Settings) -> str | None:
    """As `impossible`, and why the settings rule it out for every batch."""
    if settings.token_shard == "off":
        return "token_shard is off"
    if reason := impossible(model, device):
        return reason
    if settings.token_shard == "on":
        return None
    known = [label for op in (ATTENTION, STEPS) for label in timings.TIMINGS.get(_key(op, model, device), {})]
    if not any(label.startswith(SHARDED) for label in known):
        return (
            f"no times on {device.where} for {count(model.attn_tp_size, 'rank')} that reshard "
            f"{count(model.heads_per_rank, 'head')} each over a {model.kv_layout} cache"
        )
    if not device.nvlink:
        return "no other GPU is reached over NVLink, and the exchange was measured only over NVLink"
    return None


def pointless(
    model: ModelShape, device: DeviceProfile, settings: Settings, max_tokens: int, max_context: int = 0
) -> str | None:
    """As `never`, and why `auto` would reshard no batch of up to `max_tokens` query tokens: buffers would be wasted.

    Called at start-up; see `backends.common.token_shard.open_exchange`. It decides batches of every measured size and
    of sizes half-way between, with the shortest contexts that sparse attention has and with prefills' longest, whose
    selection costs most, and also without the kernels that read a bf16 copy of the cache, for which an engine may find
    no memory.

    Args:
        max_context: most tokens of a request; 0: not known.
    """
    if reason := never(model, device, settings):
        return reason
    if settings.token_shard == "on":
        return None
    in_place = device.keeping(lambda _, kernel: not kernel.layouts or model.kv_layout in kernel.layouts)
    sizes = _sizes(model, device, max_tokens)
    for kernels in (device, in_place):
        for phase in (Phase.EXTEND, Phase.DECODE):
            contexts = {0, max_context if phase is Phase.EXTEND else 0}
            shapes = (_selecting(model, phase, rows, context) for rows in sizes for context in contexts)
            if any(_reshards(Case(model, shape, kernels, settings)) for shape in shapes):
                return None
    return (
        f"by the times on {device.where}, no batch of up to {count(max_tokens, 'query token')} is quicker when "
        f"{count(model.attn_tp_size, 'rank')} reshard {count(model.heads_per_rank, 'head')} each"
    )


def _sizes(model: ModelShape, device: DeviceProfile, max_tokens: int) -> list[int]:
    """The measured numbers of query tokens up to `max_tokens`, those half-way between them, and `max_tokens`."""
    keys = [_key(op, model, device) for op in (ATTENTION, STEPS)]
    keys += [(device.sm, op, model.kv_layout) for op in (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)]
    labels = [by_heads for key in keys for by_heads in timings.TIMINGS.get(key, {}).values()]
    known = sorted({rows for by_heads in labels for points in by_heads.values() for rows, _ in points})
    between = {(low + high) // 2 for low, high in pairwise(known)}
    return sorted({rows for rows in between.union(known, [max_tokens]) if rows <= max_tokens})


def _selecting(model: ModelShape, phase: Phase, rows: int, context: int) -> BatchShape:
    """A batch of `rows` query tokens that selects: a prompt of at least `context` tokens, or the shortest steps."""
    topk = model.index_topk
    if phase is Phase.EXTEND:
        return BatchShape.from_lengths(phase, [rows], [max(rows, topk + 1, context)])
    return BatchShape.from_lengths(phase, [1] * rows, [topk + 1] * rows, cuda_graph=True)


def _reshards(case: Case) -> bool:
    try:
        route = pick_sparse(case, case.own_load)
    except NsaPluginError:
        return False
    return decided(case, route).chunks > 0


class Resharding(NamedTuple):
    """Whether a batch reshards around the kernel.

    Attributes:
        chunks: pieces in which its query tokens are exchanged and attended; 0: it does not reshard.
        why: the reason.
        why_chunks: the reason for the number of pieces.
    """

    chunks: int
    why: Reason
    why_chunks: Reason = "nothing is exchanged"


def decided(case: Case, route: Route) -> Resharding:
    """Whether the batch reshards around the kernel, and in how many pieces.

    Args:
        route: the best route without resharding.
    """
    model, batch, mode = case.model, case.batch, case.settings.token_shard
    if batch.phase not in PHASES:
        return Resharding(0, lambda: f"{batch.phase}: draft steps do not reshard")
    ruled_out: Resharding | None = case.once("never", lambda: _ruled_out(case))
    if ruled_out:
        return ruled_out
    if reason := case.constraints.keep_heads:
        return Resharding(0, reason)
    if batch.context_parallel:
        return Resharding(0, "the prefill is already split over a context-parallel group")
    if case.extend and batch.cuda_graph:
        return Resharding(0, "a captured graph has fixed query tokens, and a prefill's are assigned by their lengths")
    ranks, rows = model.attn_tp_size, batch.num_tokens
    if rows < ranks:
        return Resharding(0, lambda: f"{count(rows, 'query token')}, fewer than the {ranks} ranks")
    try:
        sharded = pick_sparse(case, case.sharded_load)
    except NsaPluginError as error:
        return Resharding(0, f"no kernel supports all heads of a rank's share: {error}")
    if reason := case.constraints.keep_heads_on.get(sharded, ""):
        return Resharding(0, reason)
    chunks, taken, why_chunks = _quickest(case, sharded)
    pieces = "" if chunks == 1 else f", in {chunks} pieces"

    def share() -> str:
        padding, _ = head_padding(case, route, model.heads_per_rank)
        own = f"{model.heads_per_rank} padded to {padding}" if padding else str(model.heads_per_rank)
        return (
            f"each of {ranks} ranks attends about {case.sharded_load.rows} of {rows} query tokens with all "
            f"{model.num_heads} heads instead of {own}{pieces}"
        )

    if mode == "on":
        return Resharding(chunks, share, why_chunks)
    kept = estimate(case, route, case.own_load)
    if kept is None or taken is None:
        heads, untimed = count(model.heads_per_rank, "head"), kept is None

        def no_times() -> str:
            what = f"{route} of {heads}" if untimed else f"{sharded} over {ranks} ranks"
            return f"no times on {case.device.where} for {what} and {count(rows, 'query token')}"

        return Resharding(0, no_times)
    kept, taken = _with_selection(case, kept, taken)
    both = {f"own heads with {route}": kept, f"resharding{pieces.removeprefix(',')}": taken}
    if taken.us * (1 + NEARLY_EQUAL) >= kept.us:
        return Resharding(0, lambda: f"no gain: {compared(both, timings.gpu_of(case.device.sm))}")
    return Resharding(chunks, lambda: f"{share()}: {compared(both, timings.gpu_of(case.device.sm))}", why_chunks)


def _ruled_out(case: Case) -> Resharding | None:
    reason = never(case.model, case.device, case.settings)
    return Resharding(0, reason) if reason else None


def _with_selection(case: Case, kept: TimeEstimate, taken: TimeEstimate) -> tuple[TimeEstimate, TimeEstimate]:
    """Both times with the indexer's: ranks that reshard a prefill select for their own query tokens alone.

    Shares are of equal cost, so a rank scores an equal share of the pairs.
    """
    if not case.extend or case.constraints.selection_split:
        return kept, taken
    scored = case.batch.scored
    own = -(-scored // case.model.attn_tp_size)
    alone = selection_us(case, scored, case.batch.num_tokens)
    return kept.with_selection(alone), taken.with_selection(selection_us(case, own, case.sharded_load.rows))


def _quickest(case: Case, route: Route) -> tuple[int, TimeEstimate | None, Reason]:
    """(the quickest number of pieces to reshard around `route` in, its time if measured, why)."""
    ranks, rows = case.model.attn_tp_size, case.batch.num_tokens
    if not case.extend:  # captured, and measured in one piece
        return 1, sharded_time(case, route), "decode and verify steps are exchanged in one piece"
    if rows < 2 * ranks:
        too_few = lambda: f"{count(rows, 'query token')} of {ranks} ranks are too few to split"  # noqa: E731
        return 1, sharded_time(case, route), too_few
    known = {chunks: sharded_time(case, route, chunks) for chunks in CHUNKS if rows >= ranks * chunks}
    times = {chunks: time for chunks, time in known.items() if time is not None}
    if not times.keys() - {1}:
        return (
            1,
            times.get(1),
            lambda: f"no times on {case.device.where} for more than one piece and {count(rows, 'query token')}",
        )
    best = min(times, key=lambda chunks: times[chunks].us)  # of equal ones the fewest pieces
    return (
        best,
        times[best],
        lambda: compared({count(n, "piece"): time for n, time in times.items()}, timings.gpu_of(case.device.sm)),
    )


def sharded_time(case: Case, route: Route, chunks: int = 1) -> TimeEstimate | None:
    """The time of exchange, attention of a rank's share by `route`, and exchange, in `chunks` pieces.

    None if it was not measured. The top-k selection, which each rank runs for its share, is not included. The
    measurements exclude the bf16 copy of the cache; if the route makes one, its time is added.
    """
    model, device = case.model, case.device
    if not case.timed:
        return None
    heads, op = model.heads_per_rank, ATTENTION if case.extend else STEPS
    from_heads, known = case.once(
        (op, route, chunks),
        lambda: timings.fitting(*_key(op, model, device), heads, reshard_label(route, chunks)),
    )
    if not known or case.batch.num_tokens < known[0][0]:
        return None  # the exchange of a few query tokens is all latency, which says nothing of fewer
    time = timings.estimate_from(from_heads, known, case.batch.num_tokens, heads)
    if time is None or not route.dequantize_kv:
        return time
    return time.plus(case.batch.total_kv_len * COPY_BYTES[model.kv_layout] / COPY_RATE)


SHARDED = "token_shard by "
"""The prefix of these labels; see `reshard_label`."""


def reshard_label(route: Route, chunks: int = 1) -> str:
    """The label under which the times of resharding around a route, in `chunks` pieces, are filed."""
    return in_chunks(f"{SHARDED}{route}", chunks)


def in_chunks(words: str, chunks: int) -> str:
    """A name with its number of pieces, in labels as in records."""
    return words if chunks == 1 else f"{words}, {chunks} chunks"


def group_op(op: str, ranks: int) -> str:
    """The op under which the times of groups of `ranks` ranks are filed.

    Args:
        op: ATTENTION or STEPS.
    """
    return f"{op} tp{ranks}"


def _key(op: str, model: ModelShape, device: DeviceProfile) -> tuple[int, str, str]:
    return device.sm, group_op(op, model.attn_tp_size), model.kv_layout


def shares(
    model: ModelShape, device: DeviceProfile, plan: Plan, q_lens: Sequence[int], kv_lens: Sequence[int], held: int
) -> Partition:
    """Each rank's share of a prefill's query tokens, of nearly equal cost: the same on every rank with the same batch.

    Args:
        plan: of the batch, with `token_shard`.
        q_lens, kv_lens: query tokens and whole context of each request.
        held: capacity of a rank's buffers, in query tokens.

    Raises:
        PartitionError: the query tokens exceed the capacity of all ranks together.
    """
    route = Route(plan.attention, plan.provider, plan.dequantize_kv)
    kernel = device.capability(plan.provider, OPS[plan.attention], route.layout_read(model))
    most = held if kernel is None or kernel.max_rows is None else min(held, kernel.max_rows)
    return by_cost(q_lens, kv_lens, model.attn_tp_size, topk=model.index_topk, weights=weights(model), max_rows=most)


def step_shares(model: ModelShape, rows: int) -> Partition:
    """Each rank's share of a decode or verify step: depends only on the number of query tokens, as a replay must."""
    return by_count(rows, model.attn_tp_size)


def weights(model: ModelShape) -> Weights:
    """Cost of a query token, in picoseconds at the rates above: arithmetic, not a measurement."""
    # Exchanged once for a query token, and multiplied for each key that it attends to.
    values = model.num_heads * sum(model.row_dims)
    return Weights(
        row=BF16_BYTES * values * PICOSECONDS // LINK_BYTES_A_US,
        attention=max(1, values * PICOSECONDS // BF16_MACS_A_US),
        indexer=max(1, model.index_n_heads * model.index_head_dim * PICOSECONDS // FP8_MACS_A_US),
    )
