// SPDX-License-Identifier: Apache-2.0
// Window scores of a batch: row statistics, then mass, then pooling, each parallel over the batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "runtime.h"

namespace pyr {
namespace {

int check(const PyrScores& p, int64_t r) {
  const long long n = p.prompt_lens[r], end = p.query_ends[r];
  if (n <= p.window)
    return fail("prompt_lens of request %lld is %lld; it must exceed window = %lld", (long long)r,
                n, (long long)p.window);
  if (n - p.window > p.out_len)
    return fail("prompt_lens of request %lld is %lld, more than the output holds", (long long)r, n);
  if (end < p.window || end > p.T)
    return fail("query_ends of request %lld is %lld, outside window = %lld .. %lld rows of query",
                (long long)r, end, (long long)p.window, (long long)p.T);
  return check_table(p.table, p.table_r, r, 0, n, p.N, p.M, p.P);
}

void pool(const PyrScores& p, const float* mass, int64_t n, float* out) {
  const int64_t half = p.kernel_size / 2;
  if (p.pooling == PYR_POOL_NONE || p.kernel_size == 1) {
    memcpy(out, mass, n * sizeof(float));
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t first = std::max<int64_t>(0, i - half), last = std::min(n - 1, i + half);
      float value = mass[first];
      if (p.pooling == PYR_POOL_AVG) {
        for (int64_t j = first + 1; j <= last; ++j) value += mass[j];
        value /= float(p.kernel_size);
      } else {
        for (int64_t j = first + 1; j <= last; ++j)
          if (mass[j] > value || mass[j] != mass[j]) value = mass[j];  // NaN stays
      }
      out[i] = value;
    }
  }
  std::fill(out + n, out + p.out_len, -INFINITY);
}

// Sets the row statistics of one (request, KV head) by its log-sum-exp: the maximum, with sum 1.
void given_stats(const PyrScores& p, int64_t pair, float* out, int64_t rows) {
  const int64_t heads = p.H / p.G, head0 = pair % p.G * heads;
  const int64_t token0 = p.query_ends[pair / p.G] - p.window;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = token0 + r % p.window, head = head0 + r / p.window;
    out[r] = p.log_sum_exp[token * p.H + head] * 1.4426950408889634f;
    out[rows + r] = 1;
  }
}

int run(const PyrScores& p) {
  int64_t longest = 0;
  thread_local std::vector<ScoreItem> kept_items;
  thread_local std::vector<int64_t> kept_first;
  std::vector<ScoreItem>& items = kept_items;
  std::vector<int64_t>& first_of = kept_first;  // first item of each (request, KV head)
  items.clear();
  first_of.clear();
  for (int64_t r = 0; r < p.R; ++r) {
    if (int error = check(p, r)) return error;
    const int32_t n = p.prompt_lens[r];
    longest = std::max<int64_t>(longest, n);
    for (int32_t g = 0; g < p.G; ++g) {
      first_of.push_back(int64_t(items.size()));
      for (int32_t begin = 0; begin < n; begin += kChunkKeys)
        items.push_back({int32_t(r), g, begin, std::min<int32_t>(n, begin + kChunkKeys), 0});
    }
  }
  first_of.push_back(int64_t(items.size()));

  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  const int64_t rows = p.H / p.G * p.window, count = int64_t(items.size()), pairs = p.R * p.G;
  const size_t logits_floats = size_t(rows) * kChunkKeys;  // of an item
  // With the log-sum-exp there is no first phase that could keep them.
  const bool keep =
      !p.log_sum_exp && logits_floats * count * sizeof(float) <= kMaxLogitsBytes;
  const size_t stats_floats = size_t(rows) * 2 * count, mass_floats = size_t(longest) * pairs;
  const size_t shared_floats = stats_floats + mass_floats + (keep ? logits_floats * count : 0);
  float* stats = static_cast<float*>(scratch(Scratch::kShared, shared_floats * sizeof(float)));
  if (!stats) return fail("no memory for %zu floats of window scores", shared_floats);
  float* mass = stats + stats_floats;
  float* logits = keep ? mass + mass_floats : nullptr;
  const size_t scratch_bytes = kernels.score_scratch(p);
  std::atomic<bool> out_of_memory{false};

  const auto phase = [&](auto kernel, bool whole) {
    const auto task = [&, kernel, whole](int64_t i) {
      const ScoreItem& item = items[i];
      const int64_t pair = item.request * p.G + item.kv_head;
      float* item_stats = stats + (whole ? first_of[pair] : i) * rows * 2;
      void* memory = scratch(Scratch::kWork, scratch_bytes);
      if (!memory) {
        out_of_memory = true;
        return;
      }
      kernel(p, item,
             ScoreBuffers{logits ? logits + i * logits_floats : nullptr, item_stats,
                          item_stats + rows, mass + pair * longest},
             memory);
    };
    for_each_item(p.threads, count, task);
  };
  if (!p.log_sum_exp) phase(kernels.score_logits, false);
  const auto join = [&](int64_t pair) {
    float* first = stats + first_of[pair] * rows * 2;
    if (p.log_sum_exp)
      given_stats(p, pair, first, rows);
    else
      join_stats(first, first + rows, first_of[pair + 1] - first_of[pair], 2 * rows, rows);
  };
  for_each_item(rows * count < 4096 ? 1 : p.threads, pairs, join);
  phase(kernels.score_mass, true);
  const auto pooling = [&](int64_t pair) {
    const int64_t n = p.prompt_lens[pair / p.G] - p.window;
    pool(p, mass + pair * longest, n, p.out + pair * p.out_len);
  };
  for_each_item(p.threads, pairs, pooling);
  if (out_of_memory) return fail("no memory for %zu bytes of score scratch", scratch_bytes);
  return 0;
}

}  // namespace

void join_stats(float* max, float* sum, int64_t items, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float most = max[r];
    for (int64_t k = 1; k < items; ++k) most = std::max(most, max[k * stride + r]);
    float total = 0;
    for (int64_t k = 0; k < items; ++k)
      total += sum[k * stride + r] * std::exp2(max[k * stride + r] - most);
    max[r] = most;
    sum[r] = total;
  }
}

}  // namespace pyr

int pyr_window_scores(const PyrScores* p) {
  try {
    return pyr::run(*p);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to plan the window scores of %lld requests", (long long)p->R);
  }
}
