#include "cuda/check_cuda.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda {
namespace {

// By the global timer and not by clock64: the SM clock's rate changes with the card's state, so cycles are no time.
__global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

void launch_spin(int64_t microseconds, cudaStream_t stream) {
  if (microseconds <= 0) return;
  spin<<<1, 1, 0, stream>>>(static_cast<unsigned long long>(microseconds) * 1000);
  JAXSERVE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace jaxserve::cuda
