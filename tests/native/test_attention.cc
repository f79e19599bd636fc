// The CPU's paged attention, on a pool of threads, against the formula.
#include <cmath>
#include <cstring>
#include <random>

#include "cpu/parallel.h"
#include "rig.h"

namespace native_tests {
namespace {

struct Case {
  int64_t batch, queries, heads, kv_heads, dim, page_size, width, window;
  bool is_tree = false;  // the new tokens are a random tree instead of a chain
  bool has_sinks = false;
};

struct Attention {
  explicit Attention(const Case& c, unsigned seed) : c(c) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      values.resize(count);
      for (float& value : values) value = normal(random);
    };
    const int64_t num_pages = c.batch * c.width + 1;
    fill(q, c.batch * c.queries * c.heads * c.dim);
    fill(k_new, c.batch * c.queries * c.kv_heads * c.dim);
    fill(v_new, k_new.size());
    fill(pool, 2 * c.kv_heads * num_pages * c.page_size * c.dim);
    for (int64_t i = 0; i < c.batch * c.width; ++i) tables.push_back(static_cast<int32_t>(num_pages - 1 - i));
    for (int64_t b = 0; b < c.batch; ++b) {
      lengths.push_back(static_cast<int32_t>(c.width * c.page_size - b * 7 > 0 ? c.width * c.page_size - b * 7 : 0));
    }
    for (int64_t b = 0; c.is_tree && b < c.batch; ++b) {
      const std::size_t first = depths.size();
      for (int64_t t = 0; t < c.queries; ++t) {
        const int64_t parent = t == 0 ? -1 : static_cast<int64_t>(random() % t);
        for (int64_t j = 0; j < c.queries; ++j) {  // what its parent sees, and itself
          const bool inherited = parent >= 0 && seen[(b * c.queries + parent) * c.queries + j];
          seen.push_back(j == t || inherited);
        }
        depths.push_back(parent < 0 ? 0 : depths[first + parent] + 1);
      }
    }
    if (c.has_sinks) fill(sinks, c.heads);
    out.assign(q.size(), -1);
    pool_dims = {1, 2, c.kv_heads, num_pages, c.page_size, c.dim};
  }

  std::string run(ThreadPool& threads) {
    const std::vector<int64_t> q_dims = {c.batch, c.queries, c.heads, c.dim};
    const std::vector<int64_t> k_dims = {c.batch, c.queries, c.kv_heads, c.dim};
    return call(twin::handlers().at("jaxserve_paged_attention"),
                {{q.data(), XLA_FFI_DataType_F32, q_dims},
                 {k_new.data(), XLA_FFI_DataType_F32, k_dims},
                 {v_new.data(), XLA_FFI_DataType_F32, k_dims},
                 {pool.data(), XLA_FFI_DataType_F32, pool_dims},
                 {tables.data(), XLA_FFI_DataType_S32, {c.batch, c.width}},
                 {lengths.data(), XLA_FFI_DataType_S32, {c.batch}},
                 {seen.data(), XLA_FFI_DataType_U8, {static_cast<int64_t>(seen.size())}},
                 {depths.data(), XLA_FFI_DataType_S32, {static_cast<int64_t>(depths.size())}},
                 {sinks.data(), XLA_FFI_DataType_F32, {static_cast<int64_t>(sinks.size())}}},
                {{out.data(), XLA_FFI_DataType_F32, q_dims}},
                {{"layer", int64_t{0}}, {"scale", kScale}, {"window", c.window}}, &threads);
  }

  // Key (kind 0) or value (kind 1) of a position.
  const float* row(int64_t kind, int64_t b, int64_t kv, int64_t position) const {
    const auto& fresh = kind == 0 ? k_new : v_new;
    if (position >= lengths[b]) return &fresh[((b * c.queries + position - lengths[b]) * c.kv_heads + kv) * c.dim];
    const int64_t page = tables[b * c.width + position / c.page_size];
    return &pool[(((kind * c.kv_heads + kv) * pool_dims[3] + page) * c.page_size + position % c.page_size) * c.dim];
  }

  double largest_error() const {
    double largest = 0;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t t = 0; t < c.queries; ++t) {
        for (int64_t h = 0; h < c.heads; ++h) {
          const int64_t kv = h / (c.heads / c.kv_heads), last = lengths[b] + t;
          const int64_t position = c.is_tree ? lengths[b] + depths[b * c.queries + t] : last;
          const int64_t first = c.window == 0 ? 0 : std::max<int64_t>(0, position - c.window + 1);
          const int64_t at = ((b * c.queries + t) * c.heads + h) * c.dim;
          std::vector<double> wanted(c.dim);
          double sum = c.has_sinks ? std::exp(sinks[h]) : 0;
          for (int64_t p = first; p <= last; ++p) {
            const int64_t fresh = p - lengths[b];
            if (c.is_tree && fresh >= 0 && !seen[(b * c.queries + t) * c.queries + fresh]) continue;
            double score = 0;
            for (int64_t d = 0; d < c.dim; ++d) score += q[at + d] * row(0, b, kv, p)[d];
            const double weight = std::exp(score * kScale);
            sum += weight;
            for (int64_t d = 0; d < c.dim; ++d) wanted[d] += weight * row(1, b, kv, p)[d];
          }
          for (int64_t d = 0; d < c.dim; ++d) {
            const double error = std::abs(wanted[d] / sum - out[at + d]);
            if (std::isnan(error)) return INFINITY;
            largest = std::max(largest, error);
          }
        }
      }
    }
    return largest;
  }

  static constexpr float kScale = 0.125f;
  const Case c;
  std::vector<float> q, k_new, v_new, pool, sinks, out;
  std::vector<int32_t> tables, lengths, depths;
  std::vector<uint8_t> seen;
  std::vector<int64_t> pool_dims;
};

TEST(attention_equals_the_formula_from_several_programs_at_once) {
  ThreadPool pool(3);
  const std::vector<Case> cases = {
      {3, 1, 4, 2, 64, 16, 40, 0},   // threads, whole lanes
      {2, 3, 4, 4, 64, 8, 60, 100},  // a window, several queries
      {2, 2, 6, 2, 12, 4, 5, 0},     // odd dimension, one thread
      {1, 1, 2, 1, 32, 1, 300, 0},   // pages of one token, chunks
      {2, 9, 4, 2, 64, 8, 45, 0, true},    // trees, on threads
      {2, 6, 4, 2, 32, 4, 20, 30, true},   // trees, a window over the context
      {2, 2, 6, 2, 24, 8, 70, 40, false, true},  // sinks
      {1, 70, 6, 2, 64, 16, 9, 0},                  // a prompt chunk behind a context, on threads
      {2, 67, 3, 1, 32, 16, 0, 0},                  // two prompts without one; rows that fill no tile, nor block
      {1, 45, 6, 3, 80, 8, 12, 50, false, true},    // a window that leaves whole blocks out, sinks, five vectors
      {1, 150, 4, 4, 16, 4, 40, 20},                // a window smaller than a block, one head per group
      {1, 40, 2, 1, 24, 8, 5, 0},                   // many rows, but no whole vectors
  };
  Threads threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.start([&, t] {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        Attention attention(cases[(i + t) % cases.size()], t);
        CHECK(attention.run(pool).empty());
        CHECK(attention.largest_error() < 1e-4);
      }
    });
  }
  threads.join();
}

// A weight of zero does not silence a value that is not a number, and recycled pages may hold such.
TEST(attention_reads_nothing_outside_what_it_sees) {
  ThreadPool pool(2);
  for (const Case& c : {Case{1, 1, 2, 1, 32, 16, 3, 0}, Case{1, 50, 6, 2, 64, 16, 8, 0}, {1, 50, 6, 2, 64, 16, 8, 30}}) {
    Attention attention(c, 1);
    attention.lengths[0] -= 5;
    const int64_t page_floats = c.page_size * c.dim, num_pages = attention.pool_dims[3];
    for (int64_t of = 0; of < 2 * c.kv_heads; ++of) {
      float* pages = &attention.pool[of * num_pages * page_floats];
      float* last = pages + attention.tables[c.width - 1] * page_floats;
      std::fill(last + page_floats - 5 * c.dim, last + page_floats, NAN);
      std::fill_n(pages, page_floats, NAN);  // the null page
      for (int64_t i = 0; c.window != 0 && (i + 1) * c.page_size <= attention.lengths[0] - c.window; ++i) {
        std::fill_n(pages + attention.tables[i] * page_floats, page_floats, NAN);  // all in front of the window
      }
    }
    CHECK(attention.run(pool).empty());
    CHECK(attention.largest_error() < 1e-4);
  }
}

// Were later tokens masked behind the maximum instead of ahead of it, all that a token does see would underflow.
TEST(attention_is_not_moved_by_likelier_tokens_it_does_not_see) {
  ThreadPool pool(2);
  for (int64_t queries : {4, 50}) {
    Attention attention({1, queries, 6, 2, 64, 16, 8, 0}, 1);
    for (int64_t i = 0; i < 2 * 64; ++i) attention.k_new[(queries - 1) * 2 * 64 + i] *= 60;
    CHECK(attention.run(pool).empty());
    CHECK(attention.largest_error() < 1e-4);
  }
  Attention attention({1, 50, 6, 2, 64, 16, 8, 10}, 1);  // and in front of the window: what the first query sees alone
  const int64_t position = attention.lengths[0] - 9;
  for (int64_t kv = 0; kv < 2; ++kv) {
    for (int64_t d = 0; d < 64; ++d) const_cast<float*>(attention.row(0, 0, kv, position))[d] *= 60;
  }
  CHECK(attention.run(pool).empty());
  CHECK(attention.largest_error() < 1e-4);
}

TEST(attention_refuses_what_would_read_outside_the_pool) {
  ThreadPool pool(1);
  Attention attention({1, 1, 2, 1, 8, 4, 3, 0}, 1);
  attention.tables[1] = 99;
  CHECK(attention.run(pool).find("names a page outside the pool") != std::string::npos);
  attention.tables[1] = 1;
  attention.lengths[0] = 13;
  CHECK(attention.run(pool).find("a length is outside its block table") != std::string::npos);
}

TEST(attention_refuses_half_a_tree) {
  ThreadPool pool(1);
  Attention attention({1, 3, 2, 1, 8, 4, 3, 0, true}, 1);
  attention.depths.pop_back();
  CHECK(attention.run(pool).find("a tree needs a mask") != std::string::npos);
}

TEST(attention_without_memory_is_an_error_of_the_program) {
  ThreadPool pool(1);
  Attention attention({1, 1, 2, 1, 8, 4, 3, 0}, 1);
  Faults::instance().fail_nth("allocate", 1);
  CHECK(attention.run(pool).find("injected fault: allocate 1") != std::string::npos);
  CHECK(attention.run(pool).empty());
}

}  // namespace
}  // namespace native_tests
