// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#endif
#ifdef PYR_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pyr {
namespace {

thread_local char last_error[512];

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;

// What a thread keeps for good, and requests of less than a quarter after which it gives back more.
constexpr size_t kKeptBytes = size_t(1) << 20;
constexpr int kPatience = 256;
std::atomic<int64_t> scratch_bytes{0}, most_scratch_bytes{0};  // of all threads

struct Area {
  void* memory = nullptr;
  size_t bytes = 0, recent = 0;  // recent: the most of the `small` latest requests, all of them small
  int small = 0;

  void resize(size_t size) {
    free(memory);
    scratch_bytes -= int64_t(bytes);
    memory = size ? aligned_alloc(4096, size) : nullptr;
    bytes = memory ? size : 0;
    const int64_t now = scratch_bytes += int64_t(bytes);
    for (int64_t most = most_scratch_bytes; most < now;)
      if (most_scratch_bytes.compare_exchange_weak(most, now)) break;
    recent = 0;
    small = 0;
  }
  ~Area() { resize(0); }
};
thread_local Area areas[int(Scratch::kCount)];

struct Isa {
  const char* name;
  bool built, runs;
  bool by_itself;  // may be chosen without being named
  const Kernels* by_dtype;
  const Kernels* pairs;  // overrides of by_dtype for queries of bfloat16; or null
};

#ifdef PYR_X86
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_pairs() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

struct Tiled {
  Kernels by_dtype[kDtypes];

  explicit Tiled(const TiledAttention* tiled) {
    for (int i = 0; i < kDtypes; ++i) {
      by_dtype[i] = kKernelsAvx512Bf16[i];
      by_dtype[i].attention_scratch = tiled[i].attention_scratch;
      by_dtype[i].attention = tiled[i].attention;
      by_dtype[i].merge = tiled[i].merge;
    }
  }
};

// Linux saves the state of AMX tiles only for a process that has asked for it.
bool has_amx() {
#if defined(PYR_AMX) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!has_pairs() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d >> 22 & 1, tile = d >> 24 & 1;
  return bf16 && tile && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

constexpr int kIsas = 6;
const Isa* all_isas() {
#ifdef PYR_X86
  static const Tiled emulated(kAmxEmulated);
#ifdef PYR_AMX
  static const Tiled tiled(kAmx);
  const Kernels* amx = tiled.by_dtype;
#else
  const Kernels* amx = nullptr;
#endif
  static const Isa isas[kIsas] = {
      {"amx", amx != nullptr, has_amx(), true, kKernelsAvx512, amx},
      {"avx512bf16", true, has_pairs(), true, kKernelsAvx512, kKernelsAvx512Bf16},
      {"avx512", true, has_avx512(), true, kKernelsAvx512, nullptr},
      {"avx2", true,
       bool(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("f16c")),
       true, kKernelsAvx2, nullptr},
      {"portable", true, true, true, kKernelsPortable, nullptr},
      {"amx-emulated", true, has_pairs(), false, kKernelsAvx512, emulated.by_dtype}};
#else
  static const Isa isas[kIsas] = {{"amx", false, false, true, nullptr, nullptr},
                                  {"avx512bf16", false, false, true, nullptr, nullptr},
                                  {"avx512", false, false, true, nullptr, nullptr},
                                  {"avx2", false, false, true, nullptr, nullptr},
                                  {"portable", true, true, true, kKernelsPortable, nullptr},
                                  {"amx-emulated", false, false, false, nullptr, nullptr}};
#endif
  return isas;
}
const Isa* chosen = nullptr;

struct Record {
  const char* name;
  size_t bytes;
  const char* fields;
};
const Record* find_record(const char* name) {
#define PYR_DESCRIBE(record) {#record, sizeof(record), record##_fields}
  static const Record records[] = {PYR_DESCRIBE(PyrAttention),  PYR_DESCRIBE(PyrKeyMass),
                                   PYR_DESCRIBE(PyrTopn),       PYR_DESCRIBE(PyrScores),
                                   PYR_DESCRIBE(PyrRecentMass), PYR_DESCRIBE(PyrSelect),
                                   PYR_DESCRIBE(PyrCompact),    PYR_DESCRIBE(PyrCacheWrite),
                                   PYR_DESCRIBE(PyrSummaries),  PYR_DESCRIBE(PyrPageScores),
                                   PYR_DESCRIBE(PyrPageSelect), PYR_DESCRIBE(PyrShared),
                                   PYR_DESCRIBE(PyrObservedExpected),
                                   PYR_DESCRIBE(PyrFutureQueries)};
#undef PYR_DESCRIBE
  for (const Record& record : records)
    if (!strcmp(name, record.name)) return &record;
  return nullptr;
}

}  // namespace

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return 1;
}

void* scratch(Scratch use, size_t bytes) {
  Area& area = areas[int(use)];
  const auto with_room = [](size_t size) { return (size + size / 4 + 4095) / 4096 * 4096; };
  if (area.bytes < bytes) {
    area.resize(with_room(bytes));
  } else if (area.bytes > kKeptBytes) {
    if (bytes * 4 >= area.bytes) {
      area.small = 0;
      area.recent = 0;
    } else {
      area.recent = std::max(area.recent, bytes);
      if (++area.small == kPatience) area.resize(with_room(area.recent));
    }
  }
  return area.memory;
}

void parallel(int64_t threads, void (*body)(void*), void* context) {
#ifdef __SANITIZE_THREAD__  // ThreadSanitizer knows the threads that it sees start, not OpenMP's
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(body, context);
  body(context);
  for (std::thread& other : others) other.join();
  return;
#endif
  if (threads > 1 && gomp_parallel)
    gomp_parallel(body, context, unsigned(threads), 0);
  else
    body(context);
}

const Kernels& kernels_for(int64_t query_dtype, int64_t cache_dtype) {
  if (chosen->pairs && query_dtype == PYR_BF16 && chosen->pairs[cache_dtype].attention)
    return chosen->pairs[cache_dtype];
  return chosen->by_dtype[cache_dtype];
}

int check_table(const int32_t* table, int64_t table_r, int64_t r, int64_t first, int64_t last,
                int64_t N, int64_t M, int64_t P) {
  if (last > M * N)
    return fail("request %lld has %lld tokens, but its row of block_table holds %lld (%lld blocks "
                "of %lld)",
                (long long)r, (long long)last, (long long)(M * N), (long long)M, (long long)N);
  const int32_t* row = table + r * table_r;
  const int64_t begin = first / N, end = (last + N - 1) / N;
  uint32_t worst = 0;  // as unsigned, so that negative ids are the largest
  for (int64_t i = begin; i < end; ++i) worst = uint32_t(row[i]) > worst ? uint32_t(row[i]) : worst;
  if (begin < end && int64_t(worst) >= P)
    return fail("block_table names block %lld of request %lld (entries %lld .. %lld), but the "
                "cache has %lld blocks",
                (long long)int32_t(worst), (long long)r, (long long)begin, (long long)(end - 1),
                (long long)P);
  return 0;
}

}  // namespace pyr

int64_t pyr_abi_version() { return PYR_ABI_VERSION; }
int64_t pyr_record_size(const char* name) {
  const pyr::Record* record = pyr::find_record(name);
  return record ? int64_t(record->bytes) : -1;
}
const char* pyr_record_fields(const char* name) {
  const pyr::Record* record = pyr::find_record(name);
  return record ? record->fields : nullptr;
}
const char* pyr_last_error() { return pyr::last_error; }
const char* pyr_isa() { return pyr::chosen ? pyr::chosen->name : ""; }
int64_t pyr_scratch_bytes(int64_t most) {
  if (!most) return pyr::scratch_bytes;
  const int64_t now = pyr::scratch_bytes;
  return pyr::most_scratch_bytes.exchange(now);
}
void pyr_set_parallel(void* address) {
  pyr::gomp_parallel = reinterpret_cast<pyr::GompParallel>(address);
}

int pyr_set_isa(const char* name) {
  const pyr::Isa* isas = pyr::all_isas();
  for (int i = 0; i < pyr::kIsas; ++i) {
    if (name ? strcmp(name, isas[i].name) != 0 : !isas[i].runs || !isas[i].by_itself) continue;
    if (!isas[i].built)
      return pyr::fail("%s is not in this build (not for x86-64, or by an old compiler)", name);
    if (!isas[i].runs) return pyr::fail("this CPU does not have %s", name);
    pyr::chosen = &isas[i];
    return 0;
  }
  return pyr::fail("unknown instruction set '%s'; one of amx, avx512bf16, avx512, avx2, portable", name);
}

double pyr_read(const char* memory, int64_t bytes, int64_t threads) {
  constexpr int64_t kPiece = 1 << 17;
  const pyr::Kernels& kernels = pyr::kernels_for(PYR_F32, PYR_F32);
  std::atomic<int64_t> sum{0};
  const auto task = [&](int64_t i) {
    const int64_t left = bytes - i * kPiece;
    sum += int64_t(kernels.read(memory + i * kPiece, size_t(left < kPiece ? left : kPiece),
                                nullptr) != 0);
  };
  pyr::for_each_item(threads, (bytes + kPiece - 1) / kPiece, task);
  return double(sum);
}

double pyr_read_pages(const char* memory, const int32_t* pages, int64_t count, int64_t page_bytes,
                      int64_t threads) {
  constexpr int64_t kPiece = 64, kAhead = 8;  // pages
  const pyr::Kernels& kernels = pyr::kernels_for(PYR_F32, PYR_F32);
  std::atomic<int64_t> sum{0};
  const auto task = [&](int64_t i) {
    const int64_t end = std::min(count, (i + 1) * kPiece);
    for (int64_t k = i * kPiece; k < end; ++k) {
      const int64_t next = std::min(k + kAhead, count - 1);
      sum += int64_t(kernels.read(memory + pages[k] * page_bytes, size_t(page_bytes),
                                  memory + pages[next] * page_bytes) != 0);
    }
  };
  pyr::for_each_item(threads, (count + kPiece - 1) / kPiece, task);
  return double(sum);
}
