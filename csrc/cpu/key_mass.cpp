// SPDX-License-Identifier: Apache-2.0
// Probability mass per key of a batch. One thread owns a (request, KV head), so the sums are the
// same bits on any number of threads.
#include <algorithm>
#include <atomic>

#include "runtime.h"

int pyr_key_mass(const PyrKeyMass* m) {
  using namespace pyr;
  const PyrAttention& p = m->attention;
  if (p.table_g) return fail("key mass takes one table of all KV heads");
  if (int error = check_attention(p)) return error;
  const Kernels& kernels = kernels_for(p.query_dtype, p.cache_dtype);
  const size_t bytes = kernels.key_mass_scratch(p);
  std::atomic<bool> out_of_memory{false};
  const auto task = [&](int64_t i) {
    void* memory = scratch(Scratch::kWork, bytes);
    if (memory)
      kernels.key_mass(*m, int32_t(i / p.G), int32_t(i % p.G), memory);
    else
      out_of_memory = true;
  };
  for_each_item(p.threads, p.R * p.G, task);
  if (out_of_memory) return fail("no memory for %zu bytes of key mass scratch", bytes);
  return 0;
}
