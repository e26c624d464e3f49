// How much neighbouring query rows share, in a sample of a batch's pairs: whether unions pay is then known on the GPU,
// where the kernels that it decides between read it (gate.cuh).
//
// A block takes a pair. The slots of the first row set bits of a table in shared memory, and the second row's look
// theirs up. Slots are hashed: of entries that are not shared, about topk of 2^BITS count as shared, less than 2 in 100.

#include "gate.cuh"
#include "instructions.cuh"

constexpr int THREADS = 256;
constexpr int BITS = 17, WORDS = 1 << (BITS - 5);

// `found`, zero before: what is added is, for each entry of a second row, 100 - `least_shared` if its neighbour has it too,
// and -`least_shared` if not. So it is not negative if so many of 100 are shared.
extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const int* __restrict__ indices, i64 indices_stride, const int* __restrict__ lengths, int lengths_divisor,
    int rows, int topk, int num_slots, int least_shared, int* __restrict__ found) {
    __shared__ u32 table[WORDS];
    __shared__ int sum;
    int tid = threadIdx.x, first = 2 * (int)((i64)blockIdx.x * (rows / 2) / gridDim.x);
    for (int at = tid; at < WORDS; at += THREADS) table[at] = 0;
    if (tid == 0) sum = 0;
    __syncthreads();

    auto each = [&](int row, auto use) {
        int length = lengths ? min(topk, lengths[row / lengths_divisor]) : topk;
        for (int at = tid; at < length; at += THREADS) {
            u32 slot = (u32)__ldg(indices + row * indices_stride + at);
            if (slot < (u32)num_slots) use(slot * 2654435761u >> (32 - BITS));
        }
    };
    each(first, [&](u32 place) { atomicOr(&table[place / 32], 1u << place % 32); });
    __syncthreads();
    int shared = 0, all = 0;
    each(first + 1, [&](u32 place) { shared += table[place / 32] >> place % 32 & 1, ++all; });
    shared = __reduce_add_sync(~0u, shared), all = __reduce_add_sync(~0u, all);
    if (tid % 32 == 0) atomicAdd(&sum, 100 * shared - least_shared * all);
    __syncthreads();
    if (tid == 0) atomicAdd(found, sum);
}
