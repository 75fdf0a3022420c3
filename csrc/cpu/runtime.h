// SPDX-License-Identifier: Apache-2.0
// Threads, scratch memory, errors and checks shared by the entry points. Compiled for the baseline
// instruction set only: no kernel unit may include this (see kernels.h).
#pragma once
#include <atomic>
#include <cstddef>

#include "abi.h"
#include "kernels.h"

namespace pyr {

// Stores a printf-style message for pyr_last_error() and returns 1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Returns memory of the calling thread, 64-byte aligned and valid until its next request for the same
// use; null if the allocation fails. A thread gives back what it has not needed for some time.
enum class Scratch { kWork, kShared, kCount };
void* scratch(Scratch use, size_t bytes);

// Calls body(context) on `threads` threads of the process's OpenMP pool and waits. The pool may
// give fewer, so bodies take their work from a shared counter.
void parallel(int64_t threads, void (*body)(void*), void* context);

// Runs task(index, arg) for every index below count, in increasing order of start.
template <class Task>
void for_each_item(int64_t threads, int64_t count, Task& task) {
  struct Context {
    Task* task;
    std::atomic<int64_t> next;
    int64_t count;
  } context{&task, {0}, count};
  auto body = [](void* raw) {
    auto& c = *static_cast<Context*>(raw);
    for (int64_t i; (i = c.next.fetch_add(1, std::memory_order_relaxed)) < c.count;) (*c.task)(i);
  };
  parallel(count > 1 ? threads : 1, body, &context);
}

// Returns the kernels of the chosen instruction set for these element types.
const Kernels& kernels_for(int64_t query_dtype, int64_t cache_dtype);

// Attends exactly for the requests for which `exactly` is null or nonzero; checks all of them. Requests
// that share pages of `fewest_keys` keys or more read them together where that pays; 0: never.
int attend(const PyrAttention& p, const uint8_t* exactly, int64_t fewest_keys = 0);

// Scores of a window's queries: keys of an item, a multiple of kTileKeys, and the size up to which what
// was computed of every key is kept between two phases. Beyond it is computed again.
constexpr int64_t kChunkKeys = 1024;
constexpr size_t kMaxLogitsBytes = size_t(64) << 20;

// Joins the maxima of rows, and the sums of 2^(x - maximum), of the items of one (request, KV head)
// into those of the first; `stride` is from an item's to the next one's.
void join_stats(float* max, float* sum, int64_t items, int64_t stride, int64_t rows);

// Checks that the table entries of positions first .. last - 1 of request r exist and name blocks
// of the pool.
int check_table(const int32_t* table, int64_t table_r, int64_t r, int64_t first, int64_t last,
                int64_t N, int64_t M, int64_t P);

// Checks the queries, lengths, skips and tables of every request.
int check_attention(const PyrAttention& p);

}  // namespace pyr
