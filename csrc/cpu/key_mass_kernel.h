// SPDX-License-Identifier: Apache-2.0
// The attention that the queries of one (request, KV head) give each key: the softmax again, without
// V, in one pass over K if attention has written each row's log-sum-exp, otherwise in two. This file
// is separate from attention_kernel.h so that attention pays nothing for it.
#pragma once
#include "attention_direct.h"

namespace {

// A weight counts as below the average if it is below this share of it, as in reference_mass.py.
constexpr float kBelow = 1 - 1e-5f;
constexpr int kMassRows = 32;  // rows (query * heads + head) that share a pass over the keys
constexpr int kMassKeys = kDirectMost;  // capacity of a row of scores; packed tiles use KB of it

struct MassScratch {
  float *queries, *keys, *scores, *max, *sum;
};

template <class Mode>
PYR_INLINE MassScratch carve_mass(const PyrAttention& p, void* memory) {
  Carver carver{(char*)memory};
  MassScratch s;
  s.queries = carver.floats(kMassRows * (p.D / Mode::Step));
  s.keys = carver.floats(p.D / Mode::Step * KB);
  s.scores = carver.floats(kMassRows * kMassKeys);
  s.max = carver.floats(kMassRows);
  s.sum = carver.floats(kMassRows);
  return s;
}

template <class Mode>
size_t key_mass_scratch(const PyrAttention& p) {
  return carved(kMassRows * (p.D / Mode::Step)) + carved(p.D / Mode::Step * KB) +
         carved(kMassRows * kMassKeys) + 2 * carved(kMassRows);
}

// Whether K is used in place: for one query with as many rows as the registers hold. The number
// of queries decides, not only that of rows: chunks of a prompt with more than one query then give
// the same bits whatever their size.
template <class Mode>
PYR_INLINE bool mass_direct(const PyrAttention& p, const AttentionItem& item, const Sight& sight) {
  return sight.queries == 1 && item.rows <= kRowsAtOnce && p.D % (Mode::Step * W) == 0;
}

// Instantiates direct_scores once for each number of rows, not once for each caller.
template <class Mode, int R>
void mass_scores_of(float* scores, const float* queries, int units,
                    const typename Mode::Element* const* keys, int vectors,
                    const typename Mode::Element* const* next) {
  direct_scores<Mode, R>(scores, queries, units, keys, vectors, next);
}

// As above, for 1 .. kRowsAtOnce rows.
template <class Mode>
PYR_INLINE void mass_scores(int rows, float* scores, const float* queries, int units,
                            const typename Mode::Element* const* keys, int vectors,
                            const typename Mode::Element* const* next) {
  switch (rows) {
#define PYR_MASS(R)                                                         \
  case R:                                                                   \
    if constexpr (R <= kRowsAtOnce)                                         \
      mass_scores_of<Mode, R>(scores, queries, units, keys, vectors, next); \
    break;
    PYR_MASS(1)
    PYR_MASS(2)
    PYR_MASS(3)
    PYR_MASS(4)
    PYR_MASS(5)
    PYR_MASS(6)
    PYR_MASS(7)
    PYR_MASS(8)
#undef PYR_MASS
  }
}

// Packs the item's rows for each_mass_tile.
template <class Mode>
PYR_INLINE void pack_mass_queries(const PyrAttention& p, const AttentionItem& item,
                                  const Sight& sight, const MassScratch& s) {
  const int D = int(p.D), units = D / Mode::Step;
  const bool direct = mass_direct<Mode>(p, item, sight);
  float unit_row[kMaxHeadSize];
  for (int r = 0; r < item.rows; ++r) {
    const int row = item.row0 + r;
    const int64_t head = int64_t(item.kv_head) * sight.heads + row % sight.heads;
    pack_query<Mode>(direct ? unit_row : s.queries + r * units, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
    for (int u = 0; direct && u < units; u += 4)
      v_store(s.queries + (u / 4 * item.rows + r) * W, v_load_group(unit_row + u));
  }
}

// Calls use(first key, keys, vectors) for each tile of the item's keys, with s.scores
// [rows][kMassKeys] in base 2: scaled, capped, and -inf where a row does not see the key.
template <class Mode, class Use>
PYR_INLINE void each_mass_tile(const PyrAttention& p, const AttentionItem& item, const Sight& sight,
                               const MassScratch& s, Use use) {
  using T = typename Mode::Element;
  const int D = int(p.D), units = D / Mode::Step, step = group_rows(item.rows);
  const bool direct = mass_direct<Mode>(p, item, sight);
  const auto step_at = [&](int begin) {
    const int left = item.end - begin;
    return direct ? direct_step(left) : left < KB ? left : KB;
  };
  if (item.begin >= item.end) return;
  TileRows<T, kMassKeys> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0], step_at(item.begin));
  int turn = 0;
  for (int begin = item.begin, keys; begin < item.end; begin += keys, turn ^= 1) {
    keys = step_at(begin);
    const int vectors = (keys + W - 1) / W;
    const T* const* next = nullptr;
    if (begin + keys < item.end) {
      const int then = step_at(begin + keys), most = then > keys ? then : keys;
      tile_rows(p, item, begin + keys, &tiles[turn ^ 1], then, round_up(most, KB));
      next = tiles[turn ^ 1].key;
    }
    if (direct) {
      mass_scores<Mode>(item.rows, s.scores, s.queries, units, tiles[turn].key, vectors, next);
    } else {
      pack_keys<Mode>(s.keys, tiles[turn].key, keys, D, next);
      for (int r = 0; r < item.rows; r += step)
        product<Mode, false>(item.rows - r < step ? item.rows - r : step,
                             s.scores + r * kMassKeys, kMassKeys, s.queries + r * units, units,
                             s.keys, KB, units, vectors, nullptr);
    }
    for (int r = 0; r < item.rows; ++r) {
      float* row = s.scores + r * kMassKeys;
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

// Finds each row's maximum and sum over its keys and its sink, if there is one. A given log-sum-exp
// is the maximum, and the sum is 1.
template <class Mode>
PYR_INLINE void mass_statistics(const PyrAttention& p, const AttentionItem& item,
                                const Sight& sight, const MassScratch& s) {
  for (int r = 0; r < item.rows; ++r) {
    s.max[r] = -INFINITY;
    s.sum[r] = 0;
  }
  const auto of_tile = [&](int, int, int vectors) {
    for (int r = 0; r < item.rows; ++r) {
      const float* row = s.scores + r * kMassKeys;
      V top = v_load(row);
      for (int i = 1; i < vectors; ++i) top = v_max(top, v_load(row + i * W));
      const float before = s.max[r], tile_max = v_hmax(top);
      const float after = tile_max > before ? tile_max : before;
      const V shift = v_set(reference_of(after));
      V total = v_zero();
      for (int i = 0; i < vectors; ++i)
        total = v_add(total, v_exp2(v_sub(v_load(row + i * W), shift)));
      const float kept = after == before ? 1.0f : v_first(v_exp2(v_set(before - after)));
      s.sum[r] = s.sum[r] * kept + v_hsum(total);
      s.max[r] = after;
    }
  };
  if (p.log_sum_exp) {
    for (int r = 0; r < item.rows; ++r) {
      const int64_t token = sight.query0 + (item.row0 + r) / sight.heads;
      const int64_t head = int64_t(item.kv_head) * sight.heads + (item.row0 + r) % sight.heads;
      s.max[r] = p.log_sum_exp[token * p.H + head] * kLog2e;
      s.sum[r] = 1;
    }
  } else {
    each_mass_tile<Mode>(p, item, sight, s, of_tile);
  }
  for (int r = 0; p.sinks && r < item.rows; ++r) {
    const int64_t head = int64_t(item.kv_head) * sight.heads + (item.row0 + r) % sight.heads;
    add_sink(load_scalar(p.sinks, head, p.sinks_dtype), &s.max[r], &s.sum[r]);
  }
}

// A part of a tile whose mass is contiguous: that of the keys begin .. end - 1, from `at` on.
struct MassRun {
  float* at;
  int begin, end;
};

// Finds the runs of the keys first .. first + keys - 1 (local), without those below `lo`, whose blocks
// may belong to other requests. Returns the number of runs.
PYR_INLINE int mass_runs(const PyrKeyMass& m, const AttentionItem& item, int64_t skip, int first,
                         int keys, int lo, MassRun* runs) {
  const PyrAttention& p = m.attention;
  const int32_t* table = p.table + item.request * p.table_r;
  int count = 0, i = lo > first ? lo - first : 0;
  int64_t block = (skip + first + i) / p.N, row = (skip + first + i) % p.N;
  for (; i < keys; ++block, row = 0) {
    const int end = p.N - row < keys - i ? i + int(p.N - row) : keys;
    runs[count++] = {m.mass + table[block] * m.mass_p + item.kv_head * m.mass_g + row, i, end};
    i = end;
  }
  return count;
}

// Adds the rows to the mass one after the other: without a log-sum-exp the sums do not depend on how a
// prompt is cut into chunks of more than one query. (The bits of attention itself do.)
template <class Mode>
void key_mass(const PyrKeyMass& m, int32_t request, int32_t kv_head, void* memory) {
  const PyrAttention& p = m.attention;
  const MassScratch s = carve_mass<Mode>(p, memory);
  const Sight sight = sight_of(p, request);
  const int rows = sight.queries * sight.heads;
  int64_t ignored = 0;
  if (m.first_queries) ignored = m.first_queries[request] - (sight.skip + sight.hi(0));
  if (ignored >= sight.queries) return;
  for (int row0 = ignored > 0 ? int(ignored) * sight.heads : 0; row0 < rows; row0 += kMassRows) {
    const int count = rows - row0 < kMassRows ? rows - row0 : kMassRows;
    const int lo = sight.lo(row0), begin = lo > 0 ? lo / KB * KB : 0;
    const AttentionItem item{request, kv_head, row0, count,
                             begin,   sight.hi(row0 + count - 1) + 1, -1, -1};
    pack_mass_queries<Mode>(p, item, sight, s);
    mass_statistics<Mode>(p, item, sight, s);
    each_mass_tile<Mode>(p, item, sight, s, [&](int first, int keys, int vectors) {
      MassRun runs[kMassKeys];
      const int num_runs = mass_runs(m, item, sight.skip, first, keys, lo, runs);
      alignas(64) float held[kMassKeys] = {};
      for (int i = 0; i < num_runs; ++i)
        memcpy(held + runs[i].begin, runs[i].at, size_t(runs[i].end - runs[i].begin) * 4);
      for (int i = 0; i < vectors * W; i += W) {
        V total = v_load(held + i);
        for (int r = 0; r < count; ++r) {
          // It sees no key. (A row all of whose scores are NaN has a sum that is NaN.)
          if (s.max[r] == -INFINITY && s.sum[r] == s.sum[r]) continue;
          const V score = v_load(s.scores + r * kMassKeys + i);
          const V weight = v_exp2(v_sub(score, v_set(s.max[r])));
          if (m.kind == PYR_MASS_SUM) {
            total = v_fma(weight, v_set(1.0f / s.sum[r]), total);
          } else {
            const int from = sight.lo(row0 + r);
            const int visible = sight.hi(row0 + r) - (from > 0 ? from : 0) + 1;
            total = v_add(total, v_one_below(weight, v_set(kBelow * s.sum[r] / float(visible)), score));
          }
        }
        v_store(held + i, total);
      }
      for (int i = 0; i < num_runs; ++i)
        memcpy(runs[i].at, held + runs[i].begin, size_t(runs[i].end - runs[i].begin) * 4);
    });
  }
}

}  // namespace
