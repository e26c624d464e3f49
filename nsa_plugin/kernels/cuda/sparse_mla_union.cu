// The union of the entries of neighbouring query rows, for sparse_mla.cu with GROUP > 1.
//
// A block takes the GROUP rows of a group. A hash table in shared memory learns which rows select a slot; then every
// row's entries are written in their order, but for those that an earlier row of the group has. So the order of a union
// depends on the selections alone, not on which thread came first. Where a row has a slot twice, nothing is united:
// all entries of the group are written, each for its own row, as each counts on its own.

#include "instructions.cuh"

#ifndef GROUP
#define GROUP 2
#endif

constexpr int THREADS = 512;
constexpr u32 SLOT_BITS = 28;
constexpr u32 SLOT_MASK = (1u << SLOT_BITS) - 1;
constexpr u32 EMPTY = ~0u;  // no entry: slots are below SLOT_MASK

// `entries` [groups, GROUP * topk]: the first `counts` of a row have a slot and, above SLOT_BITS, the rows that select
// it. `table_bits`: log2 of the words of shared memory, at least twice GROUP * topk.
extern "C" __global__ void __launch_bounds__(THREADS) unite(
    const int* __restrict__ indices, i64 indices_stride, const int* __restrict__ lengths, int lengths_divisor,
    int rows, int topk, int num_slots, int table_bits, int* __restrict__ entries, int* __restrict__ counts) {
    extern __shared__ u32 table[];
    __shared__ int found[2][THREADS / 32];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, first_row = blockIdx.x * GROUP;
    u32 last = (1u << table_bits) - 1;
    auto start_of = [&](int slot) -> u32 { return (u32)slot * 2654435761u >> (32 - table_bits); };
    // -1: does not count.
    auto slot_of = [&](int r, int at) -> int {
        int row = first_row + r;
        if (row >= rows || at >= topk) return -1;
        if (lengths && at >= lengths[row / lengths_divisor]) return -1;
        int slot = __ldg(indices + row * indices_stride + at);
        return (u32)slot < (u32)num_slots ? slot : -1;
    };

    for (u32 at = tid; at <= last; at += THREADS) table[at] = EMPTY;
    __syncthreads();
    bool twice = false;
    for (int r = 0; r < GROUP; ++r)
        for (int at = tid; at < topk; at += THREADS) {
            int slot = slot_of(r, at);
            if (slot < 0) continue;
            u32 own = 1u << (SLOT_BITS + r);
            for (u32 place = start_of(slot);; place = (place + 1) & last) {
                u32 there = table[place];
                if (there == EMPTY) there = atomicCAS(&table[place], EMPTY, (u32)slot | own);
                if (there == EMPTY) break;
                if ((there & SLOT_MASK) != (u32)slot) continue;
                twice |= (atomicOr(&table[place], own) & own) != 0;
                break;
            }
        }
    twice = __syncthreads_or(twice);

    int written = 0, step = 0;
    int* out = entries + (i64)blockIdx.x * GROUP * topk;
    for (int r = 0; r < GROUP; ++r)
        for (int from = 0; from < topk; from += THREADS, ++step) {
            int slot = slot_of(r, from + tid);
            u32 entry = (u32)slot | 1u << (SLOT_BITS + r);
            bool is_first = slot >= 0;
            if (is_first && !twice) {
                u32 place = start_of(slot);
                while (((entry = table[place]) & SLOT_MASK) != (u32)slot) place = (place + 1) & last;
                is_first = (entry >> SLOT_BITS & ((1u << r) - 1)) == 0;
            }
            u32 those = __ballot_sync(~0u, is_first);
            if (lane == 0) found[step & 1][warp] = __popc(those);
            __syncthreads();  // the other half is read before the next one of these
            int before = 0, all = 0;
#pragma unroll
            for (int w = 0; w < THREADS / 32; ++w) {
                int count = found[step & 1][w];
                before += w < warp ? count : 0;
                all += count;
            }
            if (is_first) out[written + before + __popc(those & ((1u << lane) - 1))] = (int)entry;
            written += all;
        }
    if (tid == 0) counts[blockIdx.x] = written;
}
