// The DLPack tensor exchange structures (DLPack 0.8 ABI), written from its specification.
#pragma once

#include <cstdint>

extern "C" {

enum DLDeviceTypeCode : int32_t { kDLCpu = 1, kDLCuda = 2 };
enum DLTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2 };

struct DLDeviceAbi {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataTypeAbi {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensorAbi {
  void* data;
  DLDeviceAbi device;
  int32_t ndim;
  DLDataTypeAbi dtype;
  int64_t* shape;
  int64_t* strides;  // null: compact row-major
  uint64_t byte_offset;
};

struct DLManagedTensorAbi {
  DLTensorAbi dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorAbi* self);
};

}  // extern "C"
