// SPDX-License-Identifier: Apache-2.0
// The C ABI between the shared library and vllm_pyramid/kernels/cpu/structs.py.
//
// Every function takes one packed record of 8-byte fields, so that a call costs one pointer
// instead of thirty converted arguments. Each record has a class of the same name and fields in
// structs.py. Loading the library compares `pyr_abi_version`, and every record field by field.
// Strides are in elements. Functions return 0, or nonzero with the reason in `pyr_last_error()`.
// vllm_pyramid/kernels/contract.py documents what each function computes.
//
// Letters: R requests, T query tokens, H query heads, G KV heads, D head size, N tokens of a block,
// P physical blocks, M table entries of a request, S query tokens that choose pages (rows).
//
// `log_sum_exp` never includes the sinks; they are added where weights are computed.
#pragma once
#include <cstdint>

#define PYR_ABI_VERSION 15
#define PYR_EXPORT extern "C" __attribute__((visibility("default")))
// Defines a struct, and the text of its definition (without comments) as <name>_fields.
#define PYR_RECORD(name, ...)  \
  struct name {                \
    __VA_ARGS__                \
  };                           \
  constexpr char name##_fields[] = #__VA_ARGS__

// Only caches have the last two types. Their numbers are multiplied by a scale: that of the keys is
// part of `scale`, that of the values is `value_scale`.
enum PyrDtype : int64_t { PYR_F32 = 0, PYR_BF16 = 1, PYR_F16 = 2, PYR_E4M3 = 3, PYR_E5M2 = 4 };

PYR_RECORD(PyrAttention,
  void* out;
  const void* query;
  const void* key;
  const void* value;
  const int32_t* table;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* skips;
  const void* sinks;   // [H] or null
  float* log_sum_exp;  // [T, H], contiguous, or null; each function says whether it reads or writes it
  int64_t out_dtype, query_dtype, cache_dtype, sinks_dtype;
  int64_t T, H, G, D, N, P, R, M;
  int64_t out_t, out_h, query_t, query_h;
  int64_t key_p, key_g, key_n, value_p, value_g, value_n, table_r;
  int64_t table_g;  // 0: one table for all KV heads; otherwise pyr_paged_attention alone takes it
  int64_t sliding_window, threads;
  double scale, soft_cap, value_scale;
);

enum PyrMassKind : int64_t { PYR_MASS_SUM = 0, PYR_MASS_BELOW_AVERAGE = 1 };

// Adds to mass[block, g, offset] what the queries of a batch give the key there. `attention.out` and
// `attention.value` are not used; `log_sum_exp` is read unless it is null, and saves a pass.
PYR_RECORD(PyrKeyMass,
  PyrAttention attention;
  float* mass;                   // [P, G, N], unit stride in N
  const int32_t* first_queries;  // [R]: positions below it add nothing; null: all queries add
  int64_t mass_p, mass_g, kind;
);

// A batch as for pyr_paged_attention, in which some requests use only their best keys.
PYR_RECORD(PyrTopn,
  PyrAttention attention;
  const int32_t* top_n;  // [R]; 0, or at least the number of visible keys: use all of them
  int64_t* value_rows;   // [R], increased by the rows of V that were needed; or null
  int64_t renormalize;
);

// A batch as for pyr_paged_attention, in which requests whose tables begin with the same blocks read
// these together, from `fewest_keys` keys on (at least 1) and where they have rows enough.
PYR_RECORD(PyrShared,
  PyrAttention attention;
  int64_t fewest_keys;
);

enum PyrReduce : int64_t { PYR_MEAN = 0, PYR_MAX = 1, PYR_SUM = 2 };
enum PyrPooling : int64_t { PYR_POOL_AVG = 0, PYR_POOL_MAX = 1, PYR_POOL_NONE = 2 };

PYR_RECORD(PyrScores,
  float* out;                // [R, G, out_len], contiguous
  const float* log_sum_exp;  // [T, H], contiguous, of the last `window` queries of each; or null
  const void* query;
  const void* key;
  const int32_t* table;
  const int32_t* query_ends;
  const int32_t* prompt_lens;
  const void* sinks;  // [H] or null
  int64_t query_dtype, cache_dtype, sinks_dtype;
  int64_t T, H, G, D, N, P, R, M, out_len;
  int64_t query_t, query_h, key_p, key_g, key_n, table_r;
  int64_t window, reduce, pooling, kernel_size, threads;
  double scale, soft_cap;
);

// Scores by two sums over the keys starts[r] .. prompt_lens[r] - 1 of a request, of which `first` in
// front and `last` behind get 0. `scores.out` is [R, G, out_len] over all places; the log-sum-exp, the
// reduction and the kind of pooling are not used.
PYR_RECORD(PyrObservedExpected,
  PyrScores scores;
  const void* value;
  const float* future;    // [R, H, window, D], contiguous; null: no second sum
  const int32_t* starts;  // [R] or null: 0
  int64_t value_p, value_g, value_n, first, last;
  double expected;
);

// Row i of cos_sin holds the cosines of position i, and then its sines: `rotated` numbers, 0 where there
// is no embedding.
PYR_RECORD(PyrFutureQueries,
  float* out;  // [R, H, window, D], contiguous
  const void* query;
  const void* cos_sin;
  const int32_t* query_ends;
  const int32_t* last_positions;
  int64_t query_dtype, cos_sin_dtype;
  int64_t T, H, D, R, window, positions, rows, rotated, halves;
  int64_t query_t, query_h, cos_sin_t, threads;
);

// The mean of the softmax over the last recents[r] queries, weighted towards the later ones, for the
// contexts[r] keys before them.
PYR_RECORD(PyrRecentMass,
  float* out;                // [R, G, out_len], contiguous
  const float* log_sum_exp;  // [T, H], contiguous, of the recent queries; or null
  const void* query;
  const void* key;
  const int32_t* table;
  const int32_t* query_ends;
  const int32_t* seq_lens;
  const int32_t* skips;
  const int32_t* recents;
  const int32_t* contexts;
  const void* sinks;  // [H] or null
  int64_t query_dtype, cache_dtype, sinks_dtype;
  int64_t T, H, G, D, N, P, R, M, out_len;
  int64_t query_t, query_h, key_p, key_g, key_n, table_r, threads;
  double scale, soft_cap, distance_weight;
);

PYR_RECORD(PyrSelect,
  int32_t* out;  // [R, G, out_len], contiguous
  const float* scores;
  const int32_t* prompt_lens;
  const int32_t* keeps;
  int64_t R, G, out_len, scores_len, scores_r, scores_g, window, sinks, threads;
);

PYR_RECORD(PyrCompact,
  void* key;
  void* value;
  const int32_t* table;
  const int32_t* kept;
  const int32_t* prompt_lens;
  const int32_t* keeps;
  int64_t item_size, G, D, N, P, R, M, kept_len;
  int64_t key_p, key_g, key_n, value_p, value_g, value_n, table_r, kept_r, kept_g, threads;
);

// Rows are copied; for a cache of 8-bit floats they are divided by a scale and rounded.
PYR_RECORD(PyrCacheWrite,
  const void* key;
  const void* value;
  void* key_cache;
  void* value_cache;
  const int64_t* slots;
  int64_t source_dtype, cache_dtype;  // ignored if rows are copied
  int64_t item_size, T, G, D, N, P;   // item_size: bytes of an element of the cache
  int64_t key_t, key_h, value_t, value_h;
  int64_t key_p, key_g, key_n, value_p, value_g, value_n, threads;
  double key_scale, value_scale;
);

enum PyrSummaryKind : int64_t { PYR_BOX = 0, PYR_SPREAD = 1 };

// Summaries of the pages that hold the positions starts[r] .. seq_lens[r] - 1.
PYR_RECORD(PyrSummaries,
  void* summaries;  // [P, G, 2 * D], unit stride in the last
  const void* key;
  const int32_t* table;
  const int32_t* starts;
  const int32_t* seq_lens;
  const int32_t* skips;
  int64_t kind, cache_dtype, summary_dtype;
  int64_t G, D, N, P, R, M;
  int64_t key_p, key_g, key_n, summary_p, summary_g, table_r, threads;
);

// The first two are PyrSummaryKind. The other takes the largest product with the n rows of a page.
enum PyrScoreKind : int64_t { PYR_SCORE_ROWS = 2 };
enum PyrCombine : int64_t { PYR_COMBINE_MEAN = 0, PYR_COMBINE_MAX = 1 };

PYR_RECORD(PyrPageScores,
  float* out;  // [S, G, out_len], contiguous
  const void* query;
  const void* pool;  // [P, G, n, width]
  const int32_t* table;
  const int32_t* requests;
  const int32_t* positions;
  const int32_t* skips;
  const void* sinks;  // [H] or null
  int64_t kind, combine, query_dtype, pool_dtype, sinks_dtype;
  int64_t S, H, G, D, N, P, R, M, n, out_len;
  int64_t query_t, query_h, pool_p, pool_g, pool_n, table_r, threads;
  double scale, soft_cap;
);

PYR_RECORD(PyrPageSelect,
  int32_t* blocks;  // [S, G, out_len], contiguous, as `pages`
  int32_t* pages;
  int32_t* counts;    // [S], as the next two
  int32_t* seq_lens;
  int32_t* hidden;
  const float* scores;
  const int32_t* table;
  const int32_t* requests;
  const int32_t* positions;
  const int32_t* skips;
  const int32_t* budgets;
  int64_t S, G, N, P, R, M, out_len, scores_len, scores_s, scores_g, table_r;
  int64_t sinks, recent, threads;
);

PYR_EXPORT int64_t pyr_abi_version();
// The size in bytes of a record such as "PyrAttention", and the text of its fields as the compiler
// saw them ("void* out; const void* query; ..."); -1 and null if no record has that name.
PYR_EXPORT int64_t pyr_record_size(const char* name);
PYR_EXPORT const char* pyr_record_fields(const char* name);
PYR_EXPORT const char* pyr_last_error();
// Chooses an instruction set by name ("amx", "avx512bf16", "avx512", "avx2", "portable"), or with
// null the best of this CPU. Returns nonzero if the CPU or the build lacks the one named.
PYR_EXPORT int pyr_set_isa(const char* name);
PYR_EXPORT const char* pyr_isa();
// Takes the address of GOMP_parallel in the OpenMP runtime of the process; null: run serially.
PYR_EXPORT void pyr_set_parallel(void* gomp_parallel);
// Returns the bytes of scratch memory of all threads; with `most`, the most since the last call with
// it, which counts anew from here.
PYR_EXPORT int64_t pyr_scratch_bytes(int64_t most);

// Also writes `log_sum_exp` unless it is null: over each query's visible logits, without the sink.
PYR_EXPORT int pyr_paged_attention(const PyrAttention* p);
PYR_EXPORT int pyr_shared_attention(const PyrShared* p);
// Returns the rows (query tokens x query heads) that read shared pages together with others, summed
// over all calls since the library was loaded.
PYR_EXPORT int64_t pyr_shared_rows();
PYR_EXPORT int pyr_key_mass(const PyrKeyMass* p);
PYR_EXPORT int pyr_topn_attention(const PyrTopn* p);
PYR_EXPORT int pyr_window_scores(const PyrScores* p);
PYR_EXPORT int pyr_future_queries(const PyrFutureQueries* p);
PYR_EXPORT int pyr_observed_expected(const PyrObservedExpected* p);
PYR_EXPORT int pyr_recent_mass(const PyrRecentMass* p);
PYR_EXPORT int pyr_select(const PyrSelect* p);
PYR_EXPORT int pyr_compact(const PyrCompact* p);
PYR_EXPORT int pyr_reshape_and_cache(const PyrCacheWrite* p);
PYR_EXPORT int pyr_summarise_pages(const PyrSummaries* p);
PYR_EXPORT int pyr_score_pages(const PyrPageScores* p);
PYR_EXPORT int pyr_select_pages(const PyrPageSelect* p);
// Reads `bytes` bytes with all threads, for benchmarks; returns a sum that keeps the reads.
PYR_EXPORT double pyr_read(const char* memory, int64_t bytes, int64_t threads);
// Reads pages of `page_bytes` bytes, a multiple of 512, in the order of `pages`, and fetches each
// ahead as decoding does: the bandwidth that a cache of scattered pages allows.
PYR_EXPORT double pyr_read_pages(const char* memory, const int32_t* pages, int64_t count,
                                 int64_t page_bytes, int64_t threads);
