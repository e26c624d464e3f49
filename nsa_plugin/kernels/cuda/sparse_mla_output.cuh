// What a block of few heads does behind the last keys of its query rows: it writes what it found.
#pragma once

#include "sparse_mla_few.cuh"

// Which query rows and heads of a call a block, or one of its teams, attends, and which share of their entries.
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

// The sum of a head's weights and its largest logit: the results `lse` and `max_logits`, or a share's own. `alpha` gets what
// the output of each head has to be multiplied by. All warps of a team meet before and after it.
DEVICE void finish_heads(float* alpha, Share* cluster_shares, const Softmax<COLUMNS>& state, const Own& own, const Results& to,
                         const float* sink, int member, int lane) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        int column = column_of(member, lane, j), head = query_of(column) < own.rows ? head_of(column) : own.heads;
        float sum = sum_of_lanes<LANES>(state.sum[j]), largest = max_of_lanes<LANES>(state.largest[j]);
        if (lane % LANES == 0) {
            float total = state.anchor[j] + log2_approx(sum);  // -inf where there is nothing
            float weight = sum == 0.f ? 0.f : 1.f / sum;
            i64 at = (i64)(own.first_row + query_of(column)) * to.heads + own.first_head + head;
            Share share = {sum == 0.f ? -infinity() : total, largest};
            if (own.is_cluster) cluster_shares[column] = share;
            else if (head < own.heads && !own.is_whole) to.partials[(i64)own.share * to.rows * to.heads + at] = share;
            else if (head < own.heads) {
                if (sink && sum != 0.f) weight /= 1.f + exp2_approx(sink[own.first_head + head] * LOG2_E - total);
                to.lse[at] = sum == 0.f ? infinity() : total * LN_2;
                to.max_logits[at] = largest * LN_2;
            }
            alpha[column] = weight;
        }
    }
}

// A warp's values of the output, or of a share's own: `o` times what `alpha` has and both factors. A thread has two values of
// a tile, either neighbours or, if `apart`, eight rows apart, which lanes exchange for neighbours: those of rows g and g ^ 1,
// or of g and g ^ 2 where of each four rows the middle two have changed places.
DEVICE void write_output(const float* alpha, float factor, float rest, int apart, float* cluster_out,
                         const float (&o)[VALUE_TILES][NT][4], const Own& own, const Results& to, int member, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int column = n * 8 + 2 * t + i, query = query_of(n * 8), head = head_of(n * 8) + 2 * t + i;
            float weight = alpha[column] * factor;
            bool is_given = query < own.rows && head < own.heads;
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                float lower = weight != 0.f ? o[m][n][i] * weight * rest : 0.f;
                float upper = weight != 0.f ? o[m][n][i + 2] * weight * rest : 0.f;
                int value = member * (16 * VALUE_TILES) + m * 16 + 2 * g;
                if (apart) {
                    // Of two such rows one lane takes both lower values and the other both upper ones.
                    bool is_odd = g & apart;
                    float other = __shfl_xor_sync(~0u, is_odd ? lower : upper, 4 * apart);
                    if (is_odd) lower = other;
                    else upper = other;
                    value += (apart == 1 ? g & 6 : g & 4 | (g & 1) << 1) + (is_odd ? 8 : 0) - 2 * g;
                }
                if (!is_given) continue;
                // Apart, so that the compiler knows which memory it writes to.
                if (own.is_cluster) *(float2*)(cluster_out + head * O_STRIDE + value) = make_float2(lower, upper);
                else if (!own.is_whole) {
                    i64 at = ((i64)own.share * to.rows + own.first_row) * to.heads + own.first_head + head;
                    *(float2*)(to.partial_out + at * D_V + value) = make_float2(lower, upper);
                } else {
                    i64 at = (own.first_row + query) * to.out_row_stride + (own.first_head + head) * to.out_head_stride + value;
#if OUT_FLOAT32
                    *(float2*)((float*)to.out + at) = make_float2(lower, upper);
#else
                    *(u32*)((u16*)to.out + at) = pack_bf16(lower, upper);
#endif
                }
            }
        }
}
