// Sparse MLA over a paged fp8 cache for few query heads: for SM90, and from SM80 on without bulk copies and clusters.
//
// A block of 8 or 4 warps attends one query token, or several in turn, with a group of up to 8 * NT heads, 64 or 32 keys at a
// time.
// Keys are the rows of the matrix products and heads their columns (mma.m16n8k16), so that 8 heads are a
// full tile and no head is padded beyond a multiple of 8. The cache's records are copied to shared memory
// as they are, on SM90 by bulk copies; their fp8 codes become float16 in registers, exactly, on the way into the
// tensor cores. Nothing is multiplied by a scale before it has to be:
//
//   S = K Q^T     a warp has a quarter or half of the row's values, and a part of the keys or of the heads. What has a
//                 scale is summed and then multiplied by it; the parts of the values add up in shared memory, where each
//                 has a sum of its own, or two share one.
//   P = exp(S)    a warp has all keys of its heads, two keys a lane.
//   O = V^T P     a warp has 64 or, of 4 warps, 128 neighbouring values of every row, which have one scale a row; P is
//                 multiplied by these scales, relative to `reference` below, as it is read.
//
// Why float16: a query row is divided by a power of two that brings its largest value to 2^8, and a scale
// by the largest of that tile so far, rounded up to a power of two ("reference"): both exact. What is lost
// lies 2^-25 below the largest operand of its tile; bfloat16 would lose what lies 2^-9 below any operand.
//
// Without instructions for fp8 (SM80, SM86), shifts and masks make a float16 of a code, 2^-8 of its value. The code of NaN
// would become 480: the keys are multiplied by a constant that only makes an infinity of that one, S by 0 adds a NaN for
// it, and P and the output have it from there. What the codes are multiplied by is divided out with the scales.
//
// Many heads where there are no warpgroup products: sparse_mla_converted.cuh.
//
// Positions and rows: within the keys of a block, positions 2 l and 2 l + 1 of S and P, l = 8 T + g, belong to rows
// 16 T + g and 16 T + 8 + (g ^ 4) of shared memory. Any order would do; in this one a thread of the first product holds
// both positions, and every access below spreads over all banks: rows lie 16 bytes apart modulo 128.

#include "gate.cuh"

#if IN_TURN
#include "sparse_mla_in_turn.cuh"
#elif CONVERTS
#define RECORDS 1
#include "sparse_mla_converted.cuh"
#else
#include "sparse_mla_steps.cuh"

// Attention of query row `blockIdx.x`, or of the GROUP rows from GROUP * `blockIdx.x` on, for heads from
// HEADS / GROUP * `blockIdx.y` on, over the share `blockIdx.z` of its
// entries. With one share `out`, `lse` and `max_logits` are the result. With more, either the blocks of all shares are
// a cluster, which adds up in the end, or `partials` and `statistics` hold every share's own for `combine_N`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads,
    Scope first, Scope second, const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics
#if GROUP > 1
    , int rows  // of all groups; `first` has the indices of a group as its row, and there is one share
#endif
    GATE_PARAMETER) {
    END_AT_GATE
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // Both in ways that the compiler cannot repeat, as it would rather than keep them in registers: a reduction leaves
    // its result in a uniform register, with what is made of it.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    constexpr int ROW_HEADS = HEADS / GROUP;
    int row = blockIdx.x, first_head = ROW_HEADS * blockIdx.y;
    int own_heads = min(ROW_HEADS, heads - first_head);
#if GROUP > 1
    int first_row = row * GROUP, own_rows = min(GROUP, rows - first_row);
#else
    int first_row = row, own_rows = 1;
#endif

    int lengths[2] = {scope_length(first, row), HAS_EXTRA ? scope_length(second, row) : 0};
    int blocks[2] = {(lengths[0] + KEYS - 1) / KEYS, (lengths[1] + KEYS - 1) / KEYS};
    int all = blocks[0] + blocks[1], share = (all + gridDim.z - 1) / gridDim.z;
    // A group has one share; told so, the compiler spills fewer registers.
    int begin = GROUP > 1 ? 0 : min(share * (int)blockIdx.z, all), end = GROUP > 1 ? all : min(begin + share, all);

    auto given = [&](bool is_extra) {
        return is_extra ? second.indices + row * second.indices_stride : first.indices + row * first.indices_stride;
    };
    init_barriers(shared, ARRIVALS);
    // Held in shared memory, because registers are what the loop below has fewest of. Of one cache, without bulk copies, it
    // takes less time to find them anew.
    constexpr bool HOLDS_INDICES = HOPPER || HAS_EXTRA;
    if (HOLDS_INDICES && threadIdx.x == 0) shared.indices[0] = given(false), shared.indices[1] = given(true);
    name_nothings<COPIED>(shared, zeros);
    if (!PRODUCERS) __syncthreads();

    // Slots are in order of their blocks: first those of the first cache, then those of the second.
    int bound = min(lengths[0], end * KEYS), extra_bound = min(lengths[1], (end - blocks[0]) * KEYS);
    auto entry_of = [&](int block, int i, auto indices_of) -> int {
        bool is_extra = HAS_EXTRA && block >= blocks[0];
        int e = (is_extra ? block - blocks[0] : block) * KEYS + i;
        return e < (is_extra ? extra_bound : bound) ? __ldg(indices_of(is_extra) + e) : -1;
    };
    auto slot_of = [&](int block, int i) {
        return entry_of(block, i, [&](bool is_extra) { return HOLDS_INDICES ? shared.indices[is_extra] : given(false); });
    };
    auto counts = [&](int block, int slot) -> bool {
#if GROUP > 1
        slot &= SLOT_MASK;
#endif
        return (u32)slot < (u32)(!HAS_EXTRA || block < blocks[0] ? first.num_slots : second.num_slots);
    };
    bool multiplies = !PRODUCERS || warp < WARPS, copies = !PRODUCERS || !multiplies;
    int copier = PRODUCERS ? warp & PRODUCERS - 1 : warp;
    auto place_of = [&](int block, int slot, int record) {
#if GROUP > 1
        slot &= SLOT_MASK;
#endif
        return find_entry(first, second, block < blocks[0], slot, shared.nothing[record]);
    };
    auto note_members = [&](int stage, int slot, int record) {
#if GROUP > 1
        if (knows_first(lane)) shared.members[stage][record] = (u8)((u32)slot >> SLOT_BITS);
#endif
    };
    auto copy = [&](int block, const int (&known)[KNOWN]) {
        int stage = (u32)(block - begin) % STAGES;
#pragma unroll
        for (int k = 0; k < KNOWN; ++k) {
            int record = known_record(copier, lane, k);
            note_members(stage, known[k], record);
            start_copies(shared, stage, copier, record, lane, place_of(block, known[k], record));
        }
        if (!HOPPER && !COPY_BETWEEN) finish_copies<WRITES>(shared_address(&shared.full[stage]), lane);
    };
    auto slots_of = [&](int (&known)[KNOWN], int block, auto slot_of) {
#pragma unroll
        for (int k = 0; k < KNOWN; ++k) known[k] = copies ? slot_of(block, known_record(copier, lane, k)) : -1;
    };
    // Of the entries and the query none waits for another. Later, a slot is read a step before its address is needed.
    int slots[STAGES][KNOWN];
#pragma unroll
    for (int k = 0; k < STAGES; ++k) slots_of(slots[k], begin + k, [&](int block, int i) { return entry_of(block, i, given); });
    int final = begin < end ? entry_of(end - 1, threadIdx.x % KEYS, given) : -1;
    Part part(warp % WARPS);
    RawQuery raw;
    // The first records are needed no later than the query, and the instructions that read that are many.
    constexpr bool RECORDS_FIRST = !HOPPER && !PRODUCERS;
    if (RECORDS_FIRST && begin < end) copy(begin, slots[0]);
    if (multiplies)
        read_query(raw, q + first_row * q_row_stride + first_head * q_head_stride, q_row_stride, q_head_stride, own_rows,
                   own_heads, part, lane);
#if !PRODUCERS
    if (!RECORDS_FIRST && begin < end) copy(begin, slots[0]);
    find_largest(shared, raw, part, lane);
#endif
    if (!__syncthreads_or(counts(end - 1, final)) && begin + 1 < end)
        end = end_of_entries(begin, end, shared.last, multiplies, warp, lane,
                             [&](int block, int entry) { return counts(block, slot_of(block, entry)); });
    if (copies) {
#pragma unroll
        for (int k = PRODUCERS ? 0 : 1; k < STAGES; ++k)
            if (begin + k < end) copy(begin + k, slots[k]);  // all stages are free
    }
    int next[KNOWN];
    slots_of(next, begin + STAGES, slot_of);
    bool is_whole = GROUP > 1 || gridDim.z == 1, is_cluster = HOPPER && !is_whole && !partials;
#if PRODUCERS
    if (!multiplies) {
        for (int block = begin + STAGES; block < end; ++block) {
            u32 step = block - begin - STAGES;
            barrier_wait(shared_address(&shared.empty[step % STAGES]), step / STAGES & 1);
            copy(block, next);
            slots_of(next, block + 1, slot_of);
        }
#if HOPPER
        if (is_cluster) cluster_meet(), cluster_part();
#else
        wait_for_copies();  // a thread that copies stays until its copies are there
#endif
        return;
    }
    find_largest(shared, raw, part, lane);
    meet();
#endif
    Query query;
    keep_query(shared, query, raw, part, scale_log2, lane);
    if (COPY_BETWEEN) wait_for_copies();
    meet();
    float o[VALUE_TILES][NT][4] = {};
    State state;
    state.start();
    state.reference = LAYOUT == 0 ? -100 : -127;

    for (int block = begin; block < end; ++block) {
        int step = block - begin, stage = (u32)step % STAGES;
        // With many heads, addresses are made anew in every step: registers do not suffice to keep them.
        if constexpr (!HOPPER && NT > 2) asm volatile("" : "+r"(lane), "+r"(warp));
        if (!COPY_BETWEEN) barrier_wait(shared_address(&shared.full[stage]), (u32)step / STAGES & 1);
        multiply_queries(shared, stage, query, part, lane);
        // S is there, and nobody reads P or the stage before any more.
        meet();
        bool refills = !PRODUCERS && step && block + STAGES - 1 < end;
        if (HOPPER && refills) {
            copy(block + STAGES - 1, next);
            slots_of(next, block + STAGES, slot_of);
        }
        u32 factors;
        float reference_change;
        bool changed = exponentiate(shared, stage, state, warp, lane, factors, reference_change);
        if (COPY_BETWEEN) wait_for_copies();  // those of the next block: all warps know it after they have met
        changed = meet_or(changed);           // P is there, and nobody reads S any more
#if HOPPER || PRODUCERS
        auto between = [](int) {};
#else
        int filled = (u32)(step + STAGES - 1) % STAGES, record = known_record(copier, lane, 0);
        auto between = [&](int n) {
            if (!refills) return;
            // Made anew in each part: registers do not suffice to keep a place.
            int slot = next[0];
            asm volatile("" : "+r"(slot));
            Pieces pieces(shared, filled, record, lane, place_of(block + STAGES - 1, slot, record));
            if (n == 0) note_members(filled, slot, record), pieces.copy_scales(shared, filled, record, lane);
            pieces.copy<2>(2 * n);
            if (n == PARTS - 1) slots_of(next, block + STAGES, slot_of);
        };
#endif
        multiply_values(shared, stage, o, changed, reference_change, factors, warp, lane, between);
#if PRODUCERS
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
#endif
    }

    meet();
    Own own = {first_row, own_rows, first_head, own_heads, (int)blockIdx.z, is_whole, is_cluster};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, (int)gridDim.x, heads};
    finish_heads(shared.alpha, own_shares(shared), state, own, results, sink, warp, lane);
    meet();
    write_output(shared, state, o, own, results, warp, lane);
#if HOPPER
    if (!is_cluster) return;

    add_up_row(shared, shared, row, first_head, own_heads, heads, sink, out, out_row_stride, out_head_stride, lse,
               max_logits, warp, lane);
#endif
}
#endif  // of one row a block
