// Query rows that a block of few heads attends in turn, where warps of its own copy and there are no bulk copies.
//
// The warps that copy do not stop at the end of a row: while the others multiply its last keys, write its output and read
// the next query, the records of the next row are on their way.
#pragma once

#include "sparse_mla_few.cuh"

static_assert(!HOPPER && PRODUCERS && GROUP == 1 && TEAMS == 1 && KEYS >= 32, "what this file is for");

// A share of a query row's entries, in blocks: first those of the first cache, then those of the second.
struct Entries {
    const int* indices[2];
    int lengths[2];    // of the row, in each cache
    int first_blocks;  // of the first cache, in all shares
    int begin, end;

    DEVICE Entries(const Scope& first, const Scope& second, int row) {
        lengths[0] = scope_length(first, row), lengths[1] = HAS_EXTRA ? scope_length(second, row) : 0;
        first_blocks = (lengths[0] + KEYS - 1) / KEYS;
        int all = first_blocks + (lengths[1] + KEYS - 1) / KEYS, share = (all + gridDim.z - 1) / gridDim.z;
        begin = min(share * (int)blockIdx.z, all), end = min(begin + share, all);
        indices[0] = first.indices + row * first.indices_stride;
        indices[1] = HAS_EXTRA ? second.indices + row * second.indices_stride : nullptr;
    }

    DEVICE bool is_empty() const { return begin >= end; }
    DEVICE bool is_first(int block) const { return !HAS_EXTRA || block < first_blocks; }

    // The slot of entry i of a block; -1 where the row has none.
    DEVICE int slot(int block, int i) const {
        int entry = (is_first(block) ? block : block - first_blocks) * KEYS + i;
        return entry < (is_first(block) ? lengths[0] : lengths[1]) ? __ldg((is_first(block) ? indices[0] : indices[1]) + entry) : -1;
    }
};

// Of a block's first stage: whether it is its row's last, or stands for a row without entries.
enum : int { GOES_ON, LAST, EMPTY };

// Which of the stages a block of keys takes, of UNITS each, and in which parity of their barriers.
struct Turn {
    u32 step = 0;

    DEVICE u32 stage(int unit) const { return (step * UNITS + unit) % STAGES; }
    DEVICE u32 round(int unit) const { return (step * UNITS + unit) / STAGES; }
};

// The work of a warp that copies: the records of its share of each row, a stage after the other. A lane knows
// where KNOWN of a block's records lie; `start(stage, record, is_first, slot)` starts to copy one of them.
template <typename Memory, typename Start>
DEVICE void copy_rows(Memory& shared, const Scope& first, const Scope& second, int rows, int copier, int lane, Start start) {
    auto counts = [&](const Entries& own, int block, int slot) -> bool {
        return (u32)slot < (u32)(own.is_first(block) ? first.num_slots : second.num_slots);
    };
    // The slots of a row's first block and of its last: if it has no entry, the row may end earlier.
    auto start_row = [&](const Entries& own, int (&slots)[KNOWN], int (&final)[KEYS / 32]) {
#pragma unroll
        for (int k = 0; k < KNOWN; ++k) slots[k] = own.slot(own.begin, known_record(copier, lane, k));
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) final[k] = own.is_empty() ? -1 : own.slot(own.end - 1, k * 32 + lane);
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
    Turn turn;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        int end = end_of(own, final);
        bool is_last = false, is_empty = own.is_empty();
        for (int block = own.begin; !is_last; ++block, ++turn.step) {
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
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                u32 stage = turn.stage(unit), round = turn.round(unit);
                if (round) barrier_wait(shared_address(&shared.empty[stage]), round - 1 & 1);
#pragma unroll
                for (int k = unit * KNOWN / UNITS; k < (unit + 1) * KNOWN / UNITS; ++k)
                    start(stage, known_record(copier, lane, k), own.is_first(block), slots[k]);
                if (unit == 0 && copier == 0 && lane == 0) shared.kind[stage] = is_empty ? EMPTY : is_last ? LAST : GOES_ON;
                finish_copies(shared_address(&shared.full[stage]), lane);
            }
            own = following;
#pragma unroll
            for (int k = 0; k < KNOWN; ++k) slots[k] = ahead[k];
        }
    }
    wait_for_copies();  // a thread that copies stays until its copies are there
}
