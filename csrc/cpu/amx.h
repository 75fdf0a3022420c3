// SPDX-License-Identifier: Apache-2.0
// Attention of many rows with AMX: tiles of 16 rows of 64 bytes, multiplied as pairs of bfloat16.
//
// Operands have the layout in which tile.h packs them for VDPBF16PS, which TDPBF16PS takes too: 16
// units of a row of queries are a row of a left tile, 16 keys of a unit are a row of a right tile.
#pragma once
#include "attention_common.h"

namespace {

constexpr int kTileRows = 16;

// This unit is compiled with AMX and uses the tiles of the processor.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
struct HardwareTiles {
  // Every item of work configures the tiles and releases them: other libraries use them too.
  static PYR_INLINE void begin() {
    alignas(64) static constexpr struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } kConfig;
    _tile_loadconfig(&kConfig);
  }
  static PYR_INLINE void end() { _tile_release(); }
  // The compiler does not know that tile loads read memory, so stores must be complete before them.
  static PYR_INLINE void publish() { __asm__ volatile("" ::: "memory"); }

// Tile numbers are immediate operands of the instructions.
#define PYR_EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
  template <int T>
  static PYR_INLINE void zero() {
#define PYR_ZERO(N) if constexpr (T == N) _tile_zero(N);
    PYR_EACH_TILE(PYR_ZERO)
#undef PYR_ZERO
  }
  template <int T>
  static PYR_INLINE void load(const float* from, int64_t stride) {
#define PYR_LOAD(N) if constexpr (T == N) _tile_loadd(N, from, stride * 4);
    PYR_EACH_TILE(PYR_LOAD)
#undef PYR_LOAD
  }
  template <int T>
  static PYR_INLINE void store(float* to, int64_t stride) {
#define PYR_STORE(N) if constexpr (T == N) _tile_stored(N, to, stride * 4);
    PYR_EACH_TILE(PYR_STORE)
#undef PYR_STORE
  }
#undef PYR_EACH_TILE
  // Tile 2 * I + J += tile 4 + I * tile 6 + J.
  template <int I, int J>
  static PYR_INLINE void multiply_add() {
    if constexpr (I == 0 && J == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (I == 0 && J == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (I == 1 && J == 0) _tile_dpbf16ps(2, 5, 6);
    if constexpr (I == 1 && J == 1) _tile_dpbf16ps(3, 5, 7);
  }
};
#endif

// The tiles in plain C++, so that tests cover the code around them on processors without AMX.
struct EmulatedTiles {
  static PYR_INLINE float (*tiles())[kTileRows][16] {
    static thread_local float memory[8][kTileRows][16];
    return memory;
  }
  // Earlier contents of the tiles must not matter.
  static PYR_INLINE void begin() { memset(tiles(), 0xff, sizeof(float) * 8 * kTileRows * 16); }
  static PYR_INLINE void end() {}
  static PYR_INLINE void publish() {}
  template <int T>
  static PYR_INLINE void zero() {
    memset(tiles()[T], 0, sizeof(float) * kTileRows * 16);
  }
  template <int T>
  static PYR_INLINE void load(const float* from, int64_t stride) {
    for (int i = 0; i < kTileRows; ++i) memcpy(tiles()[T][i], from + i * stride, 64);
  }
  template <int T>
  static PYR_INLINE void store(float* to, int64_t stride) {
    for (int i = 0; i < kTileRows; ++i) memcpy(to + i * stride, tiles()[T][i], 64);
  }
  template <int I, int J>
  static PYR_INLINE void multiply_add() {
    auto& sum = tiles()[2 * I + J];
    const auto &left = tiles()[4 + I], &right = tiles()[6 + J];
    for (int m = 0; m < kTileRows; ++m)
      for (int k = 0; k < 16; ++k) {
        const uint32_t a = to_bits(left[m][k]);
        for (int n = 0; n < 16; ++n) {
          const uint32_t b = to_bits(right[k][n]);
          sum[m][n] += from_bits(a << 16) * from_bits(b << 16);
          sum[m][n] += from_bits(a & 0xffff0000u) * from_bits(b & 0xffff0000u);
        }
      }
  }
};

// c[rows][16 * vectors] (+)= a[rows][16 * depth units] * b[16 * depth][16 * vectors]. Rows come in
// whole tiles: rows behind the last one are computed from arbitrary memory and are not used.
template <class Tiles, bool Add, bool Two, bool Wide>
PYR_INLINE void tile_block(float* c, int64_t c_stride, const float* a, int64_t a_stride,
                           const float* b, int64_t b_stride, int depth) {
  float* below = c + kTileRows * c_stride;
  if (Add) {
    Tiles::template load<0>(c, c_stride);
    if (Wide) Tiles::template load<1>(c + W, c_stride);
    if (Two) Tiles::template load<2>(below, c_stride);
    if (Two && Wide) Tiles::template load<3>(below + W, c_stride);
  } else {
    Tiles::template zero<0>();
    if (Wide) Tiles::template zero<1>();
    if (Two) Tiles::template zero<2>();
    if (Two && Wide) Tiles::template zero<3>();
  }
  for (int k = 0; k < depth; ++k, a += 16, b += 16 * b_stride) {
    Tiles::template load<4>(a, a_stride);
    if (Two) Tiles::template load<5>(a + kTileRows * a_stride, a_stride);
    Tiles::template load<6>(b, b_stride);
    if (Wide) Tiles::template load<7>(b + W, b_stride);
    Tiles::template multiply_add<0, 0>();
    if (Wide) Tiles::template multiply_add<0, 1>();
    if (Two) Tiles::template multiply_add<1, 0>();
    if (Two && Wide) Tiles::template multiply_add<1, 1>();
  }
  Tiles::template store<0>(c, c_stride);
  if (Wide) Tiles::template store<1>(c + W, c_stride);
  if (Two) Tiles::template store<2>(below, c_stride);
  if (Two && Wide) Tiles::template store<3>(below + W, c_stride);
}

// As above, for one or two tiles of rows and any number of vectors.
template <class Tiles, bool Add>
PYR_INLINE void tile_product(int rows, float* c, int64_t c_stride, const float* a,
                             int64_t a_stride, const float* b, int64_t b_stride, int depth,
                             int vectors) {
  const bool two = rows > kTileRows;
  Tiles::publish();
  for (int n = 0; n < vectors; n += 2, c += 2 * W, b += 2 * W) {
    const bool wide = n + 1 < vectors;
    if (two && wide)
      tile_block<Tiles, Add, true, true>(c, c_stride, a, a_stride, b, b_stride, depth);
    else if (two)
      tile_block<Tiles, Add, true, false>(c, c_stride, a, a_stride, b, b_stride, depth);
    else if (wide)
      tile_block<Tiles, Add, false, true>(c, c_stride, a, a_stride, b, b_stride, depth);
    else
      tile_block<Tiles, Add, false, false>(c, c_stride, a, a_stride, b, b_stride, depth);
  }
}

template <class TileSet, class T>
struct TileMode : PairMode<T> {
  using Tiles = TileSet;
  // Rows that are processed together, and the multiple to which memory rounds their number up.
  static constexpr int kTogether = 2 * kTileRows, kPadRows = kTileRows, kValueKeys = kDirectMost;
};

#define PYR_TILED(TILES, T)                                                     \
  {attention_scratch<TileMode<TILES, T>>, attention<TileMode<TILES, T>>, merge}

// By cache element type.
#define PYR_TILED_TABLE(TILES) \
  {{}, PYR_TILED(TILES, bf16_t), {}, PYR_TILED(TILES, e4m3_t), PYR_TILED(TILES, e5m2_t)}

// Attends as attention_tile, with tiles. Head sizes are multiples of 32: a unit is a pair, a tile
// holds 16 units.
template <class Mode>
void attention_with_tiles(const PyrAttention& p, const AttentionItem& item, const Sight& sight,
                          const AttentionScratch& s) {
  using T = typename Mode::Element;
  using Tiles = typename Mode::Tiles;
  const int D = int(p.D), units = D / Mode::Step, stride = padded(D);
  for (int r = 0; r < item.rows; ++r) {
    const int row = item.row0 + r;
    const int64_t head = item.kv_head * sight.heads + row % sight.heads;
    pack_query<Mode>(s.queries + r * units, p.query,
                     (sight.query0 + row / sight.heads) * p.query_t + head * p.query_h,
                     p.query_dtype, D);
  }
  TileRows<T> tiles[2];
  tile_rows(p, item, item.begin, &tiles[0]);
  int turn = 0;
  // Keys that have probabilities but are not in the sums yet. Memory that was just written is slow to
  // load as a tile (and a tile that was just stored slow to read), so another product runs in between.
  int waiting = -1, waiting_rows = 0, waiting_keys = 0;
  auto add_values = [&] {
    if (waiting >= 0)
      tile_product<Tiles, true>(waiting_rows, s.rows.sum + waiting * stride, stride,
                                s.probabilities, KB / Mode::Step, s.values, stride,
                                (waiting_keys + 31) / 32, stride / W);
    waiting = -1;
  };
  Tiles::begin();
  for (int begin = item.begin; begin < item.end; begin += KB, turn ^= 1) {
    const int keys = item.end - begin < KB ? item.end - begin : KB;
    const TileRows<T>& tile = tiles[turn];
    const TileRows<T>* next = nullptr;
    if (begin + KB < item.end) {
      tile_rows(p, item, begin + KB, &tiles[turn ^ 1]);
      next = &tiles[turn ^ 1];
    }
    pack_keys<Mode>(s.keys, tile.key, keys, D, next ? next->key : nullptr);
    add_values();
    pack_values<Mode>(s.values, tile.value, keys, D, next ? next->value : nullptr);
    // A tile of values is 32 keys deep: zeros behind the last key, whose probabilities are zero too.
    const int packed = round_up(keys, W) / Mode::Step, whole = round_up(keys, 32) / Mode::Step;
    memset(s.values + packed * stride, 0, size_t(whole - packed) * stride * 4);
    for (int r = 0; r < item.rows; r += Mode::kTogether) {
      const int rows = item.rows - r < Mode::kTogether ? item.rows - r : Mode::kTogether;
      const int lo = sight.lo(item.row0 + r) - begin, hi = sight.hi(item.row0 + r + rows - 1) - begin;
      if (hi < 0 || lo >= keys) continue;
      const int visible = hi + 1 < keys ? hi + 1 : keys;
      const int vectors = (visible + W - 1) / W;
      tile_product<Tiles, false>(rows, s.scores, KB, s.queries + r * units, units, s.keys, KB,
                                 units / 16, vectors);
      add_values();
      for (int i = 0; i < rows; ++i) {
        const int row = item.row0 + r + i;
        const int row_lo = sight.lo(row) - begin;
        int row_hi = sight.hi(row) - begin;
        if (row_hi >= keys) row_hi = keys - 1;
        const float correction = softmax_step<Mode>(
            p, s.scores + i * KB, s.probabilities + i * (KB / Mode::Step), vectors,
            row_lo > 0 || row_hi < vectors * W - 1, row_lo, row_hi, s.rows.max + r + i,
            s.rows.weights + (r + i) * W);
        if (correction != 1.0f) {
          float* sum = s.rows.sum + (r + i) * stride;
          const V factor = v_set(correction);
          for (int d = 0; d < stride; d += W) v_store(sum + d, v_mul(v_load(sum + d), factor));
        }
      }
      waiting = r, waiting_rows = rows, waiting_keys = visible;
    }
  }
  add_values();
  Tiles::end();
}

}  // namespace
