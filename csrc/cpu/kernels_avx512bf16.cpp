// SPDX-License-Identifier: Apache-2.0
#include "kernel_tables.h"

namespace pyr {
extern const Kernels kKernelsAvx512Bf16[kDtypes] = {
    {},
    PYR_KERNELS(PairMode<bf16_t>, nullptr),
    {},
    PYR_KERNELS(PairMode<e4m3_t>, quantise_row<e4m3_t>),
    PYR_KERNELS(PairMode<e5m2_t>, quantise_row<e5m2_t>)};
}  // namespace pyr
