// SPDX-License-Identifier: Apache-2.0
// Attention of an item: a tile of rows over a range of keys.
#pragma once
#include "attention_direct.h"
#if defined(__AVX512BF16__)
#include "amx_decode.h"
#endif

namespace {

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
  // A group of rows fetches its share of the next tile: all at once would have to wait for memory.
  const int share = (KB * step + item.rows - 1) / item.rows;
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
    pack_keys<Mode>(s.keys, tile.key, keys, D, nullptr);
    pack_values<Mode>(s.values, tile.value, keys, D, nullptr);
    for (int r = 0, fetched = 0; r < item.rows; r += step) {
      for (const int end = fetched + share; next && fetched < end && fetched < KB; ++fetched) {
        prefetch_row(next->key[fetched], D * sizeof(T));
        prefetch_row(next->value[fetched], D * sizeof(T));
      }
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
            s.rows.weights + (r + i) * W);
      }
      product<Mode, true>(rows, s.rows.sum + r * stride, stride, s.probabilities, KB / Mode::Step,
                          s.values, stride, (visible + Mode::Step - 1) / Mode::Step, stride / W,
                          correction);
    }
  }
}

#if defined(__AVX512BF16__)
template <class Mode>
constexpr bool kTiled = Mode::kPadRows > 1;
#endif

template <class Mode>
PYR_INLINE void attention_of_many(const PyrAttention& p, const AttentionItem& item,
                                  const Sight& sight, const AttentionScratch& s) {
#if defined(__AVX512BF16__)
  if constexpr (kTiled<Mode>)
    if (p.D % 32 == 0) return attention_with_tiles<Mode>(p, item, sight, s);
#endif
  attention_tile<Mode>(p, item, sight, s);
}

// Attends for an item if it has few rows; returns whether it did.
template <class Mode>
PYR_INLINE bool attention_of_few(const PyrAttention& p, const AttentionItem& item,
                                 const AttentionItem* next, const Sight& sight,
                                 const AttentionScratch& s) {
#if defined(__AVX512BF16__)
  if constexpr (kTiled<Mode> && sizeof(typename Mode::Element) == 2)
    if (decode_with_tiles<Mode>(p, item, next, sight, s)) return true;
#endif
  return try_direct<Mode>(p, item, next, sight, s);
}

// Normalises a row and writes it out; `max` and `weight` describe its softmax so far. The weight is 0
// where the row has seen no key, and NaN where a score is.
PYR_INLINE void finish_row(const PyrAttention& p, const Sight& sight, int kv_head, int row,
                           const float* sum, float max, float weight) {
  const int64_t head = int64_t(kv_head) * sight.heads + row % sight.heads;
  const float scale = p.soft_cap > 0 ? 1.0f : float(p.scale);
  if (p.log_sum_exp)
    p.log_sum_exp[(sight.query0 + row / sight.heads) * p.H + head] =
        weight == 0 ? -INFINITY : max * scale + __builtin_logf(weight);
  float factor = 1.0f;
  if (p.sinks) {
    const float top = max == -INFINITY ? -INFINITY : max * (scale * kLog2e);
    const float sink = load_scalar(p.sinks, head, p.sinks_dtype) * kLog2e;
    const float shift = sink > top ? sink : top;
    if (shift != -INFINITY) {
      factor = v_first(v_exp2(v_set(top - shift)));
      weight = weight * factor + v_first(v_exp2(v_set(sink - shift)));
    }
  }
  store_row(p.out, (sight.query0 + row / sight.heads) * p.out_t + head * p.out_h, p.out_dtype, sum,
            weight == 0 ? 0.0f : factor / weight * float(p.value_scale), int(p.D));
}

template <class Mode>
void attention(const PyrAttention& p, const AttentionItem& item, const AttentionItem* next,
               const pyr::Partials& partials, void* memory) {
  const AttentionScratch s = carve<Mode>(p, item.rows, memory);
  const Sight sight = sight_of(p, item.request);
  const int stride = padded(int(p.D));
  for (int i = 0; i < item.rows; ++i) {
    s.rows.max[i] = -INFINITY;
    s.rows.weight[i] = 0;
    v_store(s.rows.weights + i * W, v_zero());
  }
  memset(s.rows.sum, 0, size_t(round_up(item.rows, Mode::kPadRows)) * stride * 4);
  // Without keys no row sees anything, and there is no last address to fill up with.
  if (item.begin < item.end && !attention_of_few<Mode>(p, item, next, sight, s)) {
    attention_of_many<Mode>(p, item, sight, s);
    for (int i = 0; i < item.rows; ++i) s.rows.weight[i] = v_hsum(v_load(s.rows.weights + i * W));
  }
  if (item.slot < 0) {
    for (int i = 0; i < item.rows; ++i)
      finish_row(p, sight, item.kv_head, item.row0 + i, s.rows.sum + i * stride, s.rows.max[i],
                 s.rows.weight[i]);
    return;
  }
  float* part = partials.slot(item.slot);
  for (int i = 0; i < item.rows; ++i, part += p.D + 2) {
    part[0] = s.rows.max[i];
    part[1] = s.rows.weight[i];
    memcpy(part + 2, s.rows.sum + i * stride, size_t(p.D) * 4);
  }
}

// Joins the parts of a split request in the order of its keys. `first` is its first item.
void merge(const PyrAttention& p, const AttentionItem& first, int64_t parts,
           const pyr::Partials& partials, void* memory) {
  const size_t size = partials.slot_floats;
  const Sight sight = sight_of(p, first.request);
  const float scale = p.soft_cap > 0 ? kLog2e : float(p.scale) * kLog2e;
  float* sum = (float*)memory;
  for (int i = 0; i < first.rows; ++i) {
    const float* part = partials.slot(first.slot) + size_t(i) * (p.D + 2);
    float max = -INFINITY, weight = 0;
    for (int64_t k = 0; k < parts; ++k) max = part[k * size] > max ? part[k * size] : max;
    memset(sum, 0, size_t(p.D) * 4);
    for (int64_t k = 0; k < parts; ++k) {
      if (part[k * size] == -INFINITY && part[k * size + 1] == 0) continue;  // it has seen no key
      const float factor = v_first(v_exp2(v_set((part[k * size] - max) * scale)));
      weight += part[k * size + 1] * factor;
      for (int d = 0; d < p.D; ++d) sum[d] += part[k * size + 2 + d] * factor;
    }
    finish_row(p, sight, first.kv_head, first.row0 + i, sum, max, weight);
  }
}

}  // namespace
