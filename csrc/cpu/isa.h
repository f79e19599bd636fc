// Which instruction set the kernels run with, asked of the processor's features when they first run: the extension may
// be built on one machine and used on another. (The compiler's own multiversioning asks for the CPU model instead, and
// gives other vendors' processors the slowest version.)
#pragma once

namespace jaxserve::cpu {

#if defined(__x86_64__)
#define JAXSERVE_AVX2 __attribute__((target("avx2,fma")))
#define JAXSERVE_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")))
#endif

enum class Isa { kPortable, kAvx2, kAvx512 };

inline Isa detect_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

}  // namespace jaxserve::cpu
