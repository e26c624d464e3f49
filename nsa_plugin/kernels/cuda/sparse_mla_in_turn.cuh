// sparse_mla.cu where a block attends several query rows in turn: see sparse_mla_turns.cuh.
#pragma once

#include "sparse_mla_steps.cuh"

constexpr int UNITS = 1;  // stages of a block of keys

#include "sparse_mla_turns.cuh"

// Attention of query rows `blockIdx.x`, `blockIdx.x` + `gridDim.x` and so on below `rows`; else as in sparse_mla.cu.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads,
    Scope first, Scope second, const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics, int rows GATE_PARAMETER) {
    END_AT_GATE
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // In ways that the compiler cannot repeat: see sparse_mla.cu.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    init_barriers(shared, ARRIVALS);
    name_nothings<COPIED>(shared, zeros);
    __syncthreads();
    if (warp >= WARPS) {
        copy_rows(shared, first, second, rows, warp - WARPS, lane, [&](int stage, int record, bool is_first, int slot) {
            start_copies(shared, stage, warp - WARPS, record, lane, find_entry(first, second, is_first, slot, shared.nothing[record]));
        });
        return;
    }

    int first_head = HEADS * blockIdx.y;
    Own own = {(int)blockIdx.x, 1, first_head, min(HEADS, heads - first_head), (int)blockIdx.z, gridDim.z == 1, false};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, rows, heads};
    Part part(warp);
    RawQuery raw;
    auto read_own_query = [&] {
        read_query(raw, q + own.first_row * q_row_stride + first_head * q_head_stride, q_row_stride, q_head_stride, 1, own.heads,
                   part, lane);
    };
    read_own_query();
    Turn turn;
    while (own.first_row < rows) {
        find_largest(shared, raw, part, lane);
        meet();
        Query query;
        keep_query(shared, query, raw, part, scale_log2, lane);
        meet();
        float o[VALUE_TILES][NT][4] = {};
        State state;
        state.start();
        state.reference = LAYOUT == 0 ? -100 : -127;
        // A query that is not finite would make S of zeros NaN.
        barrier_wait(shared_address(&shared.full[turn.stage(0)]), turn.round(0) & 1);
        bool is_empty = shared.kind[turn.stage(0)] == EMPTY, is_last = is_empty;
        if (is_empty) {
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[turn.stage(0)]));
            ++turn.step;
        }
        for (; !is_last; ++turn.step) {
            u32 stage = turn.stage(0);
            barrier_wait(shared_address(&shared.full[stage]), turn.round(0) & 1);
            is_last = shared.kind[stage] == LAST;
            multiply_queries(shared, stage, query, part, lane);
            meet();  // S is there, and nobody reads P any more
            u32 factors;
            float reference_change;
            bool changed = exponentiate(shared, stage, state, warp, lane, factors, reference_change);
            changed = meet_or(changed);  // P is there, and nobody reads S any more
            multiply_values(shared, stage, o, changed, reference_change, factors, warp, lane, [](int) {});
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
        }
        // On its way while the output is written.
        Own finished = own;
        own.first_row += gridDim.x;
        if (own.first_row < rows) read_own_query();
        meet();
        finish_heads(shared.alpha, nullptr, state, finished, results, sink, warp, lane);
        meet();
        write_output(shared, state, o, finished, results, warp, lane);
    }
}
