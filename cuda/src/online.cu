// Op 1, target side: running max, sum of exp(logit - max) and argmax from chunks of the full vocabulary. One block a row, one read, nothing stored.
#include "common.cuh"

namespace aerie {

constexpr int THREADS = 256, UNROLL = 4;

struct Running {
    float top, sum;  // sum is relative to finite_shift(top)
    int64_t at;      // column of top, INT64_MAX: none
};

__device__ __forceinline__ Running merge(Running a, Running b) {
    Running r;
    r.top = fmaxf(a.top, b.top);
    const float shift = finite_shift(r.top);
    r.sum = a.sum * exp2_fast((finite_shift(a.top) - shift) * LOG2E) + b.sum * exp2_fast((finite_shift(b.top) - shift) * LOG2E);
    r.at = a.top > b.top ? a.at : b.top > a.top ? b.at : min(a.at, b.at);
    return r;
}

__device__ __forceinline__ Running shuffle(Running r, int step) {
    return {__shfl_xor_sync(~0u, r.top, step), __shfl_xor_sync(~0u, r.sum, step), __shfl_xor_sync(~0u, r.at, step)};
}

__global__ void __launch_bounds__(THREADS) online_update(const __nv_bfloat16* chunk, int64_t stride, int columns, int64_t start, float* running_max,
                                                         float* running_sum, int64_t* argmax) {
    constexpr int WARPS = THREADS / 32;
    __shared__ Running partial[WARPS];
    const int tid = threadIdx.x;
    const __nv_bfloat16* row = chunk + blockIdx.x * stride;
    const int head = min(columns, (int)((16 - (uintptr_t)row % 16) % 16 / 2)), vectors = (columns - head) / 8, tail = head + vectors * 8;
    const uint4* body = reinterpret_cast<const uint4*>(row + head);
    float top = -INFINITY, shift = -BIG, sum = 0.f;
    int at = INT32_MAX;  // column of top; of its 8 columns the first while in the body

    auto raise = [&](float value, int column) {  // columns come in ascending order: ties keep the first
        if (value > top || at == INT32_MAX) {
            const float new_shift = finite_shift(value);
            if (new_shift > shift) {
                sum *= exp2_fast((shift - new_shift) * LOG2E);
                shift = new_shift;
            }
            top = fmaxf(top, value);
            at = column;
        }
    };
    if (tid < head) {
        const float value = one(row + tid);
        raise(value, tid);
        sum += exp2_fast((value - shift) * LOG2E);
    }
    for (int i = tid; i < vectors; i += THREADS * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) v[u] = i + u * THREADS < vectors ? load_stream(body + i + u * THREADS) : uint4{NEG_INF2, NEG_INF2, NEG_INF2, NEG_INF2};
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (i + u * THREADS >= vectors) break;
            raise(max8(v[u]), head + (i + u * THREADS) * 8);
            const uint32_t w[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
            float part = 0.f;
#pragma unroll
            for (int j = 0; j < 4; j++) part += exp2_fast((low(w[j]) - shift) * LOG2E) + exp2_fast((high(w[j]) - shift) * LOG2E);
            sum += part;
        }
    }
    if (tid < columns - tail) {
        const float value = one(row + tail + tid);
        raise(value, tail + tid);
        sum += exp2_fast((value - shift) * LOG2E);
    }
    if (at >= head && at < tail)  // which of the 8
        for (int j = 0; j < 8; j++)
            if (one(row + at + j) == top) {
                at += j;
                break;
            }
    Running r{top, sum, at == INT32_MAX ? INT64_MAX : (int64_t)at + start};
#pragma unroll
    for (int step = 16; step; step >>= 1) r = merge(r, shuffle(r, step));
    if (tid % 32 == 0) partial[tid / 32] = r;
    __syncthreads();
    if (tid >= 32) return;
    r = tid < WARPS ? partial[tid] : Running{-INFINITY, 0.f, INT64_MAX};
#pragma unroll
    for (int step = WARPS / 2; step; step >>= 1) r = merge(r, shuffle(r, step));
    if (tid == 0) {
        const int64_t old_at = argmax[blockIdx.x];
        const Running old{running_max[blockIdx.x], running_sum[blockIdx.x], old_at < 0 ? INT64_MAX : old_at};
        const bool keep = old_at >= 0 && !(r.top > old.top);
        const Running both = merge(old, r);
        running_max[blockIdx.x] = both.top;
        running_sum[blockIdx.x] = both.sum;
        argmax[blockIdx.x] = keep ? old_at : r.at;
    }
}

int prepare_online() {
    cudaFuncAttributes info;
    return cudaFuncGetAttributes(&info, (const void*)online_update);
}

}  // namespace aerie

extern "C" int aerie_online_update(const void* chunk, int64_t stride, int64_t n, int64_t c, int64_t start, float* running_max, float* running_sum,
                                   int64_t* argmax, cudaStream_t stream) {
    if (n == 0 || c == 0) return 0;
    if (n > INT32_MAX || c > INT32_MAX - 8192) return cudaErrorInvalidValue;
    aerie::online_update<<<(unsigned)n, aerie::THREADS, 0, stream>>>((const __nv_bfloat16*)chunk, stride, (int)c, start, running_max, running_sum, argmax);
    return cudaGetLastError();
}
