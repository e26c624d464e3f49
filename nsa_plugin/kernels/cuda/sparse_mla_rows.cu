// Sparse MLA over paged bfloat16 rows of 576 values for few query heads: for SM90, and from SM80 on without bulk copies
// and clusters.
//
// As sparse_mla.cu, whose comments hold here too: a block of 8 warps attends one query token with a group of up to
// 8 * NT heads, KEYS keys at a time, keys as rows of the matrix products (mma.m16n8k16) and heads as columns. There is
// nothing to convert: rows are copied to shared memory as they are and read from there by the tensor cores' loads.
//
//   S = K Q^T     warp (quarter, half): a quarter of the row's values, half of the keys. Quarters add up in shared memory.
//   P = exp(S)    all keys of a column, by a warp or a part of one.
//   O = V^T P     warp w: values 64 w to 64 w + 63 of every row.
//
// Two TEAMS of 4 warps have 8 * NT heads each and read the same rows. They meet apart, so that one can multiply while the
// other exponentiates. A warp then takes all keys of its quarter in S, and 128 values in O. A stage is filled again two
// steps later, once all warps have said that they have read it, so that no team waits for the other in a step.
//
// Positions and rows: positions 2 l and 2 l + 1 of S and P, l = 8 T + g, belong to rows 16 T + g and
// 16 T + 8 + (g ^ 4) of shared memory, for the same reasons.

#define LANE_KEYS (NT * KEYS * TEAMS % 64 ? 1 : 2)  // so many that warps take whole columns of S
#include "sparse_mla_few.cuh"

constexpr int KEY_PARTS = MEMBERS / 4;         // of the keys, in the first product
constexpr int KEY_TILES = KEYS / KEY_PARTS / 16;  // tiles of 16 keys a warp, there
constexpr int STEPS = 9;                       // of 16 values, of a quarter
constexpr int COPIED = 1152;                   // bytes of a row
constexpr int ROW = 1168;                      // bytes between rows in shared memory: 16 modulo 128
constexpr int ARRIVALS = HOPPER ? COPIERS : 32 * COPIERS;  // on a stage's barrier, by a filling
constexpr int CHAINS = NT * KEY_TILES == 1 ? 3 : 1;  // sums that a tile of S is made in: none waits for another

// Of one team.
struct Team {
    alignas(16) float s[4][HEADS * S_STRIDE];
    alignas(16) u16 p[HEADS * P_STRIDE];
    alignas(16) float alpha[HEADS];       // of the output so far, by this step's keys
};

struct Shared {
    alignas(128) u8 records[STAGES][KEYS * ROW];
    Team teams[TEAMS];
#if HOPPER
    alignas(16) u64 from[COPIERS][COPIES];  // where the rows are that a warp copies next
#endif
    const u8* nothing[KEYS];              // what is copied for entries that do not count
    alignas(8) u64 full[STAGES];          // a stage's rows have arrived
    u64 empty[STAGES];                    // nobody reads them any more: see EMPTIES
    int last[WARPS];                      // blocks that a warp found entries in
    u8 valid[STAGES][KEYS];
};
// A share's output lies where its rows were, and what is known of it where S was.
static_assert(HEADS * O_STRIDE * sizeof(float) <= sizeof(Shared::records), "a share's output does not fit");

// Where the row of a slot lies.
DEVICE const u8* find_row(const Scope& scope, int slot) {
#if FLAT
    return scope.data + (i64)slot * COPIED;
#endif
    return find_record(scope, slot, COPIED);
}

// Of the rows that a warp copies, the one whose address a lane knows: on SM90 the first lanes know one each, elsewhere
// neighbours the same.
constexpr int KNOWERS = 32 / COPIES;
DEVICE int known_row(int lane) { return HOPPER ? lane % COPIES : lane / KNOWERS; }

#if !HOPPER
// The rows of a copier to a stage, each by the lanes that know its address, 16 bytes a lane at a time: nothing is read from
// shared memory behind a copy, which would wait for it.
DEVICE void copy_in_pieces(Shared& shared, int stage, int copier, int lane, const u8* row, u32 full) {
    constexpr int BYTES = 16 * KNOWERS, REST = COPIED % BYTES / 16;
    static_assert(KNOWERS >= 8, "copies of a row are of 128 bytes or more");
    int offset = lane % KNOWERS * 16;
    u32 to = shared_address(&shared.records[stage][(copier * COPIES + known_row(lane)) * ROW]) + offset;
    row += offset;
#pragma unroll
    for (int at = 0; at + BYTES <= COPIED; at += BYTES) copy_16_bytes(to + at, row + at);
    if (lane % KNOWERS < REST) copy_16_bytes(to + COPIED - REST * 16, row + COPIED - REST * 16);
    arrive_with_copies(full);
}
#endif

// A warp copies COPIES rows; a lane knows where `known_row` of them lies, and whether it counts.
DEVICE void start_copies(Shared& shared, int stage, int copier, int lane, const u8* row, bool valid) {
    u32 full = shared_address(&shared.full[stage]);
    // Read after the block has met, or on SM90 after the copying warp's arrival below. With two teams it is read when the
    // copies have arrived that these threads start behind it: PTX says that of the copies alone, and GPUs keep the order.
    bool knows_first = HOPPER ? lane < COPIES : lane % KNOWERS == 0;
    if (knows_first) shared.valid[stage][copier * COPIES + known_row(lane)] = valid;
#if !HOPPER
    copy_in_pieces(shared, stage, copier, lane, row, full);
#else
    __syncwarp();  // nobody reads `from` of the copies before any more
    if (lane < COPIES) shared.from[copier][lane] = (u64)row;
    __syncwarp();
    copy_in_bulk<COPIED, ROW>(shared, stage, copier, full);
#endif
}

// A quarter of the query's values, for all heads of the block, as the products take them. Rows start at multiples of
// 4 bytes.
DEVICE void read_query(u32 (&query)[STEPS][NT][2], const u16* q, i64 head_stride, int heads, int quarter, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int head = n * 8 + g;
        const u16* source = q + head * head_stride + quarter * (16 * STEPS) + 2 * t;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) query[s][n][j] = head < heads ? __ldg((const u32*)(source + s * 16 + 8 * j)) : 0;
    }
}

// S of a warp's keys over a quarter of their values.
DEVICE void multiply_queries(const Shared& shared, Team& own, int stage, const u32 (&query)[STEPS][NT][2], int quarter, int part,
                             int lane) {
    int g = lane >> 2, t = lane & 3, matrix = lane >> 3;
    // Lanes 16 T + g and 16 T + 8 + g of a fragment are positions 2 l and 2 l + 1: see row_of.
    u32 address = shared_address(shared.records[stage]) + (part * (KEY_TILES * 16) + row_of(lane & 7, matrix & 1)) * ROW +
                  quarter * (32 * STEPS) + (matrix >> 1) * 16;
    float sum[CHAINS][KEY_TILES][NT][4] = {};
    // Two are loaded before the products of the first, which wait for it alone.
    u32 a[2][4];
    ldmatrix(a[0], address);
#pragma unroll
    for (int i = 0; i < STEPS * KEY_TILES; ++i) {
        int s = i / KEY_TILES, m = i % KEY_TILES, next = i + 1;
        if (next < STEPS * KEY_TILES) ldmatrix(a[next % 2], address + next % KEY_TILES * 16 * ROW + next / KEY_TILES * 32);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_bf16(sum[s % CHAINS][m][n], a[i % 2], query[s][n][0], query[s][n][1]);
    }
#pragma unroll
    for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = sum[0][m][n][i];
#pragma unroll
                for (int c = 1; c < CHAINS; ++c) x[i] += sum[c][m][n][i];
            }
            float* s = own.s[quarter] + (n * 8 + 2 * t) * S_STRIDE + part * (KEY_TILES * 16) + m * 16 + 2 * g;
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
    if constexpr (LANE_KEYS == 1) valid[0] = shared.valid[stage][row_of(l >> 1, l & 1)];
    else
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) valid[i] = shared.valid[stage][row_of(l, i)];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        const float* s = own.s[0] + column_of(member, lane, j) * S_STRIDE + LANE_KEYS * l;
        float part[4][LANE_KEYS], largest = -infinity();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if constexpr (LANE_KEYS == 1) part[k][0] = s[k * HEADS * S_STRIDE];
            else {
                float2 two = *(const float2*)(s + k * HEADS * S_STRIDE);
                part[k][0] = two.x, part[k][1] = two.y;
            }
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i) {
            float sum = (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
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
        u16* to = own.p + column * P_STRIDE + LANE_KEYS * l;
        if constexpr (LANE_KEYS == 1) *to = (u16)pack_bf16(p[0], 0.f);
        else *(u32*)to = pack_bf16(p[0], p[1]);
    }
    return changed;
}

// O of a warp's values of every row.
DEVICE void multiply_values(const Shared& shared, const Team& own, int stage, float (&o)[VALUE_TILES][NT][4], bool changed,
                            int member, int lane) {
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
    u32 p_address = shared_address(own.p) + j * P_STRIDE * 2 + (matrix & 1) * 16 +
                    (matrix >> 1) * (NT > 1 ? 8 * P_STRIDE * 2 : 32);
    // Position 16 k + 8 (matrix >> 1) + j lies k tiles of 16 rows on.
    int row = row_of((matrix >> 1) * 4 + (j >> 1), j & 1);
    u32 v_address = shared_address(shared.records[stage]) + row * ROW + member * (32 * VALUE_TILES) + (matrix & 1) * 16;
    u32 b[KEYS / 16][NT][2];
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
        if (NT > 1 || k % 2 == 0) {
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                u32 r[4];
                ldmatrix(r, p_address + k * 32 + n * 8 * P_STRIDE * 2);
                b[k][n][0] = r[0], b[k][n][1] = r[1];
                if constexpr (NT > 1) b[k][n + 1][0] = r[2], b[k][n + 1][1] = r[3];
                else if constexpr (KEYS > 16) b[k + 1][n][0] = r[2], b[k + 1][n][1] = r[3];
            }
        }
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m) {
            // Matrices: keys 0 to 7 of values 0 to 7, of values 8 to 15, then keys 8 to 15.
            u32 a[4];
            ldmatrix_transposed(a, v_address + k * 16 * ROW + m * 32);
#pragma unroll
            for (int n = 0; n < NT; ++n) mma_bf16(o[m][n], a, b[k][n][0], b[k][n][1]);
        }
    }
}

// Attention of query row `blockIdx.x`, for the heads of all teams from HEADS * TEAMS * `blockIdx.y` on, over the share
// `blockIdx.z` of its entries. With one share `out`, `lse` and `max_logits` are the result. With more, either the blocks
// of all shares are a cluster, which adds up in the end, or `partial_out` and `partials` hold every share's own for
// `combine`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend_rows(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads, Scope scope,
    const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, float* __restrict__ partial_out, Share* __restrict__ partials) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // Both in ways that the compiler cannot repeat, as it would rather than keep them in registers.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    int team = warp % WARPS / MEMBERS, member = warp % MEMBERS;
    Team& own = shared.teams[team];
    int row = blockIdx.x, first_head = HEADS * (TEAMS * blockIdx.y + team);
    int own_heads = min(HEADS, heads - first_head);  // a last block's second team may have none

    int length = scope_length(scope, row);
    int all = (length + KEYS - 1) / KEYS, share = (all + gridDim.z - 1) / gridDim.z;
    int begin = min(share * (int)blockIdx.z, all), end = min(begin + share, all);
    int bound = min(length, end * KEYS);
    const int* indices = scope.indices + row * scope.indices_stride;

    init_barriers(shared, ARRIVALS);

    auto slot_of = [&](int block, int i) -> int {
        int e = block * KEYS + i;
        return e < bound ? __ldg(indices + e) : -1;
    };
    auto counts = [&](int slot) -> bool { return (u32)slot < (u32)scope.num_slots; };
    bool multiplies = !PRODUCERS || warp < WARPS, copies = !PRODUCERS || !multiplies;
    int copier = PRODUCERS ? warp & PRODUCERS - 1 : warp, i = copier * COPIES + known_row(lane);
    auto copy = [&](int block, int stage, int slot) {
        bool valid = counts(slot);
        start_copies(shared, stage, copier, lane, valid ? find_row(scope, slot) : shared.nothing[i], valid);
    };
    // Of the entries and the query none waits for another, nor for the block. Later, a slot is read a step before its
    // address is needed.
    int slots[STAGES];
#pragma unroll
    for (int k = 0; k < STAGES; ++k) slots[k] = copies ? slot_of(begin + k, i) : -1;
    int final = begin < end ? slot_of(end - 1, threadIdx.x % KEYS) : -1;
    int quarter = member & 3, part = member >> 2;
    u32 query[STEPS][NT][2];
    auto read = [&]() {
        read_query(query, q + row * q_row_stride + first_head * q_head_stride, q_head_stride, own_heads, quarter, lane);
    };
    if (!PRODUCERS) read();
    // Not all the same: many copies of a single row wait for each other.
    if (threadIdx.x < KEYS) shared.nothing[threadIdx.x] = zeros + (blockIdx.x * KEYS + threadIdx.x) % NOTHINGS * COPIED;
    if (!__syncthreads_or(counts(final)) && begin + 1 < end)
        end = end_of_entries(begin, end, shared.last, multiplies, warp, lane,
                             [&](int block, int entry) { return counts(slot_of(block, entry)); });
    if (copies) {
#pragma unroll
        for (int k = 0; k < STAGES; ++k)
            if (begin + k < end) copy(begin + k, k, slots[k]);  // all stages are free
    }
    int next = copies ? slot_of(begin + STAGES, i) : -1;
    int stage = 0, parity = 0, own_share = blockIdx.z;
    bool is_whole = gridDim.z == 1, is_cluster = HOPPER && !is_whole && !partial_out;
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
    read();
#endif
    float o[VALUE_TILES][NT][4] = {};
    Softmax<COLUMNS> state;
    state.start();

    for (int block = begin; block < end; ++block) {
        barrier_wait(shared_address(&shared.full[stage]), parity);
        multiply_queries(shared, own, stage, query, quarter, part, lane);
        // S is there, and nobody of the team reads P or the stage before any more.
        meet(team);
        if (!PRODUCERS && block - begin >= TEAMS && block + STAGES - TEAMS < end) {
            int freed = stage >= TEAMS ? stage - TEAMS : stage - TEAMS + STAGES;
            if (EMPTIES) barrier_wait(shared_address(&shared.empty[freed]), stage >= TEAMS ? parity : parity ^ 1);
            copy(block + STAGES - TEAMS, freed, next);
            next = slot_of(block + STAGES - TEAMS + 1, i);
        }
        bool changed = exponentiate(shared, own, stage, state, scale_log2, member, lane);
        changed = meet_or(changed, team);  // P is there, and nobody reads S any more
        multiply_values(shared, own, stage, o, changed, member, lane);
        if (EMPTIES) {
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&shared.empty[stage]));
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    meet(team);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        int head = column_of(member, lane, j);
        float sum = sum_of_lanes<LANES>(state.sum[j]), largest = max_of_lanes<LANES>(state.largest[j]);
        if (lane % LANES == 0) {
            float total = state.anchor[j] + log2_approx(sum);  // -inf where there is nothing
            float weight = sum == 0.f ? 0.f : 1.f / sum;
            i64 at = (i64)row * heads + first_head + head;
            Share found = {sum == 0.f ? -infinity() : total, largest};
            if (is_cluster) own_shares(own)[head] = found;
            else if (head < own_heads && !is_whole) partials[(i64)own_share * gridDim.x * heads + at] = found;
            else if (head < own_heads) {
                if (sink && sum != 0.f) weight /= 1.f + exp2_approx(sink[first_head + head] * LOG2_E - total);
                lse[at] = sum == 0.f ? infinity() : total * LN_2;
                max_logits[at] = largest * LN_2;
            }
            own.alpha[head] = weight;
        }
    }
    meet(team);

    // The output passes through shared memory, where a cluster reads it, and from which rows are written in one piece: of
    // one team at a time, once nobody reads records there.
    int g = lane >> 2, t = lane & 3;
    float* own_out = (float*)shared.records;
#pragma unroll 1
    for (int turn = 0; turn < TEAMS; ++turn) {
        if (TEAMS > 1) __syncthreads();
        if (turn != team) continue;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int head = n * 8 + 2 * t + i;
                float weight = own.alpha[head];
#pragma unroll
                for (int m = 0; m < VALUE_TILES; ++m) {
                    float* at = own_out + head * O_STRIDE + member * (16 * VALUE_TILES) + m * 16 + g;
                    at[0] = weight != 0.f ? o[m][n][i] * weight : 0.f;
                    at[8] = weight != 0.f ? o[m][n][i + 2] * weight : 0.f;
                }
            }
        if (is_cluster) break;
        // From here on a warp takes a head and a quarter of its values.
        meet(team);
        for (int k = member; k < own_heads * 4; k += MEMBERS) {
            int head = k / 4, value = (k % 4) * 128 + lane * 4;
            float4 x = *(const float4*)(own_out + head * O_STRIDE + value);
            if (is_whole) write_values(out, row * out_row_stride + (first_head + head) * out_head_stride + value, x);
            else *(float4*)(partial_out + (((i64)own_share * gridDim.x + row) * heads + first_head + head) * D_V + value) = x;
        }
    }
#if HOPPER
    if (!is_cluster) return;
    add_up_row(shared, own, row, first_head, own_heads, heads, sink, out, out_row_stride, out_head_stride, lse, max_logits,
               warp, lane);
#endif
}
