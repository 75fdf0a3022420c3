// SPDX-License-Identifier: Apache-2.0
// Exact top-k of each row by a radix search for the k-th score: no sort, no comparison of floats.
#include <algorithm>

#include "radix.h"
#include "runtime.h"

namespace pyr {
namespace {

// The bin, from the top, in which the k-th largest lies; `above` counts what lies higher.
int find_bin(const uint32_t* bins, int count, int64_t k, int64_t* above) {
  int64_t seen = 0;
  for (int bin = count - 1;; --bin) {
    if (seen + bins[bin] >= k) {
      *above = seen;
      return bin;
    }
    seen += bins[bin];
  }
}

// Digits of at most `Bits` bits from the top; after each, only the keys of one bin remain.
template <int Bits>
uint32_t search(const uint32_t* keys, int64_t n, int64_t k, uint32_t* spare, int64_t* equal) {
  constexpr int kBins = 1 << Bits;
  uint32_t prefix = 0;
  for (int shift = 32 - Bits, width = Bits;;) {
    uint32_t bins[kBins] = {0};
    const uint32_t mask = (1u << width) - 1;
    for (int64_t i = 0; i < n; ++i) ++bins[keys[i] >> shift & mask];
    int64_t above;
    const uint32_t bin = uint32_t(find_bin(bins, 1 << width, k, &above));
    k -= above;
    prefix |= bin << shift;
    if (shift == 0) {
      *equal = k;
      return prefix;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      spare[count] = keys[i];
      count += (keys[i] >> shift & mask) == bin;
    }
    keys = spare;
    n = count;
    width = shift < Bits ? shift : Bits;
    shift -= width;
  }
}

}  // namespace

uint32_t kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* spare, int64_t* equal) {
  // A pass over the bins must not cost more than one over the keys.
  return n < 4096 ? search<8>(keys, n, k, spare, equal) : search<11>(keys, n, k, spare, equal);
}

void choose_largest(const float* scores, int64_t n, int64_t k, int32_t first, uint32_t* memory,
                    int32_t* out) {
  for (int64_t i = 0; i < n; ++i) memory[i] = ordered(scores[i]);
  int64_t equal;
  const uint32_t threshold = kth_largest(memory, n, k, memory + n + 1, &equal);
  int64_t written = 0;
  for (int64_t i = 0; written < k; ++i) {
    bool take = memory[i] > threshold;
    if (memory[i] == threshold && equal) {  // ties: the lowest
      take = true;
      --equal;
    }
    out[written] = first + int32_t(i);
    written += take;
  }
}

namespace {

int check(const PyrSelect& p, int64_t r) {
  const long long n = p.prompt_lens[r], keep = p.keeps[r];
  if (keep < p.sinks + p.window || keep > n)
    return fail("keeps of request %lld is %lld, outside sinks + window = %lld .. prompt_lens = %lld",
                (long long)r, keep, (long long)(p.sinks + p.window), n);
  if (n - p.window > p.scores_len)
    return fail("prompt_lens of request %lld is %lld, but scores has %lld columns + window %lld",
                (long long)r, n, (long long)p.scores_len, (long long)p.window);
  if (keep > p.out_len)
    return fail("keeps of request %lld is %lld, more than the output holds", (long long)r, keep);
  return 0;
}

// `memory` holds 2 * (n + 1) keys: one is written behind the last.
void select_row(const PyrSelect& p, int64_t r, int64_t g, uint32_t* memory) {
  const float* scores = p.scores + r * p.scores_r + g * p.scores_g;
  int32_t* out = p.out + (r * p.G + g) * p.out_len;
  const int64_t candidates = p.prompt_lens[r] - p.window, keep = p.keeps[r];
  int64_t written = 0;
  for (; written < p.sinks; ++written) out[written] = int32_t(written);
  const int64_t k = keep - p.window - p.sinks, n = candidates - p.sinks;
  if (k == n) {
    for (; written < keep - p.window; ++written) out[written] = int32_t(written);
  } else if (k > 0) {
    choose_largest(scores + p.sinks, n, k, int32_t(p.sinks), memory, out + written);
    written += k;
  }
  for (int64_t i = 0; i < p.window; ++i) out[written++] = int32_t(candidates + i);
  for (; written < p.out_len; ++written) out[written] = -1;
}

}  // namespace
}  // namespace pyr

int pyr_select(const PyrSelect* raw) {
  using namespace pyr;
  const PyrSelect& p = *raw;
  int64_t longest = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    if (int error = check(p, r)) return error;
    longest = std::max<int64_t>(longest, p.prompt_lens[r]);
  }
  std::atomic<bool> out_of_memory{false};
  const auto task = [&](int64_t row) {
    auto* memory = static_cast<uint32_t*>(scratch(Scratch::kWork, (longest + 1) * 2 * 4));
    if (memory)
      select_row(p, row / p.G, row % p.G, memory);
    else
      out_of_memory = true;
  };
  for_each_item(longest * p.R * p.G < 8192 ? 1 : p.threads, p.R * p.G, task);
  return out_of_memory ? fail("no memory to select among %lld keys", (long long)longest) : 0;
}
