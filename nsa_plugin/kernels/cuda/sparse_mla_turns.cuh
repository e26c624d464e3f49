// Query rows that a block of few heads attends in turn, where warps of its own copy and there are no bulk copies.
//
// Such a block has an SM alone. The warps that copy do not stop at the end of a row: while the others multiply its last
// keys, write its output and read the next query, the records of the next row are on their way.
#pragma once

#include "sparse_mla_few.cuh"

static_assert(!HOPPER && PRODUCERS && GROUP == 1 && TEAMS == 1 && KEYS >= 32, "what this file is for");

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

// Which of the stages a block of keys takes, of UNITS each, and in which parity of their barriers.
struct Turn {
    u32 step = 0;

    DEVICE u32 stage(int unit) const { return (step * UNITS + unit) % STAGES; }
    DEVICE u32 round(int unit) const { return (step * UNITS + unit) / STAGES; }
};

// Of a block's records the copying warps take as many in each stage. Record number `own` of a warp's, in the block.
constexpr int OWN_RECORDS = COPIES / UNITS;
DEVICE int record_of(int copier, int own) {
    return own / OWN_RECORDS * (KEYS / UNITS) + copier * OWN_RECORDS + own % OWN_RECORDS;
}
constexpr int AT_ONCE = 4;  // records that a warp copies, each by 8 lanes
static_assert(COPIES <= 32 && OWN_RECORDS % AT_ONCE == 0, "a lane knows a record's slot, and the warp copies whole ones");

// The work of a warp that copies: the records of its share of each row, a stage after the other. A row has a block at
// least, which may be empty; `shared.is_last` of a block's first stage says whether it is its row's last.
// `start(stage, record, is_first, slot)` starts a lane's part in the copy of a record.
template <typename Memory, typename Start>
DEVICE void copy_rows(Memory& shared, const Scope& first, const Scope& second, int rows, int copier, int lane, Start start) {
    auto counts = [&](const Entries& own, int block, int slot) -> bool {
        return (u32)slot < (u32)(own.is_first(block) ? first.num_slots : second.num_slots);
    };
    // Of a block, one a lane.
    auto slot_of = [&](const Entries& own, int block) { return own.slot(block, record_of(copier, lane % COPIES)); };
    // Of a row's last block, which is empty if entries are missing.
    auto read_final = [&](const Entries& own, int (&final)[KEYS / 32]) {
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

    Entries own(first, second, blockIdx.x);
    int slot = slot_of(own, own.begin), final[KEYS / 32];
    read_final(own, final);
    Turn turn;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        int end = end_of(own, final);
        bool is_last = false;
        for (int block = own.begin; !is_last; ++block, ++turn.step) {
            is_last = block + 1 >= end;
            // Read before it is needed: what comes next.
            bool is_first = own.is_first(block);
            int ahead = -1;
            if (!is_last) {
                ahead = slot_of(own, block + 1);
            } else if (row + gridDim.x < rows) {
                own = Entries(first, second, row + gridDim.x);
                ahead = slot_of(own, own.begin);
                read_final(own, final);
            }
#pragma unroll 1
            for (int unit = 0; unit < UNITS; ++unit) {
                u32 stage = turn.stage(unit), round = turn.round(unit);
                if (round) barrier_wait(shared_address(&shared.empty[stage]), round - 1 & 1);
                // Not unrolled: what the other warps do hardly fits the cache of instructions beside it.
#pragma unroll 1
                for (int k = 0; k < OWN_RECORDS; k += AT_ONCE) {
                    int known = unit * OWN_RECORDS + k + lane / (32 / AT_ONCE);
                    start(stage, record_of(copier, known), is_first, __shfl_sync(~0u, slot, known));
                }
                if (unit == 0 && copier == 0 && lane == 0) shared.is_last[stage] = is_last;
                // The stage is full when the copies of all threads are there, and what a warp has written itself.
                u32 full = shared_address(&shared.full[stage]);
                arrive_with_copies(full);
                __syncwarp();
                if (lane == 0) barrier_arrive(full);
            }
            slot = ahead;
        }
    }
    wait_for_copies();  // a thread that copies stays until its copies are there
}
