// SPDX-License-Identifier: Apache-2.0
// The k-th largest of many floats by a radix search: no sort, no comparison of floats. Compiled for
// the baseline instruction set only.
#pragma once
#include <cstdint>
#include <cstring>

namespace pyr {

// Keys whose order as unsigned integers is the order of the floats; both zeros are one key, and so is
// every NaN, which comes before all numbers as in PyTorch.
inline uint32_t ordered(float score) {
  if (score != score) return 0xffffffffu;
  const float plain = score + 0.0f;  // -0 becomes +0
  uint32_t bits;
  memcpy(&bits, &plain, 4);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The k-th largest key of keys[0 .. n - 1], 1 <= k <= n, and how many of the keys equal to it are
// among the k largest. `spare` holds n + 1 keys: one is written behind the last.
uint32_t kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* spare, int64_t* equal);

// Writes first + i for the k largest of n scores, 1 <= k <= n, in ascending order; of equal ones the
// lowest i. `memory` holds 2 * (n + 1) keys, `out` k numbers.
void choose_largest(const float* scores, int64_t n, int64_t k, int32_t first, uint32_t* memory,
                    int32_t* out);

}  // namespace pyr
