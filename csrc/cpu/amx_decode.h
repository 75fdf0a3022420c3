// SPDX-License-Identifier: Apache-2.0
// Attention of a few rows (decoding) with AMX: sixteen keys of a page are a left tile in place.
//
// Scores come out transposed: one vector for each key, whose lanes are the rows of queries. Maxima and
// sums of a softmax therefore need no step across lanes. Probabilities are transposed back before they
// are multiplied with the values, which are interleaved as for prompts.
#pragma once
#include "amx.h"

namespace {

// A key costs the same whatever their number; with fewer rows attention_direct.h is as fast or faster.
constexpr int kFewestLanes = 5;

// scores[i][W] of the keys at positions first + i, for i from .. end - 1; `first` is a multiple of 16,
// pages hold whole groups of 16 keys. Meanwhile the rows next[i - lead] are fetched.
template <class Tiles>
PYR_INLINE void transposed_scores(float* scores, const float* queries, int D,
                                  const CacheWalk<bf16_t>& walk, int64_t first, int from, int end,
                                  const bf16_t* const* next, int lead) {
  auto group = [&](int i) {
    const int64_t position = first + i;
    return (const float*)(walk.key + walk.row[position / walk.N] * walk.key_p +
                          position % walk.N * walk.key_n);
  };
  const int64_t stride = walk.key_n / 2;
  for (int i = from & ~(kTileRows - 1); i < end; i += 2 * kTileRows) {
    const bool two = i + kTileRows < end;
    const float *left = group(i), *right = two ? group(i + kTileRows) : left;
    if (next)
      for (int j = i > lead ? i : lead; j < i + 2 * kTileRows && j < end; ++j)
        prefetch_row(next[j - lead], D * sizeof(bf16_t));
    Tiles::template zero<0>();
    Tiles::template zero<2>();
    for (int d = 0; d < D / 2; d += 16) {
      Tiles::template load<4>(left + d, stride);
      Tiles::template load<5>(right + d, stride);
      Tiles::template load<6>(queries + d * W, W);
      Tiles::template multiply_add<0, 0>();
      Tiles::template multiply_add<1, 0>();
    }
    Tiles::template store<0>(scores + i * W, W);
    if (two) Tiles::template store<2>(scores + (i + kTileRows) * W, W);
  }
}

// Joins the probabilities of two neighbouring keys to one vector of pairs.
PYR_INLINE V pairs_of(V a, V b) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
}

// Attends for an item if its pages hold whole groups of 16 keys and its rows fill enough lanes;
// returns whether it did.
template <class Mode>
PYR_INLINE bool decode_with_tiles(const PyrAttention& p, const AttentionItem& item,
                                  const AttentionItem* then, const Sight& sight,
                                  const AttentionScratch& s) {
  using T = typename Mode::Element;
  using Tiles = typename Mode::Tiles;
  const int D = int(p.D), stride = padded(D), R = item.rows;
  if (R < kFewestLanes || R > W || D % 32 || p.N % kTileRows || p.key_n % 2) return false;
  memset(s.queries, 0, size_t(D) / 2 * W * 4);
  alignas(64) float unit_row[kMaxHeadSize / 2];
  alignas(64) int32_t lows[W], highs[W];
  for (int r = 0; r < W; ++r) {
    const int row = item.row0 + (r < R ? r : R - 1);
    lows[r] = sight.lo(row);
    highs[r] = sight.hi(row);
    if (r >= R) continue;
    const int64_t head = item.kv_head * sight.heads + row % sight.heads;
    pack_query<Mode>(unit_row, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
    for (int u = 0; u < D / 2; ++u) s.queries[u * W + r] = unit_row[u];
  }
  const __m512i low = _mm512_load_si512(lows), high = _mm512_load_si512(highs);
  const CacheWalk<T> walk = walk_of<T>(p, item);
  const float factor = (p.soft_cap > 0 ? 1.0f : float(p.scale)) * kLog2e;
  const V scale = v_set(factor);
  V most = v_set(-INFINITY), weight = v_zero();

  TileRows<T, kDirectMost> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0], direct_step(item.end - item.begin));
  int turn = 0;
  Tiles::begin();
  for (int begin = item.begin, keys; begin < item.end; begin += keys, turn ^= 1) {
    keys = direct_step(item.end - begin);
    const TileRows<T, kDirectMost>& tile = tiles[turn];
    const TileRows<T, kDirectMost>* next =
        rows_after(p, item, then, begin, keys, &tiles[turn ^ 1]);
    // The keys begin `lead` behind the first position of a group; those below the first row's window
    // may belong to other requests.
    const int lead = int((sight.skip + begin) % kTileRows);
    const int unseen = lows[0] - begin > 0 ? lows[0] - begin : 0;
    Tiles::publish();
    transposed_scores<Tiles>(s.scores, s.queries, D, walk, sight.skip + begin - lead,
                             lead + unseen, lead + keys, next ? next->key : nullptr, lead);
    pack_values<Mode>(s.values, tile.value, keys, D, next ? next->value : nullptr);
    const int packed = round_up(keys, W) / 2, whole = round_up(keys, 32) / 2;
    memset(s.values + packed * stride, 0, size_t(whole - packed) * stride * 4);

    float* scores = s.scores + lead * W;
    if (p.soft_cap > 0)
      for (int i = unseen; i < keys; ++i)
        v_store(scores + i * W, v_soft_cap(v_mul(v_load(scores + i * W), v_set(float(p.scale))),
                                           float(p.soft_cap)));
    if (lows[W - 1] > begin || highs[0] < begin + keys - 1)
      for (int i = 0; i < keys; ++i) {
        const __m512i key = _mm512_set1_epi32(begin + i);
        const __mmask16 in =
            _mm512_cmple_epi32_mask(low, key) & _mm512_cmpge_epi32_mask(high, key);
        v_store(scores + i * W,
                _mm512_mask_blend_ps(in, v_set(-INFINITY), v_load(scores + i * W)));
      }
    V tops[4] = {most, most, most, most};
    int i = 0;
    for (; i + 4 <= keys; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) tops[j] = v_max(tops[j], v_load(scores + (i + j) * W));
    for (; i < keys; ++i) tops[0] = v_max(tops[0], v_load(scores + i * W));
    const V after = v_max(v_max(tops[0], tops[1]), v_max(tops[2], tops[3]));
    // No key was visible so far: any finite reference gives probabilities of zero.
    const V finite = v_max(after, v_set(kLowest)), shift = v_mul(finite, v_set(-factor));
    const V correction = v_exp2(v_mul(v_sub(most, finite), scale));
    for (unsigned changed = _mm512_cmp_ps_mask(most, after, _CMP_NEQ_UQ) & ((1u << R) - 1); changed;
         changed &= changed - 1) {
      const int r = __builtin_ctz(changed);
      const V by = _mm512_permutexvar_ps(_mm512_set1_epi32(r), correction);
      float* sum = s.rows.sum + r * stride;
      for (int d = 0; d < stride; d += W) v_store(sum + d, v_mul(v_load(sum + d), by));
    }
    most = after;

    V totals[2] = {v_mul(weight, correction), v_zero()};
    for (i = 0; i < keys; i += 2 * kTileRows) {
      V x[kTileRows];
#pragma GCC unroll 16
      for (int j = 0; j < kTileRows; ++j) {
        const int key = i + 2 * j;
        V a = v_zero(), b = v_zero();
        if (key < keys) a = Mode::exp2(v_fma(v_load(scores + key * W), scale, shift));
        if (key + 1 < keys) b = Mode::exp2(v_fma(v_load(scores + key * W + W), scale, shift));
        totals[0] = v_add(totals[0], a);
        totals[1] = v_add(totals[1], b);
        x[j] = pairs_of(a, b);
      }
      v_transpose(x);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r)
        v_store(s.probabilities + r * (kDirectMost / 2) + i / 2, x[r]);
    }
    weight = v_add(totals[0], totals[1]);
    tile_product<Tiles, true>(R, s.rows.sum, stride, s.probabilities, kDirectMost / 2, s.values,
                              stride, whole / kTileRows, stride / W);
  }
  Tiles::end();
  alignas(64) float lanes[2][W];
  v_store(lanes[0], most);
  v_store(lanes[1], weight);
  memcpy(s.rows.max, lanes[0], size_t(R) * 4);
  memcpy(s.rows.weight, lanes[1], size_t(R) * 4);
  return true;
}

}  // namespace
