// Matrix products by cuBLAS, which is found when it is first needed: jax[cuda13] brings it along, and the extension
// loads on machines without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace jaxserve::cuda::decoder {

class Gemm {
 public:
  // Loads cuBLAS from the first of `libraries` (paths, or names for the loader) that there is, and allocates its
  // workspace: under capture it may allocate none. Raises NativeError that says what was tried.
  explicit Gemm(const std::vector<std::string>& libraries);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // y[rows, out] = x[rows, in] . w[out, in]^T; bfloat16, summed in float32; y is bfloat16 or float32. Enqueued on
  // `stream`, which may be captured. One workspace: all calls must be ordered on the device.
  void multiply(const uint16_t* x, const uint16_t* w, void* y, bool y_is_float, int rows, int in, int out,
                cudaStream_t stream);

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  void* handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace jaxserve::cuda::decoder
