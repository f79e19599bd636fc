// Hold points on a stream: the gate and the count are the host's, the delay stalls the device.
#pragma once

#include <cuda_runtime.h>

namespace jaxserve::cuda {

// Passes the hold point `name`. A delay armed there becomes a spin kernel on the stream, so that what was issued after
// this point runs late while the host goes on, as it would with a slow device. Under capture delays are left out: a
// stall frozen into a graph could never be disarmed.
void hold_stream(const char* name, cudaStream_t stream);

}  // namespace jaxserve::cuda
