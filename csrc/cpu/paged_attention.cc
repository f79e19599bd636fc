// Paged attention, float32, on the CPU: what few query tokens per sequence need (decode and verify) is here, prompt
// chunks are in prompt_attention.cc.
//
// Each sequence attends over its cached context, read through its private block-table row, and over the new tokens of
// this step, causally or along the branches of a tree (a mask says which new token sees which). Their keys and values
// come as operands: the pool is only read, and is written later in the same program. Context is cut into chunks so that
// one long sequence still fills every core (split-KV); chunk results are merged with the running-maximum form of softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/faults.h"
#include "cpu/attention_problem.h"
#include "cpu/isa.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "cpu/prompt_attention.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cpu {
namespace {

constexpr int64_t kChunk = 256;  // context positions per task

// Running softmax of one query row: maximum, sum of exponentials, and weighted values (dim floats behind it).
struct Partial {
  float maximum = -INFINITY;
  float sum = 0;
};

JAXSERVE_INLINE void merge(Partial& into, float* into_values, const Partial& from, const float* from_values,
                           int64_t dim) {
  if (from.sum == 0) return;
  const float maximum = std::max(into.maximum, from.maximum);
  const float keep = into.sum == 0 ? 0.0f : std::exp(into.maximum - maximum);
  const float add = std::exp(from.maximum - maximum);
  for (int64_t d = 0; d < dim; ++d) into_values[d] = into_values[d] * keep + from_values[d] * add;
  into.sum = into.sum * keep + from.sum * add;
  into.maximum = maximum;
}

constexpr int64_t kBlock = 32;  // positions whose keys (or values) stay in the first-level cache for all query rows

JAXSERVE_INLINE void prefetch_rows(const float* const* rows, int64_t begin, int64_t end, int64_t dim) {
  constexpr int64_t kFloatsPerLine = 16;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t d = 0; d < dim; d += kFloatsPerLine) __builtin_prefetch(rows[i] + d);
  }
}

// The scratch of one thread.
struct Scratch {
  std::vector<float> scores;
  const float* keys[kChunk];
  const float* values[kChunk];
};

// Attends rows (query, head of the group) of one sequence and KV head over positions [begin, end).
template <int kVectors>
JAXSERVE_INLINE void attend_chunk_of(const Problem& p, int64_t b, int64_t kv, int64_t begin, int64_t end,
                                     Partial* partials, float* values, Scratch& scratch) {
  const int64_t group = p.group();
  const int64_t context = p.lengths[b];
  locate_keys_and_values(p, b, kv, begin, end, scratch.keys, scratch.values);

  const int64_t num_rows = p.queries * group;
  const int64_t span = end - begin;
  const int64_t padded = (span + kLanes - 1) / kLanes * kLanes;
  if (static_cast<int64_t>(scratch.scores.size()) < num_rows * padded) scratch.scores.resize(num_rows * padded);

  // The positions of the chunk that a query sees, relative to its begin: [first, last).
  const auto first_seen = [&](int64_t query) -> int64_t {
    if (p.window == 0) return 0;
    if (p.depths == nullptr) return std::clamp<int64_t>(context + query - p.window + 1 - begin, 0, span);
    // In a tree the place of a new token is not its position: the mask decides among new tokens.
    const int64_t first = context + p.depths[b * p.queries + query] - p.window + 1;
    return std::clamp<int64_t>(std::min(first, context) - begin, 0, span);
  };
  const auto last_seen = [&](int64_t query) {
    const int64_t last = p.seen == nullptr ? query + 1 : p.queries;  // the mask may show later new tokens
    return std::clamp<int64_t>(context + last - begin, 0, span);
  };

  prefetch_rows(scratch.keys, 0, std::min(kBlock, span), p.dim);
  for (int64_t block = 0; block < span; block += kBlock) {
    // The hardware prefetcher stops at the end of each page, so the next block is asked for here.
    prefetch_rows(scratch.keys, block + kBlock, std::min(block + 2 * kBlock, span), p.dim);
    if (block + kBlock >= span) prefetch_rows(scratch.values, 0, std::min(kBlock, span), p.dim);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t query = row / group;
      const float* q = p.q + ((b * p.queries + query) * p.heads + kv * group + row % group) * p.dim;
      const int64_t from = std::max(block, first_seen(query));
      const int64_t to = std::min(block + kBlock, last_seen(query));
      float* s = scratch.scores.data() + row * padded;
      for (int64_t i = from; i < to; ++i) s[i] = dot<kVectors>(q, scratch.keys[i], p.dim) * p.scale;
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t first = first_seen(row / group);
    const int64_t last = last_seen(row / group);
    if (first >= last) continue;  // the partial stays empty
    float* s = scratch.scores.data() + row * padded;
    if (p.seen != nullptr) {
      const uint8_t* seen = p.seen + (b * p.queries + row / group) * p.queries;
      for (int64_t i = std::max(first, context - begin); i < last; ++i) {
        if (!seen[begin + i - context]) s[i] = -INFINITY;
      }
    }
    const float maximum = *std::max_element(s + first, s + last);
    if (maximum == -INFINITY) {  // only tokens of other branches: nothing to add, and the partial stays empty
      std::fill(s + first, s + last, 0.0f);
      continue;
    }
    for (int64_t i = 0; i < first; ++i) s[i] = -INFINITY;
    for (int64_t i = first; i < last; ++i) s[i] -= maximum;
    for (int64_t i = last; i < padded; ++i) s[i] = -INFINITY;
    Lanes sum{};
    for (int64_t i = 0; i < padded; i += kLanes) {
      exp_lanes(s + i);
      sum += load(s + i);
    }
    partials[row].maximum = maximum;
    partials[row].sum = sum_lanes(sum);
  }
  for (int64_t block = 0; block < span; block += kBlock) {
    prefetch_rows(scratch.values, block + kBlock, std::min(block + 2 * kBlock, span), p.dim);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t from = std::max(block, first_seen(row / group));
      const int64_t to = std::min(block + kBlock, last_seen(row / group));
      if (from < to) {
        add_weighted<kVectors>(values + row * p.dim, scratch.values, scratch.scores.data() + row * padded, from, to,
                               p.dim);
      }
    }
  }
}

JAXSERVE_INLINE void attend_chunk_any(const Problem& p, int64_t b, int64_t kv, int64_t begin, int64_t end,
                                      Partial* partials, float* values) {
  thread_local Scratch scratch;
  switch (p.dim % kLanes == 0 ? p.dim / kLanes : 0) {
    case 1: return attend_chunk_of<1>(p, b, kv, begin, end, partials, values, scratch);
    case 4: return attend_chunk_of<4>(p, b, kv, begin, end, partials, values, scratch);
    case 8: return attend_chunk_of<8>(p, b, kv, begin, end, partials, values, scratch);
    default: return attend_chunk_of<0>(p, b, kv, begin, end, partials, values, scratch);
  }
}

using AttendChunk = void (*)(const Problem&, int64_t, int64_t, int64_t, int64_t, Partial*, float*);

// One copy of the kernel for each instruction set.
#define JAXSERVE_DEFINE_ATTEND(name, attributes)                                                                \
  attributes void name(const Problem& p, int64_t b, int64_t kv, int64_t begin, int64_t end, Partial* partials,  \
                       float* values) {                                                                         \
    attend_chunk_any(p, b, kv, begin, end, partials, values);                                                   \
  }

JAXSERVE_DEFINE_ATTEND(attend_chunk_portable, )
#if defined(__x86_64__)
JAXSERVE_DEFINE_ATTEND(attend_chunk_avx2, JAXSERVE_AVX2)
JAXSERVE_DEFINE_ATTEND(attend_chunk_avx512, JAXSERVE_AVX512)
#endif

AttendChunk choose_attend_chunk() {
#if defined(__x86_64__)
  switch (detect_isa()) {
    case Isa::kAvx512: return attend_chunk_avx512;
    case Isa::kAvx2: return attend_chunk_avx2;
    case Isa::kPortable: break;
  }
#endif
  return attend_chunk_portable;
}

struct Task {
  int64_t b, kv, begin, end;
  int64_t first_row;  // index of its first row in the partial results
};

// Writes p.out, chunk by chunk of context. Raises std::bad_alloc.
void attend_few(ffi::ThreadPool& pool, const Problem& p) {
  const int64_t rows_per_head = p.queries * p.group();
  std::vector<Task> tasks;
  int64_t num_rows = 0;
  int64_t multiplications = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t start = p.start(b);
    const int64_t end = p.lengths[b] + p.queries;
    const int64_t chunks = std::max<int64_t>(1, (end - start + kChunk - 1) / kChunk);
    const int64_t size = (end - start + chunks - 1) / chunks;
    multiplications += 2 * (end - start) * p.queries * p.heads * p.dim;
    for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
      for (int64_t begin = start; begin < end; begin += size) {
        tasks.push_back({b, kv, begin, std::min(end, begin + size), num_rows});
        num_rows += rows_per_head;
      }
    }
  }

  static const AttendChunk attend_chunk = choose_attend_chunk();
  std::vector<Partial> partials(num_rows);
  std::vector<float> values(num_rows * p.dim);
  const auto attend = [&](int64_t index) {
    const Task& task = tasks[index];
    attend_chunk(p, task.b, task.kv, task.begin, task.end, partials.data() + task.first_row,
                 values.data() + task.first_row * p.dim);
  };
  // Waking a thread costs as much as a small problem does.
  const int64_t threads = multiplications < kWorthAThread ? 1 : pool.num_threads();
  run_tasks(pool, static_cast<int64_t>(tasks.size()), threads, attend);

  const int64_t group = p.group();
  std::vector<float> merged(p.dim);
  const std::vector<float> nothing(p.sinks != nullptr ? p.dim : 0);
  std::size_t index = 0;
  while (index < tasks.size()) {
    std::size_t last = index + 1;  // tasks of one (sequence, KV head) are neighbours
    while (last < tasks.size() && tasks[last].b == tasks[index].b &&
           tasks[last].kv == tasks[index].kv) {
      ++last;
    }
    const Task& first = tasks[index];
    for (int64_t row = 0; row < rows_per_head; ++row) {
      Partial total;
      std::fill(merged.begin(), merged.end(), 0.0f);
      for (std::size_t t = index; t < last; ++t) {
        const int64_t r = tasks[t].first_row + row;
        merge(total, merged.data(), partials[r], values.data() + r * p.dim, p.dim);
      }
      const int64_t query = row / group;
      const int64_t head = first.kv * group + row % group;
      if (p.sinks != nullptr) merge(total, merged.data(), {p.sinks[head], 1.0f}, nothing.data(), p.dim);
      float* target = p.out + ((first.b * p.queries + query) * p.heads + head) * p.dim;
      for (int64_t d = 0; d < p.dim; ++d) target[d] = merged[d] / total.sum;  // a token always sees itself: sum > 0
    }
    index = last;
  }
}

ffi::Error attend_all(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_new,
                      ffi::Buffer<ffi::F32> v_new, ffi::Buffer<ffi::F32> kv_pool, ffi::Buffer<ffi::S32> tables,
                      ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::U8> seen, ffi::Buffer<ffi::S32> depths,
                      ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t layer, float scale,
                      int64_t window) {
  const auto qd = q.dimensions();
  const auto kd = k_new.dimensions();
  const auto pd = kv_pool.dimensions();
  const auto td = tables.dimensions();
  const auto wrong = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("jaxserve_paged_attention: ") + what);
  };
  if (qd.size() != 4 || kd.size() != 4) return wrong("queries and keys must be [batch, tokens, heads, dim]");
  if (pd.size() != 6) return wrong("the pool must be [layers, 2, kv heads, pages, page size, dim]");
  if (td.size() != 2 || td[0] != qd[0]) return wrong("block tables must be [batch, pages per sequence]");
  if (layer < 0 || layer >= pd[0] || pd[2] != kd[2] || pd[5] != qd[3]) return wrong("pool and queries do not match");
  if (qd[2] % kd[2] != 0) return wrong("query heads must be a multiple of KV heads");

  Problem p;
  p.batch = qd[0];
  p.queries = qd[1];
  p.heads = qd[2];
  p.dim = qd[3];
  p.kv_heads = kd[2];
  p.pages = pd[3];
  p.page_size = pd[4];
  p.table_width = td[1];
  p.q = q.typed_data();
  p.k_new = k_new.typed_data();
  p.v_new = v_new.typed_data();
  const int64_t kind_stride = p.kv_heads * p.pages * p.page_size * p.dim;
  p.keys = kv_pool.typed_data() + layer * 2 * kind_stride;
  p.values = p.keys + kind_stride;
  p.tables = tables.typed_data();
  p.lengths = lengths.typed_data();
  p.out = out->typed_data();
  p.scale = scale;
  p.window = window;
  const auto num_seen = static_cast<int64_t>(seen.element_count());
  const auto num_depths = static_cast<int64_t>(depths.element_count());
  const bool is_tree = num_seen != 0;
  if (is_tree && (num_seen != p.batch * p.queries * p.queries || num_depths != p.batch * p.queries)) {
    return wrong("a tree needs a mask [batch, tokens, tokens] and depths [batch, tokens]");
  }
  p.seen = is_tree ? seen.typed_data() : nullptr;
  p.depths = is_tree ? depths.typed_data() : nullptr;
  const auto num_sinks = static_cast<int64_t>(sinks.element_count());
  if (num_sinks != 0 && num_sinks != p.heads) return wrong("sinks must be one per query head");
  p.sinks = num_sinks != 0 ? sinks.typed_data() : nullptr;

  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t context = p.lengths[b];
    if (context < 0 || context > p.table_width * p.page_size) return wrong("a length is outside its block table");
    for (int64_t i = 0; i < (context + p.page_size - 1) / p.page_size; ++i) {
      const int32_t page = p.tables[b * p.table_width + i];
      if (page < 0 || page >= p.pages) return wrong("a block table names a page outside the pool");
    }
  }
  Faults::instance().pass("allocate", "jaxserve_paged_attention");
  if (is_prompt(p)) {
    attend_prompt(pool, p);
  } else {
    attend_few(pool, p);
  }
  return ffi::Error::Success();
}

// No exception may cross XLA's C interface: memory for the partial results may be short.
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_new,
                           ffi::Buffer<ffi::F32> v_new, ffi::Buffer<ffi::F32> kv_pool, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::U8> seen, ffi::Buffer<ffi::S32> depths,
                           ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t layer,
                           float scale, int64_t window) {
  try {
    return attend_all(pool, q, k_new, v_new, kv_pool, tables, lengths, seen, depths, sinks, out, layer, scale, window);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jaxserve_paged_attention: ") + error.what());
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_paged_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // q [batch, tokens, heads, dim]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // k_new [batch, tokens, kv heads, dim]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // v_new, as k_new
                                  .Arg<ffi::Buffer<ffi::F32>>()   // pool [layers, 2, kv heads, pages, page size, dim]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // block tables [batch, pages per sequence]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // context lengths [batch]
                                  .Arg<ffi::Buffer<ffi::U8>>()    // seen [batch, tokens, tokens], or empty: a chain
                                  .Arg<ffi::Buffer<ffi::S32>>()   // depths [batch, tokens], or empty
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sinks [heads], or empty
                                  .Ret<ffi::Buffer<ffi::F32>>()   // out, as q
                                  .Attr<int64_t>("layer")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

}  // namespace jaxserve::cpu
