// sparse_mla_rows.cu where a block attends several query rows in turn: see sparse_mla_turns.cuh. A block of keys takes two
// stages, so that rows are copied for one and a half blocks more in the shared memory of three.
#pragma once

#include "sparse_mla_turns.cuh"

// Attention of query rows `blockIdx.x`, `blockIdx.x` + `gridDim.x` and so on below `rows`; else as in sparse_mla_rows.cu.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend_rows(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads, Scope scope,
    const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics, int rows) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // In ways that the compiler cannot repeat: see sparse_mla.cu.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    init_barriers(shared, ARRIVALS);
    name_nothings<COPIED>(shared, zeros);
    __syncthreads();
    if (warp >= WARPS) {
        copy_rows(shared, scope, scope, rows, warp - WARPS, lane, [&](int stage, int record, bool, int slot) {
            bool valid = (u32)slot < (u32)scope.num_slots;
            start_copies(shared, stage, warp - WARPS, record, lane, valid ? find_row(scope, slot) : shared.nothing[record], valid);
        });
        return;
    }

    Team& team = shared.teams[0];
    Part part(warp);
    int first_head = HEADS * blockIdx.y;
    Own own = {(int)blockIdx.x, 1, first_head, min(HEADS, heads - first_head), (int)blockIdx.z, gridDim.z == 1, false};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, rows, heads};
    u32 query[STEPS][QUERY_TILES][2];
    auto read_own_query = [&] {
        read_query(query, q + own.first_row * q_row_stride + first_head * q_head_stride, q_head_stride, own.heads, part, lane);
    };
    read_own_query();
    Turn turn;
    while (own.first_row < rows) {
        float o[VALUE_TILES][NT][4] = {};
        Softmax<COLUMNS> state;
        state.start();
        bool is_last = false;
        for (; !is_last; ++turn.step) {
            u32 stage = turn.stage(0);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit)
                barrier_wait(shared_address(&shared.full[turn.stage(unit)]), turn.round(unit) & 1);
            is_last = shared.kind[stage] != GOES_ON;
            multiply_queries(shared, team, stage, query, part, 0, lane);
            meet();  // S is there, and nobody reads P any more
            bool changed = exponentiate(shared, team, stage, state, scale_log2, warp, lane);
            u32 ahead[AHEAD][4];
            load_ahead(ahead, shared, stage, warp, lane);
            changed = meet_or(changed);  // P is there, and nobody reads S any more
            multiply_values<true>(shared, team, stage, o, changed, ahead, warp, lane);
            __syncwarp();
            if (lane < UNITS) barrier_arrive(shared_address(&shared.empty[stage_of(stage, lane)]));
        }
        // On its way while the output is written.
        Own finished = own;
        own.first_row += gridDim.x;
        if (own.first_row < rows) read_own_query();
        meet();
        finish_heads(team.alpha, nullptr, state, finished, results, sink, warp, lane);
        meet();
        write_output(team.alpha, 1.f, 1.f, 1, nullptr, o, finished, results, warp, lane);
    }
}
