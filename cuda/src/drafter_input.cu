// Op 2: [RMSNorm(table[ids]) * w1, RMSNorm(state) * w2] side by side as [N, 2H], and its backward.
// Side 0 is the embedding, side 1 the state. Forward: one block a row and side, the row in registers. Backward: persistent blocks, each on one side or on
// both, sum their rows' weight gradients in registers and write one partial sum each, which a second kernel adds up.
#include <algorithm>

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
    wait_for_earlier();
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
    wait_for_earlier();
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

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Sums of four values over the warp in 6 exchanges: lanes 8 i to 8 i + 7 answer the sum of v[i].
__device__ __forceinline__ float four_sums(const float v[4]) {
    const int lane = threadIdx.x % 32;
    const bool upper = lane & 16, odd = lane & 8;
    float a = upper ? v[2] : v[0], b = upper ? v[3] : v[1];
    a += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[0] : v[2], 16);
    b += __shfl_xor_sync(0xFFFFFFFFu, upper ? v[1] : v[3], 16);
    float mine = odd ? b : a;
    mine += __shfl_xor_sync(0xFFFFFFFFu, odd ? a : b, 8);
#pragma unroll
    for (int step = 4; step; step >>= 1) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, step);
    return mine;
}

// What a row's sums make of one side: x * rstd is xhat, and pull times x is rstd * xhat * mean(g * w * xhat).
struct Side {
    float rstd, pull;
};

__device__ __forceinline__ Side side_of(float square, float dot, float inverse_h, float eps, bool inside) {
    const float rstd = inside ? rsqrtf(fmaf(square, inverse_h, eps)) : NAN;
    return {rstd, dot * inverse_h * rstd * rstd * rstd};
}

// 8 columns' part of a row's sums; the second one only where `dots`: without a gradient for x nobody asks for it.
__device__ __forceinline__ void look8(const Inputs& in, int side, int at, const uint4& x, const uint4& grad, bool dots, float& square, float& dot) {
    float e[8];
    unpack8(x, e);
#pragma unroll
    for (int j = 0; j < 8; j++) square = fmaf(e[j], e[j], square);
    if (!dots) return;
    float g[8], w[8];
    unpack8(grad, g);
    weights8(in, side, at, w);
#pragma unroll
    for (int j = 0; j < 8; j++) dot = fmaf(g[j] * w[j], e[j], dot);
}

// 8 columns of the gradients: added to dw, and x's written where it is wanted.
__device__ __forceinline__ void gradient8(const Inputs& in, int side, int at, const uint4& x, const uint4& grad, const Side& s, float dw[8], uint4* d_x) {
    float e[8], g[8];
    unpack8(x, e);
    unpack8(grad, g);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        g[j] *= s.rstd;
        dw[j] = fmaf(g[j], e[j], dw[j]);
    }
    if (!d_x) return;
    float w[8];
    weights8(in, side, at, w);
#pragma unroll
    for (int j = 0; j < 8; j++) e[j] = fmaf(g[j], w[j], -e[j] * s.pull);
    __stcs(d_x + at, uint4{pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]), pack(e[6], e[7])});
}

__device__ __forceinline__ void store8(float* to, int at, const float v[8]) {
    reinterpret_cast<float4*>(to)[2 * at] = {v[0], v[1], v[2], v[3]};
    reinterpret_cast<float4*>(to)[2 * at + 1] = {v[4], v[5], v[6], v[7]};
}

// dx = rstd * (g * w - xhat * mean(g * w * xhat)), dw = sum over rows of g * xhat, with xhat = x * rstd. Rows lie in shared memory, STAGES of them: while one is worked on the
// next ones are on their way. A thread copies and reads only its own columns, so only the sums of a row need a barrier.
//
// Here a group of threads works on both sides of a row: one barrier for both. A block has as many groups as its shared memory holds; each goes through rows of its own, and
// the block's weight gradients become one partial sum.
constexpr int GROUP = 256, MAX_GROUPS = 3;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int GROUPS_HERE = 1;  // 99 KB hold no more
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int GROUPS_HERE = 2;  // with more threads this compiler's code for it would spill registers
#else
constexpr int GROUPS_HERE = MAX_GROUPS;
#endif

__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP) : "memory"); }

template <int CH, int STAGES>
__global__ void __launch_bounds__(GROUPS_HERE * GROUP, GROUPS_HERE == 1 ? 2 : 1) drafter_input_backward_whole(
    Inputs in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows, __nv_bfloat16* d_state, float* sums) {
    constexpr int WARPS = GROUP / 32, SIZE = STAGES * 4 * CH * GROUP;  // shared memory of a group
    static_assert(WARPS == 8);
    extern __shared__ uint4 buffer[];  // [groups][STAGES][embedding, its g, state, its g][CH * GROUP]
    __shared__ float partial[MAX_GROUPS][2][4][WARPS];
    const int tid = threadIdx.x % GROUP, group = threadIdx.x / GROUP, groups = blockDim.x / GROUP, lane = tid % 32, vectors = in.h / 8;
    const int step = gridDim.x * groups, n = (int)in.n;
    float dw[2][CH][8] = {};
    auto slot = [&](int stage, int which, int c) -> uint4& { return buffer[group * SIZE + ((stage * 4 + which) * CH + c) * GROUP + tid]; };
    auto request = [&](int stage, int row, const __nv_bfloat16* x) {
        if (row < n) {
            const uint4 *g = reinterpret_cast<const uint4*>(grad + row * grad_stride), *y = reinterpret_cast<const uint4*>(in.state + row * in.state_stride);
#pragma unroll
            for (int c = 0; c < CH; c++) {
                const int at = c * GROUP + tid;
                if (at >= vectors) break;
                cp_async16(&slot(stage, 1, c), g + at);
                cp_async16(&slot(stage, 2, c), y + at);
                cp_async16(&slot(stage, 3, c), g + vectors + at);
            }
#pragma unroll
            for (int c = 0; c < CH; c++) {  // last: its place is known only when the id is there
                const int at = c * GROUP + tid;
                if (x && at < vectors) cp_async16(&slot(stage, 0, c), reinterpret_cast<const uint4*>(x) + at);
            }
        }
        end_group();
    };
    auto row_source = [&](int at) { return at < n ? source(in, at, 0) : nullptr; };
    const float inverse_h = 1.f / in.h;
    cudaGridDependencySynchronize();  // launched early
    int row = blockIdx.x + gridDim.x * group, stage = 0, turn = 0;
    const __nv_bfloat16* sources[STAGES];  // of this row and those that come
#pragma unroll
    for (int s = 0; s < STAGES; s++) sources[s] = row_source(row + s * step);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) request(s, row + s * step, sources[s]);
    for (; row < n; row += step, stage = stage + 1 == STAGES ? 0 : stage + 1, turn ^= 1) {
        wait_group<STAGES - 2>();  // before more is asked for: then the first rows of all blocks come soon
        request(stage == 0 ? STAGES - 1 : stage - 1, row + (STAGES - 1) * step, sources[STAGES - 1]);
        const bool inside = sources[0] != nullptr;
        const __nv_bfloat16* after = row_source(row + STAGES * step);  // an id read now is there when it is needed
        float v[4] = {};  // squares and dots, of either side
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * GROUP + tid;
            if (at >= vectors) break;
            look8(in, 0, at, slot(stage, 0, c), slot(stage, 1, c), d_rows != nullptr, v[0], v[1]);
            look8(in, 1, at, slot(stage, 2, c), slot(stage, 3, c), true, v[2], v[3]);
        }
        const float sum = four_sums(v);
        if (lane % 8 == 0) partial[group][turn][lane / 8][tid / 32] = sum;
        sync_group(group);  // partial has two copies: nobody is two rows ahead
        float mine = partial[group][turn][lane / 8][lane % 8];
#pragma unroll
        for (int width = 4; width; width >>= 1) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, width);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __shfl_sync(0xFFFFFFFFu, mine, 8 * i);
        const Side embed = side_of(v[0], v[1], inverse_h, in.eps, inside), state = side_of(v[2], v[3], inverse_h, in.eps, true);
        uint4 *to_rows = d_rows ? reinterpret_cast<uint4*>(d_rows + (int64_t)row * in.h) : nullptr, *to_state = reinterpret_cast<uint4*>(d_state + (int64_t)row * in.h);
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * GROUP + tid;
            if (at >= vectors) break;
            gradient8(in, 0, at, slot(stage, 0, c), slot(stage, 1, c), embed, dw[0][c], to_rows);
            gradient8(in, 1, at, slot(stage, 2, c), slot(stage, 3, c), state, dw[1][c], to_state);
        }
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) sources[s] = sources[s + 1];
        sources[STAGES - 1] = after;
    }
    cudaTriggerProgrammaticLaunchCompletion();  // the blocks that add the sums may take their places; they wait for this kernel's end
    __syncthreads();  // nobody reads a row any more
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int at = c * GROUP + tid;
        if (at >= vectors) break;
        float* to = reinterpret_cast<float*>(buffer + group * SIZE);
        store8(to, at, dw[0][c]);
        store8(to + in.h, at, dw[1][c]);
    }
    __syncthreads();
    float4* to = reinterpret_cast<float4*>(sums + (int64_t)blockIdx.x * 2 * in.h);
    for (int i = threadIdx.x; i < 4 * vectors; i += blockDim.x) {
        float4 sum = reinterpret_cast<const float4*>(buffer)[i];
        for (int other = 1; other < groups; other++) {
            const float4 more = reinterpret_cast<const float4*>(buffer + other * SIZE)[i];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        to[i] = sum;
    }
}

// For fewer or wider rows: a block on one side, the first half of them on the embedding's.
template <int THREADS, int CH, int PER_SM, int STAGES>
__global__ void __launch_bounds__(THREADS, PER_SM) drafter_input_backward_split(Inputs in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows,
                                                                               __nv_bfloat16* d_state, float* sums) {
    constexpr int WARPS = THREADS / 32;
    static_assert(WARPS <= 16);
    extern __shared__ uint4 buffer[];  // [STAGES][x, g][CH * THREADS]
    __shared__ float partial[2][2][16];
    const int tid = threadIdx.x, lane = tid % 32, vectors = in.h / 8, step = gridDim.x / 2, n = (int)in.n;
    const int side = (int)blockIdx.x >= step, number = blockIdx.x - side * step;
    float dw[CH][8] = {};
    if (tid < 64) partial[tid / 32][tid % 32 / 16][tid % 16] = 0.f;  // where there are no warps
    __nv_bfloat16* d_x = side ? d_state : d_rows;
    auto slot = [&](int stage, int which, int c) -> uint4& { return buffer[((stage * 2 + which) * CH + c) * THREADS + tid]; };
    auto request = [&](int stage, int row, const __nv_bfloat16* x) {
        if (row < n) {
            const uint4* g_from = reinterpret_cast<const uint4*>(grad + row * grad_stride + side * in.h);
#pragma unroll
            for (int c = 0; c < CH; c++) {
                const int at = c * THREADS + tid;
                if (at >= vectors) break;
                cp_async16(&slot(stage, 1, c), g_from + at);
            }
#pragma unroll
            for (int c = 0; c < CH; c++) {
                const int at = c * THREADS + tid;
                if (x && at < vectors) cp_async16(&slot(stage, 0, c), reinterpret_cast<const uint4*>(x) + at);
            }
        }
        end_group();
    };
    auto row_source = [&](int at) { return at < n ? source(in, at, side) : nullptr; };
    const float inverse_h = 1.f / in.h;
    cudaGridDependencySynchronize();  // launched early
    int row = number, stage = 0, turn = 0;
    const __nv_bfloat16* sources[STAGES];  // of this row and those that come
#pragma unroll
    for (int s = 0; s < STAGES; s++) sources[s] = row_source(row + s * step);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) request(s, row + s * step, sources[s]);
    __syncthreads();  // partial is zero
    for (; row < n; row += step, stage = stage + 1 == STAGES ? 0 : stage + 1, turn ^= 1) {
        wait_group<STAGES - 2>();
        request(stage == 0 ? STAGES - 1 : stage - 1, row + (STAGES - 1) * step, sources[STAGES - 1]);
        const bool inside = sources[0] != nullptr;
        const __nv_bfloat16* after = row_source(row + STAGES * step);  // an id read now is there when it is needed
        float square = 0.f, dot = 0.f;
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * THREADS + tid;
            if (at >= vectors) break;
            look8(in, side, at, slot(stage, 0, c), slot(stage, 1, c), d_x != nullptr, square, dot);
        }
        const bool upper = lane >= 16;
        float sum = upper ? dot : square;  // lanes 0 to 15 sum the squares, the others the dots
        sum += __shfl_xor_sync(0xFFFFFFFFu, upper ? square : dot, 16);
#pragma unroll
        for (int width = 8; width; width >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
        if (lane % 16 == 0) partial[turn][lane / 16][tid / 32] = sum;
        __syncthreads();  // partial has two copies: nobody is two rows ahead
        sum = partial[turn][lane / 16][lane % 16];
#pragma unroll
        for (int width = 8; width; width >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
        const Side s = side_of(__shfl_sync(0xFFFFFFFFu, sum, 0), __shfl_sync(0xFFFFFFFFu, sum, 16), inverse_h, in.eps, inside);
        uint4* to = d_x ? reinterpret_cast<uint4*>(d_x + (int64_t)row * in.h) : nullptr;
#pragma unroll
        for (int c = 0; c < CH; c++) {
            const int at = c * THREADS + tid;
            if (at >= vectors) break;
            gradient8(in, side, at, slot(stage, 0, c), slot(stage, 1, c), s, dw[c], to);
        }
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) sources[s] = sources[s + 1];
        sources[STAGES - 1] = after;
    }
    cudaTriggerProgrammaticLaunchCompletion();
    float* to = sums + (int64_t)(number * 2 + side) * in.h;
#pragma unroll
    for (int c = 0; c < CH; c++) {
        const int at = c * THREADS + tid;
        if (at < vectors) store8(to, at, dw[c]);
    }
}

// sums [blocks, 2, h] -> the two weight gradients. 32 columns a block, 16 threads a column, a thread's loads 16 at once.
__global__ void __launch_bounds__(512) add_weight_sums(const float* sums, int blocks, int h, void* d_embed_weight, void* d_state_weight, bool weights32) {
    constexpr int AT_ONCE = 16;
    __shared__ float partial[16][33];
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32, column = blockIdx.x * 32 + lane;  // of 2 h
    const int count = column < 2 * h ? blocks : 0;
    wait_for_earlier();
    float sum = 0.f;
    for (int b = group; b < count; b += 16 * AT_ONCE) {
        float part[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) part[u] = b + 16 * u < count ? sums[(int64_t)(b + 16 * u) * 2 * h + column] : 0.f;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) sum += part[u];
    }
    partial[group][lane] = sum;
    __syncthreads();
    if (group || column >= 2 * h) return;
#pragma unroll
    for (int i = 1; i < 16; i++) sum += partial[i][lane];
    void* to = column < h ? d_embed_weight : d_state_weight;
    const int at = column < h ? column : column - h;
    if (weights32) static_cast<float*>(to)[at] = sum;
    else static_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16(sum);
}

__global__ void __launch_bounds__(256) drafter_input_backward_any(Inputs in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows,
                                                                  __nv_bfloat16* d_state, float* sums) {
    wait_for_earlier();
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

using Backward = void (*)(Inputs, const __nv_bfloat16*, int64_t, __nv_bfloat16*, __nv_bfloat16*, float*);

struct Plan {
    Backward kernel;  // null: it does not take this width
    int threads, bytes, per_sm, kinds, groups;  // shared memory and blocks a multiprocessor; kinds of blocks: two where a block has one side only; at most so many groups
};

template <int THREADS, int CH, int PER_SM, int STAGES>
Plan split() {
    return {drafter_input_backward_split<THREADS, CH, PER_SM, STAGES>, THREADS, 2 * STAGES * CH * THREADS * 16, PER_SM, 2, 1};
}

// Backward by number.
Plan plan_of(int64_t h, int variant) {
    if (variant == 1) return h <= 4096 ? Plan{drafter_input_backward_whole<2, 2>, GROUP, 2 * 4 * 2 * GROUP * 16, 1, 1, MAX_GROUPS} : Plan{};
    if (h <= 4096) return split<256, 2, 4, 2>();
    if (h <= 7168) return split<448, 2, 2, 2>();
    return h <= 12288 ? split<384, 4, 1, 2>() : Plan{};
}

// Groups of a block: as many as it may have threads and shared memory on this device.
int groups_of(const Plan& plan) {
    if (plan.groups == 1) return 1;
    static int known[64];
    int device = 0, shared = 0;
    cudaGetDevice(&device);
    if (device < 64 && known[device]) return known[device];
    cudaFuncAttributes info{};
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncGetAttributes(&info, (const void*)plan.kernel);
    int groups = plan.groups;
    while (groups > 1 && (groups * plan.threads > info.maxThreadsPerBlock || groups * plan.bytes + 1024 > shared)) groups--;
    return device < 64 ? known[device] = groups : groups;
}

int launch_backward(const Plan& plan, int blocks, const Inputs& in, const __nv_bfloat16* grad, int64_t grad_stride, __nv_bfloat16* d_rows, __nv_bfloat16* d_state, float* sums,
                    cudaStream_t stream) {
    const int groups = groups_of(plan), bytes = groups * plan.bytes;
    if (const cudaError_t code = cudaFuncSetAttribute(plan.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return code;
    return launch(plan.kernel, blocks, groups * plan.threads, bytes, stream, in, grad, grad_stride, d_rows, d_state, sums);
}

// Both sides of a row in a block, where the rows pay for what that costs once: 4,096 of them did not on an H200, 8,192 did.
constexpr int64_t WHOLE_ROWS = 6144;

int pick_backward(int64_t n, int64_t h, bool vector) {
    return pick(AERIE_INPUT_BACKWARD, vector && h <= 4096 && n >= WHOLE_ROWS ? 1 : 0, [&](int variant) { return variant == 0 || (vector && h <= 4096); });
}

int prepare_drafter_input() {
    cudaFuncAttributes info;
    const void* kernels[] = {(const void*)drafter_input_forward<64, 4>, (const void*)drafter_input_forward<128, 4>, (const void*)drafter_input_forward<128, 7>,
                             (const void*)drafter_input_forward<256, 8>, (const void*)drafter_input_forward_any,
                             (const void*)drafter_input_backward_any, (const void*)add_weight_sums};
    for (const void* kernel : kernels)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    for (const int64_t h : {4096, 7168, 12288})
        for (int variant = 0; variant < 2; variant++)
            if (const Backward kernel = plan_of(h, variant).kernel)
                if (const cudaError_t code = cudaFuncGetAttributes(&info, (const void*)kernel)) return code;
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
    if (vector && h <= 2048) return launch(drafter_input_forward<64, 4>, blocks, 64, 0, stream, in, to);
    if (vector && h <= 4096) return launch(drafter_input_forward<128, 4>, blocks, 128, 0, stream, in, to);
    if (vector && h <= 7168) return launch(drafter_input_forward<128, 7>, blocks, 128, 0, stream, in, to);
    if (vector && h <= 16384) return launch(drafter_input_forward<256, 8>, blocks, 256, 0, stream, in, to);
    return launch(drafter_input_forward_any, blocks, 256, 0, stream, in, to);
}

extern "C" int aerie_backward_blocks(int64_t n, int64_t h) {
    int device = 0, shared = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const aerie::Plan plan = aerie::plan_of(h, aerie::pick_backward(n, h, true));
    int64_t blocks = aerie::multiprocessors();
    if (plan.kernel) {
        const int fit = shared / (plan.bytes * aerie::groups_of(plan) + 2048);
        blocks = blocks * std::min(fit, plan.per_sm) / plan.kinds;
    }
    return (int)std::max<int64_t>(1, std::min(blocks, n));
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
    const int variant = pick_backward(n, h, vector);
    if (variant < 0) return cudaErrorInvalidValue;
    const Plan plan = vector ? plan_of(h, variant) : Plan{};
    if (const int code = plan.kernel ? launch_backward(plan, plan.kinds * blocks, in, g, grad_stride, rows, d, sums, stream)
                                     : launch(drafter_input_backward_any, 2 * blocks, 256, 0, stream, in, g, grad_stride, rows, d, sums))
        return code;
    return launch(add_weight_sums, (unsigned)((2 * h + 31) / 32), 512, 0, stream, sums, blocks, (int)h, d_embed_weight, d_state_weight, weights32 != 0);
}
