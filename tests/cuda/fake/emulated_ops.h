// The instructions of csrc/cuda/warp_ops.h on the CPU: a block's threads are coroutines of one host thread, which give
// way wherever they would wait for others, and what a warp does together is computed when its last lane has come.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

namespace fake {

// Runs body(thread) for every thread of a block. Throws if some wait for others that have returned.
void run_block(int num_threads, const std::function<void(int)>& body);

struct EmulatedOps {
  static void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
  static float shuffle_xor(float value, int mask);
  static void sync_block();
  static float exp2(float x);
  static uint32_t pack(float low, float high);
  static uint16_t round(float x);
  static uint32_t byte_perm(uint32_t x, uint32_t y, uint32_t select);
  static uint4 load16(const uint16_t* from);
  static uint2 load8(const uint16_t* from);
  static void store16(uint16_t* to, uint4 value);
};

}  // namespace fake
