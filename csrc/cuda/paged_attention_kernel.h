// The body of the paged attention kernel: bfloat16 keys and values, float32 sums, a few query tokens per sequence.
//
// A block of four warps attends one tile of 16 query rows (query token, head of one KV head's group) over one share of
// a sequence: the context in the pool, page by page, and behind it the step's new tokens, which lie in operands. All
// query heads of a KV head are rows of one tile, so a key or value is loaded once for them. The warps take turns of 16
// positions, each with a softmax of its own in running-maximum form (Milakov and Gimelshein 2018), and merge at the end.
// Shares of a sequence are merged by a second, small kernel (split-KV).
//
// Both matrix products are m16n8k16 tensor core operations, fed straight from global memory: the sum over head
// dimensions and the order of output columns may be permuted at will, and are, so that every lane loads 16 contiguous
// bytes and nothing has to be transposed through shared memory.
//
// `Ops` are the instructions (warp_ops.h); a test runs the same body on the CPU with emulated ones.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels.h"

namespace jaxserve::cuda {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kTileRows = kAttentionTileRows;
constexpr int kBlockPositions = 16;  // positions that a warp takes at a time; a page holds a whole number of blocks
constexpr float kLog2E = 1.4426950408889634f;

template <int kDim>
struct AttentionTile {
  static constexpr int kRowStride = kDim + 8;  // bfloat16; the padding keeps rows in different banks
  alignas(16) uint16_t q[kTileRows * kRowStride];
  float maximum[kAttentionWarps][kTileRows];
  float sum[kAttentionWarps][kTileRows];
  float values[kTileRows * kDim];
};

// A query row as a lane sees it.
struct QueryRow {
  int query;
  int position;  // of its token in the sequence
  bool is_real;  // false: padding of the tile
};

__device__ inline QueryRow query_row(const PagedAttention& p, int row, int batch, int context) {
  const int group = p.heads / p.kv_heads;
  QueryRow found;
  found.is_real = row < p.queries * group;
  found.query = found.is_real ? row / group : 0;
  const int depth = p.depths != nullptr ? p.depths[batch * p.queries + found.query] : found.query;
  found.position = context + depth;
  return found;
}

// Positions [0, limit) of a block, in the pool or among the new tokens. Behind them the last one is loaded again: its
// weight is zero, and that silences only what is a number, which a recycled page may not hold.
struct KeyBlock {
  const uint16_t* keys;
  const uint16_t* values;
  int64_t stride;  // elements from one position to the next
  int first;       // position in the sequence, or number of the new token
  int limit;
  bool is_new;
};

template <int kDim>
__device__ inline KeyBlock find_block(const PagedAttention& p, int block, int context_blocks, int context, int batch,
                                      int kv) {
  KeyBlock found;
  found.is_new = block >= context_blocks;
  if (found.is_new) {
    found.first = (block - context_blocks) * kBlockPositions;
    found.stride = static_cast<int64_t>(p.kv_heads) * kDim;
    const int64_t offset = (static_cast<int64_t>(batch) * p.queries + found.first) * found.stride + kv * kDim;
    found.keys = p.new_keys + offset;
    found.values = p.new_values + offset;
    found.limit = p.queries - found.first;
  } else {
    found.first = block * kBlockPositions;
    found.stride = kDim;
    int page = p.tables[static_cast<int64_t>(batch) * p.table_width + found.first / p.page_size];
    if (page < 0 || page >= p.num_pages) page = 0;  // the null page: nothing outside the pool is ever read
    const int64_t row = (static_cast<int64_t>(kv) * p.num_pages + page) * p.page_size + found.first % p.page_size;
    found.keys = p.keys + row * kDim;
    found.values = p.values + row * kDim;
    found.limit = context - found.first;
  }
  if (found.limit > kBlockPositions) found.limit = kBlockPositions;
  return found;
}

__device__ inline bool is_seen(const PagedAttention& p, const QueryRow& row, const KeyBlock& block, int column,
                               int batch) {
  if (column >= block.limit || !row.is_real) return false;
  const int key = block.first + column;
  if (!block.is_new) return p.window == 0 || key > row.position - p.window;
  if (p.seen != nullptr) return p.seen[(static_cast<int64_t>(batch) * p.queries + row.query) * p.queries + key] != 0;
  return key <= row.query && (p.window == 0 || row.query - key < p.window);
}

// The running softmax of the two rows (lane / 4, lane / 4 + 8) that a lane has a part of.
template <int kDim>
struct Running {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};        // this lane's columns only, until the end
  float values[kDim / 8][4] = {};     // [n8 tile]: rows lane / 4 (0, 1) and lane / 4 + 8 (2, 3)
};

// Adds the positions of one block. All lanes of the warp take part.
template <class Ops, int kDim>
__device__ inline void add_block(const PagedAttention& p, const AttentionTile<kDim>& tile, const KeyBlock& block,
                                 const QueryRow (&rows)[2], int batch, int lane, Running<kDim>& running) {
  using Shape = AttentionTile<kDim>;
  const int quad = lane / 4;  // row of A and C, column of B
  const int part = lane % 4;
  float scores[2][4] = {};
  const uint16_t* keys[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int position = n * 8 + quad;
    keys[n] = block.keys + (position < block.limit ? position : block.limit - 1) * block.stride + part * 8;
  }
#pragma unroll
  for (int chunk = 0; chunk < kDim / 32; ++chunk) {
    // Of 32 head dimensions a lane has eight contiguous ones; the two steps take four each, of queries as of keys.
    const uint4 low = Ops::load16(&tile.q[quad * Shape::kRowStride + chunk * 32 + part * 8]);
    const uint4 high = Ops::load16(&tile.q[(quad + 8) * Shape::kRowStride + chunk * 32 + part * 8]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint4 key = Ops::load16(keys[n] + chunk * 32);
      Ops::multiply(scores[n], low.x, high.x, low.y, high.y, key.x, key.y);
      Ops::multiply(scores[n], low.z, high.z, low.w, high.w, key.z, key.w);
    }
  }

  uint32_t weights[4];  // as operand A of the second product
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float highest = running.maximum[half];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[n][half * 2 + e];
        const bool seen = is_seen(p, rows[half], block, n * 8 + part * 2 + e, batch);
        score = seen ? score * (p.scale * kLog2E) : -INFINITY;
        highest = fmaxf(highest, score);
      }
    }
    highest = fmaxf(highest, Ops::shuffle_xor(highest, 1));
    highest = fmaxf(highest, Ops::shuffle_xor(highest, 2));
    const float base = highest == -INFINITY ? 0.0f : highest;  // nothing seen yet: every weight becomes zero
    const float keep = Ops::exp2(running.maximum[half] - base);
    running.maximum[half] = highest;
    running.sum[half] *= keep;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float first = Ops::exp2(scores[n][half * 2] - base);
      const float second = Ops::exp2(scores[n][half * 2 + 1] - base);
      running.sum[half] += first + second;
      weights[n * 2 + half] = Ops::pack(first, second);
    }
#pragma unroll
    for (int t = 0; t < kDim / 8; ++t) {
      running.values[t][half * 2] *= keep;
      running.values[t][half * 2 + 1] *= keep;
    }
  }

  constexpr int kWidth = kDim % 64 == 0 ? 8 : 4;  // head dimensions a lane loads of one position at a time
#pragma unroll
  for (int chunk = 0; chunk < kDim / (8 * kWidth); ++chunk) {
    uint32_t loaded[4][kWidth / 2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = part * 2 + (i & 1) + (i & 2) * 4;  // 2c, 2c + 1, 2c + 8, 2c + 9
      const uint16_t* from = block.values + (position < block.limit ? position : block.limit - 1) * block.stride +
                             chunk * 8 * kWidth + quad * kWidth;
      if constexpr (kWidth == 8) {
        const uint4 value = Ops::load16(from);
        loaded[i][0] = value.x, loaded[i][1] = value.y, loaded[i][2] = value.z, loaded[i][3] = value.w;
      } else {
        const uint2 value = Ops::load8(from);
        loaded[i][0] = value.x, loaded[i][1] = value.y;
      }
    }
#pragma unroll
    for (int t = 0; t < kWidth; ++t) {
      const uint32_t select = t % 2 == 0 ? 0x5410 : 0x7632;
      const uint32_t first = Ops::byte_perm(loaded[0][t / 2], loaded[1][t / 2], select);
      const uint32_t second = Ops::byte_perm(loaded[2][t / 2], loaded[3][t / 2], select);
      Ops::multiply(running.values[chunk * kWidth + t], weights[0], weights[1], weights[2], weights[3], first, second);
    }
  }
}

// The head dimension of column e (0, 1) of a lane's part of n8 tile t.
template <int kDim>
__device__ inline int value_dim(int t, int part, int e) {
  constexpr int kWidth = kDim % 64 == 0 ? 8 : 4;
  return t / kWidth * 8 * kWidth + (part * 2 + e) * kWidth + t % kWidth;
}

// Of a row: highest score (base 2), sum of exponentials and where to write its values.
__device__ inline float sink_of(const PagedAttention& p, int head) { return p.sinks[head] * kLog2E; }

template <class Ops, int kDim>
__device__ void attend_split(const PagedAttention& p, AttentionTile<kDim>& tile, int split, int tile_number,
                             int sequence, int thread) {
  using Shape = AttentionTile<kDim>;
  const int lane = thread % 32, warp = thread / 32;
  const int batch = sequence / p.kv_heads, kv = sequence % p.kv_heads;
  const int group = p.heads / p.kv_heads;
  const int num_rows = p.queries * group;
  int context = p.lengths[batch];
  const int most = p.table_width * p.page_size;
  context = context < 0 ? 0 : context > most ? most : context;

  for (int i = thread; i < kTileRows * kDim / 8; i += kAttentionThreads) {
    const int r = i / (kDim / 8), d = i % (kDim / 8) * 8, row = tile_number * kTileRows + r;
    uint4 value{0, 0, 0, 0};
    if (row < num_rows) {
      const int64_t token = static_cast<int64_t>(batch) * p.queries + row / group;
      value = Ops::load16(p.q + (token * p.heads + kv * group + row % group) * kDim + d);
    }
    Ops::store16(&tile.q[r * Shape::kRowStride + d], value);
  }
  Ops::sync_block();

  const QueryRow rows[2] = {query_row(p, tile_number * kTileRows + lane / 4, batch, context),
                            query_row(p, tile_number * kTileRows + lane / 4 + 8, batch, context)};
  const int context_blocks = (context + kBlockPositions - 1) / kBlockPositions;
  const int total_blocks = context_blocks + (p.queries + kBlockPositions - 1) / kBlockPositions;
  const int oldest = p.window == 0 || context < p.window ? 0 : context - p.window + 1;
  const int first_block = oldest / kBlockPositions;
  const int share = (total_blocks - first_block + p.splits - 1) / p.splits;
  const int begin = first_block + split * share;
  const int end = begin + share < total_blocks ? begin + share : total_blocks;

  Running<kDim> running;
  for (int block = begin + warp; block < end; block += kAttentionWarps) {
    const KeyBlock found = find_block<kDim>(p, block, context_blocks, context, batch, kv);
    add_block<Ops, kDim>(p, tile, found, rows, batch, lane, running);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = running.sum[half];
    sum += Ops::shuffle_xor(sum, 1);
    sum += Ops::shuffle_xor(sum, 2);
    if (lane % 4 == 0) {
      tile.maximum[warp][lane / 4 + half * 8] = running.maximum[half];
      tile.sum[warp][lane / 4 + half * 8] = sum;
    }
  }
  Ops::sync_block();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + half * 8;
    float highest = tile.maximum[0][r];
    for (int w = 1; w < kAttentionWarps; ++w) highest = fmaxf(highest, tile.maximum[w][r]);
    factor[half] = running.maximum[half] == -INFINITY ? 0.0f : Ops::exp2(running.maximum[half] - highest);
  }
  for (int turn = 0; turn < kAttentionWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int t = 0; t < kDim / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float* target = &tile.values[(lane / 4 + e / 2 * 8) * kDim + value_dim<kDim>(t, lane % 4, e % 2)];
          const float value = running.values[t][e] * factor[e / 2];
          *target = turn == 0 ? value : *target + value;
        }
      }
    }
    Ops::sync_block();
  }

  for (int i = thread; i < kTileRows * kDim; i += kAttentionThreads) {
    const int r = i / kDim, d = i % kDim, row = tile_number * kTileRows + r;
    if (row >= num_rows) continue;
    float highest = tile.maximum[0][r];
    for (int w = 1; w < kAttentionWarps; ++w) highest = fmaxf(highest, tile.maximum[w][r]);
    float sum = 0.0f;
    for (int w = 0; w < kAttentionWarps; ++w) {
      if (tile.maximum[w][r] != -INFINITY) sum += tile.sum[w][r] * Ops::exp2(tile.maximum[w][r] - highest);
    }
    const int64_t token = static_cast<int64_t>(batch) * p.queries + row / group;
    const int head = kv * group + row % group;
    const int64_t out_row = token * p.heads + head;
    if (p.splits > 1) {
      float* partial = p.partial + (out_row * p.splits + split) * (kDim + 2);
      if (d == 0) partial[0] = highest, partial[1] = sum;
      partial[2 + d] = tile.values[i];
      continue;
    }
    float keep = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = sink_of(p, head), top = fmaxf(highest, sink);
      keep = Ops::exp2(highest - top);
      sum = sum * keep + Ops::exp2(sink - top);
    }
    p.out[out_row * kDim + d] = Ops::round(tile.values[i] * keep / sum);
  }
}

// Merges the shares of one output row; thread t of kMergeThreads takes every kMergeThreads-th head dimension.
constexpr int kMergeThreads = 64;

template <class Ops>
__device__ void merge_splits(const PagedAttention& p, int64_t out_row, int thread) {
  const float* partials = p.partial + out_row * p.splits * (p.dim + 2);
  const int head = static_cast<int>(out_row % p.heads);
  float highest = p.sinks != nullptr ? sink_of(p, head) : -INFINITY;
  for (int s = 0; s < p.splits; ++s) highest = fmaxf(highest, partials[s * (p.dim + 2)]);
  float sum = p.sinks != nullptr ? Ops::exp2(sink_of(p, head) - highest) : 0.0f;
  for (int s = 0; s < p.splits; ++s) {
    const float* partial = partials + s * (p.dim + 2);
    if (partial[0] != -INFINITY) sum += partial[1] * Ops::exp2(partial[0] - highest);
  }
  for (int d = thread; d < p.dim; d += kMergeThreads) {
    float value = 0.0f;
    for (int s = 0; s < p.splits; ++s) {
      const float* partial = partials + s * (p.dim + 2);
      if (partial[0] != -INFINITY) value += partial[2 + d] * Ops::exp2(partial[0] - highest);
    }
    p.out[out_row * p.dim + d] = Ops::round(value / sum);
  }
}

}  // namespace jaxserve::cuda
