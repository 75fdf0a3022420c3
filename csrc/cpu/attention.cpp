// SPDX-License-Identifier: Apache-2.0
// Checks a batch, cuts it into items and runs them.
//
// How a request is cut depends on that request alone (not on the batch, not on the number of
// threads), so its result has the same bits in every batch. Requests that read shared pages together
// (attention_shared.h) are cut by what they share, too.
#include <algorithm>
#include <new>
#include <vector>

#include "attention_shared.h"

namespace pyr {
namespace {

// Rows of a tile of a prompt: enough to pay for packing each tile of keys. Prompts of many rows have
// enough tiles for every thread, and pack half as often.
constexpr int64_t kPromptRows = 240, kManyRows = 4096;
// Keys of a part of a split request, or of a shared prefix: at least this, and at most kMaxParts parts.
// Of a prefix every request has a partial result for each part.
constexpr int64_t kPartKeys = 512, kSharedPartKeys = 1024;
constexpr int64_t kMaxParts = 16;
// Multiply-adds below which waking the other threads costs more than they help.
constexpr int64_t kSerialWork = 1 << 17;

int64_t align_down(int64_t x) { return x / kTileKeys * kTileKeys; }

// Keys of a part of a split request of `keys` keys.
int64_t part_of(int64_t keys) {
  return std::max(kPartKeys, align_down((keys + kMaxParts - 1) / kMaxParts + kTileKeys - 1));
}

// Keys of a part of a shared prefix of `keys` keys.
int64_t shared_part_of(int64_t keys) { return std::max(kSharedPartKeys, part_of(keys)); }

struct Split {
  int64_t first_item, parts;
  int64_t shared;  // parts in front of those of the items: of keys that other requests share
  std::atomic<int64_t> left;
  Split(int64_t item, int64_t count, int64_t of_group)
      : first_item(item), parts(count), shared(of_group), left(count) {}
  Split(const Split& other)
      : first_item(other.first_item), parts(other.parts), shared(other.shared), left(other.parts) {}
};

// Rows that were served with others' since the library was loaded.
std::atomic<int64_t> shared_rows{0};

struct Plan {
  std::vector<AttentionItem> items;
  std::vector<Split> splits;
  SharedPlan shared;
  int64_t slots = 0, slot_rows = 0, max_rows = 1, work = 0;
};

int check(const PyrAttention& p, int64_t r) {
  const long long begin = p.query_start[r], end = p.query_start[r + 1];
  const long long length = p.seq_lens[r], skip = p.skips[r];
  if (begin < 0 || end < begin || end > p.T)
    return fail("query_start_loc of request %lld is %lld .. %lld, but query has %lld rows",
                (long long)r, begin, end, (long long)p.T);
  if (end == begin) return 0;
  if (length < end - begin)
    return fail("request %lld has %lld queries but seq_lens says %lld tokens", (long long)r,
                end - begin, length);
  if (skip < 0 || skip > length)
    return fail("skips of request %lld is %lld, outside 0 .. seq_lens = %lld", (long long)r, skip,
                length);
  int64_t first = skip;
  if (p.sliding_window) first = std::max<int64_t>(skip, length - (end - begin) - p.sliding_window + 1);
  for (int64_t g = 0; g < (p.table_g ? p.G : 1); ++g)
    if (int error = check_table(p.table + g * p.table_g, p.table_r, r, first, length, p.N, p.M, p.P))
      return error;
  return 0;
}

// Plans what a request attends to by itself. `member` describes its group; null: it is in none.
void plan_request(const PyrAttention& p, int64_t r, Plan& plan, SharedMember* member = nullptr) {
  const int64_t heads = p.H / p.G, queries = p.query_start[r + 1] - p.query_start[r];
  const int64_t length = p.seq_lens[r] - p.skips[r], rows = queries * heads;
  if (!rows) return;
  const bool split = rows <= kSplitRows;
  const int64_t tile_rows = rows < kManyRows ? kPromptRows : 2 * kPromptRows;
  const int64_t tile_queries = split ? queries : std::max<int64_t>(1, tile_rows / heads);
  for (int64_t q = 0; q < queries; q += tile_queries) {
    const int64_t count = std::min(tile_queries, queries - q);
    const int64_t first = length - queries + q;  // local position of the tile's first query
    const int64_t end = std::max<int64_t>(0, first + count);
    int64_t begin = member ? member->keys : 0;
    if (p.sliding_window) begin = align_down(std::max<int64_t>(0, first - p.sliding_window + 1));
    const int64_t keys = std::max<int64_t>(0, end - begin);
    const int64_t part = split ? part_of(keys) : keys;
    const int64_t shared = member ? member->parts : 0, own = keys ? (keys + part - 1) / part : 1;
    const int64_t parts = shared + own;
    if (member) {
      member->slot = plan.slots;
      member->slots = parts;
      member->split = int64_t(plan.splits.size());
    }
    if (parts > 1) plan.slot_rows = std::max(plan.slot_rows, rows);
    plan.max_rows = std::max(plan.max_rows, count * heads);
    plan.work += keys * count * p.H * p.D;
    for (int64_t g = 0; g < p.G; ++g) {
      const int64_t group = parts > 1 ? int64_t(plan.splits.size()) : -1;
      if (parts > 1) plan.splits.emplace_back(int64_t(plan.items.size()), parts, shared);
      plan.slots += shared;
      for (int64_t k = 0; k < own; ++k)
        plan.items.push_back({int32_t(r), int32_t(g), int32_t(q * heads), int32_t(count * heads),
                              int32_t(begin + k * part), int32_t(std::min(end, begin + (k + 1) * part)),
                              parts > 1 ? int32_t(plan.slots++) : -1, int32_t(group)});
    }
  }
}

struct Context {
  const PyrAttention& p;
  const Kernels& kernels;
  Plan& plan;
  Partials partials;
  size_t scratch_bytes, all_bytes;
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};

  // Takes note of a finished part, and joins all of them if it was the last.
  void finish_part(int64_t group, void* memory) {
    Split& split = plan.splits[size_t(group)];
    if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    AttentionItem first = plan.items[size_t(split.first_item)];
    first.slot -= int32_t(split.shared);
    kernels.merge(p, first, split.parts, partials, memory);
  }

  // Attends to shared keys and copies each row's result to its request.
  void run_shared(const SharedItem& shared, void* memory) {
    SharedPlan& all = plan.shared;
    float* rows = reinterpret_cast<float*>(static_cast<char*>(memory) + scratch_bytes);
    kernels.attention(all.groups[size_t(shared.group)].attention, shared.item, nullptr, {rows, 0},
                      memory);
    for (int64_t i = shared.first; i < shared.first + shared.count; ++i) {
      const SharedMember& member = all.members[size_t(all.request(i))];
      const int64_t slot = member.slot + shared.item.kv_head * member.slots + shared.part;
      const size_t floats = partial_floats(member.rows, p.D);
      memcpy(partials.slot(slot), rows, floats * sizeof(float));
      rows += floats;
      finish_part(member.split + shared.item.kv_head, memory);
    }
  }
};

}  // namespace

int attend(const PyrAttention& p, const uint8_t* exactly, int64_t fewest_keys) {
  if (int error = check_attention(p)) return error;
  thread_local Plan plan;
  SharedPlan& shared = plan.shared;
  plan.items.clear();
  plan.splits.clear();
  shared.clear();
  plan.slots = plan.slot_rows = plan.work = 0;
  plan.max_rows = 1;
  if (fewest_keys) shared.find(p, fewest_keys, shared_part_of);
  // Prompts first and their last (longest) tiles first, so that no thread is left with a long one.
  bool prompts = false;
  for (int64_t r = 0; r < p.R; ++r)
    if ((p.query_start[r + 1] - p.query_start[r]) * (p.H / p.G) > kSplitRows &&
        (!exactly || exactly[r])) {
      plan_request(p, r, plan);
      prompts = true;
    }
  if (prompts)
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const AttentionItem& a, const AttentionItem& b) {
                       return int64_t(a.end - a.begin) * a.rows > int64_t(b.end - b.begin) * b.rows;
                     });
  for (int64_t r = 0; r < p.R; ++r)
    if ((p.query_start[r + 1] - p.query_start[r]) * (p.H / p.G) <= kSplitRows &&
        (!exactly || exactly[r])) {
      SharedMember* member = shared.members.empty() ? nullptr : &shared.members[size_t(r)];
      plan_request(p, r, plan, member && member->parts ? member : nullptr);
    }
  if (plan.items.empty()) return 0;
  shared.cut(p, kPromptRows, shared_part_of);
  plan.max_rows = std::max(plan.max_rows, shared.max_rows);
  plan.work += shared.work;
  shared_rows += shared.rows;

  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  const size_t scratch_bytes = kernels.attention_scratch(p, plan.max_rows);
  // Without parts this asks for nothing, so that what an eviction left is given back in time.
  const size_t slot_floats = partial_floats(plan.slot_rows, p.D);
  const Partials partials{
      static_cast<float*>(scratch(Scratch::kShared, plan.slots * slot_floats * sizeof(float))),
      slot_floats};
  if (plan.slots && !partials.memory)
    return fail("no memory for the partial results of %lld parts", (long long)plan.slots);
  const size_t of_rows = shared.max_rows ? partial_floats(shared.max_rows, p.D) * sizeof(float) : 0;
  Context context{p, kernels, plan, partials, scratch_bytes, scratch_bytes + of_rows};
  auto body = [](void* raw) {
    auto& c = *static_cast<Context*>(raw);
    void* memory = scratch(Scratch::kWork, c.all_bytes);
    if (!memory) {
      c.out_of_memory = true;
      return;
    }
    // Shared keys first: many requests wait for them.
    const int64_t groups = int64_t(c.plan.shared.items.size());
    const int64_t count = groups + int64_t(c.plan.items.size());
    int64_t i = c.next.fetch_add(1, std::memory_order_relaxed);
    while (i < count) {
      const int64_t then = c.next.fetch_add(1, std::memory_order_relaxed);
      if (i < groups) {
        c.run_shared(c.plan.shared.items[size_t(i)], memory);
      } else {
        const AttentionItem& item = c.plan.items[size_t(i - groups)];
        c.kernels.attention(c.p, item, then < count ? &c.plan.items[size_t(then - groups)] : nullptr,
                            c.partials, memory);
        if (item.group >= 0) c.finish_part(item.group, memory);
      }
      i = then;
    }
  };
  const bool serial = plan.items.size() == 1 || plan.work < kSerialWork;
  parallel(serial ? 1 : p.threads, body, &context);
  if (context.out_of_memory)
    return fail("no memory for %zu bytes of attention scratch", context.all_bytes);
  return 0;
}

int check_attention(const PyrAttention& p) {
  for (int64_t r = 0; r < p.R; ++r)
    if (int error = check(p, r)) return error;
  return 0;
}

}  // namespace pyr

int pyr_paged_attention(const PyrAttention* p) {
  try {
    return pyr::attend(*p, nullptr);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to plan the attention of %lld requests", (long long)p->R);
  }
}

int pyr_shared_attention(const PyrShared* p) {
  if (p->fewest_keys < 1)
    return pyr::fail("fewest_keys is %lld, below 1", (long long)p->fewest_keys);
  try {
    return pyr::attend(p->attention, nullptr, p->fewest_keys);
  } catch (const std::bad_alloc&) {
    return pyr::fail("no memory to plan the attention of %lld requests", (long long)p->attention.R);
  }
}

int64_t pyr_shared_rows() { return pyr::shared_rows; }
