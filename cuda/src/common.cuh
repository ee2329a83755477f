// What the kernels share: 8 bf16 values in a uint4, base-2 exponentials, reductions.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

#include "aerie_drafter.h"

namespace aerie {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr uint32_t NEG_INF2 = 0xFF80FF80u;  // two bf16 -inf
constexpr float BIG = 3.402823466e38f;      // largest float: a shift is never infinite, so that -inf - shift is -inf and not NaN

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float one(const __nv_bfloat16* p) { return __bfloat162float(*p); }

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {  // NaN loses: it shows up in the sums instead
    __nv_bfloat162 r = __hmax2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<uint32_t*>(&r);
}

__device__ __forceinline__ float max8(uint4 v) {
    uint32_t m = max2(max2(v.x, v.y), max2(v.z, v.w));
    return fmaxf(low(m), high(m));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float finite_shift(float x) { return fminf(fmaxf(x, -BIG), BIG); }

__device__ __forceinline__ uint4 load_stream(const uint4* p) {  // read once: do not keep in L1
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Lowest column of 8 that holds `value`, 8 if none does.
__device__ __forceinline__ int find8(uint4 v, float value) {
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    int at = 8;
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        if (high(w[i]) == value) at = 2 * i + 1;
        if (low(w[i]) == value) at = 2 * i;
    }
    return at;
}

__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

// Sum over the block, answered to every thread. `shared` holds a value a warp and is free again after the next barrier.
template <int THREADS>
__device__ __forceinline__ float block_sum(float x, float* shared) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    constexpr int WARPS = THREADS / 32;
    x = threadIdx.x % 32 < WARPS ? shared[threadIdx.x % 32] : 0.f;
    return warp_sum(x);
}

// First in every kernel that is launched early (`launch`): its blocks may take their places while the kernel before it ends, and the next one's while this one does; nothing
// is read or written before all that the earlier kernels wrote is there.
__device__ __forceinline__ void wait_for_earlier() {
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
}

// kernel<<<blocks, threads, bytes, stream>>>, launched early (programmatic launch). Answers the CUDA error.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t bytes, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = {(unsigned)threads, 1, 1};
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    if (code) cudaGetLastError();  // it is answered, and is nobody else's
    return code;
}

int choice(int op);  // what aerie_choose was told (library.cu)

// The kernel to launch by number: `best`, unless one was chosen; -1: the chosen one does not fit.
template <typename Fits>
int pick(int op, int best, Fits fits) {
    const int chosen = choice(op), variant = chosen % AERIE_PREFER;
    if (chosen < 0) return best;
    if (fits(variant)) return variant;
    return chosen >= AERIE_PREFER ? best : -1;
}

inline int multiprocessors() {  // asked for once a device: every launch of a decode op needs it
    static int known[64];
    int device = 0, count = 0;
    cudaGetDevice(&device);
    if (device < 64 && known[device]) return known[device];
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return device < 64 ? known[device] = count : count;
}

inline bool aligned16(const void* p, int64_t stride_elements, int bytes) { return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride_elements * bytes % 16 == 0; }

}  // namespace aerie
