// sparse_mla_rows.cu with two teams of 4 warps: for many heads where there are no warpgroup products.
//
// Both teams have 8 * NT heads and read the same rows. They meet apart, and the second starts half a step behind the first,
// so that one multiplies while the other exponentiates. There is room for two stages: one is filled again once both teams
// have read it. Each team fills half of it. The first does so for the next step, once it has exponentiated; the second for
// the next but one, at the end of its step.
//
//   S = K Q^T     warp w: a quarter of the row's values. Two warps add to one sum, each to one of its two tiles of 16 keys.
//   P = exp(S)    all keys of a column, by a part of a warp.
//   O = V^T P     warp w: values 128 w to 128 w + 127 of every row.
#pragma once

static_assert(TEAMS == 2 && MEMBERS == 4 && KEYS == 32 && STAGES == 2 && COLUMNS == 1 && SWAPS && !HOPPER && !PRODUCERS &&
              HEADS == UNIT, "what this file is for");

// The number of the named barrier at which the second team waits for the first.
constexpr int START = 1 + SUMS * KEY_PARTS * HEAD_PARTS * TEAMS;
static_assert(START < 16 - 2 * TEAMS, "the teams' own barriers follow");

// As in sparse_mla_rows.cu, for the heads of both teams from HEADS * TEAMS * `blockIdx.y` on.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend_rows(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads, Scope scope,
    const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics GATE_PARAMETER) {
    END_AT_GATE
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // In ways that the compiler cannot repeat: see sparse_mla.cu.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    // What follows from them is made anew where it is needed: registers do not suffice to keep it.
    auto forget = [&] { asm volatile("" : "+r"(lane), "+r"(warp)); };
    auto team = [&] { return warp / MEMBERS; };
    auto member = [&] { return warp % MEMBERS; };
    auto own = [&]() -> Team& { return shared.teams[team()]; };

    int row = blockIdx.x, first_head = HEADS * (TEAMS * blockIdx.y + team());
    RowShare entries(scope, row);
    int begin = entries.begin, end = entries.end;

    init_barriers(shared, ARRIVALS);
    if (threadIdx.x == 0) barrier_init(shared_address(&shared.query), THREADS);
    auto slot_of = [&](int block, int i) -> int { return entries.slot_of(block, i); };
    auto counts = [&](int slot) -> bool { return (u32)slot < (u32)scope.num_slots; };
    auto copied_row = [&] { return known_record(warp, lane, 0); };
    auto copy = [&](int stage, int slot) {
        bool valid = counts(slot);
        int i = copied_row();
        start_copies(shared, stage, warp, i, lane, valid ? find_row(scope, slot) : shared.nothing[i], valid);
        finish_copies(shared_address(&shared.full[stage]), lane);
    };
    int slots[STAGES];
#pragma unroll
    for (int k = 0; k < STAGES; ++k) slots[k] = slot_of(begin + k, copied_row());
    int final = begin < end ? slot_of(end - 1, threadIdx.x % KEYS) : -1;
    // The stages have room for the heads of a team each.
    u32 block_head = HEADS * TEAMS * blockIdx.y;
    stage_query<HEADS * TEAMS>(shared.records[0], q + row * q_row_stride + block_head * q_head_stride, q_head_stride,
                               heads - block_head, warp, lane, [](int r) { return r; });
    name_nothings<COPIED>(shared, zeros);
    if (!__syncthreads_or(counts(final)) && begin + 1 < end)
        end = end_of_entries(begin, end, shared.last, true, warp, lane,
                             [&](int block, int entry) { return counts(slot_of(block, entry)); });
    u32 query[STEPS][QUERY_TILES][2];
    int own_heads = min(HEADS, heads - first_head);  // a last block's second team may have none
    arrive_with_copies(shared_address(&shared.query));
    barrier_wait(shared_address(&shared.query), 0);
    load_query<0, QUERY_TILES>(query, shared.records[team()], Part(member()), lane);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STAGES; ++k)
        if (begin + k < end) copy(k, slots[k]);
    int next = slot_of(begin + STAGES, copied_row());
    float o[VALUE_TILES][NT][4] = {};
    Softmax<COLUMNS> state;
    state.start();

    u32 stage = 0, parity = 0;
    for (int block = begin; block < end; ++block) {
        forget();
        barrier_wait(shared_address(&shared.full[stage]), parity);
        if (block == begin && team()) named_sync(START, 32 * WARPS);
        multiply_queries(shared, own(), stage, query, Part(member()), team(), lane);
        meet(team());  // S is there, and nobody of the team reads P any more
        if (block == begin && !team()) named_arrive(START, 32 * WARPS);
        forget();
        bool changed = exponentiate(shared, own(), stage, state, scale_log2, member(), lane);
        changed = meet_or(changed, team());  // P is there, and nobody reads S any more
        if (!team() && block > begin && block + 1 < end) {
            barrier_wait(shared_address(&shared.empty[stage ^ 1]), stage ? parity : parity ^ 1);
            copy(stage ^ 1, next);
            next = slot_of(block + 2, copied_row());
        }
        forget();
        multiply_values<false>(shared, own(), stage, o, changed, {}, member(), lane);
        forget();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
        if (team() && block + 2 < end) {
            barrier_wait(shared_address(&shared.empty[stage]), parity);
            copy(stage, next);
            next = slot_of(block + 3, copied_row());
        }
        parity ^= stage, stage ^= 1;
    }

    meet(team());
    Own place = {row, 1, first_head, min(HEADS, heads - first_head), (int)blockIdx.z, gridDim.z == 1, false};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, (int)gridDim.x, heads};
    finish_heads(own().alpha, nullptr, state, place, results, sink, member(), lane);
    meet(team());
    write_output(own().alpha, 1.f, 1.f, 1, nullptr, o, place, results, member(), lane);
}
