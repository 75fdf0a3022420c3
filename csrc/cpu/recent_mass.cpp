// SPDX-License-Identifier: Apache-2.0
// Attention of the recent queries of a batch to their contexts: rows, then columns, each parallel
// over the batch. Every number is the work of one thread, so any number of threads gives its bits.
#include <algorithm>
#include <new>
#include <vector>

#include "runtime.h"

namespace pyr {
namespace {

constexpr int64_t kItemRows = 96;   // of the first phase: what the kernels take at once
constexpr int64_t kItemKeys = 256;  // of the second; a multiple of kTileKeys

int check(const PyrRecentMass& p, int64_t r) {
  const long long end = p.query_ends[r], length = p.seq_lens[r], skip = p.skips[r];
  const long long recent = p.recents[r], context = p.contexts[r];
  if (recent < 1 || end < recent || end > p.T)
    return fail("recents of request %lld is %lld and its query_ends %lld: outside 1 .. %lld rows",
                (long long)r, recent, end, (long long)p.T);
  if (skip < 0 || context < 0 || recent + context > length - skip)
    return fail("request %lld shows seq_lens %lld - skips %lld keys, fewer than its recents %lld + "
                "contexts %lld",
                (long long)r, length, skip, recent, context);
  if (context > p.out_len)
    return fail("contexts of request %lld is %lld, more than the output holds", (long long)r,
                context);
  return check_table(p.table, p.table_r, r, skip, length, p.N, p.M, p.P);
}

int run(const PyrRecentMass& p) {
  const int64_t heads = p.H / p.G;
  std::vector<RecentItem> rows, keys;
  std::vector<int64_t> first;  // floats of statistics before those of a (request, KV head)
  int64_t floats = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    if (int error = check(p, r)) return error;
    const int32_t count = int32_t(p.recents[r] * heads);
    const int32_t end = p.seq_lens[r] - p.skips[r] - p.recents[r], begin = end - p.contexts[r];
    for (int32_t g = 0; g < p.G; ++g) {
      first.push_back(floats);
      floats += 2 * int64_t(count);
      for (int32_t i = 0; i < count; i += kItemRows)
        rows.push_back({int32_t(r), g, i, std::min<int32_t>(count, i + kItemRows)});
      for (int32_t i = begin; i < end; i += kItemKeys)
        keys.push_back({int32_t(r), g, i, std::min<int32_t>(end, i + kItemKeys)});
    }
  }
  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  const size_t bytes = kernels.recent_scratch(p);
  float* stats = static_cast<float*>(scratch(Scratch::kShared, size_t(floats) * sizeof(float)));
  if (!stats) return fail("no memory for %lld floats of row statistics", (long long)floats);
  std::atomic<bool> out_of_memory{false};
  const auto phase = [&](const std::vector<RecentItem>& items, auto kernel) {
    const auto task = [&](int64_t i) {
      const RecentItem& item = items[i];
      if (void* memory = scratch(Scratch::kWork, bytes))
        kernel(p, item, stats + first[item.request * p.G + item.kv_head], memory);
      else
        out_of_memory = true;
    };
    for_each_item(p.threads, int64_t(items.size()), task);
  };
  phase(rows, kernels.recent_rows);
  phase(keys, kernels.recent_keys);
  if (out_of_memory) return fail("no memory for %zu bytes of recent mass scratch", bytes);
  return 0;
}

}  // namespace
}  // namespace pyr

int pyr_recent_mass(const PyrRecentMass* p) {
  try {
    return pyr::run(*p);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to plan the recent mass of %lld requests", (long long)p->R);
  }
}
