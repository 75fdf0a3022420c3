// SPDX-License-Identifier: Apache-2.0
// Requests whose tables begin with the same blocks: their queries attend to these together.
//
// A group's queries become one request with as many queries, all behind the shared keys, so that the
// kernels of prompts and of decoding serve it as they are. Each row's partial result (maximum, weight,
// unnormalised sum) is then copied to its own request, where it is joined with those of the request's
// other keys, as the parts of a split request are (Hydragen, arXiv:2402.05099, section 3.1;
// ChunkAttention, arXiv:2402.15220, section 3.2).
//
// Compiled for the baseline instruction set: only attention.cpp includes this.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime.h"

namespace pyr {

// The requests order[first .. first + count - 1] share their keys 0 .. keys - 1, counted from `skip`.
struct SharedPrefix {
  int64_t first, count;
  int64_t skip, keys;
};

// Rows from which packed tiles of keys, read once for all, are faster than each request's own reads:
// measured on AVX2 and AVX-512, where fewer rows gain only if each request by itself fills so little
// of the registers (kThinRows). With more, its reads of what another request has just fetched cost
// less than packing.
constexpr int64_t kFewestRows = 32, kThinRows = 2;

// Finds the groups of a batch by its tables alone, so that no order of requests changes them.
class PrefixFinder {
 public:
  struct Entry {
    int64_t key;  // what the requests of a run have in common
    int32_t request;
  };
  std::vector<Entry> order;
  std::vector<SharedPrefix> found;

  // Forms disjoint groups that save the most reads of keys, where a group of n requests that share k
  // keys saves (n - 1) * k, of those that share at least `fewest_keys` and have enough rows. Only
  // requests of few rows take part, and only whole pages that lie before all queries of a request;
  // keys come in whole tiles.
  void find(const PyrAttention& p, int64_t fewest_keys) {
    attention_ = &p;
    fewest_keys_ = fewest_keys;
    order.clear();
    found.clear();
    if (p.R < 2 || p.sliding_window || p.table_g) return;
    for (int64_t r = 0; r < p.R; ++r) {
      const int64_t rows = rows_of(r), skip = p.skips[r], pages = pages_before(r);
      if (!rows || rows > kSplitRows || pages * p.N - skip < kTileKeys) continue;
      order.push_back({skip << 32 | row(r)[skip / p.N], int32_t(r)});
    }
    sort(0, int64_t(order.size()));
    each_run(0, int64_t(order.size()), [&](int64_t begin, int64_t end) {
      const int64_t skip = p.skips[order[size_t(begin)].request];
      choose(begin, end, skip, skip / p.N + 1, 0);
    });
  }

 private:
  // Prefixes within prefixes are looked at to this depth, which bounds the time.
  static constexpr int kMostLevels = 8;

  const int32_t* row(int64_t r) const { return attention_->table + r * attention_->table_r; }
  int64_t rows_of(int64_t r) const {
    const PyrAttention& p = *attention_;
    return (p.query_start[r + 1] - p.query_start[r]) * (p.H / p.G);
  }
  // Entries of the request's table that lie wholly before its first query.
  int64_t pages_before(int64_t r) const {
    const PyrAttention& p = *attention_;
    return (p.seq_lens[r] - (p.query_start[r + 1] - p.query_start[r])) / p.N;
  }
  void sort(int64_t begin, int64_t end) {
    std::sort(order.begin() + begin, order.begin() + end, [](const Entry& a, const Entry& b) {
      return a.key != b.key ? a.key < b.key : a.request < b.request;
    });
  }
  template <class Do>
  void each_run(int64_t begin, int64_t end, Do act) {
    for (int64_t i = begin, next; i < end; i = next) {
      for (next = i + 1; next < end && order[size_t(next)].key == order[size_t(i)].key;) ++next;
      if (next - i > 1 && order[size_t(i)].key >= 0) act(i, next);
    }
  }

  // Chooses among order[begin .. end - 1], whose tables agree from the skip up to entry `equal` - 1:
  // all of them as one group, or the groups within them that share more. Returns what is saved.
  int64_t choose(int64_t begin, int64_t end, int64_t skip, int64_t equal, int level) {
    const PyrAttention& p = *attention_;
    int64_t limit = pages_before(order[size_t(begin)].request);
    const int32_t* lead = row(order[size_t(begin)].request);
    int64_t rows = rows_of(order[size_t(begin)].request), most_rows = rows;
    for (int64_t i = begin + 1; i < end; ++i) {
      const int64_t r = order[size_t(i)].request, most = std::min(limit, pages_before(r));
      const int32_t* other = row(r);
      rows += rows_of(r);
      most_rows = std::max(most_rows, rows_of(r));
      int64_t e = equal;
      while (e + 16 <= most && !memcmp(other + e, lead + e, 64)) e += 16;
      while (e < most && other[e] == lead[e]) ++e;
      limit = e;
    }
    const int64_t keys = (limit * p.N - skip) / kTileKeys * kTileKeys;
    const bool pays = keys >= fewest_keys_ && (rows >= kFewestRows || most_rows <= kThinRows);
    const int64_t saved = pays ? (end - begin - 1) * keys : 0;
    const size_t before = found.size();
    if (end - begin > 2 && level < kMostLevels) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = order[size_t(i)].request;
        order[size_t(i)].key = pages_before(r) > limit ? row(r)[limit] : -1;
      }
      sort(begin, end);
      int64_t within = 0;
      each_run(begin, end, [&](int64_t i, int64_t next) {
        within += choose(i, next, skip, limit + 1, level + 1);
      });
      if (within > saved) return within;
      found.resize(before);
    }
    if (saved) found.push_back({begin, end - begin, skip, keys});
    return saved;
  }

  const PyrAttention* attention_ = nullptr;
  int64_t fewest_keys_ = 0;
};

// A request of a group: where its partial results go. KV head g has the slots slot + g * slots ..,
// those of the shared keys first, and the split split + g.
struct SharedMember {
  int64_t keys = 0, parts = 0;  // of the shared prefix; 0: the request is in no group
  int64_t rows = 0;
  int64_t slot = 0, slots = 0, split = 0;
};

// A group as one request of its own.
struct SharedGroup {
  PyrAttention attention;
  int32_t query_start[2], seq_len, skip;
  size_t queries;  // offset of its gathered queries, in bytes
};

// A tile of rows of a group, which are those of some of its requests, over a part of the shared keys.
struct SharedItem {
  int32_t group;
  int32_t first, count;  // requests order[first .. first + count - 1]
  int32_t part;
  AttentionItem item;
};

// The groups of a batch and their items.
struct SharedPlan {
  PrefixFinder finder;
  std::vector<SharedMember> members;  // by request
  std::vector<SharedGroup> groups;
  std::vector<SharedItem> items;
  std::vector<char> queries;
  int64_t max_rows = 0, work = 0, rows = 0;

  void clear() {
    finder.order.clear();
    finder.found.clear();
    members.clear();
    groups.clear();
    items.clear();
    max_rows = work = rows = 0;
  }

  int32_t request(int64_t i) const { return finder.order[size_t(i)].request; }

  // Finds the groups. `part_of(keys)` says how many keys a part of so many has.
  template <class PartOf>
  void find(const PyrAttention& p, int64_t fewest_keys, PartOf part_of) {
    finder.find(p, fewest_keys);
    if (finder.found.empty()) return;
    members.assign(size_t(p.R), {});
    for (const SharedPrefix& prefix : finder.found)
      for (int64_t i = prefix.first; i < prefix.first + prefix.count; ++i) {
        const int64_t r = request(i), part = part_of(prefix.keys);
        SharedMember& member = members[size_t(r)];
        member.keys = prefix.keys;
        member.parts = (prefix.keys + part - 1) / part;
        member.rows = (p.query_start[r + 1] - p.query_start[r]) * (p.H / p.G);
      }
  }

  // Cuts the groups into items of about `tile_rows` rows and gathers their queries. The members'
  // slots and splits must be known.
  template <class PartOf>
  void cut(const PyrAttention& p, int64_t tile_rows, PartOf part_of) {
    const int64_t heads = p.H / p.G;
    size_t bytes = 0;
    for (const SharedPrefix& prefix : finder.found) {
      const int64_t part = part_of(prefix.keys), end = prefix.first + prefix.count;
      int64_t all = 0;
      for (int64_t i = prefix.first; i < end; ++i) all += members[size_t(request(i))].rows;
      const int64_t tiles = (all + tile_rows - 1) / tile_rows, most = (all + tiles - 1) / tiles;
      const int32_t group = int32_t(groups.size());
      int64_t row0 = 0, count;
      for (int64_t i = prefix.first; i < end; i += count) {
        int64_t tile = 0;
        for (count = 0; i + count < end && tile < most; ++count)
          tile += members[size_t(request(i + count))].rows;
        max_rows = std::max(max_rows, tile);
        for (int64_t g = 0; g < p.G; ++g)
          for (int64_t begin = 0, k = 0; begin < prefix.keys; begin += part, ++k)
            items.push_back({group, int32_t(i), int32_t(count), int32_t(k),
                             {0, int32_t(g), int32_t(row0), int32_t(tile), int32_t(begin),
                              int32_t(std::min(prefix.keys, begin + part)), 0, -1}});
        row0 += tile;
      }
      work += prefix.keys * all * p.G * p.D;
      rows += all * p.G;
      const int32_t queries = int32_t(all / heads);
      groups.push_back({p, {0, queries}, int32_t(prefix.skip + prefix.keys + queries),
                        int32_t(prefix.skip), bytes});
      bytes += size_t(queries) * size_t(p.H * p.D) * query_bytes(p);
    }
    gather(p, bytes);
  }

 private:
  static size_t query_bytes(const PyrAttention& p) { return p.query_dtype == PYR_F32 ? 4 : 2; }

  void gather(const PyrAttention& p, size_t bytes) {
    if (queries.size() < bytes) queries.resize(bytes);
    const size_t size = query_bytes(p), head_bytes = size_t(p.D) * size;
    for (size_t n = 0; n < groups.size(); ++n) {
      SharedGroup& group = groups[n];
      const SharedPrefix& prefix = finder.found[n];
      char* to = queries.data() + group.queries;
      for (int64_t i = prefix.first; i < prefix.first + prefix.count; ++i) {
        const int64_t r = request(i);
        for (int64_t t = p.query_start[r]; t < p.query_start[r + 1]; ++t)
          for (int64_t h = 0; h < p.H; ++h, to += head_bytes)
            memcpy(to, static_cast<const char*>(p.query) + size_t(t * p.query_t + h * p.query_h) * size,
                   head_bytes);
      }
      PyrAttention& as_one = group.attention;
      as_one.query = queries.data() + group.queries;
      as_one.query_t = p.H * p.D;
      as_one.query_h = p.D;
      as_one.T = group.query_start[1];
      as_one.R = 1;
      as_one.table = p.table + request(prefix.first) * p.table_r;
      as_one.query_start = group.query_start;
      as_one.seq_lens = &group.seq_len;
      as_one.skips = &group.skip;
      as_one.log_sum_exp = nullptr;
      as_one.out = nullptr;  // every row's result goes to its request's slots
    }
  }
};

}  // namespace pyr
