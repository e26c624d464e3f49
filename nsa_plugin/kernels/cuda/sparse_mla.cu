// Sparse MLA over a paged fp8 cache for few query heads (SM80 instructions; SM90 for bulk copies).
//
// A block of 8 warps attends one query token with a group of up to 8 * NT heads, 64 keys at a time.
// Keys are the rows of the matrix products and heads their columns (mma.m16n8k16), so that 8 heads are a
// full tile and no head is padded beyond a multiple of 8. The cache's records are copied to shared memory
// as they are, by bulk copies; their fp8 codes become float16 in registers, exactly, on the way into the
// tensor cores. Nothing is multiplied by a scale before it has to be:
//
//   S = K Q^T     warp (quarter, half): a quarter of the row's values, 32 of the 64 keys. A quarter's
//                 codes are summed and then multiplied by the key's scale; quarters add up in shared memory.
//   P = exp(S)    warp w: heads w, w + 8, ... with all 64 keys, two keys a lane. P is written once for
//                 each scale of a record, already multiplied by it: float16, relative to `reference` below.
//   O = V^T P     warp w: values 64 w to 64 w + 63 of every row.
//
// Why float16: a query row is divided by a power of two that brings its largest value to 2^8, and a scale
// by the largest of that tile so far, rounded up to a power of two ("reference"): both exact. What is lost
// lies 2^-25 below the largest operand of its tile; bfloat16 would lose what lies 2^-9 below any operand.
//
// Positions and rows: within the 64 keys of a block, position p = 2 l + i of S and P belongs to row
// ((l + 4 i) & 7) | (l & 24) | (i << 5) of shared memory. Any order would do; this one lets every access
// below spread over all banks: rows lie 16 bytes apart modulo 128.

#ifndef NT
#define NT 2  // tiles of 8 heads a block
#endif
#ifndef LAYOUT
#define LAYOUT 0  // 0: v32_fp8, 1: v4_fp8
#endif
#ifndef BULK_COPY
#define BULK_COPY 1  // records by the bulk copy engine (SM90), else by 16-byte asynchronous copies
#endif
#ifndef HAS_EXTRA
#define HAS_EXTRA 0  // whether there is a second cache
#endif
#ifndef OUT_FLOAT32
#define OUT_FLOAT32 0
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // blocks of an SM
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

constexpr int KEYS = 64;
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int HEADS = 8 * NT;
constexpr int D_V = 512;
constexpr int STAGES = 2;
constexpr int ARRIVALS = !BULK_COPY ? THREADS : LAYOUT == 0 ? WARPS : WARPS + KEYS;  // on a stage's barrier, by a filling
#if LAYOUT == 0
constexpr int FP8_STEPS = 8;     // steps of 16 fp8 values of a quarter
constexpr int COPIED = 656;      // bytes of a record that one bulk copy brings
constexpr int ROW = 656;         // bytes between rows in shared memory
constexpr int ROPE = 528;        // byte of the bfloat16 values
constexpr int VARIANTS = 4;      // scales of a record, each with its own P
constexpr int SCALES = 4;
#else
constexpr int FP8_STEPS = 8;
constexpr int COPIED = 576;
constexpr int ROW = 592;         // 576 would put rows 64 bytes apart modulo 128
constexpr int ROPE = 448;
constexpr int VARIANTS = 8;      // 7 scales, and 1 for the bfloat16 values
constexpr int SCALES = 7;
#endif
// Weights may grow to 2^8 before the output is multiplied: float16 holds them, and that is seldom needed then.
constexpr float ANCHOR_STEP = 8.f;
constexpr float NOT_COUNTED = -1.f;  // first scale of the v32_fp8 record that stands for an entry which does not count
constexpr int S_STRIDE = 68;     // floats between heads of S: lanes of a warp's store fall into 32 banks
constexpr int P_STRIDE = 72;     // halves between heads of P: 144 bytes, 8 rows of a matrix in 32 banks

struct Shared {
    alignas(128) u8 records[STAGES][KEYS * ROW];
    alignas(16) float s[4][HEADS * S_STRIDE];
    alignas(16) u16 p[VARIANTS][HEADS * P_STRIDE];
#if LAYOUT == 1
    alignas(16) u64 scales[STAGES][KEYS];
    u8 valid[STAGES][KEYS];
#endif
    alignas(16) float alpha[HEADS];   // of the output so far, by this step's keys
    alignas(16) float factor[HEADS];  // of the query rows: a power of two
    alignas(8) u64 full[STAGES];      // a stage's records have arrived
};

// One cache and the rows of it that the queries name.
struct Scope {
    const u8* data;
    i64 page_stride;      // bytes
    const int* indices;
    i64 indices_stride;   // entries between query rows
    const int* lengths;   // entries that count, by query row / lengths_divisor; null: all
    int lengths_divisor;
    int page_size;
    int page_shift;       // log2 of the page size, or -1
    int num_slots;
    int topk;
};

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two e4m3 codes each from the lower and the upper half of a register.
DEVICE void fp8_to_f16(u32 codes, u32& lower, u32& upper) {
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
        : "=r"(lower), "=r"(upper) : "r"(codes));
}

DEVICE u32 pack_f16(float lower, float upper) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

DEVICE u32 pack_bf16(float lower, float upper) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float bits_to_float(u32 bits) { return __int_as_float((int)bits); }
DEVICE float power_of_two(int exponent) { return bits_to_float((u32)(exponent + 127) << 23); }

DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "  @done bra DONE; bra WAIT; DONE: }" :: "r"(barrier), "r"(parity) : "memory");
}

// Whether this is the one lane of the warp that acts for all of it.
DEVICE bool elected() {
    u32 yes;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
    return yes;
}

DEVICE void bulk_copy(u32 destination, const void* source, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Row of shared memory of position p of a block.
DEVICE int row_of(int l, int i) { return ((l + 4 * i) & 7) | (l & 24) | (i << 5); }

DEVICE int scope_length(const Scope& scope, int row) {
    if (!scope.lengths) return scope.topk;
    int length = scope.lengths[row / scope.lengths_divisor];
    return min(max(length, 0), scope.topk);
}

struct Entry {
    const u8* record;
    const u8* scales;  // v4_fp8 only
    bool valid;
};

// Where the record of a slot of the first or the second cache lies; the zero record for one that does not count.
DEVICE Entry find_entry(const Scope& first, const Scope& second, bool is_first, int slot, const u8* zeros) {
    is_first |= !HAS_EXTRA;
    // Field by field: a reference to either would put both into local memory.
    u32 num_slots = is_first ? first.num_slots : second.num_slots;
    int shift = is_first ? first.page_shift : second.page_shift;
    int size = is_first ? first.page_size : second.page_size;
    i64 stride = is_first ? first.page_stride : second.page_stride;
    const u8* data = is_first ? first.data : second.data;
    if ((u32)slot >= num_slots) return {zeros, zeros, false};
    int page = shift >= 0 ? slot >> shift : slot / size;
    int position = slot - page * size;
    const u8* start = data + page * stride;
#if LAYOUT == 0
    return {start + position * COPIED, zeros, true};
#else
    return {start + position * COPIED, start + size * COPIED + position * 8, true};
#endif
}

// Every warp copies 8 records; lane l knows where record l & 7 lies.
DEVICE void start_copies(Shared& shared, int stage, int warp, int lane, const Entry& entry) {
    u32 full = shared_address(&shared.full[stage]);
    int r = warp * 8 + (lane & 7);
#if LAYOUT == 1
    if (lane < 8) {
        shared.valid[stage][r] = entry.valid;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                     :: "r"(shared_address(&shared.scales[stage][r])), "l"(entry.scales) : "memory");
#if BULK_COPY
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full) : "memory");
#endif
    }
#endif
#if BULK_COPY
    // A bulk copy takes its addresses from uniform registers: one lane starting eight of them keeps these in
    // flight, where eight lanes starting one each go through a loop.
    u64 from[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) from[k] = __shfl_sync(~0u, (u64)entry.record, k);
    if (elected()) {
        u32 to = shared_address(&shared.records[stage][warp * 8 * ROW]);
        barrier_expect(full, 8 * COPIED);
#pragma unroll
        for (int k = 0; k < 8; ++k) bulk_copy(to + k * ROW, (const void*)from[k], COPIED, full);
    }
#else
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        int key = pass * 4 + (lane >> 3);
        const u8* from = (const u8*)__shfl_sync(~0u, (u64)entry.record, key) + (lane & 7) * 16;
        u32 to = shared_address(&shared.records[stage][(warp * 8 + key) * ROW]) + (lane & 7) * 16;
#pragma unroll
        for (int line = 0; line * 128 < COPIED; ++line)
            if (line * 128 + (lane & 7) * 16 < COPIED)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + line * 128), "l"(from + line * 128) : "memory");
    }
#endif
#if !BULK_COPY
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full) : "memory");
#endif
}

struct Query {
    u32 f16[FP8_STEPS][NT][2];   // v4_fp8: steps 4 to 7 of the last quarter are bfloat16
#if LAYOUT == 0
    u32 rope[NT][2];
#endif
};

// The fragments of a quarter of the query's values, for all heads of the block, which `shared.factor` tells
// what they were divided by.
DEVICE void load_query(Shared& shared, Query& query, const u16* q, i64 head_stride, int heads, int quarter, int lane) {
    int g = lane >> 2, t = lane & 3;
    u32 raw[FP8_STEPS][NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int head = n * 8 + g;
        const u16* source = q + head * head_stride + quarter * 128;
        float largest = 0.f;
#pragma unroll
        for (int s = 0; s < FP8_STEPS; ++s) {
            bool is_rope = LAYOUT == 1 && quarter == 3 && s >= 4;
            // The order of a fragment's values is that of the codes in a register: 4t to 4t + 3.
            const u16* lower = source + s * 16 + (is_rope ? 2 * t : 4 * t);
            const u16* upper = source + s * 16 + (is_rope ? 2 * t + 8 : 4 * t + 2);
            raw[s][n][0] = head < heads ? lower[0] | (u32)lower[1] << 16 : 0;
            raw[s][n][1] = head < heads ? upper[0] | (u32)upper[1] << 16 : 0;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                largest = fmaxf(largest, fmaxf(fabsf(bits_to_float(raw[s][n][j] << 16)),
                                               fabsf(bits_to_float(raw[s][n][j] & 0xffff0000u))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (t == 0) shared.s[quarter][head] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int head = n * 8 + g;
        float largest = fmaxf(fmaxf(shared.s[0][head], shared.s[1][head]), fmaxf(shared.s[2][head], shared.s[3][head]));
        int exponent = (int)(__float_as_int(largest) >> 23 & 255) - 127 - 8;
        exponent = largest > 0.f ? min(max(exponent, -100), 100) : 0;
        float divide = power_of_two(-exponent);
        if (t == 0) shared.factor[head] = power_of_two(exponent);
#pragma unroll
        for (int s = 0; s < FP8_STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float lower = bits_to_float(raw[s][n][j] << 16) * divide;
                float upper = bits_to_float(raw[s][n][j] & 0xffff0000u) * divide;
                bool is_rope = LAYOUT == 1 && quarter == 3 && s >= 4;
                query.f16[s][n][j] = is_rope ? pack_bf16(lower, upper) : pack_f16(lower, upper);
            }
#if LAYOUT == 0
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u16* rope = q + head * head_stride + 512 + quarter * 16 + 2 * t + 8 * j;
            u32 both = head < heads ? rope[0] | (u32)rope[1] << 16 : 0;
            query.rope[n][j] = pack_bf16(bits_to_float(both << 16) * divide, bits_to_float(both & 0xffff0000u) * divide);
        }
#endif
    }
    __syncthreads();
}

// Steps of 16 fp8 values: codes of 2 tiles of 16 keys times the queries.
template <int STEPS>
DEVICE void multiply_codes(float (&acc)[2][NT][4], u32 address, const u32 (&q)[FP8_STEPS][NT][2], int first) {
#pragma unroll
    for (int s = 0; s < STEPS; s += 2) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 codes[4];
            ldmatrix(codes, address + m * 16 * ROW + (first + s) * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                fp8_to_f16(codes[2 * half], a[0], a[2]);
                fp8_to_f16(codes[2 * half + 1], a[1], a[3]);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_f16(acc[m][n], a, q[first + s + half][n][0], q[first + s + half][n][1]);
            }
        }
    }
}

DEVICE void scale_rows(float (&acc)[NT][4], float lower, float upper) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        acc[n][0] *= lower;
        acc[n][1] *= lower;
        acc[n][2] *= upper;
        acc[n][3] *= upper;
    }
}

#if LAYOUT == 1
DEVICE float ue8m0(u64 scales, int tile) {
    u32 exponent = (u32)(scales >> (8 * tile)) & 255;
    // The exponent 0 stands for 2^-127, which float32 holds as a subnormal number.
    return bits_to_float(exponent ? exponent << 23 : 1u << 22);
}
#endif

// S of 32 keys over a quarter of their values.
DEVICE void multiply_queries(Shared& shared, int stage, const Query& query, int quarter, int half, int lane) {
    int g = lane >> 2, t = lane & 3;
    const u8* records = shared.records[stage];
    int matrix = lane >> 3;
    u32 address = shared_address(records + (half * 32 + (matrix & 1) * 8 + (lane & 7)) * ROW) + (matrix >> 1) * 16;
    int rows = half * 32 + g;
    float acc[2][NT][4] = {};
#if LAYOUT == 0
    multiply_codes<8>(acc, address + quarter * 128, query.f16, 0);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const float* scales = (const float*)(records + (rows + m * 16) * ROW + 512 + 4 * quarter);
        scale_rows(acc[m], scales[0], scales[8 * ROW / 4]);
        u32 a[4];
        ldmatrix(a, address + m * 16 * ROW + ROPE + quarter * 32);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_bf16(acc[m][n], a, query.rope[n][0], query.rope[n][1]);
    }
#else
    const u64* scales = shared.scales[stage] + rows;
    multiply_codes<4>(acc, address + quarter * 128, query.f16, 0);
#pragma unroll
    for (int m = 0; m < 2; ++m)
        scale_rows(acc[m], ue8m0(scales[m * 16], 2 * quarter), ue8m0(scales[m * 16 + 8], 2 * quarter));
    if (quarter < 3) {
        float second[2][NT][4] = {};
        multiply_codes<4>(second, address + quarter * 128, query.f16, 4);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            int tile = 2 * quarter + 1;
            scale_rows(second[m], ue8m0(scales[m * 16], tile), ue8m0(scales[m * 16 + 8], tile));
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[m][n][j] += second[m][n][j];
        }
    } else {
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                u32 a[4];
                ldmatrix(a, address + m * 16 * ROW + ROPE + s * 32);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_bf16(acc[m][n], a, query.f16[4 + s][n][0], query.f16[4 + s][n][1]);
            }
    }
#endif
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float* s = shared.s[quarter] + (n * 8 + 2 * t) * S_STRIDE + rows + m * 16;
            s[0] = acc[m][n][0];
            s[S_STRIDE] = acc[m][n][1];
            s[8] = acc[m][n][2];
            s[S_STRIDE + 8] = acc[m][n][3];
        }
}

// Running statistics of the heads that a warp is responsible for, in base 2.
struct Softmax {
    float largest[NT];
    float anchor[NT];          // what exponents are relative to: follows `largest` in jumps of ANCHOR_STEP or more
    float sum[NT];             // of this lane's keys
#if LAYOUT == 0
    float inverse[VARIANTS];   // 1 / reference
#else
    int reference[VARIANTS];   // exponents: the scales' references
#endif
};

// P of the step's keys. Returns whether the output so far has to be multiplied by anything but 1 before it grows.
DEVICE bool exponentiate(Shared& shared, int stage, Softmax& state, float scale_log2, int warp, int lane,
                         float& own_reference_change) {
    const float infinity = bits_to_float(0x7f800000);
    int rows[2] = {row_of(lane, 0), row_of(lane, 1)};
    float sums[NT][2];
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* s = shared.s[0] + (warp + 8 * j) * S_STRIDE + rows[i];
            sums[j][i] = (s[0] + s[HEADS * S_STRIDE]) + (s[2 * HEADS * S_STRIDE] + s[3 * HEADS * S_STRIDE]);
        }
    bool valid[2];
    float factor[2][VARIANTS];
    bool changed = false;
    // Scales relative to their references, which are raised first where this block has a larger one.
    own_reference_change = 1.f;
#if LAYOUT == 0
    float stored[2][VARIANTS];
    float above = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float4 four = *(const float4*)(shared.records[stage] + rows[i] * ROW + 512);
        stored[i][0] = four.x, stored[i][1] = four.y, stored[i][2] = four.z, stored[i][3] = four.w;
        valid[i] = four.x != NOT_COUNTED;
#pragma unroll
        for (int v = 0; v < VARIANTS; ++v) {
            factor[i][v] = stored[i][v] * state.inverse[v];
            above = fmaxf(above, factor[i][v]);
        }
    }
    if (__any_sync(~0u, above > 1.f)) {
#pragma unroll
        for (int v = 0; v < VARIANTS; ++v) {
            // Positive floats are ordered as their bits are. A scale that is NaN stays one in `factor`.
            u32 top = __float_as_int(fmaxf(fmaxf(stored[0][v], stored[1][v]), 0.f));
            int exponent = (int)(__reduce_max_sync(~0u, top) + 0x7fffffu >> 23) - 127;
            int before = 127 - (int)((u32)__float_as_int(state.inverse[v]) >> 23);
            int raised = max(before, min(max(exponent, -100), 100));
            if (v == warp / 2) own_reference_change = power_of_two(max(before - raised, -127));
            state.inverse[v] = power_of_two(-raised);
#pragma unroll
            for (int i = 0; i < 2; ++i) factor[i][v] = stored[i][v] * state.inverse[v];
        }
        changed = true;
    }
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) valid[i] = shared.valid[stage][rows[i]] != 0;
    u64 stored[2] = {shared.scales[stage][rows[0]], shared.scales[stage][rows[1]]};
#pragma unroll
    for (int v = 0; v < SCALES; ++v) {
        int two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) two[i] = (int)((u32)(stored[i] >> (8 * v)) & 255) - 127;
        int exponent = (int)__reduce_max_sync(~0u, (u32)(max(two[0], two[1]) + 127)) - 127;
        int raised = max(state.reference[v], exponent);
        changed |= raised != state.reference[v];
        if (v == warp) own_reference_change = power_of_two(max(state.reference[v] - raised, -127));
        state.reference[v] = raised;
#pragma unroll
        for (int i = 0; i < 2; ++i) factor[i][v] = power_of_two(max(two[i] - raised, -127));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i][7] = 1.f;
#endif
    // The heads side by side, step by step: each step waits for the one before.
    float largest[NT], p[NT][2];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        float scale = scale_log2 * shared.factor[warp + 8 * j];
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[j][i] = valid[i] ? sums[j][i] * scale : -infinity;
        largest[j] = fmaxf(sums[j][0], sums[j][1]);
    }
#pragma unroll
    for (int distance = 16; distance; distance >>= 1)
#pragma unroll
        for (int j = 0; j < NT; ++j) largest[j] = fmaxf(largest[j], __shfl_xor_sync(~0u, largest[j], distance));
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        largest[j] = fmaxf(largest[j], state.largest[j]);
        state.largest[j] = largest[j];
        float anchor = largest[j] > state.anchor[j] + ANCHOR_STEP ? largest[j] : state.anchor[j];
        float finite = anchor == -infinity ? 0.f : anchor;
        float alpha = exp2_approx(state.anchor[j] - finite);
        changed |= anchor != state.anchor[j];
        state.anchor[j] = anchor;
#pragma unroll
        for (int i = 0; i < 2; ++i) p[j][i] = exp2_approx(sums[j][i] - finite);
        state.sum[j] = state.sum[j] * alpha + (p[j][0] + p[j][1]);
        if (lane == 0) shared.alpha[warp + 8 * j] = alpha;
    }
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int v = 0; v < VARIANTS; ++v) {
            bool is_rope = LAYOUT == 1 && v == 7;
            u32 two = is_rope ? pack_bf16(p[j][0], p[j][1]) : pack_f16(p[j][0] * factor[0][v], p[j][1] * factor[1][v]);
            *(u32*)(shared.p[v] + (warp + 8 * j) * P_STRIDE + 2 * lane) = two;
        }
    return changed;
}

// O of 64 values of every row.
DEVICE void multiply_values(Shared& shared, int stage, float (&o)[4][NT][4], bool changed, float reference_change,
                            int warp, int lane) {
    int t = lane & 3, matrix = lane >> 3, j = lane & 7;
    if (changed) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float2 alpha = *(const float2*)(shared.alpha + n * 8 + 2 * t);
            float change[2] = {alpha.x * reference_change, alpha.y * reference_change};
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][n][i] *= change[i & 1];
        }
    }
    constexpr bool has_rope = LAYOUT == 1;
    int variant = LAYOUT == 0 ? warp / 2 : warp;
    u32 p_address = shared_address(shared.p[variant] + (lane & 7) * P_STRIDE) + (matrix & 1) * 16
        + (NT > 1 ? (matrix >> 1) * 8 * P_STRIDE * 2 : 0);
    // Position 16 k + 8 (matrix & 1) + j lies in row 8 k + rows[..] of shared memory.
    int row = row_of((matrix & 1) * 4 + (j >> 1), j & 1);
    u32 v_address = shared_address(shared.records[stage] + row * ROW);
    if (has_rope && warp == 7) {
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
            for (int m = 0; m < 4; ++m) {
                // Matrices: values 0 to 7 of keys 0 to 7, of keys 8 to 15, then values 8 to 15.
                u32 r[4];
                ldmatrix_transposed(r, v_address + k * 8 * ROW + m * 32);
                u32 a[4] = {r[0], r[2], r[1], r[3]};
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_bf16(o[m][n], a, b[n][0], b[n][1]);
            }
        }
        return;
    }
    v_address += warp * 64 + (matrix >> 1) * 16;
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
        for (int m = 0; m < 4; m += 2) {
            // A transposed register holds values 2g and 2g + 1 of keys 2t and 2t + 1; the products want
            // the keys of one value side by side. Row g of a tile is value 2g, row g + 8 value 2g + 1.
            u32 codes[4];
            ldmatrix_transposed(codes, v_address + k * 8 * ROW + m * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4];
                fp8_to_f16(__byte_perm(codes[2 * half], 0, 0x3120), a[0], a[1]);
                fp8_to_f16(__byte_perm(codes[2 * half + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
                for (int n = 0; n < NT; ++n) mma_f16(o[m + half][n], a, b[n][0], b[n][1]);
            }
        }
    }
}

// Attention of query row `blockIdx.x` for heads from `HEADS * blockIdx.y` on, over the share `blockIdx.z` of its
// entries. With one share `out`, `lse` and `max_logits` are the result; with more, `partial_out` and
// `partial_lse` (base 2) hold every share's own, which `combine` adds up.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads,
    Scope first, Scope second, const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, float* __restrict__ partial_out, float* __restrict__ partial_lse) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int row = blockIdx.x, first_head = HEADS * blockIdx.y;
    int own_heads = min(HEADS, heads - first_head);

    int lengths[2] = {scope_length(first, row), HAS_EXTRA ? scope_length(second, row) : 0};
    int blocks[2] = {(lengths[0] + KEYS - 1) / KEYS, (lengths[1] + KEYS - 1) / KEYS};
    int all = blocks[0] + blocks[1], share = (all + gridDim.z - 1) / gridDim.z;
    int begin = min(share * (int)blockIdx.z, all), end = min(begin + share, all);

    // A slot is read a step before its address is needed: nothing waits for it then.
    const int* own = first.indices + row * first.indices_stride + warp * 8 + (lane & 7);
    const int* extra = second.indices + row * second.indices_stride + warp * 8 + (lane & 7);
    auto slot_of = [&](int block) -> int {
        bool is_first = !HAS_EXTRA || block < blocks[0];
        int e = (is_first ? block : block - blocks[0]) * KEYS;
        int room = (is_first ? lengths[0] : lengths[1]) - warp * 8 - (lane & 7);
        return block < end && e < room ? (is_first ? own : extra)[e] : -1;
    };
    auto copy = [&](int block, int slot) {
        start_copies(shared, block - begin & 1, warp, lane, find_entry(first, second, block < blocks[0], slot, zeros));
    };

    if (threadIdx.x < STAGES) barrier_init(shared_address(&shared.full[threadIdx.x]), ARRIVALS);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (begin < end) copy(begin, slot_of(begin));
    int next = slot_of(begin + 1);

    Query query;
    int quarter = warp & 3, half = warp >> 2;
    load_query(shared, query, q + row * q_row_stride + first_head * q_head_stride, q_head_stride, own_heads, quarter, lane);
    float o[4][NT][4] = {};
    const float infinity = bits_to_float(0x7f800000);
    Softmax state;
#pragma unroll
    for (int j = 0; j < NT; ++j) state.largest[j] = state.anchor[j] = -infinity, state.sum[j] = 0.f;
#pragma unroll
#if LAYOUT == 0
    for (int v = 0; v < VARIANTS; ++v) state.inverse[v] = power_of_two(100);
#else
    for (int v = 0; v < VARIANTS; ++v) state.reference[v] = -127;
#endif

    for (int block = begin; block < end; ++block) {
        int step = block - begin, stage = step & 1;
        barrier_wait(shared_address(&shared.full[stage]), step >> 1 & 1);
#if EXPERIMENT != 1
        multiply_queries(shared, stage, query, quarter, half, lane);
#endif
        __syncthreads();  // S is there, and nobody reads P or the other stage any more
#if EXPERIMENT != 2
        if (block + 1 < end) {
            copy(block + 1, next);
            next = slot_of(block + 2);
        }
#else
        if (block + 1 < end && threadIdx.x < ARRIVALS) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(&shared.full[stage ^ 1])) : "memory");
#endif
        float reference_change;
#if EXPERIMENT != 1
        bool changed = exponentiate(shared, stage, state, scale_log2, warp, lane, reference_change);
        changed = __syncthreads_or(changed);  // P is there, and nobody reads S any more
        multiply_values(shared, stage, o, changed, reference_change, warp, lane);
#endif
    }

    __syncthreads();
    bool is_whole = gridDim.z == 1;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        int head = warp + 8 * j;
        float sum = state.sum[j];
        for (int distance = 16; distance; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
        if (lane == 0) {
            float total = state.anchor[j] + log2_approx(sum);  // -inf where there is nothing
            float weight = sum == 0.f ? 0.f : 1.f / sum;
            if (head < own_heads) {
                i64 at = (i64)row * heads + first_head + head;
                if (is_whole) {
                    if (sink && sum != 0.f) weight /= 1.f + exp2_approx(sink[first_head + head] * 1.4426950408889634f - total);
                    lse[at] = sum == 0.f ? infinity : total * 0.6931471805599453f;
                    max_logits[at] = state.largest[j] * 0.6931471805599453f;
                } else {
                    i64 part = ((i64)blockIdx.z * gridDim.x * heads + at) * 2;
                    partial_lse[part] = sum == 0.f ? -infinity : total;
                    partial_lse[part + 1] = state.largest[j];
                }
            }
            shared.alpha[head] = weight;
        }
    }
    __syncthreads();

    int g = lane >> 2, t = lane & 3;
    int variant = LAYOUT == 0 ? warp / 2 : warp;
    int exponent = 0;
#pragma unroll
    for (int v = 0; v < SCALES; ++v)
        if (v == variant)
#if LAYOUT == 0
            exponent = 127 - (int)((u32)__float_as_int(state.inverse[v]) >> 23);
#else
            exponent = state.reference[v];
#endif
    // Exponents reach 127 + 1, which is not a finite float32: applied in two halves.
    float reference = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
    bool is_rope = LAYOUT == 1 && warp == 7;
    if (is_rope) reference = rest = 1.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = n * 8 + 2 * t + i;
            if (head >= own_heads) continue;
            float weight = shared.alpha[head];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                float lower = weight != 0.f ? o[m][n][i] * weight * reference * rest : 0.f;
                float upper = weight != 0.f ? o[m][n][i + 2] * weight * reference * rest : 0.f;
                int value = warp * 64 + m * 16 + (is_rope ? g : 2 * g), step = is_rope ? 8 : 1;
                if (!is_whole) {
                    float* to = partial_out
                        + (((i64)blockIdx.z * gridDim.x + row) * heads + first_head + head) * D_V + value;
                    if (is_rope) to[0] = lower, to[8] = upper;
                    else *(float2*)to = make_float2(lower, upper);
                } else {
                    i64 at = row * out_row_stride + (first_head + head) * out_head_stride + value;
#if OUT_FLOAT32
                    ((float*)out)[at] = lower, ((float*)out)[at + step] = upper;
#else
                    u32 both = pack_bf16(lower, upper);
                    ((u16*)out)[at] = (u16)both, ((u16*)out)[at + step] = (u16)(both >> 16);
#endif
                }
            }
        }
}

// The shares of a row and head together, and the sink. A block of 128 threads a row and head.
extern "C" __global__ void __launch_bounds__(128) combine(
    const float* __restrict__ partial_out, const float* __restrict__ partial_lse, int shares, int rows, int heads,
    const float* __restrict__ sink, u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride,
    float* __restrict__ lse, float* __restrict__ max_logits) {
    const float infinity = __int_as_float(0x7f800000);
    int row = blockIdx.x, head = blockIdx.y;
    i64 at = (i64)row * heads + head, apart = (i64)rows * heads;
    float top = -infinity, largest = -infinity;
    for (int s = 0; s < shares; ++s) {
        top = fmaxf(top, partial_lse[(s * apart + at) * 2]);
        largest = fmaxf(largest, partial_lse[(s * apart + at) * 2 + 1]);
    }
    float sum = 0.f;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
    bool is_empty = top == -infinity;
    for (int s = 0; s < shares && !is_empty; ++s) {
        float weight = exp2_approx(partial_lse[(s * apart + at) * 2] - top);
        if (weight == 0.f) continue;
        float4 part = ((const float4*)(partial_out + (s * apart + at) * D_V))[threadIdx.x];
        sum += weight;
        o.x += weight * part.x, o.y += weight * part.y, o.z += weight * part.z, o.w += weight * part.w;
    }
    float total = top + log2_approx(sum);
    float weight = is_empty ? 0.f : 1.f / sum;
    if (sink && !is_empty) weight /= 1.f + exp2_approx(sink[head] * 1.4426950408889634f - total);
    if (threadIdx.x == 0) {
        lse[at] = is_empty ? infinity : total * 0.6931471805599453f;
        max_logits[at] = largest * 0.6931471805599453f;
    }
    i64 to = row * out_row_stride + head * out_head_stride + threadIdx.x * 4;
    float values[4] = {o.x * weight, o.y * weight, o.z * weight, o.w * weight};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if OUT_FLOAT32
        ((float*)out)[to + i] = values[i];
#else
        ((u16*)out)[to + i] = (u16)pack_bf16(values[i], 0.f);
#endif
    }
}
