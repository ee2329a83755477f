// Op 3: the k largest of a row (k <= 32) with log-probabilities, mapped to target ids. One launch: a cluster of blocks shares a row.
//
// Every logit becomes a key that sorts like (value, lower column first) and is unique, so ties need no care. k = 1 (a chain) is a reduction. For k > 1 a block
// finds a floor under its k best from the largest of groups of columns, only what reaches it is ranked, and block 0 ranks the blocks' k best: draft_topk_filtered,
// and draft_topk for rows too wide for it. The work is short: what counts is latency and code size, since every instruction is fetched once. (A warp that takes its
// k best one after another was slower.)
#include <cooperative_groups.h>

#include "common.cuh"

namespace aerie {

constexpr int MAX_K = 32, TOPK_THREADS = 256, TOPK_WARPS = TOPK_THREADS / 32;  // of both kernels for k = 1, and of the filter
constexpr int RANKED_CLUSTER = 8;  // blocks a row, for k > 1

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

// The largest key of each WIDTH lanes.
template <int WIDTH>
__device__ __forceinline__ uint64_t largest_key(uint64_t key) {
#pragma unroll
    for (int step = WIDTH / 2; step; step >>= 1) key = max(key, __shfl_xor_sync(~0u, key, step));
    return key;
}

// Sums of exp relative to a largest value each, a lane each, brought together over the warp.
struct Total {
    float top, sum;
};
__device__ __forceinline__ Total together(float top, float sum) {
    const float all = warp_max(top);
    return {all, warp_sum(sum * exp2_fast((top - all) * LOG2E))};
}

// The same of a block, from a value a warp in shared memory; all lanes of the asking warp get it.
template <int WARPS>
__device__ __forceinline__ Total block_total(const float* part_max, const float* part_sum, int lane) {
    return together(lane < WARPS ? part_max[lane] : -BIG, lane < WARPS ? part_sum[lane] : 0.f);
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

// 16 columns of thread `where` of STEP, asked for at once; -inf where there are none.
template <int STEP, typename T, int VECTORS>
__device__ __forceinline__ void hold(uint4 (&held)[VECTORS], const Columns<T>& columns, int where) {
    static_assert(VECTORS == sizeof(T));
    constexpr uint32_t NONE = sizeof(T) == 2 ? NEG_INF2 : 0xFF800000u;
#pragma unroll
    for (int u = 0; u < VECTORS; u++) held[u] = where + u * STEP < columns.vectors ? __ldg(columns.body + where + u * STEP) : uint4{NONE, NONE, NONE, NONE};
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

template <typename T, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(TOPK_THREADS) draft_best(const T* logits, int64_t stride, const int64_t* d2t, int v,
                                                                                           float* log_probs, int64_t* ids, TopkExtras extras) {
    wait_for_earlier();
    namespace cg = cooperative_groups;
    constexpr int EACH = Columns<T>::EACH;
    __shared__ uint64_t warp_best[TOPK_WARPS], best;
    __shared__ float part_max[TOPK_WARPS], part_sum[TOPK_WARPS], block_max, block_sum;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = (int)cluster.block_rank(), where = rank * TOPK_THREADS + tid;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);

    // a thread's columns in ascending order: vectors `where`, `where` + all threads, ...; the few off 16 bytes go to the cluster's first threads
    auto each = [&](auto&& use) {
        if (where < columns.head) use(one(columns.row + where), where);
#pragma unroll 2
        for (int i = where; i < columns.vectors; i += TOPK_THREADS * CLUSTER) {
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
        const uint64_t key = largest_key<TOPK_WARPS>(tid < TOPK_WARPS ? warp_best[tid] : 0);
        if (tid == 0) block_max = block.top, block_sum = block.sum, best = key;
    }
    cluster.sync();
    if (rank == 0 && tid < 32) {
        const uint64_t theirs = lane < CLUSTER ? *cluster.map_shared_rank(&best, lane) : 0;
        const float m = lane < CLUSTER ? *cluster.map_shared_rank(&block_max, lane) : -BIG;
        const float s = lane < CLUSTER ? *cluster.map_shared_rank(&block_sum, lane) : 0.f;
        const uint64_t key = largest_key<CLUSTER>(theirs);
        const Total all = together(m, s);
        if (lane == 0) {
            const int c = (int)~(uint32_t)key;
            answer(log_probs, ids, extras, row_at, 1, 0, value_of((uint32_t)(key >> 32)) - (all.top + logf(all.sum)), c + (d2t ? __ldg(d2t + c) : 0));
        }
    }
    cluster.sync();  // a block's shared memory must outlive its readers
}

// k = 1 with the shortest chain of waits: a thread's columns are asked for at once and stay in registers, each block looks its best column's id up by itself and
// pushes what it has into block 0, which alone waits for the others. One trip to memory, one more for the id, one cluster barrier on the way.
template <typename T, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(TOPK_THREADS) draft_best_push(const T* logits, int64_t stride, const int64_t* d2t, int v,
                                                                                                float* log_probs, int64_t* ids, TopkExtras extras) {
    namespace cg = cooperative_groups;
    constexpr int THREADS = TOPK_THREADS, WARPS = TOPK_WARPS, EACH = Columns<T>::EACH, HELD = sizeof(T);  // 16 columns a thread
    struct Part {
        uint64_t key;
        int64_t id;
        float top, sum;
    };
    __shared__ Part parts[CLUSTER];  // of block 0: what each block found
    __shared__ uint64_t warp_best[WARPS];
    __shared__ float part_max[WARPS], part_sum[WARPS];
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");  // this block has started: its shared memory may be written
    wait_for_earlier();
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = (int)cluster.block_rank(), where = rank * THREADS + tid;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);
    uint4 held[HELD];
    hold<THREADS * CLUSTER>(held, columns, where);
    const bool in_head = where < columns.head, in_tail = where < v - columns.tail;
    const float before = in_head ? one(columns.row + where) : 0.f, behind = in_tail ? one(columns.row + columns.tail + where) : 0.f;  // columns off 16 bytes

    uint32_t order = 0;  // of my largest; 0: no columns
    int column = INT32_MAX;
    auto see = [&](float value, int c) {  // in ascending order of columns
        const uint32_t o = order_of(value);
        if (o > order) order = o, column = c;
    };
    if (in_head) see(before, where);
#pragma unroll
    for (int u = 0; u < HELD; u++) {
        float x[EACH];
        unpack(held[u], columns.row, x);
        const int first = columns.head + (where + u * THREADS * CLUSTER) * EACH;
        if (first < columns.tail)
#pragma unroll
            for (int j = 0; j < EACH; j++) see(x[j], first + j);
    }
    if (in_tail) see(behind, columns.tail + where);
    const uint32_t largest = __reduce_max_sync(~0u, order);
    const float top = largest ? finite_shift(value_of(largest)) : -BIG;
    float sum = 0.f;
    auto add = [&](float value) { sum += exp2_fast((value - top) * LOG2E); };
#pragma unroll
    for (int u = 0; u < HELD; u++) {
        float x[EACH];
        unpack(held[u], columns.row, x);
        if (where + u * THREADS * CLUSTER < columns.vectors)
#pragma unroll
            for (int j = 0; j < EACH; j++) add(x[j]);
    }
    if (in_head) add(before);
    if (in_tail) add(behind);
    sum = warp_sum(sum);
    const uint32_t first = __reduce_min_sync(~0u, order == largest ? (uint32_t)column : ~0u);
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum, warp_best[tid / 32] = largest ? key_of(largest, (int)first) : 0;
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have started
    if (tid < 32) {
        const uint64_t key = largest_key<WARPS>(lane < WARPS ? warp_best[lane] : 0);
        const int c = key ? (int)~(uint32_t)key : 0;
        const int64_t id = lane == 0 ? c + (d2t ? __ldg(d2t + c) : 0) : 0;  // on its way while the sums come together
        const Total block = block_total<WARPS>(part_max, part_sum, lane);
        if (lane == 0) *cluster.map_shared_rank(&parts[rank], 0) = {key, id, block.top, block.sum};
        __syncwarp();
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (rank != 0 || tid >= 32) return;  // nobody reads this block's memory; block 0 lives until its first warp is done
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const Part mine = lane < CLUSTER ? parts[lane] : Part{0, 0, -BIG, 0.f};
    const uint64_t key = largest_key<CLUSTER>(mine.key);
    const Total all = together(mine.top, mine.sum);
    if (lane < CLUSTER && mine.key == key)  // keys are unique: one lane
        answer(log_probs, ids, extras, row_at, 1, 0, value_of((uint32_t)(key >> 32)) - (all.top + logf(all.sum)), mine.id);
}

// k > 1, wide rows too. A thread keeps its largest key; the k-th largest of a block's thread maxima is a floor under the block's k best, so only the k threads
// above it look at their columns again and hand in at most k * (columns a thread) keys.
template <typename T, int THREADS>
__global__ void __cluster_dims__(RANKED_CLUSTER, 1, 1) __launch_bounds__(THREADS) draft_topk(const T* logits, int64_t stride, const int64_t* d2t, int v, int k,
                                                                                      float* log_probs, int64_t* ids, TopkExtras extras) {
    wait_for_earlier();
    namespace cg = cooperative_groups;
    constexpr int PER_THREAD = 32, EACH = Columns<T>::EACH;  // columns of a thread at most, columns in 16 bytes
    __shared__ uint64_t maxima[THREADS], candidates[MAX_K * PER_THREAD], best[MAX_K], merged[RANKED_CLUSTER * MAX_K];
    __shared__ float part_max[THREADS / 32], part_sum[THREADS / 32], block_max, block_lse_sum;
    __shared__ int count;
    __shared__ uint64_t floor_key;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, rank = (int)cluster.block_rank(), where = rank * THREADS + tid;
    const int64_t row_at = blockIdx.x / RANKED_CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);
    if (tid == 0) count = 0;
    if (tid < MAX_K) best[tid] = 0;

    // a thread's columns: vectors `where`, `where` + all threads, ...; the few off 16 bytes go to the cluster's first threads
    auto each = [&](auto&& use) {
        for (int i = where; i < columns.vectors; i += THREADS * RANKED_CLUSTER) {
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
        const int all = RANKED_CLUSTER * k;
        for (int i = tid; i < all; i += THREADS) merged[i] = cluster.map_shared_rank(best, i / k)[i % k];
        __shared__ float lse;
        if (tid < 32) {
            const float m = tid < RANKED_CLUSTER ? *cluster.map_shared_rank(&block_max, tid) : -BIG;
            const float s = tid < RANKED_CLUSTER ? *cluster.map_shared_rank(&block_lse_sum, tid) : 0.f;
            const Total row_total = together(m, s);
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

// k > 1 by a filter, up to HELD_COLUMNS columns. A thread holds 16; the largest of each of 32 groups of threads is found, and the k-th largest of those 32 is a
// floor that at least k columns of the block reach and few others do (9 of 4,000 on average at k = 8). Those alone are ranked, their ids asked for meanwhile, and the
// k best pushed into block 0, which ranks the blocks' lists. Two trips to memory, one cluster barrier on the way. Where too many reach the floor (ties, sorted rows)
// the block takes its largest k times.
constexpr int HELD_COLUMNS = RANKED_CLUSTER * TOPK_THREADS * 16;

template <typename T>
__global__ void __cluster_dims__(RANKED_CLUSTER, 1, 1) __launch_bounds__(TOPK_THREADS) draft_topk_filtered(
    const T* logits, int64_t stride, const int64_t* d2t, int v, int k, float* log_probs, int64_t* ids, TopkExtras extras) {
    namespace cg = cooperative_groups;
    constexpr int THREADS = TOPK_THREADS, WARPS = TOPK_WARPS, CLUSTER = RANKED_CLUSTER, EACH = Columns<T>::EACH, HELD = sizeof(T);  // 16 columns a thread
    constexpr int GROUP = THREADS / 32, ROOM = 512;  // threads of a group, candidates
    struct Part {
        uint64_t key;
        int64_t id;
    };
    __shared__ Part parts[CLUSTER * MAX_K];  // of block 0: what each block found
    __shared__ float block_top[CLUSTER], block_sum[CLUSTER];  // likewise
    __shared__ uint64_t candidates[ROOM], warp_best[WARPS];
    __shared__ uint32_t group_best[32];
    __shared__ float part_max[WARPS], part_sum[WARPS];
    __shared__ int count;
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");  // this block has started: its shared memory may be written
    wait_for_earlier();
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = (int)cluster.block_rank(), where = rank * THREADS + tid;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const Columns<T> columns = columns_of(logits + row_at * stride, v);
    uint4 held[HELD];
    hold<THREADS * CLUSTER>(held, columns, where);
    const bool in_head = where < columns.head, in_tail = where < v - columns.tail;
    const float before = in_head ? one(columns.row + where) : -INFINITY, behind = in_tail ? one(columns.row + columns.tail + where) : -INFINITY;  // columns off 16 bytes
    if (tid == 0) count = 0;

    uint32_t order = 0;  // of my largest; 0: no columns
    if (in_head) order = order_of(before);
    if (in_tail) order = max(order, order_of(behind));
#pragma unroll
    for (int u = 0; u < HELD; u++) {
        float x[EACH];
        unpack(held[u], columns.row, x);
        if (where + u * THREADS * CLUSTER < columns.vectors)
#pragma unroll
            for (int j = 0; j < EACH; j++) order = max(order, order_of(x[j]));
    }
    uint32_t largest = order;
#pragma unroll
    for (int step = 1; step < GROUP; step <<= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane % GROUP == 0) group_best[tid / GROUP] = largest;
#pragma unroll
    for (int step = GROUP; step < 32; step <<= 1) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const float top = largest ? finite_shift(value_of(largest)) : -BIG;
    float sum = 0.f;
    auto add = [&](float value) { sum += exp2_fast((value - top) * LOG2E); };  // -inf adds nothing
#pragma unroll
    for (int u = 0; u < HELD; u++) {
        float x[EACH];
        unpack(held[u], columns.row, x);
#pragma unroll
        for (int j = 0; j < EACH; j++) add(x[j]);
    }
    add(before);
    add(behind);
    sum = warp_sum(sum);
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum;
    __syncthreads();
    // every warp finds the floor: the group with k - 1 ahead of it
    const uint32_t my_group = group_best[lane];
    int ahead = 0;
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(&group_best[j]);
        ahead += (four.x > my_group || (four.x == my_group && j < lane)) + (four.y > my_group || (four.y == my_group && j + 1 < lane)) +
                 (four.z > my_group || (four.z == my_group && j + 2 < lane)) + (four.w > my_group || (four.w == my_group && j + 3 < lane));
    }
    const uint32_t floor = __reduce_max_sync(~0u, ahead == k - 1 ? my_group : 0u);  // 0: fewer groups have columns

    // my columns again, from the cache: a loop that few threads enter
    auto each = [&](auto&& use) {
        if (in_head) use(before, where);
#pragma unroll 1
        for (int i = where; i < columns.vectors; i += THREADS * CLUSTER) {
            float x[EACH];
            unpack(__ldg(columns.body + i), columns.row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) use(x[j], columns.head + i * EACH + j);
        }
        if (in_tail) use(behind, columns.tail + where);
    };
    if (order && order >= floor)
        each([&](float value, int column) {
            const uint32_t o = order_of(value);
            if (o < floor) return;
            const int at = atomicAdd(&count, 1);
            if (at < ROOM) candidates[at] = key_of(o, column);
        });
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have started
    if (tid < 32) {
        const Total block = block_total<WARPS>(part_max, part_sum, lane);
        if (lane == 0) *cluster.map_shared_rank(&block_top[rank], 0) = block.top, *cluster.map_shared_rank(&block_sum[rank], 0) = block.sum;
        __syncwarp();
    }
    __syncthreads();
    auto id_of = [&](uint64_t key) -> int64_t {
        const int c = key ? (int)~(uint32_t)key : 0;
        return key ? c + (d2t ? __ldg(d2t + c) : 0) : 0;
    };
    auto push = [&](int place, uint64_t key, int64_t id) { *cluster.map_shared_rank(&parts[rank * k + place], 0) = {key, id}; };
    const int total = count;
    if (total <= ROOM) {
        for (int i = tid; i < total; i += THREADS) {
            const uint64_t key = candidates[i];
            const int64_t id = id_of(key);  // on its way while the key is ranked
            int better = 0;
#pragma unroll 4
            for (int j = 0; j < total; j++) better += candidates[j] > key;
            if (better < k) push(better, key, id);
        }
        for (int i = total + tid; i < k; i += THREADS) push(i, 0, 0);
    } else {
        uint64_t last = 0;
#pragma unroll 1
        for (int place = 0; place < k; place++) {
            uint64_t found = 0;
            each([&](float value, int column) {
                const uint64_t key = key_of(order_of(value), column);
                if (place == 0 || key < last) found = max(found, key);
            });
            found = largest_key<32>(found);
            if (lane == 0) warp_best[tid / 32] = found;
            __syncthreads();
            last = largest_key<WARPS>(warp_best[lane % WARPS]);
            __syncthreads();
            if (tid == 0) push(place, last, id_of(last));
        }
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (rank != 0) return;  // nobody reads this block's memory
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int all = CLUSTER * k;
    const Total total_row = together(lane < CLUSTER ? block_top[lane] : -BIG, lane < CLUSTER ? block_sum[lane] : 0.f);
    const float lse = total_row.top + logf(total_row.sum);
    for (int base = tid / 32 * 8; base < all; base += WARPS * 8) {  // four lanes a key
        const int i = base + lane / 4;
        const uint64_t key = i < all ? parts[i].key : 0;
        int better = 0;
        for (int j = lane % 4; j < all; j += 4) better += parts[j].key > key;
        better += __shfl_xor_sync(~0u, better, 1);
        better += __shfl_xor_sync(~0u, better, 2);
        if (lane % 4 == 0 && key && better < k) answer(log_probs, ids, extras, row_at, k, better, value_of((uint32_t)(key >> 32)) - lse, parts[i].id);
    }
}

template <typename T>
int launch_topk(const void* logits, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids, TopkExtras extras,
                cudaStream_t stream) {
    const T* in = static_cast<const T*>(logits);
    const unsigned rows = (unsigned)n;
    const bool early = n <= 16;  // more rows have blocks enough to fill the GPU, and early ones only took the places of those that work
    // k = 1 by number: pulled, pushed; k > 1: ranked, filtered. The second of each holds 16 columns a thread, and is the faster one.
    const auto fits = [&](int number) { return number == 0 || v <= HELD_COLUMNS; };
    const int variant = pick(k > 1 ? AERIE_TOPK_RANKED : AERIE_TOPK, v <= HELD_COLUMNS ? 1 : 0, fits);
    if (variant < 0) return cudaErrorInvalidValue;
    if (k > 1 && variant == 1) return launch_if(early, draft_topk_filtered<T>, rows * RANKED_CLUSTER, TOPK_THREADS, 0, stream, in, stride, d2t, (int)v, k, log_probs, ids, extras);
    if (variant == 1) return launch_if(early, draft_best_push<T, 8>, rows * 8, TOPK_THREADS, 0, stream, in, stride, d2t, (int)v, log_probs, ids, extras);
    if (k == 1 && (n <= 16 || v > 65536)) return launch_if(early, draft_best<T, 8>, rows * 8, TOPK_THREADS, 0, stream, in, stride, d2t, (int)v, log_probs, ids, extras);
    if (k == 1) return launch_if(early, draft_best<T, 4>, rows * 4, TOPK_THREADS, 0, stream, in, stride, d2t, (int)v, log_probs, ids, extras);
    // at most 24 columns a thread in vectors and 2 beside them
    if (v <= RANKED_CLUSTER * 128 * 24) return launch_if(early, draft_topk<T, 128>, rows * RANKED_CLUSTER, 128, 0, stream, in, stride, d2t, (int)v, k, log_probs, ids, extras);
    if (v <= RANKED_CLUSTER * 256 * 24) return launch_if(early, draft_topk<T, 256>, rows * RANKED_CLUSTER, 256, 0, stream, in, stride, d2t, (int)v, k, log_probs, ids, extras);
    if (v <= RANKED_CLUSTER * 1024 * 24) return launch_if(early, draft_topk<T, 1024>, rows * RANKED_CLUSTER, 1024, 0, stream, in, stride, d2t, (int)v, k, log_probs, ids, extras);
    return cudaErrorInvalidValue;
}

int prepare_topk() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)draft_best<__nv_bfloat16, 8>, (const void*)draft_best<__nv_bfloat16, 4>, (const void*)draft_best<float, 8>,
                             (const void*)draft_best<float, 4>, (const void*)draft_best_push<__nv_bfloat16, 8>, (const void*)draft_best_push<float, 8>,
                             (const void*)draft_topk<__nv_bfloat16, 128>, (const void*)draft_topk<__nv_bfloat16, 256>, (const void*)draft_topk<__nv_bfloat16, 1024>,
                             (const void*)draft_topk<float, 128>, (const void*)draft_topk<float, 256>, (const void*)draft_topk<float, 1024>,
                             (const void*)draft_topk_filtered<__nv_bfloat16>, (const void*)draft_topk_filtered<float>};
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
