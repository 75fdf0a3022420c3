// SPDX-License-Identifier: Apache-2.0
// What each key is given by the queries of one (request, KV head): the softmax again, in two passes
// over K, without V. Kept apart from attention_kernel.h so that attention pays nothing for it.
#pragma once
#include "attention_common.h"

namespace {

constexpr int kMassRows = 32;  // rows (query * heads + head) that share a pass over the keys

struct MassScratch {
  float *queries, *keys, *scores, *max, *sum;
};

template <class Mode>
PYR_INLINE MassScratch carve_mass(const PyrAttention& p, void* memory) {
  Carver carver{(char*)memory};
  MassScratch s;
  s.queries = carver.floats(kMassRows * (p.D / Mode::Step));
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.scores = carver.floats(kMassRows * KB);
  s.max = carver.floats(kMassRows);
  s.sum = carver.floats(kMassRows);
  return s;
}

template <class Mode>
size_t key_mass_scratch(const PyrAttention& p) {
  return carved(kMassRows * (p.D / Mode::Step)) + carved(p.D / Mode::Step * KB) +
         carved(kMassRows * KB) + 2 * carved(kMassRows);
}

// Calls use(first key, keys, vectors) for each tile of the item's keys, with s.scores [rows][KB] in
// base 2: scaled, capped, and -inf where a row does not see the key.
template <class Mode, class Use>
PYR_INLINE void each_mass_tile(const PyrAttention& p, const AttentionItem& item, const Sight& sight,
                               const MassScratch& s, Use use) {
  using T = typename Mode::Element;
  const int D = int(p.D), units = D / Mode::Step, step = group_rows(item.rows);
  TileRows<T> tile;
  for (int begin = item.begin; begin < item.end; begin += KB) {
    const int keys = item.end - begin < KB ? item.end - begin : KB, vectors = (keys + W - 1) / W;
    tile_rows(p, item, begin, &tile);
    pack_keys<Mode>(s.keys, tile.key, keys, D, nullptr);
    for (int r = 0; r < item.rows; r += step)
      product<Mode, false>(item.rows - r < step ? item.rows - r : step, s.scores + r * KB, KB,
                           s.queries + r * units, units, s.keys, KB, units, vectors, nullptr);
    for (int r = 0; r < item.rows; ++r) {
      float* row = s.scores + r * KB;
      const int lo = sight.lo(item.row0 + r) - begin;
      int hi = sight.hi(item.row0 + r) - begin;
      if (hi >= keys) hi = keys - 1;
      for (int i = 0; i < vectors; ++i) {
        V x = v_mul(v_load(row + i * W), v_set(float(p.scale)));
        if (p.soft_cap > 0) x = v_soft_cap(x, float(p.soft_cap));
        v_store(row + i * W, v_mask_outside(v_mul(x, v_set(kLog2e)), i * W, lo, hi));
      }
    }
    use(begin, keys, vectors);
  }
}

// Each row's maximum and sum over its keys and, where there is one, its sink.
template <class Mode>
PYR_INLINE void mass_statistics(const PyrAttention& p, const AttentionItem& item,
                                const Sight& sight, const MassScratch& s) {
  for (int r = 0; r < item.rows; ++r) {
    s.max[r] = -INFINITY;
    s.sum[r] = 0;
  }
  each_mass_tile<Mode>(p, item, sight, s, [&](int, int, int vectors) {
    for (int r = 0; r < item.rows; ++r) {
      const float* row = s.scores + r * KB;
      V top = v_load(row);
      for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(row + i * W));
      const float before = s.max[r], tile_max = v_hmax(top);
      if (tile_max == -INFINITY) continue;
      const float after = tile_max > before ? tile_max : before;
      V total = v_zero();
      for (int i = 0; i < vectors; ++i)
        total = v_add(total, v_exp2(v_sub(v_load(row + i * W), v_set(after))));
      const float kept = after == before ? 1.0f : v_first(v_exp2(v_set(before - after)));
      s.sum[r] = s.sum[r] * kept + v_hsum(total);
      s.max[r] = after;
    }
  });
  if (!p.sinks) return;
  for (int r = 0; r < item.rows; ++r) {
    if (s.max[r] == -INFINITY) continue;  // sees no key: there is nothing to share out
    const int64_t head = int64_t(item.kv_head) * sight.heads + (item.row0 + r) % sight.heads;
    const float sink = load_scalar(p.sinks, head, p.sinks_dtype) * kLog2e;
    const float after = sink > s.max[r] ? sink : s.max[r];
    s.sum[r] = s.sum[r] * v_first(v_exp2(v_set(s.max[r] - after))) +
               v_first(v_exp2(v_set(sink - after)));
    s.max[r] = after;
  }
}

// Where the mass of the keys first .. first + keys - 1 (local) stands; null below `lo`, where blocks
// may be somebody else's.
PYR_INLINE void mass_targets(const PyrKeyMass& m, const AttentionItem& item, int64_t skip, int first,
                             int keys, int lo, float** out) {
  const PyrAttention& p = m.attention;
  const int32_t* table = p.table + item.request * p.table_r;
  for (int i = 0; i < keys; ++i) {
    const int64_t position = skip + first + i;
    out[i] = first + i < lo ? nullptr
                            : m.mass + table[position / p.N] * m.mass_p + item.kv_head * m.mass_g +
                                  position % p.N;
  }
}

// Rows are added to what is there one after the other, so that the sums do not depend on how a
// prompt is cut into chunks.
template <class Mode>
void key_mass(const PyrKeyMass& m, int32_t request, int32_t kv_head, void* memory) {
  const PyrAttention& p = m.attention;
  const MassScratch s = carve_mass<Mode>(p, memory);
  const Sight sight = sight_of(p, request);
  const int D = int(p.D), units = D / Mode::Step, rows = sight.queries * sight.heads;
  int64_t ignored = 0;
  if (m.first_queries) ignored = m.first_queries[request] - (sight.skip + sight.hi(0));
  if (ignored >= sight.queries) return;
  for (int row0 = ignored > 0 ? int(ignored) * sight.heads : 0; row0 < rows; row0 += kMassRows) {
    const int count = rows - row0 < kMassRows ? rows - row0 : kMassRows;
    const int lo = sight.lo(row0), begin = lo > 0 ? lo / KB * KB : 0;
    const AttentionItem item{request, kv_head, row0, count,
                             begin,   sight.hi(row0 + count - 1) + 1, -1, -1};
    for (int r = 0; r < count; ++r) {
      const int64_t head = int64_t(kv_head) * sight.heads + (row0 + r) % sight.heads;
      pack_query<Mode>(s.queries + r * units, p.query,
                       (sight.query0 + (row0 + r) / sight.heads) * p.query_t + head * p.query_h,
                       p.query_dtype, D);
    }
    mass_statistics<Mode>(p, item, sight, s);
    each_mass_tile<Mode>(p, item, sight, s, [&](int first, int keys, int vectors) {
      float* targets[KB];
      mass_targets(m, item, sight.skip, first, keys, lo, targets);
      for (int i = 0; i < vectors; ++i) {
        float lanes[W];
        for (int j = 0; j < W; ++j) {
          const bool there = i * W + j < keys && targets[i * W + j];
          lanes[j] = there ? *targets[i * W + j] : 0.0f;
        }
        V total = v_load(lanes);
        for (int r = 0; r < count; ++r) {
          if (s.max[r] == -INFINITY) continue;
          const float* row = s.scores + r * KB + i * W;
          const V weight = v_exp2(v_sub(v_load(row), v_set(s.max[r])));
          if (m.kind == PYR_MASS_SUM) {
            total = v_fma(weight, v_set(1.0f / s.sum[r]), total);
            continue;
          }
          const int from = sight.lo(row0 + r), visible = sight.hi(row0 + r) - (from > 0 ? from : 0);
          const float average = s.sum[r] / float(visible + 1);
          float weights[W];
          v_store(weights, weight);
          for (int j = 0; j < W; ++j)
            lanes[j] += row[j] > -INFINITY && weights[j] < average ? 1.0f : 0.0f;
        }
        if (m.kind == PYR_MASS_SUM) v_store(lanes, total);
        for (int j = 0; j < W && i * W + j < keys; ++j)
          if (targets[i * W + j]) *targets[i * W + j] = lanes[j];
      }
    });
  }
}

}  // namespace
