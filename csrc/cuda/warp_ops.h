// The instructions that paged_attention_kernel.h is made of.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxserve::cuda {

struct WarpOps {
  // c += a * b, m16n8k16, bfloat16 with float32 sums (PTX ISA, "mma.m16n8k16").
  static __device__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  static __device__ float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
  static __device__ void sync_block() { __syncthreads(); }
  static __device__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // Two floats as bfloat16, the first in the low half.
  static __device__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ uint16_t round(float x) { return static_cast<uint16_t>(pack(x, 0.0f)); }
  static __device__ uint32_t byte_perm(uint32_t x, uint32_t y, uint32_t select) { return __byte_perm(x, y, select); }
  static __device__ uint4 load16(const uint16_t* from) { return *reinterpret_cast<const uint4*>(from); }
  static __device__ uint2 load8(const uint16_t* from) { return *reinterpret_cast<const uint2*>(from); }
  static __device__ void store16(uint16_t* to, uint4 value) { *reinterpret_cast<uint4*>(to) = value; }
};

}  // namespace jaxserve::cuda
