// How the records of sparse_mla.cu's cache come to shared memory: on SM90 by bulk copies, elsewhere in pieces of 16 bytes.
//
// A warp that starts more copies than the SM takes at once waits for them. So warps of their own copy, if registers
// suffice for these; else the warps that multiply start a few copies after each part of a product, two blocks of keys
// ahead. These need no barrier in shared memory: each thread waits for its own before the block meets.
#pragma once

#include "sparse_mla_block.cuh"

struct Entry {
    const u8* record;
    const u8* scales;  // v4_fp8 only
    bool valid;
};

// Where the record of a slot of the first or the second cache lies; `nothing` for one that does not count.
DEVICE Entry find_entry(const Scope& first, const Scope& second, bool is_first, int slot, const u8* nothing) {
    is_first |= !HAS_EXTRA;
    // Field by field: a reference to either would put both into local memory.
    u32 num_slots = is_first ? first.num_slots : second.num_slots;
    int shift = is_first ? first.page_shift : second.page_shift;
    int size = is_first ? first.page_size : second.page_size;
    i64 stride = is_first ? first.page_stride : second.page_stride;
    const u8* data = is_first ? first.data : second.data;
    if ((u32)slot >= num_slots) return {nothing, nothing, false};
#if FLAT
    return {data + (i64)slot * COPIED, nothing, true};
#endif
    int page = shift >= 0 ? slot >> shift : slot / size;
    int position = slot - page * size;
    const u8* start = data + page * stride;
#if LAYOUT == 0
    return {start + position * COPIED, nothing, true};
#else
    return {start + position * COPIED, start + size * COPIED + position * 8, true};
#endif
}

// Whether a record counts, and its scales, to a stage; by the one lane that `knows_first`.
DEVICE void copy_scales_of(Shared& shared, int stage, int record, const Entry& entry) {
#if LAYOUT == 1
    shared.valid[stage][record] = entry.valid;
    copy_8_bytes(shared_address(&shared.scales[stage][record]), entry.scales);
#endif
}

#if HOPPER
constexpr int KNOWN = 1;  // records of a warp whose places a lane knows: record number lane % COPIES
DEVICE int known_record(int copier, int lane, int) { return copier * COPIES + lane % COPIES; }
DEVICE bool knows_first(int lane) { return lane < COPIES; }  // of the lanes that know the same record

// A warp copies COPIES records.
DEVICE void start_copies(Shared& shared, int stage, int copier, int record, int lane, const Entry& entry) {
    u32 full = shared_address(&shared.full[stage]);
    if (LAYOUT == 1 && knows_first(lane)) {
        copy_scales_of(shared, stage, record, entry);
        arrive_with_copies(full);
    }
    __syncwarp();  // nobody reads those of the copies before any more
    if (lane < COPIES) shared.from[copier][lane] = (u64)entry.record;
    __syncwarp();
    copy_in_bulk<COPIED, ROW>(shared, stage, copier, full);
}
#else
// Eight lanes copy a record, a line of 128 bytes at a time: nothing is read from shared memory behind a copy, which would
// wait for it.
constexpr int KNOWERS = 8;
constexpr int KNOWN = COPIES * KNOWERS / 32;
static_assert(KNOWN >= 1 && COPIES * KNOWERS % 32 == 0, "a warp's lanes copy whole records");
DEVICE int known_record(int copier, int lane, int k) { return copier * COPIES + k * (32 / KNOWERS) + lane / KNOWERS; }
DEVICE bool knows_first(int lane) { return lane % KNOWERS == 0; }

constexpr int LINE = 16 * KNOWERS;
constexpr int PIECES = (LINE - 16 + COPIED + LINE - 1) / LINE;  // that a lane copies of a record: of each of its lines one
constexpr int PARTS = KEYS / 16 * VALUE_TILES / 2;       // of a block's second product: see `multiply_values`
static_assert(!COPY_BETWEEN || (KNOWN == 1 && STAGES == 3 && PIECES <= 2 * PARTS), "two pieces of a record in each part");

// A lane's pieces of a record, 16 bytes of each line of 128 bytes that the record lies in. Eight lanes that copied from two
// lines at once would take the L1 cache twice as long.
struct Pieces {
    Entry entry;
    int first_byte;  // of the first piece, in the record; negative: before it
    u32 to;

    DEVICE Pieces(Shared& shared, int stage, int record, int lane, const Entry& entry)
        : entry(entry),
          first_byte(lane % KNOWERS * 16 - (int)((u64)entry.record % LINE)),
          to(shared_address(&shared.records[stage][record * ROW]) + first_byte) {}

    // So many from number `first` on.
    template <int COUNT>
    DEVICE void copy(int first) const {
#pragma unroll
        for (int k = first; k < first + COUNT; ++k) {
            bool begins = k > 0 || first_byte >= 0, ends = (k + 1) * LINE > COPIED && first_byte + k * LINE >= COPIED;
            if (k < PIECES && begins && !ends) copy_16_bytes(to + k * LINE, entry.record + first_byte + k * LINE);
        }
    }

    DEVICE void copy_scales(Shared& shared, int stage, int record, int lane) const {
        if (knows_first(lane)) copy_scales_of(shared, stage, record, entry);
    }
};

DEVICE void start_copies(Shared& shared, int stage, int, int record, int lane, const Entry& entry) {
    Pieces pieces(shared, stage, record, lane, entry);
    pieces.copy_scales(shared, stage, record, lane);
    pieces.copy<PIECES>(0);
}
#endif
