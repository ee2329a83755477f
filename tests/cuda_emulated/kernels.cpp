// Entry points for tests/test_cuda_emulated.py around the kernels' own source, which emulate.py copied here without launches and PTX.
#include "simt.h"

#include "common.inc"
#include "soft_target.inc"
#include "drafter_input.inc"
#include "fp8.inc"
#include "topk.inc"
#include "tree.inc"
#include "online.inc"

using namespace aerie;
using bf = __nv_bfloat16;

extern "C" void set_late(int late) { simt::late = late; }

template <int CLUSTER>
void soft(Args a, int clusters) {
    const int share = (a.vd / 8 + CLUSTER - 1) / CLUSTER;
    simt::launch(dim3(clusters * CLUSTER), RESIDENT, CLUSTER, 2 * share * 16, [=] { soft_target_resident<CLUSTER>(a); });
}

extern "C" int soft_target(int number, int clusters, const void* draft, int64_t draft_stride, const void* target, int64_t target_stride,
                           const float* lse, const int64_t* top, const float* weights, const int64_t* rows, int64_t n, int64_t m, int vd, int renormalize,
                           float* loss, bool* match, float* accept, bool* in_vocab, void* grad, int64_t grad_stride) {
    const Args a{(const bf*)draft, (const bf*)target, draft_stride, target_stride, grad_stride, lse, top, weights, rows, n, m, vd, renormalize != 0, loss, match,
                 accept, in_vocab, (bf*)grad};
    if (number == 0) soft<1>(a, clusters);
    else if (number == 1) soft<2>(a, clusters);
    else if (number == 2) soft<4>(a, clusters);
    else if (number == 3) soft<8>(a, clusters);
    else if (number == 4) simt::launch(dim3((unsigned)n), WIDE, 1, 0, [=] { soft_target_wide(a); });
    else return 1;
    return 0;
}

extern "C" void online(int number, const void* chunk, int64_t stride, int64_t n, int c, int64_t start, float* top, float* sum, int64_t* at) {
    auto go = [&](auto kernel, int threads) { simt::launch(dim3((unsigned)n), threads, 1, 0, [=] { kernel((const bf*)chunk, stride, c, start, top, sum, at); }); };
    number == 0 ? go(online_update<128, 4>, 128) : go(online_update<256, 8, true>, 256);
}

extern "C" void input_forward(const int64_t* ids, const void* table, int64_t v, const void* state, const float* w1, const float* w2, int64_t n,
                              int h, float eps, void* out) {
    const Inputs in{ids, true, (const bf*)table, (const bf*)state, h, v, h, w1, w2, true, n, h, eps, true};
    simt::launch(dim3((unsigned)n, 2), 128, 1, 0, [=] { drafter_input_forward<128, 4>(in, (bf*)out); });
}

extern "C" void input_backward(int number, int groups, int blocks, const void* grad, const int64_t* ids, const void* table, int64_t v, const void* state, const float* w1,
                               const float* w2, int64_t n, int h, float eps, void* d_rows, void* d_state, float* d_w1, float* d_w2, float* sums) {
    const Inputs in{ids, true, (const bf*)table, (const bf*)state, h, v, h, w1, w2, true, n, h, eps, true};
    const Plan plan = plan_of(h, number);
    simt::launch(dim3(plan.kinds * blocks), groups * plan.threads, 1, groups * plan.bytes, [=] { plan.kernel(in, (const bf*)grad, 2 * h, (bf*)d_rows, (bf*)d_state, sums); });
    if (d_w1) simt::launch(dim3((2 * h + 31) / 32), 512, 1, 0, [=] { add_weight_sums(sums, blocks, h, d_w1, d_w2, true); });
}

extern "C" void quantize(const void* x, int64_t n, int h, void* q, float* scale) {
    simt::launch(dim3((unsigned)n), 128, 1, 0, [=] { quantize_rows<128, 4>((const bf*)x, h, h, (uint8_t*)q, scale, true); });
}

extern "C" void dequantize(int number, const void* q, const float* scale, int64_t n, int h, void* out) {
    auto go = [&](auto kernel, int threads) { simt::launch(dim3((unsigned)n), threads, 1, 0, [=] { kernel((const uint8_t*)q, h, scale, h, (bf*)out, true); }); };
    number == 0 ? go(dequantize_rows<128, 4>, 128) : go(dequantize_rows<256, 2>, 256);
}

template <typename T>
void best(int number, int cluster, const T* logits, int64_t stride, const int64_t* d2t, int64_t n, int v, float* log_probs, int64_t* ids, TopkExtras extras) {
    auto go = [&](auto kernel, int threads, int blocks) { simt::launch(dim3((unsigned)n * blocks), threads, blocks, 0, [=] { kernel(logits, stride, d2t, v, log_probs, ids, extras); }); };
    if (number == 0) go(draft_best<T>, TOPK_THREADS, WIDE_CLUSTER);
    else if (cluster == 8) go(draft_best_push<T, 256, 8>, 256, 8);
    else cluster == 2 ? go(draft_best_push<T, 1024, 2>, 1024, 2) : go(draft_best_push<T, 1024, 1>, 1024, 1);
}

extern "C" void topk_best(int number, int cluster, const void* logits, int float32, int64_t stride, const int64_t* d2t, int64_t n, int v, float* log_probs, int64_t* ids,
                          int64_t* positions, int64_t* tokens) {
    const TopkExtras extras{false, positions, tokens, 1};
    float32 ? best<float>(number, cluster, (const float*)logits, stride, d2t, n, v, log_probs, ids, extras) : best<bf>(number, cluster, (const bf*)logits, stride, d2t, n, v, log_probs, ids, extras);
}

template <typename T>
void several(int number, int cluster, const T* logits, int64_t stride, const int64_t* d2t, int64_t n, int v, int k, float* log_probs, int64_t* ids, TopkExtras extras) {
    auto go = [&](auto kernel, int threads, int blocks) { simt::launch(dim3((unsigned)n * blocks), threads, blocks, 0, [=] { kernel(logits, stride, d2t, v, k, log_probs, ids, extras); }); };
    if (number == 0) v > WIDE_CLUSTER * 256 * 24 ? go(draft_topk<T, 1024>, 1024, WIDE_CLUSTER) : go(draft_topk<T, 256>, 256, WIDE_CLUSTER);
    else if (cluster > 2) cluster == 8 ? go(draft_topk_filtered<T, 512, 8>, 512, 8) : go(draft_topk_filtered<T, 512, 4>, 512, 4);
    else cluster == 2 ? go(draft_topk_filtered<T, 1024, 2>, 1024, 2) : go(draft_topk_filtered<T, 1024, 1>, 1024, 1);
}

extern "C" void topk_of(int number, int cluster, const void* logits, int float32, int64_t stride, const int64_t* d2t, int64_t n, int v, int k, float* log_probs, int64_t* ids,
                        int64_t* positions, int64_t* tokens) {
    const TopkExtras extras{false, positions, tokens, 1};
    if (float32) several<float>(number, cluster, (const float*)logits, stride, d2t, n, v, k, log_probs, ids, extras);
    else several<bf>(number, cluster, (const bf*)logits, stride, d2t, n, v, k, log_probs, ids, extras);
}

extern "C" void tree(int number, const int64_t* parents, int64_t parent_count, const int64_t* selected, const int64_t* lengths, bool* mask, int64_t mask_size,
                     int64_t* positions, int64_t* index, int64_t* next_token, int64_t* next_sibling, int64_t n, int topk, int depth, int nodes, int full) {
    auto go = [&](auto kernel, int threads, int bytes) {
        simt::launch(dim3((unsigned)n), threads, 1, bytes, [=] {
            kernel(parents, parent_count, (int)parent_count, selected, nodes - 1, lengths, true, mask, mask_size, positions, index, next_token, next_sibling, topk, depth, nodes, full != 0);
        });
    };
    number == 0 ? go(build_tree, nodes >= 32 ? 1024 : 32 * nodes, (2 * nodes - 1) * 8 + nodes * 4) : go(build_small_tree, 32 * SMALL_WARPS, 0);
}

extern "C" void verify(int* predicts, int64_t count, int* accept_index, int* accept_count, const int64_t* candidates, const int64_t* index, const int64_t* next_token,
                       const int64_t* next_sibling, const int64_t* target, int64_t n, int nodes, int width) {
    simt::launch(dim3((unsigned)n), TREE_THREADS, 1, nodes * 20, [=] { verify_tree_greedy(predicts, count, accept_index, accept_count, candidates, index, next_token, next_sibling, target, nodes, width); });
}
