#include "cuda/check_cuda.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda {
namespace {

constexpr int kThreads = 128;

// Block (b, t) copies row row_ids[b] of table t.
__global__ void gather_rows(GatherRows g) {
  const int b = blockIdx.x;
  const int32_t wanted = g.row_ids[b];
  if (blockIdx.y == 0 && threadIdx.x == 0 && g.row_ids_out != nullptr) g.row_ids_out[b] = wanted;
  if (g.num_tables == 0) return;
  const GatherTable table = g.tables[blockIdx.y];
  int32_t row = wanted;
  if (wanted < 0 || wanted >= table.num_rows) {
    row = wanted < 0 ? 0 : table.num_rows - 1;
    if (threadIdx.x == 0 && g.row_error != nullptr) {
      // One aligned 64-bit store, so that position and row id always belong together.
      *reinterpret_cast<volatile unsigned long long*>(g.row_error) =
          (static_cast<unsigned long long>(b + 1) << 32) | static_cast<uint32_t>(wanted);
    }
  }
  const uint32_t* source = table.source + static_cast<int64_t>(row) * table.num_columns;
  uint32_t* target = table.target + static_cast<int64_t>(b) * table.width;
  for (int j = threadIdx.x; j < table.width; j += kThreads) target[j] = source[j];
}

}  // namespace

void launch_gather_rows(const GatherRows& gather, cudaStream_t stream) {
  if (gather.num_row_ids == 0) return;  // a grid of zero blocks is refused
  const dim3 grid(static_cast<unsigned>(gather.num_row_ids), gather.num_tables > 0 ? gather.num_tables : 1);
  gather_rows<<<grid, kThreads, 0, stream>>>(gather);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace jaxserve::cuda
