#include "cuda/check_cuda.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda {
namespace {

constexpr int kThreads = 128;

// One block writes one row. The few KB come over the bus straight from the staging block: a copy to the device first
// would be a second operation on the stream for nothing.
__global__ void scatter_rows(ScatterRows s) {
  const int64_t row = s.rows[blockIdx.x];
  const uint32_t* values = s.values + blockIdx.x * s.num_values;
  uint32_t* target = s.data + row * s.num_columns + s.first_column;
  for (int64_t j = threadIdx.x; j < s.num_values; j += kThreads) target[j] = values[j];
}

}  // namespace

void launch_scatter_rows(const ScatterRows& scatter, cudaStream_t stream) {
  if (scatter.num_rows == 0 || scatter.num_values == 0) return;  // a grid of zero blocks is refused
  scatter_rows<<<static_cast<unsigned>(scatter.num_rows), kThreads, 0, stream>>>(scatter);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace jaxserve::cuda
