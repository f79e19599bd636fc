// Paged attention for a few query tokens per sequence (decode and verify), float32, on the CPU.
//
// Each sequence attends over its cached context, read through its private block-table row, and causally over the new
// tokens of this step, whose keys and values come as operands: the pool is only read, and is written later in the same
// program. Context is cut into chunks so that one long sequence still fills every core (split-KV); chunk results are
// merged with the running-maximum form of softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// One clone per instruction set, chosen when the library loads: the extension may be built on one machine and run on
// another. Inlined helpers are compiled once per clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAXSERVE_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define JAXSERVE_CLONES
#endif
#define JAXSERVE_INLINE inline __attribute__((always_inline))

namespace jaxserve::cpu {
namespace {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

constexpr int64_t kChunk = 256;  // context positions per task

struct Problem {
  int64_t batch, queries, heads, kv_heads, dim, pages, page_size, table_width;
  const float *q, *k_new, *v_new, *keys, *values;
  const int32_t *tables, *lengths;
  float* out;
  float scale;
  int64_t window;  // 0: none; otherwise a token sees itself and window - 1 tokens before it
};

// exp(x) for x <= 0: 2^n * p(r), p the degree-6 minimax of exp on [-ln2/2, ln2/2] (Cephes expf). Error below 2 ulp.
JAXSERVE_INLINE void exp_lanes(float* x) {
  Lanes v;
  std::memcpy(&v, x, sizeof(v));
  v = v < -87.0f ? Lanes{} - 87.0f : v;
  const Lanes t = v * 1.44269504088896341f;
  IntLanes n = __builtin_convertvector(t - 0.5f, IntLanes);  // t <= 0, so truncation rounds to nearest
  const Lanes nf = __builtin_convertvector(n, Lanes);
  Lanes r = v - nf * 0.693359375f;
  r = r + nf * 2.12194440e-4f;
  Lanes p = Lanes{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntLanes bits = (n + 127) << 23;
  Lanes power;
  std::memcpy(&power, &bits, sizeof(power));
  p = p * power;
  std::memcpy(x, &p, sizeof(p));
}

JAXSERVE_INLINE float dot(const float* a, const float* b, int64_t n) {
  Lanes sum{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes x, y;
    std::memcpy(&x, a + i, sizeof(x));
    std::memcpy(&y, b + i, sizeof(y));
    sum += x * y;
  }
  float total = 0;
  for (int j = 0; j < kLanes; ++j) total += sum[j];
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

JAXSERVE_INLINE void add_scaled(float* out, const float* v, float weight, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes x, y;
    std::memcpy(&x, out + i, sizeof(x));
    std::memcpy(&y, v + i, sizeof(y));
    x += y * weight;
    std::memcpy(out + i, &x, sizeof(x));
  }
  for (; i < n; ++i) out[i] += weight * v[i];
}

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

// Where a position's key (or value) row lies: in the pool for the context, in this step's operand for new tokens.
struct RowAddress {
  const float* pool;  // this layer's and head's [pages, page_size, dim]
  const int32_t* table;
  const float* fresh;  // [queries, kv_heads, dim] of this sequence, at this head
  int64_t context, page_size, dim, fresh_stride;

  JAXSERVE_INLINE const float* at(int64_t position) const {
    if (position >= context) return fresh + (position - context) * fresh_stride;
    const int64_t page = table[position / page_size];
    return pool + (page * page_size + position % page_size) * dim;
  }
};

// Attends rows (query, head of the group) of one sequence and KV head over positions [begin, end).
JAXSERVE_CLONES
void attend_chunk(const Problem& p, int64_t b, int64_t kv, int64_t begin, int64_t end, Partial* partials,
                  float* values) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t context = p.lengths[b];
  const int64_t head_stride = p.pages * p.page_size * p.dim;
  const int64_t fresh_stride = p.kv_heads * p.dim;
  const int32_t* table = p.tables + b * p.table_width;
  const int64_t fresh = b * p.queries * fresh_stride + kv * p.dim;
  const RowAddress keys{p.keys + kv * head_stride, table, p.k_new + fresh, context, p.page_size, p.dim, fresh_stride};
  const RowAddress vals{p.values + kv * head_stride, table, p.v_new + fresh, context, p.page_size, p.dim, fresh_stride};

  const int64_t num_rows = p.queries * group;
  const int64_t span = end - begin;
  const int64_t padded = (span + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> scores;
  if (static_cast<int64_t>(scores.size()) < num_rows * padded) scores.resize(num_rows * padded);

  for (int64_t i = 0; i < span; ++i) {
    const int64_t position = begin + i;
    const float* key = keys.at(position);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t query = row / group;
      const int64_t query_position = context + query;
      const bool visible = position <= query_position && (p.window == 0 || position > query_position - p.window);
      const float* q = p.q + ((b * p.queries + query) * p.heads + kv * group + row % group) * p.dim;
      scores[row * padded + i] = visible ? dot(q, key, p.dim) * p.scale : -INFINITY;
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float* s = scores.data() + row * padded;
    float maximum = -INFINITY;
    for (int64_t i = 0; i < span; ++i) maximum = std::max(maximum, s[i]);
    partials[row].maximum = maximum;
    if (maximum == -INFINITY) {
      std::fill(s, s + padded, 0.0f);
      continue;
    }
    for (int64_t i = 0; i < span; ++i) s[i] -= maximum;
    std::fill(s + span, s + padded, -INFINITY);
    float sum = 0;
    for (int64_t i = 0; i < padded; i += kLanes) exp_lanes(s + i);
    for (int64_t i = 0; i < span; ++i) sum += s[i];
    partials[row].sum = sum;
  }
  for (int64_t i = 0; i < span; ++i) {
    const float* value = vals.at(begin + i);
    for (int64_t row = 0; row < num_rows; ++row) {
      add_scaled(values + row * p.dim, value, scores[row * padded + i], p.dim);
    }
  }
}

struct Task {
  int64_t b, kv, begin, end;
  int64_t first_row;  // index of its first row in the partial results
};

// Tasks are taken from one counter by the caller and by pool threads. The caller never waits for a task nobody has
// started, so a busy pool cannot stall it.
struct TaskBoard {
  explicit TaskBoard(std::vector<Task> tasks) : tasks(std::move(tasks)) {}

  void work(const Problem& p, std::vector<Partial>& partials, std::vector<float>& values) {
    while (true) {
      const std::size_t index = next.fetch_add(1);
      if (index >= tasks.size()) return;
      const Task& task = tasks[index];
      attend_chunk(p, task.b, task.kv, task.begin, task.end, partials.data() + task.first_row,
                   values.data() + task.first_row * p.dim);
      if (finished.fetch_add(1) + 1 == tasks.size()) {
        std::lock_guard<std::mutex> lock(mutex);
        all_finished.notify_all();
      }
    }
  }

  const std::vector<Task> tasks;
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> finished{0};
  std::mutex mutex;
  std::condition_variable all_finished;
};

struct Run {
  Run(Problem problem, std::vector<Task> tasks, int64_t num_rows)
      : problem(problem), board(std::move(tasks)), partials(num_rows), values(num_rows * problem.dim) {}
  Problem problem;
  TaskBoard board;
  std::vector<Partial> partials;
  std::vector<float> values;
};

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_new,
                           ffi::Buffer<ffi::F32> v_new, ffi::Buffer<ffi::F32> kv_pool, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> lengths, ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t layer,
                           float scale, int64_t window) {
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

  const int64_t rows_per_head = p.queries * (p.heads / p.kv_heads);
  std::vector<Task> tasks;
  int64_t num_rows = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t context = p.lengths[b];
    if (context < 0 || context > p.table_width * p.page_size) return wrong("a length is outside its block table");
    for (int64_t i = 0; i < (context + p.page_size - 1) / p.page_size; ++i) {
      const int32_t page = p.tables[b * p.table_width + i];
      if (page < 0 || page >= p.pages) return wrong("a block table names a page outside the pool");
    }
    const int64_t end = context + p.queries;
    const int64_t start = p.window == 0 ? 0 : std::max<int64_t>(0, context - p.window + 1);
    const int64_t chunks = std::max<int64_t>(1, (end - start + kChunk - 1) / kChunk);
    const int64_t size = (end - start + chunks - 1) / chunks;
    for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
      for (int64_t begin = start; begin < end; begin += size) {
        tasks.push_back({b, kv, begin, std::min(end, begin + size), num_rows});
        num_rows += rows_per_head;
      }
    }
  }

  auto run = std::make_shared<Run>(p, std::move(tasks), num_rows);
  TaskBoard& board = run->board;
  const int64_t helpers =
      std::min<int64_t>(std::max<int64_t>(pool.num_threads(), 1) - 1, static_cast<int64_t>(board.tasks.size()) - 1);
  for (int64_t i = 0; i < helpers; ++i) {
    // The run is shared: a helper that starts after we returned finds no task and only drops its reference.
    pool.Schedule([run] { run->board.work(run->problem, run->partials, run->values); });
  }
  board.work(run->problem, run->partials, run->values);
  if (board.finished.load() != board.tasks.size()) {
    std::unique_lock<std::mutex> lock(board.mutex);
    board.all_finished.wait(lock, [&] { return board.finished.load() == board.tasks.size(); });
  }

  const int64_t group = p.heads / p.kv_heads;
  std::vector<float> merged(p.dim);
  std::size_t index = 0;
  while (index < board.tasks.size()) {
    std::size_t last = index + 1;  // tasks of one (sequence, KV head) are neighbours
    while (last < board.tasks.size() && board.tasks[last].b == board.tasks[index].b &&
           board.tasks[last].kv == board.tasks[index].kv) {
      ++last;
    }
    const Task& first = board.tasks[index];
    for (int64_t row = 0; row < rows_per_head; ++row) {
      Partial total;
      std::fill(merged.begin(), merged.end(), 0.0f);
      for (std::size_t t = index; t < last; ++t) {
        const int64_t r = board.tasks[t].first_row + row;
        merge(total, merged.data(), run->partials[r], run->values.data() + r * p.dim, p.dim);
      }
      const int64_t query = row / group;
      float* target = p.out + ((first.b * p.queries + query) * p.heads + first.kv * group + row % group) * p.dim;
      for (int64_t d = 0; d < p.dim; ++d) target[d] = merged[d] / total.sum;  // a token always sees itself: sum > 0
    }
    index = last;
  }
  return ffi::Error::Success();
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
                                  .Ret<ffi::Buffer<ffi::F32>>()   // out, as q
                                  .Attr<int64_t>("layer")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

}  // namespace jaxserve::cpu
