// A ring of reusable cudaEvent_t with generations. The protocol is that of common/generations.h; here "recorded" means
// that the record has been issued to a stream, and "done" that the stream has got there.
//
// Why generations: cudaStreamWaitEvent binds to the newest record already issued when it is called. Issued before the
// record it is meant for, it binds to the previous one and fences nothing. So every wait names a generation and is held
// back on the host until that generation's record has been issued.
//
// Events are created with the ring and never replaced: a captured graph keeps the handle of the event for ever.
//
// Graphs. A handler inside a replayed graph isn't called again, so it can't pick the slot of its generation. It records
// and awaits the ring's one *fixed* event instead, and the host notes after the dispatch which generation the replay
// recorded (note_graph_record). A wait for that generation then binds to the newest record of the fixed event: its own,
// or one of a later launch, which is late but never early.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "common/generations.h"

namespace jaxserve::cuda {

// Whether operations on the stream go into a graph now. Raises NativeError if the capture has been invalidated.
bool is_capturing(cudaStream_t stream);

class EventRing {
 public:
  // Raises NativeError unless num_slots >= 2, and where there is no device.
  EventRing(std::string name, int num_slots);
  ~EventRing();
  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  // Assigns the next generation (1, 2, ...). Raises NativeError when its slot is still unissued or awaited.
  uint64_t reserve() { return generations_.reserve(); }

  // Records from the host: everything that this generation stands for is over. Raises NativeError if not reserved.
  void record(uint64_t generation);

  // Issues the record to a stream that isn't being captured (raises NativeError if it is: the slot's event would be
  // frozen into the graph). Host threads that wait for the record to be issued wake up.
  void record_on(uint64_t generation, cudaStream_t stream);

  // Gives up a generation whose launch failed, so that nobody waits for ever. Idempotent; no-op once issued.
  void abandon(uint64_t generation) { generations_.abandon(generation); }

  // Pins the slot for a stream_wait that follows (`announced`). Raises NativeError if the generation wasn't reserved.
  void announce_wait(uint64_t generation) { generations_.announce_wait(generation); }

  // Blocks the host until the record has been issued (seldom: see current_launch.h), then makes the stream wait for it.
  // Returns false if the generation was abandoned: the stream then waits for nothing. Raises WaitTimeout.
  bool stream_wait(uint64_t generation, cudaStream_t stream, double timeout_s, bool announced = false);

  // Blocks the host until the device has passed the record; false if it was abandoned. Raises WaitTimeout.
  bool wait(uint64_t generation, double timeout_s);

  // Polls: the device has passed the record, or it was abandoned.
  bool is_done(uint64_t generation);

  // From now on record_on also records the fixed event, for graphs that wait for it (about 1 us each).
  void mirror_for_graphs() { mirrored_.store(true, std::memory_order_relaxed); }
  bool mirrored() const { return mirrored_.load(std::memory_order_relaxed); }
  // Records the fixed event on a stream, captured or not.
  void graph_record(cudaStream_t stream);
  // Makes the stream, captured or not, wait for the newest record of the fixed event at the time it runs.
  void graph_wait(cudaStream_t stream);
  // Called after a dispatch returned: its program recorded the fixed event for this generation.
  void note_graph_record(uint64_t generation);

  uint64_t newest_reserved() { return generations_.newest_reserved(); }
  uint64_t newest_recorded() { return generations_.newest_recorded(); }
  int num_owed() { return generations_.num_owed(); }
  int num_waiters() { return generations_.num_waiters(); }
  const std::string& name() const { return generations_.name(); }
  uint64_t id() const { return generations_.id(); }

 private:
  // What the newest record of a slot was issued to. Guarded by the lock of generations_.
  struct Binding {
    cudaEvent_t event = nullptr;   // the slot's own
    cudaEvent_t newest = nullptr;  // `event` or fixed_event_; null: nothing was ever issued
    uint64_t from_host = 0;        // the generation that the host recorded itself
  };

  // The event to wait for; null when there is nothing to wait for.
  cudaEvent_t awaited_event(const Binding& binding, uint64_t generation, Generations::Outcome outcome) const;
  void destroy_events();

  Generations generations_;
  std::vector<Binding> bindings_;
  cudaEvent_t fixed_event_ = nullptr;
  std::atomic<bool> mirrored_{false};
};

}  // namespace jaxserve::cuda
