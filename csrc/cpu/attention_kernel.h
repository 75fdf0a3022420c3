// SPDX-License-Identifier: Apache-2.0
// Attention of a tile of rows over a range of keys: scores, running softmax, weighted values.
#pragma once
#include "tile.h"

namespace {

using pyr::AttentionItem;

// What a request looks like to the kernels. Positions are local: counted from `skip`.
struct Sight {
  int64_t skip;
  int last;        // local position of the last query
  int queries;
  int heads;       // query heads of a KV head
  int64_t query0;  // row of the first query in `query` and `out`
  int window;      // 0: all

  PYR_INLINE int hi(int row) const { return last - queries + 1 + row / heads; }
  PYR_INLINE int lo(int row) const { return window ? hi(row) - window + 1 : 0; }
};

PYR_INLINE Sight sight_of(const PyrAttention& p, int request) {
  const int first = p.query_start[request];
  const int queries = p.query_start[request + 1] - first;
  return {p.skips[request],         p.seq_lens[request] - p.skips[request] - 1,
          queries,                  int(p.H / p.G),
          first,                    int(p.sliding_window)};
}

template <class T>
PYR_INLINE CacheWalk<T> walk_of(const PyrAttention& p, const AttentionItem& item) {
  return {(const T*)p.key + item.kv_head * p.key_g,
          (const T*)p.value + item.kv_head * p.value_g,
          p.table + item.request * p.table_r,
          p.N,
          p.key_p,
          p.key_n,
          p.value_p,
          p.value_n};
}

// The addresses of the keys begin .. begin + KB - 1 of an item. Nothing is read below the window of
// its first row: those blocks may be somebody else's.
template <class T>
PYR_INLINE void tile_rows(const PyrAttention& p, const AttentionItem& item, int begin,
                          TileRows<T>* out) {
  const Sight sight = sight_of(p, item.request);
  const int from = sight.lo(item.row0) - begin, count = item.end - begin;
  walk_of<T>(p, item).tile(sight.skip + begin, from > 0 ? from : 0, count < KB ? count : KB, out);
}

// The state of a tile of rows while it runs over the keys.
struct RowState {
  float* sum;     // [rows][padded D], unnormalised
  float* max;     // [rows], of the scores as they come out of the product
  float* weight;  // [rows]
};

struct AttentionScratch {
  float *queries, *keys, *values, *scores, *probabilities;
  RowState rows;
};

// Decoding holds its few rows W / 4 times over.
PYR_INLINE int64_t query_floats(const PyrAttention& p, int64_t rows, int step) {
  const int64_t tile = rows * (p.D / step), direct = 8 * (p.D / step) * (W / 4);
  return tile > direct ? tile : direct;
}

template <class Mode>
PYR_INLINE AttentionScratch carve(const PyrAttention& p, int64_t rows, void* memory) {
  Carver carver{(char*)memory};
  AttentionScratch s;
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.values = carver.floats(KB / Mode::Step * padded(int(p.D)));
  s.scores = carver.floats(8 * KB);
  s.probabilities = carver.floats(8 * KB);
  s.queries = carver.floats(query_floats(p, rows, Mode::Step));
  s.rows.sum = carver.floats(rows * padded(int(p.D)));
  s.rows.max = carver.floats(rows);
  s.rows.weight = carver.floats(rows);
  return s;
}

template <class Mode>
size_t attention_scratch(const PyrAttention& p, int64_t rows) {
  return carved(p.D / Mode::Step * KB) + carved(KB / Mode::Step * padded(int(p.D))) +
         2 * carved(8 * KB) + carved(query_floats(p, rows, Mode::Step)) +
         carved(rows * padded(int(p.D))) + 2 * carved(rows);
}

// One row's softmax step over a tile: scores -> probabilities relative to the running maximum.
// Returns the factor for what was summed before.
template <class Mode>
PYR_INLINE float softmax_step(const PyrAttention& p, float* scores, float* probabilities,
                              int vectors, bool mask, int lo, int hi, float* max, float* weight) {
  float factor = float(p.scale) * kLog2e;
  if (p.soft_cap > 0) {
    for (int i = 0; i < vectors; ++i)
      v_store(scores + i * W, v_soft_cap(v_mul(v_load(scores + i * W), v_set(float(p.scale))),
                                         float(p.soft_cap)));
    factor = kLog2e;
  }
  if (mask)
    for (int i = 0; i < vectors; ++i)
      v_store(scores + i * W, v_mask_outside(v_load(scores + i * W), i * W, lo, hi));
  V top = v_load(scores);
  for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(scores + i * W));
  const float before = *max, tile_max = v_hmax(top);
  const float after = tile_max > before ? tile_max : before;
  // Nothing visible so far: any finite reference gives probabilities of zero.
  const float shift = after == -INFINITY ? 0.0f : -after * factor;
  const V scale = v_set(factor), offset = v_set(shift);
  V total = v_zero();
  if (Mode::kPairs) {
    int i = 0;
    for (; i + 2 <= vectors; i += 2) {
      const V a = v_exp2(v_fma(v_load(scores + i * W), scale, offset));
      const V b = v_exp2(v_fma(v_load(scores + i * W + W), scale, offset));
      total = v_add(total, v_add(a, b));
      Mode::store_probabilities(probabilities, i * W, a, b);
    }
    if (i < vectors) {
      const V a = v_exp2(v_fma(v_load(scores + i * W), scale, offset));
      total = v_add(total, a);
      Mode::store_probabilities(probabilities, i * W, a, v_zero());
    }
  } else {
    for (int i = 0; i < vectors; ++i) {
      const V a = v_exp2(v_fma(v_load(scores + i * W), scale, offset));
      total = v_add(total, a);
      Mode::store_probabilities(probabilities, i * W, a, a);
    }
  }
  const float correction =
      after == before ? 1.0f : v_first(v_exp2(v_set((before - after) * factor)));
  *max = after;
  *weight = *weight * correction + v_hsum(total);
  return correction;
}

// Rows that share each tile of keys through packed copies of it.
template <class Mode>
void attention_tile(const PyrAttention& p, const AttentionItem& item, const Sight& sight,
                    const AttentionScratch& s) {
  using T = typename Mode::Element;
  const int D = int(p.D), units = D / Mode::Step, stride = padded(D);
  for (int r = 0; r < item.rows; ++r) {
    const int row = item.row0 + r;
    const int64_t head = item.kv_head * sight.heads + row % sight.heads;
    pack_query<Mode>(s.queries + r * units, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
  }
  const int step = group_rows(item.rows);
  TileRows<T> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0]);
  int turn = 0;
  for (int begin = item.begin; begin < item.end; begin += KB, turn ^= 1) {
    const int keys = item.end - begin < KB ? item.end - begin : KB;
    const TileRows<T>& tile = tiles[turn];
    const TileRows<T>* next = nullptr;
    if (begin + KB < item.end) {
      tile_rows(p, item, begin + KB, &tiles[turn ^ 1]);
      next = &tiles[turn ^ 1];
    }
    pack_keys<Mode>(s.keys, tile.key, keys, D, next ? next->key : nullptr);
    pack_values<Mode>(s.values, tile.value, keys, D, next ? next->value : nullptr);
    for (int r = 0; r < item.rows; r += step) {
      const int rows = item.rows - r < step ? item.rows - r : step;
      const int lo = sight.lo(item.row0 + r) - begin, hi = sight.hi(item.row0 + r + rows - 1) - begin;
      if (hi < 0 || lo >= keys) continue;
      const int visible = hi + 1 < keys ? hi + 1 : keys;
      const int vectors = (visible + W - 1) / W;
      product<Mode, false>(rows, s.scores, KB, s.queries + r * units, units, s.keys, KB, units,
                           vectors, nullptr);
      float correction[kMaxRows];
      for (int i = 0; i < rows; ++i) {
        const int row = item.row0 + r + i;
        const int row_lo = sight.lo(row) - begin;
        int row_hi = sight.hi(row) - begin;
        if (row_hi >= keys) row_hi = keys - 1;
        correction[i] = softmax_step<Mode>(
            p, s.scores + i * KB, s.probabilities + i * (KB / Mode::Step), vectors,
            row_lo > 0 || row_hi < vectors * W - 1, row_lo, row_hi, s.rows.max + r + i,
            s.rows.weight + r + i);
      }
      product<Mode, true>(rows, s.rows.sum + r * stride, stride, s.probabilities, KB / Mode::Step,
                          s.values, stride, (visible + Mode::Step - 1) / Mode::Step, stride / W,
                          correction);
    }
  }
}

// Few rows (decoding): K and V are used where they lie, each row of them once.
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

// Normalises a row and writes it out; `max` and `weight` describe its softmax so far.
PYR_INLINE void finish_row(const PyrAttention& p, const Sight& sight, int kv_head, int row,
                           const float* sum, float max, float weight) {
  const int64_t head = int64_t(kv_head) * sight.heads + row % sight.heads;
  float factor = 1.0f;
  if (p.sinks) {
    const float scale = p.soft_cap > 0 ? kLog2e : float(p.scale) * kLog2e;
    const float top = max == -INFINITY ? -INFINITY : max * scale;
    const float sink = load_scalar(p.sinks, head, p.sinks_dtype) * kLog2e;
    const float shift = sink > top ? sink : top;
    if (shift != -INFINITY) {
      factor = v_first(v_exp2(v_set(top - shift)));
      weight = weight * factor + v_first(v_exp2(v_set(sink - shift)));
    }
  }
  store_row(p.out, (sight.query0 + row / sight.heads) * p.out_t + head * p.out_h, p.out_dtype, sum,
            weight > 0 ? factor / weight : 0.0f, int(p.D));
}

template <class Mode>
void attention(const PyrAttention& p, const AttentionItem& item, const AttentionItem* next,
               float* partials, void* memory) {
  const AttentionScratch s = carve<Mode>(p, item.rows, memory);
  const Sight sight = sight_of(p, item.request);
  const int stride = padded(int(p.D));
  for (int i = 0; i < item.rows; ++i) {
    s.rows.max[i] = -INFINITY;
    s.rows.weight[i] = 0;
  }
  memset(s.rows.sum, 0, size_t(item.rows) * stride * 4);
  if (!try_direct<Mode>(p, item, next, sight, s)) attention_tile<Mode>(p, item, sight, s);
  if (item.slot < 0) {
    for (int i = 0; i < item.rows; ++i)
      finish_row(p, sight, item.kv_head, item.row0 + i, s.rows.sum + i * stride, s.rows.max[i],
                 s.rows.weight[i]);
    return;
  }
  float* part = partials + item.slot * pyr::partial_floats(pyr::kSplitRows, p.D);
  for (int i = 0; i < item.rows; ++i, part += p.D + 2) {
    part[0] = s.rows.max[i];
    part[1] = s.rows.weight[i];
    memcpy(part + 2, s.rows.sum + i * stride, size_t(p.D) * 4);
  }
}

// Joins the parts of a split request in the order of its keys. `first` is its first item.
void merge(const PyrAttention& p, const AttentionItem& first, int64_t parts, const float* partials,
           void* memory) {
  const size_t size = pyr::partial_floats(pyr::kSplitRows, p.D);
  const Sight sight = sight_of(p, first.request);
  const float scale = p.soft_cap > 0 ? kLog2e : float(p.scale) * kLog2e;
  float* sum = (float*)memory;
  for (int i = 0; i < first.rows; ++i) {
    const float* part = partials + first.slot * size + size_t(i) * (p.D + 2);
    float max = -INFINITY, weight = 0;
    for (int64_t k = 0; k < parts; ++k) max = part[k * size] > max ? part[k * size] : max;
    memset(sum, 0, size_t(p.D) * 4);
    for (int64_t k = 0; k < parts; ++k) {
      if (part[k * size] == -INFINITY) continue;
      const float factor = v_first(v_exp2(v_set((part[k * size] - max) * scale)));
      weight += part[k * size + 1] * factor;
      for (int d = 0; d < p.D; ++d) sum[d] += part[k * size + 2 + d] * factor;
    }
    finish_row(p, sight, first.kv_head, first.row0 + i, sum, max, weight);
  }
}

}  // namespace
