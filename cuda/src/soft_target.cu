// Op 1: loss, argmax match, acceptance mass, in-vocabulary flag and gradient of draft logits against the target's distribution.
//
// Everything needs a second look at both rows: the gradient w * (m * q - p) needs m = sum p and the draft's log-sum-exp. Both rows of 32,000 columns are 128 KB,
// more than the 99 KB that a block of SM120 has. So a cluster of blocks shares a row, each keeps its part of both rows in shared memory, and they exchange their
// sums through distributed shared memory. The loop over rows is persistent and pipelined: as soon as the second look has used 8 columns, it asks for the same
// columns of the next row (cp.async), so loads, arithmetic and stores overlap and each input is read from device memory once. One cluster barrier a row.
// A thread copies and writes only its own columns, so nothing else needs a barrier; what the last row answered is asked for before a row's second look and written
// behind it, so that the second look does not wait for other blocks' memory. Rows too wide, or not on 16 bytes, take the two-pass kernel, whose
// second read mostly hits the L2.
//
// Exponentials are in base 2 and sums are relative to a shift near the largest value, an integer where logits are of usual size: then
// fma(d, log2(e), -shift) is exact enough in one instruction. Huge logits (above PLAIN) are scaled first and subtracted after, so that equal logits stay equal.
// Sums are relative to the largest value that a warp saw; combine() brings them together.
#include <cooperative_groups.h>

#include <type_traits>

#include "common.cuh"

namespace aerie {

struct Args {
    const __nv_bfloat16 *draft, *target;
    int64_t draft_stride, target_stride, grad_stride;
    const float* lse;
    const int64_t* top;
    const float* weights;
    const int64_t* rows;
    int64_t n, m;
    int vd;
    bool renormalize;
    float* loss;
    bool* match;
    float* accept;
    bool* in_vocab;
    __nv_bfloat16* grad;
};

constexpr float PLAIN = 1024.f;  // largest magnitude of usual logits

// x * log2(e), finite where x is; +inf becomes NaN, as inf - inf would.
__device__ __forceinline__ float scaled(float x) { return x == INFINITY ? NAN : fminf(x * LOG2E, BIG); }

// The shift for a largest logit of `top`.
__device__ __forceinline__ float shift_of(float top) { return fabsf(top) <= PLAIN ? rintf(top * LOG2E) : finite_shift(top * LOG2E); }

__device__ __forceinline__ bool plain(float shift) { return fabsf(shift) <= PLAIN * 1.5f; }

// x * log2(e) - shift
template <bool PLAIN_ROW>
__device__ __forceinline__ float relative(float x, float shift) {
    return PLAIN_ROW ? fmaf(x, LOG2E, -shift) : scaled(x) - shift;
}

// What a row's first look gathers.
struct Stats {
    float d_top;  // largest draft logit; shift_of(d_top) is the draft's shift
    float d_sum;  // sum of exp2(d2), d2 = d * log2(e) - shift
    float t_max;  // shift of p: the given log-sum-exp, or about the largest target logit, * log2(e)
    float p_sum;  // sum of p = exp2(t * log2(e) - t_max)
    float cross;  // sum of p * d2
};

// The sums so far, relative to larger shifts.
__device__ __forceinline__ void rebase(Stats& s, float d_top, float t_max) {
    const float down = shift_of(s.d_top) - shift_of(d_top), t_scale = exp2_fast(s.t_max - t_max);
    s.d_sum *= exp2_fast(down);
    s.p_sum *= t_scale;
    s.cross = s.p_sum > 0.f ? fmaf(s.p_sum, down, s.cross * t_scale) : 0.f;  // without p, down may be -inf and must not count
    s.d_top = d_top;
    s.t_max = t_max;
}

// Every group of WIDTH lanes brings its sums together; all lanes get the result.
template <int WIDTH>
__device__ __forceinline__ Stats combine(Stats s) {
    float d_top = s.d_top, t_max = s.t_max;
#pragma unroll
    for (int step = WIDTH / 2; step; step >>= 1) {
        d_top = fmaxf(d_top, __shfl_xor_sync(~0u, d_top, step));
        t_max = fmaxf(t_max, __shfl_xor_sync(~0u, t_max, step));
    }
    rebase(s, d_top, t_max);
#pragma unroll
    for (int step = WIDTH / 2; step; step >>= 1) {
        s.d_sum += __shfl_xor_sync(~0u, s.d_sum, step);
        s.p_sum += __shfl_xor_sync(~0u, s.p_sum, step);
        s.cross += __shfl_xor_sync(~0u, s.cross, step);
    }
    return s;
}

// The sums of PARTS warps, at `part(i)`, brought together; all lanes get the result.
template <int PARTS, typename Part>
__device__ __forceinline__ Stats combine_parts(Part part) {
    constexpr int WIDTH = PARTS < 32 ? PARTS : 32;
    const int lane = threadIdx.x % 32;
    Stats s = part(lane % WIDTH);
#pragma unroll
    for (int first = WIDTH; first < PARTS; first += WIDTH) {
        Stats other = part(first + lane);
        const float d_top = fmaxf(s.d_top, other.d_top), t_max = fmaxf(s.t_max, other.t_max);
        rebase(s, d_top, t_max);
        rebase(other, d_top, t_max);
        s.d_sum += other.d_sum, s.p_sum += other.p_sum, s.cross += other.cross;
    }
    return combine<WIDTH>(s);
}

template <bool PLAIN_ROW, bool GUARD>
__device__ __forceinline__ void first_look(uint32_t d, uint32_t t, float d_shift, Stats& s) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float d2 = relative<PLAIN_ROW>(half ? high(d) : low(d), d_shift);
        const float p = exp2_fast(relative<PLAIN_ROW>(half ? high(t) : low(t), s.t_max));
        s.d_sum += exp2_fast(d2);
        s.p_sum += p;
        if (!GUARD || p > 0.f) s.cross = fmaf(p, d2, s.cross);  // without the guard 0 * -inf makes cross NaN: then this is done again
    }
}

template <bool PLAIN_ROW, bool GUARD>
__device__ __forceinline__ void first_look(const uint4& d, const uint4& t, float d_shift, Stats& s) {
    first_look<PLAIN_ROW, GUARD>(d.x, t.x, d_shift, s);
    first_look<PLAIN_ROW, GUARD>(d.y, t.y, d_shift, s);
    first_look<PLAIN_ROW, GUARD>(d.z, t.z, d_shift, s);
    first_look<PLAIN_ROW, GUARD>(d.w, t.w, d_shift, s);
}

// What the second look needs, the same for all threads.
struct Row {
    float d_max, q_log;  // q = exp2(d2 - q_log); for a plain row d_max holds both
    float t_max, p_log;  // p = exp2(t2 - p_log); likewise
    float q_scale, p_scale;  // gradient = q_scale * q - p_scale * p
    float loss;
    bool plain;
};

__device__ __forceinline__ Row finish(Stats s, bool has_lse, float weight, bool renormalize) {
    Row r;
    float mass = s.p_sum, cross = s.cross;
    r.d_max = shift_of(s.d_top);
    r.t_max = s.t_max;
    r.p_log = 0.f;
    if (!has_lse && s.p_sum > 0.f) {
        r.p_log = __log2f(s.p_sum);
        cross /= s.p_sum;
        mass = 1.f;
    }
    const bool empty = mass == 0.f;  // no target in sight
    if (empty) r.p_log = INFINITY;
    float p_scale = 1.f;
    if (renormalize && !empty) {
        p_scale = 1.f / mass;
        cross *= p_scale;
        mass = 1.f;
    }
    const bool hopeless = s.d_sum == 0.f;  // no draft logit above -inf
    r.q_log = hopeless ? INFINITY : __log2f(s.d_sum);
    r.q_scale = hopeless || empty ? 0.f : weight * mass;
    r.p_scale = weight * p_scale;
    r.loss = empty ? 0.f : hopeless ? weight * INFINITY : weight * (mass * r.q_log - cross) * LN2;
    r.plain = plain(r.d_max) && plain(s.t_max);
    if (r.plain) {
        r.d_max += r.q_log;
        r.t_max += r.p_log;
    }
    return r;
}

template <bool PLAIN_ROW>
__device__ __forceinline__ uint32_t second_look(uint32_t d, uint32_t t, const Row& r, float& accept) {
    float g[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float d2 = relative<PLAIN_ROW>(half ? high(d) : low(d), r.d_max), t2 = relative<PLAIN_ROW>(half ? high(t) : low(t), r.t_max);
        const float q = exp2_fast(PLAIN_ROW ? d2 : d2 - r.q_log), p = exp2_fast(PLAIN_ROW ? t2 : t2 - r.p_log);
        accept += fminf(p, q);
        g[half] = fmaf(r.q_scale, q, -r.p_scale * p);
    }
    return pack(g[0], g[1]);
}

template <bool PLAIN_ROW>
__device__ __forceinline__ uint4 second_look(const uint4& d, const uint4& t, const Row& r, float& accept) {
    uint4 g;
    g.x = second_look<PLAIN_ROW>(d.x, t.x, r, accept);
    g.y = second_look<PLAIN_ROW>(d.y, t.y, r, accept);
    g.z = second_look<PLAIN_ROW>(d.z, t.z, r, accept);
    g.w = second_look<PLAIN_ROW>(d.w, t.w, r, accept);
    return g;
}

// Which target row, which shift of p and which weight row `row` has.
struct Meta {
    float weight;
    int64_t target;  // -1: out of range
    float t_shift;   // the given log-sum-exp * log2(e), within [-BIG, BIG]; -inf as BIG: p is 0
    int64_t top;
};

__device__ __forceinline__ Meta meta_of(const Args& a, int64_t row) {
    Meta meta{1.f, row, 0.f, -1};
    if (row >= a.n) return meta;
    if (a.weights) meta.weight = a.weights[row];
    if (a.rows) meta.target = a.rows[row];
    if (meta.target < 0 || meta.target >= a.m) {
        meta.target = -1;
        return meta;
    }
    meta.top = a.top[meta.target];
    if (a.lse) {
        const float lse = a.lse[meta.target];
        meta.t_shift = lse == -INFINITY ? BIG : finite_shift(lse * LOG2E);
    }
    return meta;
}

__device__ __forceinline__ void write_outputs(const Args& a, int64_t row, const Meta& meta, float loss, float accept, int best) {
    const bool live = meta.weight != 0.f;
    const bool bad = live && meta.target < 0;
    a.loss[row] = bad ? NAN : live ? loss : 0.f;
    a.accept[row] = bad ? NAN : live ? accept : 0.f;
    a.in_vocab[row] = live && meta.top >= 0;
    a.match[row] = live && !bad && best == meta.top;
}

// A cluster of CLUSTER blocks a row; shared memory holds 2 * ceil(vd / 8 / CLUSTER) * 16 bytes a block. vd is a multiple of 8, everything on 16 bytes.
constexpr int RESIDENT = 128, WIDE = 512;  // threads of a block: of this kernel, and of the two-pass one below

template <int CLUSTER>
__global__ void __launch_bounds__(RESIDENT) soft_target_resident(Args a) {
    namespace cg = cooperative_groups;
    constexpr int THREADS = RESIDENT, WARPS = THREADS / 32, PARTS = WARPS * CLUSTER;
    extern __shared__ uint4 buffer[];  // [2][mine]: draft, target
    // Read by the other blocks behind the next barrier while this one is already a row further: two copies of what is written before the barrier, three of what
    // is written behind it.
    __shared__ Stats warp_stats[2][WARPS];
    __shared__ float warp_accept[3][WARPS];
    __shared__ int best[3];  // lowest column of this block that holds the row's largest draft logit
    cg::cluster_group cluster = cg::this_cluster();
    const int tid = threadIdx.x, lane = tid % 32, rank = CLUSTER == 1 ? 0 : (int)cluster.block_rank();
    const int vectors = a.vd / 8, share = (vectors + CLUSTER - 1) / CLUSTER, first = rank * share;
    const int mine = max(0, min(share, vectors - first));
    uint4 *d_buf = buffer, *t_buf = buffer + share;
    const int64_t clusters = gridDim.x / CLUSTER;
    int64_t row = blockIdx.x / CLUSTER;

    auto request = [&](int i, const uint4* d, const uint4* t) {
        cp_async16(d_buf + i, d + i);
        cp_async16(t_buf + i, t + i);
    };
    auto draft_row = [&](int64_t r) { return reinterpret_cast<const uint4*>(a.draft + r * a.draft_stride) + first; };
    auto target_row = [&](const Meta& meta) { return reinterpret_cast<const uint4*>(a.target + meta.target * a.target_stride) + first; };
    auto lives = [&](int64_t r, const Meta& meta) { return r < a.n && meta.weight != 0.f && meta.target >= 0; };

    Meta meta = meta_of(a, row), old_meta = meta;
    float loss = 0.f, old_loss = 0.f;
    if (lives(row, meta))
        for (int i = tid; i < mine; i += THREADS) request(i, draft_row(row), target_row(meta));

    int step = 0;
    // What a row answered: block 0's first warp gathers it behind the barrier that follows the row, a part a lane, and publishes it when the values have come.
    float old_accept = 0.f;
    int old_best = INT32_MAX;
    auto gather = [&](int slot) {
        old_accept = 0.f, old_best = INT32_MAX;
        for (int part = lane; part < PARTS; part += 32) {
            old_accept += *cluster.map_shared_rank(&warp_accept[slot][part % WARPS], part / WARPS);
            old_best = min(old_best, *cluster.map_shared_rank(&best[slot], part / WARPS));
        }
    };
    auto publish = [&](int64_t r) {
        const float accept = warp_sum(old_accept);
        const int at = __reduce_min_sync(~0u, old_best);
        if (lane == 0) write_outputs(a, r, old_meta, old_loss, accept, at);
    };

    for (; row < a.n; row += clusters, step++) {
        const int64_t next = row + clusters;
        const Meta next_meta = meta_of(a, next);
        const bool live = lives(row, meta);
        float my_top = -INFINITY;
        Stats s;
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (live) {
            uint32_t d_top = NEG_INF2, t_top = NEG_INF2;
#pragma unroll 4
            for (int i = tid; i < mine; i += THREADS) {
                const uint4 d = d_buf[i];
                d_top = max2(d_top, max2(max2(d.x, d.y), max2(d.z, d.w)));
                if (!a.lse) {
                    const uint4 t = t_buf[i];
                    t_top = max2(t_top, max2(max2(t.x, t.y), max2(t.z, t.w)));
                }
            }
            my_top = fmaxf(low(d_top), high(d_top));
            const Stats none{warp_max(my_top), 0.f, a.lse ? meta.t_shift : shift_of(warp_max(fmaxf(low(t_top), high(t_top)))), 0.f, 0.f};  // shifts of the warp
            const float d_shift = shift_of(none.d_top);
            const bool usual = plain(d_shift) && plain(none.t_max);
            s = none;
            if (usual) {
#pragma unroll 2
                for (int i = tid; i < mine; i += THREADS) first_look<true, false>(d_buf[i], t_buf[i], d_shift, s);
            }
            if (!usual || __any_sync(~0u, s.cross != s.cross)) {  // rare: huge logits, or -inf in both
                s = none;
#pragma unroll 1
                for (int i = tid; i < mine; i += THREADS) first_look<false, true>(d_buf[i], t_buf[i], d_shift, s);
            }
            s.d_sum = warp_sum(s.d_sum);
            s.p_sum = warp_sum(s.p_sum);
            s.cross = warp_sum(s.cross);
            if (lane == 0) warp_stats[step % 2][tid / 32] = s;
        }
        if (tid == 0) best[step % 3] = INT32_MAX;
        if (CLUSTER == 1) __syncthreads();
        else cluster.sync();
        const bool publishes = step > 0 && rank == 0 && tid < 32;
        if (publishes) gather((step + 2) % 3);

        uint4* g_row = a.grad ? reinterpret_cast<uint4*>(a.grad + row * a.grad_stride) + first : nullptr;
        const bool next_live = lives(next, next_meta);
        const uint4 *next_d = draft_row(next), *next_t = target_row(next_meta);
        float accept = 0.f;
        if (live) {
            s = combine_parts<PARTS>([&](int part) { return *cluster.map_shared_rank(&warp_stats[step % 2][part % WARPS], part / WARPS); });
            const Row r = finish(s, a.lse != nullptr, meta.weight, a.renormalize);
            loss = r.loss;
            // Mostly one lane of the cluster has the largest: its warp looks through that lane's columns side by side.
            int at = INT32_MAX;
            for (unsigned holders = __ballot_sync(~0u, my_top == s.d_top); holders; holders &= holders - 1) {
                for (int i = tid - lane + __ffs(holders) - 1 + lane * THREADS; i < mine; i += 32 * THREADS) {
                    const int in8 = find8(d_buf[i], s.d_top);
                    if (in8 < 8) at = min(at, (first + i) * 8 + in8);
                }
            }
            if (at != INT32_MAX) atomicMin(&best[step % 3], at);
            __syncwarp();  // the other lanes' columns are read before the next row's come
            auto look = [&](auto usual) {  // addresses that only move on: fewer instructions
                uint4 *d_at = d_buf + tid, *t_at = t_buf + tid, *g_at = g_row + tid;
                const uint4 *d_next = next_d + tid, *t_next = next_t + tid, *const end = d_buf + mine;
#pragma unroll 2
                for (; d_at < end; d_at += THREADS, t_at += THREADS, g_at += THREADS, d_next += THREADS, t_next += THREADS) {
                    const uint4 out = second_look<decltype(usual)::value>(*d_at, *t_at, r, accept);
                    if (next_live) {
                        cp_async16(d_at, d_next);
                        cp_async16(t_at, t_next);
                    }
                    if (g_row) __stcs(g_at, out);
                }
            };
            if (r.plain) look(std::true_type{});
            else look(std::false_type{});
        } else {
            const uint32_t fill = meta.weight == 0.f ? 0u : 0x7FC07FC0u;  // NaN where the target row is out of range
            for (int i = tid; i < mine; i += THREADS) {
                if (g_row) __stcs(g_row + i, uint4{fill, fill, fill, fill});
                if (next_live) request(i, next_d, next_t);
            }
        }
        accept = warp_sum(accept);
        if (lane == 0) warp_accept[step % 3][tid / 32] = accept;
        if (publishes) publish(row - clusters);
        old_meta = meta;
        old_loss = loss;
        meta = next_meta;
    }
    if (CLUSTER == 1) __syncthreads();
    else cluster.sync();
    if (step > 0 && rank == 0 && tid < 32) {
        gather((step + 2) % 3);
        publish(row - clusters);
    }
    if (CLUSTER > 1) cluster.sync();  // a block's shared memory must outlive its readers
}

// Any width, any alignment, one block a row, both inputs read twice.
__global__ void __launch_bounds__(WIDE, 2) soft_target_wide(Args a) {
    constexpr int WARPS = WIDE / 32;
    __shared__ Stats warp_stats[WARPS];
    __shared__ float warp_accept[WARPS];
    __shared__ int best;
    const int tid = threadIdx.x;
    const int64_t row = blockIdx.x;
    const Meta meta = meta_of(a, row);
    __nv_bfloat16* g = a.grad ? a.grad + row * a.grad_stride : nullptr;
    if (meta.weight == 0.f || meta.target < 0) {
        if (g)
            for (int i = tid; i < a.vd; i += WIDE) g[i] = __float2bfloat16(meta.weight == 0.f ? 0.f : NAN);
        if (tid == 0) write_outputs(a, row, meta, 0.f, 0.f, -1);
        return;
    }
    const __nv_bfloat16 *d = a.draft + row * a.draft_stride, *t = a.target + meta.target * a.target_stride;
    // 16-byte accesses where draft, target and gradient reach a 16-byte border together
    const int head = min(a.vd, (int)((16 - (uintptr_t)d % 16) % 16 / 2));
    const bool together = (uintptr_t)(t + head) % 16 == 0 && (!g || (uintptr_t)(g + head) % 16 == 0) && (uintptr_t)(d + head) % 16 == 0;
    const int vectors = together ? (a.vd - head) / 8 : 0, tail = together ? head + vectors * 8 : 0, singles = a.vd - vectors * 8;
    const uint4 *dv = reinterpret_cast<const uint4*>(d + head), *tv = reinterpret_cast<const uint4*>(t + head);

    Stats s{-INFINITY, 0.f, a.lse ? meta.t_shift : -BIG, 0.f, 0.f};
    int top_at = INT32_MAX;
    auto raise = [&](float d_new, float t_new) {  // shifts for these values too
        const float d_top = fmaxf(s.d_top, d_new), t_max = a.lse ? s.t_max : fmaxf(s.t_max, shift_of(t_new));
        if (d_top != s.d_top || t_max != s.t_max) rebase(s, d_top, t_max);
    };
    // the two logits of singles() are a column and -inf, which counts nothing
    auto single = [&](const __nv_bfloat16* p) { return __bfloat16_as_ushort(*p) | 0xFF800000u; };
    for (int i = tid; i < singles; i += WIDE) {
        const int at = i < head || !together ? i : tail + i - head;
        const float value = one(d + at);
        if (value > s.d_top || (value == s.d_top && at < top_at)) top_at = at;
        raise(value, one(t + at));
        first_look<false, true>(single(d + at), single(t + at), shift_of(s.d_top), s);
    }
    for (int i = tid; i < vectors; i += WIDE) {
        const uint4 x = dv[i], y = tv[i];
        const float here = max8(x);
        if (here > s.d_top || (here == s.d_top && head + i * 8 < top_at)) {
            const int in8 = find8(x, here);
            if (in8 < 8) top_at = here > s.d_top ? head + i * 8 + in8 : min(top_at, head + i * 8 + in8);
        }
        raise(here, a.lse ? 0.f : max8(y));
        first_look<false, true>(x, y, shift_of(s.d_top), s);
    }
    const float top = s.d_top;
    s = combine<32>(s);
    if (tid % 32 == 0) warp_stats[tid / 32] = s;
    if (tid == 0) best = INT32_MAX;
    __syncthreads();
    s = combine<WARPS>(warp_stats[tid % WARPS]);
    const Row r = finish(s, a.lse != nullptr, meta.weight, a.renormalize);
    if (top_at != INT32_MAX && top == s.d_top) atomicMin(&best, top_at);

    float accept = 0.f;
    for (int i = tid; i < vectors; i += WIDE) {
        const uint4 out = r.plain ? second_look<true>(dv[i], tv[i], r, accept) : second_look<false>(dv[i], tv[i], r, accept);
        if (g) __stcs(reinterpret_cast<uint4*>(g + head) + i, out);
    }
    for (int i = tid; i < singles; i += WIDE) {
        const int at = i < head || !together ? i : tail + i - head;
        const uint32_t x = single(d + at), y = single(t + at), out = r.plain ? second_look<true>(x, y, r, accept) : second_look<false>(x, y, r, accept);
        if (g) g[at] = __ushort_as_bfloat16((unsigned short)(out & 0xFFFFu));
    }
    accept = warp_sum(accept);
    if (tid % 32 == 0) warp_accept[tid / 32] = accept;
    __syncthreads();
    if (tid < 32) {
        accept = warp_sum(tid < WARPS ? warp_accept[tid] : 0.f);
        if (tid == 0) write_outputs(a, row, meta, r.loss, accept, best);
    }
}

__global__ void __launch_bounds__(256) scale_rows(__nv_bfloat16* grad, int64_t stride, int v, const float* scale) {
    const float factor = scale[blockIdx.x];
    if (factor == 1.f) return;
    __nv_bfloat16* row = grad + blockIdx.x * stride;
    for (int i = threadIdx.x; i < v; i += 256) row[i] = __float2bfloat16(one(row + i) * factor);
}

template <int CLUSTER>
int launch_resident(const Args& a, cudaStream_t stream) {
    const auto kernel = soft_target_resident<CLUSTER>;
    const int share = (a.vd / 8 + CLUSTER - 1) / CLUSTER, bytes = 2 * share * (int)sizeof(uint4);
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {CLUSTER, 1, 1};
    config.blockDim = {RESIDENT, 1, 1};
    config.gridDim = {CLUSTER, 1, 1};
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    code = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (code != cudaSuccess) return code;
    if (clusters == 0) return cudaErrorInvalidConfiguration;
    config.gridDim.x = (unsigned)(a.n < clusters ? a.n : clusters) * CLUSTER;
    return cudaLaunchKernelEx(&config, kernel, a);
}

// The kernels by number; a null launch is the two-pass kernel.
struct Variant {
    int (*launch)(const Args&, cudaStream_t);
    const void* kernel;
    int cluster;
};
constexpr int LIMIT = 98 * 1024;  // bytes of dynamic shared memory a block: 99 KB on SM120, less the static part and 1 KB that the system takes
template <int CLUSTER>
constexpr Variant variant_of() {
    return {launch_resident<CLUSTER>, (const void*)soft_target_resident<CLUSTER>, CLUSTER};
}
const Variant VARIANTS[] = {variant_of<1>(), variant_of<2>(), variant_of<4>(), variant_of<8>(), {nullptr, (const void*)soft_target_wide, 0}};
constexpr int TWO_PASSES = 4;

int prepare_soft_target() {
    cudaFuncAttributes info;
    for (const Variant& variant : VARIANTS)
        if (const cudaError_t code = cudaFuncGetAttributes(&info, variant.kernel)) return code;
    return cudaFuncGetAttributes(&info, (const void*)scale_rows);
}

}  // namespace aerie

extern "C" int aerie_soft_target_ce(const void* draft, int64_t draft_stride, const void* target, int64_t target_stride, const float* lse, const int64_t* top,
                                    const float* weights, const int64_t* rows, int64_t n, int64_t m, int64_t vd, int renormalize, float* loss, bool* match,
                                    float* accept, bool* in_vocab, void* grad, int64_t grad_stride, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (n > INT32_MAX || vd > INT32_MAX - 8192) return cudaErrorInvalidValue;
    const Args a{(const __nv_bfloat16*)draft, (const __nv_bfloat16*)target, draft_stride, target_stride, grad_stride, lse, top, weights, rows, n, m, (int)vd,
                 renormalize != 0, loss, match, accept, in_vocab, (__nv_bfloat16*)grad};
    const bool vector = vd % 8 == 0 && aligned16(draft, draft_stride, 2) && aligned16(target, target_stride, 2) && (!grad || aligned16(grad, grad_stride, 2));
    // A block takes 64 KB where several of those fit on a multiprocessor, else 32 KB.
    int device = 0, per_sm = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int64_t scale = per_sm >= 200 * 1024 ? 2 : 1;
    const int best = !vector ? TWO_PASSES : vd <= 8192 * scale ? 0 : vd <= 16384 * scale ? 1 : vd <= 32768 * scale ? 2 : vd <= 200704 ? 3 : TWO_PASSES;
    const int variant = pick(AERIE_SOFT_TARGET, best, [&](int number) {
        const int cluster = VARIANTS[number].cluster;
        return number == TWO_PASSES || (vector && (vd / 8 + cluster - 1) / cluster * 32 <= LIMIT);
    });
    if (variant < 0) return cudaErrorInvalidValue;
    if (VARIANTS[variant].launch) return VARIANTS[variant].launch(a, stream);
    soft_target_wide<<<(unsigned)n, WIDE, 0, stream>>>(a);
    return cudaGetLastError();
}

extern "C" int aerie_scale_rows(void* grad, int64_t stride, int64_t n, int64_t v, const float* scale, cudaStream_t stream) {
    if (n == 0 || v == 0) return 0;
    aerie::scale_rows<<<(unsigned)n, 256, 0, stream>>>((__nv_bfloat16*)grad, stride, (int)v, scale);
    return cudaGetLastError();
}
