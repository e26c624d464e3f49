// Numbers and arithmetic of the softmax that all sparse MLA kernels share. Logits are in base 2.
#pragma once

#include "instructions.cuh"

constexpr int D_V = 512;
constexpr int NOTHINGS = 1024;          // records that stand for entries which do not count
// Weights may grow to 2^8 before the output is multiplied: float16 holds them, and that is seldom needed then.
constexpr float ANCHOR_STEP = 8.f;
constexpr float ANCHOR_START = -1e30f;  // below every logit, and finite, so that no difference is NaN
constexpr float NOT_COUNTED = -0x1p-100f;  // the scales of the v32_fp8 record that stands for an entry which does not count
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// The power of two that a query row is divided by, so that its largest value comes to 2^8.
DEVICE int query_exponent(float largest) {
    int exponent = (int)(__float_as_int(largest) >> 23 & 255) - 127 - 8;
    return largest > 0.f ? min(max(exponent, -100), 100) : 0;
}

// The exponent that scales are relative to, where `top` has the bits of a positive scale: rounded up, and never lower.
DEVICE int raise_reference(int reference, u32 top) {
    int exponent = (int)(top + 0x7fffffu >> 23) - 127;
    return max(reference, min(max(exponent, -100), 100));
}

// What values relative to a reference are multiplied by when it is raised.
DEVICE float change_of_reference(int reference, int raised) { return power_of_two(max(reference - raised, -127)); }
