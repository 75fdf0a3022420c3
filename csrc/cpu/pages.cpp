// SPDX-License-Identifier: Apache-2.0
// Chooses the pages that query tokens attend to: summaries of pages, their scores, the best of them.
// One thread owns a (row, KV head), so results do not depend on the batch or the number of threads.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "radix.h"
#include "runtime.h"

namespace pyr {
namespace {

constexpr int64_t kLanes = 16;  // of the widest vector: rows of floats have room for whole vectors
constexpr int64_t kSerialWork = 1 << 16;  // elements below which waking threads costs too much

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t item_size(int64_t dtype) {
  return dtype == PYR_F32 ? 4 : dtype == PYR_BF16 || dtype == PYR_F16 ? 2 : 1;
}

// The pages that a row of a selection sees, as the row of a request's table.
struct Row {
  const int32_t* table;
  int64_t first, visible;  // pages; the last of them is the query's own
  int64_t hidden;          // tokens at the start of the first page that the row does not see
};

template <class Record>
Row row_of(const Record& p, int64_t s) {
  const int64_t first = p.skips[s] / p.N;
  return {p.table + p.requests[s] * p.table_r, first, p.positions[s] / p.N - first + 1,
          p.skips[s] % p.N};
}

template <class Record>
int check_row(const Record& p, int64_t s) {
  const long long request = p.requests[s], position = p.positions[s], skip = p.skips[s];
  if (request < 0 || request >= p.R)
    return fail("requests of row %lld is %lld, but block_table has %lld rows", (long long)s, request,
                (long long)p.R);
  if (skip < 0 || skip > position)
    return fail("skips of row %lld is %lld, outside 0 .. positions = %lld", (long long)s, skip,
                position);
  return check_table(p.table, p.table_r, request, skip, position + 1, p.N, p.M, p.P);
}

int run(const PyrSummaries& p) {
  struct Page {
    int64_t block, from, to;
  };
  thread_local std::vector<Page> pages;
  pages.clear();
  for (int64_t r = 0; r < p.R; ++r) {
    const int64_t start = p.starts[r], length = p.seq_lens[r], skip = p.skips[r];
    if (start < 0 || start > length)
      return fail("starts of request %lld is %lld, outside 0 .. seq_lens = %lld", (long long)r,
                  (long long)start, (long long)length);
    if (skip < 0)
      return fail("skips of request %lld is %lld, below 0", (long long)r, (long long)skip);
    const int64_t first = std::max(start, skip);
    if (first >= length) continue;
    if (int error = check_table(p.table, p.table_r, r, first, length, p.N, p.M, p.P)) return error;
    for (int64_t page = first / p.N; page * p.N < length; ++page)
      pages.push_back({p.table[r * p.table_r + page], std::max<int64_t>(0, skip - page * p.N),
                       std::min(p.N, length - page * p.N)});
  }
  const Kernels& kernels = kernels_for(PYR_F32, p.cache_dtype);
  // `pages` is thread-local: inside the lambda another thread would read its own.
  const Page* all = pages.data();
  const auto task = [&](int64_t i) {
    for (int64_t g = 0; g < p.G; ++g) kernels.summarise(p, all[i].block, g, all[i].from, all[i].to);
  };
  const int64_t count = int64_t(pages.size());
  for_each_item(count * p.G * p.N * p.D < kSerialWork ? 1 : p.threads, count, task);
  return 0;
}

// Extends a query to both rows of a summary, bit for bit: [q, |q|] for a spread, otherwise [what is
// positive, what is negative].
template <class Bits>
void extend(const Bits* query, int64_t D, bool spread, Bits* out) {
  constexpr Bits kSign = Bits(Bits(1) << (sizeof(Bits) * 8 - 1));
  for (int64_t d = 0; d < D; ++d) {
    const Bits q = query[d];
    const bool negative = q & kSign;
    out[d] = spread || !negative ? q : Bits(0);
    out[D + d] = spread ? Bits(q & ~kSign) : negative ? q : Bits(0);
  }
}

struct Layout {
  int64_t kernel, query, logits, out;  // bytes
  int64_t stride;                      // floats of a row of logits
  size_t all() const { return size_t(kernel + query + logits + out); }
};

// Takes the largest of each page's n logits.
void largest_of_pages(float* logits, int64_t pages, int64_t n) {
  for (int64_t page = 0; page < pages; ++page) {
    const float* of = logits + page * n;
    float most = of[0];
    for (int64_t i = 1; i < n; ++i)
      if (of[i] > most || std::isnan(of[i])) most = of[i];
    logits[page] = most;
  }
}

void score_row(const PyrPageScores& p, const Kernels& kernels, const Layout& layout, int64_t s,
               int64_t g, char* memory) {
  const Row row = row_of(p, s);
  const int64_t candidates = row.visible - 1, group = p.H / p.G;
  float* out = p.out + (s * p.G + g) * p.out_len;
  std::fill(out + candidates, out + p.out_len, -INFINITY);
  if (!candidates) return;
  const bool two = p.kind != PYR_SCORE_ROWS, spread = p.kind == PYR_SPREAD;
  const int64_t query_bytes = item_size(p.query_dtype);
  char* extended = memory + layout.kernel;
  auto* logits = reinterpret_cast<float*>(extended + layout.query);
  auto* weights = reinterpret_cast<float*>(extended + layout.query + layout.logits);
  std::fill(weights, weights + (candidates + kLanes - 1) / kLanes * kLanes, 0.0f);
  // The pool as a cache of pages of n tokens and one KV head, of which a single query sees the
  // candidates.
  const int32_t query_start[2] = {0, 1};
  const int32_t seq_len = int32_t((row.first + candidates) * p.n);
  const int32_t skip = int32_t(row.first * p.n);
  PyrAttention one{};
  one.key = one.value = static_cast<const char*>(p.pool) + g * p.pool_g * item_size(p.pool_dtype);
  one.table = row.table;
  one.query_start = query_start;
  one.seq_lens = &seq_len;
  one.skips = &skip;
  one.query_dtype = p.query_dtype;
  one.cache_dtype = p.pool_dtype;
  one.T = one.G = one.R = 1;
  one.D = two ? 2 * p.D : p.D;
  one.N = p.n;
  one.P = p.P;
  one.M = p.M;
  one.query_h = two ? one.D : p.query_h;
  one.key_p = one.value_p = p.pool_p;
  one.key_n = one.value_n = p.pool_n;
  one.scale = p.scale;
  one.soft_cap = p.soft_cap;
  for (int64_t h = 0; h < group; h += kTopnRows) {
    const int64_t heads = std::min(kTopnRows, group - h), head = g * group + h;
    const char* query =
        static_cast<const char*>(p.query) + (s * p.query_t + head * p.query_h) * query_bytes;
    for (int64_t i = 0; two && i < heads; ++i) {
      const char* from = query + i * p.query_h * query_bytes;
      char* to = extended + i * one.D * query_bytes;
      if (query_bytes == 4)
        extend(reinterpret_cast<const uint32_t*>(from), p.D, spread, reinterpret_cast<uint32_t*>(to));
      else
        extend(reinterpret_cast<const uint16_t*>(from), p.D, spread, reinterpret_cast<uint16_t*>(to));
    }
    one.query = two ? extended : query;
    one.H = heads;
    const AttentionItem item{0, 0, 0, int32_t(heads), 0, seq_len - skip, -1, -1};
    kernels.topn_logits(one, item, logits, layout.stride, memory);
    for (int64_t i = 0; p.n > 1 && i < heads; ++i)
      largest_of_pages(logits + i * layout.stride, candidates, p.n);
    kernels.page_weights(p, head, heads, logits, layout.stride, candidates, weights);
  }
  std::copy(weights, weights + candidates, out);
}

int run(const PyrPageScores& p) {
  int64_t most = 0, work = 0;
  for (int64_t s = 0; s < p.S; ++s) {
    if (int error = check_row(p, s)) return error;
    const int64_t candidates = row_of(p, s).visible - 1;
    if (candidates > p.out_len)
      return fail("row %lld has %lld candidates, more than the %lld columns of scores", (long long)s,
                  (long long)candidates, (long long)p.out_len);
    most = std::max(most, candidates);
    work += candidates * p.n * p.H * p.D;
  }
  const Kernels& kernels = kernels_for(p.query_dtype, p.pool_dtype);
  PyrAttention shape{};
  shape.D = p.kind == PYR_SCORE_ROWS ? p.D : 2 * p.D;
  Layout layout;
  layout.kernel = aligned(int64_t(kernels.topn_scratch(shape)));
  layout.query = aligned(kTopnRows * shape.D * item_size(p.query_dtype));
  layout.stride = (most * p.n + 2 * kTileKeys + kLanes) / kLanes * kLanes;
  layout.logits = aligned(kTopnRows * layout.stride * 4);
  layout.out = aligned((most + kLanes) * 4);
  std::atomic<bool> out_of_memory{false};
  const auto task = [&](int64_t i) {
    auto* memory = static_cast<char*>(scratch(Scratch::kWork, layout.all()));
    if (memory)
      score_row(p, kernels, layout, i / p.G, i % p.G, memory);
    else
      out_of_memory = true;
  };
  for_each_item(work < kSerialWork ? 1 : p.threads, p.S * p.G, task);
  return out_of_memory ? fail("no memory for %zu bytes of page scores", layout.all()) : 0;
}

struct Choice {
  int64_t sinks, count;  // pages at the start that are chosen in any case, and all that are chosen
};

Choice choice_of(const PyrPageSelect& p, int64_t s, const Row& row) {
  const int64_t sinks = std::max<int64_t>(p.sinks, row.hidden > 0);
  const int64_t wanted = std::max<int64_t>(p.budgets[s], sinks + p.recent);
  return {sinks, std::min(row.visible, wanted)};
}

int check(const PyrPageSelect& p, int64_t s) {
  if (int error = check_row(p, s)) return error;
  const Row row = row_of(p, s);
  if (p.budgets[s] < 1)
    return fail("budgets of row %lld is %lld, not positive", (long long)s, (long long)p.budgets[s]);
  const int64_t count = choice_of(p, s, row).count;
  if (count > p.out_len)
    return fail("row %lld chooses %lld pages, more than the %lld of out", (long long)s,
                (long long)count, (long long)p.out_len);
  if (count < row.visible && row.visible - 1 > p.scores_len)
    return fail("row %lld has %lld candidates, but scores has %lld columns", (long long)s,
                (long long)(row.visible - 1), (long long)p.scores_len);
  return 0;
}

// `memory` holds 2 * (visible + 1) keys.
void select_row(const PyrPageSelect& p, int64_t s, int64_t g, uint32_t* memory) {
  const Row row = row_of(p, s);
  const Choice choice = choice_of(p, s, row);
  const int64_t count = choice.count;
  int32_t* pages = p.pages + (s * p.G + g) * p.out_len;
  int32_t* blocks = p.blocks + (s * p.G + g) * p.out_len;
  int64_t written = 0;
  if (count == row.visible) {
    for (; written < count; ++written) pages[written] = int32_t(row.first + written);
  } else {
    for (; written < choice.sinks; ++written) pages[written] = int32_t(row.first + written);
    const int64_t k = count - choice.sinks - p.recent, n = row.visible - choice.sinks - p.recent;
    if (k > 0) {
      const float* scores = p.scores + s * p.scores_s + g * p.scores_g + choice.sinks;
      choose_largest(scores, n, k, int32_t(row.first + choice.sinks), memory, pages + written);
      written += k;
    }
    for (int64_t i = row.visible - p.recent; i < row.visible; ++i)
      pages[written++] = int32_t(row.first + i);
  }
  for (int64_t i = 0; i < count; ++i) blocks[i] = row.table[pages[i]];
  std::fill(pages + count, pages + p.out_len, -1);
  std::fill(blocks + count, blocks + p.out_len, 0);
  if (g) return;
  p.counts[s] = int32_t(count);
  p.seq_lens[s] = int32_t((count - 1) * p.N + p.positions[s] % p.N + 1);
  p.hidden[s] = int32_t(row.hidden);
}

int run(const PyrPageSelect& p) {
  int64_t most = 0;
  for (int64_t s = 0; s < p.S; ++s) {
    if (int error = check(p, s)) return error;
    most = std::max(most, row_of(p, s).visible);
  }
  std::atomic<bool> out_of_memory{false};
  const auto task = [&](int64_t i) {
    auto* memory = static_cast<uint32_t*>(scratch(Scratch::kWork, size_t(most + 1) * 2 * 4));
    if (memory)
      select_row(p, i / p.G, i % p.G, memory);
    else
      out_of_memory = true;
  };
  for_each_item(most * p.S * p.G < 8192 ? 1 : p.threads, p.S * p.G, task);
  return out_of_memory ? fail("no memory to select among %lld pages", (long long)most) : 0;
}

}  // namespace
}  // namespace pyr

int pyr_summarise_pages(const PyrSummaries* p) {
  try {
    return pyr::run(*p);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to summarise the pages of %lld requests", (long long)p->R);
  }
}

int pyr_score_pages(const PyrPageScores* p) { return pyr::run(*p); }
int pyr_select_pages(const PyrPageSelect* p) { return pyr::run(*p); }
