// SPDX-License-Identifier: Apache-2.0
// The scores of `observed_expected` over a range of keys of one (request, KV head): what the window's
// queries give each key, what queries to come are expected to give it, and the norms of V. K and V are
// read once. Rows: query head * window + query, of both kinds of queries. Keys count from the first
// one of the request.
#pragma once
#include "score_kernel.h"

namespace {

using pyr::ExpectedBuffers;

struct ExpectedScratch {
  ScoreScratch window;  // row_max, row_scale: of the whole softmax of a row, or of a head
  float *tile_max, *tile_sum, *factor;
  float *future, *products;
};

// A float of a future query becomes two bfloat16 where keys are multiplied in pairs: their sum differs
// from it by less than 2^-16 of it.
template <class Mode>
PYR_INLINE int64_t future_parts() {
  return Mode::kPairs ? 2 : 1;
}

template <class Mode>
PYR_INLINE ExpectedScratch carve_expected(const PyrObservedExpected& e, void* memory) {
  const PyrScores& p = e.scores;
  const int64_t rows = p.H / p.G * p.window, parts = future_parts<Mode>();
  Carver carver{(char*)memory + score_scratch<Mode>(p)};
  ExpectedScratch s;
  s.window = carve<Mode>(p, memory);
  s.tile_max = carver.floats(rows);
  s.tile_sum = carver.floats(rows);
  s.factor = carver.floats(rows);
  s.future = carver.floats(parts * rows * (p.D / Mode::Step));
  s.products = carver.floats(parts * p.window * KB);
  return s;
}

template <class Mode>
size_t expected_scratch(const PyrObservedExpected& e) {
  const PyrScores& p = e.scores;
  const int64_t rows = p.H / p.G * p.window, parts = future_parts<Mode>();
  return score_scratch<Mode>(p) + 3 * carved(rows) + carved(parts * rows * (p.D / Mode::Step)) +
         carved(parts * p.window * KB);
}

// The future queries of the item's heads -> [head][part][query][D / Step].
template <class Mode>
PYR_INLINE void pack_future(const PyrObservedExpected& e, const ScoreItem& item, float* out) {
  const PyrScores& p = e.scores;
  const int64_t D = p.D, units = D / Mode::Step, heads = p.H / p.G, rest = p.window * units;
  const float* row = e.future + (item.request * p.H + item.kv_head * heads) * p.window * D;
  for (int64_t h = 0; h < heads; ++h, out += future_parts<Mode>() * rest)
    for (int64_t w = 0; w < p.window; ++w, row += D) {
      if constexpr (Mode::kPairs) {
        bf16_t* high = (bf16_t*)(out + w * units);
        bf16_t* low = (bf16_t*)(out + rest + w * units);
        for (int64_t d = 0; d < D; ++d) {
          high[d] = to_bf16(row[d]);
          low[d] = to_bf16(row[d] - to_float(high[d]));
        }
      } else {
        memcpy(out + w * units, row, size_t(D) * 4);
      }
    }
}

// Finds the logits of the expected attention of each query head, in base 2, for the tile of keys that
// is packed: the mean of the future queries' logits and half their variance.
template <class Mode>
PYR_INLINE void expect_tile(const PyrObservedExpected& e, const ExpectedScratch& s,
                            const ExpectedBuffers& b, int begin, int keys) {
  const PyrScores& p = e.scores;
  const int heads = int(p.H / p.G), window = int(p.window), units = int(p.D) / Mode::Step;
  const int rows = int(future_parts<Mode>()) * window;
  const int vectors = (keys + W - 1) / W, lo = int(e.first) - begin;
  const bool masked = lo > 0 || keys < vectors * W;
  const V linear = v_set(float(p.scale * double(kLog2e)));
  const V square = v_set(float(p.scale * p.scale * double(kLog2e) / (2.0 * double(window))));
  for (int h = 0; h < heads; ++h) {
    const float* queries = s.future + int64_t(h) * rows * units;
    multiply_keys<Mode>(rows, s.products, queries, units, s.window.keys, vectors);
    float* logits = b.logits + h * b.stride + begin;
    for (int i = 0; i < vectors; ++i) {
      float* products = s.products + i * W;
      V sum = v_zero(), squares = v_zero();
      for (int w = 0; w < window; ++w) {
        V x = v_load(products + w * KB);
        if constexpr (Mode::kPairs) {
          x = v_add(x, v_load(products + (window + w) * KB));
          v_store(products + w * KB, x);
        }
        sum = v_add(sum, x);
      }
      const V mean = v_mul(sum, v_set(1.0f / float(window)));
      for (int w = 0; w < window; ++w) {
        const V x = v_sub(v_load(products + w * KB), mean);
        squares = v_fma(x, x, squares);
      }
      const V x = v_fma(squares, square, v_mul(mean, linear));
      v_store(logits + i * W, masked ? v_mask_outside(x, i * W, lo, keys - 1) : x);
    }
    add_to_softmax(logits, vectors, &b.head_max[h], &b.head_sum[h]);
  }
}

// Replaces the scores of a tile by 2^(score - the row's maximum), and finds each row's maximum and sum.
PYR_INLINE void exponentiate_tile(const ExpectedScratch& s, int rows, int vectors) {
  for (int r = 0; r < rows; ++r) {
    float* row = s.window.scores + r * KB;
    V top = v_load(row);
    for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(row + i * W));
    const float max = v_hmax(top);
    const V shift = v_set(reference_of(max));
    V total = v_zero();
    for (int i = 0; i < vectors; ++i) {
      const V x = v_exp2(v_sub(v_load(row + i * W), shift));
      v_store(row + i * W, x);
      total = v_add(total, x);
    }
    s.tile_max[r] = max;
    s.tile_sum[r] = v_hsum(total);
  }
}

// Writes ||v||_1 and ||v||_2 of the keys of a tile.
template <class T>
PYR_INLINE void norms(const TileRows<T>& tile, int keys, int D, float* first, float* second) {
  for (int j = 0; j < keys; j += 4) {  // a tile has rows to read behind the last key
    V sum[4], squares[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[i] = squares[i] = v_zero();
    for (int d = 0; d < D; d += W)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const V x = v_load_row(tile.value[j + i] + d, D - d);
        sum[i] = v_add(sum[i], v_max(x, v_sub(v_zero(), x)));
        squares[i] = v_fma(x, x, squares[i]);
      }
    float sums[W], of_squares[W];  // of the groups of lanes
    v_store(sums, v_sum_groups(sum[0], sum[1], sum[2], sum[3]));
    v_store(of_squares, v_sum_groups(squares[0], squares[1], squares[2], squares[3]));
    for (int i = 0; i < 4 && j + i < keys; ++i) {
      for (int g = 1; g < kGroups; ++g) {
        sums[i] += sums[g * 4 + i];
        of_squares[i] += of_squares[g * 4 + i];
      }
      first[j + i] = sums[i];
      second[j + i] = __builtin_sqrtf(of_squares[i]);
    }
  }
}

// Phase 1: the norms of V, the logits of the expected attention, and the statistics of the rows and
// heads over the item's keys. Rows come in whole vectors, of which those behind the last are not used.
template <class Mode>
void expected_logits(const PyrObservedExpected& e, const ScoreItem& item, const ExpectedBuffers& b,
                     void* memory) {
  using T = typename Mode::Element;
  const PyrScores& p = e.scores;
  const ExpectedScratch s = carve_expected<Mode>(e, memory);
  const int heads = int(p.H / p.G), rows = heads * int(p.window), whole = int(pyr::whole_rows(rows));
  const T* value = (const T*)e.value + item.kv_head * e.value_g;
  const CacheWalk<T> walk{value,     value,     p.table + item.request * p.table_r, p.N, e.value_p,
                          e.value_n, e.value_p, e.value_n};
  for (int r = 0; r < whole; ++r) {
    b.row_max[r] = -INFINITY;
    b.row_sum[r] = 0;
    s.tile_max[r] = -INFINITY;
    s.tile_sum[r] = 0;
  }
  for (int h = 0; h < heads; ++h) {
    b.head_max[h] = -INFINITY;
    b.head_sum[h] = 0;
  }
  if (e.future) pack_future<Mode>(e, item, s.future);
  float* weights = b.weights;
  each_score_tile<Mode>(p, item, s.window, [&](int first, const float* scores, int vectors) {
    const int begin = item.begin + first;
    const int keys = item.end - begin < KB ? item.end - begin : KB;
    TileRows<T> tile;
    walk.tile(item.start + begin, 0, keys, &tile);
    for (int j = 0; j < keys; ++j) prefetch_row(tile.value[j], p.D * sizeof(T));
    exponentiate_tile(s, rows, vectors);
    for (int r = 0; r < rows; r += W) {
      const V before = v_load(b.row_max + r), here = v_load(s.tile_max + r);
      const V after = v_max(here, before);  // in this order, which drops NaN: the sum keeps it
      const V shift = v_max(after, v_set(kLowest));
      const V sum = v_mul(v_load(b.row_sum + r), v_exp2(v_sub(before, shift)));
      v_store(b.row_sum + r, v_fma(v_load(s.tile_sum + r), v_exp2(v_sub(here, shift)), sum));
      v_store(b.row_max + r, after);
    }
    if (weights) {
      memcpy(weights, scores, size_t(rows) * KB * 4);
      memcpy(weights + rows * KB, s.tile_max, size_t(whole) * 4);
      weights += rows * KB + whole;
    }
    if (e.future) expect_tile<Mode>(e, s, b, begin, keys);
    norms(tile, keys, int(p.D), b.mass + begin, b.expected + begin);
  });
}

// Phase 2, with the statistics of all keys: weighs the norms by both kinds of attention.
template <class Mode>
void expected_mass(const PyrObservedExpected& e, const ScoreItem& item, const ExpectedBuffers& b,
                   void* memory) {
  const PyrScores& p = e.scores;
  const ExpectedScratch s = carve_expected<Mode>(e, memory);
  const int heads = int(p.H / p.G), window = int(p.window), rows = heads * window;
  const int whole = int(pyr::whole_rows(rows));
  float *const max = s.window.row_max, *const scale = s.window.row_scale;
  // The maximum of the softmax of a row or head, and 1 / (its sum * heads).
  const auto finish = [&](int i, int h, float top, float sum) {
    const int64_t head = int64_t(item.kv_head) * heads + h;
    if (p.sinks) add_sink(load_scalar(p.sinks, head, p.sinks_dtype), &top, &sum);
    max[i] = top;
    scale[i] = 1.0f / (sum * float(heads));
  };
  for (int r = 0; r < whole; ++r) max[r] = scale[r] = 0;
  for (int r = 0; r < rows; ++r) finish(r, r / window, b.row_max[r], b.row_sum[r]);
  const auto weigh = [&](int first, const float* weights, const float* tile_max) {
    const int keys = item.end - item.begin - first;
    const int vectors = ((keys < KB ? keys : KB) + W - 1) / W;
    for (int r = 0; r < rows; r += W) {
      const V x = v_sub(v_load(tile_max + r), v_load(max + r));
      v_store(s.factor + r, v_mul(v_exp2(x), v_load(scale + r)));
    }
    V total[KB / W];
#pragma GCC unroll 16
    for (int i = 0; i < KB / W; ++i) total[i] = v_zero();
    for (int r = 0; r < rows; ++r) {
      const V factor = v_set(s.factor[r]);
#pragma GCC unroll 16
      for (int i = 0; i < KB / W; ++i)
        total[i] = v_fma(v_load(weights + r * KB + i * W), factor, total[i]);
    }
    float* mass = b.mass + item.begin + first;
    for (int i = 0; i < vectors; ++i)
      v_store(mass + i * W, v_mul(v_load(mass + i * W), total[i]));
  };
  if (const float* weights = b.weights) {
    const int each = rows * KB + whole;
    for (int first = 0; first < item.end - item.begin; first += KB, weights += each)
      weigh(first, weights, weights + rows * KB);
  } else {
    for (int r = 0; r < whole; ++r) s.tile_max[r] = 0;
    each_score_tile<Mode>(p, item, s.window, [&](int first, const float* scores, int vectors) {
      exponentiate_tile(s, rows, vectors);
      weigh(first, scores, s.tile_max);
    });
  }
  if (!e.future) return;
  for (int h = 0; h < heads; ++h) finish(h, h, b.head_max[h], b.head_sum[h]);
  for (int i = item.begin; i < item.end; i += W) {
    V total = v_zero();
    for (int h = 0; h < heads; ++h) {
      const V x = v_sub(v_load(b.logits + h * b.stride + i), v_set(max[h]));
      total = v_fma(v_exp2(x), v_set(scale[h]), total);
    }
    v_store(b.expected + i, v_mul(v_load(b.expected + i), total));
  }
}

}  // namespace
