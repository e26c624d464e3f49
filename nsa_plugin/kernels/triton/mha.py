"""Dense multi-head attention over ragged requests in Triton, in the manner of FlashAttention-2.

`mha` has the signature and results of `nsa_plugin.kernels.mha`'s reference, for heads of up to 256
values and inputs of float32, bfloat16 or float16. A program takes one head and up to BLOCK_M query rows
of one request. Which ones is found on the device: tile t belongs to the last request i with

    cu_seqlens_q[i] // BLOCK_M + i <= t

which leaves every request enough tiles, so the grid follows from the shapes alone: nothing is read on
the host, and a call can be captured in a CUDA graph. The rows after the last request are one more
"request", without keys. Boundaries on the device that the reference would refuse are clamped into q, k and v.

Products take the inputs' own type if all three have one type, else float32; sums are float32. The
probabilities are rounded to the type of the products, as in FlashAttention. Equal inputs give
bit-identical results.

Source of the algorithm: FlashAttention-2 (arXiv 2307.08691).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.mha import MhaCall, MhaOutput, mha_op
from nsa_plugin.kernels.triton.device import facts_of
from nsa_plugin.kernels.triton.sizes import power_of_2
from nsa_plugin.kernels.triton.tiles import mha_tile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
MAX_HEAD_DIM = 256

LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_rows(base, rows, row_stride, columns, column_stride, rows_end, DIM: tl.constexpr, MASKED: tl.constexpr):
    """[rows, columns] of a matrix; zeros from `rows_end` on if MASKED, and beyond DIM columns."""
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :] * column_stride
    if MASKED:
        return tl.load(pointers, mask=(rows[:, None] < rows_end) & (columns[None, :] < DIM), other=0.0)
    if columns.shape[0] == DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)


@triton.jit
def _attend(
    acc, row_max, row_sum,
    q_low, q_high, seen,
    k_base, k_row, k_column, v_base, v_row, v_column,
    first, last, keys, scale_log2,
    D_LOW: tl.constexpr, D_HIGH: tl.constexpr, D_HIGH_USED: tl.constexpr, D_LOW_USED: tl.constexpr,
    D_V: tl.constexpr, D_V_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys first to last (in steps of BLOCK_N) into the running softmax; MASKED where rows see not all."""
    low = tl.arange(0, D_LOW)
    values = tl.arange(0, D_V_BLOCK)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k_low = _load_rows(k_base, n, k_row, low, k_column, keys, D_LOW_USED, MASKED).to(COMPUTE)
        logits = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if D_HIGH > 0:
            high = tl.arange(0, D_HIGH)
            k_high = _load_rows(k_base + D_LOW * k_column, n, k_row, high, k_column, keys, D_HIGH_USED, MASKED).to(
                COMPUTE
            )
            logits = tl.dot(q_high, tl.trans(k_high), logits, input_precision="ieee")
        logits = logits * scale_log2
        if MASKED:
            logits = tl.where(n[None, :] < seen[:, None], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # A row that has seen no key yet keeps -inf, from which nothing may be subtracted.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        v = _load_rows(v_base, n, v_row, values, v_column, keys, D_V, MASKED).to(COMPUTE)
        acc = tl.dot(weights.to(COMPUTE), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["tokens", "kv_tokens", "requests"])
def _mha_kernel(
    q, k, v, out, lse, cu_q, cu_k,
    tokens, kv_tokens, requests, scale_log2,
    q_row, q_head, q_column, k_row, k_head, k_column, v_row, v_head, v_column,
    out_row, out_head, out_column, lse_row,
    cu_q_stride, cu_k_stride,
    CAUSAL: tl.constexpr, HAS_LSE: tl.constexpr,
    D_LOW: tl.constexpr, D_LOW_USED: tl.constexpr, D_HIGH: tl.constexpr, D_HIGH_USED: tl.constexpr,
    D_V: tl.constexpr, D_V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    # Late tiles of a long request see the most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)

    # The request of this tile, `requests` for the rows after the last one.
    request = requests * 0
    after = requests
    while request < after:
        middle = (request + after + 1) // 2
        if tl.load(cu_q + middle * cu_q_stride).to(tl.int32) // BLOCK_M + middle <= tile:
            request = middle
        else:
            after = middle - 1
    q_start = tl.load(cu_q + request * cu_q_stride).to(tl.int32)
    tile_in_request = tile - (q_start // BLOCK_M + request)
    q_start = tl.minimum(tl.maximum(q_start, 0), tokens)
    q_end = tokens
    k_start = tokens * 0
    keys = tokens * 0
    if request < requests:
        q_end = tl.minimum(tl.maximum(tl.load(cu_q + (request + 1) * cu_q_stride).to(tl.int32), q_start), tokens)
        k_start = tl.load(cu_k + request * cu_k_stride).to(tl.int32)
        k_start = tl.minimum(tl.maximum(k_start, 0), kv_tokens)
        k_end = tl.load(cu_k + (request + 1) * cu_k_stride).to(tl.int32)
        keys = tl.minimum(tl.maximum(k_end, k_start), kv_tokens) - k_start
    queries = q_end - q_start
    m_start = tile_in_request * BLOCK_M
    if (m_start < 0) | (m_start >= queries):
        return

    m = m_start + tl.arange(0, BLOCK_M)
    in_request = m < queries
    rows = (q_start + m).to(tl.int64)
    low = tl.arange(0, D_LOW)
    q_base = q + head * q_head
    q_low = _load_rows(q_base, q_start + m, q_row, low, q_column, q_end, D_LOW_USED, True).to(COMPUTE)
    if D_HIGH > 0:
        high = tl.arange(0, D_HIGH)
        q_high = _load_rows(q_base + D_LOW * q_column, q_start + m, q_row, high, q_column, q_end, D_HIGH_USED, True).to(
            COMPUTE
        )
    else:
        q_high = q_low

    if CAUSAL:
        seen = tl.minimum(keys - queries + m + 1, keys)
        least = tl.maximum(tl.minimum(keys - queries + m_start + 1, keys), 0)
        most = tl.maximum(tl.minimum(keys - queries + m_start + BLOCK_M, keys), 0)
    else:
        seen = keys + tl.zeros([BLOCK_M], dtype=tl.int32)
        least = keys
        most = keys
    whole = least // BLOCK_N * BLOCK_N
    k_base = k + k_start.to(tl.int64) * k_row + head * k_head
    v_base = v + k_start.to(tl.int64) * v_row + head * v_head

    acc = tl.zeros([BLOCK_M, D_V_BLOCK], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_low, q_high, seen, k_base, k_row, k_column, v_base, v_row, v_column,
        0, whole, keys, scale_log2,
        D_LOW, D_HIGH, D_HIGH_USED, D_LOW_USED, D_V, D_V_BLOCK, BLOCK_N, COMPUTE, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_low, q_high, seen, k_base, k_row, k_column, v_base, v_row, v_column,
        whole, most, keys, scale_log2,
        D_LOW, D_HIGH, D_HIGH_USED, D_LOW_USED, D_V, D_V_BLOCK, BLOCK_N, COMPUTE, True,
    )  # fmt: skip

    # `seen`, not the sum, says what an empty row is: a NaN logit must stay visible.
    is_empty = seen <= 0
    acc = tl.where(is_empty[:, None], 0.0, acc / tl.where(is_empty, 1.0, row_sum)[:, None])
    columns = tl.arange(0, D_V_BLOCK)
    out_pointers = out + rows[:, None] * out_row + head * out_head + columns[None, :] * out_column
    tl.store(out_pointers, acc, mask=in_request[:, None] & (columns[None, :] < D_V))
    if HAS_LSE:
        row_lse = (row_max + tl.log2(tl.where(is_empty, 1.0, row_sum))) * LN_2
        tl.store(lse + rows * lse_row + head, tl.where(is_empty, float("inf"), row_lse), mask=in_request)


def attend(call: MhaCall) -> MhaOutput:
    """Attend in Triton: any strides, up to 256 values a head; boundaries are never read on the host."""
    q, k, v, out, cu_q, cu_k = call.q, call.k, call.v, call.out, call.cu_seqlens_q, call.cu_seqlens_k
    (tokens, heads, d_qk), d_v = q.shape, v.shape[-1]
    fits = 0 < d_qk <= MAX_HEAD_DIM and 0 < d_v <= MAX_HEAD_DIM
    call.require(fits, f"q and v have heads of {d_qk} and {d_v} values; this provider takes 1 to {MAX_HEAD_DIM}")
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if call.return_lse else None
    if q.numel() == 0:
        return MhaOutput(out, lse)

    d_low = max(16, 1 << (d_qk.bit_length() - 1))
    d_high = max(16, power_of_2(d_qk - d_low)) if d_qk > d_low else 0
    d_v_block = max(16, power_of_2(d_v))
    same = q.dtype == k.dtype == v.dtype
    dtype = q.dtype if same else torch.float32
    facts, widths = facts_of(q.device), (d_low + d_high, d_v_block)
    tile = mha_tile(facts.architecture, facts.shared_memory, *widths, dtype.itemsize, call.max_seqlen_q)
    requests = len(cu_q) - 1
    grid = (tokens // tile.block_m + requests + 1, heads)
    with torch.cuda.device_of(q):
        _mha_kernel[grid](
            q, k, v, out, out if lse is None else lse, cu_q, cu_k,
            tokens, k.shape[0], requests, call.scale * LOG2_E,
            *q.stride(), *k.stride(), *v.stride(), *out.stride(), heads,
            cu_q.stride(0), cu_k.stride(0),
            CAUSAL=call.causal, HAS_LSE=call.return_lse,
            D_LOW=d_low, D_LOW_USED=min(d_low, d_qk), D_HIGH=d_high, D_HIGH_USED=max(d_qk - d_low, 0),
            D_V=d_v, D_V_BLOCK=d_v_block,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            # The interpreter's product of bfloat16 is wrong.
            COMPUTE=tl.float32 if q.device.type == "cpu" else COMPUTE_TYPES[dtype],
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return MhaOutput(out, lse)


mha = mha_op(attend, DTYPES)
