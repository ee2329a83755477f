// Op 2: [RMSNorm(table[ids]) * w1, RMSNorm(state) * w2] side by side as [N, 2H], and its backward.
// Side 0 is the embedding, side 1 the state. Forward: one block a row and side, the row in registers. Backward: persistent blocks, each on one side, sum their
// rows' weight gradients in registers and write one partial sum each, which a second kernel adds up.
#include "common.cuh"

namespace aerie {

struct Inputs {
    const void* ids;
    bool ids64;
    const __nv_bfloat16 *table, *state;
    int64_t table_stride, v, state_stride;
    const void *embed_weight, *state_weight;
    bool weights32;
    int64_t n;
    int h;
    float eps;
    bool vector;  // h is a multiple of 8 and everything is on 16 bytes
};

__device__ __forceinline__ const __nv_bfloat16* source(const Inputs& in, int64_t row, int side) {  // null: id out of range
    if (side) return in.state + row * in.state_stride;
    const int64_t id = in.ids64 ? static_cast<const int64_t*>(in.ids)[row] : static_cast<const int32_t*>(in.ids)[row];
    return id < 0 || id >= in.v ? nullptr : in.table + id * in.table_stride;
}

__device__ __forceinline__ float weight_at(const Inputs& in, int side, int column) {
    const void* w = side ? in.state_weight : in.embed_weight;
    return in.weights32 ? static_cast<const float*>(w)[column] : one(static_cast<const __nv_bfloat16*>(w) + column);
}

__device__ __forceinline__ void weights8(const Inputs& in, int side, int vector, float w[8]) {
    const void* base = side ? in.state_weight : in.embed_weight;
    if (in.weights32) {
        const float4 a = static_cast<const float4*>(base)[2 * vector], b = static_cast<const float4*>(base)[2 * vector + 1];
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    } else {
        const uint4 a = static_cast<const uint4*>(base)[vector];
        w[0] = low(a.x), w[1] = high(a.x), w[2] = low(a.y), w[3] = high(a.y), w[4] = low(a.z), w[5] = high(a.z), w[6] = low(a.w), w[7] = high(a.w);
    }
}

__device__ __forceinline__ void unpack8(uint4 v, float x[8]) {
    x[0] = low(v.x), x[1] = high(v.x), x[2] = low(v.y), x[3] = high(v.y), x[4] = low(v.z), x[5] = high(v.z), x[6] = low(v.w), x[7] = high(v.w);
}

template <int THREADS, int CH>
__global__ void __launch_bounds__(THREADS) drafter_input_forward(Inputs in, __nv_bfloat16* out) {
    __shared__ float partial[THREADS / 32];
    const int tid = threadIdx.x, side = blockIdx.y, vectors = in.h / 8;
    const int64_t row = blockIdx.x;
    const __nv_bfloat16* x = source(in, row, side);
    uint4* to = reinterpret_cast<uint4*>(out + row * 2 * in.h + side * in.h);
    uint4 v[CH];
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int at = c * THREADS + tid;
        const uint4* from = reinterpret_cast<const uint4*>(x) + at;
        v[c] = x && at < vectors ? (side ? load_stream(from) : __ldg(from)) : uint4{0, 0, 0, 0};
    }
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
        float e[8];
        unpack8(v[c], e);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(e[j], e[j], sum);
    }
    sum = block_sum<THREADS>(sum, partial);
    const float rstd = x ? rsqrtf(sum / in.h + in.eps) : NAN;
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int at = c * THREADS + tid;
        if (at >= vectors) break;
        float e[8], w[8];
        unpack8(v[c], e);
        weights8(in, side, at, w);
#pragma unroll
        for (int j = 0; j < 8; j++) e[j] = e[j] * rstd * w[j];
        to[at] = {pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]), pack(e[6], e[7])};
    }
}

__global__ void __launch_bounds__(256) drafter_input_forward_any(Inputs in, __nv_bfloat16* out) {  // any width and alignment, read twice
    __shared__ float partial[8];
    const int tid = threadIdx.x, side = blockIdx.y;
    const int64_t row = blockIdx.x;
    const __nv_bfloat16* x = source(in, row, side);
    __nv_bfloat16* to = out + row * 2 * in.h + side * in.h;
    float sum = 0.f;
    for (int i = tid; x && i < in.h; i += 256) sum = fmaf(one(x + i), one(x + i), sum);
    sum = block_sum<256>(sum, partial);
    const float rstd = rsqrtf(sum / in.h + in.eps);
    for (int i = tid; i < in.h; i += 256) to[i] = __float2bfloat16(x ? one(x + i) * rstd * weight_at(in, side, i) : NAN);
}

template <int LEFT>
__device__ __forceinline__ void wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// dx = rstd * (g * w - xhat * mean(g * w * xhat)), dw = sum over rows of g * xhat, with xhat = x * rstd. Shared memory holds STAGES rows of x and g: while one is
// worked on the next ones are on their way. A thread copies and reads only its own columns, so only the two sums of a row need a barrier.
template <int THREADS, int CH, int PER_SM, int STAGES>
__global__ void __launch_bounds__(THREADS, PER_SM) drafter_input_backward(Inputs in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows,
                                                                          __nv_bfloat16* d_state, float* sums) {
    constexpr int WARPS = THREADS / 32;
    extern __shared__ uint4 buffer[];  // [STAGES][x, g][CH * THREADS]
    __shared__ float partial[2][2][WARPS];
    const int tid = threadIdx.x, side = blockIdx.x % 2, vectors = in.h / 8, step = gridDim.x / 2, n = (int)in.n;
    float dw[CH][8] = {};
    __nv_bfloat16* d_x = side ? d_state : d_rows;
    auto slot = [&](int stage, int which, int c) -> uint4& { return buffer[((stage * 2 + which) * CH + c) * THREADS + tid]; };
    auto request = [&](int stage, int row, const __nv_bfloat16* x) {
        if (row < n) {
            const uint4* g_from = reinterpret_cast<const uint4*>(grad + row * grad_stride + side * in.h);
#pragma unroll
            for (int c = 0; c < CH; c++) {
                const int at = c * THREADS + tid;
                if (at >= vectors) break;
                if (x) cp_async16(&slot(stage, 0, c), reinterpret_cast<const uint4*>(x) + at);
                cp_async16(&slot(stage, 1, c), g_from + at);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto row_source = [&](int at) { return at < n ? source(in, at, side) : nullptr; };
    int row = blockIdx.x / 2, stage = 0, turn = 0;
    const __nv_bfloat16* sources[STAGES];  // of this row and those that come
#pragma unroll
    for (int s = 0; s < STAGES; s++) sources[s] = row_source(row + s * step);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) request(s, row + s * step, sources[s]);
    for (; row < n; row += step, stage = stage + 1 == STAGES ? 0 : stage + 1, turn ^= 1) {
        request(stage == 0 ? STAGES - 1 : stage - 1, row + (STAGES - 1) * step, sources[STAGES - 1]);
        const __nv_bfloat16 *x = sources[0], *after = row_source(row + STAGES * step);  // an id read now is there when it is needed
        wait_group<STAGES - 1>();
        float square = 0.f, dot = 0.f;
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * THREADS + tid;
            if (at >= vectors) break;
            float e[8], g[8], w[8];
            unpack8(slot(stage, 0, c), e);
            unpack8(slot(stage, 1, c), g);
            weights8(in, side, at, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                square = fmaf(e[j], e[j], square);
                dot = fmaf(g[j] * w[j], e[j], dot);
            }
        }
        square = warp_sum(square);
        dot = warp_sum(dot);
        if (tid % 32 == 0) {
            partial[turn][0][tid / 32] = square;
            partial[turn][1][tid / 32] = dot;
        }
        __syncthreads();  // partial has two copies: nobody is two rows ahead
        square = warp_sum(tid % 32 < WARPS ? partial[turn][0][tid % 32] : 0.f);
        dot = warp_sum(tid % 32 < WARPS ? partial[turn][1][tid % 32] : 0.f);
        const float rstd = x ? rsqrtf(square / in.h + in.eps) : NAN;
        const float pull = dot * rstd * rstd / in.h;  // times x: xhat * mean(g * w * xhat)
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * THREADS + tid;
            if (at >= vectors) break;
            float e[8], g[8], w[8];
            unpack8(slot(stage, 0, c), e);
            unpack8(slot(stage, 1, c), g);
#pragma unroll
            for (int j = 0; j < 8; j++) dw[c][j] = fmaf(g[j], e[j] * rstd, dw[c][j]);
            if (!d_x) continue;
            weights8(in, side, at, w);
#pragma unroll
            for (int j = 0; j < 8; j++) e[j] = rstd * fmaf(g[j], w[j], -e[j] * pull);
            __stcs(reinterpret_cast<uint4*>(d_x + (int64_t)row * in.h) + at, uint4{pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]), pack(e[6], e[7])});
        }
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) sources[s] = sources[s + 1];
        sources[STAGES - 1] = after;
    }
    cudaTriggerProgrammaticLaunchCompletion();  // the blocks that add the sums may take their places; they wait for this kernel's end
    float4* to = reinterpret_cast<float4*>(sums + (int64_t)(blockIdx.x / 2 * 2 + side) * in.h);
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int at = c * THREADS + tid;
        if (at >= vectors) break;
        to[2 * at] = {dw[c][0], dw[c][1], dw[c][2], dw[c][3]};
        to[2 * at + 1] = {dw[c][4], dw[c][5], dw[c][6], dw[c][7]};
    }
}

// sums [blocks, 2, h] -> the two weight gradients. 32 columns a block, 16 threads a column.
__global__ void __launch_bounds__(512) add_weight_sums(const float* sums, int blocks, int h, void* d_embed_weight, void* d_state_weight, bool weights32) {
    __shared__ float partial[16][33];
    cudaGridDependencySynchronize();  // launched early: all sums are there behind this
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32, column = blockIdx.x * 32 + lane;  // of 2 h
    float sum = 0.f;
#pragma unroll 4
    for (int b = group; b < blocks; b += 16)
        if (column < 2 * h) sum += sums[(int64_t)b * 2 * h + column];
    partial[group][lane] = sum;
    __syncthreads();
    if (group || column >= 2 * h) return;
    for (int i = 1; i < 16; i++) sum += partial[i][lane];
    void* to = column < h ? d_embed_weight : d_state_weight;
    const int at = column < h ? column : column - h;
    if (weights32) static_cast<float*>(to)[at] = sum;
    else static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16(sum);
}

template <int THREADS, int CH, int PER_SM, int STAGES>
int launch_backward(const Inputs& in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows, __nv_bfloat16* d_state, float* sums, int blocks,
                    cudaStream_t stream) {
    constexpr int BYTES = 2 * STAGES * CH * THREADS * 16;
    const auto kernel = drafter_input_backward<THREADS, CH, PER_SM, STAGES>;
    if (const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES)) return code;
    kernel<<<2 * blocks, THREADS, BYTES, stream>>>(in, grad, grad_stride, d_rows, d_state, sums);
    return cudaGetLastError();
}

__global__ void __launch_bounds__(256) drafter_input_backward_any(Inputs in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows,
                                                                  __nv_bfloat16* d_state, float* sums) {
    __shared__ float partial[8], partial2[8];
    const int tid = threadIdx.x, side = blockIdx.x % 2;
    float* to = sums + (int64_t)(blockIdx.x / 2 * 2 + side) * in.h;  // each thread its own columns
    __nv_bfloat16* d_x = side ? d_state : d_rows;
    for (int i = tid; i < in.h; i += 256) to[i] = 0.f;
    for (int64_t row = blockIdx.x / 2; row < in.n; row += gridDim.x / 2) {
        const __nv_bfloat16 *x = source(in, row, side), *g = grad + row * grad_stride + side * in.h;
        float square = 0.f, dot = 0.f;
        for (int i = tid; x && i < in.h; i += 256) {
            square = fmaf(one(x + i), one(x + i), square);
            dot = fmaf(one(g + i) * weight_at(in, side, i), one(x + i), dot);
        }
        square = block_sum<256>(square, partial);
        dot = block_sum<256>(dot, partial2);
        const float rstd = x ? rsqrtf(square / in.h + in.eps) : NAN, pull = dot * rstd * rstd / in.h;
        for (int i = tid; i < in.h; i += 256) {
            const float e = x ? one(x + i) : NAN;
            to[i] = fmaf(one(g + i), e * rstd, to[i]);
            if (d_x) d_x[row * in.h + i] = __float2bfloat16(rstd * fmaf(one(g + i), weight_at(in, side, i), -e * pull));
        }
        __syncthreads();
    }
}

// Backward by number: two or three rows of a block in shared memory.
int pick_backward(int64_t h, bool vector) {
    return pick(AERIE_INPUT_BACKWARD, vector && h <= 4096 ? 1 : 0, [&](int variant) { return variant == 0 || (vector && h <= 7168); });
}

int prepare_drafter_input() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)drafter_input_forward<64, 4>, (const void*)drafter_input_forward<128, 4>, (const void*)drafter_input_forward<128, 7>,
                             (const void*)drafter_input_forward<256, 8>, (const void*)drafter_input_forward_any,
                             (const void*)drafter_input_backward<256, 2, 3, 2>, (const void*)drafter_input_backward<256, 2, 3, 3>,
                             (const void*)drafter_input_backward<448, 2, 2, 2>, (const void*)drafter_input_backward<448, 2, 2, 3>,
                             (const void*)drafter_input_backward<384, 4, 1, 2>, (const void*)drafter_input_backward_any, (const void*)add_weight_sums};
    for (const void* kernel : kernels)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    return 0;
}

}  // namespace aerie

extern "C" int aerie_drafter_input(const void* ids, int ids64, const void* table, int64_t table_stride, int64_t v, const void* state, int64_t state_stride,
                                   const void* embed_weight, const void* state_weight, int weights32, int64_t n, int64_t h, float eps, void* out,
                                   cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (n > INT32_MAX || h > INT32_MAX / 2) return cudaErrorInvalidValue;
    const bool vector = h % 8 == 0 && aligned16(table, table_stride, 2) && aligned16(state, state_stride, 2) && aligned16(embed_weight, 0, 2) &&
                        aligned16(state_weight, 0, 2) && aligned16(out, 0, 2);
    const Inputs in{ids, ids64 != 0, (const __nv_bfloat16*)table, (const __nv_bfloat16*)state, table_stride, v, state_stride, embed_weight, state_weight,
                    weights32 != 0, n, (int)h, eps, vector};
    const dim3 blocks((unsigned)n, 2);
    auto* to = (__nv_bfloat16*)out;
    if (vector && h <= 2048) drafter_input_forward<64, 4><<<blocks, 64, 0, stream>>>(in, to);
    else if (vector && h <= 4096) drafter_input_forward<128, 4><<<blocks, 128, 0, stream>>>(in, to);
    else if (vector && h <= 7168) drafter_input_forward<128, 7><<<blocks, 128, 0, stream>>>(in, to);
    else if (vector && h <= 16384) drafter_input_forward<256, 8><<<blocks, 256, 0, stream>>>(in, to);
    else drafter_input_forward_any<<<blocks, 256, 0, stream>>>(in, to);
    return cudaGetLastError();
}

extern "C" int aerie_backward_blocks(int64_t h) {
    int device = 0, shared = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int wanted = h <= 4096 ? 3 : h <= 7168 ? 2 : 1;  // as the launch below
    const int stages = aerie::pick_backward(h, true) == 1 ? 3 : 2;
    const int bytes = (h <= 4096 ? 2 * 256 : h <= 7168 ? 2 * 448 : 4 * 384) * stages * 32 + 2048;
    const int per_sm = shared / bytes < wanted ? shared / bytes : wanted, blocks = aerie::multiprocessors() * per_sm / 2;
    return blocks > 0 ? blocks : 1;
}

extern "C" int aerie_drafter_input_backward(const void* grad, int64_t grad_stride, const void* ids, int ids64, const void* table, int64_t table_stride,
                                            int64_t v, const void* state, int64_t state_stride, const void* embed_weight, const void* state_weight,
                                            int weights32, int64_t n, int64_t h, float eps, void* d_rows, void* d_state, void* d_embed_weight,
                                            void* d_state_weight, float* sums, int blocks, cudaStream_t stream) {
    using namespace aerie;
    if (n > INT32_MAX / 2 || h > INT32_MAX / 2) return cudaErrorInvalidValue;
    const bool vector = h % 8 == 0 && aligned16(table, table_stride, 2) && aligned16(state, state_stride, 2) && aligned16(embed_weight, 0, 2) &&
                        aligned16(state_weight, 0, 2) && aligned16(grad, grad_stride, 2) && aligned16(d_rows, 0, 2) && aligned16(d_state, 0, 2);
    const Inputs in{ids, ids64 != 0, (const __nv_bfloat16*)table, (const __nv_bfloat16*)state, table_stride, v, state_stride, embed_weight, state_weight,
                    weights32 != 0, n, (int)h, eps, vector};
    const auto* g = (const __nv_bfloat16*)grad;
    auto *rows = (__nv_bfloat16*)d_rows, *d = (__nv_bfloat16*)d_state;
    const int variant = pick_backward(h, vector);
    if (variant < 0) return cudaErrorInvalidValue;
    int code;
    if (vector && h <= 4096 && variant == 1) code = launch_backward<256, 2, 3, 3>(in, g, grad_stride, rows, d, sums, blocks, stream);
    else if (vector && h <= 4096) code = launch_backward<256, 2, 3, 2>(in, g, grad_stride, rows, d, sums, blocks, stream);
    else if (vector && h <= 7168 && variant == 1) code = launch_backward<448, 2, 2, 3>(in, g, grad_stride, rows, d, sums, blocks, stream);
    else if (vector && h <= 7168) code = launch_backward<448, 2, 2, 2>(in, g, grad_stride, rows, d, sums, blocks, stream);
    else if (vector && h <= 12288) code = launch_backward<384, 4, 1, 2>(in, g, grad_stride, rows, d, sums, blocks, stream);
    else {
        drafter_input_backward_any<<<2 * blocks, 256, 0, stream>>>(in, g, grad_stride, rows, d, sums);
        code = cudaGetLastError();
    }
    if (code) return code;
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = {(unsigned)((2 * h + 31) / 32), 1, 1};
    config.blockDim = {512, 1, 1};
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = vector && h <= 12288 ? 1 : 0;  // the other kernel does not say that it is nearly done
    return cudaLaunchKernelEx(&config, add_weight_sums, (const float*)sums, blocks, (int)h, d_embed_weight, d_state_weight, weights32 != 0);
}
