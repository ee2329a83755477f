// Op 4: the speculative tree, one block a request. Same semantics as SGLang's build_tree_kernel_efficient and verify_tree_greedy (reference_tree.py), and no
// illegal access whatever the indices are: a parent that was not selected ends the path, a link out of range is no link.
#include "common.cuh"

namespace aerie {

constexpr int TREE_THREADS = 128, MAX_NODES = 2048;

__device__ __forceinline__ int64_t length_at(const void* lengths, bool wide, int64_t at) {
    return wide ? static_cast<const int64_t*>(lengths)[at] : static_cast<const int32_t*>(lengths)[at];
}

__global__ void __launch_bounds__(TREE_THREADS) build_tree(const int64_t* parent_list, int64_t parent_stride, int parent_count, const int64_t* selected,
                                                           int64_t selected_stride, const void* lengths, bool wide, bool* mask, int64_t mask_size,
                                                           int64_t* positions, int64_t* index, int64_t* next_token, int64_t* next_sibling, int topk, int depth,
                                                           int nodes, bool full) {
    extern __shared__ int64_t chosen[];  // [nodes - 1] candidates, then [nodes] parents
    int* parent = reinterpret_cast<int*>(chosen + nodes - 1);
    __shared__ unsigned long long before;  // tokens of the requests before this one
    const int tid = threadIdx.x;
    const int64_t b = blockIdx.x, base = b * nodes;
    const int64_t length = length_at(lengths, wide, b);
    if (tid == 0) before = 0;
    for (int i = tid; i < nodes - 1; i += TREE_THREADS) chosen[i] = selected[b * selected_stride + i];
    __syncthreads();
    if (full) {
        int64_t sum = 0;
        for (int64_t i = tid; i < b; i += TREE_THREADS) sum += length_at(lengths, wide, i);
        if (sum) atomicAdd(&before, (unsigned long long)sum);
    }
    for (int i = tid; i < nodes; i += TREE_THREADS) {  // parent: a node, or -1 for the root itself, or -2 where it was not selected
        int p = -1;
        if (i > 0) {
            const int64_t block = chosen[i - 1] / topk;
            p = chosen[i - 1] >= 0 && block == 0 ? 0 : -2;
            if (chosen[i - 1] >= 0 && block > 0 && block < parent_count) {
                const int64_t candidate = parent_list[b * parent_stride + block];
                for (int j = 0; j < nodes - 1; j++)
                    if (chosen[j] == candidate) {
                        p = j + 1;
                        break;
                    }
            }
        }
        parent[i] = p;
    }
    __syncthreads();
    const int64_t row_size = full ? length + nodes : nodes;
    const int64_t start = (int64_t)nodes * nodes * b + (full ? (int64_t)before * nodes + length : 0);  // of the tree's part in row 0
    for (int i = tid; i < nodes * nodes; i += TREE_THREADS) {
        const int64_t at = start + i / nodes * row_size + i % nodes;
        if (at >= 0 && at < mask_size) mask[at] = i % nodes == 0;
    }
    __syncthreads();
    for (int i = tid; i < nodes; i += TREE_THREADS) {
        int at = i, level = 0;
        while (at > 0 && level < depth) {
            const int64_t cell = start + i * row_size + at;
            if (cell >= 0 && cell < mask_size) mask[cell] = true;
            level++;
            at = parent[at];
        }
        int64_t child = -1, sibling = -1;
        for (int j = 1; j < nodes && child < 0; j++)
            if (parent[j] == i) child = j;
        if (parent[i] >= 0)
            for (int j = i + 1; j < nodes && sibling < 0; j++)
                if (parent[j] == parent[i]) sibling = j;
        positions[base + i] = length + level;
        index[base + i] = base + i;
        next_token[base + i] = child;
        next_sibling[base + i] = sibling;
    }
}

__global__ void __launch_bounds__(TREE_THREADS) verify_tree_greedy(int* predicts, int64_t predict_count, int* accept_index, int* accept_count,
                                                                   const int64_t* candidates, const int64_t* index, const int64_t* next_token,
                                                                   const int64_t* next_sibling, const int64_t* target, int nodes, int width) {
    extern __shared__ int4 node[];  // token, target token, child, sibling: the walk itself then needs no device memory
    const int tid = threadIdx.x;
    const int64_t base = (int64_t)blockIdx.x * nodes;
    for (int i = tid; i < nodes; i += TREE_THREADS)
        node[i] = {(int)candidates[base + i], (int)target[base + i], (int)next_token[base + i], (int)next_sibling[base + i]};
    __syncthreads();
    if (tid) return;
    int at = 0, count = 0;
    while (true) {
        const int64_t row = index[base + at];
        accept_index[(int64_t)blockIdx.x * width + count] = (int)row;
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
    if (const cudaError_t code = cudaFuncGetAttributes(&info, (const void*)build_tree)) return code;
    return cudaFuncGetAttributes(&info, (const void*)verify_tree_greedy);
}

}  // namespace aerie

extern "C" int aerie_build_tree(const int64_t* parent_list, int64_t parent_stride, int64_t parent_count, const int64_t* selected, int64_t selected_stride,
                                const void* lengths, int lengths64, bool* mask, int64_t mask_size, int64_t* positions, int64_t* index, int64_t* next_token,
                                int64_t* next_sibling, int64_t n, int topk, int depth, int nodes, int full, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (nodes < 1 || nodes > MAX_NODES || topk < 1 || n > INT32_MAX) return cudaErrorInvalidValue;
    const size_t bytes = (nodes - 1) * sizeof(int64_t) + nodes * sizeof(int);
    build_tree<<<(unsigned)n, TREE_THREADS, bytes, stream>>>(parent_list, parent_stride, (int)parent_count, selected, selected_stride, lengths, lengths64 != 0,
                                                            mask, mask_size, positions, index, next_token, next_sibling, topk, depth, nodes, full != 0);
    return cudaGetLastError();
}

extern "C" int aerie_verify_tree_greedy(int* predicts, int64_t predict_count, int* accept_index, int* accept_count, const int64_t* candidates,
                                        const int64_t* index, const int64_t* next_token, const int64_t* next_sibling, const int64_t* target, int64_t n,
                                        int nodes, int width, cudaStream_t stream) {
    using namespace aerie;
    if (n == 0) return 0;
    if (nodes < 1 || nodes > MAX_NODES || width < 1 || n > INT32_MAX) return cudaErrorInvalidValue;
    verify_tree_greedy<<<(unsigned)n, TREE_THREADS, nodes * sizeof(int4), stream>>>(predicts, predict_count, accept_index, accept_count, candidates, index,
                                                                                   next_token, next_sibling, target, nodes, width);
    return cudaGetLastError();
}
