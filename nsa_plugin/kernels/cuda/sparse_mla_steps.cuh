// The three steps of sparse_mla.cu on a block of keys: S = K Q^T, P = exp(S), O = V^T P.
#pragma once

#include "sparse_mla_copies.cuh"
#include "sparse_mla_output.cuh"

// Steps that share a scale: codes of a warp's tiles of 16 keys times the queries.
DEVICE void multiply_codes(float (&acc)[TOGETHER][QUERY_TILES][4], u32 address, const Shared& shared, const Query& query,
                           int first, Part part, int lane) {
#pragma unroll
    for (int s = 0; s < SCALED; s += 2) {
        u32 b[2][QUERY_TILES][2];
        fragments(b[0], shared, query, first + s, part, lane);
        fragments(b[1], shared, query, first + s + 1, part, lane);
#pragma unroll
        for (int m = 0; m < TOGETHER; ++m) {
            u32 codes[4];
            ldmatrix(codes, address + m * 16 * ROW + (first + s) * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                key_codes(codes[2 * half], a[0], a[2]);
                key_codes(codes[2 * half + 1], a[1], a[3]);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; ++n) mma_f16(acc[m][n], a, b[half][n][0], b[half][n][1]);
            }
        }
    }
}

// sum += acc, times a factor for each of the two rows of a thread.
DEVICE void add_scaled(float (&sum)[QUERY_TILES][4], const float (&acc)[QUERY_TILES][4], float lower, float upper) {
    lower *= 1.f / KEY_UNIT, upper *= 1.f / KEY_UNIT;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        sum[n][0] += acc[n][0] * lower;
        sum[n][1] += acc[n][1] * lower;
        sum[n][2] += acc[n][2] * upper;
        sum[n][3] += acc[n][3] * upper;
    }
}

// Scale number `tile` of a row of a stage.
DEVICE float scale_of(const Shared& shared, int stage, int row, int tile) {
#if LAYOUT == 0
    return *(const float*)(shared.records[stage] + row * ROW + 512 + 4 * tile);
#else
    u32 exponent = (u32)(shared.scales[stage][row] >> (8 * tile)) & 255;
    // The exponent 0 stands for 2^-127, which float32 holds as a subnormal number.
    return bits_to_float(exponent ? exponent << 23 : 1u << 22);
#endif
}

// sum += the products of a tile's bfloat16 values at an address with a step's fragments of the query.
DEVICE void add_rope(float (&sum)[QUERY_TILES][4], u32 address, const u32 (&b)[QUERY_TILES][2]) {
    u32 a[4];
    ldmatrix(a, address);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) mma_bf16(sum[n], a, b[n][0], b[n][1]);
}

// A tile of 16 keys' S over a warp's part of the values, to shared memory.
DEVICE void store_logits(Shared& shared, const float (&sum)[QUERY_TILES][4], int first_key, int barrier, Part part, int lane) {
    int g = lane >> 2, t = lane & 3;
    bool adds = SUMS < VALUE_PARTS && part.values >= SUMS;
    if (adds) named_sync(barrier, 64);  // the warp with the same keys and heads of the other part has been here
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        float* s = shared.s[part.values % SUMS] + (part.tile(n) * 8 + 2 * t) * S_STRIDE + first_key + 2 * g;
        float2 even = make_float2(sum[n][0], sum[n][2]), odd = make_float2(sum[n][1], sum[n][3]);
        if (adds) {
            float2 before = *(const float2*)s, after = *(const float2*)(s + S_STRIDE);
            even.x += before.x, even.y += before.y, odd.x += after.x, odd.y += after.y;
        }
        *(float2*)s = even;
        *(float2*)(s + S_STRIDE) = odd;
    }
    if (SUMS < VALUE_PARTS && !adds) named_arrive(barrier, 64);
}

// S of a warp's keys over its part of their values.
DEVICE void multiply_queries(Shared& shared, int stage, const Query& query, Part part, int lane) {
    int g = lane >> 2, matrix = lane >> 3;
    const u8* records = shared.records[stage];
    // Lanes 16 T + g and 16 T + 8 + g of a fragment are positions 2 l and 2 l + 1: see row_of.
    u32 address = shared_address(records + (part.first_key() + row_of(lane & 7, matrix & 1)) * ROW) + (matrix >> 1) * 16;
    int lower = part.first_key() + row_of(g, 0), upper = part.first_key() + row_of(g, 1);
#pragma unroll
    for (int first = 0; first < KEY_TILES; first += TOGETHER) {
        float sum[TOGETHER][QUERY_TILES][4] = {};
        auto add_codes = [&](int k) {  // of the part's scale k
            float acc[TOGETHER][QUERY_TILES][4] = {};
            multiply_codes(acc, address + part.values * (STEPS * 16), shared, query, k * SCALED, part, lane);
#pragma unroll
            for (int m = 0; m < TOGETHER; ++m) {
                int row = (first + m) * 16, scale = part.values * (STEPS / SCALED) + k;
                add_scaled(sum[m], acc[m], scale_of(shared, stage, row + lower, scale), scale_of(shared, stage, row + upper, scale));
            }
        };
        u32 b[QUERY_TILES][2];
#if LAYOUT == 0
#pragma unroll
        for (int k = 0; k < STEPS / SCALED; ++k) add_codes(k);
#pragma unroll
        for (int s = 0; s < ROPE_STEPS; ++s) {
            load_fragments(b, shared.rope[s][part.heads][part.values][lane]);
#pragma unroll
            for (int m = 0; m < TOGETHER; ++m)
                add_rope(sum[m], address + m * 16 * ROW + ROPE + (part.values * ROPE_STEPS + s) * 32, b);
        }
#else
#pragma unroll
        for (int k = 0; k < STEPS / SCALED - 1; ++k) add_codes(k);
        if (part.values < VALUE_PARTS - 1) {
            add_codes(STEPS / SCALED - 1);
        } else {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                fragments(b, shared, query, STEPS - 4 + s, part, lane);
#pragma unroll
                for (int m = 0; m < TOGETHER; ++m) add_rope(sum[m], address + m * 16 * ROW + ROPE + s * 32, b);
            }
        }
#endif
#pragma unroll
        for (int m = 0; m < TOGETHER; ++m)
            store_logits(shared, sum[m], part.first_key() + (first + m) * 16, part.barrier(first + m), part, lane);
        address += TOGETHER * 16 * ROW;
    }
}

// Two keys a lane.
struct State : Softmax<COLUMNS> {
    int reference;  // exponent that the scales of the warp's values are relative to
};

// P of the step's keys, and by how much it has to be multiplied for the values of this warp. Returns whether the output
// so far has to be multiplied by anything but 1 before it grows.
DEVICE bool exponentiate(Shared& shared, int stage, State& state, int warp, int lane,
                         u32& factors, float& reference_change) {
    int pair = lane % LANES, rows[2] = {row_of(pair, 0), row_of(pair, 1)};
    float sums[COLUMNS][2], scales[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) scales[j] = shared.factor[column_of(warp, lane, j)];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const float* s = shared.s[0] + column_of(warp, lane, j) * S_STRIDE + 2 * pair;
        float2 part[SUMS];
#pragma unroll
        for (int k = 0; k < SUMS; ++k) part[k] = *(const float2*)(s + k * HEADS * S_STRIDE);
#pragma unroll
        for (int k = SUMS / 2; k; k >>= 1)
#pragma unroll
            for (int i = 0; i < k; ++i) part[i].x += part[i + k].x, part[i].y += part[i + k].y;
        sums[j][0] = part[0].x, sums[j][1] = part[0].y;
    }
    bool valid[2];
    bool changed = false;
    // Scales relative to their reference, which is raised first where this block has a larger one.
    reference_change = 1.f;
#if LAYOUT == 0
    float stored[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        stored[i] = scale_of(shared, stage, rows[i], warp * 4 / WARPS);
        valid[i] = stored[i] != NOT_COUNTED;  // whose factor is finite, for a P of 0
        factor[i] = stored[i] * power_of_two(-state.reference);
    }
    if (__any_sync(~0u, fmaxf(factor[0], factor[1]) > 1.f)) {
        // Positive floats are ordered as their bits are. A scale that is NaN stays one in `factor`.
        u32 top = __float_as_int(fmaxf(fmaxf(stored[0], stored[1]), 0.f));
        int raised = raise_reference(state.reference, __reduce_max_sync(~0u, top));
        reference_change = change_of_reference(state.reference, raised);
        state.reference = raised;
#pragma unroll
        for (int i = 0; i < 2; ++i) factor[i] = stored[i] * power_of_two(-raised);
        changed = true;
    }
    factors = pack_f16(factor[0], factor[1]);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) valid[i] = shared.valid[stage][rows[i]] != 0;
    if (warp < 7) {
        int two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) two[i] = (int)(shared.scales[stage][rows[i]] >> (8 * warp) & 255) - 127;
        int exponent = (int)__reduce_max_sync(~0u, (u32)(max(two[0], two[1]) + 127)) - 127;
        int raised = max(state.reference, exponent);
        changed = raised != state.reference;
        reference_change = change_of_reference(state.reference, raised);
        state.reference = raised;
        factors = pack_f16(power_of_two(max(two[0] - raised, -127)), power_of_two(max(two[1] - raised, -127)));
    }
#endif
    float bias[2] = {valid[0] ? 0.f : -infinity(), valid[1] ? 0.f : -infinity()};
#if GROUP > 1
    u32 members[2] = {shared.members[stage][rows[0]], shared.members[stage][rows[1]]};
#endif
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The code of NaN may have made an infinity: see `key_codes`.
            float added = NATIVE_FP8 ? bias[i] : sums[j][i] * 0.f + bias[i];
            sums[j][i] = sums[j][i] * scales[j] + added;
#if GROUP > 1
            if (!(members[i] >> query_of(column_of(warp, lane, j)) & 1)) sums[j][i] = -infinity();
#endif
        }
        float largest = fmaxf(sums[j][0], sums[j][1]);
        state.largest[j] = fmaxf(state.largest[j], largest);
        exceeds |= largest > state.anchor[j] + ANCHOR_STEP;
    }
    float alpha[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) alpha[j] = 1.f;
    if (__any_sync(~0u, exceeds)) {
        state.raise_anchors<LANES>(alpha);
        changed = true;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) p[i] = exp2_approx(sums[j][i] - state.anchor[j]);
        state.sum[j] += p[0] + p[1];
        int column = column_of(warp, lane, j), at = column * P_STRIDE + 2 * pair;
        if (pair == 0) shared.alpha[column] = alpha[j];
        *(u32*)(shared.p + at) = pack_f16(p[0], p[1]);
#if LAYOUT == 1
        *(u32*)(shared.p_bf16 + at) = pack_bf16(p[0], p[1]);
#endif
    }
    return changed;
}

// O of a warp's 16 * VALUE_TILES values of every row. `between(n)` is called after the nth part of the products.
template <typename Between>
DEVICE void multiply_values(Shared& shared, int stage, float (&o)[VALUE_TILES][NT][4], bool changed, float reference_change,
                            u32 factors, int warp, int lane, Between between) {
    int t = lane & 3, matrix = lane >> 3, j = lane & 7;
    if (changed) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float2 alpha = *(const float2*)(shared.alpha + n * 8 + 2 * t);
            float change[2] = {alpha.x * reference_change, alpha.y * reference_change};
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][n][i] *= change[i & 1];
        }
    }
    u32 p_offset = (lane & 7) * P_STRIDE * 2 + (matrix & 1) * 16 + (NT > 1 ? (matrix >> 1) * 8 * P_STRIDE * 2 : 0);
    // Position 16 k + 8 i + j lies k tiles of 16 rows on.
    auto address_of = [&](int i) { return shared_address(shared.records[stage] + row_of(i * 4 + (j >> 1), j & 1) * ROW); };
#if LAYOUT == 1
    if (warp == 7) {
        u32 p_address = shared_address(shared.p_bf16) + p_offset;
        u32 v_address = address_of(matrix >> 1) + ROPE + (matrix & 1) * 16;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            u32 b[NT][2];
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                u32 r[4];
                ldmatrix(r, p_address + k * 32 + n * 8 * P_STRIDE * 2);
                b[n][0] = r[0]; b[n][1] = r[1];
                if (n + 1 < NT) { b[n + 1][0] = r[2]; b[n + 1][1] = r[3]; }
            }
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                // Matrices: keys 0 to 7 of values 0 to 7, of values 8 to 15, then keys 8 to 15.
                u32 a[4];
                ldmatrix_transposed(a, v_address + k * 16 * ROW + m * 32);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_bf16(o[m][n], a, b[n][0], b[n][1]);
                if (m % 2) between((k * VALUE_TILES + m) / 2);
            }
        }
        return;
    }
#endif
    u32 p_address = shared_address(shared.p) + p_offset;
    u32 v_address = address_of(matrix & 1) + warp * (16 * VALUE_TILES) + (matrix >> 1) * 16;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        // Keys 16 k + 2 t and the next, and 8 more: lane l has the factors of positions 2 l and 2 l + 1.
        u32 lower = __shfl_sync(~0u, factors, 8 * k + t), upper = __shfl_sync(~0u, factors, 8 * k + 4 + t);
        u32 b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 r[4];
            ldmatrix(r, p_address + k * 32 + n * 8 * P_STRIDE * 2);
            b[n][0] = multiply_f16(r[0], lower), b[n][1] = multiply_f16(r[1], upper);
            if (n + 1 < NT) b[n + 1][0] = multiply_f16(r[2], lower), b[n + 1][1] = multiply_f16(r[3], upper);
        }
#pragma unroll
        for (int m = 0; m < VALUE_TILES; m += 2) {
            // A transposed register holds values 2g and 2g + 1 of keys 2t and 2t + 1; the products want
            // the keys of one value side by side. Row g of a tile is value 2g, row g + 8 value 2g + 1.
            u32 codes[4];
            ldmatrix_transposed(codes, v_address + k * 16 * ROW + m * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                value_codes(codes[2 * half], a[0], a[1]);
                value_codes(codes[2 * half + 1], a[2], a[3]);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_f16(o[m + half][n], a, b[n][0], b[n][1]);
            }
            between((k * VALUE_TILES + m) / 2);
        }
    }
}

// A warp's output of a row: the products of fp8 values are relative to a power of two, and their rows' order is that of
// `value_codes`; those of bfloat16 values are neither.
DEVICE void write_output(Shared& shared, const State& state, const float (&o)[VALUE_TILES][NT][4], const Own& own,
                         const Results& to, int warp, int lane) {
    bool is_rope = LAYOUT == 1 && warp == 7;
    // Exponents reach 127 + 1, which is not a finite float32: applied in two halves.
    float factor = is_rope ? 1.f : power_of_two(state.reference / 2);
    float rest = is_rope ? 1.f : power_of_two(state.reference - state.reference / 2) * (1.f / VALUE_UNIT);
    write_output(shared.alpha, factor, rest, is_rope, (float*)shared.records, o, own, to, warp, lane);
}
