// SPDX-License-Identifier: Apache-2.0
// Vectors of floats for the instruction set this unit is compiled for. Everything is in an unnamed
// namespace: each unit has its own copy (see kernels.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define PYR_INLINE inline __attribute__((always_inline))

namespace {

using bf16_t = uint16_t;
struct f16_t {
  uint16_t bits;
};

PYR_INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
PYR_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
PYR_INLINE float to_float(float value) { return value; }
PYR_INLINE float to_float(bf16_t value) { return from_bits(uint32_t(value) << 16); }
PYR_INLINE float to_float(f16_t value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Scaling by 2^112 moves the exponent's bias and normalises subnormal numbers.
  return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));
}
PYR_INLINE bf16_t to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16_t(bits >> 16 | 0x40);
  return bf16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
PYR_INLINE f16_t to_f16(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (rest >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (rest < 0x38800000) {  // subnormal: let a float addition round at the right bit
    const float shifted = from_bits(rest) + 0.5f;
    return {uint16_t(sign | (to_bits(shifted) - 0x3f000000))};
  }
  return {uint16_t(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13))};
}

#if defined(__AVX512F__)

constexpr int W = 16;
using V = __m512;

PYR_INLINE V v_zero() { return _mm512_setzero_ps(); }
PYR_INLINE V v_set(float x) { return _mm512_set1_ps(x); }
PYR_INLINE V v_load(const float* p) { return _mm512_loadu_ps(p); }
PYR_INLINE void v_store(float* p, V x) { _mm512_storeu_ps(p, x); }
PYR_INLINE V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
PYR_INLINE V v_add(V a, V b) { return _mm512_add_ps(a, b); }
PYR_INLINE V v_sub(V a, V b) { return _mm512_sub_ps(a, b); }
PYR_INLINE V v_mul(V a, V b) { return _mm512_mul_ps(a, b); }
PYR_INLINE V v_div(V a, V b) { return _mm512_div_ps(a, b); }
PYR_INLINE V v_max(V a, V b) { return _mm512_max_ps(a, b); }
PYR_INLINE V v_min(V a, V b) { return _mm512_min_ps(a, b); }
PYR_INLINE float v_first(V a) { return _mm512_cvtss_f32(a); }
PYR_INLINE float v_hmax(V a) { return _mm512_reduce_max_ps(a); }
PYR_INLINE float v_hsum(V a) { return _mm512_reduce_add_ps(a); }
PYR_INLINE bool v_any_above(V a, float b) {
  return _mm512_cmp_ps_mask(a, _mm512_set1_ps(b), _CMP_GT_OQ);
}

// Elements 0 .. n - 1 of a row, zeros behind them; n is a multiple of 8.
PYR_INLINE V v_load_row(const float* p, int n) {
  return n >= W ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(0xff, p);
}
PYR_INLINE V v_load_row(const bf16_t* p, int n) {
  const __m256i raw = n >= W ? _mm256_loadu_si256((const __m256i*)p)
                             : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
PYR_INLINE V v_load_row(const f16_t* p, int n) {
  return _mm512_cvtph_ps(n >= W ? _mm256_loadu_si256((const __m256i*)p)
                                : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p)));
}
// -inf in the lanes i with base + i outside lo .. hi.
PYR_INLINE V v_mask_outside(V x, int base, int lo, int hi) {
  const __m512i lane = _mm512_add_epi32(
      _mm512_set1_epi32(base),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 in = _mm512_cmple_epi32_mask(lane, _mm512_set1_epi32(hi)) &
                       _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo));
  return _mm512_mask_blend_ps(in, _mm512_set1_ps(-INFINITY), x);
}
// 1 in the lanes in which x < limit and seen > -inf, else 0.
PYR_INLINE V v_one_below(V x, V limit, V seen) {
  const __mmask16 below = _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ) &
                          _mm512_cmp_ps_mask(seen, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
  return _mm512_maskz_mov_ps(below, _mm512_set1_ps(1.0f));
}
// 2^x, and 0 for -inf; exact for integers, and continuous there. Relative error below 2e-7 (Degree 5),
// 3.5e-6 (4). A polynomial takes the fractional part; scaling takes the integral part from x itself.
template <int Degree>
PYR_INLINE V v_exp2_of(V x) {
  const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  V p;
  if constexpr (Degree == 5) {
    p = v_fma(v_set(0.00187932712f), f, v_set(0.0089909723f));
    p = v_fma(p, f, v_set(0.0558186956f));
    p = v_fma(p, f, v_set(0.240159258f));
    p = v_fma(p, f, v_set(0.693151712f));
  } else {
    p = v_fma(v_set(0.0135557465f), f, v_set(0.0520323701f));
    p = v_fma(p, f, v_set(0.241379768f));
    p = v_fma(p, f, v_set(0.693032146f));
  }
  return _mm512_scalef_ps(v_fma(p, f, v_set(1.0f)), x);
}
PYR_INLINE V v_exp2(V x) { return v_exp2_of<5>(x); }
// For results that are rounded to bfloat16 anyway.
PYR_INLINE V v_exp2_rough(V x) { return v_exp2_of<4>(x); }

// A vector is kGroups groups of four lanes. x[i] group g  <->  x[g] group i.
constexpr int kGroups = 4;
PYR_INLINE void v_transpose_groups(V (&x)[4]) {
  const V a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  const V c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  x[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  x[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  x[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}
// The same four floats in every group.
PYR_INLINE V v_load_group(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
// Lane i of group g of the result: the sum of group g of x[i].
PYR_INLINE V v_sum_groups(V x0, V x1, V x2, V x3) {
  const V a = _mm512_add_ps(_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
  const V b = _mm512_add_ps(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
  return _mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))),
      _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))));
}

// Lane i of every group: the maximum of x[i].
PYR_INLINE V v_max_rows(V x0, V x1, V x2, V x3) {
  const V a = v_max(_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
  const V b = v_max(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
  V c = v_max(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))),
              _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))));
  c = v_max(c, _mm512_shuffle_f32x4(c, c, 0x4e));
  return v_max(c, _mm512_shuffle_f32x4(c, c, 0xb1));
}

PYR_INLINE void v_transpose(V (&x)[16]) {
  V t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
    x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const V a = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
    const V b = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd);
    const V c = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
    const V d = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xdd);
    t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = t[i];
}

#elif defined(__AVX2__)

constexpr int W = 8;
using V = __m256;

PYR_INLINE V v_zero() { return _mm256_setzero_ps(); }
PYR_INLINE V v_set(float x) { return _mm256_set1_ps(x); }
PYR_INLINE V v_load(const float* p) { return _mm256_loadu_ps(p); }
PYR_INLINE void v_store(float* p, V x) { _mm256_storeu_ps(p, x); }
PYR_INLINE V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
PYR_INLINE V v_add(V a, V b) { return _mm256_add_ps(a, b); }
PYR_INLINE V v_sub(V a, V b) { return _mm256_sub_ps(a, b); }
PYR_INLINE V v_mul(V a, V b) { return _mm256_mul_ps(a, b); }
PYR_INLINE V v_div(V a, V b) { return _mm256_div_ps(a, b); }
PYR_INLINE V v_max(V a, V b) { return _mm256_max_ps(a, b); }
PYR_INLINE V v_min(V a, V b) { return _mm256_min_ps(a, b); }
PYR_INLINE float v_first(V a) { return _mm256_cvtss_f32(a); }
PYR_INLINE float v_hmax(V a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
PYR_INLINE float v_hsum(V a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
PYR_INLINE bool v_any_above(V a, float b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(b), _CMP_GT_OQ));
}
PYR_INLINE V v_load_row(const float* p, int) { return _mm256_loadu_ps(p); }
PYR_INLINE V v_load_row(const bf16_t* p, int) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PYR_INLINE V v_load_row(const f16_t* p, int) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
PYR_INLINE V v_mask_outside(V x, int base, int lo, int hi) {
  const __m256i lane =
      _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(hi)),
                                      _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane));
  return _mm256_blendv_ps(x, _mm256_set1_ps(-INFINITY), _mm256_castsi256_ps(out));
}
PYR_INLINE V v_one_below(V x, V limit, V seen) {
  const V below = _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ),
                                _mm256_cmp_ps(seen, _mm256_set1_ps(-INFINITY), _CMP_GT_OQ));
  return _mm256_and_ps(below, _mm256_set1_ps(1.0f));
}
PYR_INLINE V v_round(V x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^exponent for whole exponents -127 .. 127; -127 gives zero.
PYR_INLINE V v_scale2(V x, V exponent) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
constexpr float kMinExponent = -127.0f;

constexpr int kGroups = 2;
PYR_INLINE void v_transpose_groups(V (&x)[2]) {
  const V a = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
  x[0] = a;
}
PYR_INLINE V v_load_group(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
PYR_INLINE V v_sum_groups(V x0, V x1, V x2, V x3) {
  return _mm256_hadd_ps(_mm256_hadd_ps(x0, x1), _mm256_hadd_ps(x2, x3));
}

PYR_INLINE V v_max_rows(V x0, V x1, V x2, V x3) {
  const V a = v_max(_mm256_unpacklo_ps(x0, x1), _mm256_unpackhi_ps(x0, x1));
  const V b = v_max(_mm256_unpacklo_ps(x2, x3), _mm256_unpackhi_ps(x2, x3));
  const V c = v_max(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  return v_max(c, _mm256_permute2f128_ps(c, c, 0x01));
}

PYR_INLINE void v_transpose(V (&x)[8]) {
  V t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) x[i] = t[i];
}

#else  // any other machine: four lanes in the compiler's own vectors

constexpr int W = 4;
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

PYR_INLINE V v_zero() { return V{0, 0, 0, 0}; }
PYR_INLINE V v_set(float x) { return V{x, x, x, x}; }
PYR_INLINE V v_load(const float* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}
PYR_INLINE void v_store(float* p, V x) { memcpy(p, &x, sizeof x); }
PYR_INLINE V v_fma(V a, V b, V c) { return a * b + c; }
PYR_INLINE V v_add(V a, V b) { return a + b; }
PYR_INLINE V v_sub(V a, V b) { return a - b; }
PYR_INLINE V v_mul(V a, V b) { return a * b; }
PYR_INLINE V v_div(V a, V b) { return a / b; }
PYR_INLINE V v_blend(VI take_a, V a, V b) { return (V)((take_a & (VI)a) | (~take_a & (VI)b)); }
PYR_INLINE V v_max(V a, V b) { return v_blend(a > b, a, b); }
PYR_INLINE V v_min(V a, V b) { return v_blend(a < b, a, b); }
PYR_INLINE float v_first(V a) { return a[0]; }
PYR_INLINE float v_hmax(V a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
PYR_INLINE float v_hsum(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
PYR_INLINE bool v_any_above(V a, float b) { return v_hmax(a) > b; }
template <class T>
PYR_INLINE V v_load_row(const T* p, int) {
  return V{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
PYR_INLINE V v_mask_outside(V x, int base, int lo, int hi) {
  const VI lane = VI{0, 1, 2, 3} + base;
  return v_blend((lane >= lo) & (lane <= hi), x, v_set(-INFINITY));
}
PYR_INLINE V v_one_below(V x, V limit, V seen) {
  return v_blend((x < limit) & (seen > v_set(-INFINITY)), v_set(1.0f), v_zero());
}
PYR_INLINE V v_round(V x) {
  const V magic = v_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  return (x + magic) - magic;
}
PYR_INLINE V v_scale2(V x, V exponent) {
  const VI biased = __builtin_convertvector(exponent, VI) + 127;
  return x * (V)(biased << 23);
}
constexpr float kMinExponent = -127.0f;
constexpr int kGroups = 1;
PYR_INLINE void v_transpose_groups(V (&)[1]) {}
PYR_INLINE V v_load_group(const float* p) { return v_load(p); }
PYR_INLINE V v_sum_groups(V x0, V x1, V x2, V x3) {
  return V{v_hsum(x0), v_hsum(x1), v_hsum(x2), v_hsum(x3)};
}
PYR_INLINE V v_max_rows(V x0, V x1, V x2, V x3) {
  return V{v_hmax(x0), v_hmax(x1), v_hmax(x2), v_hmax(x3)};
}
PYR_INLINE void v_transpose(V (&x)[4]) {
  V t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) t[i] = V{x[0][i], x[1][i], x[2][i], x[3][i]};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) x[i] = t[i];
}

#endif

#if !defined(__AVX512F__)
// 2^x for x <= 126, relative error below 1.5e-7; exactly 1 at 0, 0 below kMinExponent, NaN for NaN.
PYR_INLINE V v_exp2(V x) {
  x = v_max(v_set(kMinExponent), x);  // in this order: the second one where either is NaN
  const V n = v_round(x), f = v_sub(x, n);
  V p = v_set(0.0013264727f);
  p = v_fma(p, f, v_set(0.009671513f));
  p = v_fma(p, f, v_set(0.055507336f));
  p = v_fma(p, f, v_set(0.24022242f));
  p = v_fma(p, f, v_set(0.693147f));
  return v_scale2(v_fma(p, f, v_set(1.0f)), n);
}
#endif

constexpr float kLog2e = 1.44269504f;
// What stands for the maximum of scores none of which is visible: times a scale it is still finite.
constexpr float kLowest = -1.0e30f;

// The greater and the lesser of two numbers, NaN where either is NaN. (v_max and v_min return the
// second one there.)
PYR_INLINE V v_max_or_nan(V a, V b) {
  return v_mul(v_add(v_max(a, b), v_max(b, a)), v_set(0.5f));
}
PYR_INLINE V v_min_or_nan(V a, V b) {
  return v_mul(v_add(v_min(a, b), v_min(b, a)), v_set(0.5f));
}

// cap * tanh(x / cap)
PYR_INLINE V v_soft_cap(V x, float cap) {
  V y = v_mul(x, v_set(2 * kLog2e / cap));
  y = v_min(v_set(60.0f), y);  // in this order, which keeps NaN
  const V one = v_set(1.0f);
  return v_mul(v_set(cap), v_sub(one, v_div(v_set(2.0f), v_add(v_exp2(y), one))));
}

// The sum of the floats there, in whole groups of eight vectors; `next`, if given, is fetched into the
// second-level cache at the same time.
inline float read_memory(const char* memory, size_t bytes, const char* next) {
  V sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = v_zero();
  const float* p = (const float*)memory;
  for (size_t n = bytes / sizeof(V) / 8; n; --n, p += 8 * W) {
    if (next) {
#pragma GCC unroll 8
      for (size_t i = 0; i < 8 * sizeof(V); i += 64) __builtin_prefetch(next + i, 0, 2);
      next += 8 * sizeof(V);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = v_add(sum[i], v_load(p + i * W));
  }
  for (int i = 1; i < 8; ++i) sum[0] = v_add(sum[0], sum[i]);
  return v_hsum(sum[0]);
}

}  // namespace
