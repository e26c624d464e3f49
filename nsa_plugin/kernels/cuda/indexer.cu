// Indexer logits that never reach memory: fp8 products of 64 heads, relu, weights and the sum over heads, for eight query
// rows a block, and the entries that reach a row's threshold. See nsa_plugin/kernels/cuda/indexer.py; SM90 alone.
//
// Four warpgroups have two rows each and read the same keys from shared memory, so that a key leaves the L2 cache once
// for eight rows. Of a product [64 keys x (2 rows x 64 heads)], a thread has 16 heads of two rows and two keys; four
// neighbours exchange their sums so that each ends up with one logit. A warpgroup multiplies while the others sum up:
// they take turns, with at most IN_FLIGHT of them at the tensor cores.
//
// Entries are appended to the row's buffer in global memory. Before it can overflow, the warpgroup cuts it back to the
// best topk and raises the threshold: exact for any data. Where a sampled threshold leaves fewer than topk, `redo` scores
// the block again without it. The order of the entries differs from run to run; their set is exact up to surplus.
//
// The sums are in DeepGEMM's order (fp8_mqa_logits of 0.1.4), so that both select the same of almost equal logits.

#include "instructions.cuh"

#ifndef IN_FLIGHT
#define IN_FLIGHT 2  // warpgroups at the tensor cores at a time; 0: as they come
#endif
#ifndef RELU
#define RELU 1       // 0: maximum with 0; 1: a saturated product; 2: both in turn
#endif
#ifndef SAMPLE
#define SAMPLE 0     // 1: store the logits of a sample of the keys instead
#endif
#ifndef STAGES
#define STAGES 12    // tiles of keys in shared memory
#endif

namespace {

constexpr int kHeads = 64, kDim = 128;
constexpr int kGroups = 4, kRowsPerGroup = 2, kRows = kGroups * kRowsPerGroup;
constexpr int kTile = 64;  // keys of a product
constexpr int kConsumers = kGroups * 128;
constexpr int kQueryBytes = kRows * kHeads * kDim, kQueryBox = kQueryBytes / 2;
constexpr int kTileBytes = kTile * kDim;
constexpr int kLookEvery = 16;  // tiles between two looks at a buffer's room
constexpr int kSlack = kLookEvery * kTile;
constexpr float kMostFinite = 3.402823466e38f;
// |dot| <= 448 * 448 * 128 < 2^25: scaled by 2^-25, clamping to [0, 1] is relu. The weights take the factor back.
constexpr float kShrink = 1.0f / 33554432.0f, kGrow = 33554432.0f;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kOrderBarrier = 1, kGroupBarrier = 5;

// With 3, a warpgroup could announce two turns before the next one has taken the first.
static_assert(IN_FLIGHT >= 0 && IN_FLIGHT <= 2, "IN_FLIGHT is 0, 1 or 2");

DEVICE float infinity() { return bits_to_float(0x7f800000u); }

struct alignas(64) TensorMap { u64 opaque[16]; };

struct __align__(8) Entry {
    float value;
    int key;
};

extern __shared__ __align__(1024) u8 memory[];

struct Control {
    u64 full[STAGES], empty[STAGES], queries;
    int counts[kRows];
    float thresholds[kRows];
    float2 zero_and_shrink;
    int bins[kGroups][256];
};
__shared__ Control control;

DEVICE bool by_clamping(int j) { return RELU == 1 || (RELU == 2 && (j & 1)); }

DEVICE float relu(float x, int j, const float2& zero_and_shrink) {
    if (!by_clamping(j)) return fmaxf(x, zero_and_shrink.x);
    float y;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(zero_and_shrink.y));
    return y;
}

DEVICE void tensor_copy(u32 destination, const TensorMap* map, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(destination), "l"(map), "r"(0), "r"(row), "r"(barrier) : "memory");
}

DEVICE void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

DEVICE void multiply(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

// As in topk.cu: NaN and -inf count as the least finite value, both zeros as one.
DEVICE float clamped(float value) { return fminf(fmaxf(value, -kMostFinite), kMostFinite) + 0.0f; }

DEVICE u32 to_key(float value) {
    const u32 bits = __float_as_uint(value);
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

DEVICE float to_value(u32 key) { return bits_to_float((key & 0x80000000u) ? (key ^ 0x80000000u) : ~key); }

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

struct Arguments {
    const float* k_scale;       // [keys]
    const float* weights;       // [rows, 64]
    const int *ks, *ke;         // [rows]: ranges of the unsampled keys
    const float* thresholds;    // [rows]
    Entry* entries;             // [rows, parts, capacity]
    const int* counts;          // [rows, parts], of the pass before; null: this is the first
    int* new_counts;            // [rows, parts]
    float* sampled;             // [rows, keys]: where SAMPLE stores logits
    int rows, keys, stride, offset, topk, capacity, parts;
    int all_keys;               // of which `keys` are every stride-th from offset on
};

DEVICE int first_at(const Arguments& a, int key) { return max(key - a.offset + a.stride - 1, 0) / a.stride; }

}  // namespace

// Grid (ceil(rows / 8), parts, 1), block (640, 1, 1); dynamic shared memory: 65536 + 8192 * STAGES bytes.
extern "C" __global__ void __launch_bounds__(kConsumers + 128, 1) indexer_entries(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ Arguments a) {
    const int first_row = blockIdx.x * kRows, part = blockIdx.y;
    const int warp = __shfl_sync(kAllLanes, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

    // The keys that the block's rows see, and from which value on each row takes them.
    if (threadIdx.x < kRows) {
        const int row = first_row + (int)threadIdx.x;
        float threshold = infinity();
        if (row < a.rows && !SAMPLE) {
            threshold = a.thresholds[row];
            const int length = min(a.ke[row], a.all_keys) - max(a.ks[row], 0);
            if (a.counts) {
                int total = 0;
                for (int i = 0; i < a.parts; ++i) total += a.counts[(i64)row * a.parts + i];
                threshold = length > a.topk && total < a.topk ? -kMostFinite : infinity();
            }
            if (length <= a.topk) threshold = infinity();
        }
        control.thresholds[threadIdx.x] = threshold;
        control.counts[threadIdx.x] = 0;
    }
    if (threadIdx.x == kConsumers) {
        control.zero_and_shrink = make_float2(0.0f, kShrink);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&control.full[i]), 1);
            barrier_init(shared_address(&control.empty[i]), kConsumers / 32);
        }
        barrier_init(shared_address(&control.queries), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int low = a.keys, high = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if (first_row + i >= a.rows || (!SAMPLE && control.thresholds[i] == infinity())) continue;
        low = min(low, min(first_at(a, a.ks[first_row + i]), a.keys));
        high = max(high, min(first_at(a, min(a.ke[first_row + i], a.all_keys)), a.keys));
    }
    const int all_tiles = high > low ? (high - low + kTile - 1) / kTile : 0;
    const int first_tile = (int)((i64)all_tiles * part / a.parts);
    const int tiles = (int)((i64)all_tiles * (part + 1) / a.parts) - first_tile;
    const int first_key = low + first_tile * kTile;

    const u32 queries = shared_address(memory), stages = queries + kQueryBytes;
    if (warp >= kConsumers / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (warp == kConsumers / 32 && elected() && tiles) {
            const u32 arrived = shared_address(&control.queries);
            barrier_expect(arrived, kQueryBytes);
            tensor_copy(queries, &q_map, first_row * kHeads, arrived);
            tensor_copy(queries + kQueryBox, &q_map, first_row * kHeads + kQueryBox / kDim, arrived);
            int stage = 0;
            u32 phase = 0;
            for (int tile = 0; tile < tiles; ++tile) {
                barrier_wait(shared_address(&control.empty[stage]), phase ^ 1);
                const u32 full = shared_address(&control.full[stage]);
                barrier_expect(full, kTileBytes);
                tensor_copy(stages + stage * kTileBytes, &k_map, first_key + tile * kTile, full);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    const int group = warp >> 2;
    // After the exchange, a lane has the logit of this row of its warpgroup and of this key of a product.
    const int row_in_group = lane & 1;
    const int key_in_tile = (warp & 3) * 16 + (lane >> 2);
    const int slot = group * kRowsPerGroup + row_in_group;
    const int row = first_row + slot;
    const int own_low = row < a.rows ? max(a.ks[row], 0) : 0;
    const int own_high = row < a.rows ? min(a.ke[row], a.all_keys) : 0;
    Entry* const entries = a.entries + ((i64)row * a.parts + part) * a.capacity;
    float threshold = control.thresholds[slot];

    float weights[kRowsPerGroup][kHeads / 4];
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i) {
        const int of = min(first_row + group * kRowsPerGroup + i, a.rows - 1);
#pragma unroll
        for (int j = 0; j < kHeads / 8; ++j) {
            const float2 pair =
                *reinterpret_cast<const float2*>(a.weights + (i64)of * kHeads + 8 * j + 2 * (lane & 3));
            weights[i][2 * j] = by_clamping(j) ? pair.x * kGrow : pair.x;
            weights[i][2 * j + 1] = by_clamping(j) ? pair.y * kGrow : pair.y;
        }
    }
    float d[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i] = 0.0f;

    const u64 query_matrix = swizzled_matrix(queries + group * (kQueryBytes / kGroups));
    // The warpgroup that this one waits for has its turn IN_FLIGHT places earlier.
    const int turn = kOrderBarrier + group, next_turn = kOrderBarrier + ((group + IN_FLIGHT) & 3);
    if (IN_FLIGHT && tiles && group + IN_FLIGHT >= kGroups) named_arrive(next_turn, 256);
    if (tiles) barrier_wait(shared_address(&control.queries), 0);
    int stage = 0;
    u32 phase = 0;
    if (tiles) barrier_wait(shared_address(&control.full[0]), 0);
    for (int tile = 0; tile < tiles; ++tile) {
        const u32 released = shared_address(&control.empty[stage]);
        const u64 key_matrix = swizzled_matrix(stages + stage * kTileBytes);
        const int key = first_key + tile * kTile + key_in_tile;
        const float scale_0 = __ldg(a.k_scale + min(key, a.keys - 1));
        const float scale_1 = __ldg(a.k_scale + min(key + 8, a.keys - 1));
        if (IN_FLIGHT) named_sync(turn, 256);
        fence_sums(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < kDim / 32; ++i) multiply(d, key_matrix + 2 * i, query_matrix + 2 * i, i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        fence_sums(d);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        fence_sums(d);
        // Nobody waits for the last turns.
        if (IN_FLIGHT && (tile < tiles - 1 || group + IN_FLIGHT < kGroups)) named_arrive(next_turn, 256);
        if (lane == 0) barrier_arrive(released);
        if (++stage == STAGES) stage = 0, phase ^= 1;
        if (tile + 1 < tiles) barrier_wait(shared_address(&control.full[stage]), phase);
        // Two constants, read here so that the assembler cannot move the arrivals behind the sums.
        float2 constants;
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(constants.x), "=f"(constants.y)
                     : "r"(shared_address(&control.zero_and_shrink)) : "memory");

        float sum[kRowsPerGroup][2];
#pragma unroll
        for (int i = 0; i < kRowsPerGroup; ++i) {
            float part_sum[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) part_sum[c] = relu(d[32 * i + c], 0, constants) * weights[i][c & 1];
#pragma unroll
            for (int j = 1; j < kHeads / 8; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    part_sum[c] = fmaf(relu(d[32 * i + 4 * j + c], j, constants), weights[i][2 * j + (c & 1)], part_sum[c]);
            sum[i][0] = (part_sum[0] + part_sum[1]) * scale_0;
            sum[i][1] = (part_sum[2] + part_sum[3]) * scale_1;
        }
        const bool odd = lane & 1, upper = lane & 2;
        float pair[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
            pair[c] = (odd ? sum[1][c] : sum[0][c]) + __shfl_xor_sync(kAllLanes, odd ? sum[0][c] : sum[1][c], 1);
        const float logit = (upper ? pair[1] : pair[0]) + __shfl_xor_sync(kAllLanes, upper ? pair[0] : pair[1], 2);
        const int own_key = upper ? key + 8 : key;
        if (SAMPLE) {
            if (own_key < a.keys && row < a.rows) a.sampled[(i64)row * a.keys + own_key] = logit;
        } else {
            const float value = clamped(logit);
            if (value >= threshold && own_key >= own_low && own_key < own_high) {
                const int at = atomicAdd(&control.counts[slot], 1);
                if (at < a.capacity) entries[at] = Entry{value, own_key};
            }
        }
        if ((tile + 1) % kLookEvery == 0 && !SAMPLE) {
            named_sync(kGroupBarrier + group, 128);
            const int* counts = control.counts + group * kRowsPerGroup;
            const int full_row[2] = {counts[0], counts[1]};
            named_sync(kGroupBarrier + group, 128);  // nobody appends before everybody has read the counts
#pragma unroll 1
            for (int i = 0; i < kRowsPerGroup; ++i) {
                if (full_row[i] + kSlack <= a.capacity) continue;
                const int of = group * kRowsPerGroup + i;
                Entry* const buffer = a.entries + ((i64)(first_row + of) * a.parts + part) * a.capacity;
                const float raised =
                    cut_back(buffer, control.bins[group], &control.counts[of], group, full_row[i], a.topk);
                if (row_in_group == i) threshold = raised;
            }
        }
    }
    if (SAMPLE) return;
    named_sync(kGroupBarrier + group, 128);
    if ((threadIdx.x & 127) < kRowsPerGroup) {
        const int of = group * kRowsPerGroup + (threadIdx.x & 1), at = first_row + of;
        if (at < a.rows) {
            const i64 place = (i64)at * a.parts + part;
            const bool kept = a.counts && control.thresholds[of] == infinity();
            a.new_counts[place] = kept ? a.counts[place] : control.counts[of];
        }
    }
}
