"""Heads for tokens: whether the ranks of an attention group trade for a batch, in how many pieces, and whose rows.

The trade itself is `nsa_plugin.parallel.token_shard`. All answers have to be the same on every rank, or the ranks wait
for each other in an exchange: they are made of the model, the batch, the settings and the measurements, which are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from nsa_plugin.decision import timings as measured
from nsa_plugin.decision.candidates import COPY_BYTES, COPY_RATE, NEARLY_EQUAL, OPS, Case, Route, estimate_us
from nsa_plugin.decision.choices import count, head_padding, in_time, pick_sparse
from nsa_plugin.decision.plan import Plan
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NsaPluginError
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.parallel.partition import Partition, Weights, by_cost, by_count
from nsa_plugin.settings import Settings

PHASES = (Phase.EXTEND, Phase.DECODE, Phase.TARGET_VERIFY)
"""Whose rows may be traded. Draft steps go on from selections of a step before, for rows that had other ranks."""

ATTENTION, STEPS = "token_shard_attention", "token_shard_steps"
"""What the measurements of a prefill's rows, which share their keys, and those of a decode's rows are filed under."""

CHUNKS = (1, 2, 4)
"""Pieces in which a prefill's trade is measured, which are those that it may have."""

# For the balance between the ranks alone, never for a choice: what kernels and links of a Hopper reach about.
LINK_BYTES_A_US = 400_000
BF16_MACS_A_US = 300_000_000
FP8_MACS_A_US = 2 * BF16_MACS_A_US
PICOSECONDS = 1_000_000  # in a microsecond
BF16_BYTES = 2


def impossible(model: ModelShape, device: DeviceProfile) -> str | None:
    """Why no batch of this configuration can trade heads for tokens; None if one can."""
    if model.attn_tp_size == 1:
        return "attn_tp_size is 1, so this rank already has every head"
    if model.family != "v3.2":
        return f"only the attention of DeepSeek-V3.2 is traded, and the model is of family {model.family}"
    if not device.providers(Op.TOKEN_SHARD):
        return "there are no token_shard kernels for this engine and device"
    return None


def never(model: ModelShape, device: DeviceProfile, settings: Settings) -> str | None:
    """As `impossible`, and why the settings keep every batch from it."""
    if settings.token_shard == "off":
        return "token_shard is off"
    if reason := impossible(model, device):
        return reason
    if settings.token_shard == "on":
        return None
    known = [label for op in (ATTENTION, STEPS) for label in measured.MEASUREMENTS.get(_key(op, model, device), {})]
    if not any(label.startswith(SHARDED) for label in known):
        return f"{count(model.attn_tp_size, 'rank')} trading {count(model.heads_per_rank, 'head')} each were not " + (
            f"measured on {device.where} with a {model.kv_layout} cache"
        )
    if not device.nvlink:
        return "no other GPU is reached over NVLink, and the exchange is measured over NVLink only"
    return None


def pointless(model: ModelShape, device: DeviceProfile, settings: Settings, max_tokens: int) -> str | None:
    """As `never`, and why `auto` would trade no batch of up to so many query rows: buffers would be for nothing.

    What a start-up asks; see `backends.token_shard.open_exchange`. It decides batches of all sizes that were measured
    and of those half-way between, with contexts as short as sparse attention has them, and also without the kernels
    that read a bf16 copy of the cache, for which an engine may find no memory.
    """
    if reason := never(model, device, settings):
        return reason
    if settings.token_shard == "on":
        return None
    in_place = device.keeping(lambda _, kernel: not kernel.layouts or model.kv_layout in kernel.layouts)
    sizes = _sizes(model, device, max_tokens)
    for kernels in (device, in_place):
        for phase in (Phase.EXTEND, Phase.DECODE):
            if any(_trades(Case(model, _shortest(model, phase, rows), kernels, settings)) for rows in sizes):
                return None
    return (
        f"no batch of up to {count(max_tokens, 'query row')} was measured on {device.where} to be quicker where "
        f"{count(model.attn_tp_size, 'rank')} trade {count(model.heads_per_rank, 'head')} each"
    )


def _sizes(model: ModelShape, device: DeviceProfile, max_tokens: int) -> list[int]:
    """Numbers of query rows up to `max_tokens` at which measured times stand, half-way between them, and the last."""
    keys = [_key(op, model, device) for op in (ATTENTION, STEPS)]
    keys += [(device.sm, op, model.kv_layout) for op in (Op.SPARSE_MLA_PREFILL, Op.SPARSE_MLA_DECODE)]
    labels = [by_heads for key in keys for by_heads in measured.MEASUREMENTS.get(key, {}).values()]
    known = sorted({rows for by_heads in labels for points in by_heads.values() for rows, _ in points})
    between = {(low + high) // 2 for low, high in pairwise(known)}
    return sorted({rows for rows in between.union(known, [max_tokens]) if rows <= max_tokens})


def _shortest(model: ModelShape, phase: Phase, rows: int) -> BatchShape:
    """A batch of so many rows that selects."""
    topk = model.index_topk
    if phase is Phase.EXTEND:
        return BatchShape.from_lengths(phase, [rows], [max(rows, topk + 1)])
    return BatchShape.from_lengths(phase, [1] * rows, [topk + 1] * rows, cuda_graph=True)


def _trades(case: Case) -> bool:
    try:
        route, _ = pick_sparse(case, case.own_load)
    except NsaPluginError:
        return False
    return decided(case, route).chunks > 0


class Decided(NamedTuple):
    """Whether a batch trades heads for tokens around the kernel.

    Attributes:
        chunks: pieces in which its rows are exchanged and attended; 0: it does not trade.
        why: the sentence for that.
        why_chunks: the sentence for the number.
    """

    chunks: int
    why: str
    why_chunks: str = "nothing is exchanged"


def decided(case: Case, route: Route, keeps_heads: str = "") -> Decided:
    """Whether the batch trades heads for tokens around the kernel, and in how many pieces.

    Args:
        route: the route that would be taken without, the best one.
        keeps_heads: see `dispatch.decide`.
    """
    model, batch, mode = case.model, case.batch, case.settings.token_shard
    if batch.phase not in PHASES:
        return Decided(0, f"{batch.phase}: the rows of draft steps are not traded")
    if reason := never(model, case.device, case.settings) or keeps_heads:
        return Decided(0, reason)
    if batch.context_parallel:
        return Decided(0, "the prefill is split over a context-parallel group already")
    if case.extend and batch.cuda_graph:
        return Decided(0, "a captured graph keeps its rows, and a prefill's are dealt out by their lengths")
    ranks, rows = model.attn_tp_size, batch.num_tokens
    if rows < ranks:
        return Decided(0, f"{count(rows, 'query row')} are fewer than the {ranks} ranks")
    try:
        sharded, _ = pick_sparse(case, case.sharded_load)
    except NsaPluginError as error:
        return Decided(0, f"no kernel takes all heads of a share: {error}")
    padding, _ = head_padding(case, route, model.heads_per_rank)
    own = f"{model.heads_per_rank} padded to {padding}" if padding else str(model.heads_per_rank)
    chunks, taken, why_chunks = _quickest(case, sharded)
    traded = (
        f"{ranks} ranks take about {case.sharded_load.rows} of {rows} query rows each with all {model.num_heads} heads "
        f"instead of {own}{'' if chunks == 1 else f', in {chunks} pieces'}"
    )
    if mode == "on":
        return Decided(chunks, traded, why_chunks)
    kept = estimate_us(case, route, case.own_load)
    if kept is None or taken is None:
        what = f"{route} of {count(model.heads_per_rank, 'head')}" if kept is None else f"{sharded} over {ranks} ranks"
        return Decided(0, f"{what} was not measured on {case.device.where} for {count(rows, 'row')}")
    where = f"as measured on {case.device.where}"
    if taken * (1 + NEARLY_EQUAL) >= kept:
        trade = f"{in_time(taken)} of the trade{'' if chunks == 1 else f' in {chunks} pieces'}"
        return Decided(0, f"{route} of the own heads takes {in_time(kept)} against {trade}, {where}")
    return Decided(chunks, f"{traded}: {in_time(taken)} against {route}'s {in_time(kept)}, {where}", why_chunks)


def _quickest(case: Case, route: Route) -> tuple[int, float | None, str]:
    """(pieces in which a trade around `route` takes the least time, its microseconds if it was measured, why)."""
    ranks, rows = case.model.attn_tp_size, case.batch.num_tokens
    if not case.extend:  # captured, and measured in one piece
        return 1, sharded_us(case, route), "the rows of later steps are exchanged in one piece"
    if rows < 2 * ranks:
        return 1, sharded_us(case, route), f"{count(rows, 'query row')} of {ranks} ranks are too few to be cut"
    known = {chunks: sharded_us(case, route, chunks) for chunks in CHUNKS if rows >= ranks * chunks}
    times = {chunks: time for chunks, time in known.items() if time is not None}
    if not times.keys() - {1}:
        return 1, times.get(1), f"no more than one piece was measured on {case.device.where} for {count(rows, 'row')}"
    best = min(times, key=lambda chunks: times[chunks])  # of equal ones the fewest pieces
    said = ", ".join(f"{in_time(time)} in {count(chunks, 'piece')}" for chunks, time in times.items())
    return best, times[best], f"{said}, as measured on {case.device.where}"


def sharded_us(case: Case, route: Route, chunks: int = 1) -> float | None:
    """Microseconds that exchange, attention of a share by `route` and exchange take in so many pieces.

    None where that was not measured.

    The selection, which each rank of a prefill then makes for its share alone, is not in it. The measurements have
    their bfloat16 rows made beforehand; where the route copies the cache, that is added.
    """
    model, device = case.model, case.device
    if measured.SELECTIONS[model.kv_layout] != (model.index_topk, model.sliding_window):
        return None
    where, label = _key(ATTENTION if case.extend else STEPS, model, device), traded_label(route, chunks)
    known = measured.points(*where, model.heads_per_rank, label)
    if not known or case.batch.num_tokens < known[0][0]:
        return None  # a few rows' exchange is all latency, which says nothing of fewer
    time = measured.estimate_us(*where, model.heads_per_rank, case.batch.num_tokens, label)
    if time is None or not route.dequantize_kv:
        return time
    return time + case.batch.total_kv_len * COPY_BYTES[model.kv_layout] / COPY_RATE


SHARDED = "token_shard by "
"""What a label of these measurements begins with; see `traded_label`."""


def traded_label(route: Route, chunks: int = 1) -> str:
    """What a trade around a route, in so many pieces, is filed under."""
    return in_chunks(f"{SHARDED}{route}", chunks)


def in_chunks(words: str, chunks: int) -> str:
    """A trade's name with its pieces, in labels as in records."""
    return words if chunks == 1 else f"{words}, {chunks} chunks"


def group_op(op: str, ranks: int) -> str:
    """What measurements of groups of so many ranks are filed under.

    Args:
        op: ATTENTION or STEPS.
    """
    return f"{op} tp{ranks}"


def _key(op: str, model: ModelShape, device: DeviceProfile) -> tuple[int, str, str]:
    return device.sm, group_op(op, model.attn_tp_size), model.kv_layout


def shares(
    model: ModelShape, device: DeviceProfile, plan: Plan, q_lens: Sequence[int], kv_lens: Sequence[int], held: int
) -> Partition:
    """Whose rows of a prefill are whose, of nearly equal cost: the same on every rank that has the same batch.

    Args:
        plan: of the batch, with `token_shard`.
        q_lens, kv_lens: query rows and whole context of each request.
        held: most rows of a rank that the buffers hold.

    Raises:
        PartitionError: the ranks together do not hold the rows.
    """
    route = Route(plan.attention, plan.provider, plan.dequantize_kv)
    kernel = device.capability(plan.provider, OPS[plan.attention], route.layout_read(model))
    most = held if kernel is None or kernel.max_rows is None else min(held, kernel.max_rows)
    return by_cost(q_lens, kv_lens, model.attn_tp_size, topk=model.index_topk, weights=weights(model), max_rows=most)


def step_shares(model: ModelShape, rows: int) -> Partition:
    """Whose rows of a later step are whose: made of nothing but their number, so that a replay has its capture's."""
    return by_count(rows, model.attn_tp_size)


def weights(model: ModelShape) -> Weights:
    """What a row costs, in picoseconds by the rates above: arithmetic, not a measurement."""
    values = model.num_heads * sum(model.row_dims)  # of a row on its ways, and multiplied for each key attended
    return Weights(
        row=BF16_BYTES * values * PICOSECONDS // LINK_BYTES_A_US,
        attention=max(1, values * PICOSECONDS // BF16_MACS_A_US),
        indexer=max(1, model.index_n_heads * model.index_head_dim * PICOSECONDS // FP8_MACS_A_US),
    )
