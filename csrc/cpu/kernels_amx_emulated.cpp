// SPDX-License-Identifier: Apache-2.0
// For tests of what is around the tiles on processors that have none; never chosen by itself.
#include "attention_kernel.h"

namespace pyr {
extern const TiledAttention kAmxEmulated[kDtypes] = PYR_TILED_TABLE(EmulatedTiles);
}  // namespace pyr
