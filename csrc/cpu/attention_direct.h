// SPDX-License-Identifier: Apache-2.0
// Attention of a few rows (decoding): K and V are used in place, each of their rows once.
#pragma once
#include "attention_common.h"

namespace {

// Rows whose sums the registers hold. With more, up to 8, a step's keys are used twice, the second
// time from the caches.
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 8;
#else
constexpr int kRowsAtOnce = 4;
#endif

// scores[R][kDirectMost] of R rows: vectors of W keys. `queries` holds each group of four units of
// each row W / 4 times: [units / 4][R][W]. Each load of it serves two vectors of keys.
template <class Mode, int R>
PYR_INLINE void direct_scores(float* scores, const float* queries, int units,
                              const typename Mode::Element* const* keys, int vectors,
                              const typename Mode::Element* const* next) {
  constexpr int kBoth = 2;
  for (int i = 0; i < vectors * W; i += W) {
    V sums[R][4];
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += kBoth) {
      V sum[R][kBoth];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int b = 0; b < kBoth; ++b) sum[r][b] = v_zero();
      if (next)
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll 2
          for (int b = 0; b < kBoth; ++b)
            prefetch_row(next[i + 4 * g + j + b], units * Mode::Step * sizeof(*next[0]));
      for (int u = 0; u < units; u += W) {
        V x[kBoth][kGroups];
#pragma GCC unroll 2
        for (int b = 0; b < kBoth; ++b) {
#pragma GCC unroll 4
          for (int g = 0; g < kGroups; ++g)
            x[b][g] = Mode::load(keys[i + 4 * g + j + b] + u * Mode::Step, W * Mode::Step);
          v_transpose_groups(x[b]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const V query = v_load(queries + ((u / 4 + g) * R + r) * W);
#pragma GCC unroll 2
            for (int b = 0; b < kBoth; ++b)
              sum[r][b] = Mode::multiply_add(sum[r][b], x[b][g], query);
          }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int b = 0; b < kBoth; ++b) sums[r][j + b] = sum[r][b];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      v_store(scores + r * kDirectMost + i,
              v_sum_groups(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
  }
}

// The softmax of R rows so far. Weights stay vectors to the end: one sum across lanes an item.
struct DirectState {
  alignas(64) float max[2 * W < 8 ? 8 : 2 * W];
  alignas(64) float shift[2 * W < 8 ? 8 : 2 * W];
  alignas(64) float correction[2 * W < 8 ? 8 : 2 * W];
  alignas(64) float weight[8 * W];
};

// scores -> probabilities relative to the running maxima of the rows, which are found, four rows
// at a time, in the lanes of one vector. Leaves the factors for what was summed before.
template <class Mode, int R>
PYR_INLINE void direct_softmax(const PyrAttention& p, const AttentionItem& item,
                               const Sight& sight, int begin, int keys, int vectors, float* scores,
                               float* probabilities, DirectState* state) {
  constexpr int kStride = kDirectMost / Mode::Step;
  float factor = float(p.scale) * kLog2e;
  if (p.soft_cap > 0) {
    const V scale = v_set(float(p.scale));
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < vectors; ++i) {
        float* x = scores + r * kDirectMost + i * W;
        v_store(x, v_soft_cap(v_mul(v_load(x), scale), float(p.soft_cap)));
      }
    factor = kLog2e;
  }
  V top[(R + 3) / 4 * 4];
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * kDirectMost;
    const int lo = sight.lo(item.row0 + r) - begin, hi = sight.hi(item.row0 + r) - begin;
    if (lo > 0 || hi < vectors * W - 1 || keys < vectors * W)
      for (int i = 0; i < vectors; ++i)
        v_store(row + i * W,
                v_mask_outside(v_load(row + i * W), i * W, lo, hi < keys ? hi : keys - 1));
    top[r] = v_load(row);
    for (int i = 1; i < vectors; ++i) top[r] = v_max(top[r], v_load(row + i * W));
  }
  for (int r = R; r < (R + 3) / 4 * 4; ++r) top[r] = top[0];
  // A store of W lanes reaches beyond its four rows, so all are loaded first.
  const V befores[2] = {v_load(state->max), v_load(state->max + 4)};
#pragma GCC unroll 2
  for (int r = 0; r < R; r += 4) {
    const V before = befores[r / 4];
    const V after = v_max(v_max_rows(top[r], top[r + 1], top[r + 2], top[r + 3]), before);
    // No key was visible so far: any finite reference gives probabilities of zero.
    const V finite = v_max(after, v_set(kLowest));
    v_store(state->shift + r, v_mul(finite, v_set(-factor)));
    v_store(state->correction + r, v_exp2(v_mul(v_sub(before, finite), v_set(factor))));
    v_store(state->max + r, after);
  }
  const V scale = v_set(factor);
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) {
    const float* from = scores + r * kDirectMost;
    float* to = probabilities + r * kStride;
    const V shift = v_set(state->shift[r]);
    V total = v_mul(v_load(state->weight + r * W), v_set(state->correction[r]));
    for (int i = 0; i < vectors; i += Mode::kPairs ? 2 : 1) {
      const V a = Mode::exp2(v_fma(v_load(from + i * W), scale, shift));
      total = v_add(total, a);
      V b = v_zero();
      if (Mode::kPairs && i + 1 < vectors) {
        b = Mode::exp2(v_fma(v_load(from + i * W + W), scale, shift));
        total = v_add(total, b);
      }
      Mode::store_probabilities(to, i * W, a, b);
    }
    v_store(state->weight + r * W, total);
  }
}

// sum[R][D] = sum * correction + probabilities * values, for 2 * Pairs vectors of components.
template <class Mode, int R, int Pairs>
PYR_INLINE void direct_values_of(float* sum, int d, int D, const float* probabilities,
                                 const typename Mode::Element* const* values, int keys,
                                 const float* correction,
                                 const typename Mode::Element* const* next) {
  constexpr int kStride = kDirectMost / Mode::Step, kVectors = 2 * Pairs;
  V x[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      x[r][v] = v_mul(v_load(sum + r * D + d + v * W), v_set(correction[r]));
  for (int k = 0; k < keys; k += Mode::Step) {
    if (next)
#pragma GCC unroll 2
      for (int j = 0; j < Mode::Step; ++j)
        prefetch_row(next[k + j] + d, kVectors * W * sizeof(*next[0]));
    V y[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 2) Mode::load_values(values, k, d + v * W, &y[v], &y[v + 1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V q = v_set(probabilities[r * kStride + k / Mode::Step]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) x[r][v] = Mode::multiply_add(x[r][v], y[v], q);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) v_store(sum + r * D + d + v * W, x[r][v]);
}

// Takes as few passes over the keys as the registers allow: more sums at a time hide more latency.
template <class Mode, int R>
PYR_INLINE void direct_values(float* sum, int D, const float* probabilities,
                              const typename Mode::Element* const* values, int keys,
                              const float* correction,
                              const typename Mode::Element* const* next) {
  constexpr int kMost = W == 16 ? 16 : 8;  // sums in registers
  int d = 0;
  if constexpr (R * 8 <= kMost)
    for (; d + 8 * W <= D; d += 8 * W)
      direct_values_of<Mode, R, 4>(sum, d, D, probabilities, values, keys, correction, next);
  if constexpr (R * 4 <= kMost)
    for (; d + 4 * W <= D; d += 4 * W)
      direct_values_of<Mode, R, 2>(sum, d, D, probabilities, values, keys, correction, next);
  for (; d < D; d += 2 * W)
    direct_values_of<Mode, R, 1>(sum, d, D, probabilities, values, keys, correction, next);
}

template <class Mode, int R>
void attention_direct(const PyrAttention& p, const AttentionItem& item, const AttentionItem* then,
                      const Sight& sight, const AttentionScratch& s) {
  using T = typename Mode::Element;
  constexpr int kFirst = R <= kRowsAtOnce ? R : (R + 1) / 2, kRest = R - kFirst;
  const int D = int(p.D), units = D / Mode::Step;
  float* const rest = s.queries + units / 4 * kFirst * W;  // of the other rows
  float unit_row[kMaxHeadSize];
  for (int r = 0; r < R; ++r) {
    const int row = item.row0 + r;
    const int64_t head = item.kv_head * sight.heads + row % sight.heads;
    pack_query<Mode>(unit_row, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
    float* to = r < kFirst ? s.queries + r * W : rest + (r - kFirst) * W;
    for (int u = 0; u < units; u += 4, to += (r < kFirst ? kFirst : kRest) * W)
      v_store(to, v_load_group(unit_row + u));
  }
  DirectState state;
  for (float& max : state.max) max = -INFINITY;
  for (float& weight : state.weight) weight = 0;
  TileRows<T, kDirectMost> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0], direct_step(item.end - item.begin));
  int turn = 0;
  for (int begin = item.begin, keys; begin < item.end; begin += keys, turn ^= 1) {
    keys = direct_step(item.end - begin);
    const int vectors = (keys + W - 1) / W;
    const TileRows<T, kDirectMost>& tile = tiles[turn];
    const TileRows<T, kDirectMost>* next =
        rows_after(p, item, then, begin, keys, &tiles[turn ^ 1]);
    direct_scores<Mode, kFirst>(s.scores, s.queries, units, tile.key, vectors,
                                next ? next->key : nullptr);
    if constexpr (kRest > 0)
      direct_scores<Mode, kRest>(s.scores + kFirst * kDirectMost, rest, units, tile.key, vectors,
                                 nullptr);
    direct_softmax<Mode, R>(p, item, sight, begin, keys, vectors, s.scores, s.probabilities,
                            &state);
    direct_values<Mode, kFirst>(s.rows.sum, D, s.probabilities, tile.value, keys, state.correction,
                                next ? next->value : nullptr);
    if constexpr (kRest > 0)
      direct_values<Mode, kRest>(s.rows.sum + kFirst * D, D,
                                 s.probabilities + kFirst * (kDirectMost / Mode::Step), tile.value,
                                 keys, state.correction + kFirst, nullptr);
  }
  for (int r = 0; r < R; ++r) {
    Mode::in_order(s.rows.sum + r * D, D);
    s.rows.max[r] = state.max[r];
    s.rows.weight[r] = v_hsum(v_load(state.weight + r * W));
  }
}

// Attends for an item if it has few rows; returns whether it did.
template <class Mode>
PYR_INLINE bool try_direct(const PyrAttention& p, const AttentionItem& item,
                           const AttentionItem* then, const Sight& sight,
                           const AttentionScratch& s) {
  if (p.D % (2 * W) || p.D % (Mode::Step * W)) return false;
  switch (item.rows) {
#define PYR_DIRECT(R)                                                                       \
  case R:                                                                                   \
    attention_direct<Mode, R>(p, item, then, sight, s);                                     \
    return true;
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
