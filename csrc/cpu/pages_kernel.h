// SPDX-License-Identifier: Apache-2.0
// Summaries of pages, and the softmax over pages. topn_kernel.h computes the products of the two.
#pragma once
#include "tile.h"

namespace {

// Writes D numbers as row `index` of a summary.
PYR_INLINE void store_summary(const PyrSummaries& p, int64_t block, int64_t kv_head, int64_t index,
                              const float* row) {
  store_row(p.summaries, block * p.summary_p + kv_head * p.summary_g + index * p.D, p.summary_dtype,
            row, 1.0f, int(p.D));
}

template <class Mode>
void summarise(const PyrSummaries& p, int64_t block, int64_t kv_head, int64_t from, int64_t to) {
  using T = typename Mode::Element;
  const int D = int(p.D);
  const T* keys = (const T*)p.key + block * p.key_p + kv_head * p.key_g;
  float first[kMaxHeadSize + W], second[kMaxHeadSize + W];
  const V count = v_set(float(to - from));
  for (int d = 0; d < D; d += W) {
    const T* row = keys + from * p.key_n + d;
    if (p.kind == PYR_BOX) {
      V most = v_load_row(row, D - d), least = most;
      for (int64_t i = from + 1; i < to; ++i) {
        row += p.key_n;
        const V x = v_load_row(row, D - d);
        most = v_max_or_nan(most, x);
        least = v_min_or_nan(least, x);
      }
      v_store(first + d, most);
      v_store(second + d, least);
      continue;
    }
    V sum = v_zero();
    for (int64_t i = from; i < to; ++i) sum = v_add(sum, v_load_row(keys + i * p.key_n + d, D - d));
    const V mean = v_div(sum, count);
    v_store(first + d, mean);
    V squares = v_zero();
    for (int64_t i = from; i < to; ++i) {
      const V x = v_sub(v_load_row(keys + i * p.key_n + d, D - d), mean);
      squares = v_fma(x, x, squares);
    }
    v_store(second + d, v_div(squares, count));
  }
  store_summary(p, block, kv_head, 0, first);
  if (p.kind == PYR_SPREAD)
    for (int d = 0; d < D; ++d) second[d] = __builtin_sqrtf(second[d]);
  store_summary(p, block, kv_head, 1, second);
}

void page_weights(const PyrPageScores& p, int64_t head, int64_t heads, float* logits,
                  int64_t stride, int64_t pages, float* out) {
  const bool largest = p.combine == PYR_COMBINE_MAX;
  const float share = largest ? 1.0f : float(p.G) / float(p.H);
  for (int64_t h = 0; h < heads; ++h, logits += stride) {
    for (int64_t i = pages; i % W; ++i) logits[i] = -INFINITY;
    V top = v_load(logits);
    for (int64_t i = W; i < pages; i += W) top = v_max(top, v_load(logits + i));
    float max = v_hmax(top);
    V total = v_zero();
    for (int64_t i = 0; i < pages; i += W) {
      const V x = v_exp2(v_sub(v_load(logits + i), v_set(max)));
      total = v_add(total, x);
      v_store(logits + i, x);
    }
    const float before = max;
    float sum = v_hsum(total);
    if (p.sinks) add_sink(load_scalar(p.sinks, head + h, p.sinks_dtype), &max, &sum);
    const V factor = v_set(v_first(v_exp2(v_set(before - max))) * share / sum);
    for (int64_t i = 0; i < pages; i += W) {
      const V x = v_mul(v_load(logits + i), factor), held = v_load(out + i);
      v_store(out + i, largest ? v_max_or_nan(x, held) : v_add(x, held));
    }
  }
}

}  // namespace
