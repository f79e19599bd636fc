#include "cuda/shared_buffer.h"

#include <limits>

#include "common/faults.h"
#include "common/journal.h"
#include "cuda/check_cuda.h"

namespace jaxserve::cuda {
namespace {

struct Export {
  LiveObject<ObjectKind::kExport> live;
  DLManagedTensorAbi tensor;
  int64_t shape[2];
  std::shared_ptr<SharedBuffer> owner;
};

}  // namespace

SharedBuffer::SharedBuffer(int64_t num_rows, int64_t num_columns, bool is_float, const std::string& name)
    : num_rows_(num_rows), num_columns_(num_columns), is_float_(is_float), id_(Journal::instance().named_id(name)) {
  // The kernels count rows and columns in 32 bits.
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  JAXSERVE_CHECK(num_rows > 0 && num_columns > 0 && num_rows <= kLargest && num_columns <= kLargest, "SharedBuffer",
                 "wanted sizes from 1 to 2^31 - 1, got [" + std::to_string(num_rows) + ", " +
                     std::to_string(num_columns) + "]");
  const std::size_t bytes = static_cast<std::size_t>(num_rows) * num_columns * kElementBytes;
  JAXSERVE_CUDA_CHECK(cudaGetDevice(&device_));
  Faults::instance().pass("allocate", "SharedBuffer");
  void* memory = nullptr;
  JAXSERVE_CUDA_CHECK(cudaMalloc(&memory, bytes));
  data_ = static_cast<std::byte*>(memory);
  try {
    JAXSERVE_CHECK(reinterpret_cast<uintptr_t>(data_) % kAlignment == 0, "SharedBuffer",
                   "cudaMalloc returned memory that isn't aligned to 256 bytes");
    JAXSERVE_CUDA_CHECK(cudaMemset(data_, 0, bytes));
    // The fill runs on the default stream, and non-blocking streams do not wait for that one.
    JAXSERVE_CUDA_CHECK(cudaStreamSynchronize(nullptr));
  } catch (...) {
    JAXSERVE_CUDA_REPORT(cudaFree(data_));  // no destructor runs for a half-made object
    throw;
  }
}

SharedBuffer::~SharedBuffer() { JAXSERVE_CUDA_REPORT(cudaFree(data_)); }

DLManagedTensorAbi* SharedBuffer::to_dlpack() {
  Faults::instance().pass("allocate", "SharedBuffer.__dlpack__");
  auto* exported = new Export{};
  exported->owner = shared_from_this();
  exported->shape[0] = num_rows_;
  exported->shape[1] = num_columns_;
  DLTensorAbi& tensor = exported->tensor.dl_tensor;
  tensor.data = data_;
  tensor.device = {kDeviceType, device_};
  tensor.ndim = 2;
  tensor.dtype = {static_cast<uint8_t>(is_float_ ? kDLFloat : kDLInt), 32, 1};
  tensor.shape = exported->shape;
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  exported->tensor.manager_ctx = exported;
  exported->tensor.deleter = [](DLManagedTensorAbi* self) { delete static_cast<Export*>(self->manager_ctx); };
  return &exported->tensor;
}

}  // namespace jaxserve::cuda
