// Adding up what blocks of threads made of shares of a row's entries: in a cluster, or by a kernel `combine_N`.
#pragma once

#ifndef OUT_FLOAT32
#define OUT_FLOAT32 0
#endif

#include "sparse_mla_softmax.cuh"

constexpr int MAX_SHARES = 16;  // blocks of a cluster
constexpr int COMBINING = 4;    // warps of a block of `combine_N`

// What a share of a row's entries makes of one head, beside its output: the mean of the values, by their weights.
struct Share {
    float lse;      // base 2, -inf where there is nothing
    float largest;  // of the logits, base 2
};

// A share's output of a head, until `combine_N` reads it: float16, which is half as much to write and to read as float32. Groups
// of 64 values are multiplied by a power of two, so that the largest is at least 2^14. A warp has one power for its values of
// all heads of its block. Values down to 2^-28 of the largest lose 2^-11 at most, where rounding the result to bfloat16 loses
// 2^-8; a result in float32 has that precision, too. A group is four tiles of 16 values, of which a thread of the second
// product has two each: these are side by side.
constexpr int PARTIAL_GROUPS = D_V / 64;
struct Partial {
    uint4 values[PARTIAL_GROUPS][8];  // in [p]: values 2 p and 2 p + 1 of each tile
    float scales[PARTIAL_GROUPS];     // what the values are multiplied by to have them back
};
static_assert(sizeof(Partial) == D_V * 2 + PARTIAL_GROUPS * 4, "the launcher makes room for it");

// The exponent of that power, where the largest value is this. At most 80, so that it can be multiplied by the factor of an
// output: values below 2^-66 become less than 2^14, and below 2^-94 lose precision.
DEVICE int partial_exponent(float largest) {
    return largest > 0.f ? min(14 + 127 - (__float_as_int(largest) >> 23), 80) : 0;
}

// Two or four values of the output, from element `at` on.
DEVICE void write_two(u8* out, i64 at, float lower, float upper) {
#if OUT_FLOAT32
    *(float2*)((float*)out + at) = make_float2(lower, upper);
#else
    *(u32*)((u16*)out + at) = pack_bf16(lower, upper);
#endif
}
DEVICE void write_values(u8* out, i64 at, float4 x) {
#if OUT_FLOAT32
    *(float4*)((float*)out + at) = x;
#else
    *(uint2*)((u16*)out + at) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
#endif
}

// How often the lanes of a warp share out the shares between them, log2, where `warps` add up `heads` heads of a row:
// so often that most of them have something to do, since reading other blocks' shared memory is what takes long.
DEVICE int halvings(int heads, int warps) {
    int times = 0;
    while (times < 2 && heads * 8 << times <= warps) ++times;
    return times;
}

// The shares of one head, each known to a lane.
struct Weighed {
    float weight;  // of the lane's share, not yet divided by their sum; 0 for a lane that has none
    float divide;  // the sum of what is weighed by this is the output
    float lse, max_logits;
};

// Of LANES lanes each, which have the shares of a head between them; the others have `Share{-inf, -inf}`.
template <int LANES>
DEVICE Weighed weigh(Share share, const float* sink) {
    bool is_empty = __all_sync(~0u, share.lse == -infinity());  // not so where an lse is NaN
    float top = max_of_lanes<LANES>(share.lse), largest = max_of_lanes<LANES>(share.largest);
    float weight = is_empty ? 0.f : exp2_approx(share.lse - top);
    float sum = sum_of_lanes<LANES>(weight), total = top + log2_approx(sum);
    float divide = is_empty ? 0.f : 1.f / sum;
    if (sink && !is_empty) divide /= 1.f + exp2_approx(*sink * LOG2_E - total);
    return {weight, divide, is_empty ? infinity() : total * LN_2, largest * LN_2};
}

#if HOPPER
// 128 >> `times` values of a row and head: all shares together, and the sink. For a warp, whose lanes are in 1 << `times`
// groups: each adds up some shares, and the first writes their sum. `share_of` and `values_of` read what share k has,
// the latter for this lane's values.
template <typename ShareOf, typename ValuesOf>
DEVICE void add_up(int shares, int times, ShareOf share_of, ValuesOf values_of, const float* sink, u8* out, i64 at,
                   bool is_first_value, float* lse, float* max_logits, int lane) {
    int group = lane >> (5 - times);
    // All reads are on their way before the first is needed. Lane k weighs share k.
    Share share = {-infinity(), -infinity()};
    if (lane < shares) share = share_of(lane);
    float4 part[MAX_SHARES];
#pragma unroll
    for (int j = 0; j < MAX_SHARES; ++j) {
        int k = (j << times) + group;
        if (k < shares) part[j] = values_of(k);
    }
    Weighed all = weigh<32>(share, sink);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < MAX_SHARES; ++j) {
        if (j << times >= shares) break;
        int k = (j << times) + group;
        float w = __shfl_sync(~0u, all.weight, k);
        if (w != 0.f) x.x += w * part[j].x, x.y += w * part[j].y, x.z += w * part[j].z, x.w += w * part[j].w;
    }
    for (int distance = 16; distance >= 32 >> times; distance >>= 1) {
        x.x += __shfl_xor_sync(~0u, x.x, distance), x.y += __shfl_xor_sync(~0u, x.y, distance);
        x.z += __shfl_xor_sync(~0u, x.z, distance), x.w += __shfl_xor_sync(~0u, x.w, distance);
    }
    if (is_first_value) *lse = all.lse, *max_logits = all.max_logits;
    x.x *= all.divide, x.y *= all.divide, x.z *= all.divide, x.w *= all.divide;
    if (group == 0) write_values(out, at, x);
}

// The shares of a cluster's row together: `own_shares` and `own_out` are where every block of it has what it knows, and
// its output, by head. For all warps of all blocks, after `cluster_meet`.
DEVICE void add_up_cluster(int shares, int own_share, int warps, int heads, const Share* own_shares, const float* own_out,
                           int out_stride, const float* sink, u8* out, i64 out_head_stride, float* lse,
                           float* max_logits, int warp, int lane) {
    int times = halvings(heads, shares * warps), of_head = 2 + times;
    for (int k = own_share * warps + warp; k < heads << of_head; k += shares * warps) {
        int head = k >> of_head, value = (k & (1 << of_head) - 1) * (128 >> times) + (lane & (32 >> times) - 1) * 4;
        u32 known = shared_address(own_shares + head), values = shared_address(own_out + head * out_stride + value);
        add_up(
            shares, times,
            [&](int from) {
                float2 two = load_cluster_2(shared_of_block(known, from));
                return Share{two.x, two.y};
            },
            [&](int from) { return load_cluster_4(shared_of_block(values, from)); }, sink ? sink + head : nullptr, out,
            head * out_head_stride + value, value == 0 && lane == 0, lse + head, max_logits + head, lane);
    }
}
#endif

// The shares of rows and heads together, up to MOST of each, and the sink; by blocks of COMBINING warps. A warp takes a
// head's values, or half of them where that would be more than 16 reads a lane. A kernel for each MOST has no more code
// than it runs, which a GPU reads from memory first.
template <int MOST>
DEVICE void combine(const Partial* partials, const Share* statistics, int shares, int rows, int heads, const float* sink,
                    u8* out, i64 out_row_stride, i64 out_head_stride, float* lse, float* max_logits) {
    constexpr int PIECES = MOST > 8 ? 1 : 2;
    int lane = threadIdx.x & 31, unit = blockIdx.x * COMBINING + threadIdx.x / 32;
    int at = unit / (2 / PIECES), row = at / heads, head = at % heads, first = unit % (2 / PIECES) * 4 + lane / 8;
    if (row >= rows) return;
    i64 apart = (i64)rows * heads;
    partials += at, statistics += at;
    // All reads are on their way before the first is needed. Lane k weighs share k, and so do lanes k + MOST, k + 2 MOST...
    Share share = {-infinity(), -infinity()};
    if (lane % MOST < shares) share = statistics[lane % MOST * apart];
    uint4 part[MOST][PIECES];
    float scale[MOST][PIECES];
#pragma unroll
    for (int k = 0; k < MOST; ++k)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            if (k >= shares) continue;
            part[k][piece] = partials[k * apart].values[first + 4 * piece][lane % 8];
            scale[k][piece] = partials[k * apart].scales[first + 4 * piece];
        }
    Weighed all = weigh<MOST>(share, sink ? sink + head : nullptr);
    if (first == 0 && lane == 0) lse[at] = all.lse, max_logits[at] = all.max_logits;
    out += (row * out_row_stride + head * out_head_stride) * (OUT_FLOAT32 ? 4 : 2);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        float2 x[4] = {};
#pragma unroll
        for (int k = 0; k < MOST; ++k) {
            float weight = __shfl_sync(~0u, all.weight, k);  // 0 for a lane beyond the shares
            if (weight == 0.f) continue;
            weight *= scale[k][piece];
            const u32 two[4] = {part[k][piece].x, part[k][piece].y, part[k][piece].z, part[k][piece].w};
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
                float2 added = unpack_f16(two[tile]);
                x[tile].x += weight * added.x, x[tile].y += weight * added.y;
            }
        }
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            i64 at = (first + 4 * piece) * 64 + tile * 16 + lane % 8 * 2;
            write_two(out, at, x[tile].x * all.divide, x[tile].y * all.divide);
        }
    }
}

#define COMBINE(MOST)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * COMBINING) combine_##MOST(                                               \
        const Partial* __restrict__ partials, const Share* __restrict__ statistics, int shares, int rows, int heads,           \
        const float* __restrict__ sink, u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride,                         \
        float* __restrict__ lse, float* __restrict__ max_logits) {                                                             \
        combine<MOST>(partials, statistics, shares, rows, heads, sink, out, out_row_stride, out_head_stride, lse, max_logits); \
    }
COMBINE(2)
COMBINE(4)
COMBINE(8)
COMBINE(16)
