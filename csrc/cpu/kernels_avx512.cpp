// SPDX-License-Identifier: Apache-2.0
#include "attention_kernel.h"
#include "key_mass_kernel.h"
#include "recent_mass_kernel.h"
#include "score_kernel.h"
#include "topn_kernel.h"

#define PYR_KERNELS(T)                                                       \
  {attention_scratch<FloatMode<T>>, attention<FloatMode<T>>, merge,          \
   score_scratch<FloatMode<T>>, score_logits<FloatMode<T>>, score_mass<FloatMode<T>>, read_memory, \
   key_mass_scratch<FloatMode<T>>, key_mass<FloatMode<T>>,               \
   topn_scratch<FloatMode<T>>, topn_logits<FloatMode<T>>, topn_values<FloatMode<T>>,         \
   recent_scratch<FloatMode<T>>, recent_rows<FloatMode<T>>, recent_keys<FloatMode<T>>}

namespace pyr {
extern const Kernels kKernelsAvx512[3] = {PYR_KERNELS(float), PYR_KERNELS(bf16_t), PYR_KERNELS(f16_t)};
}  // namespace pyr
