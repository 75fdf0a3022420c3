// SPDX-License-Identifier: Apache-2.0
// Scores of `observed_expected` of a batch: one pass over K and V in items of keys, then the weights by
// the statistics of whole rows, then pooling and shares. Items follow from a request's own length, and
// sums have one order, so neither the batch nor the number of threads changes a bit.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "runtime.h"

namespace pyr {
namespace {

constexpr float kLeastSum = 1e-30f;  // LEAST_SUM of reference.py

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

int check(const PyrObservedExpected& e, int64_t r) {
  const PyrScores& p = e.scores;
  const long long n = p.prompt_lens[r], start = e.starts ? e.starts[r] : 0, end = p.query_ends[r];
  if (start < 0 || n - start < p.window)
    return fail("request %lld holds the tokens %lld .. prompt_lens = %lld, which are fewer than its "
                "%lld queries, or begin below 0",
                (long long)r, start, n, (long long)p.window);
  if (n > p.out_len)
    return fail("prompt_lens of request %lld is %lld, more than the output holds", (long long)r, n);
  if (end < p.window || end > p.T)
    return fail("query_ends of request %lld is %lld, outside window = %lld .. %lld rows of query",
                (long long)r, end, (long long)p.window, (long long)p.T);
  return check_table(p.table, p.table_r, r, start, n, p.N, p.M, p.P);
}

// What a sum of scores divides: 1e-30 at least. NaN stays.
float divisor(double sum) { return float(sum) < kLeastSum ? kLeastSum : float(sum); }

// Pools the attention that the window gave, and adds the shares of both kinds of attention. There are
// half a kernel of floats in front of mass[0] and behind mass[n - 1].
void finish(const PyrObservedExpected& e, int64_t n, float* mass, const float* expected, float* out) {
  const int64_t half = e.scores.kernel_size / 2, first = std::min(e.first, n);
  const int64_t last = std::max(first, n - e.last);
  std::fill(out, out + first, 0.0f);
  std::fill(out + last, out + n, 0.0f);
  if (first == last) return;
  std::fill(mass - half, mass, 0.0f);
  std::fill(mass + last, mass + last + half, 0.0f);
  double observed_sum = 0, expected_sum = 0;
  constexpr int64_t kTogether = 64;
  for (int64_t i = first; i < last; i += kTogether) {
    float sums[kTogether] = {};
    const int64_t count = std::min(kTogether, last - i);
    for (int64_t j = -half; j <= half; ++j) {
      const float* from = mass + i + j;
      if (count == kTogether)
        for (int64_t k = 0; k < kTogether; ++k) sums[k] += from[k];
      else
        for (int64_t k = 0; k < count; ++k) sums[k] += from[k];
    }
    for (int64_t k = 0; k < count; ++k) {
      out[i + k] = sums[k] / float(e.scores.kernel_size);
      observed_sum += out[i + k];
    }
  }
  const float observed = divisor(observed_sum);
  if (!e.future) {
    for (int64_t i = first; i < last; ++i) out[i] /= observed;
    return;
  }
  for (int64_t i = first; i < last; ++i) expected_sum += expected[i];
  const float whole = divisor(expected_sum), weight = float(e.expected);
  for (int64_t i = first; i < last; ++i)
    out[i] = out[i] / observed + weight * (expected[i] / whole);
}

int run(const PyrObservedExpected& e) {
  const PyrScores& p = e.scores;
  const int64_t heads = p.H / p.G, rows = heads * p.window, whole = whole_rows(rows);
  std::vector<ScoreItem> items;
  std::vector<int64_t> first_of;  // first item of each (request, KV head)
  int64_t longest = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    if (int error = check(e, r)) return error;
    const int32_t start = e.starts ? e.starts[r] : 0, n = p.prompt_lens[r] - start;
    longest = std::max<int64_t>(longest, n);
    for (int32_t g = 0; g < p.G; ++g) {
      first_of.push_back(int64_t(items.size()));
      for (int32_t begin = 0; begin < n; begin += kChunkKeys)
        items.push_back({int32_t(r), g, begin, std::min<int32_t>(n, begin + kChunkKeys), start});
    }
  }
  first_of.push_back(int64_t(items.size()));

  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  const int64_t count = int64_t(items.size()), pairs = p.R * p.G;
  const int64_t stats_floats = 2 * (whole + whole_rows(heads));
  const size_t weight_floats = size_t(kChunkKeys / kTileKeys) * (rows * kTileKeys + whole);
  const bool keep = weight_floats * count * sizeof(float) <= kMaxLogitsBytes;
  const int64_t stride = round_up(longest, kTileKeys), pad = round_up(p.kernel_size / 2, 16);
  const size_t pair_floats = size_t(2 * pad + stride + (e.future ? heads + 1 : 1) * stride);
  const size_t floats =
      size_t(stats_floats) * count + pair_floats * pairs + (keep ? weight_floats * count : 0);
  float* stats = static_cast<float*>(scratch(Scratch::kShared, floats * sizeof(float)));
  if (!stats) return fail("no memory for %zu floats of scores", floats);
  float* const of_pairs = stats + size_t(stats_floats) * count;
  float* const weights = of_pairs + pair_floats * pairs;
  const size_t scratch_bytes = kernels.expected_scratch(e);
  std::atomic<bool> out_of_memory{false};

  const auto buffers = [&](int64_t pair, int64_t item, bool all) {
    ExpectedBuffers b;
    b.weights = keep ? weights + weight_floats * item : nullptr;
    b.row_max = stats + stats_floats * (all ? first_of[pair] : item);
    b.row_sum = b.row_max + whole;
    b.head_max = b.row_sum + whole;
    b.head_sum = b.head_max + whole_rows(heads);
    b.mass = of_pairs + pair_floats * pair + pad;
    b.expected = b.mass + stride + pad;
    b.logits = b.expected + stride;
    b.stride = stride;
    return b;
  };
  const auto phase = [&](auto kernel, bool all) {
    const auto task = [&, kernel, all](int64_t i) {
      const ScoreItem& item = items[i];
      if (void* memory = scratch(Scratch::kWork, scratch_bytes))
        kernel(e, item, buffers(item.request * p.G + item.kv_head, i, all), memory);
      else
        out_of_memory = true;
    };
    for_each_item(p.threads, count, task);
  };
  phase(kernels.expected_logits, false);
  const auto join = [&](int64_t pair) {
    const int64_t parts = first_of[pair + 1] - first_of[pair];
    const ExpectedBuffers b = buffers(pair, first_of[pair], true);
    join_stats(b.row_max, b.row_sum, parts, stats_floats, rows);
    if (e.future) join_stats(b.head_max, b.head_sum, parts, stats_floats, heads);
  };
  for_each_item(rows * count < 4096 ? 1 : p.threads, pairs, join);
  phase(kernels.expected_mass, true);
  const auto finishing = [&](int64_t pair) {
    const int64_t r = pair / p.G, start = e.starts ? e.starts[r] : 0, n = p.prompt_lens[r];
    const ExpectedBuffers b = buffers(pair, first_of[pair], true);
    float* out = p.out + pair * p.out_len;
    std::fill(out, out + start, -INFINITY);
    std::fill(out + n, out + p.out_len, -INFINITY);
    finish(e, n - start, b.mass, b.expected, out + start);
  };
  for_each_item(p.threads, pairs, finishing);
  if (out_of_memory) return fail("no memory for %zu bytes of score scratch", scratch_bytes);
  return 0;
}

}  // namespace
}  // namespace pyr

int pyr_observed_expected(const PyrObservedExpected* e) {
  try {
    return pyr::run(*e);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to plan the scores of %lld requests", (long long)e->scores.R);
  }
}
