// What one call of paged attention computes, and where its keys and values lie.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/lanes.h"

namespace jaxserve::cpu {

constexpr int64_t kWorthAThread = 1'000'000;  // multiplications below which one thread does it all

struct Problem {
  int64_t batch, queries, heads, kv_heads, dim, pages, page_size, table_width;
  const float *q, *k_new, *v_new, *keys, *values;
  const int32_t *tables, *lengths;
  float* out;
  float scale;
  int64_t window;  // 0: none; otherwise a token sees itself and window - 1 tokens before it
  const uint8_t* seen;    // [batch, queries, queries], null for a chain: whether new token i sees new token j
  const int32_t* depths;  // [batch, queries], null for a chain: position of a new token is context + depth
  const float* sinks;     // [heads], null without: one more score per head, which takes weight and gives no value

  int64_t group() const { return heads / kv_heads; }
  // First position that any new token of sequence b sees.
  int64_t start(int64_t b) const { return window == 0 ? 0 : std::max<int64_t>(0, lengths[b] - window + 1); }
};

// Points at the key (or value) row of every position in [begin, end): in the pool for the context, page by page, and in
// this step's operand for new tokens.
JAXSERVE_INLINE void locate_rows(const Problem& p, const float* pool, const float* fresh, const int32_t* table,
                                 int64_t context, int64_t begin, int64_t end, const float** rows) {
  int64_t position = begin;
  while (position < std::min(end, context)) {
    const int64_t offset = position % p.page_size;
    const int64_t stop = std::min({end, context, position - offset + p.page_size});
    const float* row = pool + (table[position / p.page_size] * p.page_size + offset) * p.dim;
    for (; position < stop; ++position, row += p.dim) rows[position - begin] = row;
  }
  for (; position < end; ++position) rows[position - begin] = fresh + (position - context) * p.kv_heads * p.dim;
}

// As above, for the keys and the values of sequence b and one KV head.
JAXSERVE_INLINE void locate_keys_and_values(const Problem& p, int64_t b, int64_t kv, int64_t begin, int64_t end,
                                            const float** keys, const float** values) {
  const int64_t head_stride = p.pages * p.page_size * p.dim;
  const int32_t* table = p.tables + b * p.table_width;
  const int64_t fresh = (b * p.queries * p.kv_heads + kv) * p.dim;
  locate_rows(p, p.keys + kv * head_stride, p.k_new + fresh, table, p.lengths[b], begin, end, keys);
  locate_rows(p, p.values + kv * head_stride, p.v_new + fresh, table, p.lengths[b], begin, end, values);
}

}  // namespace jaxserve::cpu
