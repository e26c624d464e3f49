// Sparse MLA prefill over a paged V3.2 fp8 cache for 32 or 64 query heads on SM90: see sparse_mla_wide.py.
//
// A block attends one query token at a time with HEADS heads, 64 keys a step, and goes on to the next token by itself.
// Keys and values are the rows of the products (wgmma), heads their columns. The records stay in shared memory as they
// are in the cache: both products take their codes through registers, where they become float16, exactly.
//
//   copiers       records of the next steps to shared memory, by bulk copies
//   logits        S = K Q^T, by quarters of the values, whose sums are multiplied by the key's scale; P = exp(S)
//   two outputs   O = V^T P, 256 values each; a value is multiplied by its scale, relative to `references`, on its way
//
// The logits of a step are made while the outputs of the step before grow. They take longer; with 32 heads registers
// suffice for a second warpgroup of them, which has every other step: their products overlap, P is made in the order of
// the steps. The rest is as in sparse_mla.cu, which has the reasons: queries divided by a power of two, anchors that
// exponents are relative to and that seldom move, scales relative to a power of two that seldom moves, records that
// stand for entries which do not count.
//
// Positions: a warp of the logits has rows 16 w to 16 w + 15 of the step, a thread rows 16 w + g and 16 w + 8 + (g ^ 4)
// of them. These are positions 2 l and 2 l + 1, l = 8 w + g, of P. Reads and writes so spread over all banks.

#include "scope.cuh"
#include "sparse_mla_softmax.cuh"
#include "wgmma.cuh"

#ifndef STAGES
#define STAGES (HEADS == 64 ? 2 : 3)  // steps of keys in shared memory
#endif
#ifndef LOGITS
#define LOGITS (HEADS == 64 ? 1 : 2)  // warpgroups that make logits
#endif
#define LARGEST_SHARED (LOGITS == 1)  // registers do not suffice
#ifndef LOGITS_REGISTERS
#define LOGITS_REGISTERS (LOGITS == 1 ? 136 : 112)
#endif
#ifndef OUTPUT_REGISTERS
#define OUTPUT_REGISTERS (LOGITS == 1 ? 176 : 112)
#endif

namespace {

constexpr int KEYS = 64, ROW = 656, SCALES = 512, ROPE = 528;
constexpr int QUERY_BLOCK = HEADS * 128;  // bytes of 64 values of all heads
constexpr int COPIERS = 4, OUTPUTS = 8;   // warps
constexpr int COPIES = KEYS / COPIERS;
constexpr int THREADS = (3 + LOGITS) * 128;
constexpr int LOGITS_BARRIER = 1, ALL_LOGITS_BARRIER = 3;  // the first of one for each warpgroup
constexpr int PAIRS = HEADS / 4;          // heads of a thread of the logits

// At launch the threads have 128 or 96 registers each.
static_assert(24 + LOGITS * LOGITS_REGISTERS + 2 * OUTPUT_REGISTERS <= (LOGITS == 1 ? 512 : 480), "registers of an SM");

struct Shared {
    u8 query[9 * QUERY_BLOCK];      // 512 values as float16, in the order of the codes, and 64 as bfloat16
    u8 p[2][HEADS * 128];           // float16, a row of 64 positions a head
    u8 records[STAGES][KEYS * ROW];
    u32 factors[2][4][KEYS / 2];    // scales of two positions, by quarter
    float alpha[2][HEADS];          // what the outputs so far are multiplied by, where `changed`
    float change[2][4];             // and by quarter
    float2 states[HEADS];           // what a logit is multiplied by, and its anchor
    float sums[4 * LOGITS][HEADS], tops[4 * LOGITS][HEADS];
#if LARGEST_SHARED
    float largest[PAIRS][128];      // of a thread's logits
#endif
    u32 top_scales[4 * LOGITS][4];
    float weights[HEADS];           // what the outputs of a token are multiplied by in the end
    int references[4], last_references[4];
    int changed[2];
    u32 raised;                     // how often anchors were, for this token
    int remaining[STAGES];          // steps of the token behind this one
    u64 full[STAGES], empty[STAGES], p_full[2], p_empty[2], weights_full, weights_empty;
};

// As the class `WideArguments` of the module.
struct Arguments {
    const u16* q;
    i64 q_row_stride, q_head_stride;  // elements
    Scope scope;
    int rows, heads, groups;          // a token has `groups` groups of HEADS heads
    const u8* nothings;
    const float* sink;
    float scale_log2;
    u16* out;
    i64 out_row_stride, out_head_stride;
    float* lse;
    float* max_logits;
};

// Steps of a token up to the last one with an entry that counts, at least one. By a whole warp.
DEVICE int count_steps(const Arguments& a, const int* indices, int length, int lane) {
    int steps = (length + KEYS - 1) / KEYS;
    if (steps <= 1) return 1;
    int from = (steps - 1) * KEYS;
    bool found = false;
    for (int e = from + lane; e < length; e += 32) found |= (u32)__ldg(indices + e) < (u32)a.scope.num_slots;
    if (__any_sync(~0u, found)) return steps;
    int last = 0;
    for (int e = lane; e < from; e += 32)
        if ((u32)__ldg(indices + e) < (u32)a.scope.num_slots) last = e;
    return (int)__reduce_max_sync(~0u, (u32)last) / KEYS + 1;
}

DEVICE void copy_records(const Arguments& a, Shared& shared, int warp, int lane) {
    int stage = 0;
    u32 phase = 1;
    for (int work = blockIdx.x; work < a.rows * a.groups; work += gridDim.x) {
        int row = work / a.groups;
        const int* indices = a.scope.indices + row * a.scope.indices_stride;
        int length = scope_length(a.scope, row);
        int steps = max(count_steps(a, indices, length, lane), LOGITS);
        int i = warp * COPIES + lane % COPIES;
        int next = i < length ? __ldg(indices + i) : -1;
        if (work + gridDim.x < a.rows * a.groups) {
            // The next token's query will be read by few threads that nobody else waits for.
            int after = (work + gridDim.x) / a.groups, head = (work + gridDim.x) % a.groups * HEADS;
            for (int k = warp * 32 + lane; k < 9 * HEADS; k += COPIERS * 32)
                if (head + k / 9 < a.heads) {
                    const u16* at = a.q + after * a.q_row_stride + (head + k / 9) * a.q_head_stride + k % 9 * 64;
                    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
                }
        }
        for (int step = 0; step < steps; ++step) {
            int slot = next, e = (step + 1) * KEYS + i;
            next = step + 1 < steps && e < length ? __ldg(indices + e) : -1;
            const u8* from = a.nothings + (work * KEYS + i) % NOTHINGS * ROW;
            if ((u32)slot < (u32)a.scope.num_slots) from = find_record(a.scope, slot, ROW);
            u32 full = shared_address(&shared.full[stage]);
            barrier_wait(shared_address(&shared.empty[stage]), phase);
            u32 to = shared_address(shared.records[stage] + warp * COPIES * ROW);
            bool acts = elected();
            if (acts) {
                if (warp == 0) shared.remaining[stage] = steps - 1 - step;
                barrier_expect(full, COPIES * ROW);
            }
#pragma unroll 2
            for (int k = 0; k < COPIES; ++k) {
                u64 address = __shfl_sync(~0u, (u64)from, k);
                if (acts) bulk_copy(to + k * ROW, (const void*)address, ROW, full);
            }
            __syncwarp();
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// A token's query, in the form of the products' columns. Positions 2 t, 2 t + 1 and 8 + 2 t, 9 + 2 t of sixteen have
// codes 4 t to 4 t + 3, as a register of codes has them.
DEVICE void load_query(const Arguments& a, Shared& shared, int row, int first_head, int warp, int lane) {
    constexpr int BATCH = 4, WARPS = 4 * LOGITS;
    for (int k = 0; k < HEADS / WARPS; k += BATCH) {
        uint2 codes[BATCH][4];
        u32 rope[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int head = first_head + (k + b) * WARPS + warp;
            const u16* q = a.q + row * a.q_row_stride + head * a.q_head_stride;
#pragma unroll
            for (int c = 0; c < 4; ++c) codes[b][c] = make_uint2(0, 0);
            rope[b] = 0;
            if (head < a.heads) {
#pragma unroll
                for (int c = 0; c < 4; ++c) codes[b][c] = __ldg((const uint2*)(q + lane * 16) + c);
                rope[b] = __ldg((const u32*)(q + D_V) + lane);
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int head = (k + b) * WARPS + warp;
            float values[16], largest = 0.f;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                values[4 * c] = bits_to_float(codes[b][c].x << 16);
                values[4 * c + 1] = bits_to_float(codes[b][c].x & 0xffff0000u);
                values[4 * c + 2] = bits_to_float(codes[b][c].y << 16);
                values[4 * c + 3] = bits_to_float(codes[b][c].y & 0xffff0000u);
            }
#pragma unroll
            for (int c = 0; c < 16; ++c) largest = fmaxf(largest, fabsf(values[c]));
            largest = warp_max(largest);
            int exponent = query_exponent(largest);
            float divide = power_of_two(-exponent);
            u32 pairs[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) pairs[c] = pack_f16(values[2 * c] * divide, values[2 * c + 1] * divide);
            u8* to = shared.query + (lane >> 2) * QUERY_BLOCK + head * 128;
            int chunk = (lane & 3) * 2;
            *(uint4*)(to + ((chunk ^ (head & 7)) << 4)) = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
            *(uint4*)(to + (((chunk + 1) ^ (head & 7)) << 4)) = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
            u32 both = pack_bf16(bits_to_float(rope[b] << 16) * divide, bits_to_float(rope[b] & 0xffff0000u) * divide);
            u8* rest = shared.query + 8 * QUERY_BLOCK + head * 128;
            *(u32*)(rest + (((lane >> 2) ^ (head & 7)) << 4) + 4 * (lane & 3)) = both;
            if (lane == 0) shared.states[head] = make_float2(power_of_two(exponent) * a.scale_log2, ANCHOR_START);
        }
    }
}

// The scale of a quarter of one of a thread's two keys.
DEVICE float scale_of(const Shared& shared, int stage, int key, int quarter, int warp, int lane) {
    int g = lane >> 2, row = warp * 16 + (key ? 8 + (g ^ 4) : g);
    return *(const volatile float*)(shared.records[stage] + row * ROW + SCALES + quarter * 4);
}

// S of a step, unscaled but for the keys' scales.
DEVICE void multiply_queries(const Shared& shared, int stage, float (&s)[SUMS], int warp, int lane) {
    int matrix = lane >> 3, j = lane & 7;
    const u8* records = shared.records[stage] + warp * 16 * ROW;
    u32 from = shared_address(records + (matrix & 1 ? 8 + (j ^ 4) : j) * ROW + (matrix >> 1) * 16);
    u32 query = shared_address(shared.query);
    u32 rope[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix(rope[k], from + ROPE + k * 32);
    products_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        multiply_rows_bf16(s, rope[k], swizzled_matrix(query + 8 * QUERY_BLOCK + k * 32), k > 0);
    products_commit();
    float quarter[SUMS];
    u32 codes[4], keys[2][8];
    auto convert = [&](int n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            fp8_to_f16(codes[2 * half], keys[n & 1][4 * half], keys[n & 1][4 * half + 2]);
            fp8_to_f16(codes[2 * half + 1], keys[n & 1][4 * half + 1], keys[n & 1][4 * half + 3]);
        }
    };
    ldmatrix(codes, from);
    convert(0);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        products_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int k = 2 * n + half;
            u64 columns = swizzled_matrix(query + (k >> 2) * QUERY_BLOCK + (k & 3) * 32);
            multiply_rows_f16(quarter, &keys[n & 1][4 * half], columns, k % 8 > 0);
        }
        products_commit();
        if (n + 1 < 16) {
            ldmatrix(codes, from + (n + 1) * 32);
            products_wait<1>();
            convert(n + 1);
        }
        if (n % 4 == 3) {
            float upper = scale_of(shared, stage, 0, n / 4, warp, lane);
            float lower = scale_of(shared, stage, 1, n / 4, warp, lane);
            products_wait<0>();
            fence_sums(quarter);
            if (n == 3) fence_sums(s);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) s[i] += quarter[i] * (i & 2 ? lower : upper);
        }
    }
}

// What a thread of the logits knows of its heads: 8 j + 2 t + e is number 2 j + e.
struct Softmax {
    float sum[PAIRS];
#if !LARGEST_SHARED
    float largest[PAIRS];
#endif
    float anchor[PAIRS];  // that the sums are relative to; with one warpgroup, that of `states`
    u32 raised;
};

#if LARGEST_SHARED
#define LARGEST(i) shared.largest[i][threadIdx.x & 127]
#else
#define LARGEST(i) own.largest[i]
#endif

// Sums relative to the anchors of now.
DEVICE void follow(const Shared& shared, Softmax& own, int t) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        float anchor = shared.states[8 * (i / 2) + 2 * t + i % 2].y;
        own.sum[i] *= exp2_approx(own.anchor[i] - anchor);
        own.anchor[i] = anchor;
    }
    own.raised = shared.raised;
}

// Raises anchors and references that a step exceeds, by all threads of its warpgroup together.
DEVICE void raise(Shared& shared, int buffer, Softmax& own, float top_scale, int group, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, thread = warp * 32 + lane;
    float (*tops)[HEADS] = shared.tops + 4 * group;
    u32 (*top_scales)[4] = shared.top_scales + 4 * group;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        float top = LARGEST(i);
#pragma unroll
        for (int distance = 4; distance < 32; distance <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        if (g == 0) tops[warp][8 * (i / 2) + 2 * t + i % 2] = top;
    }
    // Positive floats are ordered as their bits are.
    u32 top = __float_as_uint(fmaxf(top_scale, 0.f));
#pragma unroll
    for (int distance = 4; distance < 32; distance <<= 1) top = max(top, __shfl_xor_sync(~0u, top, distance));
    if (g == 0) top_scales[warp][t] = top;
    named_sync(LOGITS_BARRIER + group, 128);
    if (thread < HEADS) {
        float top = fmaxf(fmaxf(tops[0][thread], tops[1][thread]), fmaxf(tops[2][thread], tops[3][thread]));
        float anchor = shared.states[thread].y, raised = top > anchor + ANCHOR_STEP ? top : anchor;
        shared.alpha[buffer][thread] = exp2_approx(anchor - raised);
        shared.states[thread].y = raised;
    } else if (thread < HEADS + 4) {
        int quarter = thread - HEADS;
        u32 top = max(max(top_scales[0][quarter], top_scales[1][quarter]),
                      max(top_scales[2][quarter], top_scales[3][quarter]));
        int reference = shared.references[quarter], raised = raise_reference(reference, top);
        shared.change[buffer][quarter] = change_of_reference(reference, raised);
        shared.references[quarter] = raised;
    } else if (thread == HEADS + 4) {
        ++shared.raised;
    }
    named_sync(LOGITS_BARRIER + group, 128);
    if (LOGITS > 1) {
        follow(shared, own, t);
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) own.sum[i] *= shared.alpha[buffer][8 * (i / 2) + 2 * t + i % 2];
    }
}

DEVICE void make_logits(const Arguments& a, Shared& shared, int group, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, thread = warp * 32 + lane;
    u32 first = 0, tokens = 0;  // the number of the token's first step
    for (int work = blockIdx.x; work < a.rows * a.groups; work += gridDim.x, ++tokens) {
        int row = work / a.groups, first_head = work % a.groups * HEADS;
        named_sync(ALL_LOGITS_BARRIER, LOGITS * 128);  // nobody reads the token before any more
        load_query(a, shared, row, first_head, 4 * group + warp, lane);
        if (group == 0 && thread < 4) shared.references[thread] = -100;
        if (group == 0 && thread == 0) shared.raised = 0;
        show_writes();
        named_sync(ALL_LOGITS_BARRIER, LOGITS * 128);
        Softmax own;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) own.sum[i] = 0.f, LARGEST(i) = -infinity(), own.anchor[i] = ANCHOR_START;
        own.raised = 0;

        for (int step = group, remaining = LOGITS; remaining >= LOGITS; step += LOGITS) {
            u32 number = first + step, stage = number % STAGES, buffer = number & 1;
            barrier_wait(shared_address(&shared.full[stage]), number / STAGES & 1);
            remaining = shared.remaining[stage];
            if (remaining < LOGITS) first += step + remaining + 1;
            float s[SUMS];
            multiply_queries(shared, stage, s, warp, lane);

            float stored[2], bias[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                stored[i] = scale_of(shared, stage, i, t, warp, lane);
                bias[i] = stored[i] != NOT_COUNTED ? 0.f : -infinity();  // all four scales of a record say so, or none
            }
            float top_scale = fmaxf(stored[0], stored[1]);
            bool exceeds = false;
#pragma unroll
            for (int j = 0; j < HEADS / 8; ++j) {
                float4 both = *(const float4*)&shared.states[8 * j + 2 * t];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float scale = e ? both.z : both.x, anchor = e ? both.w : both.y;
                    s[4 * j + e] = s[4 * j + e] * scale + bias[0];
                    s[4 * j + 2 + e] = s[4 * j + 2 + e] * scale + bias[1];
                    float top = fmaxf(s[4 * j + e], s[4 * j + 2 + e]);
                    LARGEST(2 * j + e) = fmaxf(LARGEST(2 * j + e), top);
                    if (LOGITS == 1) exceeds |= top > anchor + ANCHOR_STEP;
                }
            }
            if (LOGITS > 1) {
                // Until the step before has made its P, it may raise anchors; the step behind waits for this one.
                if (number) barrier_wait(shared_address(&shared.p_full[buffer ^ 1]), number - 1 >> 1 & 1);
                if (shared.raised != own.raised) follow(shared, own, t);
#pragma unroll
                for (int i = 0; i < PAIRS; ++i) {
                    int j = i / 2 * 4 + i % 2;
                    exceeds |= fmaxf(s[j], s[j + 2]) > own.anchor[i] + ANCHOR_STEP;
                }
            }
            exceeds |= top_scale * power_of_two(-shared.references[t]) > 1.f;
            barrier_wait(shared_address(&shared.p_empty[buffer]), (number >> 1 & 1) ^ 1);
            bool changed = named_any(LOGITS_BARRIER + group, 128, exceeds);
            if (changed) raise(shared, buffer, own, top_scale, group, warp, lane);
            float reference = power_of_two(-shared.references[t]);
            shared.factors[buffer][t][8 * warp + g] = pack_f16(stored[0] * reference, stored[1] * reference);
            u8* to = shared.p[buffer] + 2 * t * 128 + 4 * (g & 3);
            int chunk = 2 * warp + (g >> 2);
#pragma unroll
            for (int j = 0; j < HEADS / 8; ++j) {
                float4 both;
                if (LOGITS == 1) both = *(const float4*)&shared.states[8 * j + 2 * t];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float anchor = LOGITS > 1 ? own.anchor[2 * j + e] : e ? both.w : both.y;
                    float p0 = exp2_approx(s[4 * j + e] - anchor), p1 = exp2_approx(s[4 * j + 2 + e] - anchor);
                    own.sum[2 * j + e] += p0 + p1;
                    *(u32*)(to + j * 1024 + e * 128 + ((chunk ^ (2 * t + e)) << 4)) = pack_f16(p0, p1);
                }
            }
            if (thread == 0) shared.changed[buffer] = changed;
            show_writes();
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.p_full[buffer]));
        }

        if (LOGITS > 1) {
            named_sync(ALL_LOGITS_BARRIER, LOGITS * 128);  // all have made their last P
            follow(shared, own, t);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            float total = own.sum[i], top = LARGEST(i);
#pragma unroll
            for (int distance = 4; distance < 32; distance <<= 1) {
                total += __shfl_xor_sync(~0u, total, distance);
                top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            }
            int head = 8 * (i / 2) + 2 * t + i % 2;
            if (g == 0) shared.sums[4 * group + warp][head] = total, shared.tops[4 * group + warp][head] = top;
        }
        named_sync(ALL_LOGITS_BARRIER, LOGITS * 128);
        if (group == 0 && thread < HEADS) {
            float sum = 0.f, top = -infinity();
#pragma unroll
            for (int w = 0; w < 4 * LOGITS; ++w) {
                sum += shared.sums[w][thread];
                top = fmaxf(top, shared.tops[w][thread]);
            }
            float total = shared.states[thread].y + log2_approx(sum), weight = sum == 0.f ? 0.f : 1.f / sum;
            int head = first_head + thread;
            if (head < a.heads) {
                if (a.sink && sum != 0.f) weight /= 1.f + exp2_approx(a.sink[head] * LOG2_E - total);
                i64 at = (i64)row * a.heads + head;
                a.lse[at] = sum == 0.f ? infinity() : total * LN_2;
                a.max_logits[at] = top * LN_2;
            }
            barrier_wait(shared_address(&shared.weights_empty), (tokens & 1) ^ 1);
            shared.weights[thread] = weight;
            if (thread < 4) shared.last_references[thread] = shared.references[thread];
            barrier_arrive(shared_address(&shared.weights_full));
        }
    }
}

DEVICE void make_outputs(const Arguments& a, Shared& shared, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3, j = lane & 7;
    int quarter = warp >> 1, first_value = warp * 64;
    // Positions 16 k + 8 (matrix & 1) + j, and sixteen values.
    int key = 4 * (matrix & 1) + (j >> 1), from_row = j & 1 ? 8 + (key ^ 4) : key;
    u32 from = from_row * ROW + first_value + (matrix >> 1) * 16;
    int stage = 0;
    u32 phase = 0, number = 0, tokens = 0;
    for (int work = blockIdx.x; work < a.rows * a.groups; work += gridDim.x, ++tokens) {
        int row = work / a.groups, first_head = work % a.groups * HEADS;
        float o[4][SUMS];
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) o[m][i] = 0.f;

        for (bool is_last = false; !is_last; ++number) {
            u32 buffer = number & 1;
            barrier_wait(shared_address(&shared.full[stage]), phase);
            is_last = shared.remaining[stage] == 0;
            barrier_wait(shared_address(&shared.p_full[buffer]), number >> 1 & 1);
            if (shared.changed[buffer]) {
                float change = shared.change[buffer][quarter];
#pragma unroll
                for (int n = 0; n < HEADS / 8; ++n) {
                    float2 alpha = *(const float2*)&shared.alpha[buffer][8 * n + 2 * t];
                    float by[2] = {alpha.x * change, alpha.y * change};
#pragma unroll
                    for (int m = 0; m < 4; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i) o[m][4 * n + i] *= by[i & 1];
                }
            }
            u32 records = shared_address(shared.records[stage]) + from, p = shared_address(shared.p[buffer]);
            const u32* factors = shared.factors[buffer][quarter] + t;
            u32 codes[4], values[2][8];
            auto convert = [&](int n) {
                u32 lower = factors[n / 2 * 8], upper = factors[n / 2 * 8 + 4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32* to = &values[n & 1][4 * half];
                    fp8_to_f16(__byte_perm(codes[2 * half], 0, 0x3120), to[0], to[1]);
                    fp8_to_f16(__byte_perm(codes[2 * half + 1], 0, 0x3120), to[2], to[3]);
                    to[0] = multiply_f16(to[0], lower), to[1] = multiply_f16(to[1], lower);
                    to[2] = multiply_f16(to[2], upper), to[3] = multiply_f16(to[3], upper);
                }
            };
            ldmatrix_transposed(codes, records);
            convert(0);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                u64 columns = swizzled_matrix(p + (n >> 1) * 32);
                products_fence();
                multiply_rows_f16(o[2 * (n & 1)], &values[n & 1][0], columns, 1);
                multiply_rows_f16(o[2 * (n & 1) + 1], &values[n & 1][4], columns, 1);
                products_commit();
                if (n + 1 < 8) {
                    ldmatrix_transposed(codes, records + (n + 1) / 2 * 16 * ROW + ((n + 1) & 1) * 32);
                    products_wait<1>();
                    convert(n + 1);
                }
            }
            products_wait<0>();
#pragma unroll
            for (int m = 0; m < 4; ++m) fence_sums(o[m]);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(shared_address(&shared.empty[stage]));
                barrier_arrive(shared_address(&shared.p_empty[buffer]));
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

        barrier_wait(shared_address(&shared.weights_full), tokens & 1);
        // Exponents reach 127 + 1, which is not a finite float32: applied in two halves.
        int exponent = shared.last_references[quarter];
        float reference = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
        u16* out = a.out + row * a.out_row_stride + first_head * a.out_head_stride + first_value + 2 * g;
#pragma unroll
        for (int n = 0; n < HEADS / 8; ++n) {
            float2 weights = *(const float2*)&shared.weights[8 * n + 2 * t];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int head = 8 * n + 2 * t + e;
                float weight = e ? weights.y : weights.x;
                if (first_head + head >= a.heads) continue;
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    float lower = weight != 0.f ? o[m][4 * n + e] * weight * reference * rest : 0.f;
                    float upper = weight != 0.f ? o[m][4 * n + 2 + e] * weight * reference * rest : 0.f;
                    *(u32*)(out + head * a.out_head_stride + m * 16) = pack_bf16(lower, upper);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.weights_empty));
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_wide(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&shared.full[stage]), COPIERS);
            barrier_init(shared_address(&shared.empty[stage]), OUTPUTS);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            barrier_init(shared_address(&shared.p_full[buffer]), 4);
            barrier_init(shared_address(&shared.p_empty[buffer]), OUTPUTS);
        }
        barrier_init(shared_address(&shared.weights_full), HEADS);
        barrier_init(shared_address(&shared.weights_empty), OUTPUTS);
        show_writes();
    }
    __syncthreads();
    if (warp < 4) {
        fewer_registers<24>();
        copy_records(a, shared, warp, lane);
    } else if (warp < 4 + 4 * LOGITS) {
        more_registers<LOGITS_REGISTERS>();
        make_logits(a, shared, warp / 4 - 1, warp % 4, lane);
    } else {
        more_registers<OUTPUT_REGISTERS>();
        make_outputs(a, shared, warp - 4 - 4 * LOGITS, lane);
    }
}
