// What sparse_mla.cu and sparse_mla_rows.cu have in common. Both attend a query token with a block of WARPS warps and few
// heads, KEYS keys at a time: keys are the rows of the matrix products and heads their columns. Here is how such a block is
// cut, how it meets and starts its copies, and how it writes what it found; they differ in what they multiply.
#pragma once

#ifndef NT
#define NT 2  // tiles of 8 heads a team
#endif
#ifndef KEYS
#define KEYS 64  // keys that are attended at a time: a step
#endif
#ifndef STAGES
#define STAGES 2  // steps in shared memory
#endif
#ifndef HAS_EXTRA
#define HAS_EXTRA 0  // whether there is a second cache
#endif
#ifndef GROUP
#define GROUP 1  // neighbouring query rows of a block, which share the union of their entries
#endif
// The first product is split over the warps: by values into four parts or two, by heads into one or two, by keys into the
// rest.
#ifndef VALUE_PARTS
#define VALUE_PARTS 4
#endif
#ifndef HEAD_PARTS
#define HEAD_PARTS 1
#endif
#ifndef SUMS
#define SUMS 4  // sums of S in shared memory: one for every part of the values, or for two
#endif
#ifndef TEAMS
#define TEAMS 1  // of a block's warps: each has heads of its own, and while one exponentiates, another multiplies
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2  // blocks of an SM
#endif
#ifndef WARPS
#define WARPS 8  // of a block, that multiply
#endif
#ifndef PRODUCERS
#define PRODUCERS 0  // so many warps more copy, where registers suffice: a warp that starts copies waits for them
#endif
#ifndef IN_TURN
#define IN_TURN 0  // a block attends several query rows in turn
#endif
#ifndef LANE_KEYS
#define LANE_KEYS 2  // neighbouring keys that a lane exponentiates
#endif
#ifndef FLAT
#define FLAT 0  // pages follow each other without a gap, and so do the records in them
#endif

#include "codes.cuh"
#include "scope.cuh"
#include "sparse_mla_shares.cuh"

constexpr int THREADS = 32 * (WARPS + PRODUCERS);
constexpr int MEMBERS = WARPS / TEAMS;           // warps of a team
constexpr int HEADS = 8 * NT;                    // of a team
constexpr int VALUE_TILES = D_V / MEMBERS / 16;  // tiles of 16 values a warp, in the second product
constexpr int COPIERS = PRODUCERS ? PRODUCERS : WARPS;  // warps that copy
constexpr int COPIES = KEYS / COPIERS;           // records that one of them copies
constexpr int LANES = KEYS / LANE_KEYS;          // lanes that exponentiate a column of S
constexpr int COLUMNS = HEADS * LANES / (32 * MEMBERS);  // columns of S that a lane exponentiates
constexpr int KEY_PARTS = MEMBERS / VALUE_PARTS / HEAD_PARTS;
constexpr int KEY_TILES = KEYS / KEY_PARTS / 16;  // tiles of 16 keys a warp, in the first product
constexpr int QUERY_TILES = NT / HEAD_PARTS;      // tiles of 8 heads a warp, there
constexpr int S_STRIDE = KEYS + 4;  // floats between heads of S: lanes of a warp's store fall into 32 banks
constexpr int P_STRIDE = KEYS + 8;  // halves between heads of P: 8 rows of a matrix in 32 banks
constexpr int O_STRIDE = 516;       // floats between heads of a share's output in shared memory
constexpr int TILES = NT / GROUP;   // tiles of a query row
constexpr bool EMPTIES = PRODUCERS || TEAMS > 1;  // whether warps say that they have read a stage; else the block meets
static_assert(HEADS * LANES % (32 * MEMBERS) == 0, "warps take whole columns");
static_assert(NT % HEAD_PARTS == 0, "warps take whole tiles");
static_assert(NT % GROUP == 0, "a query row takes whole tiles");
static_assert((PRODUCERS & PRODUCERS - 1) == 0 && PRODUCERS <= WARPS, "warps that only copy are numbered by a mask");

// Row of shared memory of position 2 l + i of a block: see sparse_mla.cu.
DEVICE int row_of(int l, int i) { return (l & 24) << 1 | i << 3 | ((l & 7) ^ i << 2); }

// Which row of the group a column of S belongs to, and which head of the block's.
DEVICE int query_of(int column) { return GROUP == 1 ? 0 : column / 8 / TILES; }
DEVICE int head_of(int column) { return GROUP == 1 ? column : column % (8 * TILES); }

// The columns of S that a lane of a team's warp exponentiates.
DEVICE int column_of(int member, int lane, int j) {
    if (LANES < 16) return (member * COLUMNS + j) * (32 / LANES) + lane / LANES;
    return LANES == 32 ? member + MEMBERS * j : member + MEMBERS * (j * (32 / LANES) + lane / LANES);
}

// What a warp of a team takes in the first product.
struct WarpPart {
    int values, keys, heads;
    DEVICE explicit WarpPart(int member)
        : values(member % VALUE_PARTS), keys(member / VALUE_PARTS % KEY_PARTS), heads(member / VALUE_PARTS / KEY_PARTS) {}
    DEVICE int first_key() const { return keys * (KEY_TILES * 16); }
    DEVICE int tile(int n) const { return heads * QUERY_TILES + n; }
    // The number, of a team's, of the two warps that share a sum.
    DEVICE int pair() const { return values % SUMS + SUMS * (keys + KEY_PARTS * heads); }
};

// The blocks of keys that share `blockIdx.z` of a query row's entries has, where a call has one cache.
struct RowShare {
    const int* indices;
    int begin, end;
    int bound;  // of its entries

    DEVICE RowShare(const Scope& scope, int row) {
        int length = scope_length(scope, row);
        int all = (length + KEYS - 1) / KEYS, share = (all + gridDim.z - 1) / gridDim.z;
        begin = min(share * (int)blockIdx.z, all), end = min(begin + share, all);
        bound = min(length, end * KEYS);
        indices = scope.indices + row * scope.indices_stride;
    }
    // The slot of entry i of a block, or -1.
    DEVICE int slot_of(int block, int i) const {
        int e = block * KEYS + i;
        return e < bound ? __ldg(indices + e) : -1;
    }
};

// The warps of a team meet; and find out whether something holds for one of their threads.
// The named barriers below these are those of `Part::barrier`, `START` of sparse_mla_rows_in_teams.cuh, and `HALVES` of
// sparse_mla_converted.cuh.
DEVICE void meet(int team = 0) {
    if constexpr (EMPTIES) named_sync(16 - 2 * TEAMS + team, 32 * MEMBERS);
    else __syncthreads();
}
DEVICE bool meet_or(bool something, int team = 0) {
    if constexpr (EMPTIES) return named_or(16 - TEAMS + team, 32 * MEMBERS, something);
    else return __syncthreads_or(something);
}

// By a thread for each stage: its records have arrived, and nobody reads them any more.
template <typename Memory>
DEVICE void init_barriers(Memory& shared, int arrivals) {
    if (threadIdx.x < STAGES) {
        barrier_init(shared_address(&shared.full[threadIdx.x]), arrivals);
        if constexpr (EMPTIES) barrier_init(shared_address(&shared.empty[threadIdx.x]), WARPS);
#if HOPPER
        show_writes();
#endif
    }
}

// What is copied for entries that do not count, a record of `zeros` for each of a block's: not all the same, because many
// copies of a single one wait for each other.
template <int COPIED, typename Memory>
DEVICE void name_nothings(Memory& shared, const u8* zeros) {
    if (threadIdx.x < KEYS) shared.nothing[threadIdx.x] = zeros + (blockIdx.x * KEYS + threadIdx.x) % NOTHINGS * COPIED;
}

#if HOPPER
// The records of a copier, whose addresses `shared.from` has, to a stage. A bulk copy takes its address from uniform
// registers: one lane that starts them all keeps these in flight, where lanes that start one each go through a loop.
template <int COPIED, int ROW, typename Memory>
DEVICE void copy_in_bulk(Memory& shared, int stage, int copier, u32 full) {
    if (elected()) {
        ulonglong2 from[COPIES / 2];
#pragma unroll
        for (int k = 0; k < COPIES / 2; ++k) from[k] = *(const ulonglong2*)&shared.from[copier][2 * k];
        u32 to = shared_address(&shared.records[stage][copier * COPIES * ROW]);
        barrier_expect(full, COPIES * COPIED);
#pragma unroll
        for (int k = 0; k < COPIES / 2; ++k) {
            bulk_copy(to + 2 * k * ROW, (const void*)from[k].x, COPIED, full);
            bulk_copy(to + (2 * k + 1) * ROW, (const void*)from[k].y, COPIED, full);
        }
    }
}
#endif

// By a thread of a warp that copies, without bulk copies: the stage is full when the copies of all threads are there, and
// what the warp has written itself if it WRITES.
template <bool WRITES = true>
DEVICE void finish_copies(u32 full, int lane) {
    arrive_with_copies(full);
    if (!WRITES) return;
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
}

// The last block that has entries, among those that this warp reads of a row's, where `counts(block, i)` says whether entry
// i of a block does. So many warps, `WARPS_READING`, find the last of all of them.
template <int WARPS_READING, typename Counts>
DEVICE int last_with_entries(int begin, int end, int warp, int lane, Counts counts) {
    // Warps that read a block's slots, or blocks whose slots a warp reads.
    constexpr int READERS = KEYS > 32 ? KEYS / 32 : 1, READ = KEYS < 32 ? 32 / KEYS : 1;
    static_assert(WARPS_READING >= READERS, "a block's slots are read at once");
    int last = begin;
    for (int b = begin + 1 + warp / READERS * READ + lane / KEYS; b < end - 1; b += WARPS_READING / READERS * READ)
        if (counts(b, warp % READERS * 32 + lane % KEYS)) last = b;
    return (int)__reduce_max_sync(~0u, (u32)last);
}

// Short contexts leave all blocks of keys from some one on empty. The end without these, for all warps; the last block is
// known to be empty.
template <typename Counts>
DEVICE int end_of_entries(int begin, int end, int (&found)[WARPS], bool multiplies, int warp, int lane, Counts counts) {
    int last = last_with_entries<WARPS>(begin, end, warp, lane, counts);
    if (lane == 0 && multiplies) found[warp] = last;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) last = max(last, found[w]);
    return last + 1;
}

// Running statistics of a lane's keys, in base 2, by column of S that its warp is responsible for.
template <int COLUMNS>
struct Softmax {
    float largest[COLUMNS];
    float anchor[COLUMNS];  // what exponents are relative to: follows the largest in jumps of ANCHOR_STEP or more
    float sum[COLUMNS];

    DEVICE void start() {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) largest[j] = -infinity(), anchor[j] = ANCHOR_START, sum[j] = 0.f;
    }

    // Where a key exceeds its anchor, which is seldom: by what the output so far is multiplied. The LANES of a column look at
    // their keys' largest together.
    template <int LANES>
    DEVICE void raise_anchors(float (&alpha)[COLUMNS]) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            float top = max_of_lanes<LANES>(largest[j]);
            float raised = top > anchor[j] + ANCHOR_STEP ? top : anchor[j];
            alpha[j] = exp2_approx(anchor[j] - raised);
            anchor[j] = raised;
            sum[j] *= alpha[j];
        }
    }
};

// What a block of a cluster knows of its share, by head, where S was.
template <typename Own>
DEVICE Share* own_shares(Own& own) { return (Share*)own.s; }

#if HOPPER
// The results of a row whose shares are a cluster. For the warps that multiply; those that copy meet and part alone.
template <typename Memory, typename Own>
DEVICE void add_up_row(Memory& shared, Own& own, int row, int first_head, int own_heads, int heads, const float* sink, u8* out,
                       i64 out_row_stride, i64 out_head_stride, float* lse, float* max_logits, int warp, int lane) {
    cluster_meet();
    i64 at = (i64)row * heads + first_head;
    int size = OUT_FLOAT32 ? 4 : 2;
    add_up_cluster(gridDim.z, blockIdx.z, WARPS, own_heads, own_shares(own), (float*)shared.records, O_STRIDE,
                   sink ? sink + first_head : nullptr, out + (row * out_row_stride + first_head * out_head_stride) * size,
                   out_head_stride, lse + at, max_logits + at, warp, lane);
    cluster_part();  // no block leaves while another reads its shared memory
}
#endif
