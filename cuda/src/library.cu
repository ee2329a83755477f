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

namespace aerie {
static int choices[AERIE_OPS] = {-1, -1, -1, -1, -1, -1, -1};
int choice(int op) { return choices[op]; }
}  // namespace aerie

extern "C" int aerie_choose(int op, int variant) {
    if (op < 0 || op >= AERIE_OPS || variant < -1 || (variant >= 0 && variant % AERIE_PREFER >= AERIE_VARIANTS[op])) return cudaErrorInvalidValue;
    aerie::choices[op] = variant;
    return 0;
}

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
