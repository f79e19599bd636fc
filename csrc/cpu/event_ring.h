// A ring of reusable events with generations (CPU twin: monitors; CUDA twin: cudaEvent_t).
//
// Protocol. The host reserves generation g before the launch that will record it; the record happens later, on whatever
// thread runs the launch; a wait always names g. A wait issued before the record blocks until the record: it can never
// bind to an older one. Slot g % num_slots is re-reserved only when the generation it held has been recorded (or
// abandoned) and nobody waits for it any more.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/check.h"

namespace jaxserve::cpu {

class EventRing {
 public:
  // Raises NativeError unless num_slots >= 2: with one slot a record could only be waited for by stopping.
  EventRing(std::string name, int num_slots);

  // Assigns the next generation (1, 2, ...). Raises NativeError when its slot is still unrecorded or awaited.
  uint64_t reserve();

  // Marks a reserved generation as recorded and wakes its waiters. Raises NativeError if it was not reserved.
  void record(uint64_t generation);

  // Gives up a generation whose launch failed, so that nobody waits for ever. Idempotent; no-op once recorded.
  void abandon(uint64_t generation);

  // Announces a wait that will be issued later (a queued stream operation): pins the slot until wait() consumes it.
  void announce_wait(uint64_t generation);

  // Blocks until the generation is recorded or abandoned; returns false if it was abandoned.
  // `announced`: this wait consumes one announce_wait. Raises WaitTimeout after timeout_s.
  bool wait(uint64_t generation, double timeout_s, bool announced = false);

  // Polls: recorded or abandoned.
  bool is_done(uint64_t generation);

  uint64_t newest_reserved();
  uint64_t newest_recorded();
  const std::string& name() const { return name_; }

 private:
  struct Slot {
    uint64_t generation = 0;
    bool recorded = true;
    bool abandoned = false;
    int num_waiters = 0;
  };

  Slot& slot_of(uint64_t generation) { return slots_[generation % slots_.size()]; }
  // Whether the generation is behind us: recorded, abandoned, or its slot already serves a later one.
  bool done_locked(uint64_t generation);
  void require_reserved_locked(uint64_t generation, const char* operation);

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;          // guarded by mutex_
  uint64_t newest_reserved_ = 0;     // guarded by mutex_
  uint64_t newest_recorded_ = 0;     // guarded by mutex_
};

}  // namespace jaxserve::cpu
