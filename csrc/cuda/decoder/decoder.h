// One decode or verify step of a Llama-like decoder, from token ids to logits, as work on a stream.
//
// Per layer: norm, qkv product, rotation, paged attention, output product, norm, gate and up product, activation, down
// product. The pool is only read. New keys and values lie in buffers of the step: the program that asked for them
// writes them, once it knows which tokens are accepted.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/decoder/gemm.h"

namespace jaxserve::cuda::decoder {

struct LayerWeights {
  const uint16_t* qkv;        // [(heads + 2 * kv_heads) * dim, hidden]: rows of q, of k, of v
  const uint16_t* o;          // [hidden, heads * dim]
  const uint16_t* gate_up;    // [2 * inner, hidden]: gate, up
  const uint16_t* down;       // [hidden, inner]
  const uint16_t* qkv_bias;   // [(heads + 2 * kv_heads) * dim]; null: none
  const uint16_t* o_bias;     // [hidden], or null
  const uint16_t* gate_up_bias;  // [2 * inner], or null
  const uint16_t* down_bias;  // [hidden], or null
};

struct Weights {
  const uint16_t* embedding;   // [vocab, hidden]
  const uint16_t* norms;       // [2 * layers + 1, hidden]: before attention and MLP of each layer, and the last one
  const uint16_t* head_norms;  // [2 * layers, dim], of query and key heads of each layer; null: none
  const uint16_t* lm_head;     // [vocab, hidden]
  std::vector<LayerWeights> layers;
};

// What a step is compiled for. Everything in it is part of the identity of a captured step.
struct Sizes {
  int batch, queries;  // token rows: batch * queries
  int vocab, hidden, inner, heads, kv_heads, dim;
  int table_width, num_pages, page_size;
  int splits;  // of attention, see PagedAttention
  bool is_tree;
  float eps;
  std::vector<int> windows;  // per layer: a token sees itself and window - 1 tokens before it; 0: all
  std::vector<int> points;   // where the residual stream is observed: before layer i, or behind the last; -1: the output

  int rows() const { return batch * queries; }
  int layers() const { return static_cast<int>(windows.size()); }
  int64_t kv_elements() const { return int64_t{1} * rows() * kv_heads * dim; }  // of one layer's new keys
  std::vector<int64_t> identity() const;
};

// Buffers of a step on the device: its inputs, what it leaves, and what it needs meanwhile.
struct Buffers {
  int32_t* tokens;      // [rows]
  float* cosines;       // [rows, dim / 2], of each row's position
  float* sines;         // likewise
  int32_t* tables;      // [batch, table_width]
  int32_t* lengths;     // [batch]
  uint8_t* seen;        // [batch, queries, queries]; null: a chain
  int32_t* depths;      // [batch, queries]; null: a chain
  float* logits;        // [rows, vocab]
  uint16_t* keys;       // [layers, rows, kv_heads, dim]
  uint16_t* values;     // likewise
  uint16_t* features;   // [rows, points * hidden]; null: none
  uint16_t* x;          // [rows, hidden], the residual stream
  uint16_t* normed;     // [rows, hidden]
  uint16_t* product;    // [rows, widest product but the logits]
  uint16_t* q;          // [rows, heads, dim]
  uint16_t* attended;   // likewise
  uint16_t* activated;  // [rows, inner]
  float* partial;       // see PagedAttention
};

// Lays the buffers out behind `base`, each at a multiple of 256 bytes; returns how many bytes they take.
std::size_t lay_out(const Sizes& sizes, std::byte* base, Buffers* buffers);

// Enqueues the step. `pool`: [layers, 2, kv_heads, num_pages, page_size, dim].
void enqueue_step(const Sizes& sizes, const Weights& weights, const uint16_t* pool, const Buffers& buffers, Gemm& gemm,
                  cudaStream_t stream);

}  // namespace jaxserve::cuda::decoder
