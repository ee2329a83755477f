// Op 1, target side: running max, sum of exp(logit - max) and argmax from chunks of the full vocabulary. One block a row, one read, nothing stored.
#include "common.cuh"

namespace aerie {

// Sum of exp2(x * log2(e) - shift), where shift is about the largest x * log2(e): an integer for logits of usual size, so that one fma is exact enough.
__device__ __forceinline__ float shift_of(float top) { return fabsf(top) <= 1024.f ? rintf(top * LOG2E) : finite_shift(top * LOG2E); }

__device__ __forceinline__ float term(float x, float shift, bool usual) {
    return exp2_fast(usual ? fmaf(x, LOG2E, -shift) : (x == INFINITY ? NAN : fminf(x * LOG2E, BIG)) - shift);
}

// exp2 of (shift - top * log2(e)): from a sum relative to the shift to one relative to the logit itself.
__device__ __forceinline__ float to_top(float top, float shift) { return fabsf(top) <= 1024.f ? exp2_fast(fmaf(-top, LOG2E, shift)) : 1.f; }

// KEPT: the last turn's columns are still in registers when the column of the largest logit is looked for, so that a row of one turn is read once.
template <int THREADS, int UNROLL, bool KEPT = false>
__global__ void __launch_bounds__(THREADS) online_update(const __nv_bfloat16* chunk, int64_t stride, int columns, int64_t start, float* running_max,
                                                         float* running_sum, int64_t* argmax) {
    wait_for_earlier();
    constexpr int WARPS = THREADS / 32;
    __shared__ float part_top[WARPS], part_sum[WARPS];
    __shared__ int part_at[WARPS];
    const int tid = threadIdx.x;
    const __nv_bfloat16* row = chunk + blockIdx.x * stride;
    const int head = min(columns, (int)((16 - (uintptr_t)row % 16) % 16 / 2)), vectors = (columns - head) / 8, tail = head + vectors * 8;
    const uint4* body = reinterpret_cast<const uint4*>(row + head);
    const uint4 none{NEG_INF2, NEG_INF2, NEG_INF2, NEG_INF2};
    float top = -INFINITY, shift = -BIG, sum = 0.f;
    // what the row has so far; asked for now, needed at the end
    const float old_top = tid == 0 ? running_max[blockIdx.x] : 0.f, old_total = tid == 0 ? running_sum[blockIdx.x] : 0.f;
    const int64_t old_at = tid == 0 ? argmax[blockIdx.x] : 0;
    int at = INT32_MAX;  // first vector (or column off 16 bytes, as -1 - column) of the batch that holds top

    auto raise = [&](float value, int where) {  // batches come in ascending order of columns: ties keep the first
        if (value > top || at == INT32_MAX) {
            const float new_shift = shift_of(fmaxf(top, value));
            sum *= exp2_fast(shift - new_shift);
            shift = new_shift;
            top = fmaxf(top, value);
            at = where;
        }
    };
    if (tid < head) {
        const float value = one(row + tid);
        raise(value, -1 - tid);
        sum += term(value, shift, false);
    }
    uint4 v[UNROLL];
    for (int i = tid; i < vectors; i += THREADS * UNROLL) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) v[u] = i + u * THREADS < vectors ? load_stream(body + i + u * THREADS) : none;
        uint32_t best = NEG_INF2;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) best = max2(best, max2(max2(v[u].x, v[u].y), max2(v[u].z, v[u].w)));
        raise(fmaxf(low(best), high(best)), i);
        auto add = [&](bool usual) {
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const uint32_t w[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
                float part = 0.f;
#pragma unroll
                for (int j = 0; j < 4; j++) part += term(low(w[j]), shift, usual) + term(high(w[j]), shift, usual);
                sum += part;
            }
        };
        if (fabsf(top) <= 1024.f) add(true);
        else add(false);
    }
    if (tid < columns - tail) {
        const float value = one(row + tail + tid);
        raise(value, -1 - tail - tid);
        sum += term(value, shift, false);
    }
    // over the warp, then over the block: largest logit, sum, lowest column of the largest
    auto together = [&](int lanes) {
        float all = top;
        for (int step = lanes / 2; step; step >>= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
        sum *= exp2_fast(shift - shift_of(all));
        for (int step = lanes / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        shift = shift_of(all);
        return all;
    };
    const float warp_top = together(32);
    int column = INT32_MAX;
    if (top == warp_top && at != INT32_MAX) {
        if (at < 0) column = -1 - at;
        if (KEPT && at >= 0 && at + THREADS * UNROLL >= vectors) {  // the last turn's
#pragma unroll
            for (int u = UNROLL - 1; u >= 0; u--) {
                const int in8 = find8(v[u], top);
                if (in8 < 8 && at + u * THREADS < vectors) column = head + (at + u * THREADS) * 8 + in8;
            }
        } else if (at >= 0) {
#pragma unroll
            for (int u = UNROLL - 1; u >= 0; u--) {  // the loads do not wait for one another
                const int in8 = at + u * THREADS < vectors ? find8(__ldg(body + at + u * THREADS), top) : 8;
                if (in8 < 8) column = head + (at + u * THREADS) * 8 + in8;
            }
        }
        if (column == INT32_MAX) column = head + max(at, 0) * 8;  // NaN alone
    }
    column = __reduce_min_sync(~0u, column);
    if (tid % 32 == 0) part_top[tid / 32] = warp_top, part_sum[tid / 32] = sum, part_at[tid / 32] = column;
    __syncthreads();
    if (tid >= 32) return;
    top = tid < WARPS ? part_top[tid] : -INFINITY;
    sum = tid < WARPS ? part_sum[tid] : 0.f;
    column = tid < WARPS ? part_at[tid] : INT32_MAX;
    shift = shift_of(top);
    const float row_top = together(32);
    column = __reduce_min_sync(~0u, top == row_top ? column : INT32_MAX);
    if (tid == 0) {
        const float old_sum = old_total / to_top(old_top, shift_of(old_top));
        const float new_top = fmaxf(old_top, row_top), new_shift = shift_of(new_top);
        sum = sum * exp2_fast(shift - new_shift) + old_sum * exp2_fast(shift_of(old_top) - new_shift);
        running_max[blockIdx.x] = new_top;
        running_sum[blockIdx.x] = sum * to_top(new_top, new_shift);
        if (old_at < 0 || row_top > old_top) argmax[blockIdx.x] = start + column;
    }
}

struct OnlineVariant {
    void (*launch)(const __nv_bfloat16*, int64_t, int, int64_t, float*, float*, int64_t*);
    int threads;
};
// by number: threads a row, loads of 16 bytes in flight a thread; the second takes a row of up to ONE_TURN columns at once
const OnlineVariant ONLINE[] = {{online_update<128, 4>, 128}, {online_update<256, 8, true>, 256}};
constexpr int ONE_TURN = 256 * 8 * 8;
constexpr int64_t FEW_ROWS = 6144;  // on an H200 the second is 4% faster at 4,096 rows, 1% slower at 8,192 and 5% slower above

int prepare_online() {
    cudaFuncAttributes info;
    for (const auto kernel : ONLINE)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, (const void*)kernel.launch)) return code;
    return 0;
}

}  // namespace aerie

extern "C" int aerie_online_update(const void* chunk, int64_t stride, int64_t n, int64_t c, int64_t start, float* running_max, float* running_sum,
                                   int64_t* argmax, cudaStream_t stream) {
    if (n == 0 || c == 0) return 0;
    if (n > INT32_MAX || c > INT32_MAX - 8192) return cudaErrorInvalidValue;
    const int best = c <= aerie::ONE_TURN && n <= aerie::FEW_ROWS ? 1 : 0;
    const auto& kernel = aerie::ONLINE[aerie::pick(AERIE_ONLINE, best, [](int) { return true; })];
    return aerie::launch(kernel.launch, (unsigned)n, kernel.threads, 0, stream, (const __nv_bfloat16*)chunk, stride, (int)c, start, running_max, running_sum, argmax);
}
