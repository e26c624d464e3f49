// The instructions that the kernels are written in, one function each. NVRTC has no headers to include.
#pragma once

#include "arithmetic.cuh"

#ifndef HOPPER
#define HOPPER 1      // bulk copies and clusters
#endif
#ifndef NATIVE_FP8
#define NATIVE_FP8 1  // conversions of e4m3
#endif

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Of what is read once: past the L1 cache.
DEVICE float4 load_once(const float4* address) {
    float4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(address));
    return value;
}

DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 multiply_f16(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 multiply_bf16(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // SM80 has no product alone
    return r;
}

// The bits of `a` where the mask has ones, elsewhere those of `b`. The compiler makes two instructions of the expression.
DEVICE u32 select_bits(u32 mask, u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}

#if NATIVE_FP8
// Two e4m3 codes each from the lower and the upper half of a register.
DEVICE void fp8_to_f16(u32 codes, u32& lower, u32& upper) {
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
        : "=r"(lower), "=r"(upper) : "r"(codes));
}
#endif

DEVICE u32 pack_f16(float lower, float upper) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

DEVICE float2 unpack_f16(u32 two) {
    float2 r;
    asm("{ .reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(r.x), "=f"(r.y) : "r"(two));
    return r;
}

DEVICE u32 pack_bf16(float lower, float upper) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(upper), "f"(lower));
    return r;
}

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

#if HOPPER
#define WAITING "try_wait"
#else
#define WAITING "test_wait"
#endif
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; WAIT: mbarrier." WAITING ".parity.shared.b64 done, [%0], %1;\n"
                 "  @done bra DONE; bra WAIT; DONE: }" :: "r"(barrier), "r"(parity) : "memory");
}

// Starts a copy of 16 bytes, past the L1 cache.
DEVICE void copy_16_bytes(u32 destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(destination), "l"(source) : "memory");
}

// The same, or zeros.
DEVICE void copy_16_bytes_or_zeros(u32 destination, const void* source, bool copies) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(destination), "l"(source), "r"(copies ? 16 : 0) : "memory");
}

// This thread arrives at the barrier when the copies that it has started are there.
DEVICE void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

// Waits until the copies that this thread has started are there.
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Starts a copy of 8 bytes.
DEVICE void copy_8_bytes(u32 destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(destination), "l"(source) : "memory");
}

// A barrier of `threads` threads, for which all of a warp arrive.
DEVICE void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// The same, without waiting.
DEVICE void named_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}

// Whether something holds for one of the threads, which meet as in `named_sync`.
DEVICE bool named_or(int barrier, int threads, bool something) {
    u32 yes;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(yes) : "r"(barrier), "r"(threads), "r"((u32)something) : "memory");
    return yes;
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" :: "r"(barrier) : "memory");
}

#if HOPPER
DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Registers that this warp's group of four takes from the block's, or leaves to it.
template <int COUNT>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// Whether this is the one lane of the warp that acts for all of it.
DEVICE bool elected() {
    u32 yes;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
    return yes;
}

// What this thread wrote to shared memory, bulk copies and the products of others see after they have met.
DEVICE void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void bulk_copy(u32 destination, const void* source, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// All threads of the cluster; what each wrote to shared memory before, the others see after.
DEVICE void cluster_meet() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
    // Of shared memory alone: the default waits for global memory as well, with a barrier of the whole GPU.
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;\n"
                 "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
                 "fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
#else
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// All threads of the cluster; none passes before every other has what it read of shared memory before.
DEVICE void cluster_part() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// An address of this block's shared memory, in another block of the cluster.
DEVICE u32 shared_of_block(u32 address, int rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

DEVICE float2 load_cluster_2(u32 address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

DEVICE float4 load_cluster_4(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
    return x;
}

// Of an operand of wgmma in shared memory: rows of 128 bytes, swizzled over 128 bytes, eight rows every 1024 bytes.
DEVICE u64 swizzled_matrix(u32 address) { return (u64)(address >> 4) | (64ull << 32) | (1ull << 62); }

// Before a product reads registers that other instructions have written.
DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// The compiler keeps a product's sums in their registers until here.
template <int COUNT>
DEVICE void fence_sums(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
#endif
