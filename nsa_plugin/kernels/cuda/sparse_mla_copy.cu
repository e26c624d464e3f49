// A bfloat16 copy of the V3.2 records that a batch's query rows select, for sparse_mla_rows.cu: four kernels, in this order.
//
//   mark_pages       which pages are selected from
//   number_pages     the marked pages, in their order; and whether the copy has as many
//   copy_pages       their records, as rows of 576 values
//   remap_indices    to slots of the copy
//
// With too few pages the last two end at once, and what attends reads the records themselves (gate.cuh).

#include "scope.cuh"
#include "sparse_mla_code_bits.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROW = 1152;         // bytes
constexpr float UNIT = 0x1p120f;  // `code_bits` are 2^-120 of the values

// Calls `use` with the place of each entry of the block's query rows that lies within its row's length, and with its slot:
// -1 for one that does not count.
template <typename Use>
DEVICE void each_entry(const Scope& scope, int rows, Use use) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        int end = scope_length(scope, row);
        for (int at = threadIdx.x; at < end; at += THREADS) {
            int slot = __ldg(scope.indices + row * scope.indices_stride + at);
            use((i64)row * scope.topk + at, (u32)slot < (u32)scope.num_slots ? slot : -1);
        }
    }
}

// `marks`, a bit for each page, zero before; `words` of shared memory.
extern "C" __global__ void __launch_bounds__(THREADS) mark_pages(Scope scope, int rows, int words, u32* __restrict__ marks) {
    extern __shared__ __align__(16) u32 own[];
    for (int at = threadIdx.x; at < words; at += THREADS) own[at] = 0;
    __syncthreads();
    each_entry(scope, rows, [&](i64, int slot) {
        if (slot < 0) return;
        int page = page_of(scope, slot);
        u32 bit = 1u << page % 32;
        if (!(own[page / 32] & bit)) atomicOr(&own[page / 32], bit);
    });
    __syncthreads();
    for (int at = threadIdx.x; at < words; at += THREADS)
        if (own[at] & ~marks[at]) atomicOr(&marks[at], own[at]);
}

// `numbers` of the marked pages; `pages` by number, of which the copy has `most`; and how many of these are free, negative
// if they are too few. One block.
extern "C" __global__ void __launch_bounds__(THREADS) number_pages(
    const u32* __restrict__ marks, int words, int most, int* __restrict__ numbers, int* __restrict__ pages,
    int* __restrict__ free_pages) {
    __shared__ int counts[THREADS];
    int tid = threadIdx.x, each = (words + THREADS - 1) / THREADS, begin = min(tid * each, words);
    int end = min(begin + each, words), count = 0;
    for (int at = begin; at < end; ++at) count += __popc(marks[at]);
    counts[tid] = count;
    __syncthreads();
    int next = 0;
    for (int before = 0; before < tid; ++before) next += counts[before];
    if (tid == THREADS - 1) *free_pages = most - next - count;
    for (int at = begin; at < end; ++at)
        for (u32 bits = marks[at]; bits; bits &= bits - 1) {
            int page = at * 32 + __ffs(bits) - 1;
            if (next < most) pages[next] = page;
            numbers[page] = next++;
        }
}

// Two values of the lower and the upper halves of a register, as bfloat16 of what they are times the scale.
DEVICE u32 scaled(u32 two, float scale) {
    return pack_bf16(bits_to_float(two << 16) * UNIT * scale, bits_to_float(two & 0xffff0000u) * UNIT * scale);
}

// `rows`: the records of the first `most - free_pages` of `pages`. A warp takes a record.
extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(
    Scope scope, const int* __restrict__ pages, const int* __restrict__ free_pages, int most, u8* __restrict__ rows) {
    int left = *free_pages, lane = threadIdx.x % 32;
    if (left < 0) return;
    int records = (most - left) * scope.page_size;
    for (int at = blockIdx.x * WARPS + threadIdx.x / 32; at < records; at += gridDim.x * WARPS) {
        int number = page_of(scope, at);
        const u8* record = scope.data + pages[number] * scope.page_stride + (i64)(at - number * scope.page_size) * RECORD;
        u8* row = rows + (i64)at * ROW;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint2 codes = *(const uint2*)(record + half * 256 + lane * 8);
            float scale = *(const float*)(record + RECORD_SCALES + (half * 2 + lane / 16) * 4);
            u32 even[2], odd[2];
            code_bits(codes.x, even[0], odd[0]);
            code_bits(codes.y, even[1], odd[1]);
            u32 values[4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                values[2 * k] = scaled(__byte_perm(even[k], odd[k], 0x5410), scale);
                values[2 * k + 1] = scaled(__byte_perm(even[k], odd[k], 0x7632), scale);
            }
            // One NaN in a row makes all of the query token's output NaN.
            if ((nan_codes(codes.x) | nan_codes(codes.y)) & 0x80808080u) values[0] = 0x7fff;
            *(uint4*)(row + half * 512 + lane * 16) = make_uint4(values[0], values[1], values[2], values[3]);
        }
        if (lane < 8) *(uint4*)(row + ROW_ROPE + lane * 16) = *(const uint4*)(record + RECORD_ROPE + lane * 16);
    }
}

// `remapped` [rows, topk]: slots of the copy, which has pages as the cache has; -1 for entries that do not count. Those
// behind a row's length stay unwritten.
extern "C" __global__ void __launch_bounds__(THREADS) remap_indices(
    Scope scope, int rows, const int* __restrict__ numbers, const int* __restrict__ free_pages, int* __restrict__ remapped) {
    if (*free_pages < 0) return;
    each_entry(scope, rows, [&](i64 at, int slot) {
        if (slot < 0) return (void)(remapped[at] = -1);
        int page = page_of(scope, slot);
        remapped[at] = numbers[page] * scope.page_size + slot - page * scope.page_size;
    });
}
