// How often something took how long: buckets that double from a microsecond, as a Prometheus histogram wants them.
#pragma once

#include <array>
#include <cstdint>

namespace jaxserve {

struct Durations {
  static constexpr int kNumBuckets = 25;  // the last one holds everything longer than 2^23 us, 8.4 s

  std::array<uint64_t, kNumBuckets> counts{};  // counts[i]: longer than 2^(i-1) us, at most 2^i us
  uint64_t total_ns = 0;

  void add(uint64_t ns) {
    int bucket = 0;
    while (bucket < kNumBuckets - 1 && ns > (uint64_t{1000} << bucket)) ++bucket;
    counts[bucket] += 1;
    total_ns += ns;
  }
};

}  // namespace jaxserve
