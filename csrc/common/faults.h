// Fault injection: a test names a kind of operation and the one of them that fails.
//
// Kinds and where they are: "allocate" (memory, threads, device events, a queued operation), "reserve", "record" and
// "wait" of a generation, "copy" of rows (by the stream, and by a snapshot), "launch" (a program, ahead of its
// dispatch), "dispatched" (the same, behind it) and "collect". An injected failure takes the place of the operation and
// looks like a failure of it.
//
// Like hold points they cost one relaxed atomic load while nothing is armed, and stay in release builds.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "common/check.h"

namespace jaxserve {

// What an operation raises that was told to fail.
class InjectedFault : public NativeError {
 public:
  using NativeError::NativeError;
};

class Faults {
 public:
  static Faults& instance();

  // From now on the n-th operation of `kind` fails (1: the next one), and the `times - 1` behind it. n = 0: none fails,
  // they are only counted.
  void fail_nth(const std::string& kind, int64_t n, int64_t times = 1);
  // Counts nothing and fails nothing any more.
  void clear();
  // Operations of `kind` since fail_nth, and how many of them were made to fail.
  int64_t passes(const std::string& kind);
  int64_t failures(const std::string& kind);

  // Called by the code under test where the operation begins. `place` names it in the message. Raises InjectedFault.
  void pass(const char* kind, const char* place) {
    if (armed_.load(std::memory_order_relaxed)) pass_armed(kind, place);
  }

 private:
  struct Plan {
    int64_t first = 0;
    int64_t times = 0;
    int64_t passes = 0;
    int64_t failures = 0;
  };

  void pass_armed(const char* kind, const char* place);

  std::atomic<bool> armed_{false};
  std::mutex mutex_;
  std::map<std::string, Plan> plans_;  // guarded by mutex_
};

}  // namespace jaxserve
