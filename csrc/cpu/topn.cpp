// SPDX-License-Identifier: Apache-2.0
// Attention in which requests may use only their best keys: KCache (arXiv:2404.18057). One thread
// owns a (request, KV head), so results do not depend on the batch or the number of threads.
#include <algorithm>
#include <new>
#include <vector>

#include "radix.h"
#include "runtime.h"

namespace pyr {
namespace {

constexpr int64_t kLanes = 16;  // of the widest vector: rows of logits are written in whole vectors

int64_t first_visible(const PyrAttention& p, int64_t r, int64_t query) {
  const int64_t skip = p.skips[r];
  return p.sliding_window ? std::max<int64_t>(skip, query - p.sliding_window + 1) : skip;
}

// The positions of the `n` largest of logits[lo .. hi - 1], ascending, ties to the lower; all of
// them where there are no more. `keys` holds 2 * (hi - lo + 1).
int64_t best_keys(const float* logits, int64_t lo, int64_t hi, int64_t n, uint32_t* keys,
                  int32_t* best) {
  const int64_t count = hi - lo;
  int64_t written = 0;
  if (count <= n) {
    for (int64_t i = lo; i < hi; ++i) best[written++] = int32_t(i);
    return written;
  }
  for (int64_t i = 0; i < count; ++i) keys[i] = ordered(logits[lo + i]);
  int64_t equal;
  const uint32_t threshold = kth_largest(keys, count, n, keys + count + 1, &equal);
  for (int64_t i = 0; written < n; ++i) {
    bool take = keys[i] > threshold;
    if (keys[i] == threshold && equal) {
      take = true;
      --equal;
    }
    best[written] = int32_t(lo + i);
    written += take;
  }
  return written;
}

struct Layout {
  size_t kernel, logits, keys, best;  // bytes
  int64_t stride;                     // floats of a row of logits
  size_t all() const { return kernel + logits + keys + best; }
};

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Returns how many rows of V were read.
int64_t attend_head(const PyrTopn& t, const Kernels& kernels, const Layout& layout, int32_t r,
                    int32_t g, char* memory) {
  const PyrAttention& p = t.attention;
  const int64_t heads = p.H / p.G, queries = p.query_start[r + 1] - p.query_start[r];
  const int64_t skip = p.skips[r], length = p.seq_lens[r], rows = queries * heads;
  auto* logits = reinterpret_cast<float*>(memory + layout.kernel);
  auto* keys = reinterpret_cast<uint32_t*>(memory + layout.kernel + layout.logits);
  auto* best = reinterpret_cast<int32_t*>(memory + layout.kernel + layout.logits + layout.keys);
  int64_t read = 0;
  for (int64_t row0 = 0; row0 < rows; row0 += kTopnRows) {
    const int64_t count = std::min(kTopnRows, rows - row0);
    const int64_t first_query = length - queries + row0 / heads;
    const int64_t last_query = length - queries + (row0 + count - 1) / heads;
    const int64_t begin = std::max<int64_t>(0, first_visible(p, r, first_query) - skip);
    AttentionItem item{r, g, int32_t(row0), int32_t(count), int32_t(begin / kTileKeys * kTileKeys),
                       int32_t(std::max<int64_t>(0, last_query + 1 - skip)), -1, -1};
    if (item.end > item.begin) kernels.topn_logits(p, item, logits, layout.stride, memory);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = length - queries + (row0 + i) / heads;
      const int64_t lo = first_visible(p, r, query) - skip - item.begin;
      const int64_t hi = query + 1 - skip - item.begin;
      const float* row = logits + i * layout.stride;
      const int64_t found = hi > lo ? best_keys(row, lo, hi, t.top_n[r], keys, best) : 0;
      item.row0 = int32_t(row0 + i);
      kernels.topn_values(p, item, row, best, found, t.renormalize);
      read += found;
    }
    item.row0 = int32_t(row0);
  }
  return read;
}

int run(const PyrTopn& t) {
  const PyrAttention& p = t.attention;
  if (p.table_g) return fail("attention to the best keys takes one table of all KV heads");
  thread_local std::vector<uint8_t> exactly;
  thread_local std::vector<int32_t> chosen;
  exactly.assign(size_t(p.R), 1);
  chosen.clear();
  int64_t longest = 0, most = 0, work = 0;
  for (int64_t r = 0; r < p.R; ++r) {
    const int64_t queries = p.query_start[r + 1] - p.query_start[r], length = p.seq_lens[r];
    if (queries <= 0) continue;
    if (t.top_n[r] < 0) return fail("top_n of request %lld is negative", (long long)r);
    const int64_t visible = length - first_visible(p, r, length - 1);
    if (!t.top_n[r] || t.top_n[r] >= visible) continue;
    exactly[size_t(r)] = 0;
    chosen.push_back(int32_t(r));
    longest = std::max<int64_t>(longest, length - p.skips[r]);
    most = std::max<int64_t>(most, t.top_n[r]);
    work += visible * queries * p.H * p.D;
  }
  if (int error = attend(p, exactly.data())) return error;
  if (t.value_rows)
    for (int64_t r = 0; r < p.R; ++r) {
      const int64_t queries = p.query_start[r + 1] - p.query_start[r], length = p.seq_lens[r];
      if (queries > 0 && exactly[size_t(r)])
        t.value_rows[r] += std::max<int64_t>(0, length - first_visible(p, r, length - queries)) * p.G;
    }
  if (chosen.empty()) return 0;
  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  Layout layout;
  layout.kernel = aligned(kernels.topn_scratch(p));
  // Rows begin at a tile, so they include up to a tile of keys below the window.
  layout.stride = (longest + 2 * kTileKeys + kLanes) / kLanes * kLanes;
  layout.logits = aligned(size_t(kTopnRows * layout.stride) * 4);
  layout.keys = aligned(size_t(2 * (longest + 1)) * 4);
  layout.best = aligned(size_t(most + 1) * 4);
  // `chosen` is thread-local: inside the lambda another thread would read its own.
  const int32_t* requests = chosen.data();
  std::atomic<bool> out_of_memory{false};
  std::vector<std::atomic<int64_t>> read(chosen.size());
  const auto task = [&](int64_t i) {
    auto* memory = static_cast<char*>(scratch(Scratch::kWork, layout.all()));
    if (memory)
      read[size_t(i / p.G)] += attend_head(t, kernels, layout, requests[i / p.G],
                                           int32_t(i % p.G), memory);
    else
      out_of_memory = true;
  };
  for_each_item(work < (1 << 17) ? 1 : p.threads, int64_t(chosen.size()) * p.G, task);
  if (out_of_memory) return fail("no memory for %zu bytes of logits", layout.all());
  if (t.value_rows)
    for (size_t i = 0; i < chosen.size(); ++i) t.value_rows[chosen[i]] += read[i];
  return 0;
}

}  // namespace
}  // namespace pyr

int pyr_topn_attention(const PyrTopn* p) {
  try {
    return pyr::run(*p);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory for the attention of %lld requests", (long long)p->attention.R);
  }
}
