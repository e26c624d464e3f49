// Sparse MLA over paged bfloat16 rows of 576 values, of a cache or of a copy of fp8 records (sparse_mla_copy.cu): for SM90,
// and from SM80 on without bulk copies and clusters.
//
// As sparse_mla.cu, whose comments hold here too: a block of 8 warps attends a query token, or several in turn, with a group
// of up to 8 * NT heads, KEYS keys at a time, keys as rows of the matrix products (mma.m16n8k16) and heads as columns.
// There is nothing to convert: rows are copied to shared memory as they are, but for the order of pieces where there are no
// bulk copies, and read from there by the tensor cores' loads.
//
//   S = K Q^T     a warp has a quarter or half of the row's values, half of the keys, and all heads or half of them. The
//                 parts of the values add up in shared memory.
//   P = exp(S)    all keys of a column, by a warp or a part of one.
//   O = V^T P     warp w: values 64 w to 64 w + 63 of every row.
//
// With two teams of warps: sparse_mla_rows_in_teams.cuh.
//
// Positions and rows: positions 2 l and 2 l + 1 of S and P, l = 8 T + g, belong to rows 16 T + g and
// 16 T + 8 + (g ^ 4) of shared memory, for the same reasons.

#include "gate.cuh"
#include "sparse_mla_rows_steps.cuh"

#if GATE && (IN_TURN || TEAMS == 1)
#error "this form has no gate"
#endif
#if IN_TURN
#include "sparse_mla_rows_in_turn.cuh"
#elif TEAMS > 1
#include "sparse_mla_rows_in_teams.cuh"
#else
// Attention of query row `blockIdx.x`, for HEADS heads from HEADS * `blockIdx.y` on, over the share `blockIdx.z` of its
// entries. With one share `out`, `lse` and `max_logits` are the result. With more, either the blocks of all shares are a
// cluster, which adds up in the end, or `partials` and `statistics` hold every share's own for `combine_N`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend_rows(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads, Scope scope,
    const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // Both in ways that the compiler cannot repeat, as it would rather than keep them in registers.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    Team& own = shared.teams[0];
    int row = blockIdx.x, first_head = HEADS * blockIdx.y, own_heads = min(HEADS, heads - first_head);

    RowShare entries(scope, row);
    int begin = entries.begin, end = entries.end;

    init_barriers(shared, ARRIVALS);

    auto slot_of = [&](int block, int i) -> int { return entries.slot_of(block, i); };
    auto counts = [&](int slot) -> bool { return (u32)slot < (u32)scope.num_slots; };
    bool multiplies = !PRODUCERS || warp < WARPS, copies = !PRODUCERS || !multiplies;
    int copier = PRODUCERS ? warp & PRODUCERS - 1 : warp, i = known_record(copier, lane, 0);
    auto copy = [&](int block, int stage, int slot) {
        bool valid = counts(slot);
        start_copies(shared, stage, copier, i, lane, valid ? find_row(scope, slot) : shared.nothing[i], valid);
        if (!HOPPER) arrive_with_copies(shared_address(&shared.full[stage]));
    };
    // Of the entries and the query none waits for another, nor for the block. Later, a slot is read a step before its
    // address is needed.
    int slots[STAGES];
#pragma unroll
    for (int k = 0; k < STAGES; ++k) slots[k] = copies ? slot_of(begin + k, i) : -1;
    int final = begin < end ? slot_of(end - 1, threadIdx.x % KEYS) : -1;
    Part part(warp % WARPS);
    u32 query[STEPS][QUERY_TILES][2];
    const u16* own_query = q + row * q_row_stride + first_head * q_head_stride;
#if HOPPER
    if (!PRODUCERS) read_query(query, own_query, q_head_stride, own_heads, part, lane);
#else
    static_assert(HEADS <= UNIT, "the query fits a stage");
    if (threadIdx.x == 0) barrier_init(shared_address(&shared.query), THREADS);
    stage_query<HEADS>(shared.records[STAGES - 1], own_query, q_head_stride, own_heads, warp, lane,
                       [](int r) { return r; });
#endif
    name_nothings<COPIED>(shared, zeros);
    if (!__syncthreads_or(counts(final)) && begin + 1 < end)
        end = end_of_entries(begin, end, shared.last, multiplies, warp, lane,
                             [&](int block, int entry) { return counts(slot_of(block, entry)); });
#if !HOPPER
    arrive_with_copies(shared_address(&shared.query));
#endif
    // All stages are free, but for the last where it has the query.
    if (copies) {
#pragma unroll
        for (int k = 0; k < STAGES - !HOPPER; ++k)
            if (begin + k < end) copy(begin + k, k, slots[k]);
    }
#if !HOPPER
    barrier_wait(shared_address(&shared.query), 0);
    load_query<0, QUERY_TILES>(query, shared.records[STAGES - 1], part, lane);
    __syncthreads();
    if (begin + STAGES - 1 < end) copy(begin + STAGES - 1, STAGES - 1, slots[STAGES - 1]);
#endif
    int next = copies ? slot_of(begin + STAGES, i) : -1;
    int stage = 0, parity = 0, own_share = blockIdx.z;
    bool is_whole = gridDim.z == 1, is_cluster = HOPPER && !is_whole && !partials;
#if PRODUCERS
    if (!multiplies) {
        if (NT > 2) fewer_registers<40>();
        for (int block = begin + STAGES; block < end; ++block) {
            barrier_wait(shared_address(&shared.empty[stage]), parity);
            copy(block, stage, next);
            next = slot_of(block + 1, i);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (is_cluster) cluster_meet(), cluster_part();
        return;
    }
    if (NT > 2) more_registers<232>();
    read_query(query, own_query, q_head_stride, own_heads, part, lane);
#endif
    float o[VALUE_TILES][NT][4] = {};
    Softmax<COLUMNS> state;
    state.start();

    for (int block = begin; block < end; ++block) {
        barrier_wait(shared_address(&shared.full[stage]), parity);
        multiply_queries(shared, own, stage, query, part, 0, lane);
        // S is there, and nobody reads P or the stage before any more.
        meet();
        if (!PRODUCERS && block > begin && block + STAGES - 1 < end) {
            copy(block + STAGES - 1, stage ? stage - 1 : STAGES - 1, next);
            next = slot_of(block + STAGES, i);
        }
        bool changed = exponentiate(shared, own, stage, state, scale_log2, warp, lane);
        u32 ahead[AHEAD][4];
        if (!HOPPER) load_ahead(ahead, shared, stage, warp, lane);
        changed = meet_or(changed);  // P is there, and nobody reads S any more
        multiply_values<!HOPPER>(shared, own, stage, o, changed, ahead, warp, lane);
        if (PRODUCERS) {
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    meet();
    Own place = {row, 1, first_head, own_heads, own_share, is_whole, is_cluster};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, (int)gridDim.x, heads};
    finish_heads(own.alpha, own_shares(own), state, place, results, sink, warp, lane);
    meet();
    if (!is_whole && !is_cluster) return write_output(own.alpha, 1.f, 1.f, 1, nullptr, o, place, results, warp, lane);

    // The output passes through shared memory, where a cluster reads it, and from which rows are written in one piece, once
    // nobody reads records there.
    int g = lane >> 2, t = lane & 3;
    float* own_out = (float*)shared.records;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = n * 8 + 2 * t + i;
            float weight = own.alpha[head];
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                float* at = own_out + head * O_STRIDE + warp * (16 * VALUE_TILES) + m * 16 + g;
                at[0] = weight != 0.f ? o[m][n][i] * weight : 0.f;
                at[8] = weight != 0.f ? o[m][n][i + 2] * weight : 0.f;
            }
        }
    if (!is_cluster) {
        // From here on a warp takes a head and a quarter of its values.
        meet();
        for (int k = warp; k < own_heads * 4; k += WARPS) {
            int head = k / 4, value = (k % 4) * 128 + lane * 4;
            float4 x = *(const float4*)(own_out + head * O_STRIDE + value);
            write_values(out, row * out_row_stride + (first_head + head) * out_head_stride + value, x);
        }
    }
#if HOPPER
    if (!is_cluster) return;
    add_up_row(shared, own, row, first_head, own_heads, heads, sink, out, out_row_stride, out_head_stride, lse, max_logits,
               warp, lane);
#endif
}
#endif  // of one row a block
