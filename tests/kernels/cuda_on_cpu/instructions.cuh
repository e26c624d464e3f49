// The functions of nsa_plugin/kernels/cuda/instructions.cuh as a CPU computes them, for GPUs without bulk copies and
// clusters: what the PTX ISA says of each instruction.
#pragma once

#include "arithmetic.cuh"

#ifndef HOPPER
#define HOPPER 0
#endif
#ifndef NATIVE_FP8
#define NATIVE_FP8 1
#endif
static_assert(!HOPPER, "a CPU runs what older GPUs run");

DEVICE u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - shared_memory); }
DEVICE u8* shared_pointer(u32 address) { return shared_memory + address; }
DEVICE float4 load_once(const float4* address) { return *address; }

DEVICE float half_to_float(u16 bits) {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return (float)x;
}
DEVICE u16 to_half(float x) {
    _Float16 half = (_Float16)x;
    u16 bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
DEVICE float bf16_to_float(u16 bits) { return __int_as_float((int)((u32)bits << 16)); }
DEVICE u16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Lane l has the address of row l % 8 of matrix l / 8.
template <typename Rows>
DEVICE void look_for_conflicts(const Rows& rows) {
    for (int m = 0; m < 4; ++m) {
        int banks = 0;
        for (int i = 0; i < 8; ++i) banks |= 1 << rows[8 * m + i][0] / 16 % 8, conflicts |= rows[8 * m + i][0] % 16 != 0;
        conflicts |= banks != 255;
    }
}
DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
    auto rows = show(address);
    look_for_conflicts(rows);
    int lane = own_lane();
    for (int m = 0; m < 4; ++m) std::memcpy(&r[m], shared_pointer(rows[8 * m + lane / 4][0]) + lane % 4 * 4, 4);
}
DEVICE void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    auto rows = show(address);
    look_for_conflicts(rows);
    int lane = own_lane();
    for (int m = 0; m < 4; ++m)
        for (int i = 0; i < 2; ++i)
            std::memcpy((u8*)&r[m] + 2 * i, shared_pointer(rows[8 * m + lane % 4 * 2 + i][0]) + lane / 4 * 2, 2);
}

struct Operands { u32 a[4], b[2]; };

// D += A B of m16n8k16, by a conversion of their values.
template <typename Convert>
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Convert value) {
    auto shown = show(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    int lane = own_lane(), group = lane / 4, pair = lane % 4;
    for (int i = 0; i < 4; ++i) {
        int row = group + i / 2 * 8, column = pair * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            // Row r and columns 2 t and 2 t + 1 are lane (r % 8, t)'s, rows from 8 on and columns from 8 on in registers of their own.
            u32 left = shown[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], right = shown[column * 4 + k % 8 / 2][4 + k / 8];
            d[i] += value((u16)(left >> 16 * (k % 2))) * value((u16)(right >> 16 * (k % 2)));
        }
    }
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1, half_to_float); }
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1, bf16_to_float); }

DEVICE u32 multiply_f16(u32 a, u32 b) {
    u32 lower = to_half(half_to_float((u16)a) * half_to_float((u16)b));
    return lower | (u32)to_half(half_to_float((u16)(a >> 16)) * half_to_float((u16)(b >> 16))) << 16;
}

DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 lower = to_bf16(bf16_to_float((u16)a) * bf16_to_float((u16)b));
    return lower | (u32)to_bf16(bf16_to_float((u16)(a >> 16)) * bf16_to_float((u16)(b >> 16))) << 16;
}

DEVICE u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

#if NATIVE_FP8
// e4m3: 480 is the code of NaN.
DEVICE u16 code_to_half(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    if ((code & 127) == 127) x = NAN;
    return to_half(code & 128 ? -x : x);
}
DEVICE void fp8_to_f16(u32 codes, u32& lower, u32& upper) {
    lower = code_to_half((u8)codes) | (u32)code_to_half((u8)(codes >> 8)) << 16;
    upper = code_to_half((u8)(codes >> 16)) | (u32)code_to_half((u8)(codes >> 24)) << 16;
}
#endif

DEVICE u32 pack_f16(float lower, float upper) { return to_half(lower) | (u32)to_half(upper) << 16; }
DEVICE float2 unpack_f16(u32 two) { return make_float2(half_to_float((u16)two), half_to_float((u16)(two >> 16))); }
DEVICE u32 pack_bf16(float lower, float upper) { return to_bf16(lower) | (u32)to_bf16(upper) << 16; }
DEVICE float exp2_approx(float x) {
    float y = std::exp2(x);
    return std::fabs(y) < 0x1p-126f ? 0.f : y;
}
DEVICE float log2_approx(float x) { return std::log2(x); }

// An mbarrier: arrivals that its phase still needs, arrivals of every phase, and the phase.
struct Barrier { u32 pending : 20, all : 20, phase : 1; };
DEVICE Barrier& barrier_at(u32 address) { return *(Barrier*)shared_pointer(address); }
DEVICE void barrier_init(u32 barrier, int count) { barrier_at(barrier) = {(u32)count, (u32)count, 0}; }
DEVICE void barrier_arrive(u32 barrier) {
    Barrier& one = barrier_at(barrier);
    if (!--one.pending) one.pending = one.all, one.phase ^= 1;
}

// Copies that have started, with the barrier at which they arrive. They arrive as late as possible, once a thread waits
// there, so that nobody finds what it has not waited for.
struct Copy { u32 to; const void* from; int bytes; };
struct Arrival { u32 barrier; std::vector<Copy> copies; };
inline std::vector<Copy> started[MOST_THREADS];
inline std::vector<Arrival> arrivals;
inline void forget_copies() {
    for (auto& one : started) one.clear();
    arrivals.clear();
}

DEVICE void copy_16_bytes(u32 destination, const void* source) { started[threadIdx.x].push_back({destination, source, 16}); }
DEVICE void copy_16_bytes_or_zeros(u32 destination, const void* source, bool copies) {
    static const u8 zeros[16] = {};
    copy_16_bytes(destination, copies ? source : zeros);
}
DEVICE void arrive_with_copies(u32 barrier) {
    arrivals.push_back({barrier, std::move(started[threadIdx.x])});
    started[threadIdx.x].clear();
}
DEVICE void copy_8_bytes(u32 destination, const void* source) { started[threadIdx.x].push_back({destination, source, 8}); }
DEVICE void wait_for_copies() {
    for (const Copy& copy : started[threadIdx.x]) std::memcpy(shared_pointer(copy.to), copy.from, copy.bytes);
    started[threadIdx.x].clear();
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    turns.wait([&] {
        if (barrier_at(barrier).phase != parity) return true;
        std::vector<Arrival> others;
        for (Arrival& one : arrivals) {
            if (one.barrier != barrier || barrier_at(barrier).phase != parity) {
                others.push_back(std::move(one));
                continue;
            }
            for (const Copy& copy : one.copies) std::memcpy(shared_pointer(copy.to), copy.from, copy.bytes);
            barrier_arrive(barrier);
        }
        arrivals = std::move(others);
        return barrier_at(barrier).phase != parity;
    });
}

DEVICE void named_sync(int barrier, int threads) { named[barrier].meet(threads); }
DEVICE void named_arrive(int barrier, int threads) { named[barrier].arrive(threads); }
DEVICE bool named_or(int barrier, int threads, bool something) { return named[barrier].meet(threads, something); }
