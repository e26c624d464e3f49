// The rows that `indexer_scan` (indexer_scan.cu) did not gather whole, scored again: exact for any data, no faster than
// that. See nsa_plugin/kernels/cuda/indexer.py; SM90 alone.
//
// A row with fewer entries than topk is scored without its threshold; one with a full list, with it. Four warpgroups have
// a quarter of the block's rows each. Entries are appended to all the row's lists as one buffer. Before it can overflow,
// the warpgroup cuts it back to the best topk and raises the threshold. The order of the entries differs from run to run;
// their set is exact up to surplus. Blocks without such a row end at once.

#include "indexer.cuh"

namespace {

constexpr int kGroups = 4, kRowsPerGroup = kProductRows;
constexpr int kConsumers = kGroups * 128;
constexpr int kLookEvery = 16;  // tiles between two looks at a buffer's room
constexpr int kSlack = kLookEvery * kTile;
constexpr int kGroupBarrier = 1;

extern __shared__ __align__(1024) u8 memory[];

struct Control {
    Barriers barriers;
    int counts[kRows];
    float thresholds[kRows];
    int bins[kGroups][256];
};
__shared__ Control control;

struct Cut {
    u32 key;
    int room, tied;
};

// The k-th largest key among those entries that key_of takes part with; by the 128 threads of a warpgroup.
template <typename KeyOf>
DEVICE Cut kth_largest(int* bins, int group, int count, int k, KeyOf key_of) {
    const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
    Cut cut{0, k, 0};
    u32 mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        bins[thread] = 0;
        bins[thread + 128] = 0;
        named_sync(kGroupBarrier + group, 128);
#pragma unroll 4
        for (int i = thread; i < count; i += 128) {
            u32 key;
            if (key_of(i, key) && (key & mask) == cut.key) atomicAdd(bins + ((key >> shift) & 255), 1);
        }
        named_sync(kGroupBarrier + group, 128);
        // Every warp looks for the bin; lane 0 has the highest eight.
        const int top = 256 - 8 * lane;
        int own = 0;
#pragma unroll
        for (int i = 1; i <= 8; ++i) own += bins[top - i];
        int above = own;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(kAllLanes, above, step);
            if (lane >= step) above += other;
        }
        above -= own;
        int bin = 0, room = 0, tied = 0;
        const bool here = above < cut.room && cut.room <= above + own;
        if (here) {
            bin = top - 1;
            while (above + bins[bin] < cut.room) above += bins[bin--];
            room = cut.room - above;
            tied = bins[bin];
        }
        const int from = __ffs(__ballot_sync(kAllLanes, here)) - 1;
        bin = __shfl_sync(kAllLanes, bin, from);
        cut.room = __shfl_sync(kAllLanes, room, from);
        cut.tied = __shfl_sync(kAllLanes, tied, from);
        cut.key |= (u32)bin << shift;
        mask |= 255u << shift;
        named_sync(kGroupBarrier + group, 128);
        if (cut.room == cut.tied) break;  // the whole bin is wanted: its lower edge says as much as the exact key
    }
    return cut;
}

// Cut a buffer back to the best k of its `count` entries, of a tie those of the lowest keys. Returns the threshold for
// later keys, which lose a tie. By the 128 threads of a warpgroup; all the entries lie behind a barrier.
DEVICE float cut_back(Entry* entries, int* bins, int* counter, int group, int count, int k) {
    const int thread = threadIdx.x & 127;
    const Cut cut = kth_largest(bins, group, count, k, [&](int i, u32& key) {
        key = to_key(entries[i].value);
        return true;
    });
    u32 last = kAllLanes;
    if (cut.room < cut.tied) {
        const Cut tie = kth_largest(bins, group, count, cut.room, [&](int i, u32& key) {
            const Entry entry = entries[i];
            key = ~(u32)entry.key;
            return to_key(entry.value) == cut.key;
        });
        last = ~tie.key;
    }
    if (thread == 0) *counter = 0;
    named_sync(kGroupBarrier + group, 128);
    constexpr int kBatch = 4;
    for (int first = 0; first < count; first += kBatch * 128) {
        Entry entry[kBatch];
        bool keep[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = first + i * 128 + thread;
            keep[i] = at < count;
            entry[i] = entries[keep[i] ? at : 0];
            const u32 key = to_key(entry[i].value);
            keep[i] = keep[i] && (key > cut.key || (key == cut.key && (u32)entry[i].key <= last));
        }
        // No more are kept than were read, so slots never run ahead of the reads behind this barrier.
        named_sync(kGroupBarrier + group, 128);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (keep[i]) entries[atomicAdd(counter, 1)] = entry[i];
    }
    named_sync(kGroupBarrier + group, 128);
    return to_value(cut.key + 1);
}

// Whether the pass before gathered all that belongs to the row's top; if not, from which value on it is scored again.
DEVICE bool gathered(const Arguments& a, int row, float& threshold) {
    if (min(a.ke[row], a.all_keys) - max(a.ks[row], 0) <= a.topk) return true;
    int total = 0, most = 0;
    for (int i = 0; i < a.parts * kLists; ++i) {
        const int count = a.counts[(i64)row * a.parts * kLists + i];
        total += count;
        most = max(most, count);
    }
    threshold = total < a.topk ? -kMostFinite : a.thresholds[row];
    return total >= a.topk && most <= a.capacity;
}

}  // namespace

// Grid (ceil(rows / 8), parts, 1), block (640, 1, 1); dynamic shared memory: 65536 + 8192 * STAGES bytes.
// topk + 2 * kSlack <= kLists * capacity.
extern "C" __global__ void __launch_bounds__(kConsumers + 128, 1) indexer_redo(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ Arguments a) {
    const int first_row = blockIdx.x * kRows, part = blockIdx.y;
    const int warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

    if (threadIdx.x < kRows) {
        const int row = first_row + (int)threadIdx.x;
        float threshold;
        const bool kept = row >= a.rows || gathered(a, row, threshold);
        control.thresholds[threadIdx.x] = kept ? infinity() : threshold;
        control.counts[threadIdx.x] = 0;
        for (int i = 0; row < a.rows && kept && i < kLists; ++i) {
            const i64 at = ((i64)row * a.parts + part) * kLists + i;
            a.new_counts[at] = a.counts[at];
        }
    }
    if (threadIdx.x == kConsumers) init_barriers(control.barriers, kConsumers / 32);
    __syncthreads();
    int low = a.keys, high = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (control.thresholds[i] == infinity()) continue;
        low = min(low, max(a.ks[first_row + i], 0));
        high = max(high, min(a.ke[first_row + i], a.keys));
    }
    const Span span = span_of(a, low, high, part);
    const u32 queries = shared_address(memory), stages = queries + kQueryBytes;
    if (high <= low) return;
    if (warp >= kConsumers / 32) {
        fewer_registers<32>();
        if (warp == kConsumers / 32 && elected() && span.tiles)
            copy_operands(&q_map, &k_map, queries, control.barriers, first_row, span);
        return;
    }
    more_registers<112>();
    const int group = warp >> 2;
    const int row_in_group = row_of(lane);
    const int slot = group * kRowsPerGroup + row_in_group;
    const int row = first_row + slot;
    float threshold = control.thresholds[slot];
    const bool scored = threshold != infinity();
    const int own_low = scored ? max(a.ks[row], 0) : 0;
    const int own_high = scored ? min(a.ke[row], a.keys) : 0;
    const int capacity = kLists * a.capacity;
    Entry* const entries = a.entries + ((i64)row * a.parts + part) * capacity;

    float weights[kRowsPerGroup][kHeads / 4], d[64];
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i) load_weights(weights[i], a, first_row + group * kRowsPerGroup + i, lane);
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i] = 0.0f;
    const u64 query_matrix = swizzled_matrix(queries + group * (kQueryBytes / kGroups));
    if (span.tiles) barrier_wait(shared_address(&control.barriers.queries), 0);
    int stage = 0;
    u32 phase = 0;
    for (int tile = 0; tile < span.tiles; ++tile) {
        const int key = span.first_key + tile * kTile + (warp & 3) * 16 + key_of(lane);
        barrier_wait(shared_address(&control.barriers.full[stage]), phase);
        start_product(d, swizzled_matrix(stages + stage * kTileBytes), query_matrix);
        wait_products<0>(d);
        if (lane == 0) barrier_arrive(shared_address(&control.barriers.empty[stage]));
        if (++stage == STAGES) stage = 0, phase ^= 1;
        float logits[kLogits];
        exchange(logits, sum_heads(d, weights, constants()), lane, constants());
#pragma unroll
        for (int i = 0; i < kLogits; ++i) {
            const int own_key = key + 8 * i;
            const float value = clamped(logits[i] * __ldg(a.k_scale + min(own_key, a.keys - 1)));
            if (value >= threshold && own_key >= own_low && own_key < own_high) {
                const int at = atomicAdd(&control.counts[slot], 1);
                if (at < capacity) entries[at] = Entry{value, own_key};
            }
        }
        if ((tile + 1) % kLookEvery == 0) {
            named_sync(kGroupBarrier + group, 128);
            const int* counts = control.counts + group * kRowsPerGroup;
            int full_row[kRowsPerGroup];
#pragma unroll
            for (int i = 0; i < kRowsPerGroup; ++i) full_row[i] = counts[i];
            named_sync(kGroupBarrier + group, 128);  // nobody appends before everybody has read the counts
#pragma unroll 1
            for (int i = 0; i < kRowsPerGroup; ++i) {
                if (full_row[i] + kSlack <= capacity) continue;
                const int of = group * kRowsPerGroup + i;
                Entry* const buffer = a.entries + ((i64)(first_row + of) * a.parts + part) * capacity;
                const float raised =
                    cut_back(buffer, control.bins[group], &control.counts[of], group, full_row[i], a.topk);
                if (row_in_group == i) threshold = raised;
            }
        }
    }
    named_sync(kGroupBarrier + group, 128);
    if ((threadIdx.x & 127) < kRowsPerGroup * kLists) {
        const int of = group * kRowsPerGroup + (threadIdx.x & 127) / kLists, list = threadIdx.x % kLists;
        const i64 at = ((i64)(first_row + of) * a.parts + part) * kLists + list;
        if (control.thresholds[of] != infinity())
            a.new_counts[at] = min(max(control.counts[of] - list * a.capacity, 0), a.capacity);
    }
}
