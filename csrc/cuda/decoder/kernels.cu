#include "cuda/check_cuda.h"
#include "cuda/decoder/kernel_bodies.h"
#include "cuda/decoder/kernels.h"
#include "cuda/warp_ops.h"

namespace jaxserve::cuda::decoder {
namespace {

constexpr int kCopyBlocks = 8;  // of each area

__global__ void __launch_bounds__(kThreads) embed_rows(const __grid_constant__ EmbedRows e) {
  embed_row<WarpOps>(e, blockIdx.x, threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) add_norm(const __grid_constant__ AddNorm n) {
  __shared__ NormTile tile;
  add_norm_row<WarpOps>(n, tile, blockIdx.x, threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) rotate_heads(const __grid_constant__ RotateHeads r) {
  const int number = blockIdx.x * kWarps + threadIdx.x / kLanes;
  if (number < r.heads + 2 * r.kv_heads) rotate_head<WarpOps>(r, blockIdx.y, number, threadIdx.x % kLanes);
}

__global__ void __launch_bounds__(kThreads) gate_up(const __grid_constant__ GateUp g) {
  gate_up_eight<WarpOps>(g, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) copy_columns(const __grid_constant__ CopyColumns c) {
  copy_columns_row<WarpOps>(c, blockIdx.x, threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) copy_areas(const __grid_constant__ CopyAreas c) {
  copy_area(c.areas[blockIdx.y], static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, kCopyBlocks * kThreads);
}

}  // namespace

void launch_embed_rows(const EmbedRows& e, cudaStream_t stream) {
  embed_rows<<<e.rows, kThreads, 0, stream>>>(e);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

void launch_add_norm(const AddNorm& n, cudaStream_t stream) {
  add_norm<<<n.rows, kThreads, 0, stream>>>(n);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

void launch_rotate_heads(const RotateHeads& r, cudaStream_t stream) {
  const dim3 grid((r.heads + 2 * r.kv_heads + kWarps - 1) / kWarps, r.rows);
  rotate_heads<<<grid, kThreads, 0, stream>>>(r);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

void launch_gate_up(const GateUp& g, cudaStream_t stream) {
  const int64_t eights = static_cast<int64_t>(g.rows) * (g.inner / kEight);
  gate_up<<<static_cast<unsigned>((eights + kThreads - 1) / kThreads), kThreads, 0, stream>>>(g);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

void launch_copy_columns(const CopyColumns& c, cudaStream_t stream) {
  copy_columns<<<c.rows, kThreads, 0, stream>>>(c);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

void launch_copy_areas(const CopyAreas& c, cudaStream_t stream) {
  if (c.num_areas == 0) return;
  copy_areas<<<dim3(kCopyBlocks, c.num_areas), kThreads, 0, stream>>>(c);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace jaxserve::cuda::decoder
