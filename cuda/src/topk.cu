// Op 3: the k largest of a row (k <= 32) with log-probabilities, mapped to target ids. One launch: a cluster of blocks shares a row.
//
// A logit is ordered by its bits, and by its column where values tie (the lower one first). Each lane knows its largest; a warp takes
// its k largest one after another, and only the lane that had the last one looks at its columns again. The block ranks its warps' k best, block 0 the blocks'.
// The work is short, so what counts is latency and code size (each instruction is fetched once): loops are not unrolled more than needed.
#include <cooperative_groups.h>

#include "common.cuh"

namespace aerie {

constexpr int MAX_K = 32, TOPK_THREADS = 256, TOPK_WARPS = TOPK_THREADS / 32;

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

// What a served drafter wants beside: probabilities instead of their logarithms, its positions moved on, the best token in its list of drafted tokens.
struct TopkExtras {
    bool probabilities;
    int64_t* positions;  // [n], null: not wanted; each becomes one more
    int64_t* tokens;     // [n] at this stride, null: not wanted
    int64_t tokens_stride;
};

template <typename T, int CLUSTER>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(TOPK_THREADS) draft_topk(const T* logits, int64_t stride, const int64_t* d2t, int v, int k,
                                                                                           float* log_probs, int64_t* ids, TopkExtras extras) {
    namespace cg = cooperative_groups;
    constexpr int EACH = 16 / sizeof(T);
    static_assert(TOPK_WARPS * MAX_K == TOPK_THREADS, "a slot a thread");
    __shared__ uint64_t candidates[TOPK_THREADS], best[MAX_K], merged[CLUSTER * MAX_K];
    __shared__ float part_max[TOPK_WARPS], part_sum[TOPK_WARPS], block_max, block_sum;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = (int)cluster.block_rank(), where = rank * TOPK_THREADS + tid;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const T* row = logits + row_at * stride;
    const int head = min(v, (int)((16 - (uintptr_t)row % 16) % 16 / sizeof(T))), vectors = (v - head) / EACH, tail = head + vectors * EACH;
    const uint4* body = reinterpret_cast<const uint4*>(row + head);
    candidates[tid] = 0;
    if (tid < MAX_K) best[tid] = 0;
    __syncwarp();

    // a thread's columns in ascending order: vectors `where`, `where` + all threads, ...; the few off 16 bytes go to the cluster's first threads
    auto each = [&](auto&& use) {
        if (where < head) use(one(row + where), where);
#pragma unroll 2
        for (int i = where; i < vectors; i += TOPK_THREADS * CLUSTER) {
            float x[EACH];
            unpack(__ldg(body + i), row, x);
#pragma unroll
            for (int j = 0; j < EACH; j++) use(x[j], head + i * EACH + j);
        }
        if (where < v - tail) use(one(row + tail + where), tail + where);
    };
    uint32_t order = 0;  // of my largest; 0: no columns
    int column = INT32_MAX;
    each([&](float value, int c) {
        const uint32_t o = order_of(value);
        if (o > order) order = o, column = c;
    });
    // the warp's part of the log-sum-exp, relative to its largest value
    const uint32_t warp_best = __reduce_max_sync(~0u, order);
    const float top = warp_best ? finite_shift(value_of(warp_best)) : -BIG;
    float sum = 0.f;
    each([&](float value, int) { sum += exp2_fast((value - top) * LOG2E); });
    sum = warp_sum(sum);
    if (lane == 0) part_max[tid / 32] = top, part_sum[tid / 32] = sum;

    // the k largest of the warp, one after another: the lane that had it looks for its next one
    uint64_t mine = order ? key_of(order, column) : 0;
    for (int i = 0; i < k; i++) {
        const uint32_t largest = __reduce_max_sync(~0u, (uint32_t)(mine >> 32));
        if (largest == 0) break;  // nothing left
        const bool tied = (uint32_t)(mine >> 32) == largest;
        const uint32_t lowest = __reduce_max_sync(~0u, tied ? (uint32_t)mine : 0u);  // ~column
        if (tied && (uint32_t)mine == lowest) {
            const uint64_t last = mine;
            candidates[tid / 32 * MAX_K + i] = last;
            mine = 0;
            if (i + 1 < k)
                each([&](float value, int c) {
                    const uint64_t key = key_of(order_of(value), c);
                    if (key < last && key > mine) mine = key;
                });
        }
    }
    __syncthreads();
    if (tid < 32) {  // log-sum-exp of the block
        const float m = tid < TOPK_WARPS ? part_max[tid] : -BIG, s = tid < TOPK_WARPS ? part_sum[tid] : 0.f;
        const float all = warp_max(m), total = warp_sum(s * exp2_fast((m - all) * LOG2E));
        if (tid == 0) block_max = all, block_sum = total;
    }
    if (const uint64_t key = candidates[tid]) {  // a slot a thread
        int before = 0;
        for (int w = 0; w < TOPK_WARPS; w++)
#pragma unroll 4
            for (int j = 0; j < k; j++) before += candidates[w * MAX_K + j] > key;
        if (before < k) best[before] = key;
    }
    cluster.sync();
    if (rank == 0) {
        const int all = CLUSTER * k;
        uint64_t key = 0;
        int64_t id = 0;
        if (tid < all) {
            key = cluster.map_shared_rank(best, tid / k)[tid % k];
            merged[tid] = key;
            const int c = (int)~(uint32_t)key;
            if (key) id = c + (d2t ? __ldg(d2t + c) : 0);  // asked for early: it arrives while the keys are ranked
        }
        // every warp for itself, so that nobody waits
        const float m = lane < CLUSTER ? *cluster.map_shared_rank(&block_max, lane) : -BIG;
        const float s = lane < CLUSTER ? *cluster.map_shared_rank(&block_sum, lane) : 0.f;
        const float top_of_all = warp_max(m), sum_of_all = warp_sum(s * exp2_fast((m - top_of_all) * LOG2E));
        __syncthreads();
        if (key) {
            int before = 0;
#pragma unroll 4
            for (int j = 0; j < all; j++) before += merged[j] > key;
            if (before < k) {
                const float log_prob = value_of((uint32_t)(key >> 32)) - (top_of_all + logf(sum_of_all));
                log_probs[row_at * k + before] = extras.probabilities ? expf(log_prob) : log_prob;
                ids[row_at * k + before] = id;
                if (before == 0 && extras.tokens) extras.tokens[row_at * extras.tokens_stride] = id;
                if (before == 0 && extras.positions) extras.positions[row_at]++;
            }
        }
    }
    cluster.sync();  // a block's shared memory must outlive its readers
}

template <typename T, int CLUSTER>
int launch_topk(const void* logits, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids, TopkExtras extras,
                cudaStream_t stream) {
    draft_topk<T, CLUSTER><<<(unsigned)n * CLUSTER, TOPK_THREADS, 0, stream>>>(static_cast<const T*>(logits), stride, d2t, (int)v, k, log_probs, ids, extras);
    return cudaGetLastError();
}

int prepare_topk() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)draft_topk<__nv_bfloat16, 8>, (const void*)draft_topk<__nv_bfloat16, 4>, (const void*)draft_topk<float, 8>,
                             (const void*)draft_topk<float, 4>};
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
    // few rows: more blocks a row
    if (n <= 16 || v > 65536)
        return float32 ? launch_topk<float, 8>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream)
                       : launch_topk<__nv_bfloat16, 8>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream);
    return float32 ? launch_topk<float, 4>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream)
                   : launch_topk<__nv_bfloat16, 4>(logits, stride, d2t, n, v, k, log_probs, ids, extras, stream);
}
