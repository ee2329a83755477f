// Op 3: the k largest of a row (k <= 32) with log-probabilities, mapped to target ids. One launch: a cluster of blocks shares a row.
//
// Every logit becomes a key that sorts like (value, lower column first) and is unique, so ties need no care. k = 1 (a chain) is a reduction. For k > 1 a block
// finds a floor under its k best from the largest of groups of columns, only what reaches it is ranked, and every block ranks its k best among all blocks' and
// answers for them: draft_topk_filtered, and draft_topk for rows too wide for it. The work is short: what counts is latency, the number of instructions of a warp,
// and code size, since every instruction is fetched once. (A warp that takes its k best one after another was slower.)
#include <cooperative_groups.h>

#include "common.cuh"

namespace aerie {

constexpr int MAX_K = 32, TOPK_THREADS = 256, TOPK_WARPS = TOPK_THREADS / 32;  // threads of draft_best
constexpr int WIDE_CLUSTER = 8;       // blocks a row of the kernels for any width
constexpr int HELD_COLUMNS = 32768;  // widest row of the other two, which hold it in registers

__device__ __forceinline__ uint32_t order_of(float value) {  // never 0; -0 and 0 tie; NaN is above all, as in torch.topk
    const uint32_t bits = __float_as_uint(value + 0.f);
    return value != value ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t order) { return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order); }

__device__ __forceinline__ uint64_t key_of(uint32_t order, int column) { return (uint64_t)order << 32 | (uint32_t)~column; }

__device__ __forceinline__ float one(const float* p) { return *p; }

// The 16 bytes at p: 8 bf16 or 4 floats.
__device__ __forceinline__ void unpack(const uint4& x, const __nv_bfloat16*, float out[8]) {
    out[0] = low(x.x), out[1] = high(x.x), out[2] = low(x.y), out[3] = high(x.y), out[4] = low(x.z), out[5] = high(x.z), out[6] = low(x.w), out[7] = high(x.w);
}
__device__ __forceinline__ void unpack(const uint4& x, const float*, float out[4]) {
    out[0] = __uint_as_float(x.x), out[1] = __uint_as_float(x.y), out[2] = __uint_as_float(x.z), out[3] = __uint_as_float(x.w);
}

// The warp's largest key.
__device__ __forceinline__ uint64_t largest_key(uint64_t key) {
    const uint32_t order = (uint32_t)(key >> 32), largest = __reduce_max_sync(~0u, order);
    return (uint64_t)largest << 32 | __reduce_max_sync(~0u, order == largest ? (uint32_t)key : 0u);
}

// Sums of exp relative to a largest value each, of WIDTH lanes, brought together.
struct Total {
    float top, sum;
};
template <int WIDTH>
__device__ __forceinline__ Total together(float top, float sum) {
    float all = top;
    if constexpr (WIDTH == 32) all = value_of(__reduce_max_sync(~0u, order_of(top)));
    else
#pragma unroll
        for (int step = WIDTH / 2; step; step >>= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
    sum *= exp2_fast((top - all) * LOG2E);
#pragma unroll
    for (int step = WIDTH / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    return {all, sum};
}

// The same of a block, from a value a warp in shared memory; all lanes of the asking warp get it.
template <int WARPS>
__device__ __forceinline__ Total block_total(const float* part_max, const float* part_sum, int lane) {
    return together<32>(lane < WARPS ? part_max[lane] : -BIG, lane < WARPS ? part_sum[lane] : 0.f);
}

// A row's columns: vectors of 16 bytes, and the few before and behind them.
template <typename T>
struct Columns {
    static constexpr int EACH = 16 / sizeof(T);  // columns of a vector
    const T* row;
    int head, vectors, tail;  // columns before the vectors, vectors, the first column behind them
    const uint4* body;
};

template <typename T>
__device__ __forceinline__ Columns<T> columns_of(const T* row, int v) {
    constexpr int EACH = Columns<T>::EACH;
    const int head = min(v, (int)((16 - (uintptr_t)row % 16) % 16 / sizeof(T))), vectors = (v - head) / EACH;
    return {row, head, vectors, head + vectors * EACH, reinterpret_cast<const uint4*>(row + head)};
}

// The columns of thread `where` of STEP, asked for at once; -inf where there are none.
template <int STEP, typename T, int VECTORS>
__device__ __forceinline__ void hold(uint4 (&held)[VECTORS], const Columns<T>& columns, int where) {
    constexpr uint32_t NONE = sizeof(T) == 2 ? NEG_INF2 : 0xFF800000u;
#pragma unroll
    for (int u = 0; u < VECTORS; u++) held[u] = where + u * STEP < columns.vectors ? __ldg(columns.body + where + u * STEP) : uint4{NONE, NONE, NONE, NONE};
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// The largest of a thread's columns as order_of() says it, for bf16 two columns an instruction.
template <int VECTORS>
__device__ __forceinline__ uint32_t largest_held(const uint4 (&held)[VECTORS], const __nv_bfloat16*) {
    __nv_bfloat162 most = *reinterpret_cast<const __nv_bfloat162*>(&held[0].x);
#pragma unroll
    for (int u = 0; u < VECTORS; u++) {
        const uint32_t pairs[4] = {held[u].x, held[u].y, held[u].z, held[u].w};
#pragma unroll
        for (int j = 0; j < 4; j++) most = __hmax2_nan(most, *reinterpret_cast<const __nv_bfloat162*>(&pairs[j]));
    }
    return max(order_of(__bfloat162float(most.x)), order_of(__bfloat162float(most.y)));
}
template <int VECTORS>
__device__ __forceinline__ uint32_t largest_held(const uint4 (&held)[VECTORS], const float*) {
    float most = -INFINITY;
#pragma unroll
    for (int u = 0; u < VECTORS; u++)
        most = max_or_nan(most, max_or_nan(max_or_nan(__uint_as_float(held[u].x), __uint_as_float(held[u].y)), max_or_nan(__uint_as_float(held[u].z), __uint_as_float(held[u].w))));
    return order_of(most);
}

// What a served drafter wants beside: probabilities instead of their logarithms, its positions moved on, the best token in its list of drafted tokens.
struct TopkExtras {
    bool probabilities;
    int64_t* positions;  // [n], null: not wanted; each becomes one more
    int64_t* tokens;     // [n] at this stride, null: not wanted
    int64_t tokens_stride;
};

// The answer `place` of a row's k.
__device__ __forceinline__ void answer(float* log_probs, int64_t* ids, const TopkExtras& extras, int64_t row, int k, int place, float log_prob, int64_t id) {
    log_probs[row * k + place] = extras.probabilities ? expf(log_prob) : log_prob;
    ids[row * k + place] = id;
    if (place == 0 && extras.tokens) extras.tokens[row * extras.tokens_stride] = id;
    if (place == 0 && extras.positions) extras.positions[row]++;
}

template <typename T>
__global__ void __cluster_dims__(WIDE_CLUSTER, 1, 1) __launch_bounds__(TOPK_THREADS) draft_best(const T* logits, int64_t stride, const int64_t* d2t, int v,
                                                                                           float* log_probs, int64_t* ids, TopkExtras extras) {
    wait_for_earlier();
    namespace cg = cooperative_groups;
    constexpr int EACH = Columns<T>::EACH;
    __shared__ uint64_t warp_best[TOPK_WARPS], best;
    __shared__ float part_max[TOPK_WARPS], part_sum[TOPK_WARPS], block_max, block_sum;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = (int)cluster.block_rank(), where = rank * TOPK_THREADS + tid;
    const int64_t row_at = blockIdx.x / WIDE_CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);

    // a thread's columns in ascending order: vectors `where`, `where` + all threads, ...; the few off 16 bytes go to the cluster's first threads
    auto each = [&](auto&& use) {
        if (where < columns.head) use(one(columns.row + where), where);
#pragma unroll 2
        for (int i = where; i < columns.vectors; i += TOPK_THREADS * WIDE_CLUSTER) {
            float x[EACH];
            unpack(__ldg(columns.body + i), columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) use(x[j], columns.head + i * EACH + j);
        }
        if (where < v - columns.tail) use(one(columns.row + columns.tail + where), columns.tail + where);
    };
    uint32_t order = 0;  // of my largest; 0: no columns
    int column = INT32_MAX;
    each([&](float value, int c) {
        const uint32_t o = order_of(value);
        if (o > order) order = o, column = c;
    });
    // the warp's part of the log-sum-exp, relative to its largest value
    const uint32_t largest = __reduce_max_sync(~0u, order);
    const float top = largest ? finite_shift(value_of(largest)) : -BIG;
    float sum = 0.f;
    each([&](float value, int) { sum += exp2_fast((value - top) * LOG2E); });
    sum = warp_sum(sum);
    const uint32_t first = __reduce_min_sync(~0u, order == largest ? (uint32_t)column : ~0u);  // the lowest column of those that have it
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum, warp_best[tid / 32] = largest ? key_of(largest, (int)first) : 0;
    __syncthreads();
    if (tid < 32) {  // of the block: log-sum-exp and best
        const Total block = block_total<TOPK_WARPS>(part_max, part_sum, tid);
        const uint64_t key = largest_key(tid < TOPK_WARPS ? warp_best[tid] : 0);
        if (tid == 0) block_max = block.top, block_sum = block.sum, best = key;
    }
    cluster.sync();
    if (rank == 0 && tid < 32) {
        const uint64_t theirs = lane < WIDE_CLUSTER ? *cluster.map_shared_rank(&best, lane) : 0;
        const float m = lane < WIDE_CLUSTER ? *cluster.map_shared_rank(&block_max, lane) : -BIG;
        const float s = lane < WIDE_CLUSTER ? *cluster.map_shared_rank(&block_sum, lane) : 0.f;
        const uint64_t key = largest_key(theirs);
        const Total all = together<WIDE_CLUSTER>(m, s);
        if (lane == 0) {
            const int c = (int)~(uint32_t)key;
            answer(log_probs, ids, extras, row_at, 1, 0, value_of((uint32_t)(key >> 32)) - (all.top + logf(all.sum)), c + (d2t ? __ldg(d2t + c) : 0));
        }
    }
    cluster.sync();  // a block's shared memory must outlive its readers
}

// What a thread of the two kernels below holds of its row: its columns in registers, with the few off 16 bytes that go to the cluster's first threads.
template <typename T, int THREADS, int CLUSTER>
struct Held {
    static constexpr int EACH = Columns<T>::EACH, VECTORS = HELD_COLUMNS / (THREADS * CLUSTER * EACH);
    static_assert(VECTORS * EACH <= 32);
    Columns<T> columns;
    int where;
    uint4 held[VECTORS];
    bool in_head, in_tail;
    float before, behind;  // the columns off 16 bytes

    __device__ __forceinline__ Held(const T* row, int v, int number) : columns(columns_of(row, v)), where(number) {
        hold<THREADS * CLUSTER>(held, columns, where);
        in_head = where < columns.head, in_tail = where < v - columns.tail;
        before = in_head ? one(row + where) : -INFINITY, behind = in_tail ? one(row + columns.tail + where) : -INFINITY;
    }

    __device__ __forceinline__ uint32_t largest() const {  // 0: no columns
        uint32_t order = where < columns.vectors ? largest_held(held, columns.row) : 0;
        if (in_head) order = max(order, order_of(before));
        return in_tail ? max(order, order_of(behind)) : order;
    }

    __device__ __forceinline__ float sum(float top) const {  // of exp(value - top); -inf adds nothing
        float total = exp2_fast((before - top) * LOG2E) + exp2_fast((behind - top) * LOG2E);
#pragma unroll
        for (int u = 0; u < VECTORS; u++) {
            float x[EACH];
            unpack(held[u], columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) total += exp2_fast((x[j] - top) * LOG2E);
        }
        return total;
    }

    __device__ __forceinline__ int column(int i) const { return columns.head + (where + i / EACH * THREADS * CLUSTER) * EACH + i % EACH; }  // the i-th of the vectors

    __device__ __forceinline__ uint32_t lowest_of(uint32_t order) const {  // lowest column that has it
        int found = in_tail && order_of(behind) == order ? columns.tail + where : INT32_MAX;
#pragma unroll
        for (int u = VECTORS - 1; u >= 0; u--) {
            float x[EACH];
            unpack(held[u], columns.row, x);
            if (column(u * EACH) < columns.tail)
#pragma unroll
                for (int j = EACH - 1; j >= 0; j--)
                    if (order_of(x[j]) == order) found = column(u * EACH + j);
        }
        return in_head && order_of(before) == order ? where : found;
    }

    // use(value, column) of the columns not below `least`: those are few, so what they hold is read again
    template <typename Use>
    __device__ __forceinline__ void reaching(float least, Use use) const {
        const auto reaches = [&](float x) { return !(x < least); };  // NaN does
        uint32_t which = 0;  // a bit a column
#pragma unroll
        for (int u = 0; u < VECTORS; u++) {
            float x[EACH];
            unpack(held[u], columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) which |= reaches(x[j]) ? 1u << (u * EACH + j) : 0u;
        }
        for (; which; which &= which - 1) {
            const int at = column(__ffs(which) - 1);
            if (at < columns.tail) use(one(columns.row + at), at);
        }
        if (in_head && reaches(before)) use(before, where);
        if (in_tail && reaches(behind)) use(behind, columns.tail + where);
    }

    // use(value, column) of all columns, read again from the cache: a loop, because it is seldom needed
    template <typename Use>
    __device__ __forceinline__ void each(Use use) const {
        if (in_head) use(before, where);
#pragma unroll 1
        for (int i = where; i < columns.vectors; i += THREADS * CLUSTER) {
            float x[EACH];
            unpack(__ldg(columns.body + i), columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) use(x[j], columns.head + i * EACH + j);
        }
        if (in_tail) use(behind, columns.tail + where);
    }
};

// A cluster's barrier in two parts, so that a block works on while it waits; of one block alone a block's.
template <int CLUSTER>
__device__ __forceinline__ void arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
template <int CLUSTER>
__device__ __forceinline__ void wait() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else __syncthreads();
}

__device__ __forceinline__ int64_t id_of(const int64_t* d2t, uint64_t key) {
    const int column = key ? (int)~(uint32_t)key : 0;
    return key ? column + (d2t ? __ldg(d2t + column) : 0) : 0;
}

// k = 1 with the shortest chain of waits: a thread's columns are asked for at once and stay in registers, each block looks its best column's id up by itself and
// pushes what it has into block 0, which alone waits for the others. One trip to memory, one more for the id, one cluster barrier on the way.
template <typename T, int THREADS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) draft_best_push(const T* logits, int64_t stride, const int64_t* d2t, int v,
                                                                                           float* log_probs, int64_t* ids, TopkExtras extras) {
    namespace cg = cooperative_groups;
    constexpr int WARPS = THREADS / 32;
    struct Part {
        uint64_t key;
        int64_t id;
        float top, sum;
    };
    __shared__ Part parts[CLUSTER];  // of block 0: what each block found
    __shared__ uint64_t warp_best[WARPS];
    __shared__ float part_max[WARPS], part_sum[WARPS];
    arrive<CLUSTER>();  // this block has started: its shared memory may be written
    cudaGridDependencySynchronize();
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = CLUSTER > 1 ? (int)cluster.block_rank() : 0;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const Held<T, THREADS, CLUSTER> mine(logits + row_at * stride, v, rank * THREADS + tid);
    cudaTriggerProgrammaticLaunchCompletion();  // the next kernel's blocks may come: not before, where two blocks fit on a multiprocessor they would take places of this one's
    const uint32_t order = mine.largest(), largest = __reduce_max_sync(~0u, order);
    const float top = largest ? finite_shift(value_of(largest)) : -BIG, sum = warp_sum(mine.sum(top));
    const uint32_t first = __reduce_min_sync(~0u, order == largest ? mine.lowest_of(largest) : ~0u);
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum, warp_best[tid / 32] = largest ? key_of(largest, (int)first) : 0;
    wait<CLUSTER>();  // all blocks have started
    if (CLUSTER > 1) __syncthreads();
    if (tid < 32) {
        const uint64_t key = largest_key(lane < WARPS ? warp_best[lane] : 0);
        const int64_t id = lane == 0 ? id_of(d2t, key) : 0;  // on its way while the sums come together
        const Total block = block_total<WARPS>(part_max, part_sum, lane);
        if (CLUSTER == 1) {
            if (lane == 0) answer(log_probs, ids, extras, row_at, 1, 0, value_of((uint32_t)(key >> 32)) - (block.top + logf(block.sum)), id);
        } else if (lane == 0) *cluster.map_shared_rank(&parts[rank], 0) = {key, id, block.top, block.sum};
        __syncwarp();
    }
    arrive<CLUSTER>();
    if (CLUSTER == 1 || rank != 0 || tid >= 32) return;  // nobody reads this block's memory; block 0 lives until its first warp is done
    wait<CLUSTER>();
    const Part part = lane < CLUSTER ? parts[lane] : Part{0, 0, -BIG, 0.f};
    const uint64_t key = largest_key(part.key);
    const Total all = together<CLUSTER>(part.top, part.sum);
    if (lane < CLUSTER && part.key == key)  // keys are unique: one lane
        answer(log_probs, ids, extras, row_at, 1, 0, value_of((uint32_t)(key >> 32)) - (all.top + logf(all.sum)), part.id);
}

// k > 1, wide rows too. A thread keeps its largest key; the k-th largest of a block's thread maxima is a floor under the block's k best, so only the k threads
// above it look at their columns again and hand in at most k * (columns a thread) keys.
template <typename T, int THREADS>
__global__ void __cluster_dims__(WIDE_CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) draft_topk(const T* logits, int64_t stride, const int64_t* d2t, int v, int k,
                                                                                      float* log_probs, int64_t* ids, TopkExtras extras) {
    wait_for_earlier();
    namespace cg = cooperative_groups;
    constexpr int PER_THREAD = 32, EACH = Columns<T>::EACH;  // columns of a thread at most, columns in 16 bytes
    __shared__ uint64_t maxima[THREADS], candidates[MAX_K * PER_THREAD], best[MAX_K], merged[WIDE_CLUSTER * MAX_K];
    __shared__ float part_max[THREADS / 32], part_sum[THREADS / 32], block_max, block_lse_sum;
    __shared__ int count;
    __shared__ uint64_t floor_key;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, rank = (int)cluster.block_rank(), where = rank * THREADS + tid;
    const int64_t row_at = blockIdx.x / WIDE_CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);
    if (tid == 0) count = 0;
    if (tid < MAX_K) best[tid] = 0;

    // a thread's columns: vectors `where`, `where` + all threads, ...; the few off 16 bytes go to the cluster's first threads
    auto each = [&](auto&& use) {
        for (int i = where; i < columns.vectors; i += THREADS * WIDE_CLUSTER) {
            float x[EACH];
            unpack(__ldg(columns.body + i), columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) use(x[j], columns.head + i * EACH + j);
        }
        if (where < columns.head) use(one(columns.row + where), where);
        if (where < v - columns.tail) use(one(columns.row + columns.tail + where), columns.tail + where);
    };
    uint64_t mine = 0;
    float top = -BIG, sum = 0.f;
    each([&](float value, int column) {
        mine = max(mine, key_of(order_of(value), column));
        const float shift = fmaxf(top, finite_shift(value));
        sum = sum * exp2_fast((top - shift) * LOG2E) + exp2_fast((value - shift) * LOG2E);
        top = shift;
    });
    maxima[tid] = mine;
    const float warp_top = warp_max(top);
    sum = warp_sum(sum * exp2_fast((top - warp_top) * LOG2E));
    if (tid % 32 == 0) part_max[tid / 32] = warp_top, part_sum[tid / 32] = sum;
    __syncthreads();
    if (tid < 32) {  // log-sum-exp of the block
        const Total block = block_total<THREADS / 32>(part_max, part_sum, tid);
        if (tid == 0) block_max = block.top, block_lse_sum = block.sum;
    }
    int ahead = 0;
#pragma unroll 8
    for (int i = 0; i < THREADS; i += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&maxima[i]);
        ahead += (two.x > mine) + (two.y > mine);
    }
    if (mine && ahead < k)  // among the k best maxima; a thread without columns has key 0
        each([&](float value, int column) {
            const uint64_t key = key_of(order_of(value), column);
            candidates[atomicAdd(&count, 1)] = key;
        });
    if (mine && ahead == k - 1) floor_key = mine;
    const int with_columns = __syncthreads_count(mine != 0);
    const uint64_t floor = with_columns >= k ? floor_key : 0;
    const int total = count;
    for (int i = tid; i < total; i += THREADS) {
        const uint64_t key = candidates[i];
        if (key < floor) continue;
        int before = 0;
        for (int j = 0; j < total; j++) before += candidates[j] > key;
        if (before < k) best[before] = key;
    }
    cluster.sync();
    if (rank == 0) {
        const int all = WIDE_CLUSTER * k;
        for (int i = tid; i < all; i += THREADS) merged[i] = cluster.map_shared_rank(best, i / k)[i % k];
        __shared__ float lse;
        if (tid < 32) {
            const float m = tid < WIDE_CLUSTER ? *cluster.map_shared_rank(&block_max, tid) : -BIG;
            const float s = tid < WIDE_CLUSTER ? *cluster.map_shared_rank(&block_lse_sum, tid) : 0.f;
            const Total row_total = together<WIDE_CLUSTER>(m, s);
            if (tid == 0) lse = row_total.top + logf(row_total.sum);
        }
        __syncthreads();
        for (int i = tid; i < all; i += THREADS) {
            const uint64_t key = merged[i];
            int before = 0;
            for (int j = 0; j < all; j++) before += merged[j] > key;
            if (key && before < k) {
                const int column = (int)~(uint32_t)key;
                answer(log_probs, ids, extras, row_at, k, before, value_of((uint32_t)(key >> 32)) - lse, column + (d2t ? d2t[column] : 0));
            }
        }
    }
    cluster.sync();  // a block's shared memory must outlive its readers
}

// k > 1 by a filter. The largest of each of 64 groups of threads is found, and the k-th largest of those is a floor that at least k columns of the block reach and
// few others do (9 of 4,000 on average at k = 8, 44 at k = 32). Those alone are ranked, several threads each, their ids asked for meanwhile, and the k best pushed
// into every block; then each block ranks its own among all. Two trips to memory, one cluster barrier on the way. Where too many reach the floor (ties, sorted rows)
// the block takes its largest k times.
template <typename T, int THREADS, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) draft_topk_filtered(const T* logits, int64_t stride, const int64_t* d2t, int v, int k,
                                                                                               float* log_probs, int64_t* ids, TopkExtras extras) {
    namespace cg = cooperative_groups;
    constexpr int WARPS = THREADS / 32, GROUPS = 64, GROUP = THREADS / GROUPS, SHARE = GROUPS / GROUP;  // a thread compares with SHARE groups
    constexpr int ANSWERING = THREADS / MAX_K;                                                          // threads that rank one of the block's k best
    static_assert(GROUP >= CLUSTER && GROUP <= 16 && ANSWERING <= 32);
    __shared__ uint64_t parts[CLUSTER * MAX_K];  // of every block: what each one found
    __shared__ float tops[CLUSTER], sums[CLUSTER], lse;
    __shared__ uint64_t candidates[THREADS], warp_best[WARPS];
    __shared__ __align__(16) uint32_t group_best[GROUPS];
    __shared__ float part_max[WARPS], part_sum[WARPS];
    __shared__ int count, ahead_of[MAX_K];
    __shared__ uint32_t floor_here;
    arrive<CLUSTER>();  // this block has started: its shared memory may be written
    cudaGridDependencySynchronize();
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = CLUSTER > 1 ? (int)cluster.block_rank() : 0, group = tid / GROUP, member = tid % GROUP;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const Held<T, THREADS, CLUSTER> mine(logits + row_at * stride, v, rank * THREADS + tid);
    cudaTriggerProgrammaticLaunchCompletion();  // as in draft_best_push
    if (tid == 0) count = 0;
    const uint32_t order = mine.largest();
    uint32_t best = order;  // of my group
#pragma unroll
    for (int step = 1; step < GROUP; step <<= 1) best = max(best, __shfl_xor_sync(~0u, best, step));
    if (member == 0) group_best[group] = best;
    __syncthreads();
    const uint32_t largest = __reduce_max_sync(~0u, best);
    const float top = largest ? finite_shift(value_of(largest)) : -BIG, sum = warp_sum(mine.sum(top));
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum;
    auto over_group = [&](int number) {
#pragma unroll
        for (int step = 1; step < GROUP; step <<= 1) number += __shfl_xor_sync(~0u, number, step);
        return number;
    };
    int ahead = 0;  // groups with a better one, or with the same and a lower number
#pragma unroll
    for (int j = member * SHARE, end = j + SHARE; j < end; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(&group_best[j]);
        ahead += (four.x > best || (four.x == best && j < group)) + (four.y > best || (four.y == best && j + 1 < group)) +
                 (four.z > best || (four.z == best && j + 2 < group)) + (four.w > best || (four.w == best && j + 3 < group));
    }
    if (over_group(ahead) == k - 1 && member == 0) floor_here = best;  // 0: fewer groups have columns
    wait<CLUSTER>();                                                   // all blocks have started
    if (CLUSTER > 1) __syncthreads();
    const uint32_t floor = floor_here;
    if (order && order >= floor)
        mine.reaching(value_of(floor), [&](float value, int column) {  // that of 0 is NaN, which all reach
            const int at = atomicAdd(&count, 1);
            if (at < THREADS) candidates[at] = key_of(order_of(value), column);
        });
    __syncwarp();
    if (tid < 32) {
        const Total block = block_total<WARPS>(part_max, part_sum, lane);
        if (lane < CLUSTER) *cluster.map_shared_rank(&tops[rank], lane) = block.top, *cluster.map_shared_rank(&sums[rank], lane) = block.sum;
        __syncwarp();
    }
    __syncthreads();
    auto push = [&](int to, int place, uint64_t key) { *cluster.map_shared_rank(&parts[rank * k + place], to) = key; };
    const int total = count;
    uint64_t found = 0;  // the one of the block's k best that I answer for
    int place = 0;
    int64_t id = 0;
    if (total <= GROUPS) {  // a group of threads each
        if (tid / 32 * (32 / GROUP) < max(total, k)) {  // other warps have none
            const uint64_t key = group < total ? candidates[group] : 0;
            int better = 0;
            for (int i = member; i < total; i += GROUP) better += candidates[i] > key;
            better = over_group(better);
            if (group < total && better < k) {
                if (member == 0) found = key, place = better, id = id_of(d2t, key);  // on its way while the blocks wait for one another
                if (member < CLUSTER) push(member, better, key);
            } else if (group >= total && group < k && member < CLUSTER) push(member, group, 0);
        }
    } else if (total <= THREADS) {
        const uint64_t key = tid < total ? candidates[tid] : 0;
        int better = 0;
#pragma unroll 4
        for (int i = 0; i < total; i++) better += candidates[i] > key;
        if (tid < total && better < k) {
            found = key, place = better, id = id_of(d2t, key);
            for (int to = 0; to < CLUSTER; to++) push(to, better, key);
        }
    } else {
        uint64_t last = 0;
#pragma unroll 1
        for (int turn = 0; turn < k; turn++) {
            uint64_t next = 0;
            mine.each([&](float value, int column) {
                const uint64_t key = key_of(order_of(value), column);
                if (turn == 0 || key < last) next = max(next, key);
            });
            next = largest_key(next);
            if (lane == 0) warp_best[tid / 32] = next;
            __syncthreads();
            last = largest_key(warp_best[lane % WARPS]);
            __syncthreads();
            if (tid == turn) found = last, place = turn, id = id_of(d2t, last);
            if (tid < CLUSTER) push(tid, turn, last);
        }
    }
    __syncwarp();
    arrive<CLUSTER>();
    wait<CLUSTER>();
    if (tid < 32) {
        const Total row = together<CLUSTER>(tops[lane % CLUSTER], sums[lane % CLUSTER]);
        if (lane == 0) lse = row.top + logf(row.sum);
    }
    if (tid / 32 * (32 / ANSWERING) < k) {
        const int mine_at = tid / ANSWERING;
        const uint64_t key = mine_at < k ? parts[rank * k + mine_at] : ~0ull;
        int better = 0;
#pragma unroll 4
        for (int i = tid % ANSWERING; i < CLUSTER * k; i += ANSWERING) better += parts[i] > key;
#pragma unroll
        for (int step = 1; step < ANSWERING; step <<= 1) better += __shfl_xor_sync(~0u, better, step);
        if (tid % ANSWERING == 0) ahead_of[mine_at] = better;
    }
    __syncthreads();
    if (found && ahead_of[place] < k) answer(log_probs, ids, extras, row_at, k, ahead_of[place], value_of((uint32_t)(found >> 32)) - lse, id);
}

template <typename T>
int launch_topk(const void* logits, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids, TopkExtras extras,
                cudaStream_t stream) {
    const T* in = static_cast<const T*>(logits);
    // by number: any width, or held in registers, which is the faster one
    const bool fits_held = v <= HELD_COLUMNS;
    const int variant = pick(k > 1 ? AERIE_TOPK_RANKED : AERIE_TOPK, fits_held ? 1 : 0, [&](int number) { return number == 0 || fits_held; });
    if (variant < 0) return cudaErrorInvalidValue;
    const auto single = [&](auto kernel, int threads, int cluster) { return launch(kernel, (unsigned)n * cluster, threads, 0, stream, in, stride, d2t, (int)v, log_probs, ids, extras); };
    const auto several = [&](auto kernel, int threads, int cluster) {
        return launch(kernel, (unsigned)n * cluster, threads, 0, stream, in, stride, d2t, (int)v, k, log_probs, ids, extras);
    };
    if (variant == 1) {  // as many blocks as there are multiprocessors, and many threads in a block: each warp has work of its own beside that of its columns
        const int64_t most = multiprocessors();
        if (k == 1) return n * 8 <= most ? single(draft_best_push<T, 256, 8>, 256, 8) : n * 2 <= most ? single(draft_best_push<T, 1024, 2>, 1024, 2) : single(draft_best_push<T, 1024, 1>, 1024, 1);
        if (n * 16 <= most) return several(draft_topk_filtered<T, 512, 8>, 512, 8);
        if (n * 8 <= most) return several(draft_topk_filtered<T, 512, 4>, 512, 4);
        return n * 2 <= most ? several(draft_topk_filtered<T, 1024, 2>, 1024, 2) : several(draft_topk_filtered<T, 1024, 1>, 1024, 1);
    }
    if (k == 1) return single(draft_best<T>, TOPK_THREADS, WIDE_CLUSTER);
    // at most 24 columns a thread in vectors and 2 beside them
    if (v <= WIDE_CLUSTER * 256 * 24) return several(draft_topk<T, 256>, 256, WIDE_CLUSTER);
    if (v <= WIDE_CLUSTER * 1024 * 24) return several(draft_topk<T, 1024>, 1024, WIDE_CLUSTER);
    return cudaErrorInvalidValue;
}

int prepare_topk() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)draft_best<__nv_bfloat16>, (const void*)draft_best<float>, (const void*)draft_topk<__nv_bfloat16, 256>,
                             (const void*)draft_topk<__nv_bfloat16, 1024>, (const void*)draft_topk<float, 256>, (const void*)draft_topk<float, 1024>,
                             (const void*)draft_best_push<__nv_bfloat16, 256, 8>, (const void*)draft_best_push<__nv_bfloat16, 1024, 2>, (const void*)draft_best_push<__nv_bfloat16, 1024, 1>,
                             (const void*)draft_best_push<float, 256, 8>, (const void*)draft_best_push<float, 1024, 2>, (const void*)draft_best_push<float, 1024, 1>,
                             (const void*)draft_topk_filtered<__nv_bfloat16, 512, 8>, (const void*)draft_topk_filtered<__nv_bfloat16, 512, 4>,
                             (const void*)draft_topk_filtered<__nv_bfloat16, 1024, 2>,
                             (const void*)draft_topk_filtered<__nv_bfloat16, 1024, 1>, (const void*)draft_topk_filtered<float, 512, 8>, (const void*)draft_topk_filtered<float, 512, 4>,
                             (const void*)draft_topk_filtered<float, 1024, 2>, (const void*)draft_topk_filtered<float, 1024, 1>};
    for (const void* kernel : kernels)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    return 0;
}

}  // namespace aerie

extern "C" int aerie_draft_topk(const void* logits, int float32, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids,
                                int probabilities, int64_t* positions, int64_t* tokens, int64_t tokens_stride, cudaStream_t stream) {
    using namespace aerie;
    const TopkExtras extras{probabilities != 0, positions, tokens, tokens_stride};
    if (n == 0) return 0;
    if (n > INT32_MAX / 8 || v > INT32_MAX - 8192 || k < 1 || k > MAX_K || k > v) return cudaErrorInvalidValue;
    return float32 ? launch_topk<float>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream)
                   : launch_topk<__nv_bfloat16>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream);
}
