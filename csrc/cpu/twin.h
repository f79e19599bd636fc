// Everything the bindings use of the CPU twin. csrc/cuda/twin.h offers the same names.
#pragma once

#include <map>
#include <string>

#include "cpu/channel.h"
#include "cpu/event_ring.h"
#include "cpu/shared_buffer.h"
#include "cpu/stream.h"
#include "xla/ffi/api/c_api.h"

namespace jaxserve::cpu {

// XLA FFI target name -> handler.
std::map<std::string, XLA_FFI_Handler*> handlers();

}  // namespace jaxserve::cpu
