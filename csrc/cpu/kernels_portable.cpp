// SPDX-License-Identifier: Apache-2.0
#include "kernel_tables.h"

namespace pyr {
extern const Kernels kKernelsPortable[kDtypes] = PYR_FLOAT_KERNELS;
}  // namespace pyr
