// What a decoder layer does besides matrix products and attention, as kernels. bfloat16 activations and weights,
// arithmetic in float32, rounded to bfloat16 where the Flax model rounds (jaxserve/models/layers.py).
//
// Launchers enqueue on the given stream and never block. They raise NativeError when the launch is refused. Features
// (hidden, inner) are multiples of 8, and rows start at multiples of 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxserve::cuda::decoder {

// x[r, :] = embedding[clamp(tokens[r]), :]
struct EmbedRows {
  const int32_t* tokens;      // [rows]
  const uint16_t* embedding;  // [vocab, hidden]
  uint16_t* x;                // [rows, hidden]
  int rows, vocab, hidden;
};
void launch_embed_rows(const EmbedRows& embed, cudaStream_t stream);

// x += delta + bias; out = weight * x / rms(x), see rms_norm.
struct AddNorm {
  uint16_t* x;             // [rows, hidden], the residual stream
  const uint16_t* delta;   // [rows, hidden]; null: x stays as it is
  const uint16_t* bias;    // [hidden], of the product that delta is; null: none
  const uint16_t* weight;  // [hidden]
  uint16_t* out;           // [rows, hidden]
  int rows, hidden;
  float eps;
};
void launch_add_norm(const AddNorm& norm, cudaStream_t stream);

// Takes the rows of a qkv product apart: adds the bias, norms query and key heads, rotates them (see apply_rope).
struct RotateHeads {
  const uint16_t* qkv;         // [rows, (heads + 2 * kv_heads) * dim]
  const uint16_t* bias;        // [(heads + 2 * kv_heads) * dim]; null: none
  const uint16_t* head_norms;  // [2, dim], of query heads and of key heads; null: none
  const float* cosines;        // [rows, dim / 2]
  const float* sines;          // likewise
  uint16_t* q;                 // [rows, heads, dim]
  uint16_t* k;                 // [rows, kv_heads, dim]
  uint16_t* v;                 // likewise
  int rows, heads, kv_heads, dim;  // dim: even
  float eps;
};
void launch_rotate_heads(const RotateHeads& rotate, cudaStream_t stream);

// out = silu(gate + its bias) * (up + its bias)
struct GateUp {
  const uint16_t* gate_up;  // [rows, 2 * inner]: gate, up
  const uint16_t* bias;     // [2 * inner]; null: none
  uint16_t* out;            // [rows, inner]
  int rows, inner;
};
void launch_gate_up(const GateUp& gate_up, cudaStream_t stream);

// target[r, first + i] = source[r, i]
struct CopyColumns {
  const uint16_t* source;  // [rows, width]
  uint16_t* target;        // [rows, stride]
  int rows, width, stride, first;
};
void launch_copy_columns(const CopyColumns& copy, cudaStream_t stream);

constexpr int kMaxCopies = 8;  // of one launch; they travel in the kernel's parameters

// Copies of a few KB each in one launch. Areas start at multiples of 4 bytes.
struct CopyAreas {
  struct Area {
    const void* source;
    void* target;
    int64_t bytes;
  };
  Area areas[kMaxCopies];
  int num_areas;
};
void launch_copy_areas(const CopyAreas& copy, cudaStream_t stream);

}  // namespace jaxserve::cuda::decoder
