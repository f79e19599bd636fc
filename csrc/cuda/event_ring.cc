#include "cuda/event_ring.h"

#include <chrono>
#include <thread>
#include <utility>

#include "common/faults.h"
#include "cuda/check_cuda.h"

namespace jaxserve::cuda {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(20);

}  // namespace

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  JAXSERVE_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  JAXSERVE_CHECK(status != cudaStreamCaptureStatusInvalidated, "stream capture", "the capture has been invalidated");
  return status == cudaStreamCaptureStatusActive;
}

EventRing::EventRing(std::string name, int num_slots) : generations_(std::move(name), num_slots) {
  bindings_.resize(num_slots);
  try {
    for (Binding& binding : bindings_) {
      Faults::instance().pass("allocate", "EventRing");
      JAXSERVE_CUDA_CHECK(cudaEventCreateWithFlags(&binding.event, cudaEventDisableTiming));
    }
    JAXSERVE_CUDA_CHECK(cudaEventCreateWithFlags(&fixed_event_, cudaEventDisableTiming));
  } catch (...) {
    destroy_events();  // no destructor runs for a half-made object
    throw;
  }
}

EventRing::~EventRing() { destroy_events(); }

void EventRing::destroy_events() {
  for (Binding& binding : bindings_) {
    if (binding.event != nullptr) JAXSERVE_CUDA_REPORT(cudaEventDestroy(binding.event));
  }
  if (fixed_event_ != nullptr) JAXSERVE_CUDA_REPORT(cudaEventDestroy(fixed_event_));
}

void EventRing::record(uint64_t generation) {
  generations_.record(generation, [&](std::size_t slot) { bindings_[slot].from_host = generation; });
}

void EventRing::record_on(uint64_t generation, cudaStream_t stream) {
  JAXSERVE_CHECK(!is_capturing(stream), name() + ".record_on",
                 "the stream is being captured; use the graph variant of the handler");
  generations_.record(generation, [&](std::size_t slot) {
    Binding& binding = bindings_[slot];
    JAXSERVE_CUDA_CHECK(cudaEventRecord(binding.event, stream));
    if (mirrored()) JAXSERVE_CUDA_CHECK(cudaEventRecord(fixed_event_, stream));
    binding.newest = binding.event;
  });
}

void EventRing::note_graph_record(uint64_t generation) {
  generations_.record(generation, [&](std::size_t slot) { bindings_[slot].newest = fixed_event_; });
}

void EventRing::graph_record(cudaStream_t stream) {
  // A plain record under capture would leave the event unusable outside the graph; the flag is refused outside capture.
  const unsigned flags = is_capturing(stream) ? cudaEventRecordExternal : cudaEventRecordDefault;
  JAXSERVE_CUDA_CHECK(cudaEventRecordWithFlags(fixed_event_, stream, flags));
}

void EventRing::graph_wait(cudaStream_t stream) {
  JAXSERVE_CHECK(mirrored(), name() + ".graph_wait",
                 "nothing records this ring's fixed event; call mirror_for_graphs() before the first launch");
  const unsigned flags = is_capturing(stream) ? cudaEventWaitExternal : cudaEventWaitDefault;
  JAXSERVE_CUDA_CHECK(cudaStreamWaitEvent(stream, fixed_event_, flags));
}

cudaEvent_t EventRing::awaited_event(const Binding& binding, uint64_t generation,
                                     Generations::Outcome outcome) const {
  if (outcome == Generations::Outcome::kAbandoned) return nullptr;
  if (outcome == Generations::Outcome::kRecorded && binding.from_host == generation) return nullptr;
  // Superseded: the newest record issued in this slot is ours or a later one of the same stream, never an older one.
  return binding.newest;
}

bool EventRing::stream_wait(uint64_t generation, cudaStream_t stream, double timeout_s, bool announced) {
  // The wait is issued under the lock: the slot can't be recorded for a later generation in between.
  const auto outcome =
      generations_.wait(generation, timeout_s, announced, [&](std::size_t slot, Generations::Outcome found) {
        JAXSERVE_CHECK(!is_capturing(stream), name() + ".stream_wait",
                       "the stream is being captured; use the graph variant of the handler");
        const cudaEvent_t event = awaited_event(bindings_[slot], generation, found);
        if (event != nullptr) JAXSERVE_CUDA_CHECK(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault));
      });
  return outcome != Generations::Outcome::kAbandoned;
}

bool EventRing::wait(uint64_t generation, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  // Pinned until the device is there: otherwise the slot's event could be re-recorded while we poll it.
  struct Pin {
    Generations& generations;
    const uint64_t generation;
    const bool held;
    ~Pin() {
      if (held) generations.withdraw_wait(generation);
    }
  } pin{generations_, generation, generations_.announce_wait(generation)};
  cudaEvent_t event = nullptr;
  const auto outcome = generations_.wait(
      generation, timeout_s, /*announced=*/false,
      [&](std::size_t slot, Generations::Outcome found) { event = awaited_event(bindings_[slot], generation, found); });
  // Polled, because cudaEventSynchronize knows no timeout.
  while (event != nullptr && !JAXSERVE_CUDA_QUERY(cudaEventQuery(event))) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw WaitTimeout(located(__FILE__, __LINE__, name() + ".wait",
                                "the record of generation " + std::to_string(generation) +
                                    " was issued, but the device did not reach it within " +
                                    std::to_string(timeout_s) + " s; newest issued is " +
                                    std::to_string(newest_recorded())));
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return outcome != Generations::Outcome::kAbandoned;
}

bool EventRing::is_done(uint64_t generation) {
  return generations_.is_done(generation, [&](std::size_t slot, Generations::Outcome found) {
    const cudaEvent_t event = awaited_event(bindings_[slot], generation, found);
    return event == nullptr || JAXSERVE_CUDA_QUERY(cudaEventQuery(event));
  });
}

}  // namespace jaxserve::cuda
