// What a block of sparse_mla.cu does behind the last keys of its query rows: it writes what it found.
#pragma once

#include "sparse_mla_steps.cuh"

// Which query rows and heads of a call a block attends, and which share of their entries.
struct Own {
    int first_row, rows;  // rows > 1: a group's
    int first_head, heads;
    int share;
    bool is_whole;    // there is one share: it is the result
    bool is_cluster;  // there are more, whose blocks add up in the end; otherwise `combine` does
};

// The results of a call of `rows` query rows with `heads` heads, and where shares keep theirs for `combine`.
struct Results {
    u8* out;
    i64 out_row_stride, out_head_stride;
    float* lse;
    float* max_logits;
    float* partial_out;
    Share* partials;
    int rows, heads;
};

// The sum of a head's weights and its largest logit: the results `lse` and `max_logits`, or a share's own. `shared.alpha`
// gets what the output of each head has to be multiplied by. All warps that multiply meet before and after it.
DEVICE void finish_heads(Shared& shared, const State& state, const Own& own, const Results& to, const float* sink, int warp,
                         int lane) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        int column = column_of(warp, lane, j), head = query_of(column) < own.rows ? head_of(column) : own.heads;
        float sum = sum_of_lanes<LANES>(state.sum[j]), largest = max_of_lanes<LANES>(state.largest[j]);
        if (lane % LANES == 0) {
            float total = state.anchor[j] + log2_approx(sum);  // -inf where there is nothing
            float weight = sum == 0.f ? 0.f : 1.f / sum;
            i64 at = (i64)(own.first_row + query_of(column)) * to.heads + own.first_head + head;
            Share share = {sum == 0.f ? -infinity() : total, largest};
            if (own.is_cluster) own_shares(shared)[column] = share;
            else if (head < own.heads && !own.is_whole) to.partials[(i64)own.share * to.rows * to.heads + at] = share;
            else if (head < own.heads) {
                if (sink && sum != 0.f) weight /= 1.f + exp2_approx(sink[own.first_head + head] * LOG2_E - total);
                to.lse[at] = sum == 0.f ? infinity() : total * LN_2;
                to.max_logits[at] = largest * LN_2;
            }
            shared.alpha[column] = weight;
        }
    }
}

// A warp's values of the output, or of a share's own.
DEVICE void write_output(Shared& shared, const State& state, const float (&o)[VALUE_TILES][NT][4], const Own& own,
                         const Results& to, int warp, int lane) {
    int g = lane >> 2, t = lane & 3;
    // Exponents reach 127 + 1, which is not a finite float32: applied in two halves.
    float reference = power_of_two(state.reference / 2);
    float rest = power_of_two(state.reference - state.reference / 2) * (1.f / VALUE_UNIT);
    bool is_rope = LAYOUT == 1 && warp == 7;
    if (is_rope) reference = rest = 1.f;
    float* own_out = (float*)shared.records;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int column = n * 8 + 2 * t + i, query = query_of(n * 8), head = head_of(n * 8) + 2 * t + i;
            if (query >= own.rows || head >= own.heads) continue;
            float weight = shared.alpha[column];
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                float lower = weight != 0.f ? o[m][n][i] * weight * reference * rest : 0.f;
                float upper = weight != 0.f ? o[m][n][i + 2] * weight * reference * rest : 0.f;
                // A thread's two values are neighbours, but for the bfloat16 ones.
                int value = warp * (16 * VALUE_TILES) + m * 16 + (is_rope ? g : 2 * g);
                auto put = [&](float* to) {
                    if (is_rope) to[0] = lower, to[8] = upper;
                    else *(float2*)to = make_float2(lower, upper);
                };
                // Apart, so that the compiler knows which memory it writes to.
                if (own.is_cluster) put(own_out + head * O_STRIDE + value);
                else if (!own.is_whole)
                    put(to.partial_out + (((i64)own.share * to.rows + own.first_row) * to.heads + own.first_head + head) * D_V + value);
                else {
                    i64 at = (own.first_row + query) * to.out_row_stride + (own.first_head + head) * to.out_head_stride + value;
#if OUT_FLOAT32
                    put((float*)to.out + at);
#else
                    u32 both = pack_bf16(lower, upper);
                    u16* first = (u16*)to.out + at;
                    if (is_rope) first[0] = (u16)both, first[8] = (u16)(both >> 16);
                    else *(u32*)first = both;
#endif
                }
            }
        }
}
