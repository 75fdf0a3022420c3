// SPDX-License-Identifier: Apache-2.0
// The interface of the instruction-set units to the rest of the library.
//
// kernels_*.cpp are compiled with different -m flags. They must not instantiate anything with
// external linkage that another unit also has (std:: templates, inline functions): the linker
// keeps one copy of each, perhaps the one this CPU cannot run.
#pragma once
#include <cstddef>
#include <cstring>

#include "abi.h"

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer sees this loop; what the C library copies it would attribute to that library.
static inline void copy_in_sight(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((char*)to)[i] = ((const char*)from)[i];
}
#define memcpy copy_in_sight
#endif

namespace pyr {

constexpr int kDtypes = 5;  // of PyrDtype

// Keys of one step of the attention kernels. Steps are counted from the first visible position of
// a request, so its result does not depend on where in the table its survivors lie.
constexpr int64_t kTileKeys = 64;
// The largest D, which sizes arrays on the stack. kernels/cpu/checks.py refuses larger ones.
constexpr int kMaxHeadSize = 512;
// Rows (query tokens x query heads of one KV head) up to which a request is split over its context.
constexpr int64_t kSplitRows = 32;

// Rows (as above) whose logits over all keys are held together.
constexpr int64_t kTopnRows = 32;

// Rows row0 .. row0 + rows - 1 (row = query * (H / G) + head) of one request and KV head over the
// keys begin .. end - 1, counted from `skip`; begin is a multiple of kTileKeys.
struct AttentionItem {
  int32_t request, kv_head;
  int32_t row0, rows;
  int32_t begin, end;
  int32_t slot;   // place of a split request's partial result; -1: write to `out`
  int32_t group;  // which split (request, KV head) it is a part of
};

// A partial result of a split: per row its maximum, its weight and the unnormalised sum of values.
static inline size_t partial_floats(int64_t rows, int64_t D) { return size_t(rows) * (D + 2); }

// The partial results of a batch, in slots of as many floats as the largest one has: tight, since a
// batch may have thousands.
struct Partials {
  float* memory;
  size_t slot_floats;

  float* slot(int64_t i) const { return memory + size_t(i) * slot_floats; }
};

// Keys begin .. end - 1 of one request and KV head, counted from its place `start`, for the scores of a
// window's queries.
struct ScoreItem {
  int32_t request, kv_head;
  int32_t begin, end;
  int32_t start;
};

struct ScoreBuffers {
  float* logits;           // rows x (end - begin) of this item, or null: computed again
  float* row_max;          // [rows] of this item in phase 1, of the whole request in phase 2
  float* row_sum;          // likewise
  float* mass;             // [max keys] of this (request, KV head), written in phase 2
};

// Rows in whole vectors of any instruction set.
static inline int64_t whole_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

// Of `observed_expected`. Statistics are of the item in phase 1, and of the whole request in phase 2.
// Logits, mass and expected begin with the first key of the request, and have room for whole vectors.
struct ExpectedBuffers {
  float* weights;  // per tile of the item [rows][kTileKeys] and [whole rows] maxima; or null: computed again
  float *row_max, *row_sum;    // [whole rows]
  float *head_max, *head_sum;  // [heads], of the expected attention
  float* logits;               // [heads][stride], of the expected attention
  float* mass;                 // ||v||_1, times the attention of the window after phase 2
  float* expected;             // ||v||_2, times the expected attention after phase 2
  int64_t stride;
};

// Some rows (recent query * heads + head) or some keys (counted from `skip`) of a request and KV head.
struct RecentItem {
  int32_t request, kv_head;
  int32_t begin, end;
};

struct Kernels {
  size_t (*attention_scratch)(const PyrAttention&, int64_t max_rows);
  // `next` is the item this thread takes afterwards (or null), to fetch its first rows early.
  void (*attention)(const PyrAttention&, const AttentionItem&, const AttentionItem* next,
                    const Partials&, void* scratch);
  void (*merge)(const PyrAttention&, const AttentionItem& first, int64_t parts, const Partials&,
                void* scratch);
  size_t (*score_scratch)(const PyrScores&);
  void (*score_logits)(const PyrScores&, const ScoreItem&, const ScoreBuffers&, void* scratch);
  void (*score_mass)(const PyrScores&, const ScoreItem&, const ScoreBuffers&, void* scratch);
  size_t (*expected_scratch)(const PyrObservedExpected&);
  void (*expected_logits)(const PyrObservedExpected&, const ScoreItem&, const ExpectedBuffers&,
                          void* scratch);
  void (*expected_mass)(const PyrObservedExpected&, const ScoreItem&, const ExpectedBuffers&,
                        void* scratch);
  // Reads memory at full bandwidth, the reference of the benchmarks.
  float (*read)(const char* memory, size_t bytes, const char* next);
  size_t (*key_mass_scratch)(const PyrAttention&);
  void (*key_mass)(const PyrKeyMass&, int32_t request, int32_t kv_head, void* scratch);
  size_t (*topn_scratch)(const PyrAttention&);
  // Logits of an item's rows (at most kTopnRows), in base 2, over the keys item.begin .. item.end - 1:
  // logits[row * stride + key - item.begin]; -inf where a row does not see the key. `stride` holds
  // whole vectors: whatever is written behind the last key is no logit.
  void (*topn_logits)(const PyrAttention&, const AttentionItem&, float* logits, int64_t stride,
                      void* scratch);
  // Writes the output of row item.row0 from its logits, over the `count` keys best[] (ascending,
  // counted from item.begin) alone.
  void (*topn_values)(const PyrAttention&, const AttentionItem&, const float* logits,
                      const int32_t* best, int64_t count, bool renormalize);
  size_t (*recent_scratch)(const PyrRecentMass&);
  // Each row's maximum, and its weight over its sum, sink included: [2][rows of the request and KV
  // head].
  void (*recent_rows)(const PyrRecentMass&, const RecentItem& rows, float* stats, void* scratch);
  void (*recent_keys)(const PyrRecentMass&, const RecentItem& keys, const float* stats,
                      void* scratch);
  // Summarises the rows from .. to - 1 of a block for one KV head.
  void (*summarise)(const PyrSummaries&, int64_t block, int64_t kv_head, int64_t from, int64_t to);
  // Takes the softmax over `pages` logits in base 2 of each of the query heads head .. head + heads - 1
  // and adds it to out[pages], or takes the larger. Rows of logits and `out` have room for whole vectors.
  void (*page_weights)(const PyrPageScores&, int64_t head, int64_t heads, float* logits,
                       int64_t stride, int64_t pages, float* out);
  // A row of `count` elements of a dtype into a cache of 8-bit floats; null for other caches.
  void (*quantise)(uint8_t* out, const void* row, int64_t dtype, int64_t count, float scale);
};

// By cache element type (PyrDtype). The AVX-512-BF16 unit only has products of bfloat16 with what
// is, or is read as, bfloat16; everything else there is null and the AVX-512 unit's.
extern const Kernels kKernelsPortable[kDtypes];
#ifdef PYR_X86
extern const Kernels kKernelsAvx2[kDtypes];
extern const Kernels kKernelsAvx512[kDtypes];
extern const Kernels kKernelsAvx512Bf16[kDtypes];
// Takes the place of its attention: many rows in AMX's tiles, or in tiles that are emulated, for
// tests; null where pairs are.
struct TiledAttention {
  decltype(Kernels::attention_scratch) attention_scratch;
  decltype(Kernels::attention) attention;
  decltype(Kernels::merge) merge;
};
#ifdef PYR_AMX
extern const TiledAttention kAmx[kDtypes];
#endif
extern const TiledAttention kAmxEmulated[kDtypes];
#endif

}  // namespace pyr
