// The CPU's product with few rows, on a pool of threads, against the formula.
#include <cmath>
#include <random>

#include "rig.h"

namespace native_tests {
namespace {

struct Product {
  // `shift` floats ahead of each array, so that nothing is aligned for vectors.
  Product(int64_t rows, int64_t in, int64_t out, int64_t shift, unsigned seed)
      : rows(rows), in(in), out(out), shift(shift) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (auto* values : {&x, &w}) {
      values->resize(shift + (values == &x ? rows : out) * in);
      for (float& value : *values) value = normal(random);
    }
    y.assign(shift + rows * out, -1);
  }

  std::string run(ThreadPool& threads) {
    return call(twin::handlers().at("jaxserve_skinny_matmul"),
                {{x.data() + shift, XLA_FFI_DataType_F32, {rows, in}}, {w.data() + shift, XLA_FFI_DataType_F32, {out, in}}},
                {{y.data() + shift, XLA_FFI_DataType_F32, {rows, out}}}, {}, &threads);
  }

  double largest_error() const {
    double largest = 0;
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t o = 0; o < out; ++o) {
        double sum = 0;
        for (int64_t i = 0; i < in; ++i) sum += double{x[shift + t * in + i]} * w[shift + o * in + i];
        largest = std::max(largest, std::abs(sum - y[shift + t * out + o]));
      }
    }
    return largest;
  }

  const int64_t rows, in, out, shift;
  std::vector<float> x, w, y;
};

TEST(skinny_products_equal_the_formula_from_several_programs_at_once) {
  ThreadPool pool(3);
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 576, 300}, {4, 576, 301}, {8, 257, 290}, {9, 1536, 131}, {16, 129, 640}, {3, 7, 5}, {19, 33, 40}, {2, 70000, 3},
  };
  Threads threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.start([&, t] {
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        const auto& shape = shapes[(i + t) % shapes.size()];
        Product product(shape[0], shape[1], shape[2], static_cast<int64_t>(i % 3), t);
        CHECK(product.run(pool).empty());
        CHECK(product.largest_error() < 1e-2);
      }
    });
  }
  threads.join();
}

TEST(skinny_products_of_nothing_are_nothing_or_zero) {
  ThreadPool pool(2);
  Product no_rows(0, 16, 4, 0, 1), no_columns(2, 0, 3, 0, 1), no_outputs(2, 16, 0, 0, 1);
  CHECK(no_rows.run(pool).empty());
  CHECK(no_outputs.run(pool).empty());
  CHECK(no_columns.run(pool).empty());
  for (float value : no_columns.y) CHECK(value == 0);
}

TEST(skinny_product_without_memory_is_an_error_of_the_program) {
  ThreadPool pool(1);
  Product product(2, 16, 4, 0, 1);
  Faults::instance().fail_nth("allocate", 1);
  CHECK(product.run(pool).find("injected fault: allocate 1") != std::string::npos);
  CHECK(product.run(pool).empty());
}

}  // namespace
}  // namespace native_tests
