// XLA's compute stream, so that the host may record and wait on it around a step.
//
// This is outside XLA's contract but matches its sources: with one device all executions enqueue on one stream, on the
// thread that dispatches. A record issued here right after a jitted call returned lies behind that call's kernels; a
// wait issued here before the next call holds that call back.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "cuda/event_ring.h"

namespace jaxserve::cuda {

// The stream that the handler jaxserve_compute_stream saw; null before a program that holds it has run.
cudaStream_t compute_stream();
// Called by the handler.
void set_compute_stream(cudaStream_t stream);

// Both raise NativeError before the stream is known.
void record_on_compute_stream(const std::shared_ptr<EventRing>& ring, uint64_t generation);
// Returns false if the generation was abandoned. Raises WaitTimeout if its record isn't issued within timeout_s.
bool wait_on_compute_stream(const std::shared_ptr<EventRing>& ring, uint64_t generation, double timeout_s);

}  // namespace jaxserve::cuda
