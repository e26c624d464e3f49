// Indexer logits that never reach memory: fp8 products of 32 or 64 heads, relu, weights and the sum over heads, for eight
// query rows a block (16 of 32 heads), and the entries that reach a row's threshold. See nsa_plugin/kernels/cuda/indexer.py;
// SM90 alone.
//
// Two warpgroups have half of the rows each and read the same keys from shared memory, so that a key leaves the L2 cache
// once for all of them. A warpgroup has the sums of two products [64 keys x 128 heads of its rows] in registers: while it
// sums up the heads of one, the tensor cores make the other, and then the other warpgroup's.
//
// A warp appends to lists of its own, one a row, and counts in registers: no warp waits for another. A list that is full
// counts on without storing. `indexer_redo` then scores the row again, as it does one with fewer entries than topk. The
// order of a list's entries is that of the keys, run after run.

#include "indexer.cuh"

#ifndef SAMPLE
#define SAMPLE 0  // 1: store the logits of a sample of the keys instead
#endif
#ifndef TURNS
#define TURNS 0   // 1: the warpgroups start their products in turn
#endif

namespace {

constexpr int kGroups = 2, kProducts = 2;  // of a tile, for a warpgroup
constexpr int kConsumers = kGroups * 128;

extern __shared__ __align__(1024) u8 memory[];

struct Control {
    Barriers barriers;
    float thresholds[kRows];
    Constants known;
};
__shared__ Control control;

// A warpgroup's products are made one after the other, each by all of the tensor cores: two that are started together
// would share them, end together, and leave them idle while both warpgroups sum up.
constexpr int kTurn = 1;  // named barriers: one of each warpgroup
DEVICE void take_turn(int group) { named_sync(kTurn + group, kConsumers); }
DEVICE void pass_turn(int group) { named_arrive(kTurn + group, kConsumers); }

// What a lane collects: entries of one row of each product, in the warp's own lists.
struct Collector {
    float threshold[kProducts];
    int low[kProducts];
    u32 length[kProducts];
    int count[kProducts];
    u32 same_row, before;  // lanes that have the lane's row; lanes before it

    // Append the logits that reach their thresholds, without a branch: it would keep the assembler from hiding all of this
    // among the sums. A NaN is not less than a threshold: `topk_entries` takes it as the least value. Keys below 0 are none.
    DEVICE void offer(int product, Entry* entries, const float (&logits)[kLogits], int key, int capacity) {
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            const bool hit = !(logits[i] < threshold[product]) && (u32)(key + 8 * i - low[product]) < length[product];
            const u32 mine = __ballot_sync(kAllLanes, hit) & same_row;
            const int at = count[product] + __popc(mine & before);
            count[product] += __popc(mine);
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }"
                         :: "r"((u32)(hit && at < capacity)), "l"(entries + at), "f"(logits[i]), "r"(key + 8 * i) : "memory");
        }
    }
};

}  // namespace

// Grid (ceil(rows / 8), parts, 1), block (384, 1, 1); dynamic shared memory: 65536 + 8192 * STAGES bytes.
extern "C" __global__ void __launch_bounds__(kConsumers + 128, 1) indexer_scan(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ Arguments a) {
    // The last rows of a causal prefill see the most keys: they begin first.
    const int first_row = (gridDim.x - 1 - blockIdx.x) * kRows, part = blockIdx.y;
    const int warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

    // The keys that the block's rows see, and from which value on each row takes them.
    if (threadIdx.x < kRows) {
        const int row = first_row + (int)threadIdx.x;
        float threshold = infinity();
        if (row < a.rows && (SAMPLE || min(a.ke[row], a.all_keys) - max(a.ks[row], 0) > a.topk))
            threshold = SAMPLE ? 0.0f : a.thresholds[row];
        // The least finite value stands for everything, -inf too.
        control.thresholds[threadIdx.x] = threshold <= -kMostFinite ? -infinity() : threshold;
    }
    if (threadIdx.x == kConsumers) {
        control.known = constants();
        init_barriers(control.barriers, kConsumers / 32);
    }
    __syncthreads();
    int low = a.keys, high = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (control.thresholds[i] == infinity()) continue;
        low = min(low, min(first_at(a, a.ks[first_row + i]), a.keys));
        high = max(high, min(first_at(a, min(a.ke[first_row + i], a.all_keys)), a.keys));
    }
    const Span span = span_of(a, low, high, part);
    const u32 queries = shared_address(memory), stages = queries + kQueryBytes;
    if (warp >= kConsumers / 32) {
        fewer_registers<40>();
        if (warp == kConsumers / 32 && elected() && span.tiles)
            copy_operands(&q_map, &k_map, queries, control.barriers, first_row, span);
        return;
    }
    more_registers<232>();
    const int group = warp >> 2, list = warp & 3;
    const int slot = group * kProducts * kProductRows + row_of(lane);  // of the lane's row in the first product
    const int row = first_row + slot;

    Collector own;
    own.same_row = (kProductRows == 2 ? 0x55555555u : 0x11111111u) << row_of(lane);
    own.before = (1u << lane) - 1;
    float weights[kProducts][kProductRows][kHeads / 4];
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const int place = slot + kProductRows * product, of = first_row + place;
        own.threshold[product] = control.thresholds[place];
        const bool scored = own.threshold[product] != infinity();
        own.low[product] = scored ? max(a.ks[of], 0) : 0;
        own.length[product] = scored ? (u32)max(min(a.ke[of], a.all_keys) - own.low[product], 0) : 0;
        own.count[product] = 0;
#pragma unroll
        for (int i = 0; i < kProductRows; ++i) load_weights(weights[product][i], a, of - row_of(lane) + i, lane);
    }
    const i64 row_entries = (i64)a.parts * kLists * a.capacity;
    Entry* const entries = a.entries + row * row_entries + (i64)(part * kLists + list) * a.capacity;

    if (span.tiles) {
        float first[64], second[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) first[i] = second[i] = 0.0f;
        const u64 query_matrix = swizzled_matrix(queries + group * (kQueryBytes / kGroups));
        constexpr u64 kNextProduct = (u64)(kColumns * kDim) >> 4;
        const u32 kept = shared_address(&control.known);
        const u64 key_matrices = swizzled_matrix(stages);
        u64 key_matrix = key_matrices;
        const auto take = [&](int product, const Sums& sums, int key, const float (&scale)[kLogits], const Constants& known) {
            float logits[kLogits];
            exchange(logits, sums, lane, known);
#pragma unroll
            for (int i = 0; i < kLogits; ++i) logits[i] *= scale[i];
            const int further = product * kProductRows;
            if (!SAMPLE) {
                own.offer(product, entries + further * row_entries, logits, key, a.capacity);
                return;
            }
#pragma unroll
            for (int i = 0; i < kLogits; ++i)
                if (key >= 0 && key + 8 * i < a.keys && row + further < a.rows)
                    a.sampled[(i64)(row + further) * a.keys + key + 8 * i] = logits[i];
        };
        const auto read_scales = [&](float (&scale)[kLogits], int key) {
#pragma unroll
            for (int i = 0; i < kLogits; ++i) scale[i] = __ldg(a.k_scale + min(key + 8 * i, a.keys - 1));
        };
        constexpr int kNone = -64;  // a key that is none, nor any beside it
        int key = span.first_key + list * 16 + key_of(lane), key_before = kNone;
        float scale[kLogits], scale_before[kLogits] = {}, next_scale[kLogits];
        read_scales(scale, key);
        Sums other = {};  // of the second product, and of the key before
        if (TURNS && group) pass_turn(0);
        barrier_wait(shared_address(&control.barriers.queries), 0);
        barrier_wait(shared_address(&control.barriers.full[0]), 0);
        start_product(first, key_matrix, query_matrix);
        wait_products<0>(first);
        int stage = 0;
        u32 phase = 0;
        // The compiler keeps products in flight only where none is across the loop's end: the first one is waited for there,
        // behind everything that it overlaps with.
#pragma unroll 1
        for (int tile = 0; tile < span.tiles; ++tile) {
            if (TURNS) take_turn(group);
            start_product(second, key_matrix, query_matrix + kNextProduct);
            if (TURNS) pass_turn(1 - group);
            const u32 released = shared_address(&control.barriers.empty[stage]);
            if (++stage == STAGES) stage = 0, phase ^= 1;
            read_scales(next_scale, key + kTile);
            // Waited for here, so that the assembler cannot move sums in between the products before.
            if (tile + 1 < span.tiles) barrier_wait(shared_address(&control.barriers.full[stage]), phase);
            Constants known = read_constants(kept);
            const Sums sums = sum_heads(first, weights[0], known);
            // The next product waits for the sums, and what follows of the sums before is hidden among them.
            int zero = TURNS ? settled(sums, known) : 0;
            take(1, other, key_before + zero, scale_before, known);
            // Behind the last tile, a product that nobody reads spares a branch between products.
            key_matrix = key_matrices + (u64)(stage * (kTileBytes >> 4));
            if (TURNS) take_turn(group + zero);
            start_product(first, key_matrix, query_matrix);
            if (TURNS && (tile + 1 < span.tiles || group == 0)) pass_turn(1 - group);  // nobody waits for the last one
            wait_products<1>(second);
            if (lane == 0) barrier_arrive(released);
            known = read_constants(kept);
            other = sum_heads(second, weights[1], known);
            zero = TURNS ? settled(other, known) : 0;
            take(0, sums, key + zero, scale, known);
            key_before = key;
            key += kTile;
#pragma unroll
            for (int i = 0; i < kLogits; ++i) scale_before[i] = scale[i], scale[i] = next_scale[i];
            wait_products<0>(first);
        }
        take(1, other, key_before, scale_before, constants());
    }
    if (SAMPLE || lane >= kProductRows) return;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
        const int of = row + product * kProductRows;
        if (of < a.rows) a.new_counts[((i64)of * a.parts + part) * kLists + list] = own.count[product];
    }
}
