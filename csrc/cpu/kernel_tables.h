// SPDX-License-Identifier: Apache-2.0
// The tables of kernels.h, for the units that fill them.
#pragma once
#include "attention_kernel.h"
#include "key_mass_kernel.h"
#include "observed_expected_kernel.h"
#include "pages_kernel.h"
#include "recent_mass_kernel.h"
#include "score_kernel.h"
#include "topn_kernel.h"

#define PYR_KERNELS(MODE, QUANTISE)                                                          \
  {attention_scratch<MODE>, attention<MODE>, merge, score_scratch<MODE>, score_logits<MODE>, \
   score_mass<MODE>, expected_scratch<MODE>, expected_logits<MODE>, expected_mass<MODE>,     \
   read_memory, key_mass_scratch<MODE>, key_mass<MODE>,                                      \
   topn_scratch<MODE>, topn_logits<MODE>, topn_values<MODE>, recent_scratch<MODE>,           \
   recent_rows<MODE>, recent_keys<MODE>, summarise<MODE>, page_weights, QUANTISE}

#define PYR_FLOAT_KERNELS                               \
  {PYR_KERNELS(FloatMode<float>, nullptr),              \
   PYR_KERNELS(FloatMode<bf16_t>, nullptr),             \
   PYR_KERNELS(FloatMode<f16_t>, nullptr),              \
   PYR_KERNELS(FloatMode<e4m3_t>, quantise_row<e4m3_t>), \
   PYR_KERNELS(FloatMode<e5m2_t>, quantise_row<e5m2_t>)}
