// sparse_mla.cu with 64 heads where there are no warpgroup products, over V3.2's records: a step begins with making each of
// its codes a bfloat16, once for all warps, in rows as sparse_mla_rows.cu has them. Without that a warp would convert what
// it multiplies, so every code three times.
//
// Lane l of warp w makes values 64 w to 64 w + 63 of key l, which that warp alone reads for O; before S all warps meet. What
// has a scale is multiplied by it later: S as float32, and for O the weights P as bfloat16. FlashMLA rounds the values to
// bfloat16 instead. Records of the next step are copied during this one, as theirs are free from then on.
//
// Each half of the warps has half of the heads, in S and P. The halves meet apart between these, and copy at different times,
// so that one multiplies while the other copies or exponentiates.
//
// Records lie in lines of 128 bytes as they do in memory, which copies then write at once. In its line, piece j of 16 bytes of
// record i lies at (i + j) % 8, so that lanes read the same piece of neighbouring records from all banks.
#pragma once

#include "sparse_mla_rows_steps.cuh"

static_assert(!HOPPER && WARPS == 8 && TEAMS == 1 && !PRODUCERS && GROUP == 1 && LAYOUT == 0 && !HAS_EXTRA && KEYS == 32 &&
              STAGES == 1 && COLUMNS == 1 && SWAPS && HEADS == 2 * KEYS, "what this file is for");

// The number of the named barrier of the first half of the warps; that of the second follows.
constexpr int HALVES = 1 + SUMS * KEY_PARTS * HEAD_PARTS;
static_assert(HALVES + 1 < 16, "named barriers are few");

// A warp's values of all keys of a step, and what belongs to a key.
DEVICE void convert(Shared& shared, int warp, int lane) {
    u32 begins = shared.begins[lane];
    auto piece = [&](u32 j) { return shared.raw + lane * RAW + (begins + j) / 8 * 128 + (lane + j) % 8 * 16; };
    u8* row = shared.records[0] + lane * ROW;
    uint4 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = *(const uint4*)piece(warp * 4 + i);
    *(uint4*)(row + ROW_ROPE + 16 * warp) = *(const uint4*)piece(RECORD_ROPE / 16 + warp);
    float scale = *(const float*)(piece(RECORD_SCALES / 16) + warp / 2 * 4);
    if (warp % 2 == 0) shared.scales[lane][warp / 2] = scale;
    shared.weights[warp][place_of(lane)] = (u16)pack_bf16(scale * WEIGHTS_UNIT, 0.f);
    if (warp == 0) shared.valid[0][place_of(lane)] = scale != NOT_COUNTED;
    u32 nans = 0;
    row += warp * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4 half[2];
        code_bits(codes[i].x, half[0].x, half[0].y);
        code_bits(codes[i].y, half[0].z, half[0].w);
        code_bits(codes[i].z, half[1].x, half[1].y);
        code_bits(codes[i].w, half[1].z, half[1].w);
        *(uint4*)(row + 32 * i) = half[0];
        *(uint4*)(row + 32 * i + 16) = half[1];
        nans |= nan_codes(codes[i].x) | nan_codes(codes[i].y) | nan_codes(codes[i].z) | nan_codes(codes[i].w);
    }
    // One NaN in a row makes all of the query token's output NaN.
    if (nans & 0x80808080u) *(u16*)row = 0x7fff;
}

// As in sparse_mla.cu, but for the second cache, which this form does not read.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attend(
    const u16* __restrict__ q, i64 q_row_stride, i64 q_head_stride, int heads,
    Scope scope, Scope, const u8* __restrict__ zeros, const float* __restrict__ sink, float scale_log2,
    u8* __restrict__ out, i64 out_row_stride, i64 out_head_stride, float* __restrict__ lse,
    float* __restrict__ max_logits, Partial* __restrict__ partials, Share* __restrict__ statistics GATE_PARAMETER) {
    END_AT_GATE
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *(Shared*)memory;
    // In ways that the compiler cannot repeat: see sparse_mla.cu.
    int warp = __reduce_max_sync(~0u, threadIdx.x >> 5), lane = __shfl_sync(~0u, threadIdx.x, threadIdx.x) & 31;
    // What follows from them is made anew where it is needed: registers do not suffice to keep it.
    auto forget = [&] { asm volatile("" : "+r"(lane), "+r"(warp)); };
    auto is_second = [&] { return warp >= WARPS / 2; };  // half of the warps, and of the heads
    Team& own = shared.teams[0];
    int row = blockIdx.x;
    u32 first_head = HEADS * blockIdx.y;  // unsigned: with a signed one the loop below is slower
    RowShare entries(scope, row);
    int begin = entries.begin, end = entries.end;

    init_barriers(shared, 32 * COPIERS);
    if (threadIdx.x == 0) barrier_init(shared_address(&shared.query), THREADS);
    // The rows have room for half of the heads at a time: 16 of those of either part of the warps.
    int own_heads = min(HEADS, heads - (int)first_head);
    auto stage = [&](int half) {
        const u16* own_query = q + row * q_row_stride + first_head * q_head_stride;
        stage_query<KEYS>(shared.records[0], own_query, q_head_stride, own_heads, warp, lane,
                          [&](int r) { return r / 16 * 32 + half * 16 + r % 16; });
    };
    auto slot_of = [&](int block, int i) -> int { return entries.slot_of(block, i); };
    auto counts = [&](int slot) -> bool { return (u32)slot < (u32)scope.num_slots; };
    auto copied_record = [&] { return known_record(warp, lane, 0); };
    // Lines `from` to `to` - 1 of a warp's four records. Others see `begins` once the block has met, not with the copies.
    constexpr int LINES = RAW / 128;
    auto copy = [&](int slot, int from, int to) {
        int i = copied_record();
        const u8* record = !counts(slot) ? shared.nothing[i]
                           : FLAT        ? scope.data + (i64)slot * RECORD
                                         : find_record(scope, slot, RECORD);
        int begins = (u32)(u64)record % 128 / 16, offset = (lane % 8 - begins) * 16;
        if (from == 0 && lane % 8 == 0) shared.begins[i] = begins;
        u32 at = shared_address(shared.raw + i * RAW) + (lane - begins + i & 7) * 16;
        record += offset;
#pragma unroll
        for (int line = 0; line < LINES; ++line)
            if (line >= from && line < to && (line > 0 || offset >= 0) &&
                (line < LINES - 1 || offset < RECORD - 128 * (LINES - 1)))
                copy_16_bytes(at + line * 128, record + line * 128);
        if (to == LINES) arrive_with_copies(shared_address(&shared.full[0]));
    };
    int slot = slot_of(begin, copied_record()), next = slot_of(begin + 1, copied_record());
    int final = begin < end ? slot_of(end - 1, threadIdx.x % KEYS) : -1;
    stage(0);
    name_nothings<RECORD>(shared, zeros);
    if (!__syncthreads_or(counts(final)) && begin + 1 < end)
        end = end_of_entries(begin, end, shared.last, true, warp, lane,
                             [&](int block, int entry) { return counts(slot_of(block, entry)); });
    u32 arrival = shared_address(&shared.query);
    arrive_with_copies(arrival);
    if (begin < end) copy(slot, 0, LINES);
    u32 query[STEPS][QUERY_TILES][2];
    const u8* staged = shared.records[0] + Part(warp).heads * (16 * ROW);
    barrier_wait(arrival, 0);
    load_query<0, 2>(query, staged, Part(warp), lane);
    __syncthreads();
    stage(1);
    arrive_with_copies(arrival);
    barrier_wait(arrival, 1);
    load_query<2, 2>(query, staged, Part(warp), lane);
    __syncthreads();
    float o[VALUE_TILES][NT][4] = {};
    Softmax<COLUMNS> state;
    state.start();

    for (int block = begin; block < end; ++block) {
        forget();
        barrier_wait(shared_address(&shared.full[0]), block - begin & 1);
        convert(shared, warp, lane);
        meet();  // rows are there, and nobody reads the records or P any more
        forget();
        bool refills = block + 1 < end;
        // All copies at once, before or behind the products, would hold the second half up until the SM has taken them.
        if (refills && is_second()) copy(next, 0, LINES / 2);
        forget();
        multiply_queries(shared, own, 0, query, Part(warp), 0, lane);
        if (refills && is_second()) copy(next, LINES / 2, LINES), next = slot_of(block + 2, copied_record());
        named_sync(HALVES + warp / (WARPS / 2), THREADS / 2);  // S of the half's heads is there
        forget();
        bool changed = exponentiate(shared, own, 0, state, scale_log2 * LOGITS_FACTOR, warp, lane);
        forget();
        if (refills && !is_second()) copy(next, 0, LINES), next = slot_of(block + 2, copied_record());
        u32 ahead[AHEAD][4];
        load_ahead(ahead, shared, 0, warp, lane);
        changed = meet_or(changed);  // P is there, and nobody reads S any more
        forget();
        multiply_values<true>(shared, own, 0, o, changed, ahead, warp, lane);
    }

    meet();
    Own place = {row, 1, (int)first_head, min(HEADS, heads - (int)first_head), (int)blockIdx.z, gridDim.z == 1, false};
    Results results = {out, out_row_stride, out_head_stride, lse, max_logits, partials, statistics, (int)gridDim.x, heads};
    finish_heads(own.alpha, nullptr, state, place, results, sink, warp, lane);
    meet();
    write_output(own.alpha, OUTPUT_FACTOR, 1.f, 2, nullptr, o, place, results, warp, lane);
}
