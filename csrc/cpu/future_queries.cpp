// SPDX-License-Identifier: Apache-2.0
// The last queries of each request, turned back by their rotary embedding and then by its mean over the
// positions to come. A request is the work of one thread.
#include <algorithm>

#include "runtime.h"
#include "simd.h"

namespace pyr {
namespace {

int check(const PyrFutureQueries& p, int64_t r) {
  const long long end = p.query_ends[r], last = p.last_positions[r];
  if (end < p.window || end > p.T)
    return fail("query_ends of request %lld is %lld, outside window = %lld .. %lld rows of query",
                (long long)r, end, (long long)p.window, (long long)p.T);
  if (last + 1 < p.window)
    return fail("the last of the %lld queries of request %lld stands at position %lld",
                (long long)p.window, (long long)r, last);
  return 0;
}

template <class T>
void load(const void* from, int64_t offset, int64_t count, float* to) {
  const T* row = (const T*)from + offset;
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(row[i]);
}
void load(const void* from, int64_t dtype, int64_t offset, int64_t count, float* to) {
  if (dtype == PYR_F32)
    load<float>(from, offset, count, to);
  else if (dtype == PYR_BF16)
    load<bf16_t>(from, offset, count, to);
  else
    load<f16_t>(from, offset, count, to);
}

// Positions behind the end of the embedding's table count as its last one.
void load_angles(const PyrFutureQueries& p, int64_t position, float* cos_sin) {
  load(p.cos_sin, p.cos_sin_dtype, std::min(position, p.rows - 1) * p.cos_sin_t, p.rotated, cos_sin);
}

// Turns the first 2 * half numbers of a row by angles with these cosines and sines.
void turn(const PyrFutureQueries& p, const float* cos, const float* sin, float* row) {
  const int64_t half = p.rotated / 2, step = p.halves ? 1 : 2, other = p.halves ? half : 1;
  for (int64_t i = 0; i < half; ++i) {
    const float x = row[i * step], y = row[i * step + other];
    row[i * step] = x * cos[i] - y * sin[i];
    row[i * step + other] = y * cos[i] + x * sin[i];
  }
}

void turn_request(const PyrFutureQueries& p, int64_t r) {
  float own[kMaxHeadSize], mean[kMaxHeadSize];
  const int64_t half = p.rotated / 2, last = p.last_positions[r];
  if (p.rotated) {
    double sum[kMaxHeadSize] = {};
    for (int64_t i = 1; i <= p.positions; ++i) {
      load_angles(p, last + i, own);
      for (int64_t d = 0; d < p.rotated; ++d) sum[d] += own[d];
    }
    for (int64_t d = 0; d < p.rotated; ++d) mean[d] = float(sum[d] / double(p.positions));
  }
  for (int64_t w = 0; w < p.window; ++w) {
    if (p.rotated) {
      load_angles(p, last + 1 - p.window + w, own);
      for (int64_t i = 0; i < half; ++i) {
        // 1, or more where the embedding scales (YaRN)
        const float squares = own[i] * own[i] + own[half + i] * own[half + i];
        own[i] /= squares;
        own[half + i] /= -squares;
      }
    }
    const int64_t token = p.query_ends[r] - p.window + w;
    for (int64_t h = 0; h < p.H; ++h) {
      float* row = p.out + ((r * p.H + h) * p.window + w) * p.D;
      load(p.query, p.query_dtype, token * p.query_t + h * p.query_h, p.D, row);
      turn(p, own, own + half, row);
      turn(p, mean, mean + half, row);
    }
  }
}

}  // namespace
}  // namespace pyr

int pyr_future_queries(const PyrFutureQueries* p) {
  for (int64_t r = 0; r < p->R; ++r)
    if (int error = pyr::check(*p, r)) return error;
  const auto task = [p](int64_t r) { pyr::turn_request(*p, r); };
  pyr::for_each_item(p->threads, p->R, task);
  return 0;
}
