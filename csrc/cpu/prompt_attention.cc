// Many query rows meet every key here, so both products are done as matrix products: tiles of a few rows by a few
// vectors of positions stay in registers, over a transposed block of keys. Softmax is kept running from block to block
// (FlashAttention: Dao et al., 2022, algorithm 1), so no task needs another's results.
#include "cpu/prompt_attention.h"

#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace jaxserve::cpu {
namespace {

constexpr int64_t kPositions = 64;      // of a block: its keys and values stay in the first-level cache
constexpr int64_t kFewestRows = 32;     // per KV head, below which transposing keys costs more than it gives
constexpr int64_t kMostTaskRows = 192;  // their running results stay in the second-level cache
constexpr int64_t kTasksPerThread = 4;  // later rows see more, so tasks are not equally long

// Query rows [first, last) of one sequence and KV head, counted query by query and in it head by head.
struct Task {
  int64_t b, kv, first, last;
};

// The scratch of one thread.
struct Scratch {
  std::vector<float> transposed;  // [dim, kPositions]
  std::vector<float> results;     // [rows, dim], not yet divided by the sums
  std::vector<float> scores;      // [tile rows, kPositions]
  std::vector<float> maxima, sums;
  const float* keys[kPositions];
  const float* values[kPositions];
};

JAXSERVE_INLINE float largest(const float* scores) {
  Lanes most = load(scores);
  for (int64_t i = kLanes; i < kPositions; i += kLanes) {
    const Lanes other = load(scores + i);
    most = most > other ? most : other;
  }
  float value = most[0];
  for (int i = 1; i < kLanes; ++i) value = std::max(value, most[i]);
  return value;
}

// scores[row, position] of a tile, for the positions ahead of `end` and some behind.
template <int kRows, int kWide>
JAXSERVE_INLINE void score_tile(const float* const* q, const float* transposed, int64_t dim, float scale, int64_t end,
                                float* scores) {
  for (int64_t position = 0; position < end; position += kWide * kLanes) {
    Lanes sums[kRows][kWide] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Lanes keys[kWide];
      for (int j = 0; j < kWide; ++j) keys[j] = load(transposed + d * kPositions + position + j * kLanes);
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kWide; ++j) sums[r][j] += keys[j] * q[r][d];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kWide; ++j) store(scores + r * kPositions + position + j * kLanes, sums[r][j] * scale);
    }
  }
}

// results[row] = results[row] * kept[row] + sum over [begin, end) of weights[row, position] * *values[position], for
// kWide vectors of columns.
template <int kRows, int kWide>
JAXSERVE_INLINE void add_values(const float* weights, const float* const* values, const float* kept, int64_t begin,
                                int64_t end, int64_t dim, int64_t column, float* results) {
  Lanes sums[kRows][kWide];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kWide; ++j) sums[r][j] = load(results + r * dim + column + j * kLanes) * kept[r];
  }
  for (int64_t i = begin; i < end; ++i) {
    Lanes value[kWide];
    for (int j = 0; j < kWide; ++j) value[j] = load(values[i] + column + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kWide; ++j) sums[r][j] += value[j] * weights[r * kPositions + i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kWide; ++j) store(results + r * dim + column + j * kLanes, sums[r][j]);
  }
}

// Turns a row's scores into weights: zero outside [begin, end), and the softmax's running maximum and sum with them.
// Returns what the row's results so far are to be multiplied by.
JAXSERVE_INLINE float weigh(float* scores, int64_t begin, int64_t end, float& maximum, float& sum) {
  if (begin >= end) {
    for (int64_t i = 0; i < kPositions; ++i) scores[i] = 0.0f;
    return 1.0f;
  }
  for (int64_t i = 0; i < begin; ++i) scores[i] = -INFINITY;
  for (int64_t i = end; i < kPositions; ++i) scores[i] = -INFINITY;
  const float before = maximum;
  maximum = std::max(before, largest(scores));
  Lanes total{};
  for (int64_t i = 0; i < kPositions; i += kLanes) {
    store(scores + i, load(scores + i) - maximum);
    exp_lanes(scores + i);
  }
  for (int64_t i = 0; i < begin; ++i) scores[i] = 0.0f;
  for (int64_t i = end; i < kPositions; ++i) scores[i] = 0.0f;
  for (int64_t i = 0; i < kPositions; i += kLanes) total += load(scores + i);
  const float kept = before == -INFINITY ? 0.0f : std::exp(before - maximum);
  sum = sum * kept + sum_lanes(total);
  return kept;
}

// kRows x kWide vectors are what the instruction set's registers hold.
template <int kRows, int kWide>
JAXSERVE_INLINE void attend_rows_of(const Problem& p, const Task& task, Scratch& scratch) {
  const int64_t group = p.group(), context = p.lengths[task.b], dim = p.dim;
  const int64_t num_rows = task.last - task.first;
  const int64_t padded = (num_rows + kRows - 1) / kRows * kRows;  // the last tile repeats its last row
  scratch.transposed.resize(dim * kPositions);
  scratch.scores.resize(kRows * kPositions);
  scratch.results.assign(padded * dim, 0.0f);
  scratch.maxima.assign(padded, -INFINITY);
  scratch.sums.assign(padded, 0.0f);

  const auto query_of = [&](int64_t row) { return (task.first + std::min(row, num_rows - 1)) / group; };
  const auto head_of = [&](int64_t row) { return task.kv * group + (task.first + std::min(row, num_rows - 1)) % group; };
  const auto first_seen = [&](int64_t query) {
    return p.window == 0 ? 0 : std::max<int64_t>(0, context + query - p.window + 1);
  };
  const auto last_seen = [&](int64_t query) { return context + query + 1; };

  const int64_t stop = last_seen(query_of(num_rows - 1));
  for (int64_t begin = first_seen(query_of(0)) / kPositions * kPositions; begin < stop; begin += kPositions) {
    const int64_t span = std::min(kPositions, stop - begin);
    locate_keys_and_values(p, task.b, task.kv, begin, begin + span, scratch.keys, scratch.values);
    for (int64_t d = 0; d < dim; ++d) {
      float* column = scratch.transposed.data() + d * kPositions;
      for (int64_t i = 0; i < span; ++i) column[i] = scratch.keys[i][d];
      for (int64_t i = span; i < kPositions; ++i) column[i] = 0.0f;
    }
    for (int64_t row = 0; row < padded; row += kRows) {
      const int64_t from = std::max<int64_t>(0, first_seen(query_of(row)) - begin);
      const int64_t to = std::min(span, last_seen(query_of(row + kRows - 1)) - begin);
      if (from >= to) continue;
      const float* q[kRows];
      for (int r = 0; r < kRows; ++r) {
        q[r] = p.q + ((task.b * p.queries + query_of(row + r)) * p.heads + head_of(row + r)) * dim;
      }
      float* scores = scratch.scores.data();
      score_tile<kRows, kWide>(q, scratch.transposed.data(), dim, p.scale, to, scores);
      float kept[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t query = query_of(row + r);
        const int64_t first = std::clamp<int64_t>(first_seen(query) - begin, 0, span);
        const int64_t last = std::clamp<int64_t>(last_seen(query) - begin, 0, span);
        kept[r] = weigh(scores + r * kPositions, first, last, scratch.maxima[row + r], scratch.sums[row + r]);
      }
      float* results = scratch.results.data() + row * dim;
      int64_t column = 0;
      for (; column + kWide * kLanes <= dim; column += kWide * kLanes) {
        add_values<kRows, kWide>(scores, scratch.values, kept, from, to, dim, column, results);
      }
      for (; column < dim; column += kLanes) {
        add_values<kRows, 1>(scores, scratch.values, kept, from, to, dim, column, results);
      }
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float sum = scratch.sums[row], kept = 1.0f;  // a token always sees itself: sum > 0
    if (p.sinks != nullptr) {
      const float sink = p.sinks[head_of(row)];
      const float maximum = std::max(scratch.maxima[row], sink);
      kept = std::exp(scratch.maxima[row] - maximum);
      sum = sum * kept + std::exp(sink - maximum);
    }
    float* target = p.out + ((task.b * p.queries + query_of(row)) * p.heads + head_of(row)) * dim;
    const float* result = scratch.results.data() + row * dim;
    for (int64_t d = 0; d < dim; ++d) target[d] = result[d] * kept / sum;
  }
}

using AttendRows = void (*)(const Problem&, const Task&);

// One copy of the kernel for each instruction set.
#define JAXSERVE_DEFINE_ATTEND_ROWS(name, attributes, rows, wide) \
  attributes void name(const Problem& p, const Task& task) {      \
    thread_local Scratch scratch;                                 \
    attend_rows_of<rows, wide>(p, task, scratch);                 \
  }

JAXSERVE_DEFINE_ATTEND_ROWS(attend_rows_portable, , 2, 1)
#if defined(__x86_64__)
JAXSERVE_DEFINE_ATTEND_ROWS(attend_rows_avx2, JAXSERVE_AVX2, 4, 1)
JAXSERVE_DEFINE_ATTEND_ROWS(attend_rows_avx512, JAXSERVE_AVX512, 6, 4)
#endif

AttendRows choose_attend_rows() {
#if defined(__x86_64__)
  switch (detect_isa()) {
    case Isa::kAvx512: return attend_rows_avx512;
    case Isa::kAvx2: return attend_rows_avx2;
    case Isa::kPortable: break;
  }
#endif
  return attend_rows_portable;
}

}  // namespace

bool is_prompt(const Problem& p) {
  return p.seen == nullptr && p.queries * p.group() >= kFewestRows && p.dim % kLanes == 0;
}

void attend_prompt(xla::ffi::ThreadPool& pool, const Problem& p) {
  const int64_t rows = p.queries * p.group();
  int64_t multiplications = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    multiplications += 2 * (p.lengths[b] + p.queries - p.start(b)) * p.queries * p.heads * p.dim;
  }
  const int64_t threads = multiplications < kWorthAThread ? 1 : pool.num_threads();
  const int64_t wanted = threads == 1 ? 1 : kTasksPerThread * threads;
  const int64_t parts = std::max<int64_t>(1, wanted / (p.batch * p.kv_heads));  // of the rows of a KV head
  const int64_t size = std::clamp((rows + parts - 1) / parts, std::min(kFewestRows, rows), kMostTaskRows);
  std::vector<Task> tasks;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
      for (int64_t first = 0; first < rows; first += size) {
        tasks.push_back({b, kv, first, std::min(rows, first + size)});
      }
    }
  }
  static const AttendRows attend_rows = choose_attend_rows();
  run_tasks(pool, static_cast<int64_t>(tasks.size()), threads, [&](int64_t index) { attend_rows(p, tasks[index]); });
}

}  // namespace jaxserve::cpu
