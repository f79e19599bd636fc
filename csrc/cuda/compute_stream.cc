#include "cuda/compute_stream.h"

#include <atomic>

namespace jaxserve::cuda {
namespace {

std::atomic<cudaStream_t> known_stream{nullptr};

cudaStream_t required_stream(const char* operation) {
  const cudaStream_t stream = known_stream.load();
  JAXSERVE_CHECK(stream != nullptr, operation,
                 "XLA's compute stream is not known yet; run a program with the target jaxserve_compute_stream once");
  return stream;
}

}  // namespace

cudaStream_t compute_stream() { return known_stream.load(); }

void set_compute_stream(cudaStream_t stream) { known_stream.store(stream); }

void record_on_compute_stream(const std::shared_ptr<EventRing>& ring, uint64_t generation) {
  ring->record_on(generation, required_stream("record_on_compute_stream"));
}

bool wait_on_compute_stream(const std::shared_ptr<EventRing>& ring, uint64_t generation, double timeout_s) {
  return ring->stream_wait(generation, required_stream("wait_on_compute_stream"), timeout_s);
}

}  // namespace jaxserve::cuda
