// Op 4: the speculative tree, one block a request. Same semantics as SGLang's build_tree_kernel_efficient and verify_tree_greedy (reference_tree.py), and no
// illegal access whatever the indices are: a parent that was not selected ends the path, a link out of range is no link.
#include "common.cuh"

namespace aerie {

constexpr int TREE_THREADS = 128, MAX_NODES = 2048;
constexpr int SMALL = 32, SMALL_WARPS = 4;  // nodes and warps of build_small_tree

__device__ __forceinline__ int64_t length_at(const void* lengths, bool wide, int64_t at) {
    return wide ? static_cast<const int64_t*>(lengths)[at] : static_cast<const int32_t*>(lengths)[at];
}

// A warp works on a node at a time: its lanes look for the parent, the first child and the next sibling side by side.
template <typename Match>
__device__ __forceinline__ int first_where(int from, int to, Match match) {  // lowest index in from .. to-1 that matches, else `to`
    for (int start = from; start < to; start += 32) {
        const int at = start + threadIdx.x % 32;
        const unsigned found = __ballot_sync(~0u, at < to && match(at));
        if (found) return start + __ffs(found) - 1;
    }
    return to;
}

__global__ void __launch_bounds__(1024) build_tree(const int64_t* parent_list, int64_t parent_stride, int parent_count, const int64_t* selected,
                                                   int64_t selected_stride, const void* lengths, bool wide, bool* mask, int64_t mask_size, int64_t* positions,
                                                   int64_t* index, int64_t* next_token, int64_t* next_sibling, int topk, int depth, int nodes, bool full) {
    wait_for_earlier();
    extern __shared__ int64_t chosen[];  // [nodes - 1] candidates, [nodes] candidates of the parents, then [nodes] parents
    int64_t* wanted = chosen + nodes - 1;
    int* parent = reinterpret_cast<int*>(wanted + nodes);
    __shared__ int64_t tokens_before;  // of the requests before this one
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, warps = blockDim.x / 32;
    const int64_t b = blockIdx.x, base = b * nodes;
    const int64_t length = length_at(lengths, wide, b);
    for (int i = tid; i < nodes - 1; i += blockDim.x) {
        const int64_t candidate = selected[b * selected_stride + i];
        const int64_t block = (uint64_t)candidate >> 32 ? candidate / topk : (uint32_t)candidate / (uint32_t)topk;  // 64-bit division is slow
        chosen[i] = candidate;
        // the candidate that proposed this one; -1: the root did; -2: nobody
        wanted[i + 1] = candidate < 0 ? -2 : block == 0 ? -1 : block < parent_count ? parent_list[b * parent_stride + block] : -2;
        if (candidate >= topk && wanted[i + 1] < 0) wanted[i + 1] = -2;  // a negative entry of the list is no candidate
    }
    if (full && warp == warps - 1) {
        int64_t sum = 0;
        for (int64_t i = lane; i < b; i += 32) sum += length_at(lengths, wide, i);
#pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) tokens_before = sum;
    }
    __syncthreads();
    for (int i = warp; i < nodes; i += warps) {  // parent: a node, or -1 for the root itself, or -2 where it was not selected
        int p = -1;
        if (i > 0) {
            const int64_t candidate = wanted[i];
            p = candidate == -1 ? 0 : -2;
            if (candidate >= 0) {
                const int at = first_where(0, nodes - 1, [&](int j) { return chosen[j] == candidate; });
                if (at < nodes - 1) p = at + 1;
            }
        }
        if (lane == 0) parent[i] = p;
    }
    __syncthreads();
    const int64_t row_size = full ? length + nodes : nodes;
    const int64_t start = (int64_t)nodes * nodes * b + (full ? tokens_before * nodes + length : 0);  // of the tree's part in row 0
    for (int i = warp; i < nodes; i += warps) {
        int level = 0;
        bool first_seen = lane == 0;  // whether node i has column `lane` on its path
        for (int at = i; at > 0 && level < depth; at = parent[at], level++) first_seen |= at == lane;
        for (int column = lane; column < nodes; column += 32) {
            bool seen = column == 0 || (column < 32 && first_seen);
            if (column >= 32)
                for (int at = i, up = 0; at > 0 && up < level; at = parent[at], up++) seen |= at == column;
            const int64_t cell = start + i * row_size + column;
            if (cell >= 0 && cell < mask_size) mask[cell] = seen;
        }
        const int p = parent[i];
        const int child = first_where(1, nodes, [&](int j) { return parent[j] == i; });
        const int sibling = p >= 0 ? first_where(i + 1, nodes, [&](int j) { return parent[j] == p; }) : nodes;
        if (lane == 0) {
            positions[base + i] = length + level;
            index[base + i] = base + i;
            next_token[base + i] = child < nodes ? child : -1;
            next_sibling[base + i] = sibling < nodes ? sibling : -1;
        }
    }
}

// Up to 32 nodes: a lane a node, and every warp works the whole tree out by itself, so that no warp waits for another one; each writes a part.
__global__ void __launch_bounds__(32 * SMALL_WARPS) build_small_tree(
    const int64_t* parent_list, int64_t parent_stride, int parent_count, const int64_t* selected, int64_t selected_stride, const void* lengths, bool wide,
    bool* mask, int64_t mask_size, int64_t* positions, int64_t* index, int64_t* next_token, int64_t* next_sibling, int topk, int depth, int nodes, bool full) {
    wait_for_earlier();
    __shared__ longlong2 chosen_pairs[SMALL_WARPS][16];  // candidates of the nodes but the root, by warp
    __shared__ int parents[SMALL_WARPS][32], children[SMALL_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t b = blockIdx.x;
    int64_t* chosen = reinterpret_cast<int64_t*>(chosen_pairs[warp]);
    const int64_t candidate = lane < nodes - 1 ? selected[b * selected_stride + lane] : -1;
    const int64_t length = length_at(lengths, wide, b);
    int64_t tokens_before = 0;
    if (full)
        for (int64_t i = lane; i < b; i += 32) tokens_before += length_at(lengths, wide, i);
    chosen[lane] = candidate;  // no candidate looks for -1
    int64_t wanted = -2;  // what proposed this candidate; -1: the root did; -2: nobody
    if (lane < nodes - 1) {
        const int64_t block = (uint64_t)candidate >> 32 ? candidate / topk : (uint32_t)candidate / (uint32_t)topk;  // 64-bit division is slow
        wanted = candidate < 0 ? -2 : block == 0 ? -1 : block < parent_count ? parent_list[b * parent_stride + block] : -2;
        if (candidate >= topk && wanted < 0) wanted = -2;  // a negative entry of the list is no candidate
    }
    children[warp][lane] = -1;
    __syncwarp();
    int found = 32;  // lowest candidate that is the wanted one
#pragma unroll
    for (int j = 15; j >= 0; j--) {
        const longlong2 two = chosen_pairs[warp][j];
        if (two.y == wanted) found = 2 * j + 1;
        if (two.x == wanted) found = 2 * j;
    }
    // lane i holds candidate i, which is node i + 1
    parents[warp][lane] = -1;
    __syncwarp();
    if (lane < nodes - 1) parents[warp][lane + 1] = wanted == -1 ? 0 : wanted >= 0 && found < nodes - 1 ? found + 1 : -2;
    __syncwarp();
    const int parent = lane < nodes ? parents[warp][lane] : -3;
    const unsigned together = __match_any_sync(~0u, parent);  // the nodes of my parent
    if (parent >= 0 && __ffs(together) - 1 == lane) children[warp][parent] = lane;
    uint32_t path = 1;
    int level = 0;
    for (int at = lane < nodes ? lane : 0; at > 0 && level < depth; at = parents[warp][at], level++) path |= 1u << at;
    if (full) {
#pragma unroll
        for (int step = 16; step; step >>= 1) tokens_before += __shfl_xor_sync(~0u, tokens_before, step);
    }
    __syncwarp();
    const int64_t row_size = full ? length + nodes : nodes;
    const int64_t start = (int64_t)nodes * nodes * b + (full ? tokens_before * nodes + length : 0);  // of the tree's part in row 0
#pragma unroll 4
    for (int row = warp; row < nodes; row += SMALL_WARPS) {
        const uint32_t seen = __shfl_sync(~0u, path, row);
        const int64_t cell = start + row * row_size + lane;
        if (lane < nodes && cell >= 0 && cell < mask_size) mask[cell] = seen >> lane & 1;
    }
    if (lane >= nodes) return;
    const int64_t at = b * nodes + lane;
    const unsigned behind = parent >= 0 ? together & ~((2u << lane) - 1) : 0;
    if (warp == 0) positions[at] = length + level;
    if (warp == 1) index[at] = at;
    if (warp == 2) next_token[at] = children[warp][lane];
    if (warp == 3) next_sibling[at] = behind ? __ffs(behind) - 1 : -1;
}

__global__ void __launch_bounds__(TREE_THREADS) verify_tree_greedy(int* predicts, int64_t predict_count, int* accept_index, int* accept_count,
                                                                   const int64_t* candidates, const int64_t* index, const int64_t* next_token,
                                                                   const int64_t* next_sibling, const int64_t* target, int nodes, int width) {
    wait_for_earlier();
    extern __shared__ int4 node[];  // [nodes] token, target token, child, sibling, then [nodes] the row: the walk itself then reads no device memory
    int* row_of = reinterpret_cast<int*>(node + nodes);
    const int tid = threadIdx.x;
    const int64_t base = (int64_t)blockIdx.x * nodes;
    for (int i = tid; i < nodes; i += TREE_THREADS) {
        const int64_t row = index[base + i];
        row_of[i] = row >= INT32_MIN && row <= INT32_MAX ? (int)row : -1;
        node[i] = {(int)candidates[base + i], (int)target[base + i], (int)next_token[base + i], (int)next_sibling[base + i]};
    }
    __syncthreads();
    if (tid) return;
    int at = 0, count = 0;
    while (true) {
        const int row = row_of[at];
        accept_index[(int64_t)blockIdx.x * width + count] = row;
        if (row >= 0 && row < predict_count) predicts[row] = node[at].y;
        if (count + 1 >= width) break;
        int child = node[at].z;
        for (int step = 0; step < nodes && child >= 0 && child < nodes && node[child].x != node[at].y; step++) child = node[child].w;
        if (child < 0 || child >= nodes || node[child].x != node[at].y) break;
        at = child;
        count++;
    }
    accept_count[blockIdx.x] = count;
}

int prepare_tree() {
    cudaFuncAttributes info;
    for (const void* kernel : {(const void*)build_tree, (const void*)build_small_tree})
        if (const cudaError_t code = cudaFuncGetAttributes(&info, kernel)) return code;
    return cudaFuncGetAttributes(&info, (const void*)verify_tree_greedy);
}

}  // namespace aerie

extern "C" int aerie_build_tree(const int64_t* parent_list, int64_t parent_stride, int64_t parent_count, const int64_t* selected, int64_t selected_stride,
                                const void* lengths, int lengths64, bool* mask, int64_t mask_size, int64_t* positions, int64_t* index, int64_t* next_token,
                                int64_t* next_sibling, int64_t n, int topk, int depth, int nodes, int full, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (nodes < 1 || nodes > MAX_NODES || topk < 1 || n > INT32_MAX) return cudaErrorInvalidValue;
    const int variant = pick(AERIE_BUILD_TREE, nodes <= SMALL ? 1 : 0, [&](int number) { return number == 0 || nodes <= SMALL; });
    if (variant < 0) return cudaErrorInvalidValue;
    const size_t bytes = variant == 1 ? 0 : (2 * nodes - 1) * sizeof(int64_t) + nodes * sizeof(int);
    const int threads = variant == 1 ? 32 * SMALL_WARPS : nodes >= 32 ? 1024 : 32 * nodes;
    const auto kernel = variant == 1 ? build_small_tree : build_tree;
    return launch(kernel, (unsigned)n, threads, bytes, stream, parent_list, parent_stride, (int)parent_count, selected, selected_stride, lengths, lengths64 != 0, mask, mask_size,
                  positions, index, next_token, next_sibling, topk, depth, nodes, full != 0);
}

extern "C" int aerie_verify_tree_greedy(int* predicts, int64_t predict_count, int* accept_index, int* accept_count, const int64_t* candidates,
                                        const int64_t* index, const int64_t* next_token, const int64_t* next_sibling, const int64_t* target, int64_t n,
                                        int nodes, int width, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (nodes < 1 || nodes > MAX_NODES || width < 1 || n > INT32_MAX) return cudaErrorInvalidValue;
    return launch(verify_tree_greedy, (unsigned)n, TREE_THREADS, nodes * (sizeof(int4) + sizeof(int)), stream, predicts, predict_count, accept_index, accept_count, candidates,
                  index, next_token, next_sibling, target, nodes, width);
}
