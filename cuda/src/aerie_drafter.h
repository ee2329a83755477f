// C interface of libaerie_drafter.so. Raw device pointers, sizes and strides in elements, and a stream; every function returns a cudaError_t (0: launched).
// Sizes and values are checked by the caller (op_checks.py); a row whose id is out of range becomes NaN, it is never an illegal access.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#define AERIE_ABI 6

// Ops that have more than one kernel: which of them runs may be chosen by number (op_library.py has their names), for measuring and testing.
enum { AERIE_SOFT_TARGET, AERIE_ONLINE, AERIE_INPUT_BACKWARD, AERIE_DEQUANTIZE, AERIE_TOPK, AERIE_TOPK_RANKED, AERIE_BUILD_TREE, AERIE_OPS };
static const int AERIE_VARIANTS[AERIE_OPS] = {5, 2, 2, 2, 2, 2, 2};
#define AERIE_PREFER 100  // added to a number: take that kernel where it fits, else the usual one; without it a kernel that does not fit is an error

#pragma GCC visibility push(default)
extern "C" {
int aerie_abi();
int aerie_prepare();  // loads every kernel on the current device, so that nothing is loaded while a CUDA graph is captured
const char* aerie_error(int code);
int aerie_choose(int op, int variant);  // for this process; -1: the best one known for the size. Answers 0, or an error for a number that is none

// 1. bf16 logits; lse, weights, rows and grad may be null; grad may be draft
int aerie_soft_target_ce(const void* draft, int64_t draft_stride, const void* target, int64_t target_stride, const float* lse, const int64_t* top,
                         const float* weights, const int64_t* rows, int64_t n, int64_t m, int64_t vd, int renormalize, float* loss, bool* match, float* accept,
                         bool* in_vocab, void* grad, int64_t grad_stride, cudaStream_t stream);
int aerie_scale_rows(void* grad, int64_t stride, int64_t n, int64_t v, const float* scale, cudaStream_t stream);
int aerie_online_update(const void* chunk, int64_t stride, int64_t n, int64_t c, int64_t start, float* running_max, float* running_sum, int64_t* argmax,
                        cudaStream_t stream);
// 2.
int aerie_drafter_input(const void* ids, int ids64, const void* table, int64_t table_stride, int64_t v, const void* state, int64_t state_stride,
                        const void* embed_weight, const void* state_weight, int weights32, int64_t n, int64_t h, float eps, void* out, cudaStream_t stream);
int aerie_drafter_input_backward(const void* grad, int64_t grad_stride, const void* ids, int ids64, const void* table, int64_t table_stride, int64_t v,
                                 const void* state, int64_t state_stride, const void* embed_weight, const void* state_weight, int weights32, int64_t n,
                                 int64_t h, float eps, void* d_rows, void* d_state, void* d_embed_weight, void* d_state_weight, float* sums,
                                 int blocks, cudaStream_t stream);
int aerie_backward_blocks(int64_t n, int64_t h);  // blocks a side that fill the current device with the chosen kernel, n at the most: sums holds [blocks, 2, h]
// 3. logits bf16 or (float32) float. For a served drafter: probabilities instead of logarithms; positions [n] += 1 and the best id into tokens, or null
int aerie_draft_topk(const void* logits, int float32, int64_t stride, const int64_t* d2t, int64_t n, int64_t v, int k, float* log_probs, int64_t* ids,
                     int probabilities, int64_t* positions, int64_t* tokens, int64_t tokens_stride, cudaStream_t stream);
// 4. parent_list [n, parent_count], selected [n, nodes - 1], lengths [n] int32 or int64; mask flat, of mask_size cells, its prefix part left alone
int aerie_build_tree(const int64_t* parent_list, int64_t parent_stride, int64_t parent_count, const int64_t* selected, int64_t selected_stride,
                     const void* lengths, int lengths64, bool* mask, int64_t mask_size, int64_t* positions, int64_t* index, int64_t* next_token,
                     int64_t* next_sibling, int64_t n, int topk, int depth, int nodes, int full, cudaStream_t stream);
int aerie_verify_tree_greedy(int* predicts, int64_t predict_count, int* accept_index, int* accept_count, const int64_t* candidates, const int64_t* index,
                             const int64_t* next_token, const int64_t* next_sibling, const int64_t* target, int64_t n, int nodes, int width,
                             cudaStream_t stream);
// 5.
int aerie_quantize_rows_fp8(const void* x, int64_t stride, int64_t n, int64_t h, void* q, float* scale, cudaStream_t stream);
int aerie_dequantize_rows_fp8(const void* q, int64_t stride, const float* scale, int64_t n, int64_t h, void* out, cudaStream_t stream);
}
#pragma GCC visibility pop
