// SPDX-License-Identifier: Apache-2.0
#include "attention_kernel.h"

namespace pyr {
extern const TiledAttention kAmx[kDtypes] = PYR_TILED_TABLE(HardwareTiles);
}  // namespace pyr
