// Values of logits and unsigned keys in the same order, for the kernels that select the largest.
#pragma once

#include "instructions.cuh"

constexpr float kMostFinite = 3.402823466e38f;
constexpr u32 kAllLanes = 0xffffffffu;

// NaN and -inf count as the least finite value, and both zeros as one.
DEVICE float clamped(float value) { return fminf(fmaxf(value, -kMostFinite), kMostFinite) + 0.0f; }

DEVICE u32 to_key(float value) {
    const u32 bits = __float_as_uint(value);
    return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

DEVICE float to_value(u32 key) { return bits_to_float((key & 0x80000000u) ? (key ^ 0x80000000u) : ~key); }
