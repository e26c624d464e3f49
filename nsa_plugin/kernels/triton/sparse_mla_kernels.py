"""Device code of the portable sparse MLA: one attention kernel for every cache layout, and a combine.

A program owns one query row, a tile of heads and a part of the row's keys, and walks blocks of keys.

fp8 codes go to float16 (exact) and straight into the products; their scales never touch the keys.
A tile's scale multiplies its part of the scores, and the weights that meet the tile as values:

    score[h, j]  = sum over tiles t of scale[t, j] * dot(q[t, h], code[t, j])
    weight[t, j] = exp2(score[h, j] - m[h]) * scale[t, j]

float16 has little range, so it is kept in range by two exact means: every head's query is divided by
the power of two of its largest value, and the running reference `m` is the maximum of
`score + log2(largest scale of the key)`, which bounds every weight by 1.

All logits are in base 2 here.
"""

# mypy: disable-error-code="no-untyped-def"
# What Triton compiles has no Python types.

from __future__ import annotations

import triton
import triton.language as tl

# Values of the constexpr LAYOUT.
NO_CACHE = tl.constexpr(0)
PLAIN = tl.constexpr(1)
V32_FP8 = tl.constexpr(2)
V4_FP8 = tl.constexpr(3)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))

CONVERT_4_CODES = tl.constexpr(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"
)

# Below this a scale counts as this in the running reference, so that a row of zeros, whose scale is
# the writer's floor (2 ** -126), cannot make the sum of exponentials overflow.
LEAST_SCALE = tl.constexpr(2.0**-60)


@triton.jit
def _head_norms(q_row, offs_h, head_ok, q_stride_h, q_stride_d, D_QK: tl.constexpr):
    """Powers of two: what to multiply a head's query with, and its inverse for the scores. [heads] each."""
    offs_d = tl.arange(0, 512)
    nope = tl.load(q_row + offs_h[:, None] * q_stride_h + offs_d[None, :] * q_stride_d, head_ok[:, None], other=0.0)
    amax = tl.max(tl.abs(nope.to(tl.float32)), 1)
    if D_QK > 512:
        offs_t = 512 + tl.arange(0, 64)
        tail = tl.load(q_row + offs_h[:, None] * q_stride_h + offs_t[None, :] * q_stride_d, head_ok[:, None], other=0.0)
        amax = tl.maximum(amax, tl.max(tl.abs(tail.to(tl.float32)), 1))
    exponent = tl.minimum(amax.to(tl.int32, bitcast=True) >> 23, 253)
    norm = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = (exponent << 23).to(tl.float32, bitcast=True)
    return norm, inverse


@triton.jit
def _query_tile(
    q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, START: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr
):
    """Values [START, START + WIDTH) of a tile of heads, normalised: [heads, WIDTH]."""
    offs_d = START + tl.arange(0, WIDTH)
    tile = tl.load(q_row + offs_h[:, None] * q_stride_h + offs_d[None, :] * q_stride_d, head_ok[:, None], other=0.0)
    return (tile.to(tl.float32) * norm[:, None]).to(DTYPE)


@triton.jit
def _row_tile(base, row, ok, stride, START: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Values [START, START + WIDTH) of float rows at element offsets `row`; zeros where not ok."""
    offs = START + tl.arange(0, WIDTH)
    tile = tl.load(base + row[:, None] + offs[None, :] * stride, ok[:, None], other=0.0)
    if base.dtype.element_ty == tl.float64:
        tile = tile.to(tl.float32)
    return tile.to(DTYPE)


@triton.jit
def _code_tile(base, row, ok, START: tl.constexpr, WIDTH: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """fp8 codes [START, START + WIDTH) of rows at byte offsets `row`, converted exactly.

    Without native fp8, e4m3's bits are moved into float16's fields, which divides by 256: the scales
    make up for it. (A NaN code is then no NaN.)
    """
    offs = START + tl.arange(0, WIDTH)
    codes = tl.load(base + row[:, None] + offs[None, :], ok[:, None], other=0)
    if NATIVE_FP8 and DTYPE == tl.float16:  # noqa: SIM300
        # As opaque assembly, so that the compiler converts once and lets both products read the result
        # from shared memory; it would otherwise convert for each of them, and spill registers.
        return tl.inline_asm_elementwise(CONVERT_4_CODES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)
    if NATIVE_FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def _exponent_scale(packed, TILE: tl.constexpr, UNIT: tl.constexpr):
    """float32 scale of ue8m0 byte TILE of 8 packed bytes."""
    exponent = ((packed >> (8 * TILE)) & 0xFF).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True) * UNIT


@triton.jit
def _weigh(acc, alpha, weights, keys):
    """acc [heads, d] * alpha [heads] + weights [heads, keys] x keys [keys, d]."""
    return tl.dot(weights.to(keys.dtype), keys, acc * alpha[:, None], input_precision="ieee")


@triton.jit
def _attend(
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    m,
    total,
    top,
    q_row,
    offs_h,
    head_ok,
    norm,
    factor,
    q_stride_h,
    q_stride_d,
    data,
    page_stride,
    row_stride,
    value_stride,
    num_slots,
    row_indices,
    index_stride,
    length,
    first,
    end,
    LAYOUT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D_QK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WANT_TOP: tl.constexpr,
    WEIGHT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PLAIN_DTYPE: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    TAIL_DTYPE: tl.constexpr,
):
    """Attend the keys of one cache that entries [first, end) of a row's indices name.

    a0 to a7: value accumulators [heads, 512 / TILES], the last four used if TILES is 8. [heads] each:
    m, the reference; total, the sum of exp2(score - m); top, the largest score if WANT_TOP.
    """
    W: tl.constexpr = 512 // TILES
    HEAD_DTYPE: tl.constexpr = PLAIN_DTYPE if LAYOUT == PLAIN else CODE_DTYPE
    UNIT: tl.constexpr = 1.0 if NATIVE_FP8 else 256.0
    q0 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 0, W, HEAD_DTYPE)
    q1 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, W, W, HEAD_DTYPE)
    q2 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 2 * W, W, HEAD_DTYPE)
    q3 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 3 * W, W, HEAD_DTYPE)
    if TILES == 8:
        # The last 64 values of a V4 row are its bfloat16 tail, which is a tile of the values too.
        LAST_DTYPE: tl.constexpr = TAIL_DTYPE if LAYOUT == V4_FP8 else HEAD_DTYPE
        q4 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 4 * W, W, HEAD_DTYPE)
        q5 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 5 * W, W, HEAD_DTYPE)
        q6 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 6 * W, W, HEAD_DTYPE)
        q7 = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 7 * W, W, LAST_DTYPE)
    if D_QK > 512:
        REST_DTYPE: tl.constexpr = PLAIN_DTYPE if LAYOUT == PLAIN else TAIL_DTYPE
        q_rest = _query_tile(q_row, offs_h, head_ok, norm, q_stride_h, q_stride_d, 512, 64, REST_DTYPE)
    offs_k = tl.arange(0, BLOCK_K)

    for start in range(first, end, BLOCK_K):
        entry = start + offs_k
        index = tl.load(row_indices + entry.to(tl.int64) * index_stride, entry < length, other=-1)
        ok = (index >= 0) & (index < num_slots)
        slot = tl.where(ok, index, 0)
        page = slot // PAGE_SIZE
        position = (slot - page * PAGE_SIZE).to(tl.int64)
        page = page.to(tl.int64)
        row = page * page_stride + position * row_stride

        if LAYOUT == PLAIN:
            k0 = _row_tile(data, row, ok, value_stride, 0, W, PLAIN_DTYPE)
            k1 = _row_tile(data, row, ok, value_stride, W, W, PLAIN_DTYPE)
            k2 = _row_tile(data, row, ok, value_stride, 2 * W, W, PLAIN_DTYPE)
            k3 = _row_tile(data, row, ok, value_stride, 3 * W, W, PLAIN_DTYPE)
            score = tl.dot(q0, tl.trans(k0), input_precision="ieee")
            score = tl.dot(q1, tl.trans(k1), score, input_precision="ieee")
            score = tl.dot(q2, tl.trans(k2), score, input_precision="ieee")
            score = tl.dot(q3, tl.trans(k3), score, input_precision="ieee")
            if TILES == 8:
                k4 = _row_tile(data, row, ok, value_stride, 4 * W, W, PLAIN_DTYPE)
                k5 = _row_tile(data, row, ok, value_stride, 5 * W, W, PLAIN_DTYPE)
                k6 = _row_tile(data, row, ok, value_stride, 6 * W, W, PLAIN_DTYPE)
                k7 = _row_tile(data, row, ok, value_stride, 7 * W, W, PLAIN_DTYPE)
                score = tl.dot(q4, tl.trans(k4), score, input_precision="ieee")
                score = tl.dot(q5, tl.trans(k5), score, input_precision="ieee")
                score = tl.dot(q6, tl.trans(k6), score, input_precision="ieee")
                score = tl.dot(q7, tl.trans(k7), score, input_precision="ieee")
            if D_QK > 512:
                k_rest = _row_tile(data, row, ok, value_stride, 512, 64, PLAIN_DTYPE)
                score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        elif LAYOUT == V32_FP8:
            # Read as halves of words: byte offsets of a row are multiples of 4 (656 = 4 * 164).
            row_scales = data.to(tl.pointer_type(tl.float32)) + page * (page_stride // 4) + position * 164 + 128
            row_tail = page * (page_stride // 2) + position * 328 + 264
            k0 = _code_tile(data, row, ok, 0, W, NATIVE_FP8, CODE_DTYPE)
            k1 = _code_tile(data, row, ok, W, W, NATIVE_FP8, CODE_DTYPE)
            k2 = _code_tile(data, row, ok, 2 * W, W, NATIVE_FP8, CODE_DTYPE)
            k3 = _code_tile(data, row, ok, 3 * W, W, NATIVE_FP8, CODE_DTYPE)
            k_rest = _row_tile(data.to(tl.pointer_type(tl.bfloat16)), row_tail, ok, 1, 0, 64, TAIL_DTYPE)
            s0 = tl.load(row_scales, ok, other=0.0) * UNIT
            s1 = tl.load(row_scales + 1, ok, other=0.0) * UNIT
            s2 = tl.load(row_scales + 2, ok, other=0.0) * UNIT
            s3 = tl.load(row_scales + 3, ok, other=0.0) * UNIT
            score = tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            score += tl.dot(q0, tl.trans(k0), input_precision="ieee") * s0[None, :]
            score += tl.dot(q1, tl.trans(k1), input_precision="ieee") * s1[None, :]
            score += tl.dot(q2, tl.trans(k2), input_precision="ieee") * s2[None, :]
            score += tl.dot(q3, tl.trans(k3), input_precision="ieee") * s3[None, :]
            largest = tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))
        else:
            # A page is PAGE_SIZE rows of 448 codes and 64 bfloat16, then PAGE_SIZE x 8 bytes of exponents.
            page_scales = PAGE_SIZE * 72
            packed_at = data.to(tl.pointer_type(tl.int64)) + page * (page_stride // 8) + position + page_scales
            row_tail = page * (page_stride // 2) + position * 288 + 224
            k0 = _code_tile(data, row, ok, 0, W, NATIVE_FP8, CODE_DTYPE)
            k1 = _code_tile(data, row, ok, W, W, NATIVE_FP8, CODE_DTYPE)
            k2 = _code_tile(data, row, ok, 2 * W, W, NATIVE_FP8, CODE_DTYPE)
            k3 = _code_tile(data, row, ok, 3 * W, W, NATIVE_FP8, CODE_DTYPE)
            k4 = _code_tile(data, row, ok, 4 * W, W, NATIVE_FP8, CODE_DTYPE)
            k5 = _code_tile(data, row, ok, 5 * W, W, NATIVE_FP8, CODE_DTYPE)
            k6 = _code_tile(data, row, ok, 6 * W, W, NATIVE_FP8, CODE_DTYPE)
            k7 = _row_tile(data.to(tl.pointer_type(tl.bfloat16)), row_tail, ok, 1, 0, W, TAIL_DTYPE)
            packed = tl.load(packed_at, ok, other=0)
            s0 = _exponent_scale(packed, 0, UNIT)
            s1 = _exponent_scale(packed, 1, UNIT)
            s2 = _exponent_scale(packed, 2, UNIT)
            s3 = _exponent_scale(packed, 3, UNIT)
            s4 = _exponent_scale(packed, 4, UNIT)
            s5 = _exponent_scale(packed, 5, UNIT)
            s6 = _exponent_scale(packed, 6, UNIT)
            score = tl.dot(q7, tl.trans(k7), input_precision="ieee")
            score += tl.dot(q0, tl.trans(k0), input_precision="ieee") * s0[None, :]
            score += tl.dot(q1, tl.trans(k1), input_precision="ieee") * s1[None, :]
            score += tl.dot(q2, tl.trans(k2), input_precision="ieee") * s2[None, :]
            score += tl.dot(q3, tl.trans(k3), input_precision="ieee") * s3[None, :]
            score += tl.dot(q4, tl.trans(k4), input_precision="ieee") * s4[None, :]
            score += tl.dot(q5, tl.trans(k5), input_precision="ieee") * s5[None, :]
            score += tl.dot(q6, tl.trans(k6), input_precision="ieee") * s6[None, :]
            largest = tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))
            largest = tl.maximum(largest, tl.maximum(tl.maximum(s4, s5), s6))

        score = tl.where(ok[None, :], score * factor[:, None], NEG_INF)
        if LAYOUT == PLAIN:
            reference = tl.max(score, 1)
            if WANT_TOP:
                top = tl.maximum(top, reference)
        else:
            reference = tl.max(score + tl.log2(tl.maximum(largest, LEAST_SCALE))[None, :], 1)
            if WANT_TOP:
                top = tl.maximum(top, tl.max(score, 1))
        m_next = tl.maximum(m, reference)
        # Without a key so far the reference is -inf, and -inf - -inf is NaN.
        safe = tl.where(m_next == NEG_INF, 0.0, m_next)
        alpha = tl.exp2(m - safe)
        p = tl.exp2(score - safe[:, None])
        total = total * alpha + tl.sum(p, 1)
        m = m_next
        if WEIGHT != 1.0:
            p *= WEIGHT
        if LAYOUT == PLAIN:
            a0 = _weigh(a0, alpha, p, k0)
            a1 = _weigh(a1, alpha, p, k1)
            a2 = _weigh(a2, alpha, p, k2)
            a3 = _weigh(a3, alpha, p, k3)
        else:
            a0 = _weigh(a0, alpha, p * s0[None, :], k0)
            a1 = _weigh(a1, alpha, p * s1[None, :], k1)
            a2 = _weigh(a2, alpha, p * s2[None, :], k2)
            a3 = _weigh(a3, alpha, p * s3[None, :], k3)
        if TILES == 8:
            if LAYOUT == PLAIN:
                a4 = _weigh(a4, alpha, p, k4)
                a5 = _weigh(a5, alpha, p, k5)
                a6 = _weigh(a6, alpha, p, k6)
            else:
                a4 = _weigh(a4, alpha, p * s4[None, :], k4)
                a5 = _weigh(a5, alpha, p * s5[None, :], k5)
                a6 = _weigh(a6, alpha, p * s6[None, :], k6)
            a7 = _weigh(a7, alpha, p, k7)
    return a0, a1, a2, a3, a4, a5, a6, a7, m, total, top


@triton.jit
def _store_tile(out_row, acc, weight, offs_h, head_ok, out_stride_h, out_stride_d, START: tl.constexpr):
    offs_d = START + tl.arange(0, acc.shape[1])
    at = out_row + offs_h[:, None] * out_stride_h + offs_d[None, :] * out_stride_d
    tl.store(at, (acc * weight[:, None]).to(out_row.dtype.element_ty), head_ok[:, None])


@triton.jit(do_not_specialize=["num_slots", "extra_num_slots", "topk", "extra_topk", "rows", "s_q", "heads", "splits"])
def sparse_mla_kernel(
    q,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_d,
    out,
    out_stride_split,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    out_stride_d,
    lse,
    max_logits,
    attn_sink,
    sink_stride,
    data,
    page_stride,
    row_stride,
    value_stride,
    num_slots,
    indices,
    index_stride_b,
    index_stride_s,
    index_stride_k,
    topk_length,
    length_stride_b,
    length_stride_s,
    topk,
    extra_data,
    extra_page_stride,
    extra_row_stride,
    extra_value_stride,
    extra_num_slots,
    extra_indices,
    extra_index_stride_b,
    extra_index_stride_s,
    extra_index_stride_k,
    extra_topk_length,
    extra_length_stride_b,
    extra_length_stride_s,
    extra_topk,
    scale,
    rows,
    s_q,
    heads,
    splits,
    LAYOUT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EXTRA_LAYOUT: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    D_QK: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PLAIN_DTYPE: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    TAIL_DTYPE: tl.constexpr,
):
    """One query row, BLOCK_H heads, part program_id(1) of `splits` of the row's keys.

    If WHOLE (splits is 1) it writes results: out, lse and max_logits (natural log), the sink applied.
    Otherwise partial ones for `combine_kernel`: out normalised by its own part, lse and max_logits in
    base 2, [splits, rows, heads], -inf for a part without a key. `max_logits` may be None.
    """
    HAS_FP8: tl.constexpr = LAYOUT != PLAIN or (EXTRA_LAYOUT != PLAIN and EXTRA_LAYOUT != NO_CACHE)
    # Without fp8 the running reference is the maximum.
    WANT_TOP: tl.constexpr = max_logits is not None and HAS_FP8
    # Weights of at most 1 reach further down in float16 when they start at 2 ** 15.
    WEIGHT: tl.constexpr = 32768.0 if HAS_FP8 else 1.0
    head_tiles = tl.cdiv(heads, BLOCK_H)
    row = tl.program_id(0) // head_tiles
    split = tl.program_id(1)
    b, s = (row // s_q).to(tl.int64), (row % s_q).to(tl.int64)
    head = (tl.program_id(0) % head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < heads
    offs_h = head.to(tl.int64)
    q_row = q + b * q_stride_b + s * q_stride_s

    length = topk
    if topk_length is not None:
        stored = tl.load(topk_length + b * length_stride_b + s * length_stride_s)
        length = tl.minimum(tl.maximum(stored, 0), topk).to(tl.int32)
    blocks = tl.cdiv(length, BLOCK_K)
    extra_length = 0
    extra_blocks = 0
    if EXTRA_LAYOUT != NO_CACHE:
        extra_length = extra_topk
        if extra_topk_length is not None:
            stored = tl.load(extra_topk_length + b * extra_length_stride_b + s * extra_length_stride_s)
            extra_length = tl.minimum(tl.maximum(stored, 0), extra_topk).to(tl.int32)
        extra_blocks = tl.cdiv(extra_length, BLOCK_K)
    # Parts are cut from what the lengths leave, so that all of them have work whatever the lengths are.
    part = tl.cdiv(blocks + extra_blocks, splits)
    first_block = split * part
    end_block = tl.minimum(first_block + part, blocks + extra_blocks)

    if HAS_FP8:
        norm, inverse = _head_norms(q_row, offs_h, head_ok, q_stride_h, q_stride_d, D_QK)
    else:
        norm = tl.full([BLOCK_H], 1.0, tl.float32)
        inverse = norm
    factor = inverse * (scale * LOG2_E)

    a0 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a1 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a2 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a3 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a4 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a5 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a6 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    a7 = tl.zeros([BLOCK_H, 512 // TILES], tl.float32)
    m = tl.full([BLOCK_H], NEG_INF, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    top = m
    a0, a1, a2, a3, a4, a5, a6, a7, m, total, top = _attend(
        a0,
        a1,
        a2,
        a3,
        a4,
        a5,
        a6,
        a7,
        m,
        total,
        top,
        q_row,
        offs_h,
        head_ok,
        norm,
        factor,
        q_stride_h,
        q_stride_d,
        data,
        page_stride,
        row_stride,
        value_stride,
        num_slots,
        indices + b * index_stride_b + s * index_stride_s,
        index_stride_k,
        length,
        tl.minimum(first_block, blocks) * BLOCK_K,
        tl.minimum(end_block, blocks) * BLOCK_K,
        LAYOUT,
        PAGE_SIZE,
        D_QK,
        TILES,
        BLOCK_K,
        WANT_TOP,
        WEIGHT,
        NATIVE_FP8,
        PLAIN_DTYPE,
        CODE_DTYPE,
        TAIL_DTYPE,
    )
    if EXTRA_LAYOUT != NO_CACHE:
        a0, a1, a2, a3, a4, a5, a6, a7, m, total, top = _attend(
            a0,
            a1,
            a2,
            a3,
            a4,
            a5,
            a6,
            a7,
            m,
            total,
            top,
            q_row,
            offs_h,
            head_ok,
            norm,
            factor,
            q_stride_h,
            q_stride_d,
            extra_data,
            extra_page_stride,
            extra_row_stride,
            extra_value_stride,
            extra_num_slots,
            extra_indices + b * extra_index_stride_b + s * extra_index_stride_s,
            extra_index_stride_k,
            extra_length,
            tl.maximum(first_block - blocks, 0) * BLOCK_K,
            tl.maximum(end_block - blocks, 0) * BLOCK_K,
            EXTRA_LAYOUT,
            EXTRA_PAGE_SIZE,
            D_QK,
            TILES,
            BLOCK_K,
            WANT_TOP,
            WEIGHT,
            NATIVE_FP8,
            PLAIN_DTYPE,
            CODE_DTYPE,
            TAIL_DTYPE,
        )

    if not HAS_FP8:
        top = m
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    base2_lse = tl.where(empty, NEG_INF, m + tl.log2(total))
    weight = tl.where(empty, 0.0, 1.0 / (total * WEIGHT))
    statistic = (split.to(tl.int64) * rows + row) * heads + offs_h
    if WHOLE:
        if attn_sink is not None:
            sink = tl.load(attn_sink + offs_h * sink_stride, head_ok, other=0.0)
            weight /= 1.0 + tl.exp2(sink * LOG2_E - tl.where(empty, 0.0, base2_lse))
        tl.store(lse + statistic, tl.where(empty, POS_INF, base2_lse * LN_2), head_ok)
        if max_logits is not None:
            tl.store(max_logits + statistic, top * LN_2, head_ok)
    else:
        tl.store(lse + statistic, base2_lse, head_ok)
        if max_logits is not None:
            tl.store(max_logits + statistic, top, head_ok)

    W: tl.constexpr = 512 // TILES
    out_row = out + split.to(tl.int64) * out_stride_split + b * out_stride_b + s * out_stride_s
    _store_tile(out_row, a0, weight, offs_h, head_ok, out_stride_h, out_stride_d, 0)
    _store_tile(out_row, a1, weight, offs_h, head_ok, out_stride_h, out_stride_d, W)
    _store_tile(out_row, a2, weight, offs_h, head_ok, out_stride_h, out_stride_d, 2 * W)
    _store_tile(out_row, a3, weight, offs_h, head_ok, out_stride_h, out_stride_d, 3 * W)
    if TILES == 8:
        _store_tile(out_row, a4, weight, offs_h, head_ok, out_stride_h, out_stride_d, 4 * W)
        _store_tile(out_row, a5, weight, offs_h, head_ok, out_stride_h, out_stride_d, 5 * W)
        _store_tile(out_row, a6, weight, offs_h, head_ok, out_stride_h, out_stride_d, 6 * W)
        _store_tile(out_row, a7, weight, offs_h, head_ok, out_stride_h, out_stride_d, 7 * W)


@triton.jit(do_not_specialize=["s_q", "heads", "splits"])
def combine_kernel(
    part_out,
    part_lse,
    part_max,
    out,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    out_stride_d,
    lse,
    max_logits,
    attn_sink,
    sink_stride,
    s_q,
    heads,
    splits,
    BLOCK_SPLITS: tl.constexpr,
):
    """Put the parts of one row and head together, and apply the sink.

    part_out [splits, rows, heads, 512] float32, part_lse and part_max [splits, rows, heads] in base 2, as
    `sparse_mla_kernel` writes them.
    """
    item = tl.program_id(0).to(tl.int64)
    row, head = item // heads, item % heads
    items = tl.num_programs(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_SPLITS)
    logs = tl.load(part_lse + parts.to(tl.int64) * items + item, parts < splits, other=NEG_INF)
    # Not so where one is NaN, which the largest of them leaves out.
    empty = tl.sum((logs != NEG_INF).to(tl.int32), 0) == 0
    top = tl.max(logs, 0)
    safe = tl.where(top == NEG_INF, 0.0, top)
    total = tl.where(empty, 1.0, tl.sum(tl.exp2(logs - safe), 0))
    base2_lse = safe + tl.log2(total)
    factor = tl.where(empty, 0.0, 1.0 / total)
    if attn_sink is not None:
        sink = tl.load(attn_sink + head * sink_stride)
        factor /= 1.0 + tl.exp2(sink * LOG2_E - base2_lse)
    offs_d = tl.arange(0, 512)
    acc = tl.zeros([512], tl.float32)
    for part in range(splits):
        weight = tl.exp2(tl.load(part_lse + part * items + item) - safe)
        acc += weight * tl.load(part_out + (part * items + item) * 512 + offs_d)
    at = out + (row // s_q) * out_stride_b + (row % s_q) * out_stride_s + head * out_stride_h + offs_d * out_stride_d
    tl.store(at, (acc * factor).to(out.dtype.element_ty))
    tl.store(lse + item, tl.where(empty, POS_INF, base2_lse * LN_2))
    if max_logits is not None:
        tops = tl.load(part_max + parts.to(tl.int64) * items + item, parts < splits, other=NEG_INF)
        tl.store(max_logits + item, tl.max(tops, 0) * LN_2)
