// sparse_mla.cu where some warps of a block only copy and there are no bulk copies: a block attends several query rows in turn.
//
// Such a block has an SM alone. The warps that copy do not stop at the end of a row: while the others multiply its last
// keys, write its output and read the next query, the records of the next row are on their way.
#pragma once

#include "sparse_mla_output.cuh"

static_assert(!HOPPER && PRODUCERS && GROUP == 1, "what this file is for");

// A share of a query row's entries, in blocks: first those of the first cache, then those of the second.
struct Entries {
    const int* indices[2];
    int first_blocks;  // of the first cache, in all shares
    int begin, end;
    int bounds[2];     // of each cache: entries from here on are not of this share

    DEVICE Entries(const Scope& first, const Scope& second, int row) {
        int lengths[2] = {scope_length(first, row), HAS_EXTRA ? scope_length(second, row) : 0};
        first_blocks = (lengths[0] + KEYS - 1) / KEYS;
        int all = first_blocks + (lengths[1] + KEYS - 1) / KEYS, share = (all + gridDim.z - 1) / gridDim.z;
        begin = min(share * (int)blockIdx.z, all), end = min(begin + share, all);
        bounds[0] = min(lengths[0], end * KEYS), bounds[1] = min(lengths[1], (end - first_blocks) * KEYS);
        indices[0] = first.indices + row * first.indices_stride;
        indices[1] = HAS_EXTRA ? second.indices + row * second.indices_stride : nullptr;
    }

    DEVICE bool is_first(int block) const { return !HAS_EXTRA || block < first_blocks; }

    // The slot of entry i of a block; -1 where the share has none.
    DEVICE int slot(int block, int i) const {
        int entry = (is_first(block) ? block : block - first_blocks) * KEYS + i;
        return entry < (is_first(block) ? bounds[0] : bounds[1]) ? __ldg((is_first(block) ? indices[0] : indices[1]) + entry) : -1;
    }
};

// The work of a warp that copies: the records of its share of each row, a stage after the other. A row has a block at
// least, which may be empty; `shared.is_last` says which is its last.
DEVICE void copy_rows(Shared& shared, const Scope& first, const Scope& second, int rows, int copier, int lane) {
    auto counts = [&](const Entries& own, int block, int slot) -> bool {
        return (u32)slot < (u32)(own.is_first(block) ? first.num_slots : second.num_slots);
    };
    // The slots of a row's first block and of its last, whose entries are those that are missing if some are.
    auto start_row = [&](const Entries& own, int (&slots)[KNOWN], int (&final)[KEYS / 32]) {
#pragma unroll
        for (int k = 0; k < KNOWN; ++k) slots[k] = own.slot(own.begin, known_record(copier, lane, k));
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) final[k] = own.begin < own.end ? own.slot(own.end - 1, k * 32 + lane) : -1;
    };
    auto end_of = [&](const Entries& own, const int (&final)[KEYS / 32]) {
        bool some = own.begin + 1 >= own.end;
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) some |= counts(own, own.end - 1, final[k]);
        if (__any_sync(~0u, some)) return own.end;
        int last = last_with_entries<PRODUCERS>(own.begin, own.end, copier, lane, [&](int block, int i) {
            return counts(own, block, own.slot(block, i));
        });
        if (lane == 0) shared.last[copier] = last;
        named_sync(0, 32 * PRODUCERS);  // the barrier at which the whole block has met before
#pragma unroll
        for (int w = 0; w < PRODUCERS; ++w) last = max(last, shared.last[w]);
        named_sync(0, 32 * PRODUCERS);  // before another row's are written
        return last + 1;
    };

    int slots[KNOWN], final[KEYS / 32];
    Entries own(first, second, blockIdx.x);
    start_row(own, slots, final);
    u32 step = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        int end = end_of(own, final);
        bool is_last = false;
        for (int block = own.begin; !is_last; ++block, ++step) {
            is_last = block + 1 >= end;
            Entries following = own;
            int ahead[KNOWN];
            // Read before they are needed: the slots of what comes next.
            if (!is_last) {
#pragma unroll
                for (int k = 0; k < KNOWN; ++k) ahead[k] = own.slot(block + 1, known_record(copier, lane, k));
            } else if (row + gridDim.x < rows) {
                following = Entries(first, second, row + gridDim.x);
                start_row(following, ahead, final);
            }
            u32 stage = step % STAGES;
            if (step >= STAGES) barrier_wait(shared_address(&shared.empty[stage]), step / STAGES - 1 & 1);
#pragma unroll
            for (int k = 0; k < KNOWN; ++k) {
                int record = known_record(copier, lane, k);
                start_copies(shared, stage, copier, record, lane,
                             find_entry(first, second, own.is_first(block), slots[k], shared.nothing[record]));
            }
            if (copier == 0 && lane == 0) shared.is_last[stage] = is_last;
            finish_copies(shared_address(&shared.full[stage]), lane);
            own = following;
#pragma unroll
            for (int k = 0; k < KNOWN; ++k) slots[k] = ahead[k];
        }
    }
    wait_for_copies();  // a thread that copies stays until its copies are there
}

// Attention of query rows `blockIdx.x`, `blockIdx.x` + `gridDim.x` and so on below `rows`; else as in sparse_mla.cu.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads,
    Scope first, Scope second, const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, float* __restrict__ partial_out, Share* __restrict__ partials, int rows
#if GATE
    , const int* __restrict__ gate
#endif
    ) {
#if GATE
    if (!goes_on(gate)) return;
#endif
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // In ways that the compiler cannot repeat: see sparse_mla.cu.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    init_barriers(shared, ARRIVALS);
    // Not all the same: many copies of a single record wait for each other.
    if (threadIdx.x < KEYS) shared.nothing[threadIdx.x] = zeros + (blockIdx.x * KEYS + threadIdx.x) % NOTHINGS * COPIED;
    __syncthreads();
    if (warp >= WARPS) return copy_rows(shared, first, second, rows, warp - WARPS, lane);

    int first_head = HEADS * blockIdx.y;
    Own own = {(int)blockIdx.x, 1, first_head, min(HEADS, heads - first_head), (int)blockIdx.z, gridDim.z == 1, false};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partial_out, partials, rows, heads};
    Part part(warp);
    RawQuery raw;
    auto read_own_query = [&] {
        read_query(raw, q + own.first_row * q_row_stride + first_head * q_head_stride, q_row_stride, q_head_stride, 1, own.heads,
                   part, lane);
    };
    read_own_query();
    u32 step = 0;
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
        bool is_last = false;
        for (; !is_last; ++step) {
            u32 stage = step % STAGES;
            barrier_wait(shared_address(&shared.full[stage]), step / STAGES & 1);
            is_last = shared.is_last[stage];
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
        finish_heads(shared, state, finished, results, sink, warp, lane);
        meet();
        write_output(shared, state, o, finished, results, warp, lane);
    }
}
