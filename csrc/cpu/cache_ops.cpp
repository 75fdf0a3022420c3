// SPDX-License-Identifier: Apache-2.0
// Moves of whole rows: new tokens into the cache, survivors to the tail. Bits, not values.
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace pyr {
namespace {

constexpr int64_t kSerialBytes = 1 << 16;  // below this, waking threads costs more than the copy

inline void copy_row(char* to, const char* from, int64_t bytes) {
  // The sizes of heads of 32, 64 and 128 elements become a few vector moves.
  switch (bytes) {
    case 64: memcpy(to, from, 64); break;
    case 128: memcpy(to, from, 128); break;
    case 256: memcpy(to, from, 256); break;
    default: memcpy(to, from, size_t(bytes));
  }
}

int check_compact(const PyrCompact& p, int64_t r) {
  const long long n = p.prompt_lens[r], keep = p.keeps[r];
  if (keep < 0 || keep > n)
    return fail("keeps of request %lld is %lld, outside 0 .. prompt_lens = %lld", (long long)r, keep,
                n);
  if (keep > p.kept_len)
    return fail("keeps of request %lld is %lld, but kept has %lld columns", (long long)r, keep,
                (long long)p.kept_len);
  int64_t lowest = n;
  for (int64_t g = 0; g < p.G; ++g) {
    const int32_t* kept = p.kept + r * p.kept_r + g * p.kept_g;
    bool ascending = true;
    for (int64_t i = 1; i < keep; ++i) ascending &= kept[i] > kept[i - 1];
    if (!ascending)
      return fail("kept of request %lld, KV head %lld is not strictly ascending", (long long)r,
                  (long long)g);
    if (keep && (kept[0] < 0 || kept[keep - 1] >= n))
      return fail("kept of request %lld, KV head %lld spans %lld .. %lld, outside 0 .. %lld",
                  (long long)r, (long long)g, (long long)kept[0], (long long)kept[keep - 1], n - 1);
    if (keep) lowest = std::min<int64_t>(lowest, kept[0]);
  }
  return check_table(p.table, p.table_r, r, lowest, n, p.N, p.M, p.P);
}

// Rows are moved from the last survivor down: a target is never below its source, so no row that
// is still needed is overwritten.
void compact_head(const PyrCompact& p, int64_t r, int64_t g) {
  const int64_t n = p.prompt_lens[r], keep = p.keeps[r], bytes = p.item_size * p.D;
  const int32_t* kept = p.kept + r * p.kept_r + g * p.kept_g;
  const int32_t* table = p.table + r * p.table_r;
  char* key = static_cast<char*>(p.key) + g * p.key_g * p.item_size;
  char* value = static_cast<char*>(p.value) + g * p.value_g * p.item_size;
  // The distance to the target only grows towards the front: once rows are in place, skip them.
  int64_t i = std::partition_point(kept, kept + keep,
                                   [&](const int32_t& position) {
                                     return position < n - keep + (&position - kept);
                                   }) -
              kept - 1;
  for (; i >= 0; --i) {
    const int64_t from = kept[i], to = n - keep + i;
    const int64_t from_block = table[from / p.N], to_block = table[to / p.N];
    const int64_t from_row = from % p.N, to_row = to % p.N;
    copy_row(key + (to_block * p.key_p + to_row * p.key_n) * p.item_size,
             key + (from_block * p.key_p + from_row * p.key_n) * p.item_size, bytes);
    copy_row(value + (to_block * p.value_p + to_row * p.value_n) * p.item_size,
             value + (from_block * p.value_p + from_row * p.value_n) * p.item_size, bytes);
  }
}

}  // namespace
}  // namespace pyr

int pyr_compact(const PyrCompact* raw) {
  using namespace pyr;
  const PyrCompact& p = *raw;
  int64_t rows = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    if (int error = check_compact(p, r)) return error;
    rows += p.keeps[r] * p.G;
  }
  const auto task = [&](int64_t i) { compact_head(p, i / p.G, i % p.G); };
  for_each_item(rows * p.D * p.item_size < kSerialBytes ? 1 : p.threads, p.R * p.G, task);
  return 0;
}

int pyr_reshape_and_cache(const PyrCacheWrite* raw) {
  using namespace pyr;
  const PyrCacheWrite& p = *raw;
  const int64_t slots = p.P * p.N, bytes = p.item_size * p.D;
  const bool quantised = p.cache_dtype == PYR_E4M3 || p.cache_dtype == PYR_E5M2;
  const int64_t from_size = !quantised ? p.item_size : p.source_dtype == PYR_F32 ? 4 : 2;
  const auto quantise = kernels_for(PYR_F32, p.cache_dtype).quantise;
  const auto write_row = [&](char* to, const char* from, double scale) {
    if (quantised)
      quantise(reinterpret_cast<uint8_t*>(to), from, p.source_dtype, p.D, float(scale));
    else
      copy_row(to, from, bytes);
  };
  int64_t highest = -1;
  for (int64_t t = 0; t < p.T; ++t) highest = std::max(highest, p.slots[t]);
  if (highest >= slots)
    return fail("slot_mapping names slot %lld, but the cache has %lld (%lld blocks of %lld)",
                (long long)highest, (long long)slots, (long long)p.P, (long long)p.N);
  constexpr int64_t kTokens = 64;  // of one piece of work
  const auto task = [&](int64_t piece) {
    const int64_t end = std::min(p.T, (piece + 1) * kTokens);
    for (int64_t t = piece * kTokens; t < end; ++t) {
      if (p.slots[t] < 0) continue;
      const int64_t block = p.slots[t] / p.N, row = p.slots[t] % p.N;
      const char* key = static_cast<const char*>(p.key) + t * p.key_t * from_size;
      const char* value = static_cast<const char*>(p.value) + t * p.value_t * from_size;
      char* to_key =
          static_cast<char*>(p.key_cache) + (block * p.key_p + row * p.key_n) * p.item_size;
      char* to_value =
          static_cast<char*>(p.value_cache) + (block * p.value_p + row * p.value_n) * p.item_size;
      for (int64_t g = 0; g < p.G; ++g) {
        write_row(to_key + g * p.key_g * p.item_size, key + g * p.key_h * from_size, p.key_scale);
        write_row(to_value + g * p.value_g * p.item_size, value + g * p.value_h * from_size,
                  p.value_scale);
      }
    }
  };
  for_each_item(p.T * p.G * bytes < kSerialBytes ? 1 : p.threads, (p.T + kTokens - 1) / kTokens,
                task);
  return 0;
}
