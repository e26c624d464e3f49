// Adding up what blocks of threads made of shares of a row's entries: in a cluster, or by the kernel `combine`.
#pragma once

#ifndef OUT_FLOAT32
#define OUT_FLOAT32 0
#endif

#include "sparse_mla_softmax.cuh"

constexpr int MAX_SHARES = 16;  // blocks of a cluster

// What a share of a row's entries makes of one head, beside its output: the mean of the values, by their weights.
struct Share {
    float lse;      // base 2, -inf where there is nothing
    float largest;  // of the logits, base 2
};

// Four values of the output, from element `at` on.
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
    bool is_empty = __all_sync(~0u, share.lse == -infinity());  // not so where an lse is NaN
    float top = warp_max(share.lse), largest = warp_max(share.largest);
    float weight = is_empty ? 0.f : exp2_approx(share.lse - top);
    float sum = warp_sum(weight);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < MAX_SHARES; ++j) {
        if (j << times >= shares) break;
        int k = (j << times) + group;
        float w = __shfl_sync(~0u, weight, k);  // 0 for a lane beyond the shares
        if (w != 0.f) x.x += w * part[j].x, x.y += w * part[j].y, x.z += w * part[j].z, x.w += w * part[j].w;
    }
    for (int distance = 16; distance >= 32 >> times; distance >>= 1) {
        x.x += __shfl_xor_sync(~0u, x.x, distance), x.y += __shfl_xor_sync(~0u, x.y, distance);
        x.z += __shfl_xor_sync(~0u, x.z, distance), x.w += __shfl_xor_sync(~0u, x.w, distance);
    }
    float total = top + log2_approx(sum);
    float divide = is_empty ? 0.f : 1.f / sum;
    if (sink && !is_empty) divide /= 1.f + exp2_approx(*sink * LOG2_E - total);
    if (is_first_value) {
        *lse = is_empty ? infinity() : total * LN_2;
        *max_logits = largest * LN_2;
    }
    x.x *= divide, x.y *= divide, x.z *= divide, x.w *= divide;
    if (group == 0) write_values(out, at, x);
}

#if HOPPER
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

// The shares of a row and head together. A block of 128 threads a row and head.
extern "C" __global__ void __launch_bounds__(128) combine(
    const float* __restrict__ partial_out, const Share* __restrict__ partials, int shares, int rows, int heads,
    const float* __restrict__ sink, u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride,
    float* __restrict__ lse, float* __restrict__ max_logits) {
    int row = blockIdx.x, head = blockIdx.y, value = threadIdx.x * 4;
    i64 at = (i64)row * heads + head, apart = (i64)rows * heads;
    add_up(
        shares, 0, [&](int k) { return partials[k * apart + at]; },
        [&](int k) { return *(const float4*)(partial_out + (k * apart + at) * D_V + value); },
        sink ? sink + head : nullptr, out, row * out_row_stride + head * out_head_stride + value, value == 0,
        lse + at, max_logits + at, threadIdx.x & 31);
}
