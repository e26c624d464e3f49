// A GPU's threads on one of a CPU: what CUDA C++ has without includes, for kernels that g++ compiles (`__init__.py`).
//
// The threads of a block are contexts that take turns: one runs until it has to wait for others. Blocks run one after
// the other, each in shared memory full of NaN.
#pragma once

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __noinline__

struct Three { unsigned x, y, z; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

inline Three threadIdx, blockIdx, blockDim, gridDim;
constexpr int MOST_THREADS = 1024, SHARED_BYTES = 256 << 10, STACK_BYTES = 256 << 10;
alignas(1024) inline unsigned char shared_memory[SHARED_BYTES];

// A block of threads that take turns.
struct Turns {
    struct Thread {
        ucontext_t entry;
        jmp_buf left;
        bool started = false, ended = false;
        std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    };
    std::vector<Thread> threads{MOST_THREADS};
    jmp_buf main;
    const std::function<void()>* body = nullptr;
    int current = 0;
    unsigned random = 1;

    static void begin();

    // Whether all threads came to an end; false: those that did not wait for each other.
    bool run(int count, const std::function<void()>& given) {
        body = &given;
        for (int i = 0; i < count; ++i) threads[i].started = threads[i].ended = false;
        // A warp is kept back until the others wait for it, or for long, and then another: who is first is not relied on.
        int slow = count > 32 ? random % (count / 32) : -1;
        for (int left = count, idle = 0, rounds = 1; left; ++rounds) {
            if (slow >= 0 && (idle >= count - 32 || rounds % 256 == 0)) slow = (slow + 1) % (count / 32);
            // In another order each time, so that none of them is relied on.
            unsigned start = random = random * 1664525u + 1013904223u, step = random >> 16 & 1 ? 1 : count - 1;
            for (int turn = 0; turn < count; ++turn) {
                int i = (start % count + turn * step) % count;
                Thread& one = threads[i];
                if (one.ended) continue;
                if (i / 32 == slow) {
                    ++idle;
                    continue;
                }
                current = i, threadIdx = {(unsigned)i, 0, 0}, moved = false;
                if (!_setjmp(main)) {
                    if (one.started) _longjmp(one.left, 1);
                    one.started = true;
                    getcontext(&one.entry);
                    one.entry.uc_stack.ss_sp = one.stack.get(), one.entry.uc_stack.ss_size = STACK_BYTES;
                    one.entry.uc_link = nullptr;
                    makecontext(&one.entry, begin, 0);
                    setcontext(&one.entry);
                }
                left -= one.ended;
                idle = moved ? 0 : idle + 1;
                if (idle > 4 * count) return false;
            }
        }
        return true;
    }

    // Let the others go on. Whoever gets by what it waited for says so in `moved`.
    void yield() {
        if (!_setjmp(threads[current].left)) _longjmp(main, 1);
    }
    bool moved = false;

    template <typename Condition>
    void wait(Condition condition) {
        while (!condition()) yield();
        moved = true;
    }
};
inline Turns turns;
inline void Turns::begin() {
    turns.moved = true;
    (*turns.body)();
    turns.threads[turns.current].ended = turns.moved = true;
    _longjmp(turns.main, 1);
}

// A place where `count` threads meet; each brings whether something holds.
struct Meeting {
    int arrived = 0;
    unsigned long long turn = 0;
    bool some[2] = {};

    unsigned long long arrive(int count, bool something = false) {
        unsigned long long own = turn;
        some[own & 1] |= something;
        if (++arrived == count) {
            arrived = 0, ++turn;
            some[turn & 1] = false;
        }
        return own;
    }
    bool meet(int count, bool something = false) {
        unsigned long long own = arrive(count, something);
        turns.wait([&] { return turn != own; });
        return some[own & 1];
    }
};

// What the lanes of a warp show each other.
constexpr int WORDS_SHOWN = 8;
struct Warp {
    Meeting meeting;
    uint32_t shown[2][32][WORDS_SHOWN];
};
inline Warp warps[MOST_THREADS / 32];
inline Meeting block_meeting, named[16];

inline int own_lane() { return threadIdx.x % 32; }

// All lanes' words; they stay until the warp has met twice more.
template <typename T>
const uint32_t (*show(const T& words))[WORDS_SHOWN] {
    static_assert(sizeof(T) <= 4 * WORDS_SHOWN);
    Warp& warp = warps[threadIdx.x / 32];
    auto& shown = warp.shown[warp.meeting.turn & 1];
    std::memcpy(shown[own_lane()], &words, sizeof(T));
    warp.meeting.meet(32);
    return shown;
}
template <typename T>
T as(const uint32_t* words) {
    T x;
    std::memcpy(&x, words, sizeof(T));
    return x;
}

template <typename T> T __shfl_sync(unsigned, T x, int lane) { return as<T>(show(x)[lane & 31]); }
template <typename T> T __shfl_up_sync(unsigned, T x, int distance) {
    return as<T>(show(x)[own_lane() < distance ? own_lane() : own_lane() - distance]);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int distance) { return as<T>(show(x)[own_lane() ^ distance]); }
template <typename Combine>
unsigned reduce(unsigned x, Combine combine) {
    auto shown = show(x);
    unsigned all = shown[0][0];
    for (int i = 1; i < 32; ++i) all = combine(all, shown[i][0]);
    return all;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) { return reduce(x, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
inline unsigned __reduce_add_sync(unsigned, unsigned x) { return reduce(x, [](unsigned a, unsigned b) { return a + b; }); }
inline unsigned __reduce_and_sync(unsigned, unsigned x) { return reduce(x, [](unsigned a, unsigned b) { return a & b; }); }
inline unsigned __reduce_or_sync(unsigned, unsigned x) { return reduce(x, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __ballot_sync(unsigned, bool x) {
    auto shown = show((uint32_t)x);
    unsigned set = 0;
    for (int i = 0; i < 32; ++i) set |= shown[i][0] << i;
    return set;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x); }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
inline void __syncwarp() { show(0u); }
inline bool __syncthreads_or(bool x) { return block_meeting.meet(blockDim.x, x); }
inline void __syncthreads() { block_meeting.meet(blockDim.x); }

// No other thread runs meanwhile.
template <typename T, typename U> T exchange(T* at, U value) { T before = *at; *at = (T)value; return before; }
template <typename T, typename U> T atomicAdd(T* at, U x) { return exchange(at, *at + x); }
template <typename T, typename U> T atomicOr(T* at, U x) { return exchange(at, *at | x); }
template <typename T, typename U> T atomicAnd(T* at, U x) { return exchange(at, *at & x); }
template <typename T, typename U, typename V> T atomicCAS(T* at, U expected, V x) { return exchange(at, *at == expected ? x : *at); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T> T __ldg(const T* at) { return *at; }
inline float __int_as_float(int x) { return as<float>((uint32_t*)&x); }
inline int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }
inline unsigned __float_as_uint(float x) { return (unsigned)__float_as_int(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }

void forget_copies();  // of an earlier block

// What a launch came to.
enum : int {
    DONE,
    WAITS,     // threads wait for each other
    EXCEEDS,   // shared memory beyond the launch's was written to
    CONFLICTS  // the rows of a matrix are not in all banks, or not at multiples of 16 bytes
};
inline bool conflicts;

// Launch a kernel whose arguments are given by their addresses, as the driver takes them.
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(std::remove_reference_t<A>*)args[I]...);
}
template <typename... A>
int launch(void (*kernel)(A...), void** args, Three grid, Three block, unsigned shared_bytes) {
    gridDim = grid, blockDim = block, conflicts = false;
    const std::function<void()> body = [&] { call(kernel, args, std::index_sequence_for<A...>()); };
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                std::memset(shared_memory, 0xff, sizeof(shared_memory));
                block_meeting = {};
                for (Meeting& one : named) one = {};
                for (Warp& one : warps) one.meeting = {};
                forget_copies();
                if (!turns.run(block.x, body)) return WAITS;
                for (unsigned i = shared_bytes; i < sizeof(shared_memory); ++i)
                    if (shared_memory[i] != 0xff) return EXCEEDS;
            }
    return conflicts ? CONFLICTS : DONE;
}
