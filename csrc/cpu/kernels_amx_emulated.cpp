// SPDX-License-Identifier: Apache-2.0
// For tests of what is around the tiles on processors that have none; never chosen by itself.
#include "attention_kernel.h"

namespace pyr {
extern const TiledAttention kAmxEmulated = {attention_scratch<TileMode<EmulatedTiles>>,
                                     attention<TileMode<EmulatedTiles>>, merge};
}  // namespace pyr
