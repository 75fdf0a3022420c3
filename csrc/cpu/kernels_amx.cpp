// SPDX-License-Identifier: Apache-2.0
#include "attention_kernel.h"

namespace pyr {
extern const TiledAttention kAmx = {attention_scratch<TileMode<HardwareTiles>>,
                                     attention<TileMode<HardwareTiles>>, merge};
}  // namespace pyr
