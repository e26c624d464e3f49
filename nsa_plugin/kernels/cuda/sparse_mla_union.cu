// The union of the entries of neighbouring query rows, for sparse_mla.cu with GROUP > 1.
//
// A block takes the GROUP rows of a group. A hash table in shared memory learns which rows select a slot: all rows but
// the last put theirs into it, then the last one looks its own up. Each entry belongs to the first row that has it, and
// every row's are written in their order. So the order of a union depends on the selections alone, not on which thread
// came first. Where a slot of the table is twice in a row, nothing is united: all entries of the group are written, each
// for its own row, as each counts on its own. What the last row alone has twice is written twice anyway.

#include "gate.cuh"
#include "instructions.cuh"

#ifndef GROUP
#define GROUP 2
#endif
#ifndef STEPS
#define STEPS 8  // entries of a row that a thread takes, which stay in registers
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr u32 SLOT_BITS = 28;
constexpr u32 SLOT_MASK = (1u << SLOT_BITS) - 1;
constexpr u32 EMPTY = ~0u;  // no entry: slots are below SLOT_MASK
constexpr u32 ALONE = 1u << 31;  // beside a slot that is not in the table, where others have their place

// `entries` [groups, GROUP * topk]: the first `counts` of a row have a slot and, above SLOT_BITS, the rows that select
// it. `table_bits`: log2 of the words of shared memory, at least twice GROUP * topk. topk is at most STEPS * THREADS.
extern "C" __global__ void __launch_bounds__(THREADS) unite(
    const int* __restrict__ indices, i64 indices_stride, const int* __restrict__ lengths, int lengths_divisor,
    int rows, int topk, int num_slots, int table_bits, int* __restrict__ entries, int* __restrict__ counts GATE_PARAMETER) {
    END_AT_GATE
    extern __shared__ __align__(16) u32 table[];
    __shared__ int found[GROUP][WARPS];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, first_row = blockIdx.x * GROUP;
    int first = warp * STEPS * 32 + lane;  // a warp's entries follow each other
    u32 last = (1u << table_bits) - 1;
    auto start_of = [&](u32 slot) -> u32 { return slot * 2654435761u >> (32 - table_bits); };

    // Slots, then places in the table, then entries; EMPTY where nothing counts.
    u32 known[GROUP][STEPS];
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
        int row = first_row + r, length = row < rows ? topk : 0;
        if (lengths && row < rows) length = min(length, lengths[row / lengths_divisor]);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            int at = first + k * 32;
            u32 slot = at < length ? (u32)__ldg(indices + row * indices_stride + at) : EMPTY;
            known[r][k] = slot < (u32)num_slots ? slot : EMPTY;
        }
    }
    for (u32 at = 4 * tid; at <= last; at += 4 * THREADS) *(uint4*)(table + at) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    __syncthreads();

    bool twice = false;
#pragma unroll
    for (int r = 0; r < GROUP - 1; ++r)
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            u32 slot = known[r][k], own = 1u << (SLOT_BITS + r);
            if (slot == EMPTY) continue;
            u32 place = start_of(slot);
            for (;; place = (place + 1) & last) {
                u32 there = atomicCAS(&table[place], EMPTY, slot | own);
                if (there == EMPTY) break;
                if ((there & SLOT_MASK) != slot) continue;
                twice |= (atomicOr(&table[place], own) & own) != 0;
                break;
            }
            known[r][k] = place;
        }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 slot = known[GROUP - 1][k], own = 1u << (SLOT_BITS + GROUP - 1);
        if (slot == EMPTY) continue;
        u32 place = start_of(slot), there;
        while ((there = table[place] & SLOT_MASK) != slot && there != SLOT_MASK) place = (place + 1) & last;
        if (there == slot) twice |= (atomicOr(&table[place], own) & own) != 0;
        known[GROUP - 1][k] = there == slot ? place : slot | ALONE;
    }
    twice = __syncthreads_or(twice);

#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
        u32 own = 1u << (SLOT_BITS + r), earlier = own - (1u << SLOT_BITS);
        int count = 0;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            u32 entry = known[r][k];
            if (entry != EMPTY) {
                entry = entry & ALONE ? (entry & SLOT_MASK) | own : table[entry];
                if (twice) entry = (entry & SLOT_MASK) | own;
                else if (entry & earlier) entry = EMPTY;
            }
            known[r][k] = entry;
            count += __popc(__ballot_sync(~0u, entry != EMPTY));
        }
        if (lane == 0) found[r][warp] = count;
    }
    __syncthreads();

    int* out = entries + (i64)blockIdx.x * GROUP * topk;
    int written = 0;
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
        int at = written;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            int count = found[r][w];
            at += w < warp ? count : 0;
            written += count;
        }
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            u32 those = __ballot_sync(~0u, known[r][k] != EMPTY);
            if (known[r][k] != EMPTY) out[at + __popc(those & ((1u << lane) - 1))] = (int)known[r][k];
            at += __popc(those);
        }
    }
    if (tid == 0) counts[blockIdx.x] = written;
}
