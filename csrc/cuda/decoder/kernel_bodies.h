// The bodies of kernels.h. `Ops` are the instructions (cuda/warp_ops.h); a test runs the same bodies on the CPU with
// emulated ones. A body is what one block does, or one warp where it says so.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/decoder/kernels.h"

namespace jaxserve::cuda::decoder {

constexpr int kThreads = 256;  // of a block
constexpr int kWarps = kThreads / 32;
constexpr int kLanes = 32;
constexpr int kEight = 8;  // bfloat16 that a thread loads at a time

__device__ inline float widened(uint32_t bits) {  // the low half
  bits <<= 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Eight {
  float values[kEight];
};

template <class Ops>
__device__ inline Eight load_eight(const uint16_t* from) {
  const uint4 packed = Ops::load16(from);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  Eight found;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    found.values[2 * i] = widened(words[i] & 0xffffu);
    found.values[2 * i + 1] = widened(words[i] >> 16);
  }
  return found;
}

template <class Ops>
__device__ inline void store_eight(uint16_t* to, const Eight& eight) {
  uint4 packed;
  packed.x = Ops::pack(eight.values[0], eight.values[1]);
  packed.y = Ops::pack(eight.values[2], eight.values[3]);
  packed.z = Ops::pack(eight.values[4], eight.values[5]);
  packed.w = Ops::pack(eight.values[6], eight.values[7]);
  Ops::store16(to, packed);
}

template <class Ops>
__device__ inline float rounded(float x) {
  return widened(Ops::round(x));
}

template <class Ops>
__device__ inline float warp_sum(float value) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += Ops::shuffle_xor(value, mask);
  return value;
}

template <class Ops>
__device__ void embed_row(const EmbedRows& e, int row, int thread) {
  int token = e.tokens[row];
  token = token < 0 ? 0 : token >= e.vocab ? e.vocab - 1 : token;
  const uint16_t* from = e.embedding + static_cast<int64_t>(token) * e.hidden;
  uint16_t* to = e.x + static_cast<int64_t>(row) * e.hidden;
  for (int i = thread * kEight; i < e.hidden; i += kThreads * kEight) Ops::store16(to + i, Ops::load16(from + i));
}

struct NormTile {
  float sums[kWarps];
};

template <class Ops>
__device__ void add_norm_row(const AddNorm& n, NormTile& tile, int row, int thread) {
  const int64_t begin = static_cast<int64_t>(row) * n.hidden;
  uint16_t* x = n.x + begin;
  float sum = 0.0f;
  for (int i = thread * kEight; i < n.hidden; i += kThreads * kEight) {
    Eight eight = load_eight<Ops>(x + i);
    if (n.delta != nullptr) {
      Eight delta = load_eight<Ops>(n.delta + begin + i);
      if (n.bias != nullptr) {
        const Eight bias = load_eight<Ops>(n.bias + i);
#pragma unroll
        for (int j = 0; j < kEight; ++j) delta.values[j] = rounded<Ops>(delta.values[j] + bias.values[j]);
      }
#pragma unroll
      for (int j = 0; j < kEight; ++j) eight.values[j] = rounded<Ops>(eight.values[j] + delta.values[j]);
      store_eight<Ops>(x + i, eight);
    }
#pragma unroll
    for (int j = 0; j < kEight; ++j) sum += eight.values[j] * eight.values[j];
  }
  sum = warp_sum<Ops>(sum);
  if (thread % kLanes == 0) tile.sums[thread / kLanes] = sum;
  Ops::sync_block();
  float total = 0.0f;
  for (int w = 0; w < kWarps; ++w) total += tile.sums[w];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(n.hidden) + n.eps);
  for (int i = thread * kEight; i < n.hidden; i += kThreads * kEight) {
    Eight eight = load_eight<Ops>(x + i);  // this thread's own store
    const Eight weight = load_eight<Ops>(n.weight + i);
#pragma unroll
    for (int j = 0; j < kEight; ++j) eight.values[j] = weight.values[j] * rounded<Ops>(eight.values[j] * scale);
    store_eight<Ops>(n.out + begin + i, eight);
  }
}

constexpr int kMostPairs = 4;  // of a lane: heads of up to 256

// One warp: head `number` of heads + 2 * kv_heads, in a row.
template <class Ops>
__device__ void rotate_head(const RotateHeads& r, int row, int number, int lane) {
  const int half = r.dim / 2;
  const bool is_query = number < r.heads;
  const bool is_value = number >= r.heads + r.kv_heads;
  const int64_t offset = static_cast<int64_t>(number) * r.dim;
  const uint16_t* from = r.qkv + static_cast<int64_t>(row) * (r.heads + 2 * r.kv_heads) * r.dim + offset;
  uint16_t* to = is_query   ? r.q + (static_cast<int64_t>(row) * r.heads + number) * r.dim
                 : is_value ? r.v + (static_cast<int64_t>(row) * r.kv_heads + number - r.heads - r.kv_heads) * r.dim
                            : r.k + (static_cast<int64_t>(row) * r.kv_heads + number - r.heads) * r.dim;
  float first[kMostPairs], second[kMostPairs];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = lane + j * kLanes;
    first[j] = second[j] = 0.0f;
    if (i >= half) continue;
    first[j] = widened(from[i]);
    second[j] = widened(from[i + half]);
    if (r.bias != nullptr) {
      first[j] = rounded<Ops>(first[j] + widened(r.bias[offset + i]));
      second[j] = rounded<Ops>(second[j] + widened(r.bias[offset + i + half]));
    }
    sum += first[j] * first[j] + second[j] * second[j];
  }
  if (r.head_norms != nullptr && !is_value) {
    const uint16_t* weight = r.head_norms + (is_query ? 0 : r.dim);
    const float scale = 1.0f / sqrtf(warp_sum<Ops>(sum) / static_cast<float>(r.dim) + r.eps);
#pragma unroll
    for (int j = 0; j < kMostPairs; ++j) {
      const int i = lane + j * kLanes;
      if (i >= half) continue;
      first[j] = rounded<Ops>(widened(weight[i]) * rounded<Ops>(first[j] * scale));
      second[j] = rounded<Ops>(widened(weight[i + half]) * rounded<Ops>(second[j] * scale));
    }
  }
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = lane + j * kLanes;
    if (i >= half) continue;
    float a = first[j], b = second[j];
    if (!is_value) {
      const float cosine = r.cosines[static_cast<int64_t>(row) * half + i];
      const float sine = r.sines[static_cast<int64_t>(row) * half + i];
      a = first[j] * cosine - second[j] * sine;
      b = second[j] * cosine + first[j] * sine;
    }
    to[i] = Ops::round(a);
    to[i + half] = Ops::round(b);
  }
}

constexpr float kLog2OfE = 1.4426950408889634f;

// Eight features, the `number`-th of all rows.
template <class Ops>
__device__ void gate_up_eight(const GateUp& g, int64_t number) {
  const int per_row = g.inner / kEight;
  if (number >= static_cast<int64_t>(g.rows) * per_row) return;
  const int64_t row = number / per_row;
  const int i = static_cast<int>(number % per_row) * kEight;
  Eight gate = load_eight<Ops>(g.gate_up + row * 2 * g.inner + i);
  Eight up = load_eight<Ops>(g.gate_up + row * 2 * g.inner + g.inner + i);
  if (g.bias != nullptr) {
    const Eight gate_bias = load_eight<Ops>(g.bias + i), up_bias = load_eight<Ops>(g.bias + g.inner + i);
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      gate.values[j] = rounded<Ops>(gate.values[j] + gate_bias.values[j]);
      up.values[j] = rounded<Ops>(up.values[j] + up_bias.values[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kEight; ++j) {
    const float x = gate.values[j];
    up.values[j] *= rounded<Ops>(x / (1.0f + Ops::exp2(-x * kLog2OfE)));
  }
  store_eight<Ops>(g.out + row * g.inner + i, up);
}

template <class Ops>
__device__ void copy_columns_row(const CopyColumns& c, int row, int thread) {
  const uint16_t* from = c.source + static_cast<int64_t>(row) * c.width;
  uint16_t* to = c.target + static_cast<int64_t>(row) * c.stride + c.first;
  for (int i = thread * kEight; i < c.width; i += kThreads * kEight) Ops::store16(to + i, Ops::load16(from + i));
}

// One area, by `threads` threads.
__device__ inline void copy_area(const CopyAreas::Area& area, int64_t thread, int64_t threads) {
  const auto* from = static_cast<const uint32_t*>(area.source);
  auto* to = static_cast<uint32_t*>(area.target);
  const int64_t words = area.bytes / 4;
  for (int64_t i = thread; i < words; i += threads) to[i] = from[i];
  if (thread != 0) return;
  for (int64_t i = words * 4; i < area.bytes; ++i) {
    static_cast<uint8_t*>(area.target)[i] = static_cast<const uint8_t*>(area.source)[i];
  }
}

}  // namespace jaxserve::cuda::decoder
