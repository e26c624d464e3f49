// What the indexer's two kernels share: fp8 products of 64 keys and 128 queries of heads, and the entries of a row.
#pragma once

#include "sortable.cuh"

#ifndef HEADS
#define HEADS 64  // of a query: 32 or 64
#endif
#ifndef RELU
#define RELU 1  // 0: maximum with 0; 1: a saturated product; 2: both in turn
#endif
#ifndef STAGES
#define STAGES 12  // tiles of keys in shared memory
#endif

namespace {

constexpr int kHeads = HEADS, kDim = 128;
constexpr int kColumns = 128, kTile = 64;         // a product: heads of some rows, keys
constexpr int kProductRows = kColumns / kHeads;   // 2 or 4
constexpr int kLogits = kProductRows / 2;         // of a product that a lane ends up with: of one row, and of as many keys
constexpr int kRows = 4 * kProductRows;           // of a block
constexpr int kQueryBytes = kRows * kHeads * kDim, kQueryBox = kQueryBytes / 2;
constexpr int kTileBytes = kTile * kDim;
constexpr int kLists = 4;  // of a row and a part: one a warp of the warpgroup that scores it
// |dot| <= 448 * 448 * 128 < 2^25: scaled by 2^-25, clamping to [0, 1] is relu. The weights take the factor back.
constexpr float kShrink = 1.0f / 33554432.0f, kGrow = 33554432.0f;

struct alignas(64) TensorMap { u64 opaque[16]; };

struct __align__(8) Entry {
    float value;
    int key;
};

struct Arguments {
    const float* k_scale;       // [keys]
    const float* weights;       // [rows, heads]
    const int *ks, *ke;         // [rows]: ranges of the unsampled keys
    const float* thresholds;    // [rows]
    Entry* entries;             // [rows, parts, kLists, capacity]
    const int* counts;          // [rows, parts, kLists], of the pass before
    int* new_counts;            // [rows, parts, kLists]; a count beyond the capacity: the list is not whole
    float* sampled;             // [rows, keys]: where logits of a sample of the keys are stored
    int rows, keys, stride, offset, topk, capacity, parts;
    int all_keys;               // of which `keys` are every stride-th from offset on
};

DEVICE int first_at(const Arguments& a, int key) { return max(key - a.offset + a.stride - 1, 0) / a.stride; }

// The tiles of keys that a block scores: those between the lowest and the highest key of its rows, of one part.
struct Span {
    int first_key, tiles;
};

DEVICE Span span_of(const Arguments& a, int low, int high, int part) {
    const int all_tiles = high > low ? (high - low + kTile - 1) / kTile : 0;
    const int first_tile = (int)((i64)all_tiles * part / a.parts);
    return Span{low + first_tile * kTile, (int)((i64)all_tiles * (part + 1) / a.parts) - first_tile};
}

DEVICE constexpr bool by_clamping(int j) { return RELU == 1 || (RELU == 2 && (j & 1)); }

DEVICE void tensor_copy(u32 destination, const TensorMap* map, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(destination), "l"(map), "r"(0), "r"(row), "r"(barrier) : "memory");
}

// In shared memory: a stage's keys have arrived, and nobody reads them any more; the queries have arrived.
struct Barriers {
    u64 full[STAGES], empty[STAGES], queries;
};

// By one thread, for this many warps that read the keys.
DEVICE void init_barriers(Barriers& barriers, int readers) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&barriers.full[i]), 1);
        barrier_init(shared_address(&barriers.empty[i]), readers);
    }
    barrier_init(shared_address(&barriers.queries), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The producer: the block's queries, then the tiles of keys, by one thread.
DEVICE void copy_operands(const TensorMap* q_map, const TensorMap* k_map, u32 memory, Barriers& barriers, int first_row,
                          const Span& span) {
    const u32 arrived = shared_address(&barriers.queries), stages = memory + kQueryBytes;
    barrier_expect(arrived, kQueryBytes);
    tensor_copy(memory, q_map, first_row * kHeads, arrived);
    tensor_copy(memory + kQueryBox, q_map, first_row * kHeads + kQueryBox / kDim, arrived);
    int stage = 0;
    u32 phase = 0;
    for (int tile = 0; tile < span.tiles; ++tile) {
        barrier_wait(shared_address(&barriers.empty[stage]), phase ^ 1);
        barrier_expect(shared_address(&barriers.full[stage]), kTileBytes);
        tensor_copy(stages + stage * kTileBytes, k_map, span.first_key + tile * kTile,
                    shared_address(&barriers.full[stage]));
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// Weights of one row for the heads whose products a lane has: 8 j + 2 (lane % 4) and the next.
DEVICE void load_weights(float (&weights)[kHeads / 4], const Arguments& a, int row, int lane) {
    const float* own = a.weights + (i64)min(row, a.rows - 1) * kHeads + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(own + 8 * j);
        weights[2 * j] = by_clamping(j) ? pair.x * kGrow : pair.x;
        weights[2 * j + 1] = by_clamping(j) ? pair.y * kGrow : pair.y;
    }
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

// Start the product of a tile's keys and two rows' queries; it is done when its group is waited for.
DEVICE void start_product(float (&d)[64], u64 key_matrix, u64 query_matrix) {
    fence_sums(d);
    products_fence();
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) multiply(d, key_matrix + 2 * i, query_matrix + 2 * i, i);
    products_commit();
}

template <int PENDING>
DEVICE void wait_products(float (&d)[64]) {
    products_wait<PENDING>();
    fence_sums(d);
}

// Constants that `read_constants` reads from shared memory. The assembler does not know them, and so cannot move what
// needs them before the read, in between the products that are started before it.
struct alignas(16) Constants {
    float zero, shrink;
    int one, two;
};
DEVICE Constants constants() { return Constants{0.0f, kShrink, 1, 2}; }

DEVICE Constants read_constants(u32 address) {
    Constants x;
    asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.zero), "=f"(x.shrink), "=r"(x.one), "=r"(x.two) : "r"(address) : "memory");
    return x;
}

DEVICE float relu(float x, int j, const Constants& known) {
    if (!by_clamping(j)) return fmaxf(x, known.zero);
    float y;
    asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(known.shrink));
    return y;
}

// Of a product [64 keys x (rows x heads)], a thread has a quarter of the heads of all rows and two keys, lane >> 2 of the
// warp's and that plus 8: their sums, by row and key. In DeepGEMM's order (fp8_mqa_logits of 0.1.4), so that both select
// the same of almost equal logits.
struct Sums {
    float of[kProductRows][2];
};

DEVICE Sums sum_heads(const float (&d)[64], const float (&weights)[kProductRows][kHeads / 4], const Constants& known) {
    constexpr int kGroupsOf8 = kHeads / 8;
    Sums sums;
#pragma unroll
    for (int i = 0; i < kProductRows; ++i) {
        float part_sum[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) part_sum[c] = relu(d[4 * kGroupsOf8 * i + c], 0, known) * weights[i][c & 1];
#pragma unroll
        for (int j = 1; j < kGroupsOf8; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                part_sum[c] = fmaf(relu(d[4 * kGroupsOf8 * i + 4 * j + c], j, known), weights[i][2 * j + (c & 1)], part_sum[c]);
        sums.of[i][0] = part_sum[0] + part_sum[1];
        sums.of[i][1] = part_sum[2] + part_sum[3];
    }
    return sums;
}

// Four neighbours exchange their sums so that each ends up with the logits of one row: with two rows of row lane & 1 and
// of one key, the second one where lane & 2; with four rows of row lane & 3 and of both keys.
DEVICE void exchange(float (&logits)[kLogits], const Sums& sums, int lane, const Constants& known) {
    const bool odd = lane & 1, upper = lane & 2;
    float pair[kLogits][2];
#pragma unroll
    for (int i = 0; i < kLogits; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            pair[i][c] = (odd ? sums.of[2 * i + 1][c] : sums.of[2 * i][c]) +
                         __shfl_xor_sync(kAllLanes, odd ? sums.of[2 * i][c] : sums.of[2 * i + 1][c], known.one);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
        const float low = pair[0][i], high = kLogits == 1 ? pair[0][1] : pair[kLogits - 1][i];
        logits[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, known.two);
    }
}

// The lane's row of a product, and its first key of the warp's; the next one is 8 further.
DEVICE int row_of(int lane) { return lane & (kProductRows - 1); }
DEVICE int key_of(int lane) { return (lane >> 2) + (kLogits == 1 && (lane & 2) ? 8 : 0); }

// 0, which the assembler cannot tell before it has the sums.
DEVICE int settled(const Sums& sums, const Constants& known) {
    int any = 0;
#pragma unroll
    for (int i = 0; i < kProductRows; ++i) any |= __float_as_int(sums.of[i][0]) | __float_as_int(sums.of[i][1]);
    return any & __float_as_int(known.zero);
}

}  // namespace
