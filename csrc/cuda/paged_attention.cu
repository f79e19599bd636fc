#include "cuda/check_cuda.h"
#include "cuda/kernels.h"
#include "cuda/paged_attention_kernel.h"
#include "cuda/warp_ops.h"

namespace jaxserve::cuda {
namespace {

template <int kDim>
__global__ void __launch_bounds__(kAttentionThreads) paged_attention(const __grid_constant__ PagedAttention p) {
  __shared__ AttentionTile<kDim> tile;
  attend_split<WarpOps, kDim>(p, tile, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
}

__global__ void merge_attention(const __grid_constant__ PagedAttention p) {
  merge_splits<WarpOps>(p, blockIdx.x, threadIdx.x);
}

template <int kDim>
void launch(const PagedAttention& p, const dim3& grid, cudaStream_t stream) {
  paged_attention<kDim><<<grid, kAttentionThreads, 0, stream>>>(p);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_paged_attention(const PagedAttention& p, cudaStream_t stream) {
  if (p.batch == 0 || p.queries == 0) return;  // a grid of zero blocks is refused
  const int num_rows = p.queries * (p.heads / p.kv_heads);
  const dim3 grid(p.splits, (num_rows + kTileRows - 1) / kTileRows, p.batch * p.kv_heads);
  switch (p.dim) {
    case 64: launch<64>(p, grid, stream); break;
    case 96: launch<96>(p, grid, stream); break;
    case 128: launch<128>(p, grid, stream); break;
    case 192: launch<192>(p, grid, stream); break;
    case 256: launch<256>(p, grid, stream); break;
    default: JAXSERVE_CHECK(false, "paged attention", "no kernel for head dimension " + std::to_string(p.dim));
  }
  if (p.splits == 1) return;
  merge_attention<<<p.batch * p.queries * p.heads, kMergeThreads, 0, stream>>>(p);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace jaxserve::cuda
