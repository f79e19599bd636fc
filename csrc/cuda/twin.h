// Everything the bindings use of the CUDA twin. csrc/cpu/twin.h offers the same names; compute_stream.h, captured steps
// and the graph functions of EventRing exist here only.
#pragma once

#include <map>
#include <string>

#include "cuda/channel.h"
#include "cuda/compute_stream.h"
#include "cuda/decoder/captured_steps.h"
#include "cuda/event_ring.h"
#include "cuda/shared_buffer.h"
#include "cuda/stream.h"
#include "xla/ffi/api/c_api.h"

namespace jaxserve::cuda {

// XLA FFI target name -> handler. To be registered for platform "CUDA": "cuda" is silently never registered.
std::map<std::string, XLA_FFI_Handler*> handlers();

}  // namespace jaxserve::cuda
