// Names of types, and arithmetic that takes no instruction of PTX.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// Over groups of LANES neighbouring lanes.
template <int LANES>
DEVICE float max_of_lanes(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

template <int LANES>
DEVICE float sum_of_lanes(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

DEVICE float warp_max(float x) { return max_of_lanes<32>(x); }

// Lanes `distance` apart swap halves: the even one gets both lower halves, the odd one both upper ones.
DEVICE u32 exchange_halves(u32 two, int distance, bool is_odd) {
    return __byte_perm(two, __shfl_xor_sync(~0u, two, distance), is_odd ? 0x3276 : 0x5410);
}

DEVICE float bits_to_float(u32 bits) { return __int_as_float((int)bits); }
DEVICE float infinity() { return bits_to_float(0x7f800000); }
DEVICE float power_of_two(int exponent) { return bits_to_float((u32)(exponent + 127) << 23); }
