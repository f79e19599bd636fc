// A table of 4-byte elements that the scheduler rewrites in place while programs read it.
//
// Only the schedule stream writes it after construction; only snapshot handlers (or programs that declare a later read
// end) read it. The memory stays at one address for the life of the buffer and of every array that imported it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/check.h"
#include "common/dlpack.h"
#include "common/live_objects.h"

namespace jaxserve::cpu {

constexpr std::size_t kElementBytes = 4;
constexpr std::size_t kAlignment = 64;  // what the CPU client needs to import memory without a copy

class SharedBuffer : public std::enable_shared_from_this<SharedBuffer> {
 public:
  // `is_float`: float32, otherwise int32. Zero-filled. Raises NativeError on bad shapes or when memory is short.
  // `name` is for the journal.
  SharedBuffer(int64_t num_rows, int64_t num_columns, bool is_float, const std::string& name = "");
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  int64_t num_rows() const { return num_rows_; }
  int64_t num_columns() const { return num_columns_; }
  bool is_float() const { return is_float_; }
  uint64_t id() const { return id_; }  // in the journal
  std::byte* data() const { return data_; }
  std::byte* row(int64_t index) const { return data_ + index * num_columns_ * kElementBytes; }

  // A DLPack export that keeps this buffer alive until its deleter runs.
  DLManagedTensorAbi* to_dlpack();
  static constexpr int32_t kDeviceType = kDLCpu;

 private:
  LiveObject<ObjectKind::kSharedBuffer> live_;
  const int64_t num_rows_;
  const int64_t num_columns_;
  const bool is_float_;
  const uint64_t id_;
  std::byte* data_ = nullptr;
};

}  // namespace jaxserve::cpu
