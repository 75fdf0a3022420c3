// SPDX-License-Identifier: Apache-2.0
// Window scores of one (request, KV head) and range of keys. Rows: query head * window + query.
#pragma once
#include "tile.h"

namespace {

using pyr::ScoreBuffers;
using pyr::ScoreItem;

struct ScoreScratch {
  float *queries, *keys, *scores, *row_max, *row_scale;
};

template <class Mode>
PYR_INLINE ScoreScratch carve(const PyrScores& p, void* memory) {
  const int64_t rows = p.H / p.G * p.window;
  Carver carver{(char*)memory};
  ScoreScratch s;
  s.queries = carver.floats(rows * (p.D / Mode::Step));
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.scores = carver.floats(rows * KB);
  s.row_max = carver.floats(rows);
  s.row_scale = carver.floats(rows);
  return s;
}

template <class Mode>
size_t score_scratch(const PyrScores& p) {
  const int64_t rows = p.H / p.G * p.window;
  return carved(rows * (p.D / Mode::Step)) + carved(p.D / Mode::Step * KB) + carved(rows * KB) +
         2 * carved(rows);
}

// Calls use(first key, scores [rows][KB], vectors) for each tile of the item's keys; the scores are
// scaled by scale * log2(e), capped and masked.
template <class Mode, class Use>
PYR_INLINE void each_score_tile(const PyrScores& p, const ScoreItem& item, const ScoreScratch& s,
                                Use use) {
  using T = typename Mode::Element;
  const int D = int(p.D), units = D / Mode::Step, heads = int(p.H / p.G), window = int(p.window);
  const int rows = heads * window, n = p.prompt_lens[item.request] - item.start;
  for (int r = 0; r < rows; ++r) {
    const int64_t token = p.query_ends[item.request] - window + r % window;
    const int64_t head = int64_t(item.kv_head) * heads + r / window;
    pack_query<Mode>(s.queries + r * units, p.query, token * p.query_t + head * p.query_h,
                     p.query_dtype, D);
  }
  const T* key = (const T*)p.key + item.kv_head * p.key_g;
  const CacheWalk<T> walk{key,     key,     p.table + item.request * p.table_r, p.N, p.key_p,
                          p.key_n, p.key_p, p.key_n};
  TileRows<T> tiles[2];
  const auto rows_at = [&](int begin, TileRows<T>* out) {
    walk.tile(item.start + begin, 0, item.end - begin < KB ? item.end - begin : KB, out);
  };
  rows_at(item.begin, &tiles[0]);
  int turn = 0;
  for (int begin = item.begin; begin < item.end; begin += KB, turn ^= 1) {
    const int keys = item.end - begin < KB ? item.end - begin : KB;
    const int vectors = (keys + W - 1) / W;
    const T* const* next = nullptr;
    if (begin + KB < item.end) {
      rows_at(begin + KB, &tiles[turn ^ 1]);
      next = tiles[turn ^ 1].key;
    }
    pack_keys<Mode>(s.keys, tiles[turn].key, keys, D, next);
    multiply_keys<Mode>(rows, s.scores, s.queries, units, s.keys, vectors);
    const float factor = float(p.scale) * kLog2e;
    const bool masked = begin + vectors * W > n - window + 1 || keys < vectors * W;
    for (int r = 0; r < rows; ++r) {
      float* row = s.scores + r * KB;
      // Keys this query sees, within the tile; those behind the item are another item's.
      int hi = n - window + r % window - begin;
      if (hi >= keys) hi = keys - 1;
      for (int i = 0; i < vectors; ++i) {
        V x = v_load(row + i * W);
        if (p.soft_cap > 0)
          x = v_mul(v_soft_cap(v_mul(x, v_set(float(p.scale))), float(p.soft_cap)), v_set(kLog2e));
        else
          x = v_mul(x, v_set(factor));
        v_store(row + i * W, masked ? v_mask_outside(x, i * W, 0, hi) : x);
      }
    }
    use(begin - item.begin, s.scores, vectors);
  }
}

// Adds a tile of scores to the maximum of their row, and to the sum of 2^(score - maximum).
PYR_INLINE void add_to_softmax(const float* row, int vectors, float* max, float* sum) {
  V top = v_load(row);
  for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(row + i * W));
  const float before = *max, tile_max = v_hmax(top);
  const float after = tile_max > before ? tile_max : before;
  const V shift = v_set(reference_of(after));
  V total = v_zero();
  for (int i = 0; i < vectors; ++i)
    total = v_add(total, v_exp2(v_sub(v_load(row + i * W), shift)));
  const float kept = after == before ? 1.0f : v_first(v_exp2(v_set(before - after)));
  *sum = *sum * kept + v_hsum(total);
  *max = after;
}

// Phase 1: each row's maximum and the sum of 2^(score - maximum) over the item's keys.
template <class Mode>
void score_logits(const PyrScores& p, const ScoreItem& item, const ScoreBuffers& b, void* memory) {
  const ScoreScratch s = carve<Mode>(p, memory);
  const int rows = int(p.H / p.G * p.window);
  const int64_t width = round_up(item.end - item.begin, KB);
  for (int r = 0; r < rows; ++r) {
    b.row_max[r] = -INFINITY;
    b.row_sum[r] = 0;
  }
  each_score_tile<Mode>(p, item, s, [&](int first, const float* scores, int vectors) {
    for (int r = 0; r < rows; ++r)
      add_to_softmax(scores + r * KB, vectors, &b.row_max[r], &b.row_sum[r]);
    if (b.logits)
      for (int r = 0; r < rows; ++r)
        memcpy(b.logits + r * width + first, scores + r * KB, size_t(vectors) * W * 4);
  });
}

// Phase 2: sums the probabilities over the window's queries and reduces them over the query heads. The
// sinks are added here to the statistics of the rows.
template <class Mode>
void score_mass(const PyrScores& p, const ScoreItem& item, const ScoreBuffers& b, void* memory) {
  const ScoreScratch s = carve<Mode>(p, memory);
  const int heads = int(p.H / p.G), window = int(p.window), rows = heads * window;
  const int64_t width = round_up(item.end - item.begin, KB);
  const int wanted = p.prompt_lens[item.request] - window;
  for (int r = 0; r < rows; ++r) {
    float max = b.row_max[r], sum = b.row_sum[r];
    const int64_t head = int64_t(item.kv_head) * heads + r / window;
    if (p.sinks) add_sink(load_scalar(p.sinks, head, p.sinks_dtype), &max, &sum);
    s.row_max[r] = max;
    s.row_scale[r] = 1.0f / sum;
  }
  const auto reduce = [&](int first, const float* scores, int64_t stride, int vectors) {
    for (int i = 0; i < vectors; ++i) {
      const int key = item.begin + first + i * W;
      if (key >= wanted) break;
      V result = v_zero();
      for (int h = 0; h < heads; ++h) {
        V mass = v_zero();
        for (int w = 0; w < window; ++w) {
          const int r = h * window + w;
          const V x = v_sub(v_load(scores + r * stride + i * W), v_set(s.row_max[r]));
          mass = v_fma(v_exp2(x), v_set(s.row_scale[r]), mass);
        }
        if (p.reduce == PYR_MAX)
          result = h ? v_max_or_nan(result, mass) : mass;
        else
          result = v_add(result, mass);
      }
      if (p.reduce == PYR_MEAN) result = v_mul(result, v_set(1.0f / float(heads)));
      float lanes[W];
      v_store(lanes, result);
      for (int j = 0; j < W && key + j < wanted; ++j) b.mass[key + j] = lanes[j];
    }
  };
  if (!b.logits) {
    each_score_tile<Mode>(p, item, s, [&](int first, const float* scores, int vectors) {
      reduce(first, scores, KB, vectors);
    });
    return;
  }
  for (int first = 0; first < item.end - item.begin; first += KB) {
    const int keys = item.end - item.begin - first;
    reduce(first, b.logits + first, width, ((keys < KB ? keys : KB) + W - 1) / W);
  }
}

}  // namespace
