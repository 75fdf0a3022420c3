// SPDX-License-Identifier: Apache-2.0
// AMX with emulated tiles, for tests on processors without AMX; only chosen by name.
#include "attention_kernel.h"

namespace pyr {
extern const TiledAttention kAmxEmulated[kDtypes] = PYR_TILED_TABLE(EmulatedTiles);
}  // namespace pyr
