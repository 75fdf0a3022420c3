// SPDX-License-Identifier: Apache-2.0
// Attention to the best keys of a row: logits over all of K, then the few rows of V that are used.
// Between the two, topn.cpp chooses the best keys.
#pragma once
#include "key_mass_kernel.h"

namespace {

static_assert(pyr::kTopnRows == kMassRows, "the tiles of key_mass_kernel.h are used");

template <class Mode>
size_t topn_scratch(const PyrAttention& p) {
  return key_mass_scratch<Mode>(p);
}

template <class Mode>
void topn_logits(const PyrAttention& p, const AttentionItem& item, float* logits, int64_t stride,
                 void* memory) {
  const MassScratch s = carve_mass<Mode>(p, memory);
  const Sight sight = sight_of(p, item.request);
  pack_mass_queries<Mode>(p, item, sight, s);
  each_mass_tile<Mode>(p, item, sight, s, [&](int first, int, int vectors) {
    for (int r = 0; r < item.rows; ++r)
      for (int i = 0; i < vectors; ++i)
        v_store(logits + r * stride + (first - item.begin) + i * W, v_load(s.scores + r * kMassKeys + i * W));
  });
}

// The largest logit of a row and, relative to it, the sum of all its weights: the softmax as if no
// key were left out. `keys` are those of the item.
PYR_INLINE float softmax_sum(const float* logits, int keys, float* max) {
  const int whole = keys / W * W;
  V top = v_set(-INFINITY);
  for (int i = 0; i < whole; i += W) top = v_max(top, v_load(logits + i));
  float most = v_hmax(top) > *max ? v_hmax(top) : *max;
  for (int i = whole; i < keys; ++i) most = logits[i] > most ? logits[i] : most;
  *max = most;
  V total = v_zero();
  for (int i = 0; i < whole; i += W)
    total = v_add(total, v_exp2(v_sub(v_load(logits + i), v_set(most))));
  float rest = 0;
  for (int i = whole; i < keys; ++i) rest += v_first(v_exp2(v_set(logits[i] - most)));
  return v_hsum(total) + rest;
}

template <class Mode>
void topn_values(const PyrAttention& p, const AttentionItem& item, const float* logits,
                 const int32_t* best, int64_t count, bool renormalize) {
  using T = typename Mode::Element;
  const Sight sight = sight_of(p, item.request);
  const int D = int(p.D), row = item.row0;
  const int64_t head = int64_t(item.kv_head) * sight.heads + row % sight.heads;
  float sum[kMaxHeadSize + W], max = -INFINITY, weight = 0;
  for (int d = 0; d < D; d += W) v_store(sum + d, v_zero());
  if (count) {
    float sink = -INFINITY;
    if (p.sinks && !renormalize) max = sink = load_scalar(p.sinks, head, p.sinks_dtype) * kLog2e;
    weight = softmax_sum(logits, item.end - item.begin, &max);
    if (sink > -INFINITY) weight += v_first(v_exp2(v_set(sink - max)));
    if (renormalize) weight = 0;
    const T* values = (const T*)p.value + item.kv_head * p.value_g;
    const int32_t* table = p.table + item.request * p.table_r;
    const auto address = [&](int64_t i) {
      const int64_t position = sight.skip + item.begin + best[i];
      return values + table[position / p.N] * p.value_p + position % p.N * p.value_n;
    };
    for (int64_t i = 0; i < count; ++i) {
      // The rows are scattered, so those that are needed soon are prefetched.
      if (i + 4 < count) prefetch_row(address(i + 4), D * sizeof(T));
      const T* value = address(i);
      const float share = v_first(v_exp2(v_set(logits[best[i]] - max)));
      if (renormalize) weight += share;
      for (int d = 0; d < D; d += W)
        v_store(sum + d, v_fma(v_set(share), v_load_row(value + d, D - d), v_load(sum + d)));
    }
  }
  store_row(p.out, (sight.query0 + row / sight.heads) * p.out_t + head * p.out_h, p.out_dtype, sum,
            weight == 0 ? 0.0f : float(p.value_scale) / weight, D);
}

}  // namespace
