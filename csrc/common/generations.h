// Which generation holds which slot of an event ring, and who may reuse it. Both twins build their rings on this.
//
// Protocol. The host reserves generation g before the launch that will record it; the record is issued later, on
// whatever thread runs the launch; a wait always names g. A wait issued before the record blocks until the record: it
// can never bind to an older one. Slot g % num_slots is re-reserved only when the generation it held has been recorded
// (or abandoned) and nobody waits for it any more.
//
// "Recorded" means that the record was issued. On the CPU that is the same as done; on CUDA the stream still has to get
// there, and the ring asks the event of the slot.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/faults.h"
#include "common/journal.h"
#include "common/live_objects.h"

namespace jaxserve {

class Generations {
 public:
  enum class Outcome {  // the numbers are those of the journal's ACQUIRE
    kRecorded,
    kAbandoned,
    kSuperseded,  // the slot serves a later generation already: ours was recorded or abandoned long ago
  };

  // Raises NativeError unless num_slots >= 2: with one slot a record could only be waited for by stopping.
  Generations(std::string name, int num_slots);

  // Assigns the next generation (1, 2, ...). Raises NativeError when its slot is still unrecorded or awaited.
  uint64_t reserve();

  // Marks a reserved generation as recorded and wakes its waiters. `issue(slot index)` runs under the lock, so that no
  // wait can bind between the two; if it throws, the generation stays unrecorded. Returns false, without calling
  // `issue`, when the slot serves a later generation: a late record must not touch it. Raises NativeError if the
  // generation was never reserved.
  template <typename Issue>
  bool record(uint64_t generation, Issue issue) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      require_reserved_locked(generation, "record");
      Slot& slot = slot_of(generation);
      if (slot.generation != generation) return false;
      Faults::instance().pass("record", name_.c_str());
      issue(index_of(generation));
      Journal::instance().append(JournalKind::kRelease, id_, generation);
      slot.recorded = true;
      newest_recorded_ = std::max(newest_recorded_, generation);
    }
    changed_.notify_all();
    return true;
  }
  void record(uint64_t generation) {
    record(generation, [](std::size_t) {});
  }

  // Gives up a generation whose launch failed, so that nobody waits for ever. Idempotent; no-op once recorded.
  void abandon(uint64_t generation);

  // Pins the slot for a wait that will be issued later, or that outlives this call. False: superseded, nothing pinned.
  bool announce_wait(uint64_t generation);
  // Takes back one announce_wait that returned true.
  void withdraw_wait(uint64_t generation);

  // Blocks until the generation is recorded or abandoned, then calls `bind(slot index, outcome)` under the lock.
  // `announced`: consumes one announce_wait. Raises WaitTimeout, with the generations wanted and found, after timeout_s.
  template <typename Bind>
  Outcome wait(uint64_t generation, double timeout_s, bool announced, Bind bind) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Outcome outcome = wait_locked(lock, generation, timeout_s, announced);
    Journal::instance().append(JournalKind::kAcquire, id_, generation, static_cast<uint64_t>(outcome));
    bind(index_of(generation), outcome);
    return outcome;
  }
  Outcome wait(uint64_t generation, double timeout_s, bool announced = false) {
    return wait(generation, timeout_s, announced, [](std::size_t, Outcome) {});
  }

  // Polls: recorded, abandoned or superseded. Then calls `inspect(slot index, outcome)` under the lock and returns its
  // answer.
  template <typename Inspect>
  bool is_done(uint64_t generation, Inspect inspect) {
    std::lock_guard<std::mutex> lock(mutex_);
    require_reserved_locked(generation, "is_done");
    if (!done_locked(generation)) return false;
    const Outcome outcome = outcome_locked(generation);
    if (!inspect(index_of(generation), outcome)) return false;
    Journal::instance().append(JournalKind::kAcquire, id_, generation, static_cast<uint64_t>(outcome));
    return true;
  }
  bool is_done(uint64_t generation) {
    return is_done(generation, [](std::size_t, Outcome) { return true; });
  }

  uint64_t newest_reserved();
  uint64_t newest_recorded();
  // Slots that still owe a record, and waits announced or under way: both are 0 when everything is over.
  int num_owed();
  int num_waiters();
  const std::string& name() const { return name_; }
  uint64_t id() const { return id_; }  // in the journal

 private:
  struct Slot {
    uint64_t generation = 0;
    bool recorded = true;
    bool abandoned = false;
    int num_waiters = 0;
  };

  std::size_t index_of(uint64_t generation) const { return generation % slots_.size(); }
  Slot& slot_of(uint64_t generation) { return slots_[index_of(generation)]; }
  bool done_locked(uint64_t generation);
  // Of a generation that is done.
  Outcome outcome_locked(uint64_t generation);
  void require_reserved_locked(uint64_t generation, const char* operation);
  Outcome wait_locked(std::unique_lock<std::mutex>& lock, uint64_t generation, double timeout_s, bool announced);

  LiveObject<ObjectKind::kEventRing> live_;
  const std::string name_;
  const uint64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;       // guarded by mutex_; their number never changes
  uint64_t newest_reserved_ = 0;  // guarded by mutex_
  uint64_t newest_recorded_ = 0;  // guarded by mutex_
};

}  // namespace jaxserve
