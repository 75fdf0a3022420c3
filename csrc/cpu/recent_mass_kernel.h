// SPDX-License-Identifier: Apache-2.0
// The attention that the recent queries of a request give the keys of its context: first the rows of
// the softmax, then its columns, so that every number has one writer and only the columns of the
// context are computed twice.
#pragma once
#include "tile.h"

namespace {

using pyr::RecentItem;

constexpr int kRecentRows = 96;  // rows that share a packed tile of keys

// Row = recent query * heads + head. Positions are local: counted from `skip`.
struct RecentView {
  int heads, recent;
  int64_t query0, skip;
  int visible;  // keys of the last query
  int first;    // of the context

  PYR_INLINE int hi(int row) const { return visible - recent + row / heads; }
};

PYR_INLINE RecentView recent_view(const PyrRecentMass& p, int request) {
  RecentView view;
  view.heads = int(p.H / p.G);
  view.recent = p.recents[request];
  view.query0 = int64_t(p.query_ends[request]) - view.recent;
  view.skip = p.skips[request];
  view.visible = p.seq_lens[request] - p.skips[request];
  view.first = view.visible - view.recent - p.contexts[request];
  return view;
}

struct RecentScratch {
  float *queries, *keys, *scores, *total;
};

template <class Mode>
PYR_INLINE RecentScratch carve_recent(const PyrRecentMass& p, void* memory) {
  Carver carver{(char*)memory};
  RecentScratch s;
  s.queries = carver.floats(kRecentRows * (p.D / Mode::Step));
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.scores = carver.floats(kRecentRows * KB);
  s.total = carver.floats(KB);
  return s;
}

template <class Mode>
size_t recent_scratch(const PyrRecentMass& p) {
  return carved(kRecentRows * (p.D / Mode::Step)) + carved(p.D / Mode::Step * KB) +
         carved(kRecentRows * KB) + carved(KB);
}

template <class Mode>
PYR_INLINE void pack_recent(const PyrRecentMass& p, const RecentView& view, int kv_head, int row0,
                            int rows, float* out) {
  const int units = int(p.D) / Mode::Step;
  for (int r = 0; r < rows; ++r) {
    const int row = row0 + r;
    const int64_t head = int64_t(kv_head) * view.heads + row % view.heads;
    pack_query<Mode>(out + r * units, p.query,
                     (view.query0 + row / view.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, int(p.D));
  }
}

// The addresses of the keys begin .. begin + KB - 1, of which `keys` are the request's.
template <class T>
PYR_INLINE void recent_tile(const PyrRecentMass& p, const RecentView& view, const RecentItem& item,
                            int begin, int keys, TileRows<T>* tile) {
  const T* key = (const T*)p.key + item.kv_head * p.key_g;
  const CacheWalk<T> walk{key,     key,     p.table + item.request * p.table_r, p.N, p.key_p,
                          p.key_n, p.key_p, p.key_n};
  walk.tile(view.skip + begin, 0, keys, tile);
}

// s.scores [rows][KB], in base 2: scaled and capped, not masked.
template <class Mode>
PYR_INLINE void recent_scores(const PyrRecentMass& p, const RecentScratch& s, int rows,
                              int vectors) {
  const int units = int(p.D) / Mode::Step, step = group_rows(rows);
  for (int r = 0; r < rows; r += step)
    product<Mode, false>(rows - r < step ? rows - r : step, s.scores + r * KB, KB,
                         s.queries + r * units, units, s.keys, KB, units, vectors, nullptr);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < vectors; ++i) {
      float* at = s.scores + r * KB + i * W;
      V x = v_mul(v_load(at), v_set(float(p.scale)));
      if (p.soft_cap > 0) x = v_soft_cap(x, float(p.soft_cap));
      v_store(at, v_mul(x, v_set(kLog2e)));
    }
}

// Finds the statistics of the rows item.begin .. item.end - 1, at most kRecentRows, over all keys that
// they see; a known log-sum-exp gives them without reading K.
template <class Mode>
void recent_rows(const PyrRecentMass& p, const RecentItem& item, float* stats, void* memory) {
  using T = typename Mode::Element;
  const RecentScratch s = carve_recent<Mode>(p, memory);
  const RecentView view = recent_view(p, item.request);
  const int rows = item.end - item.begin;
  float* const max = stats + item.begin;
  float* const factor = stats + view.recent * view.heads + item.begin;
  for (int r = 0; r < rows; ++r) {
    max[r] = -INFINITY;
    factor[r] = 0;
  }
  int end = 0;
  if (p.log_sum_exp) {
    const int64_t token0 = p.query_ends[item.request] - view.recent;
    for (int r = 0; r < rows; ++r) {
      const int row = item.begin + r;
      const int64_t head = int64_t(item.kv_head) * view.heads + row % view.heads;
      max[r] = p.log_sum_exp[(token0 + row / view.heads) * p.H + head] * kLog2e;
      factor[r] = 1;
    }
  } else {
    pack_recent<Mode>(p, view, item.kv_head, item.begin, rows, s.queries);
    end = view.hi(item.end - 1) + 1;
  }
  for (int begin = 0; begin < end; begin += KB) {
    const int keys = end - begin < KB ? end - begin : KB, vectors = (keys + W - 1) / W;
    TileRows<T> tile;
    recent_tile<T>(p, view, item, begin, keys, &tile);
    pack_keys<Mode>(s.keys, tile.key, keys, int(p.D), nullptr);
    recent_scores<Mode>(p, s, rows, vectors);
    for (int r = 0; r < rows; ++r) {
      float* row = s.scores + r * KB;
      const int hi = view.hi(item.begin + r) - begin;  // a row sees the first key at least
      if (hi < vectors * W - 1)
        for (int i = 0; i < vectors; ++i)
          v_store(row + i * W, v_mask_outside(v_load(row + i * W), i * W, 0, hi));
      V top = v_load(row);
      for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(row + i * W));
      const float before = max[r], tile_max = v_hmax(top);
      const float after = tile_max > before ? tile_max : before;
      const V shift = v_set(reference_of(after));
      V total = v_zero();
      for (int i = 0; i < vectors; ++i)
        total = v_add(total, v_exp2(v_sub(v_load(row + i * W), shift)));
      const float kept = after == before ? 1.0f : v_first(v_exp2(v_set(before - after)));
      factor[r] = factor[r] * kept + v_hsum(total);
      max[r] = after;
    }
  }
  for (int r = 0; p.sinks && r < rows; ++r) {
    const int64_t head = int64_t(item.kv_head) * view.heads + (item.begin + r) % view.heads;
    add_sink(load_scalar(p.sinks, head, p.sinks_dtype), &max[r], &factor[r]);
  }
  const double steps = view.recent > 1 ? double(view.recent - 1) : 1.0;
  const double rise = (p.distance_weight - 1) / steps;
  const double sum = view.recent + rise * view.recent * double(view.recent - 1) / 2;
  for (int r = 0; r < rows; ++r) {
    const int query = (item.begin + r) / view.heads;
    factor[r] = float((1 + rise * query) / sum / factor[r]);
  }
}

// Sums the keys item.begin .. item.end - 1 of the context, which all rows see.
template <class Mode>
void recent_keys(const PyrRecentMass& p, const RecentItem& item, const float* stats,
                 void* memory) {
  using T = typename Mode::Element;
  const RecentScratch s = carve_recent<Mode>(p, memory);
  const RecentView view = recent_view(p, item.request);
  const int all = view.recent * view.heads;
  const float *max = stats, *factor = stats + all;
  float* const out = p.out + (int64_t(item.request) * p.G + item.kv_head) * p.out_len - view.first;
  for (int begin = item.begin; begin < item.end; begin += KB) {
    const int keys = item.end - begin < KB ? item.end - begin : KB, vectors = (keys + W - 1) / W;
    TileRows<T> tile;
    recent_tile<T>(p, view, item, begin, keys, &tile);
    pack_keys<Mode>(s.keys, tile.key, keys, int(p.D), nullptr);
    memset(s.total, 0, KB * sizeof(float));
    for (int row0 = 0; row0 < all; row0 += kRecentRows) {
      const int rows = all - row0 < kRecentRows ? all - row0 : kRecentRows;
      pack_recent<Mode>(p, view, item.kv_head, row0, rows, s.queries);
      recent_scores<Mode>(p, s, rows, vectors);
      for (int i = 0; i < vectors; ++i) {
        V total = v_load(s.total + i * W);
        for (int r = 0; r < rows; ++r) {
          const V x = v_sub(v_load(s.scores + r * KB + i * W), v_set(max[row0 + r]));
          total = v_fma(v_exp2(x), v_set(factor[row0 + r]), total);
        }
        v_store(s.total + i * W, total);
      }
    }
    for (int j = 0; j < keys; ++j) out[begin + j] = s.total[j];
  }
}

}  // namespace
