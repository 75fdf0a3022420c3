// SPDX-License-Identifier: Apache-2.0
// Products of tiles: rows of queries against packed keys, probabilities against packed values.
//
// Operands are packed in 4-byte units: one float, or a pair of bfloat16 that one instruction
// multiplies and adds (VDPBF16PS). With `Step` elements a unit:
//   queries        [rows][D / Step]
//   keys           [D / Step][kTileKeys]        transposed: a vector holds W keys
//   probabilities  [rows][kTileKeys / Step]
//   values         [kTileKeys / Step][padded D] a vector holds W components
// so both products are the same loop: broadcast a unit of the left, multiply a vector of the right.
#pragma once
#include "fp8.h"
#include "kernels.h"

namespace {

using pyr::kMaxHeadSize;
using pyr::kTileKeys;
constexpr int KB = int(kTileKeys);

// Register blocking: MaxRows x NV accumulators.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kNV = 4;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kNV = 2;
#else
constexpr int kMaxRows = 4, kNV = 2;
#endif

PYR_INLINE int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
PYR_INLINE int padded(int D) { return round_up(D, W); }

// Prefetches into the second-level cache: two tiles would crowd the first-level one.
constexpr int kPrefetch = 2;
PYR_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i, 0, kPrefetch);
}

// Floats of one element type.
template <class T>
struct FloatMode {
  using Element = T;
  static constexpr int Step = 1;
  static constexpr int kElements = W;  // elements a vector load takes from a row
  static constexpr bool kPairs = false;
  static constexpr int kTogether = kMaxRows, kPadRows = 1;  // rows, see attention_tile and amx.h
  static constexpr int kValueKeys = KB;                     // packed together

  static PYR_INLINE V multiply_add(V sum, V a, V b) { return v_fma(a, b, sum); }
  static PYR_INLINE V exp2(V x) { return v_exp2(x); }  // of what becomes a probability
  static PYR_INLINE V load(const T* row, int n) { return v_load_row(row, n); }
  static PYR_INLINE void pack_value_rows(float* out, const T* const* rows, int first, int keys,
                                         int D) {
    const T* row = first < keys ? rows[first] : nullptr;
    for (int d = 0; d < D; d += W)
      v_store(out + d, row ? v_load_row(row + d, D - d) : v_zero());
  }
  static PYR_INLINE void store_probabilities(float* out, int i, V p, V) { v_store(out + i, p); }
  // Components d .. d + 2W - 1 of the values of one unit of keys, straight from the cache; in the
  // order that costs least, which `in_order` undoes for a finished sum.
  static PYR_INLINE void load_values(const T* const* rows, int i, int d, V* lo, V* hi) {
    *lo = v_load_row(rows[i] + d, W);
    *hi = v_load_row(rows[i] + d + W, W);
  }
  static PYR_INLINE void in_order(float*, int) {}
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, or of what is read as bfloat16; products summed in float32.
template <class T>
struct PairMode {
  using Element = T;
  static constexpr int Step = 2;
  static constexpr int kElements = 2 * W;
  static constexpr bool kPairs = true;
  static constexpr int kTogether = kMaxRows, kPadRows = 1, kValueKeys = KB;

  static PYR_INLINE V multiply_add(V sum, V a, V b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static PYR_INLINE V exp2(V x) { return v_exp2_rough(x); }
  static PYR_INLINE V load(const T* row, int n) { return _mm512_castsi512_ps(load_pairs(row, n)); }
  // Vectors of (a[d], b[d]) for the components d .. d + 15 and d + 16 .. d + 31.
  static PYR_INLINE void interleave(V a, V b, V* lo, V* hi) {
    // Word i of the result: 16 * half + i / 2 of a where i is even, of b (bit 5) where it is odd.
    alignas(64) static constexpr uint16_t kLow[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    *lo = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, low, y));
    *hi = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, high, y));
  }
  static PYR_INLINE void pack_value_rows(float* out, const T* const* rows, int first, int keys,
                                         int D) {
    const T* a = first < keys ? rows[first] : nullptr;
    const T* b = first + 1 < keys ? rows[first + 1] : nullptr;
    for (int d = 0; d < D; d += 2 * W) {
      V lo, hi;
      interleave(a ? load(a + d, D - d) : v_zero(), b ? load(b + d, D - d) : v_zero(), &lo, &hi);
      v_store(out + d, lo);
      if (d + W < padded(D)) v_store(out + d + W, hi);
    }
  }
  static PYR_INLINE void load_values(const T* const* rows, int i, int d, V* lo, V* hi) {
    const __m512i x = load_pairs(rows[i] + d, 2 * W), y = load_pairs(rows[i + 1] + d, 2 * W);
    *lo = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
    *hi = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
  }
  static PYR_INLINE void in_order(float* sum, int D) {
    for (int d = 0; d < D; d += 2 * W) {
      const V lo = v_load(sum + d), hi = v_load(sum + d + W);
      const V a = _mm512_shuffle_f32x4(lo, hi, 0x44), b = _mm512_shuffle_f32x4(lo, hi, 0xee);
      v_store(sum + d, _mm512_shuffle_f32x4(a, a, 0xd8));
      v_store(sum + d + W, _mm512_shuffle_f32x4(b, b, 0xd8));
    }
  }
  // Two vectors of floats become one of pairs.
  static PYR_INLINE void store_probabilities(float* out, int i, V p, V q) {
    _mm512_storeu_ps(out + i / 2, (__m512)_mm512_cvtne2ps_pbh(q, p));
  }
};
#endif

// Addresses of the rows of a tile of keys in the paged cache.
template <class T, int Keys = KB>
struct TileRows {
  const T* key[Keys];
  const T* value[Keys];
};

// Finds the rows of one request and KV head by position; strides in elements.
template <class T>
struct CacheWalk {
  const T* key;
  const T* value;
  const int32_t* row;  // of the table
  int64_t N, key_p, key_n, value_p, value_n;

  // Finds the rows of the positions first + from .. first + count - 1 (absolute). Before and behind
  // them, up to `fill` in all, the nearest one is repeated: it is readable, and is masked.
  template <int Keys>
  PYR_INLINE void tile(int64_t first, int from, int count, TileRows<T, Keys>* out,
                       int fill = Keys) const {
    int64_t block = (first + from) / N, offset = (first + from) % N;
    int i = from;
    while (i < count) {
      const T* k = key + row[block] * key_p + offset * key_n;
      const T* v = value + row[block] * value_p + offset * value_n;
      const int64_t left = N - offset;
      const int end = left < count - i ? i + int(left) : count;
      for (; i < end; ++i, k += key_n, v += value_n) {
        out->key[i] = k;
        out->value[i] = v;
      }
      ++block;
      offset = 0;
    }
    for (; i < fill; ++i) {
      out->key[i] = out->key[count - 1];
      out->value[i] = out->value[count - 1];
    }
    for (i = 0; i < from; ++i) {
      out->key[i] = out->key[from];
      out->value[i] = out->value[from];
    }
  }
};

// keys -> [D / Step][KB]
template <class Mode>
PYR_INLINE void pack_keys(float* out, const typename Mode::Element* const* rows, int keys, int D,
                          const typename Mode::Element* const* next) {
  const int units = D / Mode::Step;
  for (int i = 0; i < keys; i += W) {
    if (next)
      for (int j = 0; j < W; ++j) prefetch_row(next[i + j], D * sizeof(*next[0]));
    for (int u = 0; u < units; u += W) {
      V x[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) x[j] = Mode::load(rows[i + j] + u * Mode::Step, D - u * Mode::Step);
      v_transpose(x);
      float* to = out + u * KB + i;
      if (units - u >= W) {
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) v_store(to + j * KB, x[j]);
      } else {
        // Written out so that x keeps to registers: indices stay constant.
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j)
          if (j < units - u) v_store(to + j * KB, x[j]);
      }
    }
  }
}

// values -> [KB / Step][padded D], zeros behind `keys` (whatever lies there may be no number).
template <class Mode>
PYR_INLINE void pack_values(float* out, const typename Mode::Element* const* rows, int keys, int D,
                            const typename Mode::Element* const* next) {
  const int stride = padded(D), end = round_up(keys, W < Mode::Step ? Mode::Step : W);
  for (int i = 0; i < end; i += Mode::Step, out += stride) {
    if (next)
      for (int j = 0; j < Mode::Step; ++j) prefetch_row(next[i + j], D * sizeof(*next[0]));
    Mode::pack_value_rows(out, rows, i, keys, D);
  }
}

// c[MR][N] (+)= a[MR][depth] * b[depth][N], N vectors wide. With `Scale`, c is multiplied by
// scale[row] and added to; without, overwritten.
template <class Mode, int MR, int N, bool Scale>
PYR_INLINE void product_block(float* c, int c_stride, const float* a, int a_stride, const float* b,
                              int b_stride, int depth, const float* scale) {
  V sum[MR][N];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    const V factor = Scale ? v_set(scale[m]) : v_zero();
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[m][n] = Scale ? v_mul(v_load(c + m * c_stride + n * W), factor) : v_zero();
  }
  for (int k = 0; k < depth; ++k) {
    V right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = v_load(b + k * b_stride + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const V left = v_set(a[m * a_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[m][n] = Mode::multiply_add(sum[m][n], left, right[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v_store(c + m * c_stride + n * W, sum[m][n]);
}

template <class Mode, int MR, bool Scale>
void product_rows(float* c, int c_stride, const float* a, int a_stride, const float* b,
                  int b_stride, int depth, int vectors, const float* scale) {
  int n = 0;
  for (; n + kNV <= vectors; n += kNV)
    product_block<Mode, MR, kNV, Scale>(c + n * W, c_stride, a, a_stride, b + n * W, b_stride,
                                        depth, scale);
  if (kNV > 2 && n + 2 <= vectors) {
    product_block<Mode, MR, 2, Scale>(c + n * W, c_stride, a, a_stride, b + n * W, b_stride, depth,
                                      scale);
    n += 2;
  }
  if (n < vectors)
    product_block<Mode, MR, 1, Scale>(c + n * W, c_stride, a, a_stride, b + n * W, b_stride, depth,
                                      scale);
}

// As above, for 1 .. kMaxRows rows.
template <class Mode, bool Scale>
PYR_INLINE void product(int rows, float* c, int c_stride, const float* a, int a_stride,
                        const float* b, int b_stride, int depth, int vectors, const float* scale) {
  switch (rows) {
#define PYR_ROWS(R)                                                                            \
  case R:                                                                                      \
    if constexpr (R <= kMaxRows)                                                               \
      product_rows<Mode, R, Scale>(c, c_stride, a, a_stride, b, b_stride, depth, vectors, scale); \
    break;
    PYR_ROWS(1)
    PYR_ROWS(2)
    PYR_ROWS(3)
    PYR_ROWS(4)
    PYR_ROWS(5)
    PYR_ROWS(6)
#undef PYR_ROWS
  }
}

// Size of the groups in which `rows` rows are processed: as even as possible.
PYR_INLINE int group_rows(int rows) {
  const int groups = (rows + kMaxRows - 1) / kMaxRows;
  return groups ? (rows + groups - 1) / groups : 1;
}

// c[rows][KB] = a[rows][units] * keys, for any number of rows. Few keys at a time meet all rows, so they
// stay in the first-level cache.
template <class Mode>
PYR_INLINE void multiply_keys(int rows, float* c, const float* a, int units, const float* keys,
                              int vectors) {
  const int step = group_rows(rows);
  for (int n = 0; n < vectors; n += kNV)
    for (int r = 0; r < rows; r += step)
      product<Mode, false>(rows - r < step ? rows - r : step, c + r * KB + n * W, KB, a + r * units,
                           units, keys + n * W, KB, units, vectors - n < kNV ? vectors - n : kNV, nullptr);
}

PYR_INLINE float load_scalar(const void* base, int64_t index, int64_t dtype) {
  if (dtype == PYR_F32) return ((const float*)base)[index];
  if (dtype == PYR_BF16) return to_float(((const bf16_t*)base)[index]);
  return to_float(((const f16_t*)base)[index]);
}

// What is subtracted from the scores of a row whose greatest one so far is `max`. Where the row has
// seen no number, any finite reference gives weights of zero, and keeps NaN.
PYR_INLINE float reference_of(float max) { return max == -INFINITY ? 0.0f : max; }

// Adds the head's sink to a row's softmax so far (sum * 2^max). A row that has seen no key stays
// unchanged.
PYR_INLINE void add_sink(float sink, float* max, float* sum) {
  if (*max == -INFINITY) return;
  sink *= kLog2e;
  const float after = sink > *max ? sink : *max;
  *sum = *sum * v_first(v_exp2(v_set(*max - after))) + v_first(v_exp2(v_set(sink - after)));
  *max = after;
}

// A query row of any type -> D / Step units.
template <class Mode>
PYR_INLINE void pack_query(float* out, const void* base, int64_t offset, int64_t dtype, int D) {
  if (Mode::kPairs)
    memcpy(out, (const bf16_t*)base + offset, size_t(D) * 2);
  else if (dtype == PYR_F32)
    memcpy(out, (const float*)base + offset, size_t(D) * 4);
  else if (dtype == PYR_BF16)
    for (int d = 0; d < D; ++d) out[d] = to_float(((const bf16_t*)base)[offset + d]);
  else
    for (int d = 0; d < D; ++d) out[d] = to_float(((const f16_t*)base)[offset + d]);
}

PYR_INLINE void store_row(void* base, int64_t offset, int64_t dtype, const float* row, float factor,
                          int D) {
  if (dtype == PYR_F32)
    for (int d = 0; d < D; ++d) ((float*)base)[offset + d] = row[d] * factor;
  else if (dtype == PYR_BF16)
    for (int d = 0; d < D; ++d) ((bf16_t*)base)[offset + d] = to_bf16(row[d] * factor);
  else
    for (int d = 0; d < D; ++d) ((f16_t*)base)[offset + d] = to_f16(row[d] * factor);
}

// Cuts a scratch area into 64-byte aligned pieces.
struct Carver {
  char* next;
  PYR_INLINE float* floats(int64_t count) {
    float* piece = (float*)next;
    next += (count * 4 + 63) / 64 * 64;
    return piece;
  }
};
PYR_INLINE size_t carved(int64_t floats) { return size_t(floats * 4 + 63) / 64 * 64; }

}  // namespace
