// SPDX-License-Identifier: Apache-2.0
// Attention of a few rows (decoding): K and V are used where they lie, each of their rows once.
#pragma once
#include "attention_common.h"

namespace {

// Rows worked on together: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int kDirectRows = 8;
#else
constexpr int kDirectRows = 4;
#endif

// scores[R][KB] of R rows: vectors of W keys, `queries` holds each group of four units W / 4 times.
template <class Mode, int R>
PYR_INLINE void direct_scores(float* scores, const float* queries, int units,
                              const typename Mode::Element* const* keys, int vectors,
                              const typename Mode::Element* const* next) {
  for (int i = 0; i < vectors * W; i += W) {
    V sums[R][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      V sum[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r] = v_zero();
      if (next)
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g)
          prefetch_row(next[i + 4 * g + j], units * Mode::Step * sizeof(*next[0]));
      for (int u = 0; u < units; u += W) {
        V x[kGroups];
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g)
          x[g] = Mode::load(keys[i + 4 * g + j] + u * Mode::Step, W * Mode::Step);
        v_transpose_groups(x);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            sum[r] = Mode::multiply_add(
                sum[r], x[g], v_load(queries + (r * units + u + 4 * g) / 4 * W));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][j] = sum[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      v_store(scores + r * KB + i, v_sum_groups(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
  }
}

// sum[R][D] = sum * correction + probabilities * values
template <class Mode, int R>
PYR_INLINE void direct_values(float* sum, int D, const float* probabilities,
                              const typename Mode::Element* const* values, int keys,
                              const float* correction,
                              const typename Mode::Element* const* next) {
  constexpr int kStride = KB / Mode::Step;
  for (int d = 0; d < D; d += 2 * W) {
    V x[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      x[r][0] = v_mul(v_load(sum + r * D + d), v_set(correction[r]));
      x[r][1] = v_mul(v_load(sum + r * D + d + W), v_set(correction[r]));
    }
    for (int k = 0; k < keys; k += Mode::Step) {
      if (next)
#pragma GCC unroll 2
        for (int j = 0; j < Mode::Step; ++j)
          prefetch_row(next[k + j] + d, 2 * W * 4 / Mode::Step);
      V lo, hi;
      Mode::load_values(values, k, d, &lo, &hi);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V p = v_set(probabilities[r * kStride + k / Mode::Step]);
        x[r][0] = Mode::multiply_add(x[r][0], lo, p);
        x[r][1] = Mode::multiply_add(x[r][1], hi, p);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      v_store(sum + r * D + d, x[r][0]);
      v_store(sum + r * D + d + W, x[r][1]);
    }
  }
}

template <class Mode, int R>
void attention_direct(const PyrAttention& p, const AttentionItem& item, const AttentionItem* then,
                      const Sight& sight, const AttentionScratch& s) {
  using T = typename Mode::Element;
  const int D = int(p.D), units = D / Mode::Step;
  float unit_row[256];
  for (int r = 0; r < R; ++r) {
    const int row = item.row0 + r;
    const int64_t head = item.kv_head * sight.heads + row % sight.heads;
    pack_query<Mode>(unit_row, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
    for (int u = 0; u < units; u += 4)
      v_store(s.queries + (r * units + u) / 4 * W, v_load_group(unit_row + u));
  }
  TileRows<T> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0]);
  int turn = 0;
  for (int begin = item.begin; begin < item.end; begin += KB, turn ^= 1) {
    const int keys = item.end - begin < KB ? item.end - begin : KB;
    const int vectors = (keys + W - 1) / W;
    const TileRows<T>& tile = tiles[turn];
    const TileRows<T>* next = &tiles[turn ^ 1];
    if (begin + KB < item.end)
      tile_rows(p, item, begin + KB, &tiles[turn ^ 1]);
    else if (then && then->end > then->begin)
      tile_rows(p, *then, then->begin, &tiles[turn ^ 1]);
    else
      next = nullptr;
    direct_scores<Mode, R>(s.scores, s.queries, units, tile.key, vectors,
                           next ? next->key : nullptr);
    float correction[R];
    for (int r = 0; r < R; ++r) {
      const int row_lo = sight.lo(item.row0 + r) - begin;
      int row_hi = sight.hi(item.row0 + r) - begin;
      if (row_hi >= keys) row_hi = keys - 1;
      correction[r] = softmax_step<Mode>(
          p, s.scores + r * KB, s.probabilities + r * (KB / Mode::Step), vectors,
          row_lo > 0 || row_hi < vectors * W - 1, row_lo, row_hi, s.rows.max + r,
          s.rows.weight + r);
    }
    direct_values<Mode, R>(s.rows.sum, D, s.probabilities, tile.value, keys, correction,
                           next ? next->value : nullptr);
  }
}

// Whether attention_direct has done it.
template <class Mode>
PYR_INLINE bool try_direct(const PyrAttention& p, const AttentionItem& item,
                           const AttentionItem* then, const Sight& sight,
                           const AttentionScratch& s) {
  if (p.D % (2 * W) || p.D % (Mode::Step * W)) return false;
  switch (item.rows) {
#define PYR_DIRECT(R)                                                                       \
  case R:                                                                                   \
    if constexpr (R <= kDirectRows) {                                                       \
      attention_direct<Mode, R>(p, item, then, sight, s);                                   \
      return true;                                                                          \
    }                                                                                       \
    return false;
    PYR_DIRECT(1)
    PYR_DIRECT(2)
    PYR_DIRECT(3)
    PYR_DIRECT(4)
    PYR_DIRECT(5)
    PYR_DIRECT(6)
    PYR_DIRECT(7)
    PYR_DIRECT(8)
#undef PYR_DIRECT
    default:
      return false;
  }
}

}  // namespace
