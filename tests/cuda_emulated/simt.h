// Runs a CUDA kernel's source on the CPU, for tests without a GPU: a block is an operating-system thread, a CUDA thread a fiber of it. Shared memory is thread-local
// memory of the block, so that `static thread_local` stands for __shared__, and another block's copy lies at the same offset of its own thread-local memory.
// Copies by cp.async are done when they are asked for, or (LATE) not before a wait demands them: both ways must give the same.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#undef __global__
#undef __device__
#undef __forceinline__
#undef __shared__
#undef __launch_bounds__
#undef __cluster_dims__
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __cluster_dims__(...)

namespace simt {

struct Barrier {  // of fibers of one block: a warp's or the block's
    int arrived = 0, turn = 0;
};

struct Copy {
    void* to;
    const void* from;
};

constexpr size_t STACK = 96 << 10;

struct Fiber {
    ucontext_t context;  // for the first switch; the others go by jumps, which need no system call
    jmp_buf here;
    bool started = false;
    std::unique_ptr<char[]> stack{new char[STACK]};  // left as it is: clearing it would cost more than the kernels
    uint3 thread{};
    bool done = false;
    std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

struct Cluster {  // barrier of all threads of a cluster that have not exited
    std::mutex mutex;
    int expected, arrived = 0, phase = 0;
    std::vector<char*> bases;  // each block's thread-local memory
    std::atomic<int> ready{0};
    void check() {
        if (arrived == expected) arrived = 0, phase++;
    }
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Barrier> warps, groups{16};  // groups: the barriers by number
    std::vector<uint64_t> slots;  // a value a thread, for shuffles
    std::vector<char> dynamic;
    std::function<void()> kernel;
    Barrier all;
    Cluster* cluster;
    int rank, alive, counter = 0, next_count = 0;
    dim3 grid, size;
    uint3 at;
    jmp_buf back;
    int current = 0;
};

inline thread_local Block* block;
inline thread_local char marker;  // where this block's thread-local memory is
inline thread_local std::vector<int> phase_of;  // by thread: the cluster phase it arrived in
inline bool late = false;

inline Fiber& self() { return *block->fibers[block->current]; }
inline void yield() {
    if (_setjmp(self().here) == 0) _longjmp(block->back, 1);
}
inline int lane() { return block->current % 32; }
inline int warp_size() { return std::min<int>(32, (int)block->fibers.size() - block->current / 32 * 32); }

inline void wait(Barrier& barrier, int count) {
    const int turn = barrier.turn;
    if (++barrier.arrived >= count) barrier.arrived = 0, barrier.turn++;
    while (barrier.turn == turn) {
        yield();
        if (&barrier == &block->all && barrier.turn == turn && barrier.arrived >= block->alive) barrier.arrived = 0, barrier.turn++;  // others have exited
    }
}

inline void sync_warp() { wait(block->warps[block->current / 32], warp_size()); }
inline void sync_group(int group) { wait(block->groups[group + 1], 256); }
inline void sync_block() { wait(block->all, block->alive); }

template <typename T, typename Use>
auto exchange(T value, Use use) {  // every lane's value is seen by all lanes of the warp
    static_assert(sizeof(T) <= 8);
    const int first = block->current / 32 * 32;
    memcpy(&block->slots[block->current], &value, sizeof(T));
    sync_warp();
    auto result = use([&](int of) {
        T seen;
        memcpy(&seen, &block->slots[first + of % warp_size()], sizeof(T));
        return seen;
    });
    sync_warp();
    return result;
}

inline void arrive() {
    std::lock_guard<std::mutex> lock(block->cluster->mutex);
    phase_of[block->current] = block->cluster->phase;
    block->cluster->arrived++;
    block->cluster->check();
}
inline void wait_cluster() {
    while (true) {
        {
            std::lock_guard<std::mutex> lock(block->cluster->mutex);
            if (block->cluster->phase > phase_of[block->current]) break;
        }
        yield();
    }
    phase_of[block->current] = -1;
}
inline void exit_cluster() {
    std::lock_guard<std::mutex> lock(block->cluster->mutex);
    if (phase_of[block->current] == block->cluster->phase) block->cluster->arrived--;
    block->cluster->expected--;
    if (block->cluster->expected) block->cluster->check();
}

inline void do_copies(std::vector<Copy>& copies) {
    for (const Copy& copy : copies) memcpy(copy.to, copy.from, 16);
    copies.clear();
}
inline void copy_async(void* to, const void* from) {
    if (late) self().groups.back().push_back({to, from});
    else memcpy(to, from, 16);
}
inline void commit() { self().groups.emplace_back(); }
inline void wait_groups(int left) {  // all but the newest `left` committed groups
    auto& groups = self().groups;
    while ((int)groups.size() - 1 > left) {
        do_copies(groups.front());
        groups.erase(groups.begin());
    }
}
inline void wait_all() {
    for (auto& group : self().groups) do_copies(group);
    self().groups.assign(1, {});
}

inline void entry() {
    block->kernel();
    exit_cluster();
    self().done = true;
    block->alive--;
    while (true) yield();
}

inline void run_block(Block& b) {
    block = &b;
    const int threads = (int)b.size.x;
    b.alive = threads;
    b.warps.resize((threads + 31) / 32);
    b.slots.resize(threads);
    phase_of.assign(threads, -1);
    b.cluster->bases[b.rank] = &marker;
    b.cluster->ready++;
    while (b.cluster->ready < (int)b.cluster->bases.size()) std::this_thread::yield();
    for (int i = 0; i < threads; i++) {
        b.fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *b.fibers.back();
        fiber.thread = {(unsigned)i, 0, 0};
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, STACK};
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, (void (*)())entry, 0);
    }
    static thread_local int64_t round;  // not in a register, which a jump back would reset
    for (round = 0; b.alive; round++) {
        if (round > 4000000) {
            fprintf(stderr, "a barrier that nobody opens\n");
            abort();
        }
        for (b.current = 0; b.current < threads; b.current++)
            if (!self().done && _setjmp(b.back) == 0) {
                if (self().started) _longjmp(self().here, 1);
                self().started = true;
                setcontext(&self().context);
            }
        if (b.cluster->bases.size() > 1) std::this_thread::yield();
    }
    b.fibers.clear();
}

// Cluster by cluster, the blocks of one side by side.
inline void launch(dim3 grid, int threads, int cluster, size_t dynamic_bytes, std::function<void()> kernel) {
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned first = 0; first < grid.x; first += cluster) {
            Cluster together;
            together.expected = cluster * threads;
            together.bases.resize(cluster);
            std::vector<std::unique_ptr<Block>> blocks;
            std::vector<std::thread> workers;
            for (int rank = 0; rank < cluster; rank++) {
                blocks.push_back(std::make_unique<Block>());
                Block& b = *blocks.back();
                b.cluster = &together, b.rank = rank, b.grid = grid, b.size = dim3(threads), b.at = {first + rank, y, 0}, b.kernel = kernel;
                b.dynamic.assign(dynamic_bytes + 64, (char)0xEE);
            }
            for (auto& b : blocks) workers.emplace_back(run_block, std::ref(*b));
            for (auto& worker : workers) worker.join();
        }
}

inline char* dynamic_shared() { return (char*)(((uintptr_t)block->dynamic.data() + 63) / 64 * 64); }

}  // namespace simt

#define threadIdx (simt::self().thread)
#define blockIdx (simt::block->at)
#define gridDim (simt::block->grid)
#define blockDim (simt::block->size)

inline void __syncthreads() { simt::sync_block(); }
inline void __syncwarp() { simt::sync_warp(); }
inline int __syncthreads_count(int yes) {
    simt::sync_block();
    simt::block->next_count += yes != 0;
    simt::sync_block();
    const int count = simt::block->next_count;
    simt::sync_block();
    simt::block->next_count = 0;
    simt::sync_block();
    return count;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int step) {
    return simt::exchange(value, [&](auto of) { return of(simt::lane() ^ step); });
}
inline unsigned __ballot_sync(unsigned, bool yes) {
    return simt::exchange((int)yes, [&](auto of) {
        unsigned found = 0;
        for (int i = 0; i < simt::warp_size(); i++) found |= (unsigned)of(i) << i;
        return found;
    });
}
inline bool __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
template <typename T>
T reduce_lanes(T value, bool largest) {
    return simt::exchange(value, [&](auto of) {
        T best = of(0);
        for (int i = 1; i < simt::warp_size(); i++) best = largest ? std::max(best, of(i)) : std::min(best, of(i));
        return best;
    });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t x) { return reduce_lanes(x, true); }
inline uint32_t __reduce_min_sync(unsigned, uint32_t x) { return reduce_lanes(x, false); }
inline int __reduce_min_sync(unsigned, int x) { return reduce_lanes(x, false); }
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    return simt::exchange(value, [&](auto of) { return of(from); });
}
inline unsigned __match_any_sync(unsigned, int value) {
    return simt::exchange(value, [&](auto of) {
        unsigned found = 0;
        for (int i = 0; i < simt::warp_size(); i++) found |= (unsigned)(of(i) == value) << i;
        return found;
    });
}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
template <typename T>
T atomicMin(T* at, T x) { return std::exchange(*at, std::min(*at, x)); }
template <typename T>
T atomicAdd(T* at, T x) { return std::exchange(*at, *at + x); }

template <typename T>
T load_once(const T* p) { return *p; }
#undef __ldg
#define __ldg load_once
#define __ldcs load_once
template <typename T, typename Value>
void __stcs(T* p, const Value& x) { *p = x; }
inline float bits_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline uint32_t float_bits(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
#define __uint_as_float bits_float
#define __float_as_uint float_bits
inline float __fdiv_rn(float a, float b) { return a / b; }
#define __log2f(x) log2f(x)
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() {}

// pairs of bf16 in 32 bits, as the device's __hmax2: a NaN loses, or with _nan wins
inline __nv_bfloat162 pair_max(__nv_bfloat162 a, __nv_bfloat162 b, bool nan_wins) {
    auto one = [&](__nv_bfloat16 x, __nv_bfloat16 y) {
        const float p = __bfloat162float(x), q = __bfloat162float(y);
        if (nan_wins && (isnan(p) || isnan(q))) return __float2bfloat16(NAN);
        return isnan(p) ? y : isnan(q) ? x : p > q ? x : y;
    };
    return __nv_bfloat162(one(a.x, b.x), one(a.y, b.y));
}
#define __hmax2(a, b) pair_max(a, b, false)
#define __hmax2_nan(a, b) pair_max(a, b, true)

namespace cooperative_groups {
struct cluster_group {
    void sync() const { simt::arrive(), simt::wait_cluster(); }
    unsigned block_rank() const { return simt::block->rank; }
    template <typename T>
    T* map_shared_rank(T* p, int rank) const {
        return (T*)((char*)p - &simt::marker + simt::block->cluster->bases[rank]);
    }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
