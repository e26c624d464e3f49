// The three steps of sparse_mla.cu on a block of 64 keys: S = K Q^T, P = exp(S), O = V^T P.
#pragma once

#ifndef NT
#define NT 2  // tiles of 8 heads a block
#endif
#ifndef LAYOUT
#define LAYOUT 0  // 0: v32_fp8, 1: v4_fp8
#endif
#ifndef FLAT
#define FLAT 0  // pages follow each other without a gap, and so do the records in them: v32_fp8 only
#endif
#ifndef HAS_EXTRA
#define HAS_EXTRA 0  // whether there is a second cache
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // blocks of an SM
#endif
#ifndef INTEGER_V
#define INTEGER_V 1  // codes of values become float16 by integer instructions: conversions have their hands full with keys
#endif
#ifndef STAGES
#define STAGES 2  // blocks of keys in shared memory
#endif
#ifndef GROUP
#define GROUP 1  // neighbouring query rows of a block, which share the union of their entries
#endif
#ifndef HELD
#define HELD 4  // of the 8 steps over a quarter of the query, those whose fragments are in registers
#endif

#include "sparse_mla_shares.cuh"

constexpr int KEYS = 64;
constexpr int WARPS = 8;
constexpr int KEY_TILES = KEYS / 2 / 16;  // tiles of 16 keys a warp, in the first product: half of the keys
constexpr int VALUE_TILES = 512 / WARPS / 16;  // tiles of 16 values a warp, in the second product
constexpr int COPIES = KEYS / WARPS;      // records that a warp copies
constexpr int COLUMNS = NT;               // columns of S that a warp exponentiates
constexpr int TILES = NT / GROUP;         // tiles of a query row
static_assert(NT % GROUP == 0, "a query row takes whole tiles");
constexpr int THREADS = 32 * WARPS;
constexpr int HEADS = 8 * NT;
constexpr int ARRIVALS = (HOPPER ? WARPS : THREADS) + (LAYOUT == 0 ? 0 : KEYS);  // on a stage's barrier, by a filling
#if LAYOUT == 0
constexpr int FP8_STEPS = 8;     // steps of 16 fp8 values of a quarter
constexpr int COPIED = 656;      // bytes of a record that one bulk copy brings
constexpr int ROW = 656;         // bytes between rows in shared memory
constexpr int ROPE = 528;        // byte of the bfloat16 values
#else
constexpr int FP8_STEPS = 8;
constexpr int COPIED = 576;
constexpr int ROW = 592;         // 576 would put rows 64 bytes apart modulo 128
constexpr int ROPE = 448;
#endif
// Weights may grow to 2^8 before the output is multiplied: float16 holds them, and that is seldom needed then.
constexpr float ANCHOR_STEP = 8.f;
constexpr float ANCHOR_START = -1e30f;  // below every logit, and finite, so that no difference is NaN
constexpr float NOT_COUNTED = -0x1p-100f;  // the scales of the v32_fp8 record that stands for an entry which does not count
constexpr int NOTHINGS = 1024;   // records that stand for entries which do not count
constexpr int S_STRIDE = 68;     // floats between heads of S: lanes of a warp's store fall into 32 banks
constexpr int O_STRIDE = 516;    // floats between heads of a share's output in shared memory
constexpr int P_STRIDE = 72;     // halves between heads of P: 144 bytes, 8 rows of a matrix in 32 banks

#if GROUP > 1
// An entry of a union has the slot in its lower bits, and in the others which of the rows selects it.
constexpr u32 SLOT_BITS = 28;
constexpr u32 SLOT_MASK = (1u << SLOT_BITS) - 1;
#endif

// Which row of the group a column of S belongs to, and which head of the block's.
DEVICE int query_of(int column) { return GROUP == 1 ? 0 : column / 8 / TILES; }
DEVICE int head_of(int column) { return GROUP == 1 ? column : column % (8 * TILES); }

struct Shared {
    alignas(128) u8 records[STAGES][KEYS * ROW];
    alignas(16) float s[4][HEADS * S_STRIDE];
    alignas(16) u16 p[HEADS * P_STRIDE];
#if LAYOUT == 1
    alignas(16) u16 p_bf16[HEADS * P_STRIDE];  // for the bfloat16 values
    alignas(16) u64 scales[STAGES][KEYS];
    u8 valid[STAGES][KEYS];
#endif
#if GROUP > 1
    u8 members[STAGES][KEYS];  // rows of the group that select the key, a bit each
#endif
    alignas(16) float alpha[HEADS];   // of the output so far, by this step's keys
    // Fragments of the query, by quarter and lane, that are not held in registers: those are few.
#if HELD < 8
    alignas(16) u32 kept[FP8_STEPS - HELD][4][32][2 * NT];
#endif
#if LAYOUT == 0
    alignas(16) u32 rope[4][32][2 * NT];  // the bfloat16 ones
#endif
    alignas(16) float factor[HEADS];  // of S: the softmax scale times the power of two that the query row was divided by
    const int* indices[2];            // of the query row, in the two caches
    const u8* nothing[KEYS];          // what is copied for entries that do not count
    alignas(16) u64 from[WARPS][COPIES];   // where the records are that a warp copies next
    alignas(8) u64 full[STAGES];      // a stage's records have arrived
    int last[WARPS];                  // blocks that a warp found entries in
};
// A share's output lies where its records were.
static_assert(HEADS * O_STRIDE * sizeof(float) <= sizeof(Shared::records), "a share's output does not fit");

// Row of shared memory of position 2 l + i of a block.
DEVICE int row_of(int l, int i) { return (l & 24) << 1 | i << 3 | ((l & 7) ^ i << 2); }

struct Query {
    u32 f16[HELD][NT][2];   // v4_fp8: steps 4 to 7 of the last quarter are bfloat16
};

// The bfloat16 values that a lane's fragments are made of.
struct RawQuery {
    u32 values[FP8_STEPS][NT][2];
#if LAYOUT == 0
    u32 rope[NT][2];
#endif
};

DEVICE bool is_rope_step(int quarter, int step) { return LAYOUT == 1 && quarter == 3 && step >= 4; }

// A quarter of the query's values, for all heads of the block. Rows start at a multiple of 8 bytes.
DEVICE void read_query(RawQuery& raw, const u16* q, i64 row_stride, i64 head_stride, int rows, int heads, int quarter,
                       int lane) {
    int g = lane >> 2, t = lane & 3;
    auto two = [](const u16* at) { return __ldg((const u32*)at); };
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int head = query_of(n * 8) < rows ? head_of(n * 8) + g : heads;
        const u16* start = q + query_of(n * 8) * row_stride + head * head_stride;
        const u16* source = start + quarter * 128;
#pragma unroll
        for (int s = 0; s < FP8_STEPS; ++s) {
            // The order of a fragment's values is that of the codes in a register: 4t to 4t + 3.
            uint2 four = make_uint2(0, 0);
            if (head < heads && is_rope_step(quarter, s))
                four = make_uint2(two(source + s * 16 + 2 * t), two(source + s * 16 + 2 * t + 8));
            else if (head < heads) four = __ldg((const uint2*)(source + s * 16 + 4 * t));
            raw.values[s][n][0] = four.x, raw.values[s][n][1] = four.y;
        }
#if LAYOUT == 0
        const u16* rope = start + 512 + quarter * 16 + 2 * t;
        raw.rope[n][0] = head < heads ? two(rope) : 0, raw.rope[n][1] = head < heads ? two(rope + 8) : 0;
#endif
    }
}

// The quarter's largest value of every head, to `shared.s`. The block has to meet before `keep_query`.
DEVICE void find_largest(Shared& shared, const RawQuery& raw, int quarter, int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float largest = 0.f;
#pragma unroll
        for (int s = 0; s < FP8_STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                largest = fmaxf(largest, fmaxf(fabsf(bits_to_float(raw.values[s][n][j] << 16)),
                                               fabsf(bits_to_float(raw.values[s][n][j] & 0xffff0000u))));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if ((lane & 3) == 0) shared.s[quarter][n * 8 + (lane >> 2)] = largest;
    }
}

// The fragments of a quarter, divided by what `shared.factor` has. The block has to meet after it.
DEVICE void keep_query(Shared& shared, Query& query, const RawQuery& raw, int quarter, bool is_first, float scale_log2,
                       int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int head = n * 8 + (lane >> 2);
        float largest = fmaxf(fmaxf(shared.s[0][head], shared.s[1][head]), fmaxf(shared.s[2][head], shared.s[3][head]));
        int exponent = (int)(__float_as_int(largest) >> 23 & 255) - 127 - 8;
        exponent = largest > 0.f ? min(max(exponent, -100), 100) : 0;
        float divide = power_of_two(-exponent);
        if ((lane & 3) == 0) shared.factor[head] = power_of_two(exponent) * scale_log2;
#pragma unroll
        for (int s = 0; s < FP8_STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float lower = bits_to_float(raw.values[s][n][j] << 16) * divide;
                float upper = bits_to_float(raw.values[s][n][j] & 0xffff0000u) * divide;
                u32 two = is_rope_step(quarter, s) ? pack_bf16(lower, upper) : pack_f16(lower, upper);
                if (s < HELD) query.f16[s][n][j] = two;
#if HELD < 8
                else if (is_first) shared.kept[s - HELD][quarter][lane][2 * n + j] = two;
#endif
            }
#if LAYOUT == 0
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            u32 both = raw.rope[n][j];
            both = pack_bf16(bits_to_float(both << 16) * divide, bits_to_float(both & 0xffff0000u) * divide);
            if (is_first) shared.rope[quarter][lane][2 * n + j] = both;
        }
#endif
    }
}

// A step's fragments of the query.
DEVICE void fragments(u32 (&b)[NT][2], const Shared& shared, const Query& query, int step, int quarter, int lane) {
    if (step < HELD) {
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n][0] = query.f16[step][n][0], b[n][1] = query.f16[step][n][1];
        return;
    }
#if HELD < 8
    const u32* kept = shared.kept[step - HELD][quarter][lane];
    if constexpr (NT == 1) {
        uint2 two = *(const uint2*)kept;
        b[0][0] = two.x, b[0][1] = two.y;
    } else {
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint4 four = *(const uint4*)(kept + 2 * n);
            b[n][0] = four.x, b[n][1] = four.y, b[n + 1][0] = four.z, b[n + 1][1] = four.w;
        }
    }
#endif
}

// Steps of 16 fp8 values: codes of a warp's tiles of 16 keys times the queries.
template <int STEPS>
DEVICE void multiply_codes(float (&acc)[KEY_TILES][NT][4], u32 address, const Shared& shared, const Query& query, int first,
                           int quarter, int lane) {
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
        u32 b[2][NT][2];
        fragments(b[0], shared, query, first + s, quarter, lane);
        fragments(b[1], shared, query, first + s + 1, quarter, lane);
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m) {
            u32 codes[4];
            ldmatrix(codes, address + m * 16 * ROW + (first + s) * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                fp8_to_f16(codes[2 * half], a[0], a[2]);
                fp8_to_f16(codes[2 * half + 1], a[1], a[3]);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_f16(acc[m][n], a, b[half][n][0], b[half][n][1]);
            }
        }
    }
}

// sum += acc, times a factor for each of the two rows of a thread.
DEVICE void add_scaled(float (&sum)[NT][4], const float (&acc)[NT][4], float lower, float upper) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        sum[n][0] += acc[n][0] * lower;
        sum[n][1] += acc[n][1] * lower;
        sum[n][2] += acc[n][2] * upper;
        sum[n][3] += acc[n][3] * upper;
    }
}

#if LAYOUT == 1
DEVICE float ue8m0(u64 scales, int tile) {
    u32 exponent = (u32)(scales >> (8 * tile)) & 255;
    // The exponent 0 stands for 2^-127, which float32 holds as a subnormal number.
    return bits_to_float(exponent ? exponent << 23 : 1u << 22);
}
#endif

// S of a warp's keys over a quarter of their values.
DEVICE void multiply_queries(Shared& shared, int stage, const Query& query, int quarter, int half, int lane) {
    int g = lane >> 2, t = lane & 3;
    const u8* records = shared.records[stage];
    int matrix = lane >> 3;
    // Lanes 16 T + g and 16 T + 8 + g of a fragment are positions 2 l and 2 l + 1: see row_of.
    u32 address = shared_address(records + (half * (KEYS / 2) + row_of(lane & 7, matrix & 1)) * ROW) + (matrix >> 1) * 16;
    int lower = half * (KEYS / 2) + row_of(g, 0), upper = half * (KEYS / 2) + row_of(g, 1);
    float acc[KEY_TILES][NT][4] = {}, sum[KEY_TILES][NT][4] = {};
#if LAYOUT == 0
    multiply_codes<8>(acc, address + quarter * 128, shared, query, 0, quarter, lane);
    u32 rope[2 * NT];
#pragma unroll
    for (int k = 0; k < 2 * NT; k += 2) {
        uint2 two = *(const uint2*)&shared.rope[quarter][lane][k];
        rope[k] = two.x, rope[k + 1] = two.y;
    }
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m) {
        u32 a[4];
        ldmatrix(a, address + m * 16 * ROW + ROPE + quarter * 32);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_bf16(sum[m][n], a, rope[2 * n], rope[2 * n + 1]);
        const u8* scales = records + m * 16 * ROW + 512 + 4 * quarter;
        add_scaled(sum[m], acc[m], *(const float*)(scales + lower * ROW), *(const float*)(scales + upper * ROW));
    }
#else
    const u64* scales = shared.scales[stage];
    auto add = [&](int tile) {
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
            add_scaled(sum[m], acc[m], ue8m0(scales[lower + m * 16], tile), ue8m0(scales[upper + m * 16], tile));
    };
    multiply_codes<4>(acc, address + quarter * 128, shared, query, 0, quarter, lane);
    add(2 * quarter);
    if (quarter < 3) {
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[m][n][j] = 0.f;
        multiply_codes<4>(acc, address + quarter * 128, shared, query, 4, quarter, lane);
        add(2 * quarter + 1);
    } else {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            u32 b[NT][2];
            fragments(b, shared, query, 4 + s, quarter, lane);
#pragma unroll
            for (int m = 0; m < KEY_TILES; ++m) {
                u32 a[4];
                ldmatrix(a, address + m * 16 * ROW + ROPE + s * 32);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_bf16(sum[m][n], a, b[n][0], b[n][1]);
            }
        }
    }
#endif
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float* s = shared.s[quarter] + (n * 8 + 2 * t) * S_STRIDE + half * (KEYS / 2) + m * 16 + 2 * g;
            *(float2*)s = make_float2(sum[m][n][0], sum[m][n][2]);
            *(float2*)(s + S_STRIDE) = make_float2(sum[m][n][1], sum[m][n][3]);
        }
}

// Running statistics, in base 2.
struct Softmax {
    float largest[COLUMNS];    // of this lane's keys, by head that the warp is responsible for
    float anchor[COLUMNS];     // what exponents are relative to: follows the largest in jumps of ANCHOR_STEP or more
    float sum[COLUMNS];        // of this lane's keys
    int reference;        // exponent that the scales of the warp's values are relative to
};

// P of the step's keys, and by how much it has to be multiplied for the values of this warp. Returns whether the output
// so far has to be multiplied by anything but 1 before it grows.
DEVICE bool exponentiate(Shared& shared, int stage, Softmax& state, int warp, int lane,
                         u32& factors, float& reference_change) {
    const float infinity = bits_to_float(0x7f800000);
    int rows[2] = {row_of(lane, 0), row_of(lane, 1)};
    float sums[COLUMNS][2];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const float* s = shared.s[0] + (warp + WARPS * j) * S_STRIDE + 2 * lane;
        float2 part[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) part[k] = *(const float2*)(s + k * HEADS * S_STRIDE);
        sums[j][0] = (part[0].x + part[1].x) + (part[2].x + part[3].x);
        sums[j][1] = (part[0].y + part[1].y) + (part[2].y + part[3].y);
    }
    bool valid[2];
    bool changed = false;
    // Scales relative to their reference, which is raised first where this block has a larger one.
    reference_change = 1.f;
#if LAYOUT == 0
    float stored[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        stored[i] = *(const float*)(shared.records[stage] + rows[i] * ROW + 512 + 4 * (warp * 4 / WARPS));
        valid[i] = stored[i] != NOT_COUNTED;  // whose factor is finite, for a P of 0
        factor[i] = stored[i] * power_of_two(-state.reference);
    }
    if (__any_sync(~0u, fmaxf(factor[0], factor[1]) > 1.f)) {
        // Positive floats are ordered as their bits are. A scale that is NaN stays one in `factor`.
        u32 top = __float_as_int(fmaxf(fmaxf(stored[0], stored[1]), 0.f));
        int exponent = (int)(__reduce_max_sync(~0u, top) + 0x7fffffu >> 23) - 127;
        int raised = max(state.reference, min(max(exponent, -100), 100));
        reference_change = power_of_two(max(state.reference - raised, -127));
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
        reference_change = power_of_two(max(state.reference - raised, -127));
        state.reference = raised;
        factors = pack_f16(power_of_two(max(two[0] - raised, -127)), power_of_two(max(two[1] - raised, -127)));
    }
#endif
    float bias[2] = {valid[0] ? 0.f : -infinity, valid[1] ? 0.f : -infinity};
#if GROUP > 1
    u32 members[2] = {shared.members[stage][rows[0]], shared.members[stage][rows[1]]};
#endif
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        float scale = shared.factor[warp + WARPS * j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums[j][i] = sums[j][i] * scale + bias[i];
#if GROUP > 1
            if (!(members[i] >> query_of(warp + WARPS * j) & 1)) sums[j][i] = -infinity;
#endif
        }
        float largest = fmaxf(sums[j][0], sums[j][1]);
        state.largest[j] = fmaxf(state.largest[j], largest);
        exceeds |= largest > state.anchor[j] + ANCHOR_STEP;
    }
    float alpha[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) alpha[j] = 1.f;
    // Seldom: the lanes look at their keys' largest together only when one of them finds it too large.
    if (__any_sync(~0u, exceeds)) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float largest = warp_max(state.largest[j]);
            float anchor = largest > state.anchor[j] + ANCHOR_STEP ? largest : state.anchor[j];
            alpha[j] = exp2_approx(state.anchor[j] - anchor);
            state.anchor[j] = anchor;
            state.sum[j] *= alpha[j];
        }
        changed = true;
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) p[i] = exp2_approx(sums[j][i] - state.anchor[j]);
        state.sum[j] += p[0] + p[1];
        if (lane == 0) shared.alpha[warp + WARPS * j] = alpha[j];
        int at = (warp + WARPS * j) * P_STRIDE + 2 * lane;
        *(u32*)(shared.p + at) = pack_f16(p[0], p[1]);
#if LAYOUT == 1
        *(u32*)(shared.p_bf16 + at) = pack_bf16(p[0], p[1]);
#endif
    }
    return changed;
}

// O of a warp's 64 values of every row.
DEVICE void multiply_values(Shared& shared, int stage, float (&o)[VALUE_TILES][NT][4], bool changed, float reference_change,
                            u32 factors, int warp, int lane) {
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
    // Position 16 k + 8 (matrix & 1) + j lies k tiles of 16 rows on.
    int row = row_of((matrix & 1) * 4 + (j >> 1), j & 1);
    u32 v_address = shared_address(shared.records[stage] + row * ROW);
#if LAYOUT == 1
    if (warp == 7) {
        u32 p_address = shared_address(shared.p_bf16) + p_offset;
        v_address += ROPE + (matrix >> 1) * 16;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
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
                // Matrices: values 0 to 7 of keys 0 to 7, of keys 8 to 15, then values 8 to 15.
                u32 r[4];
                ldmatrix_transposed(r, v_address + k * 16 * ROW + m * 32);
                u32 a[4] = {r[0], r[2], r[1], r[3]};
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_bf16(o[m][n], a, b[n][0], b[n][1]);
            }
        }
        return;
    }
#endif
    u32 p_address = shared_address(shared.p) + p_offset;
    v_address += warp * (16 * VALUE_TILES) + (matrix >> 1) * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
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
#if INTEGER_V
                e4m3_to_scaled_f16(codes[2 * half], a[0], a[1]);
                e4m3_to_scaled_f16(codes[2 * half + 1], a[2], a[3]);
#else
                fp8_to_f16(__byte_perm(codes[2 * half], 0, 0x3120), a[0], a[1]);
                fp8_to_f16(__byte_perm(codes[2 * half + 1], 0, 0x3120), a[2], a[3]);
#endif
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_f16(o[m + half][n], a, b[n][0], b[n][1]);
            }
        }
    }
}
