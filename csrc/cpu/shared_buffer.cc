#include "cpu/shared_buffer.h"

#include <cstdlib>
#include <cstring>

#include "common/faults.h"
#include "common/journal.h"

namespace jaxserve::cpu {
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
  JAXSERVE_CHECK(num_rows > 0 && num_columns > 0, "SharedBuffer",
                 "wanted positive sizes, got [" + std::to_string(num_rows) + ", " + std::to_string(num_columns) + "]");
  const std::size_t bytes = static_cast<std::size_t>(num_rows) * num_columns * kElementBytes;
  const std::size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Faults::instance().pass("allocate", "SharedBuffer");
  data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, padded));
  JAXSERVE_CHECK(data_ != nullptr, "SharedBuffer", "no memory for " + std::to_string(bytes) + " bytes");
  std::memset(data_, 0, padded);
  try {
    Journal::instance().add_buffer(data_, id_);
  } catch (...) {
    std::free(data_);  // no destructor runs for a half-made object
    throw;
  }
}

SharedBuffer::~SharedBuffer() {
  Journal::instance().remove_buffer(data_);
  std::free(data_);
}

DLManagedTensorAbi* SharedBuffer::to_dlpack() {
  Faults::instance().pass("allocate", "SharedBuffer.__dlpack__");
  auto* exported = new Export{};
  exported->owner = shared_from_this();
  exported->shape[0] = num_rows_;
  exported->shape[1] = num_columns_;
  DLTensorAbi& tensor = exported->tensor.dl_tensor;
  tensor.data = data_;
  tensor.device = {kDeviceType, 0};
  tensor.ndim = 2;
  tensor.dtype = {static_cast<uint8_t>(is_float_ ? kDLFloat : kDLInt), 32, 1};
  tensor.shape = exported->shape;
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  exported->tensor.manager_ctx = exported;
  exported->tensor.deleter = [](DLManagedTensorAbi* self) { delete static_cast<Export*>(self->manager_ctx); };
  return &exported->tensor;
}

}  // namespace jaxserve::cpu
