// Op 5: rows as e4m3 with one float32 scale each, and back. One block a row; the row stays in registers between its largest magnitude and the rounding.
#include <cuda_fp8.h>

#include "common.cuh"

namespace aerie {

constexpr float FP8_MAX = 448.f, FP8_TINY = 1e-30f;

__device__ __forceinline__ uint32_t abs_max2(uint32_t best, uint32_t pair) {  // propagates NaN
    pair &= 0x7FFF7FFFu;
    __nv_bfloat162 r = __hmax2_nan(*reinterpret_cast<__nv_bfloat162*>(&best), *reinterpret_cast<__nv_bfloat162*>(&pair));
    return *reinterpret_cast<uint32_t*>(&r);
}

__device__ __forceinline__ uint32_t quantize4(uint32_t a, uint32_t b, float inverse) {
    const uint32_t lo = __nv_cvt_float2_to_fp8x2({low(a) * inverse, high(a) * inverse}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t hi = __nv_cvt_float2_to_fp8x2({low(b) * inverse, high(b) * inverse}, __NV_SATFINITE, __NV_E4M3);
    return lo | hi << 16;
}

// CH vectors of 8 values a thread: rows up to THREADS * CH * 8 wide; wider rows, and rows not on 16 bytes, are read twice.
template <int THREADS, int CH>
__global__ void __launch_bounds__(THREADS) quantize_rows(const __nv_bfloat16* x, int64_t stride, int h, uint8_t* q, float* scale, bool vector) {
    wait_for_earlier();
    constexpr int WARPS = THREADS / 32;
    __shared__ float partial[WARPS];
    const int tid = threadIdx.x, vectors = vector ? h / 8 : 0;
    const __nv_bfloat16* row = x + blockIdx.x * stride;
    uint8_t* out = q + (int64_t)blockIdx.x * h;
    const uint4* body = reinterpret_cast<const uint4*>(row);
    uint4 v[CH];
    uint32_t best = 0;
#pragma unroll
    for (int c = 0; c < CH; c++) v[c] = c * THREADS + tid < vectors ? load_stream(body + c * THREADS + tid) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < CH; c++) best = abs_max2(abs_max2(abs_max2(abs_max2(best, v[c].x), v[c].y), v[c].z), v[c].w);
    for (int i = vectors * 8 + tid; i < h; i += THREADS) best = abs_max2(best, __bfloat16_as_ushort(row[i]));
    // as integers the magnitudes sort alike, NaN above infinity
    uint32_t bits = max(best & 0xFFFFu, best >> 16);
    bits = __reduce_max_sync(~0u, bits);
    if (WARPS > 1) {
        if (tid % 32 == 0) partial[tid / 32] = __uint_as_float(bits);
        __syncthreads();
        bits = __reduce_max_sync(~0u, __float_as_uint(partial[tid % WARPS]));
    }
    const float largest = __uint_as_float(bits << 16);
    const bool finite = bits < 0x7F80u;
    const float floored = fmaxf(largest, FP8_TINY), inverse = finite ? __fdiv_rn(FP8_MAX, floored) : 0.f;
    if (tid == 0) scale[blockIdx.x] = finite ? __fdiv_rn(floored, FP8_MAX) : NAN;
#pragma unroll
    for (int c = 0; c < CH; c++)
        if (c * THREADS + tid < vectors) {
            uint2 r{0, 0};
            if (finite) r = {quantize4(v[c].x, v[c].y, inverse), quantize4(v[c].z, v[c].w, inverse)};
            reinterpret_cast<uint2*>(out)[c * THREADS + tid] = r;
        }
    for (int i = vectors * 8 + tid; i < h; i += THREADS)
        out[i] = finite ? (uint8_t)__nv_cvt_float_to_fp8(one(row + i) * inverse, __NV_SATFINITE, __NV_E4M3) : 0;
}

__device__ __forceinline__ float2 to_floats(uint32_t pair) {
    const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
    return __half22float2(__half2(half));
}

__device__ __forceinline__ uint4 dequantize8(uint2 v, float factor) {
    const float2 a = to_floats(v.x & 0xFFFFu), b = to_floats(v.x >> 16), c = to_floats(v.y & 0xFFFFu), d = to_floats(v.y >> 16);
    return {pack(a.x * factor, a.y * factor), pack(b.x * factor, b.y * factor), pack(c.x * factor, c.y * factor), pack(d.x * factor, d.y * factor)};
}

template <int THREADS, int UNROLL>
__global__ void __launch_bounds__(THREADS) dequantize_rows(const uint8_t* q, int64_t stride, const float* scale, int h, __nv_bfloat16* out, bool vector) {
    wait_for_earlier();
    const int tid = threadIdx.x, vectors = vector ? h / 8 : 0;
    const uint8_t* row = q + blockIdx.x * stride;
    __nv_bfloat16* to = out + (int64_t)blockIdx.x * h;
    const uint2* body = reinterpret_cast<const uint2*>(row);
    const float factor = scale[blockIdx.x];
    for (int i = tid; i < vectors; i += THREADS * UNROLL) {
        uint2 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < vectors) v[u] = __ldcs(body + i + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < vectors) {
                reinterpret_cast<uint4*>(to)[i + u * THREADS] = dequantize8(v[u], factor);
            }
    }
    for (int i = vectors * 8 + tid; i < h; i += THREADS) to[i] = __float2bfloat16(to_floats(row[i]).x * factor);
}

int prepare_fp8() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)quantize_rows<32, 4>, (const void*)quantize_rows<128, 4>, (const void*)quantize_rows<128, 7>,
                             (const void*)quantize_rows<256, 8>, (const void*)dequantize_rows<128, 4>, (const void*)dequantize_rows<128, 7>,
                             (const void*)dequantize_rows<256, 2>, (const void*)dequantize_rows<256, 4>};
    for (const void* kernel : kernels)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    return 0;
}

}  // namespace aerie

extern "C" int aerie_quantize_rows_fp8(const void* x, int64_t stride, int64_t n, int64_t h, void* q, float* scale, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (n > INT32_MAX || h > INT32_MAX / 2) return cudaErrorInvalidValue;
    const bool vector = h % 8 == 0 && h <= 16384 && aligned16(x, stride, 2) && reinterpret_cast<uintptr_t>(q) % 8 == 0;
    const auto* in = (const __nv_bfloat16*)x;
    auto* out = (uint8_t*)q;
    const unsigned blocks = (unsigned)n;
    if (vector && h <= 1024) return launch(quantize_rows<32, 4>, blocks, 32, 0, stream, in, stride, (int)h, out, scale, vector);
    if (vector && h <= 4096) return launch(quantize_rows<128, 4>, blocks, 128, 0, stream, in, stride, (int)h, out, scale, vector);
    if (vector && h <= 7168) return launch(quantize_rows<128, 7>, blocks, 128, 0, stream, in, stride, (int)h, out, scale, vector);
    return launch(quantize_rows<256, 8>, blocks, 256, 0, stream, in, stride, (int)h, out, scale, vector);
}

extern "C" int aerie_dequantize_rows_fp8(const void* q, int64_t stride, const float* scale, int64_t n, int64_t h, void* out, cudaStream_t stream) {
    if (n == 0 || h == 0) return 0;
    if (n > INT32_MAX || h > INT32_MAX / 2) return cudaErrorInvalidValue;
    const bool vector = h % 8 == 0 && reinterpret_cast<uintptr_t>(q) % 8 == 0 && stride % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    const bool narrow = h <= 4096;
    const int variant = aerie::pick(AERIE_DEQUANTIZE, narrow ? 0 : 1, [](int) { return true; });  // by number: 128 or 256 threads a row
    const auto kernel = variant == 0 ? (narrow ? aerie::dequantize_rows<128, 4> : aerie::dequantize_rows<128, 7>)
                                     : (narrow ? aerie::dequantize_rows<256, 2> : aerie::dequantize_rows<256, 4>);
    return aerie::launch(kernel, (unsigned)n, variant == 0 ? 128 : 256, 0, stream, (const uint8_t*)q, stride, scale, (int)h, (__nv_bfloat16*)out, vector);
}
