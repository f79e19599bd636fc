#include "cuda/decoder/gemm.h"

#include <dlfcn.h>

#include "common/faults.h"
#include "cuda/check_cuda.h"

namespace jaxserve::cuda::decoder {
namespace {

// The C interface of cuBLAS 12 and 13 (cublas_api.h, library_types.h): no header of it is needed to build.
using Handle = void*;
using Status = int;
constexpr Status kSuccess = 0;
constexpr int kOpN = 0, kOpT = 1;              // cublasOperation_t
constexpr int kBfloat16 = 14, kFloat = 0;      // cudaDataType
constexpr int kCompute32F = 68;                // cublasComputeType_t
constexpr int kDefaultAlgorithm = -1;          // cublasGemmAlgo_t
constexpr int kDisallowReducedPrecision = 16;  // cublasMath_t: sums of split products stay float32

// What NVIDIA recommends for Hopper (cuBLAS documentation, cublasSetWorkspace).
constexpr std::size_t kWorkspaceBytes = 32 << 20;

}  // namespace

struct Gemm::Library {
  explicit Library(const std::vector<std::string>& names) {
    std::string tried;
    for (const std::string& name : names) {
      loaded = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (loaded != nullptr) break;
      tried += "\n  " + std::string(dlerror());
    }
    JAXSERVE_CHECK(loaded != nullptr, "cuBLAS",
                   "no library; jax[cuda13] brings it along (nvidia-cublas), or put libcublas on LD_LIBRARY_PATH:" +
                       tried);
    load(create, "cublasCreate_v2");
    load(destroy, "cublasDestroy_v2");
    load(set_stream, "cublasSetStream_v2");
    load(set_workspace, "cublasSetWorkspace_v2");
    load(set_math_mode, "cublasSetMathMode");
    load(gemm, "cublasGemmEx");
    load(status_string, "cublasGetStatusString");
  }
  // Never closed: XLA may have loaded the same library, and closing one that owns device state is not safe.
  ~Library() = default;

  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(loaded, name));
    JAXSERVE_CHECK(function != nullptr, "cuBLAS", std::string("the library has no ") + name);
  }

  void check(Status status, const char* call) const {
    JAXSERVE_CHECK(status == kSuccess, call, status_string(status));
  }

  void* loaded = nullptr;
  Status (*create)(Handle*) = nullptr;
  Status (*destroy)(Handle) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*set_workspace)(Handle, void*, std::size_t) = nullptr;
  Status (*set_math_mode)(Handle, int) = nullptr;
  Status (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                 const void*, void*, int, int, int, int) = nullptr;
  const char* (*status_string)(Status) = nullptr;
};

Gemm::Gemm(const std::vector<std::string>& libraries) : library_(std::make_unique<Library>(libraries)) {
  Faults::instance().pass("allocate", "Gemm");
  library_->check(library_->create(&handle_), "cublasCreate");
  try {
    library_->check(library_->set_math_mode(handle_, kDisallowReducedPrecision), "cublasSetMathMode");
    JAXSERVE_CUDA_CHECK(cudaMalloc(&workspace_, kWorkspaceBytes));
  } catch (...) {
    library_->destroy(handle_);  // no destructor runs for a half-made object
    throw;
  }
}

Gemm::~Gemm() {
  library_->destroy(handle_);
  JAXSERVE_CUDA_REPORT(cudaFree(workspace_));
}

void Gemm::multiply(const uint16_t* x, const uint16_t* w, void* y, bool y_is_float, int rows, int in, int out,
                    cudaStream_t stream) {
  library_->check(library_->set_stream(handle_, stream), "cublasSetStream");
  // Setting a stream resets the workspace to cuBLAS's own.
  library_->check(library_->set_workspace(handle_, workspace_, kWorkspaceBytes), "cublasSetWorkspace");
  const float one = 1.0f, zero = 0.0f;
  // cuBLAS counts columns first: to it w is [in, out], x [in, rows] and y [out, rows].
  library_->check(library_->gemm(handle_, kOpT, kOpN, out, rows, in, &one, w, kBfloat16, in, x, kBfloat16, in, &zero, y,
                                 y_is_float ? kFloat : kBfloat16, out, kCompute32F, kDefaultAlgorithm),
                  "cublasGemmEx");
}

}  // namespace jaxserve::cuda::decoder
