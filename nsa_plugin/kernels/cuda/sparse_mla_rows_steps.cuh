// The steps of sparse_mla_rows.cu, and of sparse_mla_converted.cuh, on a block of keys: rows are copied, S = K Q^T,
// P = exp(S), O = V^T P.
#pragma once

#ifndef RECORDS
#define RECORDS 0  // rows are made of V3.2's fp8 records: see sparse_mla_converted.cuh
#endif
// So many that warps take whole columns of S; with 64 heads, that a lane has keys of one column only.
#define LANE_KEYS (TEAMS > 1 || RECORDS ? NT * KEYS * TEAMS / 32 : NT * KEYS % 64 ? 1 : 2)
#include "sparse_mla_output.cuh"
#if RECORDS
#include "sparse_mla_code_bits.cuh"
#endif

constexpr int STEPS = 36 / VALUE_PARTS;        // of 16 values, of a part
constexpr int COPIED = 1152;                   // bytes of a row
// Whether the eight pieces of 16 bytes of each of a row's lines of 128 bytes change places, by the row's number. A line of
// memory stays one line in shared memory, which copies write at once, and the same piece of eight rows falls into all banks.
// Other rows lie 16 bytes apart modulo 128 instead.
constexpr bool SWIZZLED = !HOPPER && !RECORDS;
constexpr int ROW = SWIZZLED ? COPIED : COPIED + 16;  // bytes between rows in shared memory
constexpr int LINE_STEPS = 4 / VALUE_PARTS;           // steps of a part in a line of a swizzled row
constexpr bool P_SWIZZLED = !HOPPER && KEYS == 32;    // the same for a head of P, whose four pieces are half a line
constexpr int P_ROW = P_SWIZZLED ? KEYS : P_STRIDE;   // halves between heads of P
constexpr int UNIT = IN_TURN ? 16 : KEYS;      // rows of a stage
constexpr int UNITS = KEYS / UNIT;             // stages of a block of keys
constexpr bool WRITES = IN_TURN || TEAMS > 1;  // whether a copying warp arrives for what it writes itself, too
constexpr int ARRIVALS = HOPPER ? COPIERS : (32 + WRITES) * COPIERS;  // on a stage's barrier, by a filling
static_assert(!SWIZZLED || LINE_STEPS * VALUE_PARTS == 4, "a part has steps of every line");
static_assert(!P_SWIZZLED || LANE_KEYS <= 8, "a lane writes one piece of P");
static_assert(SUMS == VALUE_PARTS || (SUMS * 2 == VALUE_PARTS && KEY_TILES == 2), "two parts share a sum, with a tile for each");
constexpr bool SWAPS = SUMS < VALUE_PARTS;     // two warps add to one tile of their sum each
constexpr int CHAINS = QUERY_TILES * KEY_TILES == 1 ? 3 : 1;  // sums that a tile of S is made in: none waits for another

// Of one team.
struct Team {
    alignas(16) float s[SUMS][HEADS * S_STRIDE];
    alignas(P_SWIZZLED ? 128 : 16) u16 p[HEADS * P_ROW];
    alignas(16) float alpha[HEADS];       // of the output so far, by this step's keys
};

struct Shared {
    alignas(128) u8 records[STAGES][UNIT * ROW];
    Team teams[TEAMS];
#if HOPPER
    alignas(16) u64 from[COPIERS][COPIES];  // where the rows are that a warp copies next
#endif
    const u8* nothing[KEYS];              // what is copied for entries that do not count
    alignas(8) u64 full[STAGES];          // a stage's rows have arrived
    u64 empty[STAGES];                    // nobody reads them any more: see EMPTIES
    u64 query;                            // its heads have arrived, where they pass through shared memory
    int last[WARPS];                      // blocks that a warp found entries in
#if IN_TURN
    int kind[STAGES];                     // of a block of keys: see sparse_mla_turns.cuh
#endif
    alignas(8) u8 valid[STAGES][UNIT];    // see `place_of`
#if RECORDS
    alignas(128) u8 raw[KEYS * RAW];       // the next step's records: see sparse_mla_converted.cuh
    u8 begins[KEYS];                       // pieces of 16 bytes before a record, in the first of its lines
    alignas(16) float scales[KEYS][4];     // of a record, by row
    alignas(16) u16 weights[WARPS][KEYS];  // what a warp multiplies P by, as bfloat16, by position
#endif
};
// The output, of a row or of a cluster's share, lies where its rows were, and what is known of it where S was, in
// sparse_mla_rows.cu.
static_assert(IN_TURN || TEAMS > 1 || RECORDS || HEADS * O_STRIDE * sizeof(float) <= sizeof(Shared::records), "an output does not fit");

// Byte of a row where its piece lies; and of a head of P, where its position does.
DEVICE int piece_at(int row, int piece) { return (SWIZZLED ? piece ^ row & 7 : piece) * 16; }
DEVICE int p_at(int head, int position) {
    return (P_SWIZZLED ? (position / 8 ^ head / 2 & 3) * 8 + position % 8 : position) * 2;
}
// The address so many steps of 16 positions on.
DEVICE u32 p_step(u32 first, int steps) { return P_SWIZZLED ? first ^ steps * 32 : first + steps * 32; }

// Where the row of a slot lies.
DEVICE const u8* find_row(const Scope& scope, int slot) {
#if FLAT
    return scope.data + (i64)slot * COPIED;
#endif
    return find_record(scope, slot, COPIED);
}

// Of the rows that a warp copies to a stage, those whose address a lane knows: on SM90 the first lanes know one each,
// elsewhere neighbours the same.
constexpr int KNOWERS = 32 / COPIES > 8 ? 32 / COPIES : 8;
constexpr int KNOWN = HOPPER ? 1 : COPIES * KNOWERS / 32;
DEVICE int known_record(int copier, int lane, int k) {
    if (HOPPER) return copier * COPIES + lane % COPIES;
    int unit = k * UNITS / KNOWN, own = k % (KNOWN / UNITS);
    return unit * UNIT + copier * (COPIES / UNITS) + own * (32 / KNOWERS) + lane / KNOWERS;
}
static_assert(KNOWN >= UNITS, "a warp copies to every stage");

#if !HOPPER
// A row to a stage by the lanes that know its address, 16 bytes a lane at a time: nothing is read from shared memory behind
// a copy, which would wait for it.
DEVICE void copy_in_pieces(Shared& shared, int stage, int record, int lane, const u8* row) {
    constexpr int BYTES = 16 * KNOWERS, REST = COPIED % BYTES / 16;
    u32 to = shared_address(&shared.records[stage][record % UNIT * ROW]) + piece_at(record, lane % KNOWERS);
    row += lane % KNOWERS * 16;
#pragma unroll
    for (int at = 0; at + BYTES <= COPIED; at += BYTES) copy_16_bytes(to + at, row + at);
    if (lane % KNOWERS < REST) copy_16_bytes(to + COPIED - REST * 16, row + COPIED - REST * 16);
}
#endif

// Index in `Shared::valid` of a row; where a lane has keys of one column only, of its position: so the lane's lie together.
DEVICE int place_of(int row) { return LANE_KEYS > 2 ? row & ~15 | ((row & 7) ^ (row >> 1 & 4)) << 1 | row >> 3 & 1 : row; }

// A warp copies rows, of which a lane knows where `record` lies, and whether it counts. Without bulk copies the caller
// arrives at the stage's barrier.
DEVICE void start_copies(Shared& shared, int stage, int copier, int record, int lane, const u8* row, bool valid) {
    // Read after the block has met, or after the copying warp's arrival: on SM90 that below, elsewhere the caller's.
    bool knows_first = HOPPER ? lane < COPIES : lane % KNOWERS == 0;
    if (knows_first) shared.valid[stage][place_of(record % UNIT)] = valid;
#if !HOPPER
    copy_in_pieces(shared, stage, record, lane, row);
#else
    __syncwarp();  // nobody reads `from` of the copies before any more
    if (lane < COPIES) shared.from[copier][lane] = (u64)row;
    __syncwarp();
    copy_in_bulk<COPIED, ROW>(shared, stage, copier, shared_address(&shared.full[stage]));
#endif
}

// What a warp of a team takes in the first product.
struct Part : WarpPart {
    using WarpPart::WarpPart;
    // The number of the named barrier of the two warps that share a sum.
    DEVICE int barrier(int team) const { return 1 + pair() + SUMS * KEY_PARTS * HEAD_PARTS * team; }
    // The steps of a row are four in a line. Of a swizzled row a part has LINE_STEPS of each line, next to each other: so
    // where the others lie follows from the first. Of other rows it has neighbouring steps; with RECORDS RoPE's lies apart.
    DEVICE int step_of_row(int step) const {
        if (SWIZZLED) return step / LINE_STEPS * 4 + values * LINE_STEPS + step % LINE_STEPS;
#if RECORDS
        if (step == CODE_STEPS) return ROW_ROPE / 32 + values;
        return values * CODE_STEPS + step;
#endif
        return values * STEPS + step;
    }
    // Addresses of a lane's piece of the first step of a row, and of another step. A step has two pieces.
    DEVICE u32 first_step(u32 rows, int row, int piece) const {
        if (SWIZZLED) return rows + row * ROW + piece_at(row, 2 * step_of_row(0) + piece);
        return rows + row * ROW + piece * 16 + (RECORDS ? 0 : values * (32 * STEPS));
    }
    DEVICE u32 step_at(u32 first, int step) const {
        if (SWIZZLED) return (first ^ step % LINE_STEPS * 32) + step / LINE_STEPS * 128;
        return first + (RECORDS ? step_of_row(step) : step) * 32;
    }
};

#if HOPPER || PRODUCERS
// A warp's part of the query, as the products take it. Rows start at multiples of 4 bytes.
DEVICE void read_query(u32 (&query)[STEPS][QUERY_TILES][2], const u16* q, i64 head_stride, int heads, Part part, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        int head = part.tile(n) * 8 + g;
        const u16* start = q + head * head_stride;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                query[s][n][j] = head < heads ? __ldg((const u32*)(start + part.step_of_row(s) * 16 + 8 * j + 2 * t)) : 0;
    }
}
#else
// The query passes through shared memory, ROWS heads at a time, where rows will be: lanes need four bytes here and there of
// it, which would take many reads from memory. Row r gets head `head_of(r)`, or zeros if there is none. All warps start copies, of 16 bytes.
template <int ROWS, typename HeadOf>
DEVICE void stage_query(u8* rows, const u16* q, i64 head_stride, int heads, int warp, int lane, HeadOf head_of) {
    static_assert(ROWS % WARPS == 0, "warps take whole rows");
#pragma unroll 1  // what is run once is best short
    for (int row = warp; row < ROWS; row += WARPS) {
        int head = head_of(row);
        u32 to = shared_address(rows + row * ROW) + piece_at(row, lane);
        const u8* from = (const u8*)(q + head * head_stride) + lane * 16;
#pragma unroll
        for (int at = 0; at < COPIED; at += 512)
            if (at + 512 <= COPIED || lane * 16 < COPIED - at)
                copy_16_bytes_or_zeros(to + at, from + at, head < heads);
    }
}

// A warp's part of COUNT tiles of the query from FIRST on, whose heads lie in rows from `rows` on.
template <int FIRST, int COUNT>
DEVICE void load_query(u32 (&query)[STEPS][QUERY_TILES][2], const u8* rows, Part part, int lane) {
    int matrix = lane >> 3;
    u32 address = part.first_step(shared_address(rows), (matrix >> 1) * 8 + (lane & 7), matrix & 1);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int n = FIRST; n < FIRST + COUNT; n += 2) {
            u32 r[4];
            ldmatrix(r, part.step_at(address, s) + (n - FIRST) * 8 * ROW);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32& two = query[s][n + i / 2][i % 2] = r[i];
#if RECORDS
                two = s == CODE_STEPS ? multiply_bf16(two, ROPE_UNIT) : multiply_bf16(two_of_codes(two, lane), CODES_UNIT);
#endif
            }
        }
}
#endif

// The stage of a block's tile of 16 rows, where its first stage is given; and the address of the tile's first row.
DEVICE int stage_of(int stage, int tile) {
    if constexpr (UNIT == KEYS) return stage;
    return stage + tile < STAGES ? stage + tile : stage + tile - STAGES;
}
DEVICE u32 tile_address(const Shared& shared, int stage, int tile) {
    return shared_address(shared.records[stage_of(stage, tile)]) + (UNIT == KEYS ? tile * (16 * ROW) : 0);
}

// S of a warp's two tiles of keys over its part of their values, for its heads. It leaves one tile in the sum for the other
// warp, then adds the other to what that one has left: `barrier` is theirs. `address` is that of its lanes in the first tile.
DEVICE void multiply_in_turn(const Shared& shared, Team& own, u32 address, const u32 (&query)[STEPS][QUERY_TILES][2], Part part,
                             int barrier, int lane) {
    int g = lane >> 2, t = lane & 3, own_tile = part.values / SUMS;
    float* s = own.s[part.values % SUMS] + (part.tile(0) * 8 + 2 * t) * S_STRIDE + part.keys * 32 + 2 * g;
    u32 tiles[2] = {address + (own_tile ^ 1) * (16 * ROW), address + own_tile * (16 * ROW)};
    // Loads go on from one tile to the next.
    u32 a[2][4];
    ldmatrix(a[0], part.step_at(tiles[0], 0));
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
        int m = turn ? own_tile : own_tile ^ 1;
        float sum[QUERY_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            int at = turn * STEPS + i, next = at + 1;
            if (next < 2 * STEPS) ldmatrix(a[next % 2], part.step_at(tiles[next / STEPS], next % STEPS));
#if RECORDS
            if (i == CODE_STEPS) {
                const float* scales = shared.scales[0] + part.values + m * 64;
                float lower = scales[g * 4], upper = scales[(8 + (g ^ 4)) * 4];
#pragma unroll
                for (int n = 0; n < QUERY_TILES; ++n)
                    sum[n][0] *= lower, sum[n][1] *= lower, sum[n][2] *= upper, sum[n][3] *= upper;
            }
#endif
#pragma unroll
            for (int n = 0; n < QUERY_TILES; ++n) mma_bf16(sum[n], a[at % 2], query[i][n][0], query[i][n][1]);
            if (turn && i == STEPS * 2 / 3) named_sync(barrier, 64);  // what the other warp has left is there
        }
        // Never so. The branch keeps the compiler from taking registers for what follows before the products are done: it
        // would load rows only when a product waits for them. With RECORDS it would not, and the branch makes it slower.
        if (!RECORDS && turn && gridDim.y == 0) return;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
            float* to = s + n * 8 * S_STRIDE + m * 16;
            float2 before = make_float2(0.f, 0.f), after = before;
            if (turn) before = *(const float2*)to, after = *(const float2*)(to + S_STRIDE);
            *(float2*)to = make_float2(sum[n][0] + before.x, sum[n][2] + before.y);
            *(float2*)(to + S_STRIDE) = make_float2(sum[n][1] + after.x, sum[n][3] + after.y);
        }
    }
}

// S of a warp's keys over its part of their values, for its heads.
DEVICE void multiply_queries(const Shared& shared, Team& own, int stage, const u32 (&query)[STEPS][QUERY_TILES][2], Part part,
                             int team, int lane) {
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3;
    // Lanes 16 T + g and 16 T + 8 + g of a fragment are positions 2 l and 2 l + 1: see row_of.
    static_assert(KEY_TILES == 1 || UNIT == KEYS, "a warp's tiles follow each other");
    u32 address = part.first_step(tile_address(shared, stage, part.keys * KEY_TILES), row_of(lane & 7, matrix & 1), matrix >> 1);
    if constexpr (SWAPS) {
        multiply_in_turn(shared, own, address, query, part, part.barrier(team), lane);
        return;
    }
    float sum[CHAINS][KEY_TILES][QUERY_TILES][4] = {};
    // Two are loaded before the products of the first, which wait for it alone.
    u32 a[2][4];
    ldmatrix(a[0], part.step_at(address, 0));
#pragma unroll
    for (int i = 0; i < STEPS * KEY_TILES; ++i) {
        int s = i / KEY_TILES, m = i % KEY_TILES, next = i + 1;
        if (next < STEPS * KEY_TILES) ldmatrix(a[next % 2], part.step_at(address, next / KEY_TILES) + next % KEY_TILES * 16 * ROW);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) mma_bf16(sum[s % CHAINS][m][n], a[i % 2], query[s][n][0], query[s][n][1]);
    }
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = sum[0][m][n][i];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) x[i] += sum[c][m][n][i];
            }
            float* s = own.s[part.values] + (part.tile(n) * 8 + 2 * t) * S_STRIDE + part.keys * (KEY_TILES * 16) + m * 16 + 2 * g;
            *(float2*)s = make_float2(x[0], x[2]);
            *(float2*)(s + S_STRIDE) = make_float2(x[1], x[3]);
        }
}

// P of the step's keys. Returns whether the output so far has to be multiplied by anything but 1 before it grows.
DEVICE bool exponentiate(const Shared& shared, Team& own, int stage, Softmax<COLUMNS>& state, float scale_log2, int member,
                         int lane) {
    float logits[COLUMNS][LANE_KEYS];
    bool valid[LANE_KEYS], exceeds = false;
    int l = lane % LANES;
    auto counts = [&](int row) { return shared.valid[stage_of(stage, row / 16)][row % UNIT]; };
    if constexpr (LANE_KEYS == 1) valid[0] = counts(row_of(l >> 1, l & 1));
    else if constexpr (LANE_KEYS > 2)
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i += 4) {
            u32 four = *(const u32*)&shared.valid[stage][LANE_KEYS * l + i];
#pragma unroll
            for (int k = 0; k < 4; ++k) valid[i + k] = four >> 8 * k & 1;
        }
    else
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) valid[i] = counts(row_of(l, i));
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const float* s = own.s[0] + column_of(member, lane, j) * S_STRIDE + LANE_KEYS * l;
        float part[SUMS][LANE_KEYS], largest = -infinity();
#pragma unroll
        for (int k = 0; k < SUMS; ++k)
            if constexpr (LANE_KEYS == 1) part[k][0] = s[k * HEADS * S_STRIDE];
            else if constexpr (LANE_KEYS > 2)
#pragma unroll
                for (int i = 0; i < LANE_KEYS; i += 4) {
                    float4 four = *(const float4*)(s + k * HEADS * S_STRIDE + i);
                    part[k][i] = four.x, part[k][i + 1] = four.y, part[k][i + 2] = four.z, part[k][i + 3] = four.w;
                }
            else {
                float2 two = *(const float2*)(s + k * HEADS * S_STRIDE);
                part[k][0] = two.x, part[k][1] = two.y;
            }
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) {
            float sum = part[0][i] + part[1][i];
            if constexpr (SUMS == 4) sum += part[2][i] + part[3][i];
            logits[j][i] = valid[i] ? sum * scale_log2 : -infinity();
            largest = fmaxf(largest, logits[j][i]);
        }
        state.largest[j] = fmaxf(state.largest[j], largest);
        exceeds |= largest > state.anchor[j] + ANCHOR_STEP;
    }
    float alpha[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) alpha[j] = 1.f;
    bool changed = __any_sync(~0u, exceeds);
    if (changed) state.raise_anchors<LANES>(alpha);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        float p[LANE_KEYS];
        int column = column_of(member, lane, j);
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) state.sum[j] += p[i] = exp2_approx(logits[j][i] - state.anchor[j]);
        if (l == 0) own.alpha[column] = alpha[j];
        u16* to = own.p + column * P_ROW + p_at(column, LANE_KEYS * l) / 2;
        if constexpr (LANE_KEYS == 1) *to = (u16)pack_bf16(p[0], 0.f);
        else if constexpr (LANE_KEYS > 2)
#pragma unroll
            for (int i = 0; i < LANE_KEYS; i += 4)
                *(uint2*)(to + i) = make_uint2(pack_bf16(p[i], p[i + 1]), pack_bf16(p[i + 2], p[i + 3]));
        else *(u32*)to = pack_bf16(p[0], p[1]);
    }
    return changed;
}

// Where a lane's piece of the first of a warp's tiles of 16 values lies in 16 rows; and the address of another tile's.
DEVICE u32 values_offset(int member, int matrix, int j) {
    // Position 16 k + 8 (matrix >> 1) + j lies k tiles of 16 rows on.
    int row = row_of((matrix >> 1) * 4 + (j >> 1), j & 1);
    return row * ROW + member * (32 * VALUE_TILES) + piece_at(row, matrix & 1);
}
DEVICE u32 values_at(u32 first, int tile) { return SWIZZLED ? (first ^ tile % 4 * 32) + tile / 4 * 128 : first + tile * 32; }

// The first tiles of a warp's values, which it can load before P is there.
constexpr int AHEAD = 2;
DEVICE void load_ahead(u32 (&a)[AHEAD][4], const Shared& shared, int stage, int member, int lane) {
    u32 address = tile_address(shared, stage, 0) + values_offset(member, lane >> 3, lane & 7);
#pragma unroll
    for (int m = 0; m < AHEAD; ++m) ldmatrix_transposed(a[m], values_at(address, m));
}

// O of a warp's values of every row. `ahead`: of `load_ahead`, if it HAS_AHEAD.
template <bool HAS_AHEAD>
DEVICE void multiply_values(const Shared& shared, const Team& own, int stage, float (&o)[VALUE_TILES][NT][4], bool changed,
                            const u32 (&ahead)[AHEAD][4], int member, int lane) {
    int t = lane & 3, matrix = lane >> 3, j = lane & 7;
    if (changed) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float2 alpha = *(const float2*)(own.alpha + n * 8 + 2 * t);
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][n][i] *= i & 1 ? alpha.y : alpha.x;
        }
    }
    // Of one tile of heads a load brings two steps of 16 keys, of more two tiles. Of one tile and step, half of it is unused.
    u32 p_address = shared_address(own.p) + j * P_ROW * 2 + p_at(j, (matrix & 1) * 8);
    p_address = NT > 1 ? p_address + (matrix >> 1) * (8 * P_ROW * 2) : p_step(p_address, matrix >> 1);
    u32 v_offset = values_offset(member, matrix, j);
    u32 b[KEYS / 16][NT][2];
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        if (NT > 1 || k % 2 == 0) {
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                u32 r[4];
                ldmatrix(r, p_step(p_address, k) + n * 8 * P_ROW * 2);
                b[k][n][0] = r[0], b[k][n][1] = r[1];
                if constexpr (NT > 1) b[k][n + 1][0] = r[2], b[k][n + 1][1] = r[3];
                else if constexpr (KEYS > 16) b[k + 1][n][0] = r[2], b[k + 1][n][1] = r[3];
            }
        }
#if RECORDS
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 weights = *(const u32*)(shared.weights[member] + k * 16 + i * 8 + 2 * t);
#pragma unroll
            for (int n = 0; n < NT; ++n) b[k][n][i] = multiply_bf16(b[k][n][i], weights);
        }
#endif
        u32 v_address = tile_address(shared, stage, k) + v_offset;
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m) {
            // Matrices: keys 0 to 7 of values 0 to 7, of values 8 to 15, then keys 8 to 15.
            u32 a[4];
            if (HAS_AHEAD && k == 0 && m < AHEAD)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = ahead[m][i];
            else ldmatrix_transposed(a, values_at(v_address, m));
#pragma unroll
            for (int n = 0; n < NT; ++n) mma_bf16(o[m][n], a, b[k][n][0], b[k][n][1]);
        }
    }
}
