// The device functions of this twin, behind launchers that plain C++ can call.
//
// Launchers enqueue on the given stream and never block. They raise NativeError when the launch is refused.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jaxserve::cuda {

// data[rows[i], first_column + j] = values[i, j] for i < num_rows, j < num_values; 4-byte elements. The rows must be
// distinct and inside the table: the host has checked both.
struct ScatterRows {
  const int32_t* rows;     // [num_rows], page-locked host memory mapped into the device
  const uint32_t* values;  // [num_rows, num_values], likewise
  uint32_t* data;          // [*, num_columns], device memory
  int64_t num_rows;
  int64_t num_columns;
  int64_t first_column;
  int64_t num_values;
};
void launch_scatter_rows(const ScatterRows& scatter, cudaStream_t stream);

struct GatherTable {
  const uint32_t* source;  // [num_rows, num_columns]
  uint32_t* target;        // [num_row_ids, width]
  int32_t num_rows;
  int32_t num_columns;
  int32_t width;
};

constexpr int kMaxGatherTables = 16;  // of one launch; they travel in the kernel's parameters

// target[b, :] = source[clamp(row_ids[b]), :width] for every table, and row_ids_out[b] = row_ids[b].
// A row id outside a table is clamped into it, so that nothing outside is ever read, and leaves
// ((b + 1) << 32 | row id) in *row_error: the newest one wins, and zero means that none came.
struct GatherRows {
  const int32_t* row_ids;  // [num_row_ids]
  int32_t* row_ids_out;    // [num_row_ids]; null: not wanted
  unsigned long long* row_error;  // one word of mapped host memory; null: clamp silently
  int32_t num_row_ids;
  int32_t num_tables;  // 0 (row ids only) to kMaxGatherTables
  GatherTable tables[kMaxGatherTables];
};
void launch_gather_rows(const GatherRows& gather, cudaStream_t stream);

constexpr int kAttentionTileRows = 16;  // query rows (query token, head) that one block attends

// Attention of one layer over a sequence's pages and the step's new tokens; see paged_attention_kernel.h. Everything but
// sinks and partial results is bfloat16 or int32. Row (token, head) of `out` gets
// softmax(scale * q . keys) . values over what the token sees.
struct PagedAttention {
  const uint16_t* q;           // [batch, queries, heads, dim]
  const uint16_t* new_keys;    // [batch, queries, kv_heads, dim]
  const uint16_t* new_values;  // likewise
  const uint16_t* keys;        // [kv_heads, num_pages, page_size, dim], of the layer
  const uint16_t* values;      // likewise
  const int32_t* tables;       // [batch, table_width]
  const int32_t* lengths;      // [batch], context without the new tokens
  const uint8_t* seen;         // [batch, queries, queries]: whether new token i sees new token j; null: a chain
  const int32_t* depths;       // [batch, queries]: position behind the context; null: a chain
  const float* sinks;          // [heads]; null: none
  uint16_t* out;               // [batch, queries, heads, dim]
  float* partial;              // [batch, queries, heads, splits, dim + 2]; unused with one split
  int batch, queries, heads, kv_heads, dim;
  int num_pages, page_size, table_width;  // page_size: a multiple of 16
  int splits;
  int window;  // 0: none; otherwise a token sees itself and window - 1 tokens before it
  float scale;
};
// dim: 64, 96, 128, 192 or 256. Two launches, one with a single split.
void launch_paged_attention(const PagedAttention& attention, cudaStream_t stream);

// Keeps one thread of the device busy this long: a stall of the stream, for tests.
void launch_spin(int64_t microseconds, cudaStream_t stream);

}  // namespace jaxserve::cuda
