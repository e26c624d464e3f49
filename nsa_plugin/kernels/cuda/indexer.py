"""`indexer_topk` in CUDA without logits in memory: SM90, 32 or 64 heads of 128 fp8 values.

A sample of the keys is scored first and gives each row a threshold that about twice topk of its keys reach. Then all
keys are scored (`indexer_scan.cu`), and a row's lists in global memory get those that reach it: 56 KiB a row, however
many keys there are. A row whose lists are full or have fewer than topk entries is scored again (`indexer_redo.cu`):
lists that fill up are cut back to the best topk. All of that follows from the data on the device, and the result is
exact for any data. `topk_entries` (topk.cu) selects from the lists: the lowest positions of a tie, in ascending order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa_plugin.kernels.checks import FP8_DTYPE, require
from nsa_plugin.kernels.cuda.topk import BINS, capacity_of, launch, shared_bytes
from nsa_plugin.kernels.indexer_args import check_limits, check_ragged
from nsa_plugin.kernels.topk import CUDA_MAX_TOPK, Request, new_output, row_chunks, uncovered_rows
from nsa_plugin.kernels.triton.device import facts_of

OP = "indexer_topk"
SCAN, REDO = "indexer_scan.cu", "indexer_redo.cu"
HEADS, DIM = (32, 64), 128
HOPPER = 90
BLOCK_HEADS = 512
"""Heads of a block's query rows: 8 or 16 rows."""
TILE = 64
"""Keys of a product."""
SLACK = 16 * TILE
"""Entries that the lists of a row may get between two looks at their room, where a row is scored again."""
LISTS = 4
"""Lists of a row and a part: one a warp."""
LIST, LIST_ABOVE_2048 = 1792, 2560
"""Entries of a list. By the sampled threshold 56 and 65 % of them are used, and a full list is rarer than 1e-10."""
STAGES = {SCAN: 18, REDO: 12}
BLOCKS = {SCAN: (384, 1, 1), REDO: (640, 1, 1)}
ALIGNMENT = 16
MAX_SAMPLES = 32768
MAX_PARTS = 8
LEAST_PART = 4096
LEAST_FINITE = torch.finfo(torch.float32).min
ENTRY_BYTES = 8


@dataclass(frozen=True)
class IndexerTuning:
    """How `topk` runs.

    Attributes:
        relu: 0 by a maximum, 1 by a saturated product, 2 both in turn. All give the same bits.
        step: keys of which one is sampled.
    """

    relu: int = 1
    step: int = 32


TUNING = IndexerTuning()


@dataclass(frozen=True)
class Buffers:
    """Sizes of the memory of a chunk of rows.

    Attributes:
        capacity: entries of a list; a row has LISTS of them in each part.
        parts: pieces that a row's keys are scored in, side by side.
        step: keys of which one is sampled.
        samples: sampled keys; 0 where every row fits its buffer.
    """

    capacity: int
    parts: int
    step: int
    samples: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: entries, two counts a list, and a threshold."""
        return 4 * self.row_words + self.parts * LISTS * 8 + 4

    @property
    def row_words(self) -> int:
        """32-bit words of a row's entries, in whose memory the sampled logits are before."""
        return max(self.parts * LISTS * self.capacity * ENTRY_BYTES // 4, self.samples)

    @property
    def offset(self) -> int:
        """The first sampled key."""
        return self.step // 2


def topk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int | None = None,
    out: torch.Tensor | None = None,
    requests: Sequence[Request] | None = None,
    tuning: IndexerTuning = TUNING,
) -> torch.Tensor:
    """int32 [rows, topk] positions relative to ks, -1 behind them; see `nsa_plugin.kernels.indexer.reference_topk`.

    Does not wait for the device, and allocates no more than `rows_per_chunk` rows of float32 logits would take, as long
    as that is a block of rows. With `requests` such a row is as wide as the longest of them.

    Args:
        q: [rows, 32 or 64, 128] float8_e4m3fn.
        k: [keys, 128] float8_e4m3fn.
        rows_per_chunk: bounds the memory as above; None: all rows at once.
        requests: as `nsa_plugin.kernels.triton.indexer.topk`; rows of none, or of one without keys, are all -1.
        tuning: how the kernel runs.

    Raises:
        KernelArgumentError: a shape, dtype or device is wrong, or topk is over 4096.
    """
    check_ragged(OP, q, k, k_scale, weights, ks, ke, dtypes=(FP8_DTYPE,))
    check_limits(OP, rows_per_chunk, None)
    rows, heads, dim = q.shape
    fits = heads in HEADS and dim == DIM
    require(fits, OP, f"q has {heads} heads of {dim} values; the CUDA kernel takes 32 or 64 of 128")
    require(topk <= CUDA_MAX_TOPK, OP, f"topk is {topk}; the CUDA kernel selects at most {CUDA_MAX_TOPK}")
    sm90 = q.is_cuda and facts_of(q.device).architecture == HOPPER
    require(sm90, OP, f"q is on {q.device}; the CUDA kernel needs a CUDA device of SM90")
    result = new_output(OP, rows, topk, out, q.device)
    keys = k.shape[0]
    if rows == 0 or keys == 0:
        return result.fill_(-1)
    scale = torch.ones(keys, dtype=torch.float32, device=q.device) if k_scale is None else k_scale
    inputs = (_aligned(q), _aligned(k), scale.contiguous(), _aligned(weights))
    starts, ends = ks.int().contiguous(), ke.int().contiguous()
    target = result if result.is_contiguous() else torch.empty_like(result, memory_format=torch.contiguous_format)
    sms = facts_of(q.device).sms
    limit = memory_limit(keys, rows_per_chunk, requests)
    with torch.cuda.device_of(q):
        for first, end, buffers in plan(rows, keys, topk, sms, limit, tuning.step, BLOCK_HEADS // heads):
            _chunk(inputs, starts, ends, target, slice(first, end), buffers, tuning)
    if target is not result:
        result.copy_(target)
    if requests is not None:
        for gap in uncovered_rows(list(row_chunks(rows, keys, rows_per_chunk=None, requests=requests)), rows):
            result[gap].fill_(-1)
    return result


def memory_limit(keys: int, rows_per_chunk: int | None, requests: Sequence[Request] | None) -> int | None:
    """Bytes that a chunk may take: those of `rows_per_chunk` rows of float32 logits; None: not limited.

    Args:
        keys: of the batch; the width of a row without `requests`.
        requests: as for `topk`. A row of logits is then as wide as the longest request that has rows.
    """
    if rows_per_chunk is None:
        return None
    spans = [keys] if requests is None else [last - first for row, end, first, last in requests if end > row]
    return rows_per_chunk * 4 * max(spans, default=0)


def plan(
    rows: int, keys: int, topk: int, sms: int, limit: int | None, step: int = TUNING.step, block: int = 8
) -> list[tuple[int, int, Buffers]]:
    """(first row, end row, buffers) of each chunk of a batch.

    Args:
        sms: multiprocessors of the device, each with one block at a time.
        limit: bytes that a chunk may take; at least one block of rows is taken.
        step: keys of which one is sampled; more where that would be too many.
        block: query rows of a block.
    """
    chunks = []
    first, wave = 0, block * sms
    while first < rows:
        left = rows - first
        tail = -(-(left % wave) // block)
        parts = _parts(tail, keys, sms)
        # Whole waves of blocks, one on each multiprocessor; what is left at the end in parts, where that is quicker.
        buffers = _buffers(keys, topk, 1, step)
        most = left if limit is None else max(block, limit // buffers.row_bytes)
        if most >= wave and left >= wave:
            taken = left if most >= left and parts == 1 else min(most, left) // wave * wave
        else:
            buffers = _buffers(keys, topk, parts, step)
            most = left if limit is None else max(block, limit // buffers.row_bytes // block * block)
            taken = min(left, most)
        chunks.append((first, first + taken, buffers))
        first += taken
    return chunks


def _buffers(keys: int, topk: int, parts: int, step: int) -> Buffers:
    # A row's entries are about 2 * topk in all. Where there are parts, any of them may have them all.
    whole = LIST if topk <= 2048 else LIST_ABOVE_2048
    capacity = whole if parts == 1 else -(-(topk + 2 * SLACK) // LISTS)
    step = max(step, -(-keys // MAX_SAMPLES))
    samples = 0 if keys <= LISTS * capacity - SLACK else max(0, keys - step // 2 + step - 1) // step
    return Buffers(capacity, parts, step, samples)


def _parts(blocks: int, keys: int, sms: int) -> int:
    """The fewest parts of a row's keys that keep the multiprocessors about as busy as the best number."""

    def waves(parts: int) -> float:
        return -(-blocks * parts // sms) / parts

    choices = range(1, max(1, min(MAX_PARTS, keys // LEAST_PART)) + 1)
    best = min(map(waves, choices))
    return next(parts for parts in choices if waves(parts) <= 1.05 * best)


def _chunk(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    some: slice,
    buffers: Buffers,
    tuning: IndexerTuning,
) -> None:
    from nsa_plugin.kernels.cuda.build import load_kernel

    q, k, scale, weights = (inputs[0][some], inputs[1], inputs[2], inputs[3][some])
    starts, ends, out = starts[some], ends[some], out[some]
    rows, keys, topk, device = q.shape[0], k.shape[0], out.shape[1], q.device
    counts = torch.empty((2, rows, buffers.parts, LISTS), dtype=torch.int32, device=device)
    entries = torch.empty(rows * buffers.row_words, dtype=torch.int32, device=device)
    arguments = Arguments(
        weights=weights.data_ptr(),
        ks=starts.data_ptr(),
        ke=ends.data_ptr(),
        entries=entries.data_ptr(),
        sampled=entries.data_ptr(),
        rows=rows,
        topk=topk,
        capacity=buffers.capacity,
        parts=buffers.parts,
        all_keys=keys,
    )
    heads = q.shape[1]
    q_map = tensor_map(q.view(rows * heads, DIM), BLOCK_HEADS // 2)
    grid = (-(-rows * heads // BLOCK_HEADS), buffers.parts, 1)

    def score(source: str, values: torch.Tensor, scales: torch.Tensor, sample: int = 0) -> None:
        arguments.keys, arguments.k_scale = values.shape[0], scales.data_ptr()
        dynamic = BLOCK_HEADS * DIM + STAGES[source] * TILE * DIM
        defines = definitions(source, tuning, heads=heads, sample=sample)
        load_kernel(source, source.removesuffix(".cu"), defines=defines, max_dynamic_shared=dynamic)(
            grid=grid,
            block=BLOCKS[source],
            args=(q_map, tensor_map(values, TILE), arguments),
            shared_bytes=dynamic,
        )

    if buffers.samples:
        chosen = slice(buffers.offset, None, buffers.step)
        few, few_scales = k.view(torch.uint8)[chosen].contiguous(), scale[chosen].contiguous()
        thresholds = torch.empty(rows, dtype=torch.float32, device=device)
        arguments.stride, arguments.offset = buffers.step, buffers.offset
        score(SCAN, few, few_scales, sample=1)
        launch(
            "row_thresholds",
            rows,
            (
                entries,
                starts,
                ends,
                thresholds,
                *map(ctypes.c_int32, (buffers.samples, buffers.step, buffers.offset, keys, topk)),
                # A row's keys may all lie in one part; its entries are spread over all of them.
                ctypes.c_int32(LISTS * buffers.capacity - SLACK),
                ctypes.c_int32(buffers.parts * LISTS * buffers.capacity - SLACK),
            ),
            4 * (2 * (-(-buffers.samples // 2)) + BINS),
            4 * (MAX_SAMPLES + BINS),
        )
    else:
        thresholds = torch.full((rows,), LEAST_FINITE, dtype=torch.float32, device=device)
    arguments.thresholds, arguments.stride, arguments.offset = thresholds.data_ptr(), 1, 0
    arguments.counts, arguments.new_counts = None, counts[0].data_ptr()
    score(SCAN, k, scale)
    arguments.counts, arguments.new_counts = counts[0].data_ptr(), counts[1].data_ptr()
    score(REDO, k, scale)
    launch(
        "topk_entries",
        rows,
        (
            entries,
            counts[1],
            starts,
            ends,
            out,
            ctypes.c_int64(out.stride(0)),
            *map(ctypes.c_int32, (LISTS * buffers.parts, buffers.capacity, keys, topk, capacity_of(topk))),
        ),
        shared_bytes(topk),
        shared_bytes(CUDA_MAX_TOPK),
    )


def definitions(source: str, tuning: IndexerTuning, *, heads: int = 64, sample: int = 0) -> dict[str, int]:
    """Preprocessor definitions of a source; sample 1: the scan that stores the logits of a sample of the keys."""
    return {"HEADS": heads, "RELU": tuning.relu, "STAGES": STAGES[source]} | (
        {"SAMPLE": sample} if source == SCAN else {}
    )


class Arguments(ctypes.Structure):
    """`Arguments` of indexer.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_scale", "weights", "ks", "ke", "thresholds")),
        *((name, ctypes.c_void_p) for name in ("entries", "counts", "new_counts", "sampled")),
        *((name, ctypes.c_int32) for name in ("rows", "keys", "stride", "offset", "topk", "capacity", "parts")),
        ("all_keys", ctypes.c_int32),
    )


def tensor_map(rows: torch.Tensor, box: int) -> ctypes.Array[ctypes.c_uint64]:
    """How the device copies boxes of rows to shared memory, swizzled over 128 bytes, with zeros behind the last row.

    Args:
        rows: [rows, 128] of one byte each, contiguous, at a multiple of 16 bytes.
        box: rows of a copy, at most 256.

    Raises:
        KernelBuildError: the driver refuses it.
    """
    from cuda.bindings import driver

    from nsa_plugin.kernels.cuda.nvrtc import KernelBuildError

    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        rows.data_ptr(),
        [driver.cuuint64_t(DIM), driver.cuuint64_t(rows.shape[0])],
        [driver.cuuint64_t(DIM)],
        [driver.cuuint32_t(DIM), driver.cuuint32_t(box)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise KernelBuildError(f"{OP}: a tensor map of {rows.shape[0]} rows failed: {error.name}")
    return (ctypes.c_uint64 * 16).from_buffer_copy(ctypes.string_at(int(encoded.getPtr()), 128))


def _aligned(values: torch.Tensor) -> torch.Tensor:
    values = values.contiguous()
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()
