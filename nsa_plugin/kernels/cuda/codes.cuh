// What codes of e4m3 are by their bits alone, where a kernel does not leave that to an instruction.
#pragma once

#include "instructions.cuh"

// Of four codes of e4m3 two each, from the even and the odd bytes: their signs first, the other bits from place PLACE on.
template <int PLACE>
DEVICE void place_codes(u32 codes, u32& even, u32& odd) {
    constexpr u32 MAGNITUDES = 0x007f007fu << PLACE;
    u32 signs = codes & 0x80808080u;
    asm("" : "+r"(signs));  // so that the compiler does not take other signs for each half
    even = select_bits(MAGNITUDES, codes << PLACE, signs << 8);
    odd = select_bits(MAGNITUDES, codes >> (8 - PLACE), signs);
}

// Has bits of 0x80808080 if one of four codes is that of NaN: all its lower bits are ones, and another one changes the sign.
DEVICE u32 nan_codes(u32 codes) { return codes + 0x01010101u ^ codes; }
