// y = x * w^T for few rows of x, float32, on the CPU: the products of decode and verify, where reading w is what costs.
//
// w is streamed once, row by row, with prefetches that run ahead of the reads; the partial sums of one row of w with up
// to eight rows of x stay in registers. A result is the sum of one row of x with one row of w in an order that depends
// on their length alone: not on the number of rows, nor on threads. So a token's row comes out bit for bit the same in
// a decode step of any batch size and in a verify step of any width.
#include <algorithm>
#include <cstring>
#include <string>

#include "common/faults.h"
#include "cpu/isa.h"
#include "cpu/lanes.h"
#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cpu {
namespace {

constexpr int64_t kTile = 8;                  // rows of x per pass over a row of w
constexpr int64_t kBlockRows = 4;             // of w, that every pass goes over before the next block's turn
constexpr int64_t kTaskFloats = 64 * 1024;    // of w, per task
constexpr int64_t kWorthAThread = 64 * 1024;  // floats of w below which one thread does it all

struct Product {
  const float *x, *w;
  float* y;
  int64_t rows, in, out;
};

// Half of the way to the sum of the lanes: four sums.
JAXSERVE_INLINE Quarter sum_quarters(const Lanes& v) {
  Half halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  return quarters[0] + quarters[1];
}

// The sums of four vectors' lanes, each added in the order of sum_lanes.
JAXSERVE_INLINE Quarter sum_lanes_of_four(const Lanes* v) {
  const Quarter a = sum_quarters(v[0]), b = sum_quarters(v[1]), c = sum_quarters(v[2]), d = sum_quarters(v[3]);
  const Quarter ab = __builtin_shuffle(a, b, QuarterIndex{0, 4, 1, 5}) + __builtin_shuffle(a, b, QuarterIndex{2, 6, 3, 7});
  const Quarter cd = __builtin_shuffle(c, d, QuarterIndex{0, 4, 1, 5}) + __builtin_shuffle(c, d, QuarterIndex{2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, QuarterIndex{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, QuarterIndex{2, 3, 6, 7});
}

// kCount rows of x with one row of w. Meanwhile lines from `ahead` on are asked for, one for every kEvery lines of w
// (none if it is 0); what lies beyond w is asked for in vain, which does no harm.
template <int kCount, int kEvery>
JAXSERVE_INLINE void multiply_row(const Product& p, const float* w, const float* ahead, const float* x, float* y) {
  constexpr int kStep = kEvery == 0 ? 1 : kEvery;
  Lanes sums[kCount];
  for (int t = 0; t < kCount; ++t) sums[t] = Lanes{};
  const auto add = [&](int64_t at) __attribute__((always_inline)) {
    const Lanes weights = load(w + at);
    for (int t = 0; t < kCount; ++t) sums[t] += weights * load(x + t * p.in + at);
  };
  int64_t i = 0;
  for (; i + kStep * kLanes <= p.in; i += kStep * kLanes) {
    if constexpr (kEvery > 0) __builtin_prefetch(ahead + i / kStep);
    for (int step = 0; step < kStep; ++step) add(i + step * kLanes);
  }
  for (; i + kLanes <= p.in; i += kLanes) add(i);
  float totals[kCount];
  constexpr int kFours = kCount / 4 * 4;
  for (int t = 0; t < kFours; t += 4) {
    const Quarter four = sum_lanes_of_four(sums + t);
    std::memcpy(totals + t, &four, sizeof(four));
  }
  for (int t = kFours; t < kCount; ++t) totals[t] = sum_lanes(sums[t]);
  for (; i < p.in; ++i) {
    for (int t = 0; t < kCount; ++t) totals[t] += w[i] * x[t * p.in + i];
  }
  for (int t = 0; t < kCount; ++t) y[t * p.out] = totals[t];
}

// Rows [begin, end) of w. Where x takes several passes, each goes over a block of rows that stays in the cache, and
// the first two ask for the next block, half of it each: asked for all at once, it would come no sooner, and the
// reads of this block would queue behind it.
template <int kEvery>
JAXSERVE_INLINE void multiply_pass(const Product& p, int64_t first, int64_t count, int64_t begin, int64_t end,
                                   const float* ahead) {
  for (int64_t row = begin; row < end; ++row) {
    const float* w = p.w + row * p.in;
    const float* x = p.x + first * p.in;
    float* y = p.y + first * p.out + row;
    switch (count) {
      case 1: multiply_row<1, kEvery>(p, w, ahead, x, y); break;
      case 2: multiply_row<2, kEvery>(p, w, ahead, x, y); break;
      case 3: multiply_row<3, kEvery>(p, w, ahead, x, y); break;
      case 4: multiply_row<4, kEvery>(p, w, ahead, x, y); break;
      case 5: multiply_row<5, kEvery>(p, w, ahead, x, y); break;
      case 6: multiply_row<6, kEvery>(p, w, ahead, x, y); break;
      case 7: multiply_row<7, kEvery>(p, w, ahead, x, y); break;
      default: multiply_row<kTile, kEvery>(p, w, ahead, x, y);
    }
    if constexpr (kEvery > 0) ahead += p.in / kEvery;
  }
}

JAXSERVE_INLINE void multiply_rows_any(const Product& p, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; block += kBlockRows) {
    const int64_t stop = std::min(end, block + kBlockRows);
    // Behind the last block nothing is asked for but lines that are there already.
    const float* next = p.w + std::max<int64_t>(0, std::min(block + kBlockRows, p.out - kBlockRows)) * p.in;
    if (p.rows <= kTile) {
      multiply_pass<1>(p, 0, p.rows, block, stop, next);
      continue;
    }
    multiply_pass<2>(p, 0, kTile, block, stop, next);
    multiply_pass<2>(p, kTile, std::min(kTile, p.rows - kTile), block, stop, next + kBlockRows * p.in / 2);
    for (int64_t first = 2 * kTile; first < p.rows; first += kTile) {
      multiply_pass<0>(p, first, std::min(kTile, p.rows - first), block, stop, nullptr);
    }
  }
}

using MultiplyRows = void (*)(const Product&, int64_t, int64_t);

// One copy of the kernel for each instruction set.
#define JAXSERVE_DEFINE_MULTIPLY(name, attributes) \
  attributes void name(const Product& p, int64_t begin, int64_t end) { multiply_rows_any(p, begin, end); }

JAXSERVE_DEFINE_MULTIPLY(multiply_rows_portable, )
#if defined(__x86_64__)
JAXSERVE_DEFINE_MULTIPLY(multiply_rows_avx2, JAXSERVE_AVX2)
JAXSERVE_DEFINE_MULTIPLY(multiply_rows_avx512, JAXSERVE_AVX512)
#endif

MultiplyRows choose_multiply_rows() {
#if defined(__x86_64__)
  switch (detect_isa()) {
    case Isa::kAvx512: return multiply_rows_avx512;
    case Isa::kAvx2: return multiply_rows_avx2;
    case Isa::kPortable: break;
  }
#endif
  return multiply_rows_portable;
}

ffi::Error multiply_all(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                        ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const auto xd = x.dimensions();
  const auto wd = w.dimensions();
  const auto yd = y->dimensions();
  const auto wrong = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("jaxserve_skinny_matmul: ") + what);
  };
  if (xd.size() != 2 || wd.size() != 2 || yd.size() != 2) return wrong("wanted x [rows, in], w [out, in], y [rows, out]");
  if (xd[1] != wd[1] || yd[0] != xd[0] || yd[1] != wd[0]) return wrong("x [rows, in], w [out, in] and y do not match");
  const Product p{x.typed_data(), w.typed_data(), y->typed_data(), xd[0], xd[1], wd[0]};

  if (p.rows == 0) return ffi::Error::Success();
  static const MultiplyRows multiply_rows = choose_multiply_rows();
  Faults::instance().pass("allocate", "jaxserve_skinny_matmul");
  const int64_t rows_per_task = std::max<int64_t>(kBlockRows, kTaskFloats / std::max<int64_t>(1, p.in));
  const int64_t num_tasks = (p.out + rows_per_task - 1) / rows_per_task;
  const int64_t threads = p.out * p.in < kWorthAThread ? 1 : pool.num_threads();
  run_tasks(pool, num_tasks, threads, [&](int64_t task) {
    multiply_rows(p, task * rows_per_task, std::min(p.out, (task + 1) * rows_per_task));
  });
  return ffi::Error::Success();
}

// No exception may cross XLA's C interface.
ffi::Error skinny_matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                         ffi::Result<ffi::Buffer<ffi::F32>> y) {
  try {
    return multiply_all(pool, x, w, y);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jaxserve_skinny_matmul: ") + error.what());
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_skinny_matmul, skinny_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()    // x [rows, in]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // w [out, in]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // y [rows, out]

}  // namespace jaxserve::cpu
