// Vector arithmetic on 16 floats, in the compiler's own vector types: lowered to whatever instruction set the function
// it is inlined into was compiled for.
#pragma once

#include <cstdint>
#include <cstring>

#define JAXSERVE_INLINE inline __attribute__((always_inline))

namespace jaxserve::cpu {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

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

typedef float Half __attribute__((vector_size(8 * sizeof(float)), aligned(4), may_alias));
typedef float Quarter __attribute__((vector_size(4 * sizeof(float)), aligned(4), may_alias));

typedef int32_t QuarterIndex __attribute__((vector_size(4 * sizeof(int32_t))));

// Sum of the lanes, by halving: adding them one by one is a chain of sixteen dependent additions.
JAXSERVE_INLINE float sum_lanes(const Lanes& v) {
  Half halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

JAXSERVE_INLINE Lanes load(const float* from) {
  Lanes v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

JAXSERVE_INLINE void store(float* to, const Lanes& v) { std::memcpy(to, &v, sizeof(v)); }

// kVectors > 0: dim is kVectors * kLanes, known when compiled. 0: any dim.
template <int kVectors>
JAXSERVE_INLINE float dot(const float* a, const float* b, int64_t dim) {
  Lanes sum{};
  if constexpr (kVectors > 0) {
    for (int i = 0; i < kVectors; ++i) sum += load(a + i * kLanes) * load(b + i * kLanes);
    return sum_lanes(sum);
  } else {
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) sum += load(a + i) * load(b + i);
    float total = sum_lanes(sum);
    for (; i < dim; ++i) total += a[i] * b[i];
    return total;
  }
}

// out += sum over [begin, end) of weights[i] * *rows[i]; the accumulators stay in registers when dim is known.
template <int kVectors>
JAXSERVE_INLINE void add_weighted(float* out, const float* const* rows, const float* weights, int64_t begin,
                                  int64_t end, int64_t dim) {
  if constexpr (kVectors > 0) {
    Lanes sums[kVectors];
    for (int j = 0; j < kVectors; ++j) sums[j] = load(out + j * kLanes);
    for (int64_t i = begin; i < end; ++i) {
      for (int j = 0; j < kVectors; ++j) sums[j] += load(rows[i] + j * kLanes) * weights[i];
    }
    for (int j = 0; j < kVectors; ++j) store(out + j * kLanes, sums[j]);
  } else {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = 0; d < dim; ++d) out[d] += weights[i] * rows[i][d];
    }
  }
}

}  // namespace jaxserve::cpu
