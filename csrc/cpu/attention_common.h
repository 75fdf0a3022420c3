// SPDX-License-Identifier: Apache-2.0
// Parts that all paths of attention share: positions, addresses, scratch memory, running softmax.
#pragma once
#include "tile.h"

namespace {

using pyr::AttentionItem;

// Keys of a step of decoding: more than a tile, since each step waits once for its softmax.
constexpr int kDirectKeys = 2 * KB;
constexpr int kDirectMost = 3 * KB;  // keys of the last step, which takes a short rest along

PYR_INLINE int direct_step(int left) { return left <= kDirectMost ? left : kDirectKeys; }

// The positions of a request and its queries. Positions are local: they count from `skip`.
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
          p.table + item.request * p.table_r + item.kv_head * p.table_g,
          p.N,
          p.key_p,
          p.key_n,
          p.value_p,
          p.value_n};
}

// Finds the addresses of the keys begin .. begin + most - 1 of an item, up to its end, and repeats
// some to fill up to `fill`. Nothing is read below the window of the item's first row: those blocks
// may belong to other requests.
template <class T, int Keys>
PYR_INLINE void tile_rows(const PyrAttention& p, const AttentionItem& item, int begin,
                          TileRows<T, Keys>* out, int most = Keys, int fill = Keys) {
  const Sight sight = sight_of(p, item.request);
  const int from = sight.lo(item.row0) - begin, count = item.end - begin;
  walk_of<T>(p, item).tile(sight.skip + begin, from > 0 ? from : 0, count < most ? count : most,
                          out, fill);
}

// Finds the addresses of the decoding step after the one with `keys` keys from `begin` on, possibly
// the first of the item `then`; null if there is none. There are as many as that step uses and this
// one fetches ahead.
template <class T>
PYR_INLINE const TileRows<T, kDirectMost>* rows_after(const PyrAttention& p,
                                                      const AttentionItem& item,
                                                      const AttentionItem* then, int begin,
                                                      int keys, TileRows<T, kDirectMost>* out) {
  const AttentionItem* other = begin + keys < item.end ? &item : then;
  const int from = other == &item ? begin + keys : other ? other->begin : 0;
  if (!other || from >= other->end) return nullptr;
  const int step = direct_step(other->end - from), most = step > keys ? step : keys;
  tile_rows(p, *other, from, out, step, round_up(most, KB));
  return out;
}

// The state of a tile of rows while it runs over the keys.
struct RowState {
  float* sum;      // [rows][padded D], unnormalised
  float* max;      // [rows], of the scores as they come out of the product
  float* weight;   // [rows]
  float* weights;  // [rows][W], the lanes of `weight` while the row runs
};

struct AttentionScratch {
  float *queries, *keys, *values, *scores, *probabilities;
  RowState rows;
};

// Decoding holds W / 4 copies of its few rows.
PYR_INLINE int64_t query_floats(const PyrAttention& p, int64_t rows, int step) {
  const int64_t tile = rows * (p.D / step), direct = 8 * (p.D / step) * (W / 4);
  return tile > direct ? tile : direct;
}

// Scores of the rows that are processed together: those of a tile of keys or of a decoding step,
// which on AMX takes whole vectors and whole groups of keys.
template <class Mode>
constexpr int kScores = Mode::kPadRows > 1                  ? W * (kDirectMost + 2 * W)
                        : Mode::kTogether * KB > 8 * kDirectMost ? Mode::kTogether * KB
                                                                 : 8 * kDirectMost;

template <class Mode>
PYR_INLINE AttentionScratch carve(const PyrAttention& p, int64_t rows, void* memory) {
  Carver carver{(char*)memory};
  AttentionScratch s;
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.values = carver.floats(Mode::kValueKeys / Mode::Step * padded(int(p.D)));
  const int64_t in_tiles = round_up(int(rows), Mode::kPadRows);
  s.scores = carver.floats(kScores<Mode>);
  s.probabilities = carver.floats(kScores<Mode>);
  s.queries = carver.floats(query_floats(p, in_tiles, Mode::Step));
  s.rows.sum = carver.floats(in_tiles * padded(int(p.D)));
  s.rows.max = carver.floats(rows);
  s.rows.weight = carver.floats(rows);
  s.rows.weights = carver.floats(rows * W);
  return s;
}

template <class Mode>
size_t attention_scratch(const PyrAttention& p, int64_t rows) {
  const int64_t in_tiles = round_up(int(rows), Mode::kPadRows);
  return carved(p.D / Mode::Step * KB) + carved(Mode::kValueKeys / Mode::Step * padded(int(p.D))) +
         2 * carved(kScores<Mode>) + carved(query_floats(p, in_tiles, Mode::Step)) +
         carved(in_tiles * padded(int(p.D))) + 2 * carved(rows) + carved(rows * W);
}

// How far, as a power of two, scores may exceed what is subtracted from them before that is set to
// their maximum: probabilities stay below 2^8, sums of them far below the largest float, and most
// tiles leave the sums so far as they are (FlashAttention-4).
constexpr float kSlack = 8.0f;

// Takes one row's softmax step over a tile: scores become probabilities relative to `max`, which
// follows their maximum if that exceeds it by kSlack, and their sum goes to the lanes of `weight`,
// which are added up when the row is done. Returns the factor for earlier sums.
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
  const float before = *max, slack = factor > 1e-30f ? kSlack / factor : 0.0f;
  const float after = v_any_above(top, before + slack) ? v_hmax(top) : before;
  // No key was visible so far: any finite reference gives probabilities of zero.
  const float shift = after == -INFINITY ? 0.0f : -after * factor;
  const V scale = v_set(factor), offset = v_set(shift);
  V total = v_load(weight);
  float correction = 1.0f;
  if (after != before) {
    correction = v_first(v_exp2(v_set((before - after) * factor)));
    total = v_mul(total, v_set(correction));
    *max = after;
  }
  int i = 0;
  for (; Mode::kPairs && i + 2 <= vectors; i += 2) {
    const V a = Mode::exp2(v_fma(v_load(scores + i * W), scale, offset));
    const V b = Mode::exp2(v_fma(v_load(scores + i * W + W), scale, offset));
    total = v_add(total, v_add(a, b));
    Mode::store_probabilities(probabilities, i * W, a, b);
  }
  for (; i < vectors; ++i) {
    const V a = Mode::exp2(v_fma(v_load(scores + i * W), scale, offset));
    total = v_add(total, a);
    Mode::store_probabilities(probabilities, i * W, a, v_zero());
  }
  v_store(weight, total);
  return correction;
}

}  // namespace
