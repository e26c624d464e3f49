"""The floor of an op: the fewest bytes through memory and the useful operations of a case.

Every input byte is read once and every output byte written once, whatever a kernel does. A gather counts each distinct
row once, however many queries select it, because a cache may serve the others; `gather_bytes` counts every selected
row, which is what a kernel without reuse moves. Operations are those that the contract needs, without padded heads and
padded top-k. Indices are int32, activations bfloat16, statistics float32.

    floor_us = max(bytes / copy rate, operations / matmul rate)

with the rates measured on the device in the same run (`timing.measure_rates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INDEX_BYTES = 4
FLOAT32_BYTES = 4
BF16_BYTES = 2


@dataclass(frozen=True)
class Rates:
    """The device's rates for a large copy (bytes read and written) and for large matrix products.

    A rate is None if it could not be measured; the floor then leaves its part out and is still a lower bound.
    """

    copy_gb_s: float
    matmul_tflops: float
    fp8_matmul_tflops: float | None = None


@dataclass(frozen=True)
class Work:
    """What one call needs at least.

    Attributes:
        bytes: fewest bytes through device memory.
        flops: useful operations; a multiplication and an addition count as two.
        fp8: the operations have fp8 operands.
        gather_bytes: bytes if every selected row came from memory; 0 for an op that gathers nothing.
    """

    bytes: int
    flops: int = 0
    fp8: bool = False
    gather_bytes: int = 0


@dataclass(frozen=True)
class Gather:
    """Rows of one cache that a call reads.

    Attributes:
        selected: valid indices of all query rows together.
        distinct: different rows among them.
        row_bytes: bytes of a row.
        width: all entries of the index tensor, valid or not.
    """

    selected: int
    distinct: int
    row_bytes: int
    width: int


def floor_us(work: Work, rates: Rates) -> float:
    """Microseconds that no kernel can beat by much at these rates."""
    memory = work.bytes / (rates.copy_gb_s * 1e3)
    rate = rates.fp8_matmul_tflops if work.fp8 else rates.matmul_tflops
    return max(memory, work.flops / (rate * 1e6) if rate else 0.0)


def gather_us(work: Work, rates: Rates) -> float | None:
    """Microseconds for the bytes if every selected row came from memory; None if nothing is gathered."""
    return work.gather_bytes / (rates.copy_gb_s * 1e3) if work.gather_bytes else None


def sparse_mla(*, rows: int, heads: int, d_qk: int, d_v: int, gathers: Sequence[Gather], statistics: int = 1) -> Work:
    """Sparse attention of `rows` query rows.

    Args:
        d_qk, d_v: values of a key row and of a value row.
        gathers: each cache's rows; a logit costs 2 d_qk operations, a value 2 d_v.
        statistics: float32 numbers written per row and head (lse, max_logits).
    """
    queries = rows * heads * (d_qk + d_v) * BF16_BYTES + rows * heads * statistics * FLOAT32_BYTES
    indices = sum(gather.width for gather in gathers) * INDEX_BYTES
    selected = sum(gather.selected for gather in gathers)
    return Work(
        bytes=queries + indices + sum(gather.distinct * gather.row_bytes for gather in gathers),
        flops=2 * selected * heads * (d_qk + d_v),
        gather_bytes=queries + indices + sum(gather.selected * gather.row_bytes for gather in gathers),
    )


def indexer_topk(*, rows: int, keys: int, heads: int, dim: int, topk: int, scored: int) -> Work:
    """fp8 logits and the selection, without logits in memory.

    Args:
        scored: (query row, key) pairs in range.
    """
    queries = rows * heads * (dim + FLOAT32_BYTES)
    return Work(
        bytes=queries + keys * (dim + FLOAT32_BYTES) + rows * topk * INDEX_BYTES,
        flops=2 * scored * heads * dim,
        fp8=True,
    )


def topk_rows(*, rows: int, keys: int, topk: int) -> Work:
    """A selection that reads every logit once."""
    return Work(bytes=rows * keys * FLOAT32_BYTES + rows * topk * INDEX_BYTES)


def causal_pairs(q: int, kv: int) -> int:
    """(query, key) pairs under a causal mask if the queries are the last of kv tokens."""
    return q * (kv - q) + q * (q + 1) // 2


def mha(*, q: int, kv: int, heads: int, d_qk: int, d_v: int) -> Work:
    """Dense causal attention of one request."""
    queries = q * heads * (d_qk + d_v)
    keys = kv * heads * (d_qk + d_v)
    return Work(bytes=(queries + keys) * BF16_BYTES, flops=2 * causal_pairs(q, kv) * heads * (d_qk + d_v))


def cache_rows(*, rows: int, dim: int, row_bytes: int, slot_bytes: int = 8) -> Work:
    """bf16 rows on one side, cache records on the other: a cache writer or a reader."""
    return Work(bytes=rows * (dim * BF16_BYTES + row_bytes + slot_bytes))


def index_map(*, read: int, written: int) -> Work:
    """A pass over indices: int32 entries read and written."""
    return Work(bytes=(read + written) * INDEX_BYTES)
