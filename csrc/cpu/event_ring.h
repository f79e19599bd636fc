// A ring of reusable events with generations (CPU twin: monitors; CUDA twin: cudaEvent_t). The protocol is that of
// common/generations.h; here a generation is done as soon as it is recorded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "common/generations.h"

namespace jaxserve::cpu {

class EventRing {
 public:
  // Raises NativeError unless num_slots >= 2.
  EventRing(std::string name, int num_slots) : generations_(std::move(name), num_slots) {}

  // Assigns the next generation (1, 2, ...). Raises NativeError when its slot is still unrecorded or awaited.
  uint64_t reserve() { return generations_.reserve(); }

  // Marks a reserved generation as recorded and wakes its waiters. Raises NativeError if it was not reserved.
  void record(uint64_t generation) { generations_.record(generation); }

  // Gives up a generation whose launch failed, so that nobody waits for ever. Idempotent; no-op once recorded.
  void abandon(uint64_t generation) { generations_.abandon(generation); }

  // Announces a wait that will be issued later (a queued stream operation): pins the slot until wait() consumes it.
  // False: superseded, nothing is pinned.
  bool announce_wait(uint64_t generation) { return generations_.announce_wait(generation); }
  // Takes back one announce_wait that returned true, because the wait could not be issued.
  void withdraw_wait(uint64_t generation) { generations_.withdraw_wait(generation); }

  // Blocks until the generation is recorded or abandoned; returns false if it was abandoned.
  // `announced`: this wait consumes one announce_wait. Raises WaitTimeout after timeout_s.
  bool wait(uint64_t generation, double timeout_s, bool announced = false) {
    return generations_.wait(generation, timeout_s, announced) != Generations::Outcome::kAbandoned;
  }

  // Polls: recorded or abandoned.
  bool is_done(uint64_t generation) { return generations_.is_done(generation); }

  uint64_t newest_reserved() { return generations_.newest_reserved(); }
  uint64_t newest_recorded() { return generations_.newest_recorded(); }
  int num_owed() { return generations_.num_owed(); }
  int num_waiters() { return generations_.num_waiters(); }
  const std::string& name() const { return generations_.name(); }
  uint64_t id() const { return generations_.id(); }

 private:
  Generations generations_;
};

}  // namespace jaxserve::cpu
