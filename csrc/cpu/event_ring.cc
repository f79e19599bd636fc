#include "cpu/event_ring.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace jaxserve::cpu {

EventRing::EventRing(std::string name, int num_slots) : name_(std::move(name)) {
  JAXSERVE_CHECK(num_slots >= 2, "EventRing(" + name_ + ")",
                 "a ring needs at least 2 slots, got " + std::to_string(num_slots));
  slots_.resize(num_slots);
}

uint64_t EventRing::reserve() {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slot_of(newest_reserved_ + 1);
  JAXSERVE_CHECK(slot.recorded || slot.abandoned, name_ + ".reserve",
                 "the slot still owes the record of generation " + std::to_string(slot.generation) +
                     "; use a larger ring or keep fewer launches in flight");
  JAXSERVE_CHECK(slot.num_waiters == 0, name_ + ".reserve",
                 "generation " + std::to_string(slot.generation) + " is still awaited");
  slot = Slot{++newest_reserved_, false, false, 0};
  return newest_reserved_;
}

void EventRing::require_reserved_locked(uint64_t generation, const char* operation) {
  JAXSERVE_CHECK(generation >= 1 && generation <= newest_reserved_, name_ + "." + operation,
                 "generation " + std::to_string(generation) + " was never reserved, newest is " +
                     std::to_string(newest_reserved_));
}

void EventRing::record(uint64_t generation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    require_reserved_locked(generation, "record");
    Slot& slot = slot_of(generation);
    if (slot.generation != generation) return;  // abandoned long ago and reused: a late record must not touch it
    slot.recorded = true;
    newest_recorded_ = std::max(newest_recorded_, generation);
  }
  changed_.notify_all();
}

void EventRing::abandon(uint64_t generation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    require_reserved_locked(generation, "abandon");
    Slot& slot = slot_of(generation);
    if (slot.generation != generation || slot.recorded) return;
    slot.abandoned = true;
  }
  changed_.notify_all();
}

void EventRing::announce_wait(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_reserved_locked(generation, "announce_wait");
  Slot& slot = slot_of(generation);
  if (slot.generation == generation) ++slot.num_waiters;
}

bool EventRing::done_locked(uint64_t generation) {
  const Slot& slot = slot_of(generation);
  return slot.generation > generation || slot.recorded || slot.abandoned;
}

bool EventRing::wait(uint64_t generation, double timeout_s, bool announced) {
  std::unique_lock<std::mutex> lock(mutex_);
  require_reserved_locked(generation, "wait");
  Slot& slot = slot_of(generation);
  // A slot that serves a later generation was released by record or abandon; nothing is left to wait for.
  if (slot.generation > generation) return true;
  if (!announced) ++slot.num_waiters;
  const bool done = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                      [&] { return done_locked(generation); });
  --slot.num_waiters;  // the waiter count kept the slot ours until here
  if (!done) {
    throw WaitTimeout(located(__FILE__, __LINE__, name_ + ".wait",
                              "generation " + std::to_string(generation) + " was not recorded within " +
                                  std::to_string(timeout_s) + " s; newest recorded is " +
                                  std::to_string(newest_recorded_) + ", newest reserved is " +
                                  std::to_string(newest_reserved_)));
  }
  return slot.recorded;
}

bool EventRing::is_done(uint64_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_reserved_locked(generation, "is_done");
  return done_locked(generation);
}

uint64_t EventRing::newest_reserved() {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_reserved_;
}

uint64_t EventRing::newest_recorded() {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_recorded_;
}

}  // namespace jaxserve::cpu
