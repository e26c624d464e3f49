// V3.2's fp8 codes as bfloat16: what sparse_mla_converted.cuh, its steps and sparse_mla_copy.cu share.
//
// A code's bits, its sign moved, are a bfloat16 of 2^-120 of its value, exactly, but for the code of NaN. The smallest are
// subnormal, which tensor cores multiply as they are (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021). Powers
// of two, of which the query and the weights P have a part each, keep products and sums within float32's range.
#pragma once

#include "codes.cuh"

constexpr int RECORD = 656;                                       // bytes
constexpr int RAW = 768;                                          // of the six lines of 128 bytes that a record lies in
constexpr int RECORD_SCALES = 512, RECORD_ROPE = 528;             // in a record
constexpr int ROW_ROPE = 1024;                                    // in a row that is made of one
constexpr int CODE_STEPS = 8;                                     // of 16 values, of a part; what follows is RoPE's
constexpr u32 CODES_UNIT = 0x5d805d80u, ROPE_UNIT = 0x21802180u;  // 2^60 and 2^-60, as two bfloat16: of the query
constexpr float WEIGHTS_UNIT = 0x1p80f;
constexpr float LOGITS_FACTOR = 0x1p60f;  // of S: for codes 2^120 / 2^60, for RoPE 1 / 2^-60
constexpr float OUTPUT_FACTOR = 0x1p40f;  // of O: 2^120 / 2^80

// Two bfloat16 each of the even and of the odd bytes.
DEVICE void code_bits(u32 codes, u32& even, u32& odd) {
    place_codes<4>(codes, even, odd);
}

// Values 2 t and 2 t + 1 of eight, in the order that `code_bits` leaves them in, from what lanes t have of them in theirs.
DEVICE u32 two_of_codes(u32 two, int lane) { return exchange_halves(two, 1, lane & 1); }
