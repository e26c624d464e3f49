// The largest entries of a range of each row of a float32 matrix: one block a row, see nsa_plugin/kernels/topk.py.
//
// A row passes through the memory system once. A sample of it gives a value that, with overwhelming probability,
// between topk and `capacity` entries reach; those are appended to a buffer in shared memory, whose exact top is then
// found by a radix select (of an order-preserving key, 11 bits a pass from the first that differs). Where the guess
// fails - ties, constant or adversarial rows - the row is read again in small pieces, and the buffer is cut back to the
// best topk whenever the next piece might not fit: exact for any data, no faster than that.
//
// The appends come in any order, and yet the result is the same bits every time: the selected set is exact, ties go to
// the lowest positions, and the positions are written in ascending order by way of a bitmap.

#include "sortable.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3
#endif

namespace {

constexpr int kWarps = THREADS / 32;
constexpr int kDigits = 11;  // bits of a key that a pass of the radix select looks at
constexpr int kBins = 1 << kDigits;
constexpr int kBinsPerThread = kBins / THREADS;
constexpr int kVectors = 4;              // 16-byte loads in flight of a thread
constexpr int kPiece = 4 * THREADS;      // entries between two looks at the buffer's room
constexpr int kSampleStep = 4096;
constexpr unsigned kLeastKey = 0x00800000u;  // the key of -kMostFinite
constexpr int kNoLimit = 0x7fffffff;
// Standard deviations by which the sampled threshold is lowered, so that fewer than topk reach it almost never.
constexpr float kMargin = 5.5f;

static_assert(THREADS % 32 == 0 && kWarps <= 32 && kBins % THREADS == 0, "unsupported block size");

struct Control {
    int totals[32];
    int bin, room, tied;
    int count;
    unsigned any, all;  // bits of the keys
};

// Dynamic shared memory: keys [capacity], positions [capacity], bins [max(kBins, topk)]. Reached through the symbol,
// never through a pointer kept somewhere, so that the compiler knows the address space.
extern __shared__ __align__(16) unsigned words[];
__shared__ Control control;

DEVICE unsigned* keys() { return words; }
DEVICE int* positions(int capacity) { return reinterpret_cast<int*>(words + capacity); }
DEVICE int* bins(int capacity) { return reinterpret_cast<int*>(words + 2 * capacity); }

// Entries above `key` are all wanted, and `room` of the `tied` ones that have it (or, where room == tied, reach it).
struct Cut {
    unsigned key;
    int room, tied;
};

DEVICE int warp_inclusive_sum(int value) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(kAllLanes, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Sum of the values of the threads before this one, and of all. One barrier inside; another has to lie between two
// calls.
DEVICE int block_exclusive_sum(int value, int* totals, int* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int inclusive = warp_inclusive_sum(value);
    if (lane == 31) totals[warp] = inclusive;
    __syncthreads();
    const int warps = warp_inclusive_sum(lane < kWarps ? totals[lane] : 0);
    const int before = __shfl_sync(kAllLanes, warps, warp > 0 ? warp - 1 : 0);
    *total = __shfl_sync(kAllLanes, warps, kWarps - 1);
    return (warp > 0 ? before : 0) + inclusive - value;
}

// The k-th largest key among the entries 0 <= i < count that key_of(i, &key) takes part with; at least k do.
// All threads call it and get the same result; everything written before has to lie behind a barrier.
template <typename KeyOf>
DEVICE Cut kth_largest(int capacity, int count, int k, KeyOf key_of) {
    // Keys near each other, such as those above a threshold, have their first bits in common: with these as digits, most
    // keys would meet in a few bins.
    if (threadIdx.x == 0) control.any = 0, control.all = ~0u;
    __syncthreads();
    unsigned any = 0, all = ~0u;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        unsigned key;
        if (key_of(i, &key)) any |= key, all &= key;
    }
    any = __reduce_or_sync(kAllLanes, any);
    all = __reduce_and_sync(kAllLanes, all);
    if ((threadIdx.x & 31) == 0) {
        atomicOr(&control.any, any);
        atomicAnd(&control.all, all);
    }
    __syncthreads();
    const int differing = 32 - __clz(static_cast<int>(control.any & ~control.all));
    int digits = differing < kDigits ? differing : kDigits, shift = differing - digits;
    unsigned mask = differing < 32 ? ~0u << differing : 0;
    unsigned prefix = control.all & mask;
    int room = k, tied = 0;
    while (true) {
        for (int bin = threadIdx.x; bin < kBins; bin += THREADS) bins(capacity)[bin] = 0;
        __syncthreads();
        const unsigned digit = (1u << digits) - 1;
        for (int i = threadIdx.x; i < count; i += THREADS) {
            unsigned key;
            if (key_of(i, &key) && (key & mask) == prefix) atomicAdd(&bins(capacity)[(key >> shift) & digit], 1);
        }
        __syncthreads();
        // Thread 0 has the highest bins.
        const int top = kBins - threadIdx.x * kBinsPerThread;
        int own = 0;
#pragma unroll
        for (int i = 1; i <= kBinsPerThread; ++i) own += bins(capacity)[top - i];
        int total;
        int above = block_exclusive_sum(own, control.totals, &total);
        if (above < room && room <= above + own) {  // true for one thread
            int bin = top - 1;
            while (above + bins(capacity)[bin] < room) above += bins(capacity)[bin--];
            control.bin = bin;
            control.room = room - above;
            control.tied = bins(capacity)[bin];
        }
        __syncthreads();
        prefix |= static_cast<unsigned>(control.bin) << shift;
        mask |= digit << shift;
        room = control.room;
        tied = control.tied;
        // Where the whole bin is wanted, its lower edge says as much as the exact key.
        if (shift == 0 || room == tied) break;
        digits = shift < kDigits ? shift : kDigits;
        shift -= digits;
    }
    return Cut{prefix, room, tied};
}

// The k best of the buffer: all entries above cut.key, and those at it up to position *last.
DEVICE Cut cut_at(int capacity, int count, int k, int* last) {
    const Cut cut = kth_largest(capacity, count, k, [&](int i, unsigned* key) {
        *key = keys()[i];
        return true;
    });
    *last = kNoLimit;
    if (cut.room < cut.tied) {
        // Uniform: every thread has the same cut. The lowest positions are the largest complements.
        const Cut tie = kth_largest(capacity, count, cut.room, [&](int i, unsigned* key) {
            *key = ~static_cast<unsigned>(positions(capacity)[i]);
            return keys()[i] == cut.key;
        });
        *last = static_cast<int>(~tie.key);
    }
    return cut;
}

DEVICE bool wanted(const Cut& cut, int last, unsigned key, int position) {
    return key > cut.key || (key == cut.key && position <= last);
}

DEVICE void append(int capacity, int slot, float value, int position) {
    if (slot < capacity) {
        keys()[slot] = to_key(clamped(value));
        positions(capacity)[slot] = position;
    }
}

// Append those of four neighbours that reach the threshold. A NaN does not.
DEVICE void offer(int capacity, float threshold, const float4& value, int position) {
    const bool x = value.x >= threshold, y = value.y >= threshold;
    const bool z = value.z >= threshold, w = value.w >= threshold;
    if (x || y || z || w) {
        int slot = atomicAdd(&control.count, int(x) + int(y) + int(z) + int(w));
        if (x) append(capacity, slot++, value.x, position);
        if (y) append(capacity, slot++, value.y, position + 1);
        if (z) append(capacity, slot++, value.z, position + 2);
        if (w) append(capacity, slot, value.w, position + 3);
    }
}

DEVICE void offer_one(int capacity, float threshold, float value, int position) {
    if (value >= threshold) append(capacity, atomicAdd(&control.count, 1), value, position);
}

// The least rank in a sample whose count of the row, less kMargin deviations, is still topk; in the middle of the
// buffer if it is too far.
DEVICE int sampled_rank(int taken, float share, int topk, int capacity) {
    const float exact = topk * share;
    const float root = 0.5f * (kMargin + sqrtf(kMargin * kMargin + 4.0f * exact));
    const float middle = 0.5f * (topk + capacity) * share;
    const int rank = static_cast<int>(fminf(root * root, middle)) + 1;
    return rank < taken ? rank : taken;
}

// One pass with a sampled threshold. Returns the entries gathered; fewer than topk or more than fit: start over.
DEVICE int gather_by_sample(int capacity, const float* row, int length, int topk) {
    const int misaligned = static_cast<int>((reinterpret_cast<unsigned long long>(row) >> 2) & 3);
    const int head = (4 - misaligned) & 3;
    const int vectors = (length - head) >> 2;
    const float4* body = reinterpret_cast<const float4*>(row + head);

    // The sample takes the place of keys and positions: 2 * capacity words.
    unsigned* sample = keys();
    int taken = (length / 32 + kSampleStep - 1) / kSampleStep * kSampleStep;
    const int most = 2 * capacity / kSampleStep * kSampleStep;
    taken = taken < most ? taken : most;
    const int sampled_vectors = taken >> 2;
    for (int i = threadIdx.x; i < sampled_vectors; i += THREADS) {
        const long long at = static_cast<long long>(i) * vectors / sampled_vectors;
        const float4 value = body[at];
        sample[4 * i] = to_key(clamped(value.x));
        sample[4 * i + 1] = to_key(clamped(value.y));
        sample[4 * i + 2] = to_key(clamped(value.z));
        sample[4 * i + 3] = to_key(clamped(value.w));
    }
    __syncthreads();
    const float share = static_cast<float>(taken) / static_cast<float>(length);
    const int rank = sampled_rank(taken, share, topk, capacity);
    const Cut cut = kth_largest(capacity, taken, rank, [&](int i, unsigned* key) {
        *key = sample[i];
        return true;
    });
    if (cut.key <= kLeastKey) return 0;  // NaN and -inf would have to be taken, and do not compare
    const float threshold = to_value(cut.key);

    if (threadIdx.x == 0) control.count = 0;
    __syncthreads();
    int at = threadIdx.x;
    for (; at + (kVectors - 1) * THREADS < vectors; at += kVectors * THREADS) {
        float4 value[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) value[i] = load_once(body + at + i * THREADS);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) offer(capacity, threshold, value[i], head + 4 * (at + i * THREADS));
    }
    for (; at < vectors; at += THREADS) offer(capacity, threshold, load_once(body + at), head + 4 * at);
    const int edge = threadIdx.x < head ? threadIdx.x : head + 4 * vectors + (threadIdx.x - head);
    if (threadIdx.x < 8 && edge < length) offer_one(capacity, threshold, row[edge], edge);
    __syncthreads();
    const int count = control.count;
    __syncthreads();  // the count may be set anew from here on
    return count;
}

// Keep the k best entries of the buffer alone; control.count becomes k.
DEVICE Cut cut_back(int capacity, int count, int k) {
    int last;
    const Cut cut = cut_at(capacity, count, k, &last);
    if (threadIdx.x == 0) control.count = 0;
    __syncthreads();
    for (int first = 0; first < count; first += THREADS) {
        const int i = first + static_cast<int>(threadIdx.x);
        unsigned key = 0;
        int position = 0;
        bool keep = false;
        if (i < count) {
            key = keys()[i];
            position = positions(capacity)[i];
            keep = wanted(cut, last, key, position);
        }
        // No more are kept than were read, so slots never run ahead of the reads behind this barrier.
        __syncthreads();
        if (keep) {
            const int slot = atomicAdd(&control.count, 1);
            keys()[slot] = key;
            positions(capacity)[slot] = position;
        }
    }
    __syncthreads();
    return cut;
}

// Any data: read in pieces of kPiece, cut the buffer back when the next one might not fit.
__device__ __noinline__ int gather_by_pieces(int capacity, const float* row, int length, int topk) {
    unsigned floor_key = 0;  // below every key
    if (threadIdx.x == 0) control.count = 0;
    __syncthreads();
    for (int base = 0; base < length; base += kPiece) {
        float value[kPiece / THREADS];
#pragma unroll
        for (int i = 0; i < kPiece / THREADS; ++i) {
            const int position = base + i * THREADS + static_cast<int>(threadIdx.x);
            value[i] = position < length ? row[position] : 0.0f;
        }
        const int count = control.count;
        __syncthreads();  // nobody appends before everybody has read the count
        if (count + kPiece > capacity) {
            const Cut cut = cut_back(capacity, count, topk);
            // Later positions lose a tie, so only what lies above the cut can still enter.
            floor_key = cut.key;
        }
#pragma unroll
        for (int i = 0; i < kPiece / THREADS; ++i) {
            const int position = base + i * THREADS + static_cast<int>(threadIdx.x);
            if (position < length && to_key(clamped(value[i])) > floor_key)
                append(capacity, atomicAdd(&control.count, 1), value[i], position);
        }
        __syncthreads();
    }
    const int count = control.count;
    __syncthreads();
    return count;
}

// Write the wanted positions in ascending order, then -1.
DEVICE void emit(
    int capacity, int count, const Cut& cut, int last, int length, int topk, int* out) {
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (!wanted(cut, last, keys()[i], positions(capacity)[i])) positions(capacity)[i] = -1;
    __syncthreads();
    // The keys are done with: a bitmap of the positions takes their place, a window of them at a time.
    unsigned* bitmap = keys();
    const int window = capacity * 32;
    int written = 0;
    for (long long first = 0; first < length; first += window) {
        const int left = length - static_cast<int>(first);
        const int words = left < window ? (left + 31) / 32 : capacity;
        for (int i = threadIdx.x; i < words; i += THREADS) bitmap[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const int position = positions(capacity)[i];
            const long long bit = position - first;
            if (position >= 0 && bit >= 0 && bit < 32LL * words) atomicOr(&bitmap[bit >> 5], 1u << (bit & 31));
        }
        __syncthreads();
        // An odd number of words a thread: neighbours then read different banks.
        const int per_thread = ((words + THREADS - 1) / THREADS) | 1;
        const int from = threadIdx.x * per_thread;
        const int until = from + per_thread < words ? from + per_thread : words;
        int own = 0;
        for (int i = from; i < until; ++i) own += __popc(bitmap[i]);
        int total;
        int slot = written + block_exclusive_sum(own, control.totals, &total);
        for (int i = from; i < until; ++i) {
            unsigned bits = bitmap[i];
            while (bits) {
                bins(capacity)[slot++] = static_cast<int>(first) + 32 * i + __ffs(bits) - 1;
                bits &= bits - 1;
            }
        }
        written += total;
        __syncthreads();
    }
    for (int i = threadIdx.x; i < topk; i += THREADS) out[i] = i < written ? bins(capacity)[i] : -1;
}

}  // namespace

// Grid (rows, 1, 1), block (THREADS, 1, 1); dynamic shared memory: 8 * capacity + 4 * max(2048, topk) bytes.
// topk + 4 * THREADS <= capacity. Strides are in elements.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_rows(
    const float* __restrict__ logits, long long logits_stride, const int* __restrict__ starts,
    const int* __restrict__ ends, int* __restrict__ out, long long out_stride, int columns, int topk, int capacity) {
    const long long row_index = blockIdx.x;
    const int start = max(starts[row_index], 0);
    const int length = max(min(ends[row_index], columns), 0) - start;
    const float* row = logits + row_index * logits_stride + start;
    int* result = out + row_index * out_stride;

    if (length <= topk) {
        for (int i = threadIdx.x; i < topk; i += THREADS) result[i] = i < length ? i : -1;
        return;
    }
    int count;
    if (length <= capacity) {
        for (int i = threadIdx.x; i < length; i += THREADS) {
            keys()[i] = to_key(clamped(row[i]));
            positions(capacity)[i] = i;
        }
        count = length;
        __syncthreads();
    } else {
        count = gather_by_sample(capacity, row, length, topk);
        if (count < topk || count > capacity) count = gather_by_pieces(capacity, row, length, topk);
    }
    int last;
    const Cut cut = cut_at(capacity, count, topk, &last);
    emit(capacity, count, cut, last, length, topk, result);
}

// The value that, by a sample of a row's logits, between topk and `room` of its keys reach, for indexer_scan.cu; the least
// finite value for rows of at most `capacity` keys. Sample i is key offset + i * step. Grid (rows, 1, 1), block
// (THREADS, 1, 1); dynamic shared memory: 4 * samples (rounded up to even) + 4 * 2048 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) row_thresholds(
    const float* __restrict__ sampled, const int* __restrict__ starts, const int* __restrict__ ends,
    float* __restrict__ thresholds, int samples, int step, int offset, int columns, int topk, int capacity, int room) {
    const long long row_index = blockIdx.x;
    const int start = max(starts[row_index], 0), end = min(ends[row_index], columns);
    const int length = end - start;
    const int first = min(max(start - offset + step - 1, 0) / step, samples);
    const int taken = length > 0 ? min(max(end - offset + step - 1, 0) / step, samples) - first : 0;
    if (length <= capacity || taken <= 0) {
        if (threadIdx.x == 0) thresholds[row_index] = -kMostFinite;
        return;
    }
    const float* row = sampled + row_index * samples + first;
#pragma unroll 4
    for (int i = threadIdx.x; i < taken; i += THREADS) keys()[i] = to_key(clamped(row[i]));
    __syncthreads();
    const float share = static_cast<float>(taken) / static_cast<float>(length);
    const Cut cut = kth_largest(
        (samples + 1) / 2, taken, sampled_rank(taken, share, topk, room), [&](int i, unsigned* key) {
            *key = keys()[i];
            return true;
        });
    if (threadIdx.x == 0) thresholds[row_index] = cut.key <= kLeastKey ? -kMostFinite : to_value(cut.key);
}

// As topk_rows, of the entries (value, column) that indexer_scan.cu gathered: `parts` lists a row, in any order, with
// all that belong to the top and no column twice. Rows of at most topk columns need no entries.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_entries(
    const int2* __restrict__ entries, const int* __restrict__ counts, const int* __restrict__ starts,
    const int* __restrict__ ends, int* __restrict__ out, long long out_stride, int parts, int part_capacity, int columns,
    int topk, int capacity) {
    const long long row_index = blockIdx.x;
    const int start = max(starts[row_index], 0);
    const int length = max(min(ends[row_index], columns), 0) - start;
    int* result = out + row_index * out_stride;
    if (length <= topk) {
        for (int i = threadIdx.x; i < topk; i += THREADS) result[i] = i < length ? i : -1;
        return;
    }
    int count = 0;
    for (int part = 0; part < parts; ++part) count += min(counts[row_index * parts + part], part_capacity);
    if (count <= capacity) {
        int before = 0;
        for (int part = 0; part < parts; ++part) {
            const int2* some = entries + (row_index * parts + part) * part_capacity;
            const int given = min(counts[row_index * parts + part], part_capacity);
#pragma unroll 4
            for (int i = threadIdx.x; i < given; i += THREADS) {
                const int2 entry = some[i];
                keys()[before + i] = to_key(clamped(__int_as_float(entry.x)));
                positions(capacity)[before + i] = entry.y - start;
            }
            before += given;
        }
        __syncthreads();
    } else {
        count = 0;
        unsigned floor_key = 0;  // below every key
        for (int part = 0; part < parts; ++part) {
            const int2* some = entries + (row_index * parts + part) * part_capacity;
            const int given = min(counts[row_index * parts + part], part_capacity);
            for (int base = 0; base < given; base += kPiece) {
                if (count + kPiece > capacity) {
                    // Columns come in any order, so later ones may still win a tie.
                    floor_key = cut_back(capacity, count, topk).key;
                    count = topk;
                }
                if (threadIdx.x == 0) control.count = count;
                __syncthreads();
#pragma unroll
                for (int i = 0; i < kPiece / THREADS; ++i) {
                    const int at = base + i * THREADS + static_cast<int>(threadIdx.x);
                    if (at >= given) continue;
                    const int2 entry = some[at];
                    const unsigned key = to_key(clamped(__int_as_float(entry.x)));
                    if (key < floor_key) continue;
                    const int slot = floor_key ? atomicAdd(&control.count, 1) : count + (at - base);
                    keys()[slot] = key;
                    positions(capacity)[slot] = entry.y - start;
                }
                __syncthreads();
                count = floor_key ? control.count : count + min(kPiece, given - base);
                __syncthreads();
            }
        }
    }
    int last;
    const Cut cut = cut_at(capacity, count, min(topk, count), &last);
    emit(capacity, count, cut, last, length, topk, result);
}
