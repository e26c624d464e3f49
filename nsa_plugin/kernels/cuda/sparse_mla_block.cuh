// What a block of threads of sparse_mla.cu has: its shape, its shared memory, and the fragments of its queries.
#pragma once

#ifndef LAYOUT
#define LAYOUT 0  // 0: v32_fp8, 1: v4_fp8
#endif
#ifndef HELD
#define HELD 4  // of the steps over a warp's part of the query's values, those whose fragments are in registers
#endif
#define STEPS (32 / VALUE_PARTS)  // of 16 values that a warp multiplies with the query

#include "sparse_mla_few.cuh"

// Of these, at a time: all where registers suffice, as with many heads if shared memory has some of the query's fragments.
constexpr int TOGETHER = (HEAD_PARTS > 1 && HELD == STEPS) || SUMS < VALUE_PARTS ? 1 : KEY_TILES;
static_assert(SUMS == VALUE_PARTS || (SUMS * 2 == VALUE_PARTS && KEY_TILES * WARPS / 2 < 14), "barriers are few");
static_assert(LAYOUT == 0 || WARPS == 8, "with v4_fp8 a warp takes the values of one scale");
// Whether warps that multiply copy, too, piece by piece in between, without a barrier for each stage: see sparse_mla_copies.cuh.
constexpr bool COPY_BETWEEN = !HOPPER && !PRODUCERS;
constexpr bool WRITES = LAYOUT == 1 || GROUP > 1 || IN_TURN;  // whether a copying warp writes to shared memory, too
// On a stage's barrier, by a filling.
constexpr int ARRIVALS = HOPPER ? COPIERS + (LAYOUT == 0 ? 0 : KEYS) : 32 * COPIERS + (WRITES ? COPIERS : 0);
#if LAYOUT == 0
constexpr int SCALED = 8;        // steps that share a scale
constexpr int ROPE_STEPS = 4 / VALUE_PARTS;  // of a warp, in addition
constexpr int COPIED = 656;      // bytes of a record that one bulk copy brings
constexpr int ROW = 656;         // bytes between rows in shared memory
constexpr int ROPE = 528;        // byte of the bfloat16 values
#else
constexpr int SCALED = 4;
constexpr int COPIED = 576;
constexpr int ROW = 592;         // 576 would put rows 64 bytes apart modulo 128
constexpr int ROPE = 448;
#endif

#if GROUP > 1
// An entry of a union has the slot in its lower bits, and in the others which of the rows selects it.
constexpr u32 SLOT_BITS = 28;
constexpr u32 SLOT_MASK = (1u << SLOT_BITS) - 1;
#endif

struct Shared {
    alignas(128) u8 records[STAGES][KEYS * ROW];
    alignas(16) float s[SUMS][HEADS * S_STRIDE];
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
    // Fragments of the query, by part and lane, that are not held in registers: those are few.
#if HELD < STEPS
    alignas(16) u32 kept[STEPS - HELD][HEAD_PARTS][VALUE_PARTS][32][2 * QUERY_TILES];
#endif
#if LAYOUT == 0
    alignas(16) u32 rope[ROPE_STEPS][HEAD_PARTS][VALUE_PARTS][32][2 * QUERY_TILES];  // the bfloat16 ones
#endif
    alignas(16) float factor[HEADS];  // of S: the softmax scale times the power of two that the query row was divided by
    const int* indices[2];            // of the query row, in the two caches
    const u8* nothing[KEYS];          // what is copied for entries that do not count
#if HOPPER
    alignas(16) u64 from[COPIERS][COPIES];  // where the records are that a warp copies next
#endif
    alignas(8) u64 full[STAGES];      // a stage's records have arrived
#if PRODUCERS
    u64 empty[STAGES];                // and nobody reads them any more
#endif
#if IN_TURN
    int kind[STAGES];                 // of a block of keys: see sparse_mla_turns.cuh
#endif
    int last[WARPS];                  // blocks that a warp found entries in
};
// A share's output lies where its records were.
static_assert(!HOPPER || HEADS * O_STRIDE * sizeof(float) <= sizeof(Shared::records), "a share's output does not fit");

// How codes become operands of the products: multiplied by a unit.
#if NATIVE_FP8
constexpr float KEY_UNIT = 1.f, VALUE_UNIT = 1.f;

// Values 2 g and 2 g + 1 of one key, then of the next: pairs of keys for either value.
DEVICE void value_codes(u32 codes, u32& even, u32& odd) { fp8_to_f16(__byte_perm(codes, 0, 0x3120), even, odd); }
#else
// 35 * 2^10 takes the largest code, 448, to 62720, exactly, and that of NaN beyond float16's largest: an infinity in S.
constexpr float KEY_UNIT = 140.f, VALUE_UNIT = 0x1p-8f;

// A code's bits, one further right but for the sign, are a float16 of 2^-8 of its value, exactly, but for the code of NaN,
// which becomes 480 * 2^-8: what follows has to see to it. Two codes each from the even and the odd bytes.
DEVICE void value_codes(u32 codes, u32& even, u32& odd) {
    place_codes<7>(codes, even, odd);
}
#endif

// A key's codes 4 t to 4 t + 3: pairs for k = 2 t and for k = 2 t + 8. `order_of_codes`: the same order, of the query.
#if NATIVE_FP8
DEVICE void key_codes(u32 codes, u32& lower, u32& upper) { fp8_to_f16(codes, lower, upper); }
DEVICE uint2 order_of_codes(uint2 four) { return four; }
#else
DEVICE void key_codes(u32 codes, u32& lower, u32& upper) {
    value_codes(codes, lower, upper);
    lower = multiply_f16(lower, 0x78607860u), upper = multiply_f16(upper, 0x78607860u);
}
DEVICE uint2 order_of_codes(uint2 four) {
    return make_uint2(__byte_perm(four.x, four.y, 0x5410), __byte_perm(four.x, four.y, 0x7632));
}
#endif

// What a warp takes in the first product.
struct Part : WarpPart {
    using WarpPart::WarpPart;
    // The barrier of the two warps that share a sum, for a tile of their keys.
    DEVICE int barrier(int tile) const { return 1 + tile + KEY_TILES * pair(); }
    DEVICE bool is_rope(int step) const { return LAYOUT == 1 && values == VALUE_PARTS - 1 && step >= STEPS - 4; }
};

struct Query {
    u32 f16[HELD][QUERY_TILES][2];   // v4_fp8: the last four steps of the last part are bfloat16
};

// The bfloat16 values that a lane's fragments are made of.
struct RawQuery {
    u32 values[STEPS][QUERY_TILES][2];
#if LAYOUT == 0
    u32 rope[ROPE_STEPS][QUERY_TILES][2];
#endif
};

// The part of the query that a warp multiplies. Rows start at a multiple of 8 bytes.
DEVICE void read_query(RawQuery& raw, const u16* q, i64 row_stride, i64 head_stride, int rows, int heads, Part part,
                       int lane) {
    int g = lane >> 2, t = lane & 3;
    auto two = [](const u16* at) { return __ldg((const u32*)at); };
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        int first = part.tile(n) * 8, head = query_of(first) < rows ? head_of(first) + g : heads;
        const u16* start = q + query_of(first) * row_stride + head * head_stride;
        const u16* source = start + part.values * (STEPS * 16);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            // A fragment's values are those of the codes in a register, 4t to 4t + 3, in the order of `key_codes`.
            uint2 four = make_uint2(0, 0);
            if (head < heads && part.is_rope(s))
                four = make_uint2(two(source + s * 16 + 2 * t), two(source + s * 16 + 2 * t + 8));
            else if (head < heads) four = order_of_codes(__ldg((const uint2*)(source + s * 16 + 4 * t)));
            raw.values[s][n][0] = four.x, raw.values[s][n][1] = four.y;
        }
#if LAYOUT == 0
#pragma unroll
        for (int s = 0; s < ROPE_STEPS; ++s) {
            const u16* rope = start + 512 + (part.values * ROPE_STEPS + s) * 16 + 2 * t;
            raw.rope[s][n][0] = head < heads ? two(rope) : 0, raw.rope[s][n][1] = head < heads ? two(rope + 8) : 0;
        }
#endif
    }
}

// The part's largest value of every head, to `shared.s`. The block has to meet before `keep_query`.
DEVICE void find_largest(Shared& shared, const RawQuery& raw, Part part, int lane) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        float largest = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                largest = fmaxf(largest, fmaxf(fabsf(bits_to_float(raw.values[s][n][j] << 16)),
                                               fabsf(bits_to_float(raw.values[s][n][j] & 0xffff0000u))));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if ((lane & 3) == 0) shared.s[0][part.values * HEADS + part.tile(n) * 8 + (lane >> 2)] = largest;
    }
}

// The fragments of the part, divided by what `shared.factor` has. The block has to meet after it.
DEVICE void keep_query(Shared& shared, Query& query, const RawQuery& raw, Part part, float scale_log2, int lane) {
    bool is_first = part.keys == 0;  // of the warps with these fragments
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        int head = part.tile(n) * 8 + (lane >> 2);
        float largest = shared.s[0][head];
#pragma unroll
        for (int k = 1; k < VALUE_PARTS; ++k) largest = fmaxf(largest, shared.s[0][k * HEADS + head]);
        int exponent = query_exponent(largest);
        float divide = power_of_two(-exponent);
        if ((lane & 3) == 0) shared.factor[head] = power_of_two(exponent) * scale_log2;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float lower = bits_to_float(raw.values[s][n][j] << 16) * divide;
                float upper = bits_to_float(raw.values[s][n][j] & 0xffff0000u) * divide;
                u32 two = part.is_rope(s) ? pack_bf16(lower, upper) : pack_f16(lower, upper);
                if (s < HELD) query.f16[s][n][j] = two;
#if HELD < STEPS
                else if (is_first) shared.kept[s - HELD][part.heads][part.values][lane][2 * n + j] = two;
#endif
            }
#if LAYOUT == 0
#pragma unroll
        for (int s = 0; s < ROPE_STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 both = raw.rope[s][n][j];
                both = pack_bf16(bits_to_float(both << 16) * divide, bits_to_float(both & 0xffff0000u) * divide);
                if (is_first) shared.rope[s][part.heads][part.values][lane][2 * n + j] = both;
            }
#endif
    }
}

// Fragments that a lane has in shared memory.
DEVICE void load_fragments(u32 (&b)[QUERY_TILES][2], const u32* kept) {
    if constexpr (QUERY_TILES == 1) {
        uint2 two = *(const uint2*)kept;
        b[0][0] = two.x, b[0][1] = two.y;
    } else {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n += 2) {
            uint4 four = *(const uint4*)(kept + 2 * n);
            b[n][0] = four.x, b[n][1] = four.y, b[n + 1][0] = four.z, b[n + 1][1] = four.w;
        }
    }
}

// A step's fragments of the query.
DEVICE void fragments(u32 (&b)[QUERY_TILES][2], const Shared& shared, const Query& query, int step, Part part, int lane) {
    if (step < HELD) {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) b[n][0] = query.f16[step][n][0], b[n][1] = query.f16[step][n][1];
        return;
    }
#if HELD < STEPS
    load_fragments(b, shared.kept[step - HELD][part.heads][part.values][lane]);
#endif
}
