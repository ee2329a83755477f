// Op 3: the k largest of a row (k <= 32) with log-probabilities, mapped to target ids. One launch: a cluster of blocks shares a row.
//
// Every logit becomes a key that sorts like (value, lower column first) and is unique, so ties need no care. A thread keeps its largest key and its part of the
// log-sum-exp. The k-th largest of a block's thread maxima is a floor under the block's k best: only the k threads above it look at their columns again, and hand
// in at most k * (columns a thread) keys. Block 0 ranks the blocks' k best the same way.
#include <cooperative_groups.h>

#include "common.cuh"

namespace aerie {

constexpr int MAX_K = 32, CLUSTER = 8;

__device__ __forceinline__ uint64_t key_of(float value, int column) {
    uint32_t bits = __float_as_uint(value + 0.f);  // -0 and 0 tie
    if (value != value) bits = 0x7FFFFFFFu;        // NaN sorts first, as in torch.topk
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~column;
}

__device__ __forceinline__ float value_of(uint64_t key) {
    const uint32_t bits = (uint32_t)(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits);
}

__device__ __forceinline__ float one(const float* p) { return *p; }

// The 16 bytes at p: 8 bf16 or 4 floats.
__device__ __forceinline__ void unpack(const uint4& x, const __nv_bfloat16*, float out[8]) {
    out[0] = low(x.x), out[1] = high(x.x), out[2] = low(x.y), out[3] = high(x.y), out[4] = low(x.z), out[5] = high(x.z), out[6] = low(x.w), out[7] = high(x.w);
}
__device__ __forceinline__ void unpack(const uint4& x, const float*, float out[4]) {
    out[0] = __uint_as_float(x.x), out[1] = __uint_as_float(x.y), out[2] = __uint_as_float(x.z), out[3] = __uint_as_float(x.w);
}

template <typename T, int THREADS, int VECTORS>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) draft_topk(const T* logits, int64_t stride, const int64_t* d2t, int v, int k,
                                                                                      float* log_probs, int64_t* ids) {
    namespace cg = cooperative_groups;
    constexpr int EACH = 16 / sizeof(T), PER_THREAD = VECTORS * EACH + 2;  // columns in 16 bytes, columns of a thread at most
    __shared__ uint64_t maxima[THREADS], candidates[MAX_K * PER_THREAD], best[MAX_K], merged[CLUSTER * MAX_K];
    __shared__ int64_t best_id[MAX_K];
    __shared__ float part_max[THREADS / 32], part_sum[THREADS / 32], block_max, block_lse_sum;
    __shared__ int count;
    __shared__ uint64_t floor_key;
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, rank = (int)cluster.block_rank(), where = rank * THREADS + tid;
    const int64_t row_at = blockIdx.x / CLUSTER;
    const T* row = logits + row_at * stride;
    const int head = min(v, (int)((16 - (uintptr_t)row % 16) % 16 / sizeof(T))), vectors = (v - head) / EACH, tail = head + vectors * EACH;
    const uint4* body = reinterpret_cast<const uint4*>(row + head);
    if (tid == 0) count = 0;
    if (tid < MAX_K) best[tid] = 0;

    // a thread's columns: vectors `where`, `where` + all threads, ..., kept in registers; the few off 16 bytes go to the cluster's first threads
    uint4 held[VECTORS];
#pragma unroll
    for (int u = 0; u < VECTORS; u++) {
        const int i = where + u * THREADS * CLUSTER;
        if (i < vectors) held[u] = __ldg(body + i);
    }
    auto each = [&](auto&& use) {
#pragma unroll
        for (int u = 0; u < VECTORS; u++) {
            const int i = where + u * THREADS * CLUSTER;
            if (i < vectors) {
                float x[EACH];
                unpack(held[u], row, x);
#pragma unroll
                for (int j = 0; j < EACH; j++) use(x[j], head + i * EACH + j);
            }
        }
        if (where < head) use(one(row + where), where);
        if (where < v - tail) use(one(row + tail + where), tail + where);
    };
    uint64_t mine = 0;
    each([&](float value, int column) { mine = max(mine, key_of(value, column)); });
    const float top = mine ? finite_shift(value_of(mine)) : -BIG;  // NaN as a key: the sum is NaN all the same
    float sum = 0.f;
    each([&](float value, int) { sum += exp2_fast((value - top) * LOG2E); });
    maxima[tid] = mine;
    const float warp_top = warp_max(top);
    sum = warp_sum(sum * exp2_fast((top - warp_top) * LOG2E));
    if (tid % 32 == 0) part_max[tid / 32] = warp_top, part_sum[tid / 32] = sum;
    __syncthreads();
    if (tid < 32) {  // log-sum-exp of the block
        const float m = tid < THREADS / 32 ? part_max[tid] : -BIG, s = tid < THREADS / 32 ? part_sum[tid] : 0.f;
        const float all = warp_max(m), total = warp_sum(s * exp2_fast((m - all) * LOG2E));
        if (tid == 0) block_max = all, block_lse_sum = total;
    }
    int ahead = 0;
#pragma unroll 8
    for (int i = 0; i < THREADS; i += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&maxima[i]);
        ahead += (two.x > mine) + (two.y > mine);
    }
    if (mine && ahead < k)  // among the k best maxima; a thread without columns has key 0
        each([&](float value, int column) {
            const uint64_t key = key_of(value, column);
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
        if (before < k) {
            const int column = (int)~(uint32_t)key;
            best[before] = key;
            best_id[before] = column + (d2t ? d2t[column] : 0);
        }
    }
    cluster.sync();
    if (rank == 0) {
        const int all = CLUSTER * k;
        for (int i = tid; i < all; i += THREADS) merged[i] = cluster.map_shared_rank(best, i / k)[i % k];
        __shared__ float lse;
        if (tid < 32) {
            const float m = tid < CLUSTER ? *cluster.map_shared_rank(&block_max, tid) : -BIG;
            const float s = tid < CLUSTER ? *cluster.map_shared_rank(&block_lse_sum, tid) : 0.f;
            const float top_of_all = warp_max(m), sum_of_all = warp_sum(s * exp2_fast((m - top_of_all) * LOG2E));
            if (tid == 0) lse = top_of_all + logf(sum_of_all);
        }
        __syncthreads();
        for (int i = tid; i < all; i += THREADS) {
            const uint64_t key = merged[i];
            int before = 0;
            for (int j = 0; j < all; j++) before += merged[j] > key;
            if (key && before < k) {
                log_probs[row_at * k + before] = value_of(key) - lse;
                ids[row_at * k + before] = cluster.map_shared_rank(best_id, i / k)[i % k];
            }
        }
    }
    cluster.sync();  // a block's shared memory must outlive its readers
}

template <typename T>
int launch_topk(const void* logits, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids, cudaStream_t stream) {
    const T* in = static_cast<const T*>(logits);
    const unsigned blocks = (unsigned)n * CLUSTER;
    constexpr int64_t EACH = 16 / sizeof(T);
    if (v <= CLUSTER * 128 * 2 * EACH) draft_topk<T, 128, 2><<<blocks, 128, 0, stream>>>(in, stride, d2t, (int)v, k, log_probs, ids);
    else if (v <= CLUSTER * 256 * 4 * EACH) draft_topk<T, 256, 4><<<blocks, 256, 0, stream>>>(in, stride, d2t, (int)v, k, log_probs, ids);
    else if (v <= CLUSTER * 1024 * 6 * EACH) draft_topk<T, 1024, 6><<<blocks, 1024, 0, stream>>>(in, stride, d2t, (int)v, k, log_probs, ids);
    else return cudaErrorInvalidValue;
    return cudaGetLastError();
}

int prepare_topk() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)draft_topk<__nv_bfloat16, 128, 2>, (const void*)draft_topk<__nv_bfloat16, 256, 4>,
                             (const void*)draft_topk<__nv_bfloat16, 1024, 6>, (const void*)draft_topk<float, 128, 2>,
                             (const void*)draft_topk<float, 256, 4>, (const void*)draft_topk<float, 1024, 6>};
    for (const void* kernel : kernels)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    return 0;
}

}  // namespace aerie

extern "C" int aerie_draft_topk(const void* logits, int float32, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids,
                                cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (n > INT32_MAX / CLUSTER || k < 1 || k > MAX_K || k > v) return cudaErrorInvalidValue;
    return float32 ? launch_topk<float>(logits, stride, d2t, n, v, k, log_probs, ids, stream)
                   : launch_topk<__nv_bfloat16>(logits, stride, d2t, n, v, k, log_probs, ids, stream);
}
