// Products of a warpgroup (SM90): 64 rows from registers, HEADS columns from shared memory, and what they need.
#pragma once

#include "instructions.cuh"

// float32 sums of a warp's 16 rows and all columns: thread 4 g + t has columns 8 j + 2 t and the next of rows g, g + 8.
constexpr int SUMS = HEADS / 2;

#if HEADS == 64
#define MULTIPLY(TYPE) \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, " \
        "%8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, " \
        "%24, %25, %26, %27, %28, %29, %30, %31}, " \
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#else
#define MULTIPLY(TYPE) \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %21, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " " \
        "{%0, %1, %2, %3, %4, %5, %6, %7, " \
        "%8, %9, %10, %11, %12, %13, %14, %15}, " \
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#endif

// d += A B, or d = A B, with A's fragments as those of mma.m16n8k16. Not done before a wait, until which neither d nor a
// may be touched.
DEVICE void multiply_rows_f16(float (&d)[SUMS], const u32* a, u64 b, int accumulate) { MULTIPLY("f16") }
DEVICE void multiply_rows_bf16(float (&d)[SUMS], const u32* a, u64 b, int accumulate) { MULTIPLY("bf16") }

// Whether any of the threads says yes.
DEVICE bool named_any(int barrier, int threads, bool yes) {
    u32 any;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"((u32)yes), "r"(barrier), "r"(threads) : "memory");
    return any;
}
