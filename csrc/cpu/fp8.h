// SPDX-License-Identifier: Apache-2.0
// Caches of 8-bit floats: e4m3 (no infinities, up to 448) and e5m2 (up to 57344, infinities). Each of
// their numbers is also a bfloat16 and a float, so reading them rounds nothing. Their scales are
// multiplied into the logits and the output instead.
#pragma once
#include "abi.h"
#include "simd.h"

namespace {

struct e4m3_t {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr uint32_t kMost = 0x43e00000;  // 448 as a float
  uint8_t bits;
};
struct e5m2_t {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr uint32_t kMost = 0x47600000;  // 57344
  uint8_t bits;
};

PYR_INLINE float to_float(e4m3_t value) {
  const uint32_t sign = uint32_t(value.bits & 0x80) << 24, rest = value.bits & 0x7f;
  if (rest == 0x7f) return from_bits(sign | 0x7fc00000);
  // Scaling by 2^120 moves the exponent's bias and normalises subnormal numbers.
  return from_bits(sign | to_bits(from_bits(rest << 20) * 0x1p120f));
}
// The upper half of a float16.
PYR_INLINE float to_float(e5m2_t value) { return to_float(f16_t{uint16_t(value.bits << 8)}); }

// Rounds to nearest, ties to even; numbers that are too large, and infinity, become the largest.
// There are no branches, so that the compiler can vectorise it.
template <class T>
PYR_INLINE uint8_t to_fp8(float value) {
  constexpr int kShift = 23 - T::kMantissa;
  constexpr uint32_t kLeast = uint32_t(128 - T::kBias) << 23;  // the least normal number
  // Adding it lets a float addition round subnormal numbers at the right bit.
  constexpr uint32_t kMagic = uint32_t(151 - T::kBias - T::kMantissa) << 23;
  const uint32_t bits = to_bits(value), sign = bits >> 24 & 0x80, all = bits & 0x7fffffff;
  const uint32_t rest = all < T::kMost ? all : T::kMost;
  const uint32_t small = to_bits(from_bits(rest) + from_bits(kMagic)) - kMagic;
  const uint32_t half = (1u << (kShift - 1)) - 1 + (rest >> kShift & 1);
  const uint32_t normal = (rest - (uint32_t(127 - T::kBias) << 23) + half) >> kShift;
  const uint32_t result = rest < kLeast ? small : normal;
  return uint8_t(sign | (all > 0x7f800000 ? 0x7f : result));
}

template <class T, class From>
PYR_INLINE void quantise(uint8_t* out, const From* row, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_fp8<T>(to_float(row[i]) / scale);
}

// Quantises a row of any type after dividing it by `scale`.
template <class T>
void quantise_row(uint8_t* out, const void* row, int64_t dtype, int64_t count, float scale) {
  if (dtype == PYR_F32)
    quantise<T>(out, (const float*)row, count, scale);
  else if (dtype == PYR_BF16)
    quantise<T>(out, (const bf16_t*)row, count, scale);
  else
    quantise<T>(out, (const f16_t*)row, count, scale);
}

#if defined(__AVX512F__)

PYR_INLINE __m256i load_bytes(const void* p, int n) {  // as words
  return _mm256_cvtepu8_epi16(n >= W ? _mm_loadu_si128((const __m128i*)p)
                                     : _mm_loadl_epi64((const __m128i*)p));
}
PYR_INLINE V v_load_row(const e5m2_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(load_bytes(p, n), 8));
}
// A float16 with the same bits is 2^-8 times the number. NaN has to be restored.
PYR_INLINE V v_load_row(const e4m3_t* p, int n) {
  const __m256i x = load_bytes(p, n), rest = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(x, rest), 8);
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(rest, 7), _mm256_or_si256(sign, nan));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

#elif defined(__AVX2__)

PYR_INLINE __m128i load_bytes(const void* p) {
  return _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
}
PYR_INLINE V v_load_row(const e5m2_t* p, int) {
  return _mm256_cvtph_ps(_mm_slli_epi16(load_bytes(p), 8));
}
PYR_INLINE V v_load_row(const e4m3_t* p, int) {
  const __m128i x = load_bytes(p), rest = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(x, rest), 8);
  const __m128i half = _mm_or_si128(_mm_slli_epi16(rest, 7), _mm_or_si128(sign, nan));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

#endif

#if defined(__AVX512BF16__)

// The bfloat16 of each of the 128 numbers without a sign.
template <class T>
struct Bf16Table {
  alignas(64) uint16_t of[128] = {};
  constexpr Bf16Table() {
    for (int i = 0; i < 128; ++i) {
      const int exponent = i >> T::kMantissa, rest = i & ((1 << T::kMantissa) - 1);
      int top = T::kMantissa;  // the place of the first bit that is set
      for (; exponent == 0 && top > 0 && !(rest >> top & 1);) --top;
      if (exponent)
        of[i] = uint16_t((exponent + 127 - T::kBias) << 7 | rest << (7 - T::kMantissa));
      else if (rest)
        of[i] = uint16_t((top + 128 - T::kBias - T::kMantissa) << 7 | (rest << (7 - top) & 0x7f));
      const bool special = T::kMantissa == 3 ? i == 127 : exponent == 31;
      if (special) of[i] = uint16_t(0x7f80 | rest << (7 - T::kMantissa));
    }
  }
};
template <class T>
constexpr Bf16Table<T> kBf16Table;

PYR_INLINE __m512i load_pairs(const bf16_t* row, int n) {
  if (n >= 2 * W) return _mm512_loadu_si512(row);
  return _mm512_maskz_loadu_epi32(__mmask16((1u << (n / 2)) - 1), row);
}
// Elements 0 .. n - 1 as bfloat16, zeros behind them: a table of 128 in four registers, by the
// lower seven bits.
template <class T>
PYR_INLINE __m512i load_pairs(const T* row, int n) {
  const __m256i bytes = n >= 2 * W ? _mm256_loadu_si256((const __m256i*)row)
                                   : _mm256_maskz_loadu_epi8(__mmask32((1u << n) - 1), row);
  const __m512i x = _mm512_cvtepi8_epi16(bytes);  // bit 15 is the sign
  const uint16_t* table = kBf16Table<T>.of;
  const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), x,
                                                _mm512_load_si512(table + 32));
  const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), x,
                                                 _mm512_load_si512(table + 96));
  const __mmask32 upper = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40));
  const __m512i rest = _mm512_mask_blend_epi16(upper, low, high);
  // rest | (x & 0x8000)
  return _mm512_ternarylogic_epi32(rest, x, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
}

#endif

}  // namespace
