// SPDX-License-Identifier: Apache-2.0
#include "attention_kernel.h"
#include "key_mass_kernel.h"
#include "recent_mass_kernel.h"
#include "score_kernel.h"
#include "topn_kernel.h"

namespace pyr {
extern const Kernels kKernelsAvx512Bf16 = {
    attention_scratch<PairMode>, attention<PairMode>,    merge,
    score_scratch<PairMode>,     score_logits<PairMode>, score_mass<PairMode>, read_memory,
    key_mass_scratch<PairMode>,  key_mass<PairMode>,
    topn_scratch<PairMode>,      topn_logits<PairMode>,  topn_values<PairMode>,
    recent_scratch<PairMode>,    recent_rows<PairMode>,  recent_keys<PairMode>};
}  // namespace pyr
