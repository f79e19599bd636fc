// The decoder's kernels, their real bodies, as operations of fake streams; and a cuBLAS for the loader to find.
#include <cstring>
#include <vector>

#include "cuda/decoder/kernel_bodies.h"
#include "cuda/decoder/kernels.h"
#include "emulated_ops.h"
#include "runtime.h"

namespace jaxserve::cuda::decoder {

using Ops = fake::EmulatedOps;

void launch_embed_rows(const EmbedRows& embed, cudaStream_t stream) {
  fake::of(stream).enqueue([e = embed] {
    for (int row = 0; row < e.rows; ++row) {
      for (int thread = 0; thread < kThreads; ++thread) embed_row<Ops>(e, row, thread);
    }
  });
}

void launch_add_norm(const AddNorm& norm, cudaStream_t stream) {
  fake::of(stream).enqueue([n = norm] {
    NormTile tile;
    for (int row = 0; row < n.rows; ++row) {
      fake::run_block(kThreads, [&](int thread) { add_norm_row<Ops>(n, tile, row, thread); });
    }
  });
}

void launch_rotate_heads(const RotateHeads& rotate, cudaStream_t stream) {
  fake::of(stream).enqueue([r = rotate] {
    const int heads = r.heads + 2 * r.kv_heads;
    for (int row = 0; row < r.rows; ++row) {
      fake::run_block(heads * kLanes, [&](int thread) { rotate_head<Ops>(r, row, thread / kLanes, thread % kLanes); });
    }
  });
}

void launch_gate_up(const GateUp& gate_up, cudaStream_t stream) {
  fake::of(stream).enqueue([g = gate_up] {
    const int64_t eights = int64_t{1} * g.rows * (g.inner / kEight);
    for (int64_t number = 0; number < eights + 3; ++number) gate_up_eight<Ops>(g, number);
  });
}

void launch_copy_columns(const CopyColumns& copy, cudaStream_t stream) {
  fake::of(stream).enqueue([c = copy] {
    for (int row = 0; row < c.rows; ++row) {
      for (int thread = 0; thread < kThreads; ++thread) copy_columns_row<Ops>(c, row, thread);
    }
  });
}

void launch_copy_areas(const CopyAreas& copy, cudaStream_t stream) {
  fake::of(stream).enqueue([c = copy] {
    constexpr int64_t kFew = 3;
    for (int i = 0; i < c.num_areas; ++i) {
      for (int64_t thread = 0; thread < kFew; ++thread) copy_area(c.areas[i], thread, kFew);
    }
  });
}

}  // namespace jaxserve::cuda::decoder

namespace {

struct Blas {
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;
};

float widened(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

// What csrc/cuda/decoder/gemm.cc uses of cuBLAS, for columns-first A [k, m] transposed, B [k, n] and C [m, n].
extern "C" {

EXPORTED int cublasCreate_v2(void** handle) {
  *handle = new Blas();
  return 0;
}
EXPORTED int cublasDestroy_v2(void* handle) {
  delete static_cast<Blas*>(handle);
  return 0;
}
EXPORTED int cublasSetStream_v2(void* handle, cudaStream_t stream) {
  *static_cast<Blas*>(handle) = {stream, nullptr};
  return 0;
}
EXPORTED int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
  static_cast<Blas*>(handle)->workspace = bytes > 0 ? workspace : nullptr;
  return 0;
}
EXPORTED int cublasSetMathMode(void*, int mode) { return mode == 16 ? 0 : 7; }
EXPORTED const char* cublasGetStatusString(int) { return "the fake cuBLAS refused"; }
EXPORTED int cublasGemmEx(void* handle, int op_a, int op_b, int m, int n, int k, const void*, const void* a, int a_type,
                          int a_stride, const void* b, int b_type, int b_stride, const void*, void* c, int c_type,
                          int c_stride, int compute, int) {
  if (fake::fails("cublasGemmEx")) return 13;
  const auto* blas = static_cast<const Blas*>(handle);
  // Without a workspace of the caller's, a captured product would have allocated one.
  if (op_a != 1 || op_b != 0 || a_type != 14 || b_type != 14 || compute != 68 || blas->workspace == nullptr) return 7;
  if (m <= 0 || n <= 0 || k <= 0 || a_stride < k || b_stride < k || c_stride < m) return 7;
  fake::of(blas->stream).enqueue([=] {
    const auto* from_a = static_cast<const uint16_t*>(a);
    const auto* from_b = static_cast<const uint16_t*>(b);
    std::vector<float> wide_b(static_cast<std::size_t>(n) * k);
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < k; ++i) wide_b[static_cast<std::size_t>(j) * k + i] = widened(from_b[int64_t{1} * j * b_stride + i]);
    }
    for (int row = 0; row < m; ++row) {
      for (int j = 0; j < n; ++j) {
        float sum = 0.0f;
        for (int i = 0; i < k; ++i) {
          sum += widened(from_a[int64_t{1} * row * a_stride + i]) * wide_b[static_cast<std::size_t>(j) * k + i];
        }
        const int64_t at = int64_t{1} * j * c_stride + row;
        if (c_type == 0) {
          static_cast<float*>(c)[at] = sum;
        } else {
          static_cast<uint16_t*>(c)[at] = fake::EmulatedOps::round(sum);
        }
      }
    }
  });
  return 0;
}
}
