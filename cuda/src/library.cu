// What is not an op: version, error text, loading of all kernels.
#include "aerie_drafter.h"

namespace aerie {
int prepare_soft_target();
int prepare_online();
int prepare_drafter_input();
int prepare_topk();
int prepare_tree();
int prepare_fp8();
}  // namespace aerie

extern "C" int aerie_abi() { return AERIE_ABI; }

extern "C" const char* aerie_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

extern "C" int aerie_prepare() {
    int (*const steps[])() = {aerie::prepare_soft_target, aerie::prepare_online, aerie::prepare_drafter_input,
                              aerie::prepare_topk, aerie::prepare_tree, aerie::prepare_fp8};
    for (const auto step : steps)
        if (const int code = step()) {
            cudaGetLastError();  // a library without kernels for this GPU must leave no error behind
            return code;
        }
    return 0;
}
