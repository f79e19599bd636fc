#include "common/generations.h"

namespace jaxserve {

Generations::Generations(std::string name, int num_slots)
    : name_(std::move(name)), id_(Journal::instance().named_id(name_)) {
  JAXSERVE_CHECK(num_slots >= 2, "EventRing(" + name_ + ")",
                 "a ring needs at least 2 slots, got " + std::to_string(num_slots));
  Faults::instance().pass("allocate", name_.c_str());
  slots_.resize(num_slots);
}

uint64_t Generations::reserve() {
  std::lock_guard<std::mutex> lock(mutex_);
  Faults::instance().pass("reserve", name_.c_str());
  Slot& slot = slot_of(newest_reserved_ + 1);
  JAXSERVE_CHECK(slot.recorded || slot.abandoned, name_ + ".reserve",
                 "the slot still owes the record of generation " + std::to_string(slot.generation) +
                     "; use a larger ring or keep fewer launches in flight");
  JAXSERVE_CHECK(slot.num_waiters == 0, name_ + ".reserve",
                 "generation " + std::to_string(slot.generation) + " is still awaited");
  slot = Slot{++newest_reserved_, false, false, 0};
  Journal::instance().append(JournalKind::kReserve, id_, newest_reserved_);
  return newest_reserved_;
}

void Generations::require_reserved_locked(uint64_t generation, const char* operation) {
  JAXSERVE_CHECK(generation >= 1 && generation <= newest_reserved_, name_ + "." + operation,
                 "generation " + std::to_string(generation) + " was never reserved, newest is " +
                     std::to_string(newest_reserved_));
}

void Generations::abandon(uint64_t generation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    require_reserved_locked(generation, "abandon");
    Slot& slot = slot_of(generation);
    if (slot.generation != generation || slot.recorded) return;
    Journal::instance().append(JournalKind::kAbandon, id_, generation);
    slot.abandoned = true;
  }
  changed_.notify_all();
}

bool Generations::announce_wait(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_reserved_locked(generation, "announce_wait");
  Slot& slot = slot_of(generation);
  if (slot.generation != generation) return false;
  ++slot.num_waiters;
  return true;
}

void Generations::withdraw_wait(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  --slot_of(generation).num_waiters;  // the waiter count kept the slot ours until here
}

bool Generations::done_locked(uint64_t generation) {
  const Slot& slot = slot_of(generation);
  return slot.generation > generation || slot.recorded || slot.abandoned;
}

Generations::Outcome Generations::outcome_locked(uint64_t generation) {
  const Slot& slot = slot_of(generation);
  if (slot.generation > generation) return Outcome::kSuperseded;
  return slot.recorded ? Outcome::kRecorded : Outcome::kAbandoned;
}

Generations::Outcome Generations::wait_locked(std::unique_lock<std::mutex>& lock, uint64_t generation,
                                              double timeout_s, bool announced) {
  require_reserved_locked(generation, "wait");
  Slot& slot = slot_of(generation);
  if (slot.generation > generation) return Outcome::kSuperseded;
  if (!announced) ++slot.num_waiters;
  const bool done =
      changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return done_locked(generation); });
  --slot.num_waiters;  // the waiter count kept the slot ours until here
  Faults::instance().pass("wait", name_.c_str());
  if (!done) {
    throw WaitTimeout(located(__FILE__, __LINE__, name_ + ".wait",
                              "generation " + std::to_string(generation) + " was not recorded within " +
                                  std::to_string(timeout_s) + " s; newest recorded is " +
                                  std::to_string(newest_recorded_) + ", newest reserved is " +
                                  std::to_string(newest_reserved_)));
  }
  return outcome_locked(generation);
}

uint64_t Generations::newest_reserved() {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_reserved_;
}

int Generations::num_owed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.recorded && !slot.abandoned; }));
}

int Generations::num_waiters() {
  std::lock_guard<std::mutex> lock(mutex_);
  int num_waiters = 0;
  for (const Slot& slot : slots_) num_waiters += slot.num_waiters;
  return num_waiters;
}

uint64_t Generations::newest_recorded() {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_recorded_;
}

}  // namespace jaxserve
