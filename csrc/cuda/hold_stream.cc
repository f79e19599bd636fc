#include "cuda/hold_stream.h"

#include "common/hold_points.h"
#include "cuda/event_ring.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda {

void hold_stream(const char* name, cudaStream_t stream) {
  const int64_t delay_us = HoldPoints::instance().pass_without_sleep(name);
  if (delay_us > 0 && !is_capturing(stream)) launch_spin(delay_us, stream);
}

}  // namespace jaxserve::cuda
