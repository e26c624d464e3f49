// What a block of few heads does behind the last keys of its query rows: it writes what it found.
#pragma once

#include "sparse_mla_few.cuh"

// Which query rows and heads of a call a block, or one of its teams, attends, and which share of their entries.
struct Own {
    int first_row, rows;  // rows > 1: a group's
    int first_head, heads;
    int share;
    bool is_whole;    // there is one share: it is the result
    bool is_cluster;  // there are more, whose blocks add up in the end; otherwise `combine_N` does
};

// The results of a call of `rows` query rows with `heads` heads, and where shares keep theirs for `combine_N`.
struct Results {
    u8* out;
    i64 out_row_stride, out_head_stride;
    float* lse;
    float* max_logits;
    Partial* partials;
    Share* statistics;
    int rows, heads;

    // Which of `partials` and `statistics` is a share's of a head.
    DEVICE i64 partial_index(const Own& own, int head) const {
        return ((i64)own.share * rows + own.first_row) * heads + own.first_head + head;
    }
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
            else if (head < own.heads && !own.is_whole) to.statistics[to.partial_index(own, head)] = share;
            else if (head < own.heads) {
                if (sink && sum != 0.f) weight /= 1.f + exp2_approx(sink[own.first_head + head] * LOG2_E - total);
                to.lse[at] = sum == 0.f ? infinity() : total * LN_2;
                to.max_logits[at] = largest * LN_2;
            }
            alpha[column] = weight;
        }
    }
}

// Where in a tile of 16 values a warp's thread finds its two of a head: they are neighbours, or eight rows apart. Then lanes
// exchange them for neighbours: those of rows g and g ^ 1, or of g and g ^ 2 where of each four rows the middle two have
// changed places.
struct Place {
    int apart;    // 0, 1 or 2: the rows that exchange
    bool is_odd;  // of two such rows one lane takes both lower values and the other both upper ones
    int pair;     // the neighbours that the lane has then, of the tile's eight

    DEVICE Place(int apart, int g) : apart(apart), is_odd(g & apart) {
        pair = apart == 0 ? g : (apart == 1 ? g : g & 4 | (g & 1) << 1) >> 1 | is_odd << 2;
    }
    // The neighbours, of 16 bits each, from what the lane has.
    DEVICE u32 exchange(u32 two) const { return apart ? exchange_halves(two, 4 * apart, is_odd) : two; }
    DEVICE float2 exchange(float2 two) const {
        if (!apart) return two;
        float other = __shfl_xor_sync(~0u, is_odd ? two.x : two.y, 4 * apart);
        return is_odd ? make_float2(other, two.y) : make_float2(two.x, other);
    }
};

static_assert(VALUE_TILES % 4 == 0, "a warp has whole groups");

// A warp's values of a share's own output, for `combine_N`; parameters as of `write_output`.
DEVICE void write_partials(const float* alpha, float factor, float rest, Place place, const float (&o)[VALUE_TILES][NT][4],
                           const Own& own, const Results& to, int member, int lane) {
    // One power of two for all heads: a largest value of each would take longer than all else here.
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float of_head = 0.f;
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m)
                of_head = fmaxf(of_head, fmaxf(fabsf(o[m][n][i]), fabsf(o[m][n][i + 2])));
            largest = fmaxf(largest, of_head * (alpha[n * 8 + 2 * (lane & 3) + i] * factor) * rest);
        }
    int exponent = partial_exponent(__int_as_float((int)__reduce_max_sync(~0u, (u32)__float_as_int(largest))));
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = n * 8 + 2 * (lane & 3) + i;
            float scale = alpha[head] * factor * power_of_two(exponent) * rest;
            Partial& partial = to.partials[to.partial_index(own, head)];
#pragma unroll
            for (int first = 0; first < VALUE_TILES; first += 4) {
                u32 x[4];
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    x[m] = place.exchange(pack_f16(o[first + m][n][i] * scale, o[first + m][n][i + 2] * scale));
                if (head >= own.heads) continue;
                int group = (member * VALUE_TILES + first) / 4;
                partial.values[group][place.pair] = make_uint4(x[0], x[1], x[2], x[3]);
                if (lane < 4) partial.scales[group] = power_of_two(-exponent);
            }
        }
}

// A warp's values of the output, or of a share's own: `o` times what `alpha` has and both factors.
DEVICE void write_output(const float* alpha, float factor, float rest, int apart, float* cluster_out,
                         const float (&o)[VALUE_TILES][NT][4], const Own& own, const Results& to, int member, int lane) {
    Place place(apart, lane >> 2);
    if (!own.is_whole && !own.is_cluster) return write_partials(alpha, factor, rest, place, o, own, to, member, lane);
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int t = lane & 3, column = n * 8 + 2 * t + i, query = query_of(n * 8), head = head_of(n * 8) + 2 * t + i;
            float weight = alpha[column] * factor;
            bool is_given = query < own.rows && head < own.heads;
            i64 at = (own.first_row + query) * to.out_row_stride + (own.first_head + head) * to.out_head_stride;
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                float lower = weight != 0.f ? o[m][n][i] * weight * rest : 0.f;
                float upper = weight != 0.f ? o[m][n][i + 2] * weight * rest : 0.f;
                int value = (member * VALUE_TILES + m) * 16 + 2 * place.pair;
                if (own.is_cluster) {
                    float2 two = place.exchange(make_float2(lower, upper));
                    if (is_given) *(float2*)(cluster_out + head * O_STRIDE + value) = two;
                    continue;
                }
#if OUT_FLOAT32
                float2 two = place.exchange(make_float2(lower, upper));
                if (is_given) *(float2*)((float*)to.out + at + value) = two;
#else
                u32 two = place.exchange(pack_bf16(lower, upper));
                if (is_given) *(u32*)((u16*)to.out + at + value) = two;
#endif
            }
        }
}
